"""Run as a script: fit on as many CPU processes as asked for, and write what each rank ends up with.

argv: root of Lightning, strategy, devices, accumulate_grad_batches, folder for the results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import torch  # noqa: E402
from conftest import batch_of, tiny_gpt_oss  # noqa: E402
from fitting import EXPERTS, lora, module_of, root_of, trainer_of  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import unsloth_plugins.lightning  # noqa: E402, F401
from unsloth_plugins.core.mxfp4 import pack_experts  # noqa: E402


def main() -> None:
    pl, strategy, folder = root_of(sys.argv[1]), sys.argv[2], Path(sys.argv[5])

    def make() -> Any:
        model = lora(pack_experts(tiny_gpt_oss()), EXPERTS)
        model.gradient_checkpointing_enable()
        return model

    module = module_of(pl, make)
    module.configure_optimizers = lambda: torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1)
    trainer = trainer_of(
        pl, folder, strategy=strategy, devices=int(sys.argv[3]), accumulate_grad_batches=int(sys.argv[4]), max_steps=2
    )
    rows = [{key: value[0] for key, value in batch_of(1, 24, seed=i).items()} for i in range(4)]
    trainer.fit(module, DataLoader(rows, batch_size=1))
    trained = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    torch.save(trained, folder / f"rank{trainer.global_rank}.pt")
    trainer.save_checkpoint(folder / "last.ckpt")


if __name__ == "__main__":
    main()
