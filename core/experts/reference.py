"""A loop over the experts that were chosen: the definition that faster paths are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unsloth_plugins.core.experts.matmul import ExpertLora, Weight, expert_matmul
from unsloth_plugins.core.layers.swiglu import Swiglu


def experts_loop(
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
    """See ``op.experts``; J = 2 I. Products in the dtype of x, the weighted sum in float32 or wider.

    In float16 everything is float32: the outputs of single experts pass 65,504 in gpt-oss, though their sum does not.
    """
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    compute = wide if x_NH.dtype == torch.float16 else x_NH.dtype
    out_NH = torch.zeros_like(x_NH, dtype=wide)
    for expert in index_NK.unique().tolist():
        token, slot = torch.where(index_NK == expert)
        gate_up = expert_matmul(x_NH[token].to(compute), gate_up_EHJ, gate_up_lora, expert)
        if gate_up_bias_EJ is not None:
            gate_up = gate_up + gate_up_bias_EJ[expert].to(compute)
        y = expert_matmul(activation(gate_up), down_EIH, down_lora, expert)
        if down_bias_EH is not None:
            y = y + down_bias_EH[expert].to(compute)
        out_NH = out_NH.index_add(0, token, y.to(wide) * weight_NK[token, slot, None].to(wide))
    return out_NH.to(x_NH.dtype)
