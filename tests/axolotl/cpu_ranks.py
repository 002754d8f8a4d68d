"""An Axolotl plugin for tests with several processes on a CPU, where Axolotl takes a rank for the number of a GPU."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin


class CpuRanks(BasePlugin):
    """Every process loads the model onto the CPU."""

    def load_datasets(self, cfg: Any, preprocess: bool = False) -> None:
        cfg.device_map = None
