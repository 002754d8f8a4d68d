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
    """How ``y`` came out of a norm; ``None`` when it did not, or when it or the norm's input was changed since."""
    note = _NOTES.get(y)
    if note is None:
        return None
    source, weight_N, rule, versions = note
    x = source()
    if x is None or versions != (x._version, y._version):
        return None
    return Normed(x, weight_N, rule)


def may_pass_by(y: torch.Tensor, normed: Normed) -> bool:
    """Whether a function of ``y`` may send its gradient to the norm's input itself: nobody waits for that of ``y``."""
    watched = bool(y._backward_hooks) or (y.requires_grad and y.retains_grad)
    return not watched and not normed.weight_N.requires_grad
