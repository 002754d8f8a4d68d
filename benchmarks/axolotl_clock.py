"""An Axolotl plugin that tells a clock of this process when each optimizer step is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers import TrainerCallback

step_is_over: Callable[[], None] = lambda: None  # noqa: E731  # set by the benchmark before it trains


class _Ticks(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step_is_over()


class ClockPlugin(BasePlugin):
    """Named in the config, beside ours."""

    def get_training_args(self, cfg: Any) -> dict[str, Any]:
        """The device is not asked in every step whether the loss is a number, as in the other trainers."""
        return {"logging_nan_inf_filter": False}

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[TrainerCallback]:
        """One that ticks."""
        return [_Ticks()]
