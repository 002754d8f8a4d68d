"""Kernels' home: everything that does not depend on a training framework."""

from unsloth_plugins.core.apply import Applied, applied_to, apply, check_optimizers, lacks_adapters
from unsloth_plugins.core.config import UnslothConfig

__all__ = ["Applied", "UnslothConfig", "applied_to", "apply", "check_optimizers", "lacks_adapters"]
