"""Gradient checkpointing whose inputs wait in host memory."""

from unsloth_plugins.core.offload.checkpoint import offload_checkpoint
from unsloth_plugins.core.offload.host import HostStore

__all__ = ["HostStore", "offload_checkpoint"]
