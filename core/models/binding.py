"""The vocabulary of bindings: the parts of a model that ``apply`` can take over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class LayerParts:
    """One decoder layer. ``None`` where there is no such part or it was not recognised."""

    layer: nn.Module
    attention: nn.Module | None = None
    mlp: nn.Module | None = None
    router: nn.Module | None = None
    experts: nn.Module | None = None


@dataclass(frozen=True)
class ModelParts:
    """What was recognised in a model.

    Attributes:
        binding: name of the binding, ``"generic"`` when none matched.
        causal_lm: the module whose ``forward`` takes labels and returns a loss.
        decoder: the stack of layers under the head.
        layers: one entry per decoder layer.
        has_sinks: attention has a learned sink per head.
    """

    binding: str
    causal_lm: nn.Module
    decoder: nn.Module
    layers: tuple[LayerParts, ...] = ()
    has_sinks: bool = False


@dataclass(frozen=True)
class Binding:
    """How to find the parts of one family of models.

    Attributes:
        name: shown in reports.
        find: returns the parts, or ``None`` when the structure is another one. It looks at structure (which
            submodules and parameters exist), not at class names, so that fine-tuned subclasses match too.
    """

    name: str
    find: Callable[[nn.Module], ModelParts | None]


def decoder_of(causal_lm: nn.Module) -> nn.Module:
    """The module under the head: transformers' ``base_model``, or the model itself where it has none."""
    decoder = getattr(causal_lm, "base_model", causal_lm)
    return decoder if isinstance(decoder, nn.Module) else causal_lm


def is_layer(module: nn.Module) -> bool:
    """Whether ``module`` is one of the repeated blocks that transformers checkpoints, and not the stack around them."""
    from transformers.modeling_layers import GradientCheckpointingLayer  # not at import: merges load no transformers

    return isinstance(module, GradientCheckpointingLayer)


def has(module: nn.Module | None, *names: str) -> bool:
    """Whether ``module`` has all of ``names``."""
    return module is not None and all(getattr(module, name, None) is not None for name in names)
