"""Products with the weights of one expert or of all, dense or packed, and their LoRA terms.

Shape suffixes: M rows sorted by expert, E experts, I inputs, O outputs, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.experts.gemm import GroupedGemm, TritonGemm
from unsloth_plugins.core.mxfp4.weight import PackedWeight

Weight = torch.Tensor | PackedWeight
"""[E, I, O]: dense, or packed and frozen."""

RANK_STEP = 8  # `torch._grouped_mm` wants strides of whole 16 bytes


@dataclass(frozen=True, eq=False)
class ExpertLora:
    """One adapter on one projection of all experts: ``y += scaling * dropout(x) A_e^T B_e``.

    Attributes:
        a_ErI, b_ErO: down and up projections.
        scaling: lora_alpha / r, or lora_alpha / sqrt(r) for rsLoRA.
        dropout: probability; 0 outside training.
    """

    a_ErI: torch.Tensor
    b_ErO: torch.Tensor
    scaling: float
    dropout: float = 0.0


@dataclass(frozen=True, eq=False)
class Rows:
    """How rows sorted by expert are multiplied: where those of each expert end (int32), by which GEMM, and how many
    bytes of decoded weights there may be at once."""

    ends_E: torch.Tensor
    gemm: GroupedGemm
    weights_limit: int | None = None


def group_size(n_experts: int, expert_bytes: int, limit: int) -> int:
    """Experts to decode at a time, so that they take no more than ``limit`` bytes: at least one, in groups of about
    one size."""
    at_once = max(limit // expert_bytes, 1)
    return -(-n_experts // -(-n_experts // at_once))


def _packed_product(x_MI: torch.Tensor, weight: PackedWeight, rows: Rows, *, transposed: bool = False) -> torch.Tensor:
    """x W, or dy W^T, with the experts decoded all at once or by groups."""
    n_experts, inputs, outputs = weight.shape
    if rows.weights_limit is None:
        dense = weight.dense(x_MI.dtype)
        return rows.gemm.product(x_MI, dense.transpose(1, 2) if transposed else dense, rows.ends_E)
    assert isinstance(rows.gemm, TritonGemm)
    weight, out = weight.here(), None
    step = group_size(n_experts, inputs * outputs * x_MI.dtype.itemsize, rows.weights_limit)
    for first in range(0, n_experts, step):
        dense = weight.part(first, first + step).dense(x_MI.dtype)
        part = dense.transpose(1, 2) if transposed else dense
        out = rows.gemm.product_of_group(x_MI, part, rows.ends_E, first, out)
        del dense, part  # the next ones get the memory
    assert out is not None
    return out


class _PackedProduct(torch.autograd.Function):
    """x W with W decoded in forward and once more in backward, so that only the bytes are kept."""

    @staticmethod
    def forward(ctx: Any, x_MI: torch.Tensor, weight: PackedWeight, expert: int | Rows) -> torch.Tensor:
        ctx.weight, ctx.expert, ctx.dtype = weight, expert, x_MI.dtype
        if isinstance(expert, int):
            return x_MI @ weight.dense(x_MI.dtype, expert)
        return _packed_product(x_MI, weight, expert)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None]:
        dy_MO = grads[0].to(ctx.dtype).contiguous()
        if isinstance(ctx.expert, int):
            return dy_MO @ ctx.weight.dense(ctx.dtype, ctx.expert).transpose(-1, -2), None, None
        return _packed_product(dy_MO, ctx.weight, ctx.expert, transposed=True).to(ctx.dtype), None, None


def expert_matmul(x_MI: torch.Tensor, weight: Weight, lora: Sequence[ExpertLora], expert: int) -> torch.Tensor:
    """``x W_e`` plus the LoRA terms of expert e, [M, O]."""
    if isinstance(weight, PackedWeight):
        y_MO = _PackedProduct.apply(x_MI, weight, expert)
    else:
        y_MO = x_MI @ weight[expert].to(x_MI.dtype)
    for term in lora:
        xa_Mr = F.dropout(x_MI, term.dropout) @ term.a_ErI[expert].to(x_MI.dtype).T
        y_MO = y_MO + (xa_Mr * term.scaling) @ term.b_ErO[expert].to(x_MI.dtype)
    return y_MO


def grouped_matmul(x_MI: torch.Tensor, weight: Weight, lora: Sequence[ExpertLora], rows: Rows) -> torch.Tensor:
    """The same for rows sorted by expert, in one grouped GEMM each for the base, A and B; float32 in float16."""
    if isinstance(weight, PackedWeight):
        y_MO = _PackedProduct.apply(x_MI, weight, rows)
    else:
        y_MO = rows.gemm.product(x_MI, weight.to(x_MI.dtype), rows.ends_E)
    for term in lora:
        a_ErI, b_ErO = term.a_ErI.to(x_MI.dtype), term.b_ErO.to(x_MI.dtype)
        if missing := -a_ErI.shape[1] % RANK_STEP:
            a_ErI, b_ErO = F.pad(a_ErI, (0, 0, 0, missing)), F.pad(b_ErO, (0, 0, 0, missing))
        dropped_MI, a_EIr = F.dropout(x_MI, term.dropout), a_ErI.contiguous().transpose(-1, -2)
        xa_Mr = (rows.gemm.product(dropped_MI, a_EIr, rows.ends_E) * term.scaling).to(x_MI.dtype)
        y_MO = y_MO + rows.gemm.product(xa_Mr, b_ErO.contiguous(), rows.ends_E)
    return y_MO
