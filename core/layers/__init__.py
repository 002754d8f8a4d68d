"""Building blocks of decoder layers."""

from unsloth_plugins.core.layers.swiglu import clamped_swiglu

__all__ = ["clamped_swiglu"]
