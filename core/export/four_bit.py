"""bitsandbytes' 4 bits out of a merge, as transformers' own ``save_pretrained`` stores them.

A base that is in these 4 bits already keeps its settings, and the bytes of what no adapter changed. Any other base gets
NF4 in blocks of 64 with quantised scales, on the layers that transformers would quantise.

Source: ``bitsandbytes.functional.QuantState.as_dict`` (bitsandbytes 0.50), ``transformers.quantizers`` (5.24).
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import Any

import torch

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.export.base import Base, spans
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.packed import Requantised
from unsloth_plugins.core.export.tensors import Info, MemoryTensors, Output

_BLOCK, _NESTED_BLOCK = 64, 256
_OFFSET_WIDTH = 25  # of a float's repr
_NEW = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
}


def check_package() -> None:
    """Refuse before any work where bitsandbytes is missing.

    Raises:
        UnsupportedError: it is.
    """
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UnsupportedError(
            expected="the package bitsandbytes, which quantises to its 4 bits",
            got="none",
            remedy="Install it: pip install 'unsloth-plugins[quant]', or choose bf16.",
        )


def quantization_of(merged: Merged) -> dict[str, Any]:
    """The ``quantization_config`` of the result: the base's own, or NF4 for every linear layer but the head."""
    stored = merged.base.config.get("quantization_config") or {}
    if stored.get("quant_method") == "bitsandbytes":
        return dict(stored)
    named, every = _linear_layers(merged.base.config)
    quantised = {name for name in named if f"{name}.weight" in merged.infos}
    return {**_NEW, "llm_int8_skip_modules": sorted(every - quantised)}


def _linear_layers(config: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Names of the linear layers that get quantised, and of all; from transformers' model without any weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**plain))
    every = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    head = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
    return every - head, every | head


def four_bit_outputs(merged: Merged, quantization: dict[str, Any], errors: dict[str, Requantised]) -> list[Output]:
    """The tensors of a checkpoint in bitsandbytes' 4 bits.

    Args:
        merged: any model.
        quantization: from ``quantization_of``.
        errors: filled, tensor by tensor, when the outputs are written.
    """
    base = merged.base
    skipped = quantization.get("llm_int8_skip_modules") or ()
    named = base.in_four_bits or {f"{name}.weight" for name in _linear_layers(base.config)[0] if name not in skipped}
    outputs: list[Output] = []
    for name, info in merged.infos.items():
        if name not in named:
            outputs.append(_in_bf16(merged, name, info))
        elif name in base.in_four_bits and not merged.changed(name):
            outputs += [_copied(merged, stored) for stored in base.stored(name)]
        else:
            outputs += _quantised(merged, name, info, quantization, errors)
    return outputs


def _in_bf16(merged: Merged, name: str, info: Info) -> Output:
    dtype = torch.bfloat16 if info.dtype.is_floating_point else info.dtype

    def pieces() -> Iterator[torch.Tensor]:
        for begin, end in spans(info):
            yield merged.read(name, begin, end).to(dtype).contiguous()

    return Output(name, Info(dtype, info.shape), pieces)


def _copied(merged: Merged, stored: str) -> Output:
    source = merged.base.source
    return Output(stored, source.infos[stored], lambda: iter([source.read(stored)]))


def _quantised(
    merged: Merged, name: str, info: Info, quantization: dict[str, Any], errors: dict[str, Requantised]
) -> list[Output]:
    kind = quantization.get("bnb_4bit_quant_type") or "fp4"
    nested = bool(quantization.get("bnb_4bit_use_double_quant"))
    storage = getattr(torch, quantization.get("bnb_4bit_quant_storage") or "uint8")
    count = Info(torch.uint8, info.shape).nbytes
    blocks = -(-count // _BLOCK)
    state = {"quant_type": kind, "blocksize": _BLOCK, "dtype": "bfloat16", "shape": list(info.shape)}
    if nested:
        state |= {"nested_blocksize": _NESTED_BLOCK, "nested_dtype": "float32"}
    width = len(json.dumps(state | {"nested_offset": 0.0})) + _OFFSET_WIDTH
    infos = {
        "": Info(storage, (-(-count // 2 // storage.itemsize), 1)),
        ".absmax": Info(torch.uint8 if nested else torch.float32, (blocks,)),
        ".quant_map": Info(torch.float32, (16,)),
        f".quant_state.bitsandbytes__{kind}": Info(torch.uint8, (width,)),
    }
    if nested:
        infos[".nested_absmax"] = Info(torch.float32, (-(-blocks // _NESTED_BLOCK),))
        infos[".nested_quant_map"] = Info(torch.float32, (256,))
    parts: dict[str, torch.Tensor] = {}

    def compute() -> None:
        from bitsandbytes.functional import quantize_4bit

        before, wide = (rows.float() for rows in merged.before_and_after(name))
        packed, found = quantize_4bit(
            wide.contiguous(), blocksize=_BLOCK, compress_statistics=nested, quant_type=kind, quant_storage=storage
        )
        parts.update({"": packed.view(infos[""].shape), ".absmax": found.absmax, ".quant_map": found.code})
        mine = dict(state)
        if nested:
            parts.update({".nested_absmax": found.state2.absmax, ".nested_quant_map": found.state2.code})
            mine["nested_offset"] = found.offset.item()
        text = json.dumps(mine).ljust(width).encode()
        parts[f".quant_state.bitsandbytes__{kind}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        stored = MemoryTensors({f"{name}{suffix}": part for suffix, part in parts.items()})
        errors[name] = _error(Base(stored, {}, merged.base.device).read(name).float(), wide, before)

    def pieces_of(suffix: str) -> Iterator[torch.Tensor]:
        if suffix not in parts:
            compute()
        yield parts.pop(suffix)

    def output(suffix: str, part: Info) -> Output:
        return Output(f"{name}{suffix}", part, lambda: pieces_of(suffix))

    return [output(suffix, part) for suffix, part in infos.items()]


def _error(got: torch.Tensor, wide: torch.Tensor, before: torch.Tensor) -> Requantised:
    error = torch.linalg.vector_norm(got - wide).item()
    change = torch.linalg.vector_norm(wide - before).item()
    return Requantised(
        relative_error=error / max(torch.linalg.vector_norm(wide).item(), 1e-300),
        largest_error=(got - wide).abs().max().item(),
        error_over_change=error / change if change else None,
    )
