"""Measurements in the logs of transformers' Trainer; what the adapters of everything built on it share."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import (
    DefaultFlowCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from unsloth_plugins.core import Applied, applied_to
from unsloth_plugins.core.meter import Meter
from unsloth_plugins.core.planner.live import explain, optimizer_named


def report_first(trainer: Trainer) -> None:
    """Let the measurements reach the trainer's reporting integrations (``report_to``) as well.

    The trainer calls them in order, integrations ahead of the callbacks that it was given, and gives callbacks no
    way to change that; so it is done from outside, once the trainer is built. A second time changes nothing.
    """
    callbacks: list[TrainerCallback] = trainer.callback_handler.callbacks
    ours = [callback for callback in callbacks if isinstance(callback, TrainerMetrics)]
    others = [callback for callback in callbacks if callback not in ours]
    first = sum(isinstance(callback, DefaultFlowCallback) for callback in others[:1])  # it decides when to log
    callbacks[:] = [*others[:first], *ours, *others[first:]]


def explain_out_of_memory(trainer: Trainer) -> None:
    """Let an out-of-memory error of a training step say what can be changed: a note on the same error.

    The trainer tells callbacks nothing of errors, so it is done from outside, on this instance, once it is built. A
    second time changes nothing.
    """
    step = trainer.training_step
    if getattr(step, "explains", False):
        return

    @functools.wraps(step)
    def explained(*args: Any, **kwargs: Any) -> torch.Tensor:
        try:
            return step(*args, **kwargs)
        except torch.OutOfMemoryError as error:
            model = trainer.model
            if model is not None and (applied := applied_to(model)) is not None:
                explain(error, applied, optimizer=optimizer_named(_optimizer_of(trainer.args)))
            raise

    explained.explains = True  # type: ignore[attr-defined]
    trainer.training_step = explained  # type: ignore[method-assign]


def _optimizer_of(args: TrainingArguments) -> str:
    return str(getattr(args.optim, "value", args.optim))


def _most_tokens(args: TrainingArguments) -> int | None:
    """Of a batch, where the arguments bound it: TRL's for supervised training do."""
    bounded = any(kind.__name__ == "SFTConfig" for kind in type(args).__mro__)
    length = getattr(args, "max_length", None) if bounded else None
    return None if length is None else length * args.per_device_train_batch_size


class TrainerMetrics(TrainerCallback):
    """Adds to each training log: ``tokens_per_s`` (of this process and its training steps, padding included),
    ``peak_memory_gib`` (allocator on CUDA, process elsewhere), ``host_gib`` (high-water mark of checkpointed
    activations in host memory since the last log), ``sent_gib`` (of them copied there since then) and
    ``exposed_copy_ms`` (for which computing waited for these copies, on CUDA).

    They are in ``trainer.state.log_history`` and in what later callbacks (the printer, the progress bar) show. The
    trainer's own reporting integrations come before callbacks that a user gives: see ``report_first``.

    Prints, on the first process, what was done when training starts, and a line of measurements when it ends, with what
    checkpointing came to where it is on.

    Args:
        quiet: print neither.
        most_tokens: of a batch, padding included; by default the trainer's arguments are asked.

    Attributes:
        applied: what was done to the model that trains; found on it, where nobody has set it.
    """

    def __init__(self, *, quiet: bool = False, most_tokens: int | None = None) -> None:
        self.quiet, self._most_tokens = quiet, most_tokens
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
            tokens = self._most_tokens or _most_tokens(args)
            self.applied.sync_checkpointing()
            self.applied.expect(tokens, _optimizer_of(args))
            self._say(state, self.applied.report())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Sum up."""
        if self._meter is not None:
            self._say(state, self._meter.summary())
            self._meter = None

    def _say(self, state: TrainerState, text: str) -> None:
        if state.is_world_process_zero and not self.quiet:
            print(text, flush=True)

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
