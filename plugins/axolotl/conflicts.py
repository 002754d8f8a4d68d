"""Lines of an Axolotl config that cannot go with ours, each refused with one message that says which to change."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unsloth_plugins.core import UnslothConfig
from unsloth_plugins.core.errors import ConflictError, UnsupportedError

_ACTIVATIONS = "one owner of checkpointed activations"
_OWN = "set `gradient_checkpointing: true`; the inputs of the layers then wait in host memory"
_EXPERTS = "one owner of the experts"
_FORWARD = "one owner of the model's forward"
_WHOLE = "whole parameters and whole rows on each process"
_DDP = "`axolotl train FILE --launcher torchrun -- --nproc-per-node=N` is DDP; for FSDP2 use another adapter"
_COMPUTED = "the layers and the loss are already taken over"

# key -> (what is expected, why the line can go)
_TRUTHY = {
    "activation_offloading": (_ACTIVATIONS, _OWN),
    "layer_offloading": ("layers that stay on their device", "activations are offloaded instead"),
    "selective_checkpointing": (_ACTIVATIONS, _OWN),
    "tiled_mlp": (_FORWARD, _COMPUTED),
    "lora_mlp_kernel": (_FORWARD, _COMPUTED),
    "lora_qkv_kernel": (_FORWARD, _COMPUTED),
    "lora_o_kernel": (_FORWARD, _COMPUTED),
    "lora_embedding_kernel": (_FORWARD, _COMPUTED),
    "use_kernels": (_FORWARD, "kernels from the Hub replace forwards on every train() and eval()"),
    "fused_attn_kernel": (_FORWARD, _COMPUTED),
    "chunked_cross_entropy": ("one owner of the loss", "the loss is computed in chunks already"),
    "flash_attn_cross_entropy": ("one owner of the loss", "the loss is computed in chunks already"),
    "flash_attn_fuse_mlp": (_FORWARD, _COMPUTED),
    "flash_optimum": (_FORWARD, _COMPUTED),
    "use_scattermoe": (_EXPERTS, "choose with `unsloth: {experts: ...}`"),
    "use_sonicmoe": (_EXPERTS, "choose with `unsloth: {experts: ...}`"),
    "expert_backend": (_EXPERTS, "choose with `unsloth: {experts: ...}`"),
    "quantize_moe_experts": (_EXPERTS, "experts of an MXFP4 checkpoint stay packed by themselves"),
    "torch_compile": ("an uncompiled model", "patched forwards and offloaded checkpointing break its graph"),
    "fsdp": ("DDP, the only one tried under Axolotl", _DDP),
    "fsdp_config": ("DDP, the only one tried under Axolotl", _DDP),
    "deepspeed": ("parameters held by torch", _DDP),
}
_SIZES = ("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size", "expert_parallel_size")
_PLUGINS = {
    "liger": (_FORWARD, _COMPUTED),
    "cut_cross_entropy": ("one owner of the loss", "the loss is computed in chunks already"),
}


def _conflict(expected: str, got: str, line: str, why: str) -> ConflictError:
    return ConflictError(expected=expected, got=f"`{got}` beside UnslothPlugin", remedy=f"Remove `{line}`: {why}.")


def _yaml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _number(value: Any) -> float:
    """Of what a YAML file may hold; Axolotl's own validation says what is wrong with words."""
    try:
        return float(value or 0)
    except (TypeError, ValueError):
        return 0


def check_config(data: Mapping[str, Any], config: UnslothConfig) -> None:
    """Look at a config before Axolotl validates it.

    Raises:
        ConflictError: naming the line to change.
    """
    for key, (expected, why) in _TRUTHY.items():
        if value := data.get(key):
            shown = key if isinstance(value, (Mapping, list)) else f"{key}: {_yaml(value)}"
            raise _conflict(expected, shown, f"{key}:", why)
    for key in _SIZES:
        if _number(data.get(key)) > 1:
            raise _conflict(_WHOLE, f"{key}: {data[key]}", f"{key}:", "each process has to see whole rows")
    for name in data.get("plugins") or ():
        parts = str(name).split(".")
        for other, (expected, why) in _PLUGINS.items():
            if other in parts:
                raise _conflict(expected, name, f"- {name}", f"{why}; its keys go too")
    checkpointing = data.get("gradient_checkpointing")
    if isinstance(checkpointing, str) and checkpointing.startswith("offload"):
        raise ConflictError(
            expected=_ACTIVATIONS,
            got=f"`gradient_checkpointing: {checkpointing}` beside UnslothPlugin",
            remedy=f"Change the line: {_OWN}.",
        )
    kwargs = data.get("gradient_checkpointing_kwargs") or {}
    if checkpointing and config.gradient_checkpointing is not False and kwargs.get("use_reentrant"):
        raise ConflictError(
            expected="non-reentrant gradient checkpointing",
            got="`use_reentrant: true` under `gradient_checkpointing_kwargs:`",
            remedy="Change it to `use_reentrant: false`, or set `unsloth: {gradient_checkpointing: false}`.",
        )


def check_packed(data: Mapping[str, Any]) -> None:
    """Look at the quantization lines of a config whose base is an MXFP4 checkpoint.

    Raises:
        ConflictError: naming the line to change.
        UnsupportedError: adapters on packed experts are to be merged.
    """
    expected = "an MXFP4 base that keeps its own 4 bits"
    why = "the experts are packed in 4 bits already, and nothing else is quantized"
    for key in ("load_in_8bit", "gptq", "model_quantization_config", "nonexpert_quantization"):
        if value := data.get(key):
            raise _conflict(expected, f"{key}: {_yaml(value)}", f"{key}:", why)
    if "quantization_config" in (data.get("overrides_of_model_config") or {}):
        raise _conflict(expected, "overrides_of_model_config: {quantization_config: ...}", "quantization_config:", why)
    folder = Path(data.get("lora_model_dir") or data.get("output_dir") or ".")
    adapter = folder / "adapter_config.json"
    if data.get("merge_lora") and adapter.is_file():
        adapted = json.loads(adapter.read_text(encoding="utf-8")).get("target_parameters") or []
        merged = Path(data.get("output_dir") or ".") / "merged"  # where Axolotl would have put it
        if on_experts := [name for name in adapted if ".experts." in name]:
            raise UnsupportedError(
                expected="an adapter on attention only, for merge-lora into an MXFP4 base",
                got=f"one on {', '.join(on_experts)} too, which Axolotl would leave out of the result without a word",
                remedy=f"Run `unsloth-plugins merge {data['base_model']} {merged} -a {folder}` instead (with `--dtype "
                "mxfp4` for 4 bits), or set `unsloth: {save_merged: FOLDER}` before training.",
            )
