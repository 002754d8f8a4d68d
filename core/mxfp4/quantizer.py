"""Packed MXFP4 as a quantization method of transformers: the bytes stay as they are, and the model can be trained.

transformers' own ``mxfp4`` refuses training and unpacks to 16 bit where its optional kernels are missing. Ours is
registered beside it as ``unsloth_mxfp4`` and writes ``mxfp4`` back when a gpt-oss is saved. Other mixtures of experts
have no published packed form: theirs is saved as ``unsloth_mxfp4``, which only this module loads.
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
from unsloth_plugins.core.models.experts import PROJECTIONS, PackedExperts, are_plain_experts, patch_mlp
from unsloth_plugins.core.mxfp4.codec import BLOCK, encode
from unsloth_plugins.core.patches import PatchSet

METHOD = "unsloth_mxfp4"
_PUBLISHED = "mxfp4"
_NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]


@register_quantization_config(METHOD)
class PackedMxfp4Config(QuantizationConfigMixin):
    """What ``config.quantization_config`` becomes. It serialises as the published ``mxfp4`` for a gpt-oss.

    Args:
        modules_to_not_convert: carried through from the checkpoint; only experts are packed, whatever it says.

    Attributes:
        published: whether the layout is the published one.
    """

    def __init__(self, modules_to_not_convert: list[str] | None = None, **_: Any) -> None:
        self.quant_method = METHOD  # type: ignore[assignment]  # transformers' own are an enum of strings
        self.modules_to_not_convert = modules_to_not_convert
        self.published = True

    def to_dict(self) -> dict[str, Any]:
        """As in a published checkpoint."""
        method = _PUBLISHED if self.published else METHOD
        return {"quant_method": method, "modules_to_not_convert": self.modules_to_not_convert}


@register_quantizer(METHOD)
class PackedMxfp4Quantizer(HfQuantizer):
    """Puts ``PackedExperts`` in the place of the experts before the weights arrive."""

    requires_calibration = False

    def _process_model_before_weight_loading(
        self, model: nn.Module, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        replace_experts(model)
        config: Any = self.quantization_config
        config.published = _is_published(model)
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
    """The pairs (mlp, experts) of a gpt-oss, or of a model with the code of Mixtral's experts."""
    pairs = []
    for module in model.modules():
        inner = vars(module)["_modules"]
        experts = inner.get("experts")
        if experts is None:
            continue
        if ("router" in inner and hasattr(experts, "gate_up_proj_bias")) or are_plain_experts(experts):
            pairs.append((module, experts))
    if not pairs:
        raise ModelError(
            expected="a gpt-oss, or a model with the code of Mixtral's experts: fused, SwiGLU, without biases",
            got=type(model).__name__,
            remedy="Use this model without packed MXFP4; adapters come after packing.",
        )
    return pairs


def _is_published(model: nn.Module) -> bool:
    """Whether the packed layout of these experts is gpt-oss's."""
    return all(hasattr(experts, "gate_up_proj_bias") for _, experts in _experts_of(model))


def replace_experts(model: nn.Module) -> None:
    """Put uninitialised ``PackedExperts`` in the place of dense experts, on the same device."""
    for mlp, dense in _experts_of(model):
        n_experts, hidden_size, twice = dense.gate_up_proj.shape
        is_transposed = getattr(dense, "is_transposed", False)
        if not is_transposed:
            hidden_size, twice = twice, hidden_size
        for name, size in (("hidden_size", hidden_size), ("intermediate_size", twice // 2)):
            if size % BLOCK:
                raise ModelError(
                    expected=f"{name} to be a multiple of {BLOCK}, the block of MXFP4",
                    got=str(size),
                    remedy="Such a model can't be packed: load it in 16 bits.",
                )
        constants = (dense.alpha, dense.limit) if hasattr(dense, "alpha") else ()
        biases = hasattr(dense, "gate_up_proj_bias")
        with torch.device(dense.gate_up_proj.device):
            mlp.experts = PackedExperts(
                n_experts, hidden_size, twice // 2, *constants, biases=biases, is_transposed=is_transposed
            )
        mlp.experts.to(dense.gate_up_proj.dtype).train(dense.training)
        if biases:
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
    """Encode the dense experts of a model in place: 4.25 bits a weight.

    Of a gpt-oss, ``save_pretrained`` then writes the published layout. Of other models it writes one that
    ``load_mxfp4`` reads and that merges and exports refuse.

    Args:
        model: a transformers gpt-oss, or a model with the code of Mixtral's experts (Qwen-MoE, OLMoE, DeepSeek, ...),
            with dense experts, no adapters on it.

    Returns:
        ``model``. It differs from before by the rounding to MXFP4.

    Raises:
        ModelError: not such a model, packed already, or with sizes that are no multiple of 32.
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
                weight = getattr(dense, name)
                blocks, scales = encode(weight.transpose(-1, -2) if mlp.experts.is_transposed else weight)
                getattr(mlp.experts, f"{name}_blocks").copy_(blocks)
                getattr(mlp.experts, f"{name}_scales").copy_(scales)
                if hasattr(dense, f"{name}_bias"):
                    getattr(mlp.experts, f"{name}_bias").copy_(getattr(dense, f"{name}_bias"))
    published = _is_published(model)
    config = PackedMxfp4Config(modules_to_not_convert=list(_NOT_CONVERTED) if published else None)
    config.published = published
    if not published:
        model._weight_conversions = []  # by its own, transformers would split the bytes like dense experts for the file
    quantizer = PackedMxfp4Quantizer(config, pre_quantized=True)
    model.hf_quantizer, model.is_quantized, model.quantization_method = quantizer, True, METHOD
    model.config.quantization_config = config
    return model
