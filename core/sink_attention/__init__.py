"""Causal attention with sinks, windows and packed documents; see README.md in this folder."""

from unsloth_plugins.core.sink_attention.masks import documents_from_cu_seqlens, documents_from_position_ids
from unsloth_plugins.core.sink_attention.op import sink_attention

__all__ = ["documents_from_cu_seqlens", "documents_from_position_ids", "sink_attention"]
