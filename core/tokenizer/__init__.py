"""Faults of tokenizers that ruin a fine-tune without an error: found, and repaired where that is safe."""

from unsloth_plugins.core.tokenizer.checks import Finding, check_tokenizer
from unsloth_plugins.core.tokenizer.labels import assistant_labels
from unsloth_plugins.core.tokenizer.pairs import PROBES, choose_tokenizer
from unsloth_plugins.core.tokenizer.repair import RepairReport, repair_tokenizer, resize_embeddings

__all__ = [
    "PROBES",
    "Finding",
    "RepairReport",
    "assistant_labels",
    "check_tokenizer",
    "choose_tokenizer",
    "repair_tokenizer",
    "resize_embeddings",
]
