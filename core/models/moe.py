"""Mixtures of experts with the code of Mixtral's experts: Mixtral, Qwen-MoE, OLMoE, DeepSeek, GLM-MoE and many more.

The experts are found by their code, so that the block around them (shared experts, noise) and a router that is not
known may be the model's own. Layers without experts stay as they are.
"""

from __future__ import annotations

from torch import nn

from unsloth_plugins.core.models.adapters import unwrap_experts
from unsloth_plugins.core.models.binding import Binding, LayerParts, ModelParts, decoder_of, has
from unsloth_plugins.core.models.experts import are_plain_experts, is_plain_router

_ROUTERS = ("gate", "router")


def _router_of(mlp: nn.Module) -> nn.Module | None:
    for name in _ROUTERS:
        router = mlp._modules.get(name)
        if router is not None:
            router, _ = unwrap_experts(router)
            return router if is_plain_router(router) else None
    return None


def _layer(layer: nn.Module, attention: nn.Module | None) -> LayerParts:
    for mlp in layer.children():
        wrapped = mlp._modules.get("experts")
        if wrapped is None:
            continue
        experts, _ = unwrap_experts(wrapped)
        if are_plain_experts(experts):
            return LayerParts(layer=layer, attention=attention, mlp=mlp, router=_router_of(mlp), experts=experts)
    return LayerParts(layer=layer, attention=attention)


def _find(causal_lm: nn.Module) -> ModelParts | None:
    decoder = decoder_of(causal_lm)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList):
        return None
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    known = all(has(attention, "q_proj", "k_proj", "v_proj", "o_proj") for attention in attentions)
    parts = tuple(_layer(layer, a if known else None) for layer, a in zip(layers, attentions, strict=True))
    if not any(part.experts is not None for part in parts):
        return None
    return ModelParts("moe", causal_lm, decoder, parts)


MOE = Binding("moe", _find)
