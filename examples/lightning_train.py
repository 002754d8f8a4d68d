"""Fine-tune a causal LM with LoRA in Lightning; the task, the data and the losses are those of ``train.py``.

Without arguments it needs no GPU and no hub: SmolLM2-135M and presidential addresses come as packages. It runs stock
and with ``strategy="unsloth"``, stops the latter half-way, resumes it from a checkpoint that holds the adapter alone,
and compares. With arguments it is your run, on whatever device there is:

    python examples/lightning_train.py --model openai/gpt-oss-20b --data my.jsonl --ctx 8192 --steps 200

It takes ``pip install 'unsloth-plugins[lightning,export,cli]'``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from assets import smollm2_dir, sotu_texts
from lightning.pytorch import LightningModule, Trainer, seed_everything
from rich.console import Console
from torch.utils.data import RandomSampler
from train import adapted, is_mxfp4, read_texts, windows
from transformers import AutoModelForCausalLM, AutoTokenizer

from unsloth_plugins.core.mxfp4 import load_mxfp4

console = Console()


class Module(LightningModule):
    """Nothing of ours in here: a LightningModule that holds a causal LM."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.model = make().train()
        self.model.gradient_checkpointing_enable()
        self.losses: list[float] = []

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = self.model(**batch).loss
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [p for p in self.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=2e-4, weight_decay=0.0)


class Rows:
    """One row a step, in the order in which transformers' Trainer draws them with seed 0.

    It tells Lightning where it is, which starts loaders that don't anew when it resumes.
    """

    def __init__(self, rows: list[dict[str, list[int]]]) -> None:
        order = RandomSampler(rows, generator=torch.Generator().manual_seed(0))
        self.rows = [{key: torch.tensor([rows[i][key]]) for key in rows[i]} for i in order]
        self.seen = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while self.seen < len(self.rows):
            self.seen += 1
            yield self.rows[self.seen - 1]
        self.seen = 0

    def state_dict(self) -> dict[str, int]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def main() -> int:
    """Run; the exit status says whether what it is there to show held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", type=Path, help=".jsonl with a `text` field, or a text file")
    parser.add_argument("--ctx", type=int, default=256, help="tokens per row (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (%(default)s)")
    parser.add_argument("--lora-rank", type=int, default=16, help="rank of LoRA on all linear layers (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/lightning"), help="folder (%(default)s)")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)

    source = options.model or str(smollm2_dir())
    texts = read_texts(options.data) if options.data else [path.read_text() for path in sotu_texts()[::20]]
    rows = windows(texts, AutoTokenizer.from_pretrained(source), options.ctx, max(options.steps, 4) + 4)[:-4]
    if len(rows) < options.steps:
        sys.exit(f"--data: expected {options.steps} windows of {options.ctx} tokens and 4 more; got {len(rows)} and 4.")
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    packed = is_mxfp4(source)
    load = load_mxfp4 if packed else AutoModelForCausalLM.from_pretrained
    make = adapted(lambda: load(source, dtype=dtype), options.lora_rank, "all-linear")

    def fit(name: str, strategy: str, steps: int, resume: Path | None = None) -> tuple[Trainer, list[float]]:
        console.rule(name)
        seed_everything(0, verbose=False)
        trainer = Trainer(
            strategy=strategy, max_steps=steps, logger=False, enable_checkpointing=False, enable_model_summary=False
        )
        module = Module(make)
        trainer.fit(module, Rows(rows), ckpt_path=resume, weights_only=False)
        return trainer, module.losses

    trainer, ours = fit("with strategy='unsloth'", "unsloth", options.steps)
    trainer.save_checkpoint(options.output / "last.ckpt")
    if options.model is not None:
        return 0
    _, stock = fit("Lightning alone", "auto", options.steps)
    trainer, _ = fit("first half", "unsloth", options.steps // 2)
    half = options.output / "half.ckpt"
    trainer.save_checkpoint(half)
    _, rest = fit("resumed", "unsloth", options.steps, half)

    difference = max(abs(a - b) for a, b in zip(ours, stock, strict=True))
    console.print("losses with strategy='unsloth':", " ".join(f"{loss:.4f}" for loss in ours))
    console.print(f"largest difference to Lightning alone: {difference:.1e}")
    console.print(f"resumed run is the unbroken one: {rest == ours[options.steps // 2 :]}")
    console.print(f"checkpoint: {half.stat().st_size / 2**20:.0f} MiB, for a model of 513 MiB")
    return int(difference > 0.02 or rest != ours[options.steps // 2 :])


if __name__ == "__main__":
    sys.exit(main())
