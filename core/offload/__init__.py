"""Gradient checkpointing whose inputs wait in host memory."""

from unsloth_plugins.core.offload.checkpoint import offload_checkpoint, offload_saved_tensors
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.modules import CheckpointedModules, checkpoint_modules

__all__ = ["CheckpointedModules", "HostStore", "checkpoint_modules", "offload_checkpoint", "offload_saved_tensors"]
