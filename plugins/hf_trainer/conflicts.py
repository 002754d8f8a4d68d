"""Trainer settings that cannot go with ours, each refused with one message before anything is changed."""

from __future__ import annotations

import os

from transformers import TrainingArguments

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import ConflictError


def check_arguments(args: TrainingArguments, config: UnslothConfig) -> None:
    """Look at the trainer's arguments.

    Raises:
        ConflictError: naming the argument to change.
    """
    if getattr(args, "use_liger_kernel", False):
        raise ConflictError(
            expected="one owner of the model's forward",
            got="use_liger_kernel=True beside UnslothCallback",
            remedy="Remove use_liger_kernel=True; the chunked loss is already here.",
        )
    if args.torch_compile:
        raise ConflictError(
            expected="an uncompiled model",
            got="torch_compile=True beside UnslothCallback",
            remedy="Remove torch_compile=True; patched forwards and offloaded checkpointing break its graph.",
        )
    for name, variable in (("fsdp", "ACCELERATE_USE_FSDP"), ("deepspeed", "ACCELERATE_USE_DEEPSPEED")):
        if getattr(args, name, None) or os.environ.get(variable, "").lower() in ("1", "true"):
            raise ConflictError(
                expected="whole parameters on each process",
                got=f"{name}, which shards them, beside UnslothCallback",
                remedy="Use data parallelism: `torchrun --nproc-per-node N` without a sharding plugin.",
            )
    if getattr(args, "activation_offloading", False):
        raise ConflictError(
            expected="one owner of offloaded activations",
            got="activation_offloading=True beside UnslothCallback",
            remedy="Remove it and set gradient_checkpointing=True; the callback offloads the layers' inputs.",
        )
    if args.n_gpu > 1:
        raise ConflictError(
            expected="one process per GPU",
            got=f"one process with {args.n_gpu} GPUs, where Trainer uses nn.DataParallel",
            remedy="Launch with `torchrun --nproc-per-node N` or `accelerate launch`, or set CUDA_VISIBLE_DEVICES=0.",
        )
    kwargs = checkpointing_kwargs(args)
    if config.gradient_checkpointing is not False and checkpointing_on(args) and kwargs.get("use_reentrant"):
        raise ConflictError(
            expected="non-reentrant gradient checkpointing",
            got="gradient_checkpointing_kwargs={'use_reentrant': True}",
            remedy="Set it to {'use_reentrant': False} or leave it out, "
            "or keep it with UnslothCallback(gradient_checkpointing=False).",
        )


def checkpointing_on(args: TrainingArguments) -> bool:
    """Whether the trainer will checkpoint; newer transformers call it ``activation_checkpointing``."""
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def checkpointing_kwargs(args: TrainingArguments) -> dict[str, object]:
    """The trainer's keyword arguments for checkpointing."""
    given = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    return given if isinstance(given, dict) else {}
