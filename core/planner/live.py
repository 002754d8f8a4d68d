"""The formulas applied to a model that is loaded, with what is on its device."""

from __future__ import annotations

from dataclasses import replace

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import UnslothPluginsError
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.planner.memory import RESERVED, STATES_ADAM, Dtype, Setup, check, least_bytes
from unsloth_plugins.core.planner.shape import ModelShape, find_shape


def setup_of(parts: ModelParts, dtype: Dtype, config: UnslothConfig) -> tuple[ModelShape, Setup] | None:
    """Sizes and setup of a model with LoRA; ``None`` where the formulas do not describe it.

    Args:
        dtype: how its base is stored.
    """
    adapters = getattr(parts.causal_lm, "peft_config", None) or {}
    ranks = [each.r for each in adapters.values() if str(getattr(each, "peft_type", "")).endswith("LORA")]
    if not ranks or len(ranks) != len(adapters):
        return None
    trained = [name for name, p in parts.causal_lm.named_parameters() if p.requires_grad]
    if not all("lora_" in name for name in trained):
        return None
    everywhere = any("lora_" in name and ("experts" in name or "mlp" in name) for name in trained)
    try:
        shape = find_shape(parts.causal_lm.config)
        setup = Setup(dtype, max(ranks), "all" if everywhere else "attention", config=config)
        check(shape, setup)
    except UnslothPluginsError:
        return None
    return shape, setup


def room_and_need(
    parts: ModelParts, config: UnslothConfig, tokens: int, memory: DeviceMemory
) -> tuple[int, int] | None:
    """Bytes that are free for a step of a packed model, and what it takes at the least with its experts resident.

    Adam's states are counted as float32 numbers, less what is on the device beside the model already.

    Returns:
        Both, or ``None`` where the formulas do not describe the model.
    """
    resident = replace(config, weights="resident")
    found = setup_of(parts, "mxfp4", resident)
    if found is None:
        return None
    device = next(iter(parts.decoder.parameters())).device
    tensors = [*parts.causal_lm.parameters(), *parts.causal_lm.buffers()]
    model_bytes = sum(each.numel() * each.element_size() for each in tensors if each.device == device)
    trained = sum(each.numel() for each in parts.causal_lm.parameters() if each.requires_grad)
    allocated = memory.allocated(device)
    states = max(STATES_ADAM * trained - max(allocated - model_bytes, 0), 0)
    return memory.allowed(device) - allocated, int(RESERVED * (least_bytes(*found, tokens) + states))
