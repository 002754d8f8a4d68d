"""Gradient checkpointing whose inputs wait in host memory."""

from unsloth_plugins.core.offload.checkpoint import offload_checkpoint, offload_saved_tensors
from unsloth_plugins.core.offload.host import HostStore

__all__ = ["HostStore", "offload_checkpoint", "offload_saved_tensors"]
