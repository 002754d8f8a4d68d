"""Run under a launcher: pairs of checkpoints against single ones, on a model that FSDP2 shards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import torch  # noqa: E402
from conftest import batch_of, tiny_gpt_oss  # noqa: E402
from torch import distributed  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402

from unsloth_plugins.core import apply  # noqa: E402


def gradients(every: Any) -> dict[str, torch.Tensor]:
    """After the last of three steps, whole."""
    model: Any = tiny_gpt_oss()
    options: dict[str, Any] = {"memory_policy": "offload_all", "offload_min_bytes": 0}
    apply(model, gradient_checkpointing=True, every_n_layers=every, **options)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    model.train()
    for step in range(3):
        model.zero_grad()
        model(**batch_of(2, 16, seed=distributed.get_rank() + step)).loss.backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


def main() -> None:
    distributed.init_process_group("gloo")
    one, two = gradients(1), gradients(2)
    assert len(one) > 60 and all(torch.equal(one[name], two[name]) for name in one)
    if distributed.get_rank() == 0:
        print("equal")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
