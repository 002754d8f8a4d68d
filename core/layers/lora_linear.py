"""Linear layers with LoRA that share one input, as one function: the input is saved once and read once for all A.

For projection p with frozen base W_p, and adapters stacked to A [R, I]:

    z = x A^T,    y_p = x W_p^T + b_p + sum_a s_a z_a B_a^T

    dz_a = s_a dy_p B_a,    dB_a = s_a dy_p^T z_a,    dA = dz^T x,    dx = sum_p dy_p W_p + dz A

LoRA's terms are accumulated by GEMMs into what the base's GEMM wrote, so nothing passes over an output by itself. A
quantised base is decoded for its GEMM and freed; the caching allocator gives the next one the same memory.

Shape suffixes: N tokens, I inputs, O outputs, R ranks of all adapters, r rank of one. Source: Hu et al. 2021, "LoRA",
equation 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.errors import ShapeError


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """One adapter of one projection: A [r, I], B [O, r], any floating dtype, and its scaling."""

    a_rI: torch.Tensor
    b_Or: torch.Tensor
    scaling: float


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


class _LoraLinears(torch.autograd.Function):
    """Inputs: x, the projections, then A and B of every term and after them the biases, for their gradients."""

    @staticmethod
    def forward(ctx: Any, x_NI: torch.Tensor, projections: Sequence[LoraProjection], *tensors: Any) -> Any:
        dtype = x_NI.dtype
        terms = [term for each in projections for term in each.terms]
        stack = [term.a_rI.to(dtype) for term in terms]
        a_RI = stack[0] if len(stack) == 1 else torch.cat(stack)
        z_NR = x_NI @ a_RI.T
        outputs, start = [], 0
        for each in projections:
            weight_OI = each.weight(dtype)
            if each.bias_O is None:
                y_NO = x_NI @ weight_OI.T
            else:
                y_NO = torch.addmm(each.bias_O.to(dtype), x_NI, weight_OI.T)
            del weight_OI
            for term in each.terms:
                stop = start + term.a_rI.shape[0]
                y_NO.addmm_(z_NR[:, start:stop], term.b_Or.to(dtype).T, alpha=term.scaling)
                start = stop
            outputs.append(y_NO)
        ctx.save_for_backward(x_NI, z_NR, *tensors)
        ctx.set_materialize_grads(False)
        ctx.weights = [(each.weight, [term.scaling for term in each.terms]) for each in projections]
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        x_NI, z_NR, *tensors = ctx.saved_tensors
        dtype = x_NI.dtype
        count = sum(len(scalings) for _, scalings in ctx.weights)
        all_a, all_b = tensors[: 2 * count : 2], tensors[1 : 2 * count : 2]
        out: list[torch.Tensor | None] = [None] * len(tensors)
        dz_NR = torch.empty_like(z_NR)
        dx_NI = None
        start = number = 0
        for place, ((weight, scalings), dy_NO) in enumerate(zip(ctx.weights, grads, strict=True)):
            for scaling in scalings:
                b_Or = all_b[number]
                part = slice(start, start + b_Or.shape[1])
                if dy_NO is None:
                    dz_NR[:, part] = 0
                else:
                    dz_NR[:, part].addmm_(dy_NO, b_Or.to(dtype), beta=0, alpha=scaling)
                    if ctx.needs_input_grad[2 + 2 * number + 1]:
                        out[2 * number + 1] = _product(dy_NO.T, z_NR[:, part], b_Or.dtype).mul_(scaling)
                start, number = part.stop, number + 1
            bias = 2 * count + place
            if dy_NO is None:
                continue
            if ctx.needs_input_grad[2 + bias]:
                out[bias] = dy_NO.sum(0, dtype=torch.promote_types(dtype, torch.float32)).to(tensors[bias].dtype)
            if ctx.needs_input_grad[0]:
                weight_OI = weight(dtype)
                dx_NI = dy_NO @ weight_OI if dx_NI is None else dx_NI.addmm_(dy_NO, weight_OI)
                del weight_OI
        wanted = [n for n in range(count) if ctx.needs_input_grad[2 + 2 * n]]
        if wanted:
            da_RI = _product(dz_NR.T, x_NI, all_a[wanted[0]].dtype)
            for n, part in enumerate(da_RI.split([a.shape[0] for a in all_a])):
                if n in wanted:
                    out[2 * n] = part.to(all_a[n].dtype)
        if dx_NI is not None:
            stack = [a.to(dtype) for a in all_a]
            dx_NI.addmm_(dz_NR, stack[0] if len(stack) == 1 else torch.cat(stack))
        return dx_NI, None, *out


def lora_linears(x: torch.Tensor, projections: Sequence[LoraProjection]) -> tuple[torch.Tensor, ...]:
    """``x W_p^T + b_p + sum_a s_a (x A_a^T) B_a^T`` for every projection p of one input.

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
    factors = [tensor for each in projections for term in each.terms for tensor in (term.a_rI, term.b_Or)]
    biases = [each.bias_O for each in projections]
    outputs = _LoraLinears.apply(x.reshape(-1, x.shape[-1]), tuple(projections), *factors, *biases)
    return tuple(y_NO.view(*x.shape[:-1], y_NO.shape[1]) for y_NO in outputs)
