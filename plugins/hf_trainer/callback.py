"""The callback: applies when the trainer is built, follows its checkpointing, and adds measurements to its logs."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from unsloth_plugins.core import UnslothConfig, applied_to, apply
from unsloth_plugins.core.errors import ConflictError
from unsloth_plugins.hf_trainer.conflicts import check_arguments
from unsloth_plugins.trainer_metrics import TrainerMetrics


def prepare_model(model: nn.Module, config: UnslothConfig | None = None, **options: Any) -> nn.Module:
    """Apply before the trainer exists, and get the same model back. ``UnslothCallback`` then finds it done.

    Args:
        model: as for ``unsloth_plugins.apply``, before or after PEFT.
        config, options: as for ``unsloth_plugins.apply``.
    """
    apply(model, config, **options)
    return model


class UnslothCallback(TrainerMetrics):
    """``Trainer(callbacks=[UnslothCallback()])`` is all it takes; options are those of ``UnslothConfig``.

    Adds the measurements of ``TrainerMetrics`` to each training log.

    Args:
        config, options: as for ``unsloth_plugins.apply``. Without any, a model that was prepared with
            ``prepare_model`` keeps the options given there.
        quiet: no report at the start, no summary at the end.

    Attributes:
        applied: what was done to the model, once the trainer is built.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
    """

    def __init__(self, config: UnslothConfig | None = None, *, quiet: bool = False, **options: Any) -> None:
        super().__init__(quiet=quiet)
        self.config = UnslothConfig.from_options(config, **options)
        self._chosen = config is not None or bool(options)

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
        super().on_train_begin(args, state, control, **kwargs)

    def _apply(self, args: TrainingArguments, model: nn.Module) -> None:
        before = applied_to(model)
        kept = before is not None and not self._chosen
        check_arguments(args, before.config if before is not None and kept else self.config)
        self.applied = apply(model, before.config if before is not None and kept else self.config)
