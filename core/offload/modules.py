"""Offloaded checkpointing of any blocks, by their names: UNets, vision and audio towers, state space models."""

from __future__ import annotations

import re
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from unsloth_plugins.core.errors import ConfigError, ConflictError
from unsloth_plugins.core.offload.checkpoint import offload_checkpoint
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.patches import PatchSet

_STATE = "_unsloth_checkpoint"


class CheckpointedModules:
    """What ``checkpoint_modules`` did, and the way back.

    Attributes:
        names: of the blocks.
        store: where their inputs wait and are counted.
    """

    def __init__(self, names: tuple[str, ...], store: HostStore, patches: PatchSet) -> None:
        self.names, self.store, self._patches = names, store, patches

    def undo(self) -> None:
        """Give the blocks their own forwards back."""
        self._patches.undo()


def checkpoint_modules(model: nn.Module, pattern: str, store: HostStore | None = None) -> CheckpointedModules:
    r"""Checkpoint each block whose name matches, and keep its input tensors, positional or not, in host memory.

    Only in training mode and with gradients; otherwise the blocks run as they did.

    Args:
        model: any module; only the matching instances inside it are changed.
        pattern: a regular expression for whole names as in ``named_modules``, such as ``r"(down|up)_blocks\.\d+"``.
        store: where the inputs wait; a fresh ``HostStore()`` if not given.

    Raises:
        ConfigError: nothing matches, or one match lies inside another.
        ConflictError: a block is checkpointed already.
    """
    found = {name: module for name, module in model.named_modules() if name and re.fullmatch(pattern, name)}
    if not found:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            expected=f"a pattern that matches whole names of modules, such as {', '.join(names[:4]) or 'none here'}",
            got=repr(pattern),
            remedy="Print `[name for name, _ in model.named_modules()]` and match the repeated blocks.",
        )
    for name, module in found.items():
        outer = next((other for other in found if name.startswith(other + ".")), None)
        if outer is not None:
            raise ConfigError(
                expected="blocks that lie side by side",
                got=f"{name} inside {outer}",
                remedy=r"Match one level only: `\d+` for a number, not `.*`.",
            )
        if getattr(module, "gradient_checkpointing", False) is True or _STATE in vars(module):
            raise ConflictError(
                expected="blocks that nobody checkpoints yet",
                got=f"{name}, which is checkpointed",
                remedy="Switch the model's own gradient checkpointing off, or undo the first call.",
            )
    store, patches = store or HostStore(), PatchSet()
    for module in found.values():
        patches.set(module, _STATE, (store, vars(module).get("forward")))
        patches.set(module, "forward", MethodType(_forward, module))
    return CheckpointedModules(tuple(found), store, patches)


def _forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    store, before = vars(self).get(_STATE, (None, None))
    forward = before or MethodType(type(self).forward, self)
    if store is None or not (self.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    leaves, layout = tree_flatten((args, kwargs))

    def region(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, layout)
        return forward(*args, **kwargs)

    return offload_checkpoint(region, *leaves, store=store)
