"""Building blocks of decoder layers."""

from unsloth_plugins.core.layers.op import gated, rms_norm, rope
from unsloth_plugins.core.layers.swiglu import GPT_OSS, Swiglu

__all__ = ["GPT_OSS", "Swiglu", "gated", "rms_norm", "rope"]
