"""A handful of tokens, as in decoding: only the experts that were chosen are decoded, one matrix a choice.

Shape suffixes: N tokens, K choices per token, M = N K, E experts, H hidden size, I expert size, J = 2 I, r LoRA rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unsloth_plugins.core.experts.matmul import ExpertLora, Weight
from unsloth_plugins.core.layers.swiglu import Swiglu
from unsloth_plugins.core.mxfp4.weight import PackedWeight


def _chosen(x_MI: torch.Tensor, weight: Weight, lora: Sequence[ExpertLora], expert_M: torch.Tensor) -> torch.Tensor:
    """Row m times the matrix of expert m, and its LoRA terms, [M, O]."""
    if isinstance(weight, PackedWeight):
        some = weight.chosen(expert_M).dense(x_MI.dtype)
    else:
        some = weight[expert_M].to(x_MI.dtype)
    y_MO = torch.bmm(x_MI[:, None], some)[:, 0]
    for term in lora:
        a_MrI, b_MrO = term.a_ErI[expert_M].to(x_MI.dtype), term.b_ErO[expert_M].to(x_MI.dtype)
        y_MO = y_MO + torch.bmm(torch.bmm(x_MI[:, None], a_MrI.transpose(1, 2)) * term.scaling, b_MrO)[:, 0]
    return y_MO


def experts_few(
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
) -> torch.Tensor:
    """See ``op.experts``. Without gradients, LoRA without dropout, and with fewer choices than experts, this is cheaper
    than decoding them all; nothing waits for the device, but for experts on the host."""
    expert_M = index_NK.reshape(-1)
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    compute = wide if x_NH.dtype == torch.float16 else x_NH.dtype  # see ``reference``
    rows_MH = x_NH.to(compute).repeat_interleave(index_NK.shape[1], dim=0)
    gate_up_MJ = _chosen(rows_MH, gate_up_EHJ, gate_up_lora, expert_M).to(wide)
    if gate_up_bias_EJ is not None:
        gate_up_MJ = gate_up_MJ + gate_up_bias_EJ[expert_M].to(wide)
    hidden_MI = activation(gate_up_MJ).to(compute)
    y_MH = _chosen(hidden_MI, down_EIH, down_lora, expert_M).to(wide)
    if down_bias_EH is not None:
        y_MH = y_MH + down_bias_EH[expert_M].to(wide)
    return (y_MH.view(*index_NK.shape, -1) * weight_NK[..., None].to(wide)).sum(1).to(x_NH.dtype)
