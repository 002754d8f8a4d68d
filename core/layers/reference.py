"""Norms, rotary embedding and gated activations in plain torch: what the kernels are measured against.

Shape suffixes: B batch, H heads, T tokens, D head size, R rotated part of it, N normalised size, I inner size.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

NormRule = Literal["cast_first", "cast_last", "one_plus"]
Activation = Literal["silu", "gelu_tanh", "gelu"]


def rms_norm(x: torch.Tensor, weight_N: torch.Tensor, *, eps: float, rule: NormRule) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, statistics in float32 or wider.

    Args:
        x: float [..., N].
        weight_N: float [N].
        eps: added to the mean square.
        rule: where the model family rounds. ``cast_first`` (Llama): to the dtype of ``x``, then times weight;
            ``cast_last`` (gpt-oss): times weight, then rounded; ``one_plus`` (Gemma): times 1 + weight, then rounded.

    Returns:
        [..., N] in the dtype of ``x``; under ``cast_first`` in the wider one of ``x`` and weight.

    Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if rule == "cast_first":
        return weight_N * normal.to(x.dtype)
    weight = weight_N.to(wide.dtype)
    return (normal * (1 + weight if rule == "one_plus" else weight)).to(x.dtype)


def rotate(
    x_BHTD: torch.Tensor, cos_BTR: torch.Tensor, sin_BTR: torch.Tensor, *, per_pair: bool = False
) -> torch.Tensor:
    """Rotary embedding of pairs (i, i + R/2): ``first * cos - second * sin`` and ``second * cos + first * sin``.

    Args:
        x_BHTD: float [B, H, T, D].
        cos_BTR, sin_BTR: [B or 1, T, R] with an angle for each element. What lies beyond R is passed through.
        per_pair: they are [B or 1, T, R/2], an angle for each pair.

    Source: Su et al. 2021, "RoFormer", equation 34, with pairs laid out in halves.
    """
    cos, sin = cos_BTR.unsqueeze(1), sin_BTR.unsqueeze(1)
    if per_pair:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    size = cos.shape[-1]
    turned, rest = x_BHTD[..., :size], x_BHTD[..., size:]
    first, second = turned.chunk(2, -1)
    turned = turned * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((turned, rest.to(turned.dtype)), -1) if rest.shape[-1] else turned


def gated(gate: torch.Tensor, up: torch.Tensor, *, activation: Activation) -> torch.Tensor:
    """``activation(gate) * up``, elementwise over [..., I] (Shazeer 2020, "GLU Variants Improve Transformer")."""
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
