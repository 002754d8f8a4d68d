"""Packed experts and the embedding before them in host memory: which models, when, and the way back."""

from __future__ import annotations

from types import MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.models.experts import PROJECTIONS, STREAM, PackedExperts, decoded_bytes
from unsloth_plugins.core.offload.weights import WeightStream
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.report import Row

TRAINED_BYTES = 12  # of a trained number in float32: its gradient and Adam's two moments
_EMBEDDING = "embedding"  # its key in a stream


def packed_layers(parts: ModelParts) -> list[PackedExperts]:
    """The packed experts of a model, layer by layer."""
    return [layer.experts for layer in parts.layers if isinstance(layer.experts, PackedExperts)]


def check_streamed(parts: ModelParts) -> None:
    """Raise where ``weights="streamed"`` can't be served.

    Raises:
        UnsupportedError: there are no packed experts, several processes, or sharded parameters.
    """
    packed = packed_layers(parts)
    if not packed:
        raise UnsupportedError(
            expected="a model with packed MXFP4 experts for weights='streamed'",
            got=type(parts.causal_lm).__name__,
            remedy="Load it with load_mxfp4 or pack it with pack_experts, or use weights='auto'.",
        )
    if (obstacle := obstacle_to_streaming(packed)) is not None:
        raise UnsupportedError(
            expected="one process with whole parameters for weights='streamed'",
            got=f"{obstacle}: DDP and FSDP want all parameters on the device",
            remedy="Use weights='resident', or train in one process.",
        )


def obstacle_to_streaming(packed: list[PackedExperts]) -> str | None:
    """What makes streaming impossible, or ``None``."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    if there and torch.distributed.get_world_size() > 1:
        return f"{torch.distributed.get_world_size()} processes"
    if any(isinstance(parameter, DTensor) for experts in packed for parameter in experts.parameters()):
        return "sharded parameters"
    return None


def choose_weights(
    parts: ModelParts, choice: Literal["auto", "resident", "streamed"], memory: DeviceMemory
) -> tuple[bool, str]:
    """Whether the packed experts are streamed, and why.

    ``auto`` streams where what is free on the device, with the experts there, is less than a step takes at least: the
    experts of one layer in 16 bits, as much again for what is computed with them, and for each trained number of the
    adapters that are there a gradient and Adam's moments in float32.
    """
    if choice != "auto":
        return choice == "streamed", "asked for"
    packed = packed_layers(parts)
    device = packed[0].gate_up_proj.device
    if (obstacle := obstacle_to_streaming(packed)) is not None:
        return False, obstacle
    if not memory.is_known(device):
        return False, f"on {device.type}, where apply found it, there is no device memory to spare"
    layer_bytes = max(map(decoded_bytes, packed))
    adapters = [p for name, p in parts.causal_lm.named_parameters() if p.requires_grad and "lora_" in name]
    need = 2 * layer_bytes + TRAINED_BYTES * sum(p.numel() for p in adapters)
    free = memory.allowed(device) - memory.allocated(device)
    return free < need, f"{free / 2**30:.1f} GiB free beside the model, a step takes {need / 2**30:.1f} GiB at least"


class PackedWeights:
    """Where the packed experts of one model are, and the embedding before them.

    Args:
        parts: of the model.
        why: they are there.

    Attributes:
        stream: where they wait; ``None`` while all weights are resident.
        layers: the packed experts, one at least.
    """

    feature: ClassVar[str] = "weights"

    def __init__(self, parts: ModelParts, why: str) -> None:
        self.layers, self._parts = packed_layers(parts), parts
        self.stream: WeightStream | None = None
        self._why, self._embedding = why, ""

    def send(self, why: str, patches: PatchSet) -> None:
        """Keep them on the host from now on. What they took goes back to the device: between other weights, torch's
        allocator would hold it in pieces that a long step's tensors do not fit."""
        self.stream, self._why = WeightStream(), why
        for index, experts in enumerate(self.layers):
            _stream_experts(experts, self.stream, index, patches)
        if (reason := _why_embedding_stays(self._parts)) is None:
            table = _stream_embedding(self._parts, self.stream, patches).weight
            size = table.numel() * table.element_size()
            self._embedding = f"; the embedding, {size / 2**30:.2f} GiB, there too"
        else:
            self._embedding = f"; the embedding stays with the model: {reason}"
        torch.cuda.empty_cache()

    def bring_back(self) -> None:
        """Put streamed ones where the model is. To be called before their patches are undone."""
        for experts in self.layers:
            _unstream_experts(experts)
        _unstream_embedding(self._parts, self.layers[0].gate_up_proj.device)

    def row(self) -> Row:
        """Where they are, why, and what was copied so far."""
        if self.stream is None:
            return Row(self.feature, "left alone", f"packed experts stay with the model ({self._why})")
        size = sum(p.numel() for experts in self.layers for name in PROJECTIONS for p in experts.bytes_of(name))
        detail = f"packed experts of {len(self.layers)} layers, {size / 2**30:.2f} GiB, on the host ({self._why})"
        detail += self._embedding
        if sent := self.stream.sent_bytes:
            copies_ms, exposed_ms = self.stream.copy_ms()
            waited = f" in {copies_ms:.0f} ms, of which {exposed_ms:.0f} ms waited for" if copies_ms else ""
            detail += f"; {sent / 2**30:.2f} GiB copied to the device so far{waited}"
        return Row(self.feature, "on", detail)


def _stream_experts(experts: PackedExperts, stream: WeightStream, index: int, patches: PatchSet) -> None:
    """Keep the packed bytes of one layer on the host. From an accelerator they go there now; from the CPU they are
    taken to memory that a device can copy from at the first pass on one."""
    patches.set(experts, STREAM, (stream, index))
    for name in PROJECTIONS:
        parameters = experts.bytes_of(name)
        if stream.serves(parameters[0].device):
            stream.settle((index, name), parameters, parameters[0].device)


def _unstream_experts(experts: nn.Module) -> None:
    """Put the bytes where the layer's other parameters are. To be called before its patches are undone."""
    stream, index = vars(experts).get(STREAM, (None, None))
    if stream is not None:
        for name in PROJECTIONS:
            parameters = experts.bytes_of(name)  # type: ignore[operator]
            stream.leave((index, name), parameters, experts.gate_up_proj.device)  # type: ignore[union-attr,arg-type]


def _why_embedding_stays(parts: ModelParts) -> str | None:
    """What keeps the input embedding with the model, or ``None``."""
    if (name := _embedding_name(parts)) is None:
        return "it is not a plain one"
    embedding: nn.Embedding = parts.decoder.get_submodule(name)  # type: ignore[assignment]
    if embedding.weight.requires_grad:
        return "it trains"
    if "forward" in vars(embedding):
        return "its forward was replaced"
    at = embedding.weight.untyped_storage().data_ptr()
    everything = parts.causal_lm.named_parameters(remove_duplicate=False)
    if sum(each.untyped_storage().data_ptr() == at for _, each in everything) > 1:
        return "it is the head as well"
    return None


def _stream_embedding(parts: ModelParts, stream: WeightStream, patches: PatchSet) -> nn.Embedding:
    """Keep the input embedding on the host, as ``_stream_experts`` does with experts; nothing may speak against it.

    It becomes the decoder's last child: many ask the first parameter of a model for its device.
    """
    name = _embedding_name(parts)
    assert name is not None
    embedding: nn.Embedding = parts.decoder.get_submodule(name)  # type: ignore[assignment]
    patches.set(embedding, STREAM, (stream, list(parts.decoder._modules).index(name)))
    patches.set(embedding, "forward", MethodType(_looked_up, embedding))
    patches.set(embedding, "_apply", MethodType(_changed_in_place, embedding))
    _move_child(parts.decoder, name, len(parts.decoder._modules))
    weight: nn.Parameter = embedding.weight  # type: ignore[assignment]
    if stream.serves(weight.device):
        stream.settle(_EMBEDDING, [weight], weight.device)
    return embedding


def _unstream_embedding(parts: ModelParts, device: torch.device) -> None:
    """Put a streamed embedding on ``device``. To be called before its patches are undone."""
    for name, child in list(parts.decoder.named_children()):
        for module in child.modules() if name != "layers" else ():
            if isinstance(module, nn.Embedding) and STREAM in vars(module):
                stream, index = vars(module)[STREAM]
                stream.leave(_EMBEDDING, [module.weight], device)
                _move_child(parts.decoder, name, index)


def _embedding_name(parts: ModelParts) -> str | None:
    """The child of the decoder that is its plain input embedding: no subclass, which may scale, and no adapter's."""
    embedding = parts.causal_lm.get_input_embeddings()  # type: ignore[operator]
    if type(embedding) is not nn.Embedding or embedding.max_norm is not None:
        return None
    return next((name for name, child in parts.decoder.named_children() if child is embedding), None)


def _looked_up(self: nn.Embedding, input: torch.Tensor) -> torch.Tensor:  # torch's name
    stream, _ = vars(self)[STREAM]
    if self.weight.requires_grad:
        raise UnsupportedError(
            expected="an embedding that is still frozen, for streamed weights",
            got="one that trains since apply",
            remedy="Apply after PEFT has wrapped the model, or use weights='resident'.",
        )
    if not stream.serves(input.device):
        return functional.embedding(input, self.weight)
    rows: torch.Tensor = stream.look_up(_EMBEDDING, self.weight, input)
    return rows


def _changed_in_place(self: nn.Embedding, fn: Any, recurse: bool = True) -> nn.Embedding:
    """``to``, ``cuda`` and the like change the dtype and leave the table where it is."""
    weight: nn.Parameter = self.weight  # type: ignore[assignment]
    dtype = fn(weight.new_empty(0)).dtype
    if dtype != weight.dtype:
        weight.data = weight.data.to(dtype)
    self._parameters["weight"] = None
    try:
        return nn.Embedding._apply(self, fn, recurse)
    finally:
        self._parameters["weight"] = weight


def _move_child(module: nn.Module, name: str, index: int) -> None:
    children = [each for each in module._modules.items() if each[0] != name]
    children.insert(index, (name, module._modules[name]))
    module._modules.clear()
    module._modules.update(children)
