"""The callback: applies when the trainer is built, follows its checkpointing, and adds measurements to its logs."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from unsloth_plugins.core import UnslothConfig, applied_to, apply, check_optimizers, lacks_adapters
from unsloth_plugins.core.config import check_choice
from unsloth_plugins.core.errors import ConfigError, ConflictError
from unsloth_plugins.core.export import MergeReport, check_dtype, check_model, check_whole, merge_bar, merge_model
from unsloth_plugins.hf_trainer.conflicts import check_arguments
from unsloth_plugins.trainer_metrics import TrainerMetrics

_log = logging.getLogger(__name__)
_OWN = ("quiet", "save_merged", "merged_dtype")


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
        save_merged: a new folder, into which the merged model is written when training ends. What would prevent that is
            an error when training begins. The adapter is saved beside it, in ``NAME-adapter``.
        merged_dtype: "bf16", "fp16", "fp32", "mxfp4" or "nf4", see ``unsloth_plugins.core.export.merge``.

    Attributes:
        applied: what was done to the model, once the trainer is built.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
        UnsupportedError: ``merged_dtype`` needs a package that is missing.
    """

    def __init__(
        self,
        config: UnslothConfig | None = None,
        *,
        save_merged: str | Path | None = None,
        quiet: bool = False,
        merged_dtype: str = "bf16",
        **options: Any,
    ) -> None:
        check_choice("quiet", quiet)
        super().__init__(quiet=quiet)
        check_dtype(merged_dtype)
        if not (save_merged is None or isinstance(save_merged, str | os.PathLike)):
            raise ConfigError(
                expected="`save_merged` to be the path of a new folder, or None",
                got=repr(save_merged),
                remedy="Give a path, or leave it out.",
            )
        self._merged_output = None if save_merged is None else Path(save_merged)
        self._merged_dtype = merged_dtype
        self._trained: dict[str, Any] = {}
        self.config = UnslothConfig.from_options(config, beside=_OWN, **options)
        self._chosen = config is not None or bool(options)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Check for conflicts, then apply. The optimizer does not exist yet."""
        self._apply(args, kwargs["model"])

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The trainer has just switched checkpointing on, and may have been given another model: follow it."""
        if vars(control).setdefault("unsloth_callback", self) is not self:  # there is one control a trainer
            raise ConflictError(
                expected="one UnslothCallback in a trainer",
                got="two, of which the later one's options would hold",
                remedy="Remove one, and give the other all options.",
            )
        if lacks_adapters(kwargs["model"]):
            raise ConflictError(
                expected="LoRA on experts, which this callback adds, to be there before the optimizer",
                got="an adapter, or this callback, or a model (model_init), that came after the trainer was built",
                remedy="Add adapters before the trainer and give it the callback in callbacks=[...], or call "
                "unsloth_plugins.apply(model) right after adding them, in model_init too.",
            )
        self._trained = {"model": kwargs["model"], "tokenizer": kwargs.get("processing_class"), "state": state}
        if self._merged_output is not None:
            beside = _adapter_beside(self._merged_output)
            check_model(kwargs["model"], self._merged_output, dtype=self._merged_dtype, adapter_output=beside)
        self._apply(args, kwargs["model"])
        assert self.applied is not None
        if kwargs.get("optimizer") is not None:
            remedy = "Call unsloth_plugins.apply(model) before making the optimizer that the trainer is given."
            check_optimizers([kwargs["optimizer"]], (self.applied,), remedy)
        self.applied.sync_checkpointing()
        super().on_train_begin(args, state, control, **kwargs)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Write the merged model, if that was asked for; the best checkpoint has been loaded by now, if that was."""
        super().on_train_end(args, state, control, **kwargs)
        if self._merged_output is not None:
            beside = _adapter_beside(self._merged_output)
            self.save_merged(self._merged_output, dtype=self._merged_dtype, adapter_output=beside)

    def save_merged(self, output: str | Path, *, dtype: str = "bf16", **options: Any) -> MergeReport | None:
        """Write the merged model of the last ``train``, with the trainer's tokenizer.

        Args:
            output, dtype, options: as for ``unsloth_plugins.core.export.merge_model``.

        Returns:
            The report; ``None`` on processes other than the first, which do nothing.

        Raises:
            ConfigError: nothing was trained yet; else see ``merge_model``.
        """
        if not self._trained:
            raise ConfigError(expected="a trained model", got="none", remedy="Call trainer.train() first.")
        check_whole(self._trained["model"])  # on every process: one that raised alone would leave the others waiting
        if not self._trained["state"].is_world_process_zero:
            return None
        with merge_bar(quiet=self.quiet) as progress:
            given = {"tokenizer": self._trained["tokenizer"], "progress": progress} | options
            report = merge_model(self._trained["model"], output, dtype=dtype, **given)
        _log.info("Merged model in %s", report.output)
        return report

    def _apply(self, args: TrainingArguments, model: nn.Module) -> None:
        before = applied_to(model)
        kept = before is not None and not self._chosen
        check_arguments(args, before.config if before is not None and kept else self.config)
        self.applied = apply(model, before.config if before is not None and kept else self.config)
        self.applied.expect_label_smoothing(args.label_smoothing_factor != 0)


def _adapter_beside(merged: Path) -> Path:
    return merged.with_name(f"{merged.name}-adapter")
