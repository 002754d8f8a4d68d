"""Packed MXFP4 as a quantization method of transformers: the bytes stay as they are, and the model can be trained.

transformers' own ``mxfp4`` refuses training and unpacks to 16 bit where its optional kernels are missing. Ours is
registered beside it as ``unsloth_mxfp4`` and writes ``mxfp4`` back when the model is saved.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from unsloth_plugins.core.errors import ModelError, UnsupportedError
from unsloth_plugins.core.models.experts import PROJECTIONS, PackedExperts, patch_mlp
from unsloth_plugins.core.mxfp4.codec import BLOCK, encode
from unsloth_plugins.core.patches import PatchSet

METHOD = "unsloth_mxfp4"
_PUBLISHED = "mxfp4"
_NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@register_quantization_config(METHOD)
class PackedMxfp4Config(QuantizationConfigMixin):
    """What ``config.quantization_config`` becomes. It serialises as the published ``mxfp4``.

    Args:
        modules_to_not_convert: carried through from the checkpoint; only experts are packed, whatever it says.
    """

    def __init__(self, modules_to_not_convert: list[str] | None = None, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' own are an enum of strings
        self.modules_to_not_convert = modules_to_not_convert

    def to_dict(self) -> dict[str, Any]:
        """As in a published checkpoint."""
        return {"quant_method": _PUBLISHED, "modules_to_not_convert": self.modules_to_not_convert}


@register_quantizer(METHOD)
class PackedMxfp4Quantizer(HfQuantizer):
    """Puts ``PackedExperts`` in the place of gpt-oss's experts before the weights arrive."""

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        replace_experts(model)
        if checkpoint_files:
            check_checkpoint(model, checkpoint_files)

    @property
    def is_trainable(self) -> bool:
        """Adapters train; the packed bytes are frozen."""
        return True

    def is_serializable(self) -> bool:
        """The state dict is the published one."""
        return True


def _experts_of(model: nn.Module) -> list[tuple[Any, Any]]:
    """The pairs (mlp, experts) of a gpt-oss."""
    pairs = []
    for module in model.modules():
        experts = vars(module)["_modules"].get("experts")
        if experts is not None and "router" in vars(module)["_modules"] and hasattr(experts, "gate_up_proj_bias"):
            pairs.append((module, experts))
    if not pairs:
        raise ModelError(
            expected="a gpt-oss: layers with a router and fused experts",
            got=type(model).__name__,
            remedy="Load this model without packed MXFP4.",
        )
    return pairs


def replace_experts(model: nn.Module) -> None:
    """Put uninitialised ``PackedExperts`` in the place of a gpt-oss's dense experts, on the same device."""
    for mlp, dense in _experts_of(model):
        n_experts, hidden_size, twice = dense.gate_up_proj.shape
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", twice // 2)):
            if size % BLOCK:
                raise ModelError(
                    expected=f"{name} to be a multiple of {BLOCK}, the block of MXFP4",
                    got=str(size),
                    remedy="Such a model can't be packed: load it in 16 bits.",
                )
        with torch.device(dense.gate_up_proj_bias.device):
            mlp.experts = PackedExperts(n_experts, hidden_size, twice // 2, dense.alpha, dense.limit)
        mlp.experts.to(dense.gate_up_proj_bias.dtype).train(dense.training)
        patch_mlp(mlp, PatchSet())


def _header(path: str) -> dict[str, Any]:
    """Names, dtypes and shapes in a safetensors file: 8 bytes with the length of a JSON header, then the header."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header: dict[str, Any] = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise ModelError(
            expected=f"{Path(path).name} to be a safetensors file", got=repr(error), remedy="Download it again."
        ) from error
    header.pop("__metadata__", None)
    end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if os.path.getsize(path) != end:
        raise ModelError(
            expected=f"{Path(path).name} of {end} bytes, as its header says",
            got=f"{os.path.getsize(path)}",
            remedy="Download it again.",
        )
    return header


def check_checkpoint(model: nn.Module, files: Iterable[str]) -> None:
    """Compare what the model needs with what the files hold, by their headers and sizes, before any weight is read.

    Raises:
        UnsupportedError: not safetensors.
        ModelError: a tensor is missing, misshapen, of another kind of dtype, unknown or there twice, or a file is
            damaged; it is named.
    """
    found: dict[str, Any] = {}
    for file in files:
        if not str(file).endswith(".safetensors"):
            raise UnsupportedError(
                expected="a packed checkpoint in safetensors",
                got=Path(file).name,
                remedy="Convert it, or take the published checkpoint.",
            )
        header = _header(file)
        if twice := found.keys() & header.keys():
            remedy = "Remove the files that don't belong."
            raise ModelError(expected="every tensor in one file", got=f"{min(twice)} in two", remedy=remedy)
        found |= header
    wanted = model.state_dict()
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    remedy = "Download it again, or load it with the config that it was saved with."
    for name, tensor in wanted.items():
        if name not in found:
            if any(name in pair and (set(pair) - {name}) & found.keys() for pair in tied.items()):
                continue
            raise ModelError(expected=f"a tensor {name} in the checkpoint", got="none of that name", remedy=remedy)
        kind, shape = found[name]["dtype"], found[name]["shape"]
        if shape != list(tensor.shape):
            raise ModelError(expected=f"{name} of shape {list(tensor.shape)}", got=str(shape), remedy=remedy)
        if kind not in (("U8",) if tensor.dtype == torch.uint8 else ("F64", "F32", "F16", "BF16")):
            expected = "uint8" if tensor.dtype == torch.uint8 else "floating point"
            raise ModelError(expected=f"{name} as {expected}", got=kind, remedy=remedy)
    for name in found:
        if name not in wanted:
            raise ModelError(expected="only tensors that the model has", got=f"also {name}", remedy=remedy)


def pack_experts(model: Any) -> Any:
    """Encode the dense experts of a gpt-oss, in place; ``save_pretrained`` then writes the published layout.

    Args:
        model: a transformers gpt-oss with dense experts, no adapters on it.

    Returns:
        ``model``. It differs from before by the rounding to MXFP4.

    Raises:
        ModelError: not a gpt-oss, packed already, or with sizes that are no multiple of 32.
    """
    pairs = _experts_of(model)
    if any(not isinstance(vars(dense)["_parameters"].get("gate_up_proj"), nn.Parameter) for _, dense in pairs):
        raise ModelError(
            expected="dense experts without adapters",
            got=type(pairs[0][1]).__name__,
            remedy="Pack before PEFT wraps the model, and once.",
        )
    dense_experts = [dense for _, dense in pairs]
    replace_experts(model)
    for (mlp, _), dense in zip(pairs, dense_experts, strict=True):
        with torch.no_grad():
            for name in PROJECTIONS:
                blocks, scales = encode(getattr(dense, name).transpose(-1, -2))
                getattr(mlp.experts, f"{name}_blocks").copy_(blocks)
                getattr(mlp.experts, f"{name}_scales").copy_(scales)
                getattr(mlp.experts, f"{name}_bias").copy_(getattr(dense, f"{name}_bias"))
    config = PackedMxfp4Config(modules_to_not_convert=list(_NOT_CONVERTED))
    quantizer = PackedMxfp4Quantizer(config, pre_quantized=True)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    model.config.quantization_config = config
    return model
