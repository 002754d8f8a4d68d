"""LoRA on experts, in PEFT's own modules and file format, found or added; the computation is ``core.experts``'.

PEFT wraps a parameter of the experts module in ``ParamWrapper``, ``gate_up_proj`` innermost. Its ``lora_A`` is
[r * E, in], seen as (E, r, in), and its ``lora_B`` is [out, r * E], seen as (out, r, E): the expert runs fastest there.

Source: ``peft.tuners.lora.layer.ParamWrapper.get_delta_weight`` (PEFT 0.20 to 0.21).
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Collection
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.experts import ExpertLora
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.report import Row

_DEEPEST = 24  # callers looked at; every module on the way down adds one
_FUSED = {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
    "gate_up_proj": "gate_up_proj",
    "down_proj": "down_proj",
}


def unwrap_experts(experts: nn.Module) -> tuple[nn.Module, dict[str, Any]]:
    """The experts module below PEFT's parameter wrappers, and the wrapper of each adapted parameter by its name."""
    wrappers: dict[str, Any] = {}
    while isinstance(inner := getattr(experts, "base_layer", None), nn.Module) and hasattr(experts, "parameter_name"):
        wrappers[experts.parameter_name] = experts  # type: ignore[index]
        experts = inner
    return experts, wrappers


def expert_adapters(experts: nn.Module) -> tuple[nn.Module, dict[str, tuple[ExpertLora, ...]]]:
    """The experts module below PEFT's wrappers, and the terms that are active now on each projection.

    Raises:
        UnsupportedError: a hook sits on a wrapper, as for batches that mix adapters.
    """
    base, wrappers = unwrap_experts(experts)
    lora: dict[str, tuple[ExpertLora, ...]] = {"gate_up_proj": (), "down_proj": ()}
    for name, wrapper in wrappers.items():
        if wrapper._forward_pre_hooks or wrapper._forward_hooks:
            raise UnsupportedError(
                expected="no hooks on PEFT's wrappers of the experts, whose forward is not called",
                got=f"a hook on the wrapper of {name}",
                remedy="Put hooks on the experts module itself; batches that mix adapters don't work with experts.",
            )
        if wrapper.merged:
            if wrapper.disable_adapters:
                wrapper.unmerge()
            continue
        if not wrapper.disable_adapters:
            lora[name] = tuple(_term(wrapper, each) for each in wrapper.active_adapters if each in wrapper.lora_A)
    return base, lora


def _term(wrapper: Any, adapter: str) -> ExpertLora:
    n_experts = wrapper.num_experts
    a: torch.Tensor = wrapper.lora_A[adapter].weight
    b: torch.Tensor = wrapper.lora_B[adapter].weight
    dropout = wrapper.lora_dropout[adapter]
    return ExpertLora(
        a_ErI=a.view(n_experts, -1, a.shape[-1]),
        b_ErO=b.view(b.shape[0], -1, n_experts).permute(2, 1, 0),
        scaling=wrapper.scaling[adapter],
        dropout=getattr(dropout, "p", 0.0) if dropout.training else 0.0,
    )


def _matches(targets: Any, key: str) -> bool:
    """PEFT's rule: a string is a regular expression for the whole name, a collection holds names or their ends."""
    if not targets:
        return False
    if isinstance(targets, str):
        return re.fullmatch(targets, key) is not None
    return any(key == target or key.endswith(f".{target}") for target in targets)


def linear_names_for_peft(name: str) -> list[str]:
    """Names to add to those of linear layers while PEFT expands ``target_modules="all-linear"``; otherwise none.

    PEFT then leaves no trace of the question in the config: it must be answered while it is asked. It walks
    ``named_modules``, so the experts module sees the function that asks among its callers.

    Args:
        name: of the experts module.
    """
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame.f_code.co_name == "_maybe_include_all_linear_layers":
            return [f"{name}.{projection}" for projection in ("gate_up_proj", "down_proj")]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return []


def _places(parts: ModelParts) -> list[tuple[int, nn.Module, str]]:
    """Of every layer with experts: its number, its MLP, and the name of its experts module."""
    names = {id(module): name for name, module in parts.causal_lm.named_modules()}
    return [
        (number, layer.mlp, names[id(layer.mlp)] + ".experts")
        for number, layer in enumerate(parts.layers)
        if layer.mlp is not None and layer.experts is not None
    ]


def _configs(parts: ModelParts) -> dict[str, Any]:
    """Adapters in training by their names."""
    configs: dict[str, Any] = getattr(parts.causal_lm, "peft_config", None) or {}
    return {name: config for name, config in configs.items() if not getattr(config, "inference_mode", False)}


def _is_lora(config: Any) -> bool:
    return hasattr(config, "use_rslora")


def check_targets(parts: ModelParts) -> None:
    """Every name in ``target_modules`` and ``target_parameters`` of an adapter in training must match something.

    Raises:
        ConfigError: naming the target that matches nothing.
    """
    modules = {name.replace(".base_layer", "") for name, _ in parts.causal_lm.named_modules()}
    parameters = {name.replace(".base_layer", "") for name, _ in parts.causal_lm.named_parameters()}
    keys = [key for _, _, key in _places(parts)]
    parameters |= {f"{key}.{name}" for key in keys for name in ("gate_up_proj", "down_proj")}
    for config in _configs(parts).values():
        experts = {f"{key}.{name}" for key in keys for name in _FUSED} if _is_lora(config) else set()
        for option, known in (("target_modules", modules | experts), ("target_parameters", parameters)):
            targets = getattr(config, option, None)
            if not targets or isinstance(targets, str):
                continue
            for target in sorted(targets):
                if any(_matches([target], name) for name in known):
                    continue
                ends = {name.rpartition(".")[2] for name in known} - {str(n) for n in range(len(parts.layers))}
                near = get_close_matches(target.rpartition(".")[2], ends, n=1)
                raise ConfigError(
                    expected=f"every name in {option} to match something in the model",
                    got=f"{target!r}, which matches nothing",
                    remedy=f"Did you mean `{near[0]}`?" if near else "Remove it.",
                )


def _asked(config: Any, key: str, layer: int) -> set[str]:
    """Which fused projections of the experts module named ``key`` the adapter's target_modules ask for."""
    chosen = config.layers_to_transform
    if chosen is not None and layer not in ([chosen] if isinstance(chosen, int) else chosen):
        return set()
    named = {name for name in _FUSED if _matches(config.target_modules, f"{key}.{name}")}
    named -= {name for name in named if _matches(config.exclude_modules, f"{key}.{name}")}
    if "gate_up_proj" not in named and len(named & {"gate_proj", "up_proj"}) == 1:
        (one,) = named & {"gate_proj", "up_proj"}
        raise ConfigError(
            expected="gate_proj and up_proj together: the two share one matrix per expert, and one LoRA A",
            got=f"target_modules with {one} only",
            remedy="Name both, or neither.",
        )
    return {_FUSED[name] for name in named}


def _pattern(config: Any, option: str, key: str, name: str, default: int) -> int:
    """The rank or alpha of one projection; given by gate_proj and up_proj, it is written down for the fused one."""
    from peft.utils.other import get_pattern_key

    patterns: dict[str, int] = getattr(config, option)
    given = {}
    for alias in (alias for alias, fused in _FUSED.items() if fused == name):
        pattern = get_pattern_key(list(patterns), f"{key}.{alias}")
        if pattern in patterns:
            given[alias] = patterns[pattern]
    if name in given or not given:
        return given.get(name, default)
    if len(given) != 2 or len(set(given.values())) != 1:
        raise ConfigError(
            expected=f"{option} for gate_proj and up_proj alike: the two share one LoRA A",
            got=str(given),
            remedy="Give both the same number, or name gate_up_proj.",
        )
    patterns[f"experts.{name}"] = given["gate_proj"]
    return given["gate_proj"]


def _check_supported(config: Any) -> None:
    wrong = {
        "use_dora": bool(config.use_dora),
        "lora_bias": bool(config.lora_bias),
        "init_lora_weights": isinstance(config.init_lora_weights, str) and config.init_lora_weights != "gaussian",
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise UnsupportedError(
                expected="plain or rank-stabilised LoRA on experts",
                got=f"{name}={getattr(config, name)!r}",
                remedy=f"Remove {name}, or leave gate_proj, up_proj and down_proj out of target_modules.",
            )


def missing_adapters(parts: ModelParts) -> dict[str, list[tuple[nn.Module, str, str]]]:
    """The expert projections that adapters in training ask for and do not have: by adapter, (MLP, name, projection).

    Raises:
        ConfigError: gate_proj without up_proj or the other way round.
        UnsupportedError: DoRA or another variant on experts.
    """
    missing: dict[str, list[tuple[nn.Module, str, str]]] = {}
    places = _places(parts)
    for adapter, config in _configs(parts).items():
        if not _is_lora(config):
            continue
        for number, mlp, key in places:
            _, wrappers = unwrap_experts(mlp.experts)  # type: ignore[arg-type]
            there = {name for name, wrapper in wrappers.items() if adapter in wrapper.lora_A}
            asked = _asked(config, key, number) - there
            found = [(mlp, key, name) for name in ("gate_up_proj", "down_proj") if name in asked]
            if found:
                missing.setdefault(adapter, []).extend(found)
        if adapter in missing:
            _check_supported(config)
    return missing


def add_missing_adapters(parts: ModelParts) -> str | None:
    """Add the expert adapters that ``target_modules`` asks for and PEFT could not create.

    PEFT looks for modules, and gpt-oss's experts are parameters: ``gate_proj``, ``up_proj``, ``down_proj`` match
    nothing there without a word. The wrappers are PEFT's, and the adapter's config then names them under
    ``target_parameters``, so that PEFT alone can load the file.

    Returns:
        What was added, or ``None``.

    Raises:
        ConfigError, UnsupportedError: as ``missing_adapters``, before anything is added.
    """
    notes = []
    configs = _configs(parts)
    for adapter, wanted in missing_adapters(parts).items():
        config = configs[adapter]
        for mlp, key, name in wanted:
            _add(parts.causal_lm, mlp, key, name, adapter, config)
        _record(config, [f"{key}.{name}" for _, key, name in wanted], len(_places(parts)))
        notes.append(f"LoRA r={config.r} added to {len(wanted)} expert projections for adapter {adapter!r}")
        if config.lora_dropout:
            notes.append(
                f"dropout {config.lora_dropout} is active; adapter_config.json will say 0, "
                "because PEFT does not load expert adapters with dropout"
            )
            config.lora_dropout = 0.0
    return "; ".join(notes) or None


def complete_adapters(parts: ModelParts, config: UnslothConfig) -> Row | None:
    """Check the targets of adapters in training, add what PEFT could not create, and say so; ``None`` for nothing.

    Raises:
        ConfigError: a target matches nothing, or half of a fused projection is named.
        UnsupportedError: a LoRA variant that experts can't have, or LoRA on experts with ``experts=None``.
    """
    check_targets(parts)
    if missing_adapters(parts) and config.experts is None:
        raise UnsupportedError(
            expected="an implementation of experts for LoRA on experts by target_modules",
            got="experts=None",
            remedy="Leave `experts` out, or name the experts in target_parameters and let PEFT compute them.",
        )
    if (added := add_missing_adapters(parts)) is not None:
        return Row("adapters", "on", added)
    if not _experts_left_out(parts):
        return None
    frozen = "LoRA is on every linear layer and on no expert; name gate_proj, up_proj, down_proj to train those"
    return Row("adapters", "left alone", frozen)


def _experts_left_out(parts: ModelParts) -> bool:
    """Whether LoRA in training covers every linear layer and no expert: meant so, or ``"all-linear"`` on dense ones."""
    places = _places(parts)
    configs = [config for config in _configs(parts).values() if _is_lora(config) and config.target_modules]
    if not places or not configs or any(unwrap_experts(mlp.experts)[1] for _, mlp, _ in places):  # type: ignore[arg-type]
        return False
    attention = [layer.attention for layer in parts.layers if layer.attention is not None]
    projections = [getattr(module, name) for module in attention for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return bool(projections) and all(hasattr(projection, "lora_A") for projection in projections)


def _add(causal_lm: nn.Module, mlp: nn.Module, key: str, name: str, adapter: str, config: Any) -> None:
    from peft.tuners.lora.layer import LoraLayer, ParamWrapper

    rank = _pattern(config, "rank_pattern", key, name, config.r)
    alpha = _pattern(config, "alpha_pattern", key, name, config.lora_alpha)
    plain = copy.copy(config)
    plain.lora_dropout = 0.0  # PEFT refuses it on parameters; ours is put in below
    siblings: list[Any] = [module for module in causal_lm.modules() if isinstance(module, LoraLayer)]
    base, wrappers = unwrap_experts(mlp.experts)  # type: ignore[arg-type]
    wrapper = wrappers.get(name)
    if wrapper is None:
        below_down = name == "gate_up_proj" and "down_proj" in wrappers
        inside: Any = base if below_down else mlp.experts
        wrapper = ParamWrapper(inside, adapter, parameter_name=name, config=plain, r=rank, lora_alpha=alpha)
        if below_down:
            wrappers["down_proj"].base_layer = wrapper
        else:
            mlp.experts = wrapper
    else:
        wrapper.update_layer(adapter, rank, lora_alpha=alpha, config=plain)
    if config.lora_dropout:
        wrapper.lora_dropout[adapter] = nn.Dropout(config.lora_dropout)
    dtype = torch.float32
    for sibling in siblings:
        if adapter in sibling.lora_A and sibling is not wrapper:
            dtype = sibling.lora_A[adapter].weight.dtype
            wrapper.set_adapter(sibling.active_adapters)
            wrapper.enable_adapters(not sibling.disable_adapters)
            break
    for module in (wrapper.lora_A[adapter], wrapper.lora_B[adapter]):
        module.to(dtype)
    wrapper.train(mlp.training)


def _record(config: Any, places: Collection[str], n_layers: int) -> None:
    """Let the adapter's config say what it has: expert projections are parameters to PEFT, not modules."""
    chosen = set(config.target_parameters or ())
    for name in ("gate_up_proj", "down_proj"):
        of_name = [place for place in places if place.endswith(f".{name}")]
        chosen |= {f"mlp.experts.{name}"} if len(of_name) == n_layers else set(of_name)
    config.target_parameters = sorted(chosen)
    if isinstance(config.target_modules, (set, list, tuple)):
        config.target_modules = {t for t in config.target_modules if t.rpartition(".")[2] not in _FUSED}
