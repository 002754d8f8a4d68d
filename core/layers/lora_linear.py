"""Linear layers with LoRA that share one input, as one function: the input is saved once and read once for all A.

For projection p with frozen base W_p, and adapters stacked to A [R, I]:

    z = x A^T,    y_p = x W_p^T + b_p + sum_a s_a z_a B_a^T

    dz_a = s_a dy_p B_a,    dB_a = s_a dy_p^T z_a,    dA = dz^T x,    dx = sum_p dy_p W_p + dz A

With dropout d_a of an adapter's input, z_a = d_a(x) A_a^T and dA_a = dz_a^T d_a(x), and dx gets d_a(dz_a A_a). Each d_a
is made from a seed wherever it is needed, some rows at a time.

LoRA's terms are accumulated by GEMMs into what the base's GEMM wrote, so nothing passes over an output by itself. A
quantised base is decoded for its GEMM and freed; the caching allocator gives the next one the same memory. Of an x that
came out of a norm, the norm's input is saved in its place, and x made again for dA.

Shape suffixes: N tokens, I inputs, O outputs, R ranks of all adapters, r rank of one. Source: Hu et al. 2021, "LoRA",
equation 3.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.layers.dropout import draw_seeds, dropped
from unsloth_plugins.core.layers.normed import Normed, normed_of

ROWS = 8192
"""Tokens that dropout is made for at a time, so that what it gives takes little memory."""


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """One adapter of one projection.

    Attributes:
        a_rI, b_Or: any floating dtype.
        scaling: s.
        dropout: probability that an element of x is zero for this adapter; 0 outside training.
        seed: of the mask; drawn by the function that computes.
    """

    a_rI: torch.Tensor
    b_Or: torch.Tensor
    scaling: float
    dropout: float = 0.0
    seed: int = 0


@dataclass(frozen=True, eq=False)
class LoraProjection:
    """A frozen base and its adapters.

    Attributes:
        weight: gives W [O, I] in the dtype asked for; called in forward and again in backward.
        outputs: O.
        bias_O: float [O] or ``None``.
        terms: the active adapters.
    """

    weight: Callable[[torch.dtype], torch.Tensor]
    outputs: int
    bias_O: torch.Tensor | None
    terms: Sequence[LoraTerm]


def _product(left: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """left right in ``dtype``, accumulated and rounded once where the device can."""
    if left.is_cuda and dtype == torch.float32 and left.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left, right, out_dtype=torch.float32)
    return (left @ right).to(dtype)


class LinearPass:
    """One forward or backward through projections of one input, in one tile of tokens or in several.

    Args:
        projections: bases and adapters, as they are in this pass.
        dtype: of all products.
        several: keep a weight that was decoded for the next tile.

    Attributes:
        tensors: A and B of every term, then the biases: what gradients are for, in this order.
    """

    def __init__(self, projections: Sequence[LoraProjection], dtype: torch.dtype, *, several: bool = False) -> None:
        self.projections, self.dtype, self.several = projections, dtype, several
        self.tensors = tensors_of(projections)
        terms = [term for each in projections for term in each.terms]
        stack = [term.a_rI.to(dtype) for term in terms]
        self._a_RI = (stack[0] if len(stack) == 1 else torch.cat(stack)) if stack else None
        self._parts = _parts(terms) if any(term.dropout for term in terms) else None
        self._weights: dict[int, torch.Tensor] = {}
        self._sums: list[torch.Tensor | None] = [None] * len(self.tensors)
        self._da_RI: torch.Tensor | None = None

    def _weight(self, place: int) -> torch.Tensor:
        found = self._weights.get(place)
        if found is None:
            found = self.projections[place].weight(self.dtype)
            if self.several:
                self._weights[place] = found
        return found

    def inner(self, x_NI: torch.Tensor, first: int = 0) -> torch.Tensor | None:
        """z [N, R]; ``None`` without adapters. ``first``: number of the first of these tokens, here as below."""
        if self._a_RI is None:
            return None
        if self._parts is None:
            return x_NI @ self._a_RI.T
        z_NR = x_NI.new_empty((x_NI.shape[0], self._a_RI.shape[0]))
        for term, part in self._parts:
            for rows in _stretches(x_NI.shape[0]):
                z_NR[rows, part] = _dropped(term, x_NI[rows], first + rows.start) @ self._a_RI[part].T
        return z_NR

    def outputs(self, x_NI: torch.Tensor, z_NR: torch.Tensor | None) -> list[torch.Tensor]:
        """y [N, O] of every projection."""
        out, start = [], 0
        for place, each in enumerate(self.projections):
            weight_OI = self._weight(place)
            if each.bias_O is None:
                y_NO = x_NI @ weight_OI.T
            else:
                y_NO = torch.addmm(each.bias_O.to(self.dtype), x_NI, weight_OI.T)
            del weight_OI
            for term in each.terms:
                assert z_NR is not None
                stop = start + term.a_rI.shape[0]
                y_NO.addmm_(z_NR[:, start:stop], term.b_Or.to(self.dtype).T, alpha=term.scaling)
                start = stop
            out.append(y_NO)
        return out

    def input_gradients(
        self, grads: Sequence[torch.Tensor | None], *, want_x: bool, first: int = 0
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """dx [N, I] where wanted, and dz [N, R]. ``grads``: dy [N, O] of every projection, or ``None`` for zero."""
        dx_NI = dz_NR = None
        rows = next((dy_NO.shape[0] for dy_NO in grads if dy_NO is not None), 0)
        if self._a_RI is not None:
            dz_NR = self._a_RI.new_zeros((rows, self._a_RI.shape[0]))
        start = 0
        for place, (each, dy_NO) in enumerate(zip(self.projections, grads, strict=True)):
            for term in each.terms:
                part = slice(start, start + term.a_rI.shape[0])
                if dy_NO is not None and dz_NR is not None:
                    dz_NR[:, part].addmm_(dy_NO, term.b_Or.to(self.dtype), beta=0, alpha=term.scaling)
                start = part.stop
            if dy_NO is not None and want_x:
                weight_OI = self._weight(place)
                dx_NI = dy_NO @ weight_OI if dx_NI is None else dx_NI.addmm_(dy_NO, weight_OI)
                del weight_OI
        if dx_NI is not None and dz_NR is not None and self._a_RI is not None:
            if self._parts is None:
                dx_NI.addmm_(dz_NR, self._a_RI)
            for term, part in self._parts or ():
                for at in _stretches(dx_NI.shape[0]):
                    _dropped(term, dz_NR[at, part] @ self._a_RI[part], first + at.start, dx_NI[at])
        return dx_NI, dz_NR

    def add_gradients(
        self,
        x_NI: torch.Tensor,
        z_NR: torch.Tensor | None,
        dz_NR: torch.Tensor | None,
        grads: Sequence[torch.Tensor | None],
        wanted: Sequence[bool],
        first: int = 0,
    ) -> None:
        """Add what these tokens give to the gradients of ``tensors``, where ``wanted``."""
        count = sum(len(each.terms) for each in self.projections)
        start = number = 0
        for place, (each, dy_NO) in enumerate(zip(self.projections, grads, strict=True)):
            for term in each.terms:
                stop = start + term.a_rI.shape[0]
                if dy_NO is not None and z_NR is not None and wanted[2 * number + 1]:
                    wide = torch.promote_types(term.b_Or.dtype, torch.float32)
                    self._add(2 * number + 1, _product(dy_NO.T, z_NR[:, start:stop], wide).mul_(term.scaling))
                start, number = stop, number + 1
            if dy_NO is not None and wanted[2 * count + place]:
                self._add(2 * count + place, dy_NO.sum(0, dtype=torch.promote_types(self.dtype, torch.float32)))
        if dz_NR is not None and any(wanted[: 2 * count : 2]):
            self._add_a(x_NI, dz_NR, first)

    def _add_a(self, x_NI: torch.Tensor, dz_NR: torch.Tensor, first: int) -> None:
        wide = torch.promote_types(self.dtype, torch.float32)
        if self._parts is None:
            da_RI = _product(dz_NR.T, x_NI, wide)
            self._da_RI = da_RI if self._da_RI is None else self._da_RI.add_(da_RI)
            return
        if self._da_RI is None:
            self._da_RI = x_NI.new_zeros((dz_NR.shape[1], x_NI.shape[1]), dtype=wide)
        for term, part in self._parts:
            for rows in _stretches(x_NI.shape[0]):
                x_MI = _dropped(term, x_NI[rows], first + rows.start)
                self._da_RI[part] += _product(dz_NR[rows, part].T, x_MI, wide)

    def _add(self, slot: int, value: torch.Tensor) -> None:
        before = self._sums[slot]
        self._sums[slot] = value if before is None else before.add_(value)

    def gradients(self, wanted: Sequence[bool]) -> list[torch.Tensor | None]:
        """Of ``tensors``, in their dtypes; ``None`` where not wanted or nothing came."""
        out = [
            None if total is None or tensor is None else total.to(tensor.dtype)
            for total, tensor in zip(self._sums, self.tensors, strict=True)
        ]
        if self._da_RI is not None:
            factors = [term.a_rI for each in self.projections for term in each.terms]
            for n, part in enumerate(self._da_RI.split([a.shape[0] for a in factors])):
                out[2 * n] = part.to(factors[n].dtype) if wanted[2 * n] else None
        return out


def _parts(terms: Sequence[LoraTerm]) -> list[tuple[LoraTerm, slice]]:
    """Each term with its place among the ranks of all."""
    ends = list(itertools.accumulate(term.a_rI.shape[0] for term in terms))
    return [(term, slice(end - term.a_rI.shape[0], end)) for term, end in zip(terms, ends, strict=True)]


def _stretches(count: int) -> list[slice]:
    return [slice(start, min(start + ROWS, count)) for start in range(0, count, ROWS)]


def _dropped(term: LoraTerm, x_MI: torch.Tensor, first: int, onto_MI: torch.Tensor | None = None) -> torch.Tensor:
    """d(x) of one adapter, or ``onto_MI`` with that added in place."""
    if term.dropout:
        return dropped(x_MI, term.dropout, term.seed, first=first, onto_MI=onto_MI)
    return x_MI if onto_MI is None else onto_MI.add_(x_MI)


def with_seeds(projections: Sequence[LoraProjection]) -> tuple[LoraProjection, ...]:
    """The projections with new masks, where there is dropout."""
    count = sum(bool(term.dropout) for each in projections for term in each.terms)
    if not count:
        return tuple(projections)
    seeds = iter(draw_seeds(count))
    return tuple(
        replace(each, terms=[replace(t, seed=next(seeds)) if t.dropout else t for t in each.terms])
        for each in projections
    )


def tensors_of(projections: Sequence[LoraProjection]) -> list[torch.Tensor | None]:
    """A and B of every term, then the biases."""
    factors = [tensor for each in projections for term in each.terms for tensor in (term.a_rI, term.b_Or)]
    return [*factors, *(each.bias_O for each in projections)]


def with_tensors(
    projections: Sequence[LoraProjection], tensors: Sequence[torch.Tensor | None]
) -> tuple[LoraProjection, ...]:
    """The projections with other tensors in the order of ``tensors_of``, such as those that autograd kept."""
    out, number = [], 0
    biases = tensors[len(tensors) - len(projections) :]
    for each, bias_O in zip(projections, biases, strict=True):
        terms = []
        for term in each.terms:
            a_rI, b_Or = tensors[2 * number], tensors[2 * number + 1]
            assert a_rI is not None and b_Or is not None
            terms.append(replace(term, a_rI=a_rI, b_Or=b_Or))
            number += 1
        out.append(replace(each, bias_O=bias_O, terms=terms))
    return tuple(out)


class _LoraLinears(torch.autograd.Function):
    """Inputs: x, how it was normalised, the projections, then their tensors, for their gradients."""

    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, normed: Normed | None, projections: Sequence[LoraProjection], *tensors: Any
    ) -> Any:
        steps = LinearPass(projections, x_NI.dtype)
        z_NR = steps.inner(x_NI)
        ctx.rule = None if normed is None else normed.rule
        source = (x_NI, None) if normed is None else (normed.x.detach(), normed.weight_N)
        ctx.save_for_backward(*source, z_NR, *tensors)
        ctx.set_materialize_grads(False)
        ctx.projections = projections
        return tuple(steps.outputs(x_NI, z_NR))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        x, weight_N, z_NR, *tensors = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        steps = LinearPass(with_tensors(ctx.projections, tensors), z_NR.dtype)
        dx_NI, dz_NR = steps.input_gradients(grads, want_x=ctx.needs_input_grad[0])
        x_NI = x.reshape(-1, x.shape[-1])
        if ctx.rule is not None:
            x_NI = ctx.rule(x_NI, weight_N)
        steps.add_gradients(x_NI, z_NR, dz_NR, grads, wanted)
        return dx_NI, None, None, *steps.gradients(wanted)


def lora_linears(x: torch.Tensor, projections: Sequence[LoraProjection]) -> tuple[torch.Tensor, ...]:
    """``x W_p^T + b_p + sum_a s_a (d_a(x) A_a^T) B_a^T`` for every projection p of one input.

    Args:
        x: float [..., I]; all products are in its dtype, gradients of A and B of 16-bit products in float32 where those
            are float32 and the device is CUDA.
        projections: bases without gradient, at least one adapter in all.

    Returns:
        [..., O_p] for each, in the dtype of ``x``.

    Raises:
        ShapeError: an adapter does not fit its base.
    """
    for each in projections:
        for term in each.terms:
            a, b = term.a_rI.shape, term.b_Or.shape
            if a[1] != x.shape[-1] or b != (each.outputs, a[0]):
                raise ShapeError(
                    expected=f"A [r, {x.shape[-1]}] and B [{each.outputs}, r]",
                    got=f"{list(a)} and {list(b)}",
                    remedy="Pass the weights of PEFT's lora_A and lora_B as they are.",
                )
    projections = with_seeds(projections)
    tensors = tensors_of(projections)
    outputs = _LoraLinears.apply(x.reshape(-1, x.shape[-1]), normed_of(x), projections, *tensors)
    return tuple(y_NO.view(*x.shape[:-1], y_NO.shape[1]) for y_NO in outputs)
