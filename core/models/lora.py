"""PEFT's LoRA on linear layers, instance by instance, through ``core.layers.lora_linear`` where nothing forbids it."""

from __future__ import annotations

from collections import Counter
from types import MethodType
from typing import Any

import torch
from torch import nn

from unsloth_plugins.core.layers.lora_linear import Bnb4bit, LoraTerm, lora_linear
from unsloth_plugins.core.patches import PatchSet

_MARK = "_unsloth_lora"


def _weight_of(base: nn.Module) -> torch.Tensor | Bnb4bit | None:
    """The frozen weight of a base layer that is understood, or ``None``."""
    weight: Any = getattr(base, "weight", None)
    if type(base) is nn.Linear:
        return weight  # type: ignore[no-any-return]
    state = getattr(weight, "quant_state", None)
    if type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes"):
        repacked = getattr(state, "packing_format_for_cpu", False)
        return None if state is None or repacked else Bnb4bit(weight.data, state)
    return None


def why_not(module: Any) -> str | None:
    """Why a LoRA layer is left to PEFT, or ``None``."""
    base = module.base_layer
    if any("forward" in vars(part) for part in (module, base)):
        return "its forward was replaced"
    if any(part._forward_hooks or part._forward_pre_hooks for part in (base, *module.lora_A.values())):
        return "hooks on its parts"
    if _weight_of(base) is None:
        return f"a base layer of class {type(base).__name__}"
    if any(parameter.requires_grad for parameter in base.parameters()):
        return "a base layer that is trained"
    if any(getattr(dropout, "p", 0.0) for dropout in module.lora_dropout.values()):
        return "LoRA dropout"
    if any(module.lora_variant.values()):
        return "a variant of LoRA"
    if any(b.bias is not None for b in module.lora_B.values()):
        return "a bias in the adapter"
    return None


def _forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Of a LoRA layer: the fused product while its adapters are on and nothing has been changed that forbids it."""
    names = [name for name in self.active_adapters if name in self.lora_A]
    base = self.base_layer
    weight = _weight_of(base)
    plain = not (args or kwargs or self.disable_adapters or self.merged_adapters or self.lora_variant)
    if not plain or not names or weight is None or base.weight.requires_grad:
        return type(self).forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    device, inputs = x.device.type, x.dtype
    if torch.is_autocast_enabled(device) and inputs != torch.float64:
        inputs = torch.get_autocast_dtype(device)
    terms = [LoraTerm(self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name]) for name in names]
    return lora_linear(x.to(getattr(base, "compute_dtype", None) or inputs), weight, base.bias, terms).to(inputs)


def patch_lora(model: nn.Module, patches: PatchSet) -> str | None:
    """Fuse every LoRA layer that allows it and is not fused yet.

    Returns:
        what was done and what was left, or ``None`` where there is no LoRA on a linear layer.
    """
    try:
        from peft.tuners.lora import Linear
        from peft.tuners.lora import layer as lora_layers
    except ImportError:
        return None
    fused, left = 0, Counter[str]()
    for module in model.modules():
        if not isinstance(module, lora_layers.LoraLayer) or not hasattr(module, "base_layer"):
            continue
        if not (isinstance(module, Linear) or type(module).__name__ == "Linear4bit"):
            continue
        reason = None if _MARK in vars(module) else why_not(module)
        if reason is not None:
            left[reason] += 1
            continue
        if _MARK not in vars(module):
            patches.set(module, _MARK, True)
            patches.set(module, "forward", MethodType(_forward, module))
        fused += 1
    if not fused and not left:
        return None
    parts = [f"{fused} linear layers with their adapter in one product"] if fused else []
    parts += [f"{count} left to PEFT: {reason}" for reason, count in left.items()]
    return "; ".join(parts)


def keep_4bit_weights_on_cpu(model: nn.Module, patches: PatchSet) -> int:
    """Keep bitsandbytes from repacking 4-bit weights in a forward without gradients, for AVX512-BF16 processors.

    It never unpacks them, and what is trained afterwards gets wrong gradients.

    Returns:
        how many layers were told.
    """
    told = 0
    for module in model.modules():
        if vars(module).get("support_avx512bf16_for_cpu"):
            patches.set(module, "support_avx512bf16_for_cpu", False)
            told += 1
    return told
