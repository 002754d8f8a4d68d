"""What came out of a norm, and how to make it again: so that who needs it in backward saves nothing for it.

The norm saves its own input anyway. A function that takes the output may save that input (the same memory) in its
place, and normalise once more in backward, which is a pass over memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Normed:
    """How a tensor was made: ``rule(x, weight)``, row by row.

    Attributes:
        x: float [..., N], the norm's input, with its graph.
        weight_N: float [N].
        rule: gives the normalised rows, of all or of some.
    """

    x: torch.Tensor
    weight_N: torch.Tensor
    rule: Rule


# Output -> input, weight, rule and the versions of input and output. Neither tensor lives longer for it.
_NOTES = WeakTensorKeyDictionary()


def note_normed(y: torch.Tensor, x: torch.Tensor, weight_N: torch.Tensor, rule: Rule) -> None:
    """Remember that ``y`` is ``rule(x, weight_N)``, where backward could follow."""
    if torch.is_grad_enabled() and not (x.is_inference() or y.is_inference()):
        _NOTES[y] = (TensorWeakRef(x), weight_N, rule, (x._version, y._version))


def normed_of(y: torch.Tensor) -> Normed | None:
    """How ``y``, or the tensor that it shows in another shape with the same rows, came out of a norm; ``None`` when it
    did not, or when it or the norm's input was changed since. The norm's input is returned in the shape of ``y``."""
    note = _NOTES.get(y)
    if note is None and (whole := _reshaped(y)) is not None:
        note = _NOTES.get(whole)
    if note is None:
        return None
    source, weight_N, rule, versions = note
    x = source()
    if x is None or versions != (x._version, y._version):
        return None
    if x.shape != y.shape:
        if not x.is_contiguous():
            return None
        x = x.view(y.shape)
    return Normed(x, weight_N, rule)


def _reshaped(y: torch.Tensor) -> torch.Tensor | None:
    """What ``y`` is a view of, where it has the same rows in the same order."""
    whole = y._base
    if whole is None or whole.shape[-1:] != y.shape[-1:] or whole.numel() != y.numel():
        return None
    return whole if whole.is_contiguous() and y.is_contiguous() else None


def may_pass_by(y: torch.Tensor, normed: Normed) -> bool:
    """Whether a function of ``y`` may send its gradient to the norm's input itself: nobody waits for that of ``y``."""
    each = [tensor for tensor in (y, y._base) if tensor is not None]
    watched = any(bool(tensor._backward_hooks) or (tensor.requires_grad and tensor.retains_grad) for tensor in each)
    return not watched and not normed.weight_N.requires_grad
