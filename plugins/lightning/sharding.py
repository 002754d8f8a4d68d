"""FSDP2 (``torch.distributed.fsdp.fully_shard``) of a LightningModule, and its whole state for checkpoints.

Each decoder layer is a unit, and the LightningModule is the root with everything else: its steps count as forwards, so
whatever a step reads has been gathered. Packed uint8 parameters are sharded and gathered as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from unsloth_plugins.core.models import recognise
from unsloth_plugins.lightning.models import models_of

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def shard(module: nn.Module, mesh: DeviceMesh) -> None:
    """Shard in place over ``mesh``, moving one unit after the other to its device. A second time changes nothing.

    Args:
        module: a LightningModule, with an equal frozen base on every process; the rest is taken from the first one.
        mesh: one-dimensional.
    """
    if isinstance(module, FSDPModule):
        return
    for parameter in module.parameters():
        if parameter.requires_grad:  # as DDP does: adapters start at random
            first = parameter.detach().to(mesh.device_type)
            torch.distributed.broadcast(first, 0)
            parameter.detach().copy_(first)
    for model in models_of(module):
        for layer in recognise(model).layers:
            fully_shard(layer.layer, mesh=mesh)
    fully_shard(module, mesh=mesh, reshard_after_forward=False)
    for name in _STEPS:
        register_fsdp_forward_method(module, name)


def whole(value: Any) -> Any:
    """``value`` with every sharded tensor in it gathered onto the CPU; all processes have to call it."""
    if isinstance(value, DTensor):
        return value.full_tensor().cpu()
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    return [whole(each) for each in value] if isinstance(value, list) else value


def sharded_state(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """A whole state of ``optimizer`` with tensors of its parameters' shapes sharded like those.

    Args:
        optimizer: over sharded parameters, in the order in which ``state`` was written.
        state: from ``state_dict()``, by the number of the parameter.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    shards = {}
    for number, values in state["state"].items():
        like = parameters[number]
        shards[number] = {
            name: distribute_tensor(value.to(like.device), like.device_mesh, like.placements)
            if isinstance(like, DTensor) and isinstance(value, torch.Tensor) and value.shape == like.shape
            else value
            for name, value in values.items()
        }
    return {**state, "state": shards}
