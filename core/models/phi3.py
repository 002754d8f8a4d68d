"""Phi-3 family: as Llama's, with q, k and v in one projection, and gate and up in one (Phi-3, Phi-3.5, Phi-4)."""

from __future__ import annotations

from torch import nn

from unsloth_plugins.core.models.binding import Binding, LayerParts, ModelParts, decoder_of, has


def _find(causal_lm: nn.Module) -> ModelParts | None:
    decoder = decoder_of(causal_lm)
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    for layer in layers:
        if not has(getattr(layer, "self_attn", None), "qkv_proj", "o_proj"):
            return None
        if not has(getattr(layer, "mlp", None), "gate_up_proj", "down_proj"):
            return None
    parts = tuple(LayerParts(layer=layer, attention=layer.get_submodule("self_attn")) for layer in layers)
    return ModelParts("phi3", causal_lm, decoder, parts)


PHI3 = Binding("phi3", _find)
