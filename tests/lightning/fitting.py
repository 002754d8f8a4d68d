"""A LightningModule around a causal LM for each root of Lightning, and a short fit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import set_seed

ROOTS = ["lightning.pytorch", "pytorch_lightning"]
EXPERTS = ["q_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]


def root_of(name: str) -> Any:
    """The root's module, or a skip with the reason."""
    return pytest.importorskip(name, reason=f"{name} is not installed")


def lora(base: torch.nn.Module, targets: Any = ("q_proj", "v_proj"), **options: Any) -> torch.nn.Module:
    set_seed(3)
    return get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules=list(targets), **options))


def batches(count: int = 8) -> DataLoader:
    return DataLoader([batch_of(2, 24, seed=i) for i in range(count)], batch_size=None)


def module_of(pl: Any, make: Any, late: bool = False) -> Any:
    """A LightningModule that builds ``make()`` in ``__init__``, or in ``configure_model`` if ``late``."""

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            if not late:
                self.model = make().train()

        def configure_model(self) -> None:
            if late and not hasattr(self, "model"):
                self.model = make().train()

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: dict[str, torch.Tensor]) -> None:
            self.log("val_loss", self.model(**batch).loss)

        def test_step(self, batch: dict[str, torch.Tensor]) -> None:
            self.log("test_loss", self.model(**batch).loss)

        def predict_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.model(input_ids=batch["input_ids"]).logits.argmax(-1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)

    return Module()


def trainer_of(pl: Any, folder: Path, **options: Any) -> Any:
    settings = dict(
        accelerator="cpu",
        devices=1,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    return pl.Trainer(**(settings | options))


def classes(pl: Any) -> Any:
    """Our module for this root."""
    name = "for_lightning" if pl.__name__ == "lightning.pytorch" else "for_pytorch_lightning"
    return importlib.import_module(f"unsloth_plugins.lightning.{name}")
