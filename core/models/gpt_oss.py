"""gpt-oss: attention with sinks on every layer, a top-k router, and interleaved gate/up experts with biases."""

from __future__ import annotations

from torch import nn

from unsloth_plugins.core.models.adapters import unwrap_experts
from unsloth_plugins.core.models.binding import Binding, LayerParts, ModelParts, decoder_of, has

_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def _find(causal_lm: nn.Module) -> ModelParts | None:
    decoder = decoder_of(causal_lm)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    parts = []
    for layer in layers:
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        router, experts = getattr(mlp, "router", None), getattr(mlp, "experts", None)
        if isinstance(experts, nn.Module):
            experts, _ = unwrap_experts(experts)
        if not has(attention, "q_proj", "k_proj", "v_proj", "o_proj", "sinks"):
            return None
        if not has(router, "weight", "bias", "top_k") or not has(experts, *_EXPERTS):
            return None
        parts.append(LayerParts(layer=layer, attention=attention, mlp=mlp, router=router, experts=experts))
    return ModelParts("gpt_oss", causal_lm, decoder, tuple(parts), has_sinks=True)


GPT_OSS = Binding("gpt_oss", _find)
