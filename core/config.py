"""The options of ``apply``, the same names in Python, Lightning, the Hugging Face Trainer and Axolotl."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from unsloth_plugins.core.errors import ConfigError

_CHOICES: dict[str, tuple[object, ...]] = {
    "attention": ("auto", "triton", "fa4", "cudnn", "flex", "eager", None),
    "experts": ("auto", "reference", "grouped_mm", "triton", None),
    "weights": ("auto", "resident", "streamed"),
    "layers": ("auto", "triton", "reference", None),
    "lora": ("auto", "fused", None),
    "loss": ("auto", "chunked", None),
    "gradient_checkpointing": ("auto", True, False),
    "memory_policy": ("auto", "min_memory", "offload_all", "on_device"),
    "checkpoint_pairs": (True, False),
}


@dataclass(frozen=True)
class UnslothConfig:
    """What ``apply`` does to a model. ``None`` means off; the defaults are right for someone who sets nothing."""

    attention: Literal["auto", "triton", "fa4", "cudnn", "flex", "eager"] | None = "auto"
    """``auto`` takes over attention with sinks (gpt-oss), by the fastest kernels that run, and ``sdpa`` of other models
    where kernels are known to be faster (head sizes 64 and 128 on Hopper) or under ``memory_policy="min_memory"``; what
    else was chosen for a model stays. ``triton`` (our kernels), ``fa4`` (flash-attn-4), ``cudnn`` (torch's, for whole
    rows), ``flex`` (torch's flex attention) and ``eager`` (plain PyTorch) take over every recognised attention and
    raise where they can't; ``None`` leaves all alone."""

    experts: Literal["auto", "reference", "grouped_mm", "triton"] | None = "auto"
    """Mixture-of-experts layers: ``grouped_mm`` and ``triton`` are one grouped GEMM for all experts, torch's (bf16 on
    Hopper and Blackwell) and ours, ``reference`` is a loop over them. ``auto`` takes the first that runs: on CUDA a
    grouped GEMM, but for bf16 below compute capability 8.0 and float64. Under ``memory_policy="min_memory"`` ``triton``
    goes first where the experts of a layer take more than 2 GiB, which it does not decode all at once."""

    weights: Literal["auto", "resident", "streamed"] = "auto"
    """Where packed MXFP4 experts are: ``resident`` on the model's device, ``streamed`` in host memory, page-locked on
    CUDA, from where each layer's come to the device for the moment in which they are decoded, the next layer's while
    this one computes. ``auto`` streams on CUDA where less is free beside the model than two layers' experts in 16 bits
    and 12 bytes a trained number of the adapters, and from the first step on that would not fit otherwise, as far as
    the planner knows the model. A frozen embedding that is not the head goes with them, and is read there token by
    token. Streamed ones stay on the host when the model is moved to a device.
    ``streamed`` is for one process, and raises without packed experts."""

    layers: Literal["auto", "triton", "reference"] | None = "auto"
    """RMSNorm, rotary embedding and the gate of dense MLPs, wherever a module runs code that is known: by our kernels
    on CUDA under ``auto``, which leaves the model's own elsewhere; ``triton`` raises where the kernels can't run,
    ``reference`` is plain PyTorch."""

    lora: Literal["auto", "fused"] | None = "auto"
    """PEFT's LoRA on linear layers, dense or in bitsandbytes' 4 bits, with the base in one function that reads and
    saves its input once, for q, k, v and for gate, up together. ``auto`` does so on CUDA, ``fused`` everywhere,
    ``None`` leaves it to PEFT. Masks of dropout are made from seeds, again in backward. Layers with DoRA or an 8-bit
    base stay PEFT's; the report counts them."""

    loss: Literal["auto", "chunked"] | None = "auto"
    """Cross entropy that never holds the logits of all tokens. ``auto`` uses it wherever the head is recognised,
    ``chunked`` raises where it is not, ``None`` leaves the model's own loss."""

    loss_chunk_mib: int = 512
    """The most MiB of logits, their float32 copy and their gradient alive at once in the loss. With a frozen head on
    CUDA, where logits become their gradient, it takes no more than 252."""

    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """``auto`` follows the model or the trainer (``gradient_checkpointing=True`` there); ``True`` switches it on,
    ``False`` leaves layers to whatever the trainer set up."""

    memory_policy: Literal["auto", "min_memory", "offload_all", "on_device"] = "auto"
    """What layers with gradient checkpointing do. ``auto``: the fastest that fits; on CUDA as many layers as there is
    memory for are not checkpointed after all, and the inputs of the others go to host memory where that makes room;
    on other devices as ``on_device``, but for accelerators, whose inputs go to the host. ``offload_all``: every layer
    is checkpointed, every input goes to the host. ``min_memory``: the same with the least held on the device at once,
    at most 64 MiB of logits in the loss, at most 512 MiB of decoded experts of layers with more than 2 GiB of them, and
    our attention kernels in place of ``sdpa``. ``on_device``: plain checkpointing."""

    checkpoint_pairs: bool = False
    """Keep the input of every second checkpointed layer only, wherever inputs wait, and compute the ones in between
    again in backward: half the memory for these inputs, for one more forward of half the layers."""

    host_memory_gib: float | None = None
    """The most host memory for checkpointed activations, GiB; ``None`` for no limit. What needs more is an error before
    it is taken; under ``memory_policy="auto"`` on CUDA inputs wait on the device instead, if they fit there."""

    offload_min_bytes: int = 1 << 20
    """Activations smaller than this many bytes stay on the device."""

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name, least in (("loss_chunk_mib", 1), ("offload_min_bytes", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(
                    expected=f"`{name}` to be an integer >= {least}",
                    got=repr(value),
                    remedy="Leave it out for the default.",
                )

        limit = self.host_memory_gib
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | float) or limit <= 0):
            raise ConfigError(
                expected="`host_memory_gib` to be a number > 0, or None",
                got=repr(limit),
                remedy="Leave it out for no limit.",
            )

    @property
    def loss_mib(self) -> int:
        """The most MiB of logits that the loss works with: ``loss_chunk_mib``, under ``min_memory`` at most 64."""
        return min(self.loss_chunk_mib, 64) if self.memory_policy == "min_memory" else self.loss_chunk_mib

    @classmethod
    def from_options(
        cls, config: UnslothConfig | None = None, *, beside: Collection[str] = (), **options: Any
    ) -> UnslothConfig:
        """A config from keyword options, on top of ``config`` where one is given.

        Args:
            config: what ``options`` do not name is taken from it.
            beside: names that the caller takes besides, for the error's message.
            options: fields of this class.

        Raises:
            ConfigError: an option does not exist; the message names the nearest one that does.
        """
        if config is not None and not isinstance(config, UnslothConfig):
            raise ConfigError(
                expected="config to be an UnslothConfig or None",
                got=type(config).__name__,
                remedy="Pass UnslothConfig(...), or the options as keyword arguments.",
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                near = get_close_matches(name, [*known, *beside], n=1)
                raise ConfigError(
                    expected=f"one of the options {', '.join([*known, *beside])}",
                    got=repr(name),
                    remedy=f"Did you mean `{near[0]}`?" if near else "Remove it.",
                )
        return dataclasses.replace(config or cls(), **options)


def check_choice(name: str, value: object, allowed: Collection[object] = (True, False)) -> None:
    """Check an option.

    Raises:
        ConfigError: ``value`` is none of ``allowed``; 1 is not ``True``.
    """
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in allowed):
        raise ConfigError(
            expected=f"`{name}` to be one of {', '.join(map(repr, allowed))}",
            got=repr(value),
            remedy="Leave it out for the default.",
        )
