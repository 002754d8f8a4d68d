"""What the README shows must run."""

from __future__ import annotations

import re
from pathlib import Path

import option_tables
import pytest
import torch
from conftest import batch_of, tiny_llama
from torch.utils.data import DataLoader

import unsloth_plugins

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_applying_by_hand_in_lightning(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.losses = tiny_llama().train(), []

        def configure_model(self) -> None:
            self.applied = unsloth_plugins.apply(self.model, gradient_checkpointing=True, offload_min_bytes=0)

        def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            loss = self.model(**batch).loss
            self.losses.append(loss.item())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    module = Module()
    trainer = Trainer(
        accelerator="cpu",
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
    )
    trainer.fit(module, DataLoader([batch_of(2, 9)] * 3, batch_size=None))
    assert module.losses[-1] < module.losses[0]
    assert module.applied.tokens_seen == 3 * 18 and module.applied.store.total_bytes > 0


def test_relative_links_lead_somewhere() -> None:
    for readme in (ROOT / "README.md", *ROOT.glob("plugins/*/README.md")):
        links = re.findall(r"\]\((?!https?:)([^)#]+)", readme.read_text())
        assert links and all((readme.parent / link).exists() for link in links)


def test_the_option_tables_are_those_of_the_config() -> None:
    names = [*unsloth_plugins.UnslothConfig.__dataclass_fields__, "quiet"]
    assert re.findall(r"^\| `(\w+)`", option_tables.table(yaml=False), re.M) == names
    for readme in option_tables.readmes():
        assert readme.read_text() == option_tables.rewritten(readme), "run `make options`"
