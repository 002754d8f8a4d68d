"""Hugging Face Trainer: ``callbacks=[UnslothCallback()]``, in ``Trainer`` and in TRL's trainers."""

from unsloth_plugins.hf_trainer.callback import UnslothCallback, prepare_model
from unsloth_plugins.trainer_metrics import explain_out_of_memory, report_first

__all__ = ["UnslothCallback", "explain_out_of_memory", "prepare_model", "report_first"]
