"""A frozen linear layer with LoRA as one function: the adapter is accumulated into the base layer's output by its GEMM.

``y = x W^T + b + sum_i s_i (x A_i^T) B_i^T`` (Hu et al. 2021, "LoRA"). What the three layers of an adapter cost apart,
two passes over y forward and several over dx backward, is gone, x is saved once, and a quantised W is decoded for the
product and dropped.

Shape suffixes: N rows, I inputs, O outputs, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

_HALVES = (torch.bfloat16, torch.float16)


class Quantised(Protocol):
    """A frozen weight that is not stored as numbers."""

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight [O, I] in new memory."""


@dataclass(frozen=True, eq=False)
class Bnb4bit:
    """A 4-bit weight of bitsandbytes (NF4 or FP4, its scales quantised or not)."""

    data: torch.Tensor
    state: Any

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        """See ``Quantised``."""
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self.data, self.state).to(dtype)


@dataclass(frozen=True, eq=False)
class LoraTerm:
    """One adapter: ``s (x A^T) B^T``.

    Attributes:
        a_rI, b_Or: down and up projections, of any floating dtype; products are in the dtype of x.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) for rsLoRA.
    """

    a_rI: torch.Tensor
    b_Or: torch.Tensor
    scaling: float


def _dense(weight: torch.Tensor | Quantised, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(dtype) if isinstance(weight, torch.Tensor) else weight.dense(dtype)


def _wide(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """A product whose sum over many rows is not rounded to 16 bits."""
    if left.is_cuda and left.dtype in _HALVES:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left @ right


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NI: torch.Tensor, weight: Any, bias_O: Any, scalings: tuple[float, ...], *adapters: torch.Tensor
    ) -> torch.Tensor:
        dtype = x_NI.dtype
        y_NO = F.linear(x_NI, _dense(weight, dtype), None if bias_O is None else bias_O.to(dtype))
        products = []
        for a_rI, b_Or, scaling in zip(adapters[::2], adapters[1::2], scalings, strict=True):
            products.append(x_NI @ a_rI.to(dtype).T)
            y_NO.addmm_(products[-1], b_Or.to(dtype).T, alpha=scaling)
        dense = isinstance(weight, torch.Tensor)
        ctx.save_for_backward(x_NI, weight if dense else None, *adapters, *products)
        ctx.weight, ctx.scalings = None if dense else weight, scalings
        return y_NO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        (dy_NO,) = grads
        x_NI, weight, *rest = ctx.saved_tensors
        count = len(ctx.scalings)
        adapters, products = rest[: 2 * count], rest[2 * count :]
        wants_x, *_ = ctx.needs_input_grad
        dtype = x_NI.dtype
        dy_NO = dy_NO.to(dtype)
        dx_NI = dy_NO @ _dense(ctx.weight if weight is None else weight, dtype) if wants_x else None
        out: list[torch.Tensor | None] = []
        for number, (a_rI, b_Or, scaling) in enumerate(zip(adapters[::2], adapters[1::2], ctx.scalings, strict=True)):
            dxa_Nr = dy_NO @ b_Or.to(dtype)
            if dx_NI is not None:
                dx_NI.addmm_(dxa_Nr, a_rI.to(dtype), alpha=scaling)
            wants_a, wants_b = ctx.needs_input_grad[4 + 2 * number : 6 + 2 * number]
            out.append((_wide(dxa_Nr.T, x_NI) * scaling).to(a_rI.dtype) if wants_a else None)
            out.append((_wide(dy_NO.T, products[number]) * scaling).to(b_Or.dtype) if wants_b else None)
        return dx_NI, None, None, None, *out


def lora_linear(
    x: torch.Tensor, weight: torch.Tensor | Quantised, bias_O: torch.Tensor | None, terms: Sequence[LoraTerm]
) -> torch.Tensor:
    """A frozen linear layer plus adapters, differentiable in x and in the adapters.

    Args:
        x: [..., I]; its dtype is that of the products, which accumulate in float32 on CUDA.
        weight: [O, I], frozen, of any floating dtype, or quantised.
        bias_O: frozen, or ``None``.
        terms: at least one.

    Returns:
        [..., O] in the dtype of x.
    """
    x_NI = x.reshape(-1, x.shape[-1])
    adapters = [tensor for term in terms for tensor in (term.a_rI, term.b_Or)]
    with torch.autocast(x.device.type, enabled=False):
        y_NO = _LoraLinear.apply(x_NI, weight, bias_O, tuple(term.scaling for term in terms), *adapters)
    return y_NO.view(*x.shape[:-1], y_NO.shape[-1])  # type: ignore[no-any-return]
