"""Gated activations in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Swiglu:
    """The gate of an expert: ``(up + offset) * gate * sigmoid(alpha * gate)``; without options plain SwiGLU.

    Attributes:
        alpha: slope inside the sigmoid.
        limit: the gate is clamped to it from above only, ``up`` on both sides; where a clamp is active its gradient is
            zero. ``None`` for no clamp.
        offset: added to ``up``, after the clamp.
        interleaved: gate and up are the even and the odd columns; otherwise the first and the second half.

    Source: openai/gpt-oss, ``swiglu``; references: transformers ``GptOssExperts._apply_gate``, ``MixtralExperts``.
    """

    alpha: float = 1.0
    limit: float | None = None
    offset: float = 0.0
    interleaved: bool = False

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """float [..., 2 I] -> [..., I] in the same dtype; computed in float32 or wider."""
        wide = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
        gate, up = (wide[..., ::2], wide[..., 1::2]) if self.interleaved else wide.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + self.offset) * gate * torch.sigmoid(self.alpha * gate)).to(gate_up.dtype)


GPT_OSS = Swiglu(alpha=1.702, limit=7.0, offset=1.0, interleaved=True)
