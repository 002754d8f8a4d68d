"""Measurements in the logs of transformers' Trainer; what the adapters of everything built on it share."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsloth_plugins.core import Applied, applied_to
from unsloth_plugins.core.meter import Meter


class TrainerMetrics(TrainerCallback):
    """Adds to each training log: ``tokens_per_s`` (of this process and its training steps, padding included),
    ``peak_memory_gib`` (allocator on CUDA, process elsewhere) and ``host_gib`` (high-water mark of checkpointed
    activations in host memory since the last log).

    They are in ``trainer.state.log_history`` and in what later callbacks (the printer, the progress bar) show; the
    trainer's own reporting integrations run before.

    Attributes:
        applied: what was done to the model that trains; found on it, where nobody has set it.
    """

    def __init__(self) -> None:
        self.applied: Applied | None = None
        self._meter: Meter | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start to measure."""
        if self.applied is None:
            self.applied = applied_to(kwargs["model"])
        if self.applied is not None:
            self._meter = Meter([self.applied], args.device)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the measurements to logs of training steps."""
        if self._meter is None or logs is None or "loss" not in logs:
            return
        measured = self._meter.read()
        logs.update(measured)
        if state.log_history:
            state.log_history[-1].update(measured)
        self._meter.start()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Time spent in training: evaluation and saving, which come between two steps, do not count."""
        if self._meter is not None:
            self._meter.stop(wait=torch.cuda.is_initialized() and control.should_log)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Training goes on from here."""
        if self._meter is not None:
            self._meter.start()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Training goes on from here."""
        if self._meter is not None:
            self._meter.start()
