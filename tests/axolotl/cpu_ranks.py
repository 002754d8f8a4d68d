"""An Axolotl plugin for tests with several processes on a CPU, where Axolotl takes a rank for the number of a GPU."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from axolotl.integrations.base import BasePlugin
from safetensors.torch import save_file
from torch import nn


class CpuRanks(BasePlugin):
    """Every process loads the model onto the CPU, and saves what it has trained."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = None

    def post_train(self, cfg: Any, model: nn.Module) -> None:
        trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        save_file(trained, Path(cfg.output_dir) / f"rank{os.environ['RANK']}.safetensors")
