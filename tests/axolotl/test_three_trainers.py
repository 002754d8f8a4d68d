"""The same model, adapter, rows and settings in all three trainers give the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from axolotl_runs import axolotl, config, losses, write_adapter, write_assets
from conftest import batch_of, tiny_gpt_oss
from peft import PeftModel
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer, TrainingArguments

from unsloth_plugins.hf_trainer import UnslothCallback

pytestmark = pytest.mark.slow
STEPS, LR = 6, 0.01


def in_lightning(make: Any, rows: list[dict[str, list[int]]], folder: Path) -> list[float]:
    pl = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    import unsloth_plugins.lightning  # noqa: F401

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = make().train(), []

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=LR, weight_decay=0.0)

    order = RandomSampler(rows, generator=torch.Generator().manual_seed(0))
    module = Module()
    trainer = pl.Trainer(
        strategy="unsloth",
        accelerator="cpu",
        max_steps=STEPS,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=folder,
    )
    batches = [{key: torch.tensor([rows[i][key]]) for key in rows[i]} for i in order]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return module.losses


def test_three_trainers(tmp_path: Path) -> None:
    ids = [batch_of(24, seed=i)["input_ids"].tolist() for i in range(STEPS)]
    rows = [{"input_ids": row, "attention_mask": [1] * 24, "labels": row} for row in ids]
    write_assets(tmp_path, tiny_gpt_oss())
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    adapter = write_adapter(tmp_path, tiny_gpt_oss(), ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"])

    def make() -> PeftModel:
        return PeftModel.from_pretrained(tiny_gpt_oss(), adapter, is_trainable=True)

    args = TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        learning_rate=LR,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(make(), args, train_dataset=rows, callbacks=[UnslothCallback()])
    trainer.train()
    hf = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(hf) == STEPS
    assert in_lightning(make, rows, tmp_path) == pytest.approx(hf, abs=2e-5)

    settings = config(
        tmp_path,
        datasets=[{"path": str(tmp_path / "rows.jsonl"), "ds_type": "json", "type": None}],
        shuffle_merged_datasets=False,
        lora_model_dir=adapter,
        micro_batch_size=1,
        max_steps=STEPS,
        learning_rate=LR,
        weight_decay=0.0,
        seed=0,
        save_strategy="steps",
        save_steps=STEPS,
    )
    axolotl("train", settings, tmp_path)
    assert losses(tmp_path / "out") == pytest.approx(hf, abs=2e-5)
