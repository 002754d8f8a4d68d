"""The callback: applies when the trainer is built, follows its checkpointing, and adds measurements to its logs."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from unsloth_plugins.core import Applied, UnslothConfig, applied_to, apply
from unsloth_plugins.core.device import peak_memory_gib
from unsloth_plugins.core.errors import ConflictError
from unsloth_plugins.hf_trainer.conflicts import check_arguments


def prepare_model(model: nn.Module, config: UnslothConfig | None = None, **options: Any) -> nn.Module:
    """Apply before the trainer exists, and get the same model back. ``UnslothCallback`` then finds it done.

    Args:
        model: as for ``unsloth_plugins.apply``, before or after PEFT.
        config, options: as for ``unsloth_plugins.apply``.
    """
    apply(model, config, **options)
    return model


class UnslothCallback(TrainerCallback):
    """``Trainer(callbacks=[UnslothCallback()])`` is all it takes; options are those of ``UnslothConfig``.

    Adds to each training log: ``tokens_per_s`` (of this process and its training steps, padding included),
    ``peak_memory_gib`` (allocator on CUDA, process elsewhere) and ``host_gib`` (high-water mark of checkpointed
    activations in host memory since the last log). They are in ``trainer.state.log_history`` and in what later
    callbacks (the printer, the progress bar) show; the trainer's own reporting integrations run before.

    Args:
        config, options: as for ``unsloth_plugins.apply``. Without any, a model that was prepared with
            ``prepare_model`` keeps the options given there.

    Attributes:
        applied: what was done to the model, once the trainer is built.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
    """

    def __init__(self, config: UnslothConfig | None = None, **options: Any) -> None:
        self.config = UnslothConfig.from_options(config, **options)
        self.applied: Applied | None = None
        self._chosen = config is not None or bool(options)
        self._seconds, self._tokens, self._since = 0.0, 0, 0.0

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check for conflicts, then apply. The optimizer does not exist yet."""
        self._apply(args, kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer has just switched checkpointing on, and may have been given another model: follow it."""
        known = applied_to(kwargs["model"])
        if known is not None and known.lacks_adapters():
            raise ConflictError(
                expected="all adapters to be there when the trainer is built",
                got="one added since, that asks for LoRA on experts, with an optimizer that does not know it",
                remedy="Add adapters before the trainer, or call unsloth_plugins.apply(model) right after adding them.",
            )
        self._apply(args, kwargs["model"])
        assert self.applied is not None
        self.applied.sync_checkpointing()
        self._restart()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the measurements to logs of training steps."""
        if self.applied is None or logs is None or "loss" not in logs:
            return
        measured = {
            "tokens_per_s": round((self.applied.tokens_seen - self._tokens) / max(self._seconds, 1e-9), 1),
            "peak_memory_gib": round(peak_memory_gib(args.device), 3),
            "host_gib": round(self.applied.store.peak_bytes / 2**30, 4),
        }
        logs.update(measured)
        if state.log_history:
            state.log_history[-1].update(measured)
        self._restart()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Time spent in training: evaluation and saving, which come between two steps, do not count."""
        if torch.cuda.is_available() and torch.cuda.is_initialized() and control.should_log:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self._seconds, self._since = self._seconds + now - self._since, now

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Training goes on from here."""
        self._since = time.perf_counter()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Training goes on from here."""
        self._since = time.perf_counter()

    def _apply(self, args: TrainingArguments, model: nn.Module) -> None:
        before = applied_to(model)
        kept = before is not None and not self._chosen
        check_arguments(args, before.config if before is not None and kept else self.config)
        self.applied = apply(model, before.config if before is not None and kept else self.config)

    def _restart(self) -> None:
        assert self.applied is not None
        self.applied.store.reset_peak()
        self._seconds, self._tokens, self._since = 0.0, self.applied.tokens_seen, time.perf_counter()
