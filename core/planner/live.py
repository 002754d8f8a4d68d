"""The planner on a model that is there: what its steps will take, and what to change where that is too much."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import UnslothPluginsError, UnsupportedError
from unsloth_plugins.core.planner.memory import (
    RESERVED,
    STATES_ADAM,
    Dtype,
    Optimizer,
    Setup,
    check,
    least_bytes,
    predict,
)
from unsloth_plugins.core.planner.plan import GIB, Need, changes, longest, remedies_for
from unsloth_plugins.core.planner.shape import ModelShape, find_shape

if TYPE_CHECKING:
    from unsloth_plugins.core.apply import Applied

IMPOSSIBLE = 1.1  # times what there is: predictions of what was measured are within 5 %
_EXPERT_OR_MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "experts")


_OPTIMIZERS: dict[str, Optimizer] = {
    **dict.fromkeys(("adam", "adamw", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw8bit", "adamw_8bit", "adamw_bnb_8bit"), "adamw_8bit"),
}


def optimizer_named(name: str) -> Optimizer | None:
    """What the planner calls an optimizer that a trainer or a class calls ``name``; ``None`` where it knows none."""
    return _OPTIMIZERS.get(name.lower())


@dataclass(frozen=True)
class Forecast:
    """What the planner says of a model that is there.

    Attributes:
        state, detail: for the report.
        fits: whether the tokens asked for do; ``None`` without any, or where nothing can be said.
    """

    state: Literal["on", "left alone"]
    detail: str
    fits: bool | None = None


def setup_of(applied: Applied) -> tuple[ModelShape, Setup]:
    """Sizes and setup as the model has them; the optimizer, which is not there yet, as float32 AdamW.

    Raises:
        UnsupportedError: the formulas don't describe it.
        ConfigError: see ``memory.check``.
    """
    causal_lm = applied.parts.causal_lm
    if _processes() > 1:
        raise _unplanned("one process", f"{_processes()}")
    if not applied.checkpointing.on:
        raise _unplanned("gradient checkpointing", "a model without")
    shape = find_shape(causal_lm.config)
    rank, targets = _lora_of(causal_lm, bool(shape.experts) and shape.family != "gpt_oss")
    config = applied.config if applied.stream is None else replace(applied.config, weights="streamed")
    setup = Setup(_dtype_of(applied), rank, "all" if targets else "attention", "adamw", config)  # type: ignore[arg-type]
    check(shape, setup)
    return shape, setup


def _processes() -> int:
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else 1


def _unplanned(expected: str, got: str) -> UnsupportedError:
    return UnsupportedError(expected=f"{expected}, to be planned", got=got, remedy="Read the peak from the logs.")


def _dtype_of(applied: Applied) -> str:
    from unsloth_plugins.core.models.streaming import packed_layers

    if packed_layers(applied.parts):
        return "mxfp4"
    modules = list(applied.parts.decoder.modules())
    if any(type(module).__name__ == "Linear4bit" for module in modules):
        return "nf4"
    dtype = next(applied.parts.decoder.parameters()).dtype
    names = {torch.bfloat16: "bf16", torch.float16: "fp16"}
    if dtype not in names or any(type(module).__name__ == "Linear8bitLt" for module in modules):
        raise _unplanned(f"a base in {', '.join(get_args(Dtype))}", f"{dtype}".removeprefix("torch."))
    return names[dtype]


def _lora_of(causal_lm: nn.Module, joined: bool) -> tuple[int, bool]:
    """The largest rank, and whether more than attention has an adapter; ``joined``: experts' gate and up have one of
    twice the rank."""
    ranks, beyond = set(), False
    for name, parameter in causal_lm.named_parameters():
        if not parameter.requires_grad:
            continue
        if ".lora_A." not in name and ".lora_B." not in name:
            raise _unplanned("nothing but LoRA in training", f"{name} in training")
        beyond = beyond or any(part in _EXPERT_OR_MLP for part in name.split("."))
    for module in causal_lm.modules():
        if hasattr(module, "lora_A"):
            parts = 2 if joined and getattr(module, "parameter_name", None) == "gate_up_proj" else 1
            ranks |= {rank // parts for rank in module.r.values()}  # type: ignore[union-attr,operator]
    if not ranks:
        raise _unplanned("LoRA", "a model without adapters")
    return max(ranks), beyond


def forecast(
    applied: Applied, tokens: int | None, *, optimizer: Optimizer | None = None, memory: DeviceMemory | None = None
) -> Forecast | None:
    """What a step takes of the device that the model is on; ``None`` where that has no memory of a known size.

    Args:
        tokens: of a batch, padding included; ``None`` where nobody knows.
        optimizer: ``None`` for unknown, which is taken for AdamW.
    """
    memory = memory or DeviceMemory()
    device = next(applied.parts.decoder.parameters()).device
    if not memory.is_known(device):
        return None
    try:
        shape, setup = setup_of(applied)
    except UnslothPluginsError as error:
        return Forecast("left alone", f"not predicted: the planner expects {error.expected}; got {error.got}")
    setup = replace(setup, optimizer=optimizer or "adamw")
    allowed = memory.allowed(device)
    assumed = "" if optimizer else ", with AdamW"
    most = f"{longest(shape, setup, allowed / GIB):,} tokens a batch fit at the most{assumed}"
    if tokens is None:
        return Forecast("on", f"predicted: about {most}, in {allowed / GIB:.2f} GiB")
    least = Need.of(tokens, predict(shape, setup, tokens, allowed))
    fits = least.reserved_gib <= allowed / GIB
    need = Need.of(tokens, predict(shape, setup, tokens, allowed, spend=fits))
    return Forecast(
        "on",
        f"predicted: {tokens:,} tokens a batch take about {need.peak_gib:.2f} of {allowed / GIB:.2f} GiB, and about "
        f"{need.host_gib:.1f} GiB of host memory; about {most}",
        fits=fits,
    )


def outgrown(applied: Applied, tokens: int, memory: DeviceMemory | None = None) -> str | None:
    """Why a step of that length has no room beside packed experts; ``None`` where it has, or nobody knows.

    Adam's states are counted as float32 numbers, less what is on the device beside the model already.
    """
    from unsloth_plugins.core.models.streaming import obstacle_to_streaming, packed_layers

    memory = memory or DeviceMemory()
    causal_lm, packed = applied.parts.causal_lm, packed_layers(applied.parts)
    device = next(applied.parts.decoder.parameters()).device
    if not packed or not memory.is_known(device) or obstacle_to_streaming(packed) is not None:
        return None
    try:
        shape, setup = setup_of(applied)
    except UnslothPluginsError:
        return None
    tensors = [each for each in (*causal_lm.parameters(), *causal_lm.buffers()) if each.device == device]
    beside = memory.allocated(device) - sum(each.numel() * each.element_size() for each in tensors)
    states = STATES_ADAM * sum(each.numel() for each in causal_lm.parameters() if each.requires_grad)
    resident = replace(setup, config=replace(setup.config, weights="resident"))
    need = int(RESERVED * (least_bytes(shape, resident, tokens) + max(states - max(beside, 0), 0)))
    room = memory.allowed(device) - memory.allocated(device)
    if need <= room:
        return None
    return f"{tokens:,} tokens need up to {need / GIB:.1f} GiB, {room / GIB:.1f} GiB are free beside the model"


def check_possible(applied: Applied, tokens: int, memory: DeviceMemory | None = None) -> None:
    """Refuse a batch that is far from fitting, before it is tried. The optimizer's states are not counted.

    Raises:
        UnsupportedError: a step takes more than ``IMPOSSIBLE`` times what there is, by the plan that takes least.
    """
    memory = memory or DeviceMemory()
    device = next(applied.parts.decoder.parameters()).device
    if not memory.is_known(device):
        return
    try:
        shape, setup = setup_of(applied)
    except UnslothPluginsError:
        return  # nothing is known that would speak against it
    setup = replace(setup, optimizer="sgd")
    allowed = memory.allowed(device)
    need = Need.of(tokens, predict(shape, setup, tokens, allowed))
    if need.peak_gib <= IMPOSSIBLE * allowed / GIB:
        return
    largest = sorted(need.terms_gib.items(), key=lambda term: -term[1])[:3]
    parts = ", ".join(f"{name} {size:.2f}" for name, size in largest)
    found = remedies_for(shape, setup, tokens, allowed / GIB, None)
    raise UnsupportedError(
        expected=f"a batch of {tokens:,} tokens to fit in {allowed / GIB:.2f} GiB of device memory",
        got=f"about {need.peak_gib:.2f} GiB at the least, of them {parts}",
        remedy=f"Would fit: {'; or '.join(each.change for each in found)}." if found else "Use a larger card.",
    )


def explain(error: BaseException, applied: Applied, *, optimizer: Optimizer | None = None) -> None:
    """Add to an out-of-memory error of a device what can be changed; any other error stays as it is."""
    if not isinstance(error, torch.OutOfMemoryError):
        return
    tokens = applied.last_tokens
    text = f"unsloth-plugins: out of device memory at {tokens:,} tokens a batch. "
    try:
        shape, setup = setup_of(applied)
    except UnslothPluginsError:
        switch = "" if applied.checkpointing.on else "the trainer's gradient_checkpointing=True, "
        error.add_note(f'{text}What needs less: {switch}memory_policy="min_memory", fewer tokens a batch.')
        return
    setup = replace(setup, optimizer=optimizer or "adamw")
    now = predict(shape, setup, max(tokens, 1)).device_bytes
    peaks = {name: predict(shape, each, max(tokens, 1)).device_bytes for name, each in changes(shape, setup)}
    less = [f"{name} (about {peak / GIB:.2f} GiB)" for name, peak in peaks.items() if peak < now]
    less.append("fewer tokens a batch")
    error.add_note(f"{text}A step takes about {now / GIB:.2f} GiB at the least. What needs less: {', '.join(less)}.")
