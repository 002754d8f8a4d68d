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

    Adds to each training log: ``tokens_per_s`` (of this process, padding included), ``peak_memory_gib`` (allocator on
    CUDA, process elsewhere) and ``host_gib`` (high-water mark of checkpointed activations in host memory since the
    last log). They are in ``trainer.state.log_history`` and in what later callbacks (the printer, the progress bar)
    show.

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
        self._mark = (0.0, 0)

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check for conflicts, then apply. The optimizer does not exist yet."""
        model = kwargs.get("model")
        if model is None:
            raise ConflictError(
                expected="a model when the trainer is built",
                got="a trainer with model_init only",
                remedy="Pass model=..., or call prepare_model inside model_init.",
            )
        self._apply(args, model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer has just switched checkpointing on, and may have been given another model: follow it."""
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
        started, tokens = self._mark
        measured = {
            "tokens_per_s": round((self.applied.tokens_seen - tokens) / max(time.perf_counter() - started, 1e-9), 1),
            "peak_memory_gib": round(peak_memory_gib(args.device), 3),
            "host_gib": round(self.applied.store.peak_bytes / 2**30, 4),
        }
        logs.update(measured)
        if state.log_history:
            state.log_history[-1].update(measured)
        self._restart()

    def _apply(self, args: TrainingArguments, model: nn.Module) -> None:
        check_arguments(args, self.config)
        before = applied_to(model)
        self.applied = before if before is not None and not self._chosen else apply(model, self.config)

    def _restart(self) -> None:
        assert self.applied is not None
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self.applied.store.reset_peak()
        self._mark = (time.perf_counter(), self.applied.tokens_seen)
