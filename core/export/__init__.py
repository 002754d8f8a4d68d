"""What was trained as files that others load: merged safetensors, packed MXFP4, GGUF."""

from unsloth_plugins.core.export.merge import MergeReport, merge, merge_model, record_base

__all__ = ["MergeReport", "merge", "merge_model", "record_base"]
