"""Run as a script: fit on as many CPU processes as asked for, and write what each rank ends up with.

argv: root of Lightning, strategy, devices, accumulate_grad_batches, folder for the results, "all" or "some" experts
with tokens; with "some" the head trains too.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from conftest import batch_of, tiny_gpt_oss  # noqa: E402
from fitting import EXPERTS, lora, module_of, root_of, trainer_of  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import unsloth_plugins.lightning  # noqa: E402, F401
from unsloth_plugins.core.mxfp4 import pack_experts  # noqa: E402
from unsloth_plugins.lightning.sharding import whole  # noqa: E402


def all_experts() -> Any:
    model = lora(pack_experts(tiny_gpt_oss()), EXPERTS)
    model.gradient_checkpointing_enable()
    return model


def some_experts() -> Any:
    base = tiny_gpt_oss(num_experts_per_tok=1)
    for layer in base.model.layers:
        layer.mlp.router.bias.data[2:] = -1e4
    model = lora(pack_experts(base), EXPERTS, modules_to_save=["lm_head"])
    model.gradient_checkpointing_enable()
    return model


def check_resume(pl: Any, make: Any, strategy: str, devices: int, folder: Path) -> None:
    """Four AdamW steps equal two, a checkpoint, and two more from it; and a module can be evaluated without a fit."""

    def fit(steps: int, ckpt_path: Path | None = None) -> tuple[Any, Any]:
        module = module_of(pl, make)
        step = module.training_step
        module.training_step = lambda batch: step(batch_of(1, 24, seed=10 * module.global_step + module.global_rank))
        trainer = trainer_of(pl, folder, strategy=strategy, devices=devices, max_steps=steps)
        trainer.fit(module, DataLoader([batch_of(24, seed=i) for i in range(8)]), ckpt_path=ckpt_path)
        return trainer, module

    _, straight = fit(4)
    trainer, _ = fit(2)
    trainer.save_checkpoint(folder / "half.ckpt")
    trainer, rest = fit(4, folder / "half.ckpt")
    assert rest.losses == straight.losses[2:], (rest.losses, straight.losses)
    pairs = zip(rest.named_parameters(), straight.named_parameters(), strict=True)
    assert all(torch.equal(whole(p), whole(wanted)) for (_, p), (_, wanted) in pairs)
    trainer.save_checkpoint(folder / "four.ckpt")
    loader = DataLoader([batch_of(24, seed=i) for i in range(4)])
    (here,) = trainer.validate(rest, loader, verbose=False)
    other = trainer_of(pl, folder, strategy=strategy, devices=devices)
    (there,) = other.validate(module_of(pl, make), loader, ckpt_path=folder / "four.ckpt", verbose=False)
    assert here == there


def main() -> None:
    pl, strategy, folder = root_of(sys.argv[1]), sys.argv[2], Path(sys.argv[5])
    make = {"all": all_experts, "some": some_experts}[sys.argv[6]]

    module = module_of(pl, make)
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    trainer = trainer_of(
        pl,
        folder,
        strategy=strategy,
        devices=int(sys.argv[3]),
        accumulate_grad_batches=int(sys.argv[4]),
        gradient_clip_val=0.1,
        max_steps=2,
    )
    rows = [{key: value[0] for key, value in batch_of(1, 24, seed=i).items()} for i in range(4)]
    trainer.fit(module, DataLoader(rows, batch_size=1))
    trained = {name: whole(p.detach()) for name, p in module.named_parameters() if p.requires_grad}
    packed = [p for p in module.parameters() if p.dtype == torch.uint8]
    held = {(p.to_local() if isinstance(p, DTensor) else p).numel() / p.numel() for p in packed}
    torch.save({"trained": trained, "held": held, "n_packed": len(packed)}, folder / f"rank{trainer.global_rank}.pt")
    trainer.save_checkpoint(folder / "last.ckpt")
    if strategy == "unsloth_fsdp":
        check_resume(pl, make, strategy, int(sys.argv[3]), folder)


if __name__ == "__main__":
    main()
