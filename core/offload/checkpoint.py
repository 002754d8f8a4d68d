"""A drop-in for ``torch.utils.checkpoint.checkpoint`` whose inputs wait in host memory.

Non-reentrant checkpointing saves exactly the tensor arguments of the region through autograd, so saved-tensor hooks
around the call see those and nothing else; what the region itself saves is dropped and recomputed (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.tail import holding

_KEYWORDS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@functools.cache
def _common_store() -> HostStore:
    return HostStore()


def offload_checkpoint(
    function: Callable[..., Any], *args: Any, store: HostStore | None = None, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """Run ``function(*args, **kwargs)``, keep only its tensor arguments, on the host, and recompute it in backward.

    Args:
        function: the region. RNG state and autocast are replayed.
        store: where the arguments wait and are counted; one ``HostStore()`` for all calls that give none.
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
    store = store or _common_store()
    with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
        return checkpoint(_holding_nothing, function, *args, use_reentrant=False, **kwargs)


def _holding_nothing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In forward and in recompute alike, or they would not save the same."""
    with holding(False):
        return function(*args, **kwargs)


@contextlib.contextmanager
def offload_saved_tensors(store: HostStore | None = None) -> Iterator[HostStore]:
    """Send all that autograd saves inside to the host, and fetch it in backward: memory for no recompute.

    What is a parameter, small, or no plain tensor stays on the device; what several operations save is sent once.
    Backward may run outside.

    Args:
        store: where the tensors wait and are counted; a fresh ``HostStore(True)`` if not given. Give the same one each
            step, so that its host memory is used again.
    """
    store = store or HostStore(True)
    with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
        yield store


class LayerCheckpoint:
    """What stands in for a layer's ``_gradient_checkpointing_func``; keeps the user's checkpointing keywords.

    Args:
        store: where inputs wait.
        keywords: of ``torch.utils.checkpoint.checkpoint``.
        budget: says which layers run without a checkpoint; ``None``: none of them.
        index: of the layer in the model, from the front.
    """

    def __init__(
        self, store: HostStore, keywords: dict[str, Any], budget: MemoryBudget | None = None, index: int = 0
    ) -> None:
        self.store, self.keywords, self.budget, self.index = store, keywords, budget, index

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)``, checkpointed or not."""
        budget, plan = self.budget, self.budget.plan if self.budget is not None else None
        self.store.moving = None if plan is None else plan.inputs_on_host
        if self.index == 0 and args and isinstance(args[0], torch.Tensor):
            self.store.reserve(args[0], self.store.layers if plan is None else plan.first_kept)
        if budget is None:
            return offload_checkpoint(function, *args, store=self.store, **self.keywords, **kwargs)
        if budget.keeps(self.index):
            with holding(budget.holds(self.index)):
                out = function(*args, **{name: value for name, value in kwargs.items() if name not in _KEYWORDS})
        else:
            if budget.wants_measure(self.index):
                function = self._measuring(function, args)
            out = offload_checkpoint(function, *args, store=self.store, **self.keywords, **kwargs)
        if self.index == budget.layers - 1:
            last = out[0] if isinstance(out, tuple) else out
            if isinstance(last, torch.Tensor) and last.requires_grad:
                last.register_hook(budget.backward_started)
        return out

    def _measuring(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any]:
        """``function`` that tells the budget what it leaves on the device when it runs the second time."""
        budget, index = self.budget, self.index
        assert budget is not None
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        tokens, device = budget.tokens, tensors[0].device if tensors else None
        input_bytes = sum(each.numel() * each.element_size() for each in tensors)
        del tensors
        runs = 0

        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs != 2 or device is None:
                return function(*args, **kwargs)
            before = budget.memory.allocated(device)
            try:
                return function(*args, **kwargs)
            finally:  # a recompute ends early, by an exception
                budget.measured(index, tokens, max(budget.memory.allocated(device) - before, 0), input_bytes)

        return measured
