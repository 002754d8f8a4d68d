"""All bindings, tried in order."""

from __future__ import annotations

from torch import nn

from unsloth_plugins.core.errors import ModelError
from unsloth_plugins.core.models.binding import Binding, ModelParts, decoder_of
from unsloth_plugins.core.models.gpt_oss import GPT_OSS
from unsloth_plugins.core.models.llama import LLAMA
from unsloth_plugins.core.models.moe import MOE
from unsloth_plugins.core.models.phi3 import PHI3

BINDINGS: tuple[Binding, ...] = (GPT_OSS, MOE, LLAMA, PHI3)


def unwrap(model: nn.Module) -> nn.Module:
    """The causal LM below PEFT and data-parallel wrappers."""
    seen = model
    while True:
        if hasattr(seen, "get_base_model") and callable(seen.get_base_model):
            inner = seen.get_base_model()
        elif isinstance(seen, nn.parallel.DistributedDataParallel):
            inner = seen.module
        else:
            return seen
        if inner is seen:
            return seen
        seen = inner


def recognise(model: nn.Module) -> ModelParts:
    """The parts of ``model``; of an unknown model the generic ones.

    Raises:
        ModelError: ``model`` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(
            expected="a torch.nn.Module",
            got=type(model).__name__,
            remedy="Pass the loaded model, not its name or its config.",
        )
    causal_lm = unwrap(model)
    for binding in BINDINGS:
        if (parts := binding.find(causal_lm)) is not None:
            return parts
    return ModelParts("generic", causal_lm, decoder_of(causal_lm))
