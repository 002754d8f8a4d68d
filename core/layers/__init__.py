"""Building blocks of decoder layers."""

from unsloth_plugins.core.layers.op import gated, rms_norm, rope
from unsloth_plugins.core.layers.swiglu import clamped_swiglu

__all__ = ["clamped_swiglu", "gated", "rms_norm", "rope"]
