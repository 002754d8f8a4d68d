"""The end of a checkpointed region that recomputes inside its own backward, without a third forward.

A region that ends with such a tail would run it three times: forward, the checkpoint's recompute, and the tail's own.
torch ends a recompute early, once everything that was saved in the region is there again. So the tail's inputs are
saved by a function just *before* the tail, and the tail saves nothing: the recompute stops at its door. Where somebody
else saves something behind the tail, it is recomputed, rightly.

Source: ``torch.utils.checkpoint`` with ``early_stop`` (non-reentrant checkpointing).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

_HOLDS: ContextVar[bool | None] = ContextVar("holds", default=None)
_TELLS: ContextVar[Callable[[], None] | None] = ContextVar("tells", default=None)


@contextlib.contextmanager
def holding(value: bool) -> Iterator[None]:
    """Inside, tails outside of any checkpoint may keep what they would otherwise compute again in backward."""
    before = _HOLDS.set(value)
    try:
        yield
    finally:
        _HOLDS.reset(before)


def holds(*, otherwise: bool = False) -> bool:
    """Whether memory was found for what a tail could keep; ``otherwise`` where nobody checkpoints or looked for it."""
    found = _HOLDS.get()
    return otherwise if found is None else found


@contextlib.contextmanager
def telling(function: Callable[[], None]) -> Iterator[None]:
    """Of tails that run inside, ``function`` is called when their backward is over and its memory gone."""
    before = _TELLS.set(function)
    try:
        yield
    finally:
        _TELLS.reset(before)


class Kept:
    """The tensors given to ``keep``, to be read in the tail's backward; reading may start the recompute."""

    __slots__ = ("_node", "_tell")

    def __init__(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._node: Any = None
        self._tell = _TELLS.get()
        source = next((tensor for tensor in tensors if tensor.grad_fn is not None), None)
        if self._tell is not None and source is not None:
            # Its gradient is whole: what the tail gave was added to that of the residual, and freed.
            source.register_hook(functools.partial(_told, self._tell))
            self._tell = None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What was kept, in order."""
        return self._node.saved_tensors  # type: ignore[no-any-return]

    def over(self) -> None:
        """To be called at the end of the tail's backward."""
        if self._tell is not None:
            self._tell()


def _told(tell: Callable[[], None], grad: torch.Tensor) -> None:
    tell()


class _Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kept: Kept, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        kept._node = ctx  # one way only: the node must not know `kept`, or neither would be freed
        out = tuple(tensor.view_as(tensor) for tensor in tensors)
        ctx.mark_non_differentiable(*(tensor for tensor in out if not tensor.is_floating_point()))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


def keep(*tensors: torch.Tensor) -> tuple[Kept, tuple[torch.Tensor, ...]]:
    """Save ``tensors`` for the backward of a custom function that takes them next and saves nothing itself.

    Args:
        tensors: all that the tail's backward needs. At least one requires a gradient.

    Returns:
        the handle to read them by, and the tensors to pass on (views, with the gradient attached).
    """
    kept = Kept(tensors)
    return kept, _Keep.apply(kept, *tensors)
