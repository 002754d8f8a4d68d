"""What was trained as files that others load: merged safetensors, packed MXFP4, GGUF."""

from unsloth_plugins.core.export.base import check_whole
from unsloth_plugins.core.export.gguf import GgufReport, export_gguf
from unsloth_plugins.core.export.gguf_adapter import export_gguf_adapter
from unsloth_plugins.core.export.live import check_model, merge_model
from unsloth_plugins.core.export.merge import MergeReport, merge
from unsloth_plugins.core.export.provenance import record_base

__all__ = [
    "GgufReport",
    "MergeReport",
    "check_model",
    "check_whole",
    "export_gguf",
    "export_gguf_adapter",
    "merge",
    "merge_model",
    "record_base",
]
