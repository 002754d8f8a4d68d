"""Mixture-of-experts layers: routing in float32, clamped SwiGLU, one weighted sum per token."""

from unsloth_plugins.core.experts.op import experts, top_k_routing

__all__ = ["experts", "top_k_routing"]
