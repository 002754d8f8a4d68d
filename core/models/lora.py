"""PEFT's LoRA on linear layers, dense or in bitsandbytes' 4 bits, through ``core.layers.lora_linear``.

What PEFT does that is not plain LoRA (merged, disabled or mixed adapters, variants such as DoRA) runs PEFT's own
forward, decided call by call. Replacements are functions bound to the instance that find
their state on it.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from unsloth_plugins.core.layers.lora_linear import LoraProjection, LoraTerm, lora_linears
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.report import Row

Choice = Literal["auto", "fused"]
_STATE = "_unsloth_lora"
_REASONS = {"Linear8bitLt": "an 8-bit base, which rounds its inputs to 8 bits too"}
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(eq=False)
class _Group:
    """Projections that their owner calls one after the other with the same tensor.

    The first call computes all; the others find their output here. A call with another tensor starts anew.
    """

    members: list[Any]
    source: torch.Tensor | None = None
    waiting: dict[int, torch.Tensor] = field(default_factory=dict)

    def take(self, module: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """The output that waits for ``module``, if it is that of ``x``."""
        if self.source is not x:
            self.source, self.waiting = None, {}
            return None
        found = self.waiting.pop(id(module), None)
        if not self.waiting:
            self.source = None
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> _Group:
        twin = memo[id(self)] = _Group([])
        twin.members = [copy.deepcopy(member, memo) for member in self.members]
        return twin


@dataclass(frozen=True, eq=False)
class _Lora:
    choice: Choice
    group: _Group | None


def _is_4bit(base: nn.Module) -> bool:
    return type(base).__name__ == "Linear4bit" and type(base).__module__.startswith("bitsandbytes.")


def _decoded(base: Any, dtype: torch.dtype) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(base.weight.data, base.weight.quant_state).to(dtype)


def _dense(weight_OI: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return weight_OI.to(dtype)


def _why_not_base(base: Any) -> str | None:
    """Why a linear layer can't be computed from its weight here, or ``None``."""
    four_bit = _is_4bit(base)
    if not four_bit and type(base) is not nn.Linear:
        return f"a base of {type(base).__name__}"
    if "forward" in vars(base) or _has_hooks(base):
        return "a base with hooks"
    if base.weight.requires_grad:
        return "a trained base"
    if four_bit and (getattr(base.weight, "quant_state", None) is None or base.weight.quant_state.shape[0] == 1):
        return "a base that is not quantised yet"
    return None


def _has_hooks(module: nn.Module) -> bool:
    before = module._forward_pre_hooks or module._backward_pre_hooks
    return bool(before or module._forward_hooks or module._backward_hooks)


def why_peft(module: Any) -> str | None:
    """Why this LoRA layer is PEFT's to compute as it stands now, or ``None``."""
    if (reason := _why_not_base(module.base_layer)) is not None:
        return reason
    if module.fan_in_fan_out:
        return "a transposed base"
    if module.disable_adapters or module.merged_adapters:
        return "disabled or merged adapters"
    for name in module.active_adapters:
        if name not in module.lora_A:
            continue
        if name in module.lora_variant or module.lora_bias[name]:
            return "a variant of LoRA"
        if type(module.lora_dropout[name]) not in (nn.Identity, nn.Dropout):
            return "another dropout than torch's"
        if type(module.lora_A[name]) is not nn.Linear or type(module.lora_B[name]) is not nn.Linear:
            return "adapters that are not linear layers"
    return None


def _term(module: Any, name: str) -> LoraTerm:
    dropout = module.lora_dropout[name]
    probability = getattr(dropout, "p", 0.0) if dropout.training else 0.0
    return LoraTerm(module.lora_A[name].weight, module.lora_B[name].weight, module.scaling[name], probability)


def _projection(module: Any) -> LoraProjection:
    base = getattr(module, "base_layer", module)
    names = [name for name in getattr(module, "active_adapters", ()) if name in module.lora_A]
    terms = [_term(module, name) for name in names]
    weight = functools.partial(_decoded, base) if _is_4bit(base) else functools.partial(_dense, base.weight)
    return LoraProjection(weight, base.out_features, base.bias, terms)


def _dtypes(base: Any, device: torch.device, given: torch.dtype) -> tuple[torch.dtype, torch.dtype] | None:
    """The dtypes of the products and of the output, as the base has them; ``None`` where it would refuse."""
    autocast = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    if given == torch.float64:
        autocast = None
    if _is_4bit(base):
        return autocast or (base.compute_dtype if base.compute_type_is_set else None) or given, given
    if autocast is not None:
        return autocast, autocast
    return (given, given) if given == base.weight.dtype else None


def _shares(module: Any, x: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Whether a member of a group could be computed from ``x`` together with the one that was called."""
    base = module.base_layer
    return base.in_features == x.shape[-1] and why_peft(module) is None and _dtypes(base, x.device, x.dtype) == dtypes


def linears_of(
    modules: Sequence[Any], x: torch.Tensor
) -> tuple[tuple[LoraProjection, ...], torch.dtype, torch.dtype] | None:
    """Linear layers, with LoRA or without, that are called one after the other on what came from ``x``.

    Returns:
        The projections, the one dtype of their products and that of the last output; ``None`` where one of the layers
        has to be called as a module, or they don't agree.
    """
    products, result = set(), x.dtype
    for module in modules:
        base = getattr(module, "base_layer", None)
        if base is None:
            base, reason = module, _why_not_base(module)
        else:
            state: _Lora | None = vars(module).get(_STATE)
            ours = state is not None and (state.choice == "fused" or x.is_cuda) and not _has_hooks(module)
            reason = why_peft(module) if ours else "not ours"
        dtypes = _dtypes(base, x.device, result) if reason is None else None
        if dtypes is None:
            return None
        products.add(dtypes[0])
        result = dtypes[1]
    if len(products) != 1:
        return None
    return tuple(_projection(module) for module in modules), products.pop(), result


def _lora_forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    state: _Lora | None = vars(self).get(_STATE)
    if state is None or args or kwargs or (state.choice == "auto" and not x.is_cuda):
        return type(self).forward(self, x, *args, **kwargs)  # type: ignore[no-any-return]
    group = state.group
    if group is not None and (found := group.take(self, x)) is not None:
        return found
    dtypes = _dtypes(self.base_layer, x.device, x.dtype)
    if dtypes is None or why_peft(self) is not None:
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    members = [self]
    if group is not None:
        able = [m for m in group.members if m is self or _shares(m, x, dtypes)]
        members = able if self in able else members
    projections = [_projection(module) for module in members]
    if not any(each.terms for each in projections):
        return type(self).forward(self, x)  # type: ignore[no-any-return]
    product, result = dtypes
    with torch.autocast(x.device.type, enabled=False):
        outputs = [y.to(result) for y in lora_linears(x.to(product), projections)]
    waiting = {id(module): y for module, y in zip(members, outputs, strict=True)}
    mine = waiting.pop(id(self))
    if group is not None and waiting:
        group.source, group.waiting = x, waiting
    return mine


@dataclass(frozen=True)
class TakenLora:
    """PEFT's LoRA on the linear layers of one model, taken over.

    Attributes:
        decoder: of the model.
        choice: of the implementation.
        layers, groups: that are ours.
        left: why others are left to PEFT, and how many.
    """

    decoder: nn.Module
    choice: Choice
    layers: int
    groups: int
    left: dict[str, int]
    feature: ClassVar[str] = "lora"

    def row(self) -> Row:
        """What runs where the model is now."""
        others = "; ".join(f"{count} stay PEFT's: {reason}" for reason, count in self.left.items())
        if not self.layers:
            return Row(self.feature, "left alone", others or "no adapter on a linear layer so far")
        detail = f"{self.layers} linear layers, {self.groups} groups that read their input once"
        fused = self.choice == "fused" or next(iter(self.decoder.parameters())).is_cuda
        if not fused:
            detail += ": on CUDA only"
        return Row(self.feature, "on" if fused else "left alone", f"{detail}; {others}" if others else detail)


def take_lora(parts: ModelParts, choice: Choice | None, patches: PatchSet) -> TakenLora | Row:
    """Replace the LoRA layers that are not replaced yet; ``choice`` is the option of that name."""
    if choice is None:
        return Row(TakenLora.feature, "left alone", "switched off in the config")
    return TakenLora(parts.decoder, choice, *_patch(parts.causal_lm, patches, choice))


def _patch(causal_lm: nn.Module, patches: PatchSet, choice: Choice) -> tuple[int, int, dict[str, int]]:
    """Replace what is not replaced yet.

    Returns:
        How many layers are ours, in how many groups, and why others are left to PEFT as they stand now.
    """
    try:
        from peft.tuners.lora.layer import Linear, LoraLayer
    except ImportError:
        return 0, 0, {}
    kinds: list[type] = [Linear]
    try:
        from peft.tuners.lora.bnb import Linear4bit

        kinds.append(Linear4bit)
    except ImportError:
        pass
    head_of: Any = getattr(causal_lm, "get_output_embeddings", None)
    head = None if head_of is None else head_of()
    left: Counter[str] = Counter()
    ours: list[Any] = []
    for module in causal_lm.modules():
        if not isinstance(module, LoraLayer) or module is head or type(module).__name__ == "ParamWrapper":
            continue
        if type(module) not in kinds:
            left[_REASONS.get(type(module).__name__, f"a layer of {type(module).__name__}")] += 1
        elif "forward" in vars(module) and _STATE not in vars(module):
            left["a layer whose forward was replaced"] += 1
        else:
            ours.append(module)
            if (reason := why_peft(module)) is not None:
                left[reason] += 1
    owners = {id(module) for module in ours}
    groups: dict[int, _Group] = {}
    for parent in causal_lm.modules():
        for names in _GROUPS:
            members = [parent._modules.get(name) for name in names]
            members = [each for each in members if id(each) in owners]
            if len(members) > 1 and {*names} <= {*inspect.unwrap(type(parent).forward).__code__.co_names}:
                shared = _Group(members)
                groups |= {id(each): shared for each in members}
    for module in ours:
        if _STATE not in vars(module):
            patches.set(module, _STATE, _Lora(choice, groups.get(id(module))))
            patches.set(module, "forward", MethodType(_lora_forward, module))
    return len(ours), len({id(group) for group in groups.values()}), dict(left)


def keep_unpacked(causal_lm: nn.Module, patches: PatchSet) -> Row | None:
    """Keep bitsandbytes from repacking 4-bit weights on CPUs with AVX512-BF16, after which gradients are wrong.

    Its layers do so in the first evaluation without gradients and never take it back for training. Weights that are
    packed already are unpacked, which saving does; their scales have been rounded to bfloat16 then.

    Returns:
        What there was to do, or ``None``.
    """
    layers = [m for m in causal_lm.modules() if _is_4bit(m) and getattr(m, "support_avx512bf16_for_cpu", False)]
    packed = 0
    for module in layers:
        patches.set(module, "support_avx512bf16_for_cpu", False)
        weight: Any = module.weight
        if getattr(getattr(weight, "quant_state", None), "packing_format_for_cpu", False):
            module.state_dict()
            packed += 1
    if not layers:
        return None
    detail = f"bitsandbytes may not repack {len(layers)} layers for inference on this CPU"
    detail += f"; {packed} had been, and their scales rounded: load them anew for exact ones" if packed else ""
    return Row("4-bit weights", "on", detail)
