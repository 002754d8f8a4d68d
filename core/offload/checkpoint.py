"""A drop-in for ``torch.utils.checkpoint.checkpoint`` whose inputs wait in host memory.

Non-reentrant checkpointing saves exactly the tensor arguments of the region through autograd, so saved-tensor hooks
around the call see those and nothing else; what the region itself saves is dropped and recomputed (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload.host import HostStore


def offload_checkpoint(
    function: Callable[..., Any], *args: Any, store: HostStore | None = None, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """Run ``function(*args, **kwargs)``, keep only its tensor arguments, on the host, and recompute it in backward.

    Args:
        function: the region. RNG state and autocast are replayed.
        store: where the arguments wait and are counted; a fresh ``HostStore()`` if not given.
        use_reentrant: only ``False`` is served; see the error.
        kwargs: keyword arguments of ``function``, and ``preserve_rng_state``, ``context_fn``, ``determinism_check``,
            ``debug``, ``early_stop`` of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        UnsupportedError: ``use_reentrant=True`` was asked for.
    """
    if use_reentrant:
        raise UnsupportedError(
            expected="non-reentrant checkpointing",
            got="use_reentrant=True",
            remedy="Set gradient_checkpointing_kwargs={'use_reentrant': False}, or leave it out.",
        )
    store = store or HostStore()
    with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
