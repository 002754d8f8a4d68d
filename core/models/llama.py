"""Llama family: RMSNorm, q/k/v/o projections, gate/up/down MLP (Llama, Mistral, Qwen 2 and 3, SmolLM, Gemma, ...)."""

from __future__ import annotations

from torch import nn

from unsloth_plugins.core.models.binding import Binding, LayerParts, ModelParts, decoder_of, has


def _find(causal_lm: nn.Module) -> ModelParts | None:
    decoder = decoder_of(causal_lm)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    for layer in layers:
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if not has(attention, "q_proj", "k_proj", "v_proj", "o_proj"):
            return None
        if not has(mlp, "gate_proj", "up_proj", "down_proj"):
            return None
    parts = tuple(LayerParts(layer=layer, attention=layer.get_submodule("self_attn")) for layer in layers)
    return ModelParts("llama", causal_lm, decoder, parts)


LLAMA = Binding("llama", _find)
