"""gpt-oss with packed experts out of a merge: only what the adapter changed is quantised again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.export.base import Base, spans
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.tensors import Info, Output
from unsloth_plugins.core.mxfp4.codec import BLOCK, BYTES, decode, encode

_PIECE = 4 << 20
_CPU_ROWS = 128  # of an expert at a time, to stay in a core's cache: twice as fast as whole experts
_EXPERTS = ("gate_up_proj", "down_proj")
_NOT_PACKED = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")


@dataclass
class Requantised:
    """How far the packed tensor is from the float32 sum.

    Attributes:
        relative_error: norm of the difference over norm of the sum.
        largest_error: largest magnitude of the difference.
        error_over_change: norm of the difference over norm of what the adapter changed; above 1 most of the training
            is lost in the rounding.
    """

    relative_error: float
    largest_error: float
    error_over_change: float | None


def quantization_of(base: Base) -> dict[str, Any]:
    """The ``quantization_config`` of a packed result: the base's own, or that of the published gpt-oss."""
    stored = base.config.get("quantization_config")
    if isinstance(stored, dict) and stored.get("quant_method") == "mxfp4":
        return stored
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(_NOT_PACKED)}


def packed_outputs(merged: Merged, errors: dict[str, Requantised]) -> list[Output]:
    """The tensors of an MXFP4 checkpoint.

    Args:
        merged: a gpt-oss, packed or dense.
        errors: filled, tensor by tensor, when the outputs are written.

    Raises:
        UnsupportedError: not a gpt-oss, or sizes that can't be packed.
    """
    base = merged.base
    if base.config.get("model_type") != "gpt_oss":
        raise UnsupportedError(
            expected="a gpt_oss, whose experts MXFP4 is for",
            got=f"model_type {base.config.get('model_type')!r}",
            remedy="Export to bf16.",
        )
    outputs: list[Output] = []
    for name, info in merged.infos.items():
        is_expert = name.endswith(tuple(f".experts.{part}" for part in _EXPERTS))
        if is_expert and name in base.packed and not merged.changed(name):
            for stored in (f"{name}_blocks", f"{name}_scales"):
                outputs.append(_copied(merged, stored))
        elif is_expert:
            outputs += _encoded(merged, name, info, errors)
        else:
            outputs.append(_rounded(merged, name, info))
    return outputs


def _copied(merged: Merged, stored: str) -> Output:
    source = merged.base.source
    info = source.infos[stored]

    def pieces() -> Iterator[torch.Tensor]:
        for begin, end in spans(Info(torch.float32, info.shape)):
            yield source.read(stored, begin, end)

    return Output(stored, info, pieces)


def _rounded(merged: Merged, name: str, info: Info) -> Output:
    def pieces() -> Iterator[torch.Tensor]:
        for begin, end in spans(info):
            yield merged.read(name, begin, end).to(info.dtype).contiguous()

    return Output(name, info, pieces)


def _encoded(merged: Merged, name: str, info: Info, errors: dict[str, Requantised]) -> list[Output]:
    n_experts, inputs, outputs = info.shape
    if inputs % BLOCK:
        raise UnsupportedError(
            expected=f"experts with a multiple of {BLOCK} inputs, the block of MXFP4",
            got=f"{name} of shape {list(info.shape)}",
            remedy="Export to bf16.",
        )
    shape = (n_experts, outputs, inputs // BLOCK)
    step = _CPU_ROWS if merged.base.device.type == "cpu" else n_experts * outputs
    scales_of_all: list[torch.Tensor] = []

    def blocks_of_all() -> Iterator[torch.Tensor]:
        scales_of_all.clear()
        squares = {"sum": 0.0, "error": 0.0, "change": 0.0}
        largest = 0.0
        for begin, end in spans(info, _PIECE):
            before, wide = (
                rows.float().transpose(-1, -2).flatten(0, 1) for rows in merged.before_and_after(name, begin, end)
            )
            found: list[tuple[torch.Tensor, torch.Tensor]] = []
            for part, old in zip(wide.split(step), before.split(step), strict=True):
                found.append(encode(part))
                error = decode(*found[-1]) - part
                for key, numbers in (("sum", part), ("error", error), ("change", part - old)):
                    squares[key] += torch.linalg.vector_norm(numbers).item() ** 2
                largest = max(largest, error.abs().max().item())
            blocks, scales = (torch.cat(parts).unflatten(0, (-1, outputs)) for parts in zip(*found, strict=True))
            scales_of_all.append(scales)
            yield blocks
        errors[name] = Requantised(
            relative_error=(squares["error"] / max(squares["sum"], 1e-300)) ** 0.5,
            largest_error=largest,
            error_over_change=(squares["error"] / squares["change"]) ** 0.5 if squares["change"] else None,
        )

    def scales() -> Iterator[torch.Tensor]:
        if not scales_of_all:  # the blocks are in a file that an earlier run finished
            for _ in blocks_of_all():
                pass
        yield from scales_of_all
        scales_of_all.clear()

    return [
        Output(f"{name}_blocks", Info(torch.uint8, (*shape, BYTES)), blocks_of_all),
        Output(f"{name}_scales", Info(torch.uint8, shape), scales),
    ]
