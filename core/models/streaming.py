"""Packed experts that stay in host memory: which models, when, and the way back."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.models.experts import PROJECTIONS, STREAM, PackedExperts, decoded_bytes
from unsloth_plugins.core.offload.weights import WeightStream
from unsloth_plugins.core.patches import PatchSet

TRAINED_BYTES = 12  # of a trained number in float32: its gradient and Adam's two moments


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
        return False, f"on {device.type} there is no device memory to spare"
    layer_bytes = max(map(decoded_bytes, packed))
    adapters = [p for name, p in parts.causal_lm.named_parameters() if p.requires_grad and "lora_" in name]
    need = 2 * layer_bytes + TRAINED_BYTES * sum(p.numel() for p in adapters)
    free = memory.allowed(device) - memory.allocated(device)
    return free < need, f"{free / 2**30:.1f} GiB free beside the model, a step takes {need / 2**30:.1f} GiB at least"


def stream_experts(experts: PackedExperts, stream: WeightStream, index: int, patches: PatchSet) -> None:
    """Keep the packed bytes of one layer on the host. From an accelerator they go there now; from the CPU they are
    taken to memory that a device can copy from at the first pass on one."""
    patches.set(experts, STREAM, (stream, index))
    for name in PROJECTIONS:
        parameters = experts.bytes_of(name)
        if stream.serves(parameters[0].device):
            stream.settle((index, name), parameters, parameters[0].device)


def unstream_experts(experts: nn.Module) -> None:
    """Put the bytes where the layer's other parameters are. To be called before its patches are undone."""
    stream, index = vars(experts).get(STREAM, (None, None))
    if stream is not None:
        for name in PROJECTIONS:
            parameters = experts.bytes_of(name)  # type: ignore[operator]
            stream.leave((index, name), parameters, experts.gate_up_proj.device)  # type: ignore[union-attr,arg-type]
