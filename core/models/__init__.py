"""Which module of a model is what."""

from unsloth_plugins.core.models.binding import Binding, LayerParts, ModelParts
from unsloth_plugins.core.models.registry import BINDINGS, recognise

__all__ = ["BINDINGS", "Binding", "LayerParts", "ModelParts", "recognise"]
