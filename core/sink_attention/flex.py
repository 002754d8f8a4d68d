"""Sink attention by torch's flex attention: for comparison, and for devices that it serves and Triton kernels don't.

The sink joins afterwards through the log normaliser: o = sigmoid(lse - sink) o', lse' = logaddexp(lse, sink).

Shape suffixes as in `op`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from unsloth_plugins.core.sink_attention.masks import visible_range


@cache
def _compiled() -> tuple[Any, Any]:
    return torch.compile(flex_attention), torch.compile(create_block_mask)


def sink_attention_flex(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sink_H: torch.Tensor | None,
    *,
    window: int | None,
    documents_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention with sinks by flex attention; arguments as `op.sink_attention` has validated them.

    Compiles on first use, and builds a block mask in every call.

    Returns:
        o_BTHD in the dtype of q, lse_BHT float32, the sink included.
    """
    batch, queries, heads = q_BTHD.shape[:3]
    keys, kv_heads = k_BSKD.shape[1:3]
    offset = keys - queries
    first_BS, _ = visible_range(documents_BS, key_mask_BS, window)

    def visible(b: torch.Tensor, h: torch.Tensor, t: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        i = t + offset
        seen = j <= i
        if first_BS is not None:
            seen = seen & (j >= first_BS[b, i])
        elif window is not None:
            seen = seen & (i - j < window)
        return seen if key_mask_BS is None else seen & key_mask_BS[b, j]

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)  # type: ignore[operator, no-any-return]

    attend, build = _compiled()
    rows = None if first_BS is None and key_mask_BS is None else batch
    o_BHTD, aux = attend(
        q_BTHD.transpose(1, 2),
        k_BSKD.transpose(1, 2),
        v_BSKD.transpose(1, 2),
        score_mod=None if softcap is None else capped,
        block_mask=build(visible, rows, None, queries, keys, device=q_BTHD.device),
        scale=scale,
        enable_gqa=heads != kv_heads,
        return_aux=AuxRequest(lse=True),
    )
    lse_BHT = aux.lse
    if sink_H is not None:
        sink_H1 = sink_H.float()[:, None]
        o_BHTD = o_BHTD * torch.sigmoid(lse_BHT - sink_H1)[..., None].to(o_BHTD.dtype)
        lse_BHT = torch.logaddexp(lse_BHT, sink_H1)
    return o_BHTD.transpose(1, 2), lse_BHT
