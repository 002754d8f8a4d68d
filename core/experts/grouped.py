"""All experts at once: tokens sorted by expert, two grouped GEMMs, a sum over the choices of each token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unsloth_plugins.core.experts.gemm import GEMMS, GroupedGemm
from unsloth_plugins.core.experts.matmul import ExpertLora, Rows, Weight, grouped_matmul
from unsloth_plugins.core.layers.swiglu import Swiglu


def experts_grouped(
    x_NH: torch.Tensor,
    gate_up_EHJ: Weight,
    gate_up_bias_EJ: torch.Tensor | None,
    down_EIH: Weight,
    down_bias_EH: torch.Tensor | None,
    index_NK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    activation: Swiglu,
    gate_up_lora: Sequence[ExpertLora] = (),
    down_lora: Sequence[ExpertLora] = (),
    gemm: GroupedGemm = GEMMS["grouped_mm"],
    weights_limit: int | None = None,
) -> torch.Tensor:
    """See ``op.experts``; J = 2 I. No atomics: each token gathers its K results and sums them in float32 or wider."""
    n_experts, top_k = gate_up_EHJ.shape[0], index_NK.shape[1]
    flat_M = index_NK.reshape(-1)
    order_M = flat_M.argsort(stable=True)
    expert_M = flat_M[order_M]
    rows = Rows(torch.bincount(flat_M, minlength=n_experts).cumsum(0).to(torch.int32), gemm, weights_limit)
    sorted_MH = x_NH[order_M // top_k]
    # Biases are added in float32: their gradients are sums over tokens, which bf16 would round at every addition.
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    gate_up_MJ = grouped_matmul(sorted_MH, gate_up_EHJ, gate_up_lora, rows).to(wide)
    if gate_up_bias_EJ is not None:
        gate_up_MJ = gate_up_MJ + gate_up_bias_EJ.to(wide)[expert_M]
    hidden_MI = activation(gate_up_MJ).to(x_NH.dtype)
    y_MH = grouped_matmul(hidden_MI, down_EIH, down_lora, rows).to(wide)
    if down_bias_EH is not None:
        y_MH = y_MH + down_bias_EH.to(wide)[expert_M]
    back_M = order_M.argsort()
    y_NKH = y_MH[back_M].view(*index_NK.shape, -1)
    return (y_NKH * weight_NK[..., None].to(wide)).sum(1).to(x_NH.dtype)
