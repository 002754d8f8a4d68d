"""Sink attention as a transformers attention backend, named ``unsloth_sinks``.

transformers asks a backend for two functions: one builds the mask once per forward, the other is called by every
attention module. Here the mask stays the 2-D padding mask, so nothing of size T x S is ever built; causality, the
window and the documents are arguments of the op. Nothing here imports transformers until `register` is called.

Source: the signatures of ``flash_attention_mask`` and ``sdpa_mask`` in transformers.masking_utils, and of
``eager_attention_forward`` in transformers' gpt-oss model (5.16 to 5.24).
"""

from __future__ import annotations

from typing import Any

import torch

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention.masks import (
    Remembered,
    documents_from_cu_seqlens,
    documents_from_position_ids,
)
from unsloth_plugins.core.sink_attention.op import sink_attention

BACKEND_NAME = "unsloth_sinks"
_of_positions: Remembered[torch.Tensor] = Remembered()
_of_masks: Remembered[bool] = Remembered()
CHOICE = "_unsloth_backend"  # attribute of an attention module that was given a `backend` of its own


def register() -> None:
    """Make ``config._attn_implementation = "unsloth_sinks"`` known to transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(BACKEND_NAME, attention_forward)
    AttentionMaskInterface.register(BACKEND_NAME, padding_mask)


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Cut the 2-D padding mask to the keys that a layer will see.

    The keys of a sliding layer's dynamic cache are the last ones seen, so the cut is from the right. Data collators
    give a mask where nothing is padded, too: that is looked at once a forward, which waits for the device as
    transformers' own mask for ``sdpa`` does, and not for one new token.

    Args:
        batch_size: B.
        q_length: T, queries of this forward.
        kv_length: S, keys that the attention function will receive.
        q_offset: absolute position of the first query.
        kv_offset: absolute position of the first key.
        mask_function: transformers' index rule; ignored, because the op applies causality, window and documents.
        attention_mask: [B, tokens seen so far + T], nonzero for real tokens, or None.

    Returns:
        [B, S] bool, or None when no mask was given or nothing is padded.
    """
    # A static cache keeps its offset in a tensor and returns unwritten keys after the last query.
    if isinstance(q_offset, torch.Tensor) or kv_offset + kv_length != q_offset + q_length:
        raise UnsupportedError(
            expected="the last key to belong to the last query",
            got="a cache with a fixed length, or keys that belong to no token of the input",
            remedy="Use the default dynamic cache (leave cache_implementation unset), and no prefix tuning.",
        )
    if kwargs.get("use_vmap"):
        raise UnsupportedError(
            expected="a causal mask, with or without a window",
            got="a custom mask function",
            remedy="Use attn_implementation='eager' or 'flex_attention' for this model.",
        )
    if attention_mask is None:
        return None
    if attention_mask.dim() != 2:
        raise _unsupported_mask(attention_mask)
    if q_length > 1 and _of_masks.get(attention_mask, None, lambda: _pads_nothing(attention_mask)):
        return None
    return attention_mask[:, -kv_length:].to(torch.bool)


def _pads_nothing(mask: torch.Tensor) -> bool:
    """False where it can't be looked at."""
    capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
    return not (mask.is_meta or capturing or torch.compiler.is_compiling()) and bool(mask.all())


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    position_ids: torch.Tensor | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Serve one attention module of a transformers model.

    Packed documents are kept apart: by ``cu_seq_lens_q`` for a batch of one, otherwise by ``position_ids``. Both are
    ignored when a cache already holds tokens (T < S), since then they don't describe the cached keys.

    Args:
        module: the attention module; only ``is_causal`` and an explicit choice of the backend are read.
        query: [B, H, T, D].
        key: [B, K, S, D].
        value: [B, K, S, D].
        attention_mask: [B, S] bool from `padding_mask`, or None.
        scaling: factor of q . k; None means D ** -0.5.
        dropout: must be 0.
        sliding_window: keys that a query sees, itself included, or None.
        s_aux: [H] sink logits, or None.
        softcap: logit cap, or None.
        position_ids: [B or 1, T] integers, or None; other ranks (multimodal positions) are ignored.
        cu_seq_lens_q: [documents + 1] integers, or None.

    Returns:
        ([B, T, H, D] in the dtype of value, None): attention weights are never formed.
    """
    if dropout > 0:
        raise UnsupportedError(
            expected="attention dropout of 0", got=str(dropout), remedy="Set config.attention_dropout = 0."
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            expected="output_attentions=False",
            got="True",
            remedy="Use attn_implementation='eager' to look at attention weights.",
        )
    if getattr(module, "is_causal", True) is False or kwargs.get("is_causal") is False:
        raise UnsupportedError(
            expected="causal attention",
            got=f"{type(module).__name__} with is_causal=False",
            remedy="Use another attn_implementation for this model.",
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise _unsupported_mask(attention_mask)

    if query.dtype != value.dtype or key.dtype != value.dtype:
        # Under autocast the rotary embedding can leave q and k in float32.
        query, key = query.to(value.dtype), key.to(value.dtype)
    o_BTHD = sink_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        s_aux,
        window=sliding_window,
        documents_BS=_documents(position_ids, cu_seq_lens_q, query.shape[0], query.shape[2], key.shape[2]),
        key_mask_BS=attention_mask,
        scale=scaling,
        softcap=softcap,
        backend=getattr(module, CHOICE, "auto"),
    )
    assert isinstance(o_BTHD, torch.Tensor)
    return o_BTHD, None


def _documents(
    position_ids: torch.Tensor | None, cu_seqlens: torch.Tensor | None, batch: int, queries: int, keys: int
) -> torch.Tensor | None:
    if queries != keys:
        return None
    if cu_seqlens is not None and batch != 1:
        raise UnsupportedError(
            expected="cu_seq_lens_q with a batch of one flattened row",
            got=f"a batch of {batch}",
            remedy="Flatten the batch, or describe the documents by position_ids.",
        )
    if cu_seqlens is not None:
        return _of_positions.get(cu_seqlens, keys, lambda: documents_from_cu_seqlens(cu_seqlens, keys))
    if position_ids is not None and position_ids.dim() == 2 and position_ids.shape[1] == keys:
        return _of_positions.get(
            position_ids, batch, lambda: documents_from_position_ids(position_ids).expand(batch, -1)
        )
    return None


def _unsupported_mask(mask: torch.Tensor) -> UnsupportedError:
    return UnsupportedError(
        expected="no attention mask or a 2-D padding mask",
        got=f"a mask of shape {list(mask.shape)}",
        remedy="Pass the padding mask [batch, tokens]; describe packed documents by position_ids.",
    )
