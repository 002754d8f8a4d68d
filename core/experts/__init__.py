"""Mixture-of-experts layers: routing in float32, clamped SwiGLU, one weighted sum per token."""

from unsloth_plugins.core.experts.matmul import ExpertLora
from unsloth_plugins.core.experts.op import experts, top_k_routing

__all__ = ["ExpertLora", "experts", "top_k_routing"]
