"""What was trained as files that others load: merged safetensors, packed MXFP4, GGUF."""

from unsloth_plugins.core.export.base import check_whole
from unsloth_plugins.core.export.gguf import GgufReport, export_gguf
from unsloth_plugins.core.export.gguf_adapter import export_gguf_adapter
from unsloth_plugins.core.export.live import check_model, merge_bar, merge_model
from unsloth_plugins.core.export.merge import DTYPES, MergeReport, check_dtype, merge
from unsloth_plugins.core.export.provenance import record_base

__all__ = [
    "DTYPES",
    "GgufReport",
    "MergeReport",
    "check_dtype",
    "check_model",
    "check_whole",
    "export_gguf",
    "export_gguf_adapter",
    "merge",
    "merge_bar",
    "merge_model",
    "record_base",
]
