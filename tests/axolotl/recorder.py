"""An Axolotl plugin for tests: writes down what a model answers once it is loaded, and what it is given in training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from torch import nn

IDS_BT = torch.arange(3, 20)[None]


class Recorder(BasePlugin):
    """Writes ``batches.pt`` and ``logits.pt`` into the run's ``output_dir``."""

    def post_model_load(self, cfg: Any, model: nn.Module) -> None:
        Path(cfg.output_dir).mkdir(exist_ok=True)
        with torch.no_grad():
            torch.save(model.eval()(input_ids=IDS_BT).logits + 0, Path(cfg.output_dir) / "logits.pt")

    def post_trainer_create(self, cfg: Any, trainer: Any) -> None:
        batches: list[tuple[dict[str, torch.Tensor], float]] = []
        compute_loss = trainer.compute_loss

        def recorded(model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            kept = {name: value.clone() for name, value in inputs.items() if torch.is_tensor(value)}
            loss = compute_loss(model, inputs, *args, **kwargs)
            batches.append((kept, (loss[0] if isinstance(loss, tuple) else loss).item()))
            torch.save(batches, Path(cfg.output_dir) / "batches.pt")
            return loss

        trainer.compute_loss = recorded
