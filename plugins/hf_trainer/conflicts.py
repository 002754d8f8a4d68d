"""Trainer settings that cannot go with ours, each refused with one message before anything is changed."""

from __future__ import annotations

import os
from typing import Any

from accelerate.state import AcceleratorState, is_initialized
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
        raise _compiled("torch_compile=True", "torch_compile=True")
    dynamo = os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if dynamo.lower() not in ("", "no"):
        raise _compiled(f"ACCELERATE_DYNAMO_BACKEND={dynamo}", "dynamo_backend from accelerate's config or launch line")
    if getattr(args, "deepspeed", None) or os.environ.get("ACCELERATE_USE_DEEPSPEED", "").lower() in ("1", "true"):
        raise ConflictError(
            expected="parameters held by torch: whole (DDP) or sharded by FSDP2",
            got="deepspeed, which brings an engine of its own, beside UnslothCallback",
            remedy="Launch with `torchrun --nproc-per-node N`, or with FSDP2 (`fsdp_config={'version': 2}`).",
        )
    if getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("1", "true"):
        _check_fsdp(args)
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


def _compiled(got: str, line: str) -> ConflictError:
    return ConflictError(
        expected="an uncompiled model",
        got=f"{got} beside UnslothCallback",
        remedy=f"Remove {line}; patched forwards and offloaded checkpointing break its graph.",
    )


def _check_fsdp(args: TrainingArguments) -> None:
    """Whoever asked for it, accelerate holds the settings in force; where it is not set up yet, the arguments do."""
    plugin: Any = getattr(AcceleratorState(), "fsdp_plugin", None) if is_initialized() else None
    asked, given = bool(getattr(args, "fsdp", None)), getattr(args, "fsdp_config", None) or {}
    version = plugin.fsdp_version if plugin is not None else given.get("version", os.environ.get("FSDP_VERSION", 1))
    if int(version) != 2:
        raise ConflictError(
            expected="FSDP2, which shards each parameter by itself",
            got="fsdp version 1, which flattens them and can't hold packed ones, beside UnslothCallback"
            + ("" if asked else "; asked for by ACCELERATE_USE_FSDP in the environment"),
            remedy="Set fsdp_config={'version': 2}, or `fsdp_version: 2` in accelerate's config."
            + ("" if asked else " In a notebook a former TrainingArguments(fsdp=...) has left the variable: restart."),
        )
    if plugin is not None and plugin.activation_checkpointing:
        raise ConflictError(
            expected="one owner of checkpointed activations",
            got="activation_checkpointing in fsdp's settings beside UnslothCallback",
            remedy="Remove it there and set gradient_checkpointing=True.",
        )


def checkpointing_on(args: TrainingArguments) -> bool:
    """Whether the trainer will checkpoint; newer transformers call it ``activation_checkpointing``."""
    return bool(getattr(args, "activation_checkpointing", None) or args.gradient_checkpointing)


def checkpointing_kwargs(args: TrainingArguments) -> dict[str, object]:
    """The trainer's keyword arguments for checkpointing."""
    given = getattr(args, "activation_checkpointing_kwargs", None) or args.gradient_checkpointing_kwargs
    return given if isinstance(given, dict) else {}
