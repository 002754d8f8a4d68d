"""Gated activations in plain torch."""

from __future__ import annotations

import torch


def clamped_swiglu(gate_up: torch.Tensor, *, alpha: float = 1.702, limit: float | None = 7.0) -> torch.Tensor:
    """gpt-oss's gate: ``(up + 1) * gate * sigmoid(alpha * gate)`` with gate and up interleaved and clamped.

    The gate is clamped from above only, the linear part on both sides; where a clamp is active its gradient is zero.

    Args:
        gate_up: float [..., 2 I], even columns gate, odd columns up.
        alpha: slope inside the sigmoid.
        limit: bound of the clamps; ``None`` for no clamp.

    Returns:
        [..., I] in the dtype of ``gate_up``; computed in float32 or wider.

    Source: openai/gpt-oss, ``swiglu``; reference: transformers ``GptOssExperts._apply_gate``.
    """
    wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    gate, up = wide[..., ::2], wide[..., 1::2]
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)
