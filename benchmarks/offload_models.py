"""What the offload benchmark trains: stacks of decoder or Mamba layers, and diffusers' UNet, with random weights.

Of all of them the norms train, so that every block needs a backward and no optimizer gets into the figures.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

import unsloth_plugins

MODELS = ("mistral-7b", "gpt-oss-20b", "mamba", "unet", "tiny", "tiny-mamba", "tiny-unet")
LENGTHS = "2048,8192,32768"
POSITIONS = "4096,16384,65536"  # of a UNet's latents: images of 512, 1024 and 2048 pixels a side
_LAYERS = 8

Checkpoint = Callable[..., Any]  # checkpoint(function, *args)


class Skipped(Exception):
    """An implementation that does not exist here; the message says why."""


class Stack:
    """Layers of a causal LM of transformers, at true width.

    Attributes:
        count: number of layers, each of which gets a checkpoint function of its own.
        alike: whether they can be chosen among by what they keep, as ``memory_policy="auto"`` does.
    """

    alike = True

    def __init__(self, model: str, layers: int, device: torch.device) -> None:
        kind, config = _causal_lm(model, layers)
        self.model = _built(lambda: kind(config), device)
        unsloth_plugins.apply(self.model, gradient_checkpointing=False)  # attention and experts, the same for all
        self._inner = getattr(self.model, "backbone", None) or self.model.model
        self.count = layers

    def use(self, functions: list[Checkpoint]) -> None:
        """Let each layer be checkpointed by its function."""
        for layer, function in zip(self._inner.layers, functions, strict=True):
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, function

    def batch(self, ctx: int) -> dict[str, Any]:
        """``ctx`` tokens."""
        device = next(self.model.parameters()).device
        generator = torch.Generator(device).manual_seed(ctx)
        return {"input_ids": torch.randint(3, 512, (1, ctx), device=device, generator=generator)}

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Hidden states, without the head."""
        return self._inner(**batch).last_hidden_state  # type: ignore[no-any-return]

    def offloaded_by_transformers(self) -> list[Checkpoint]:
        """What ``activation_checkpointing_enable(offload=True)`` sets."""
        enable = getattr(self.model, "activation_checkpointing_enable", None)
        if enable is None or "offload" not in inspect.signature(enable).parameters:
            raise Skipped(f"transformers {version('transformers')} has no activation checkpointing with offload=True")
        if not next(self.model.parameters()).is_cuda:
            raise Skipped("transformers' offload=True needs page-locked memory, which a CPU alone does not have")
        enable(offload=True)
        self.model.disable_input_require_grads()  # set along with it, and wanted by nobody here
        return [layer._gradient_checkpointing_func for layer in self._inner.layers]


class UNet:
    """diffusers' ``UNet2DConditionModel``, its blocks checkpointed whole. Attributes as of ``Stack``."""

    alike = False

    def __init__(self, model: str, device: torch.device) -> None:
        from diffusers import UNet2DConditionModel

        sizes: dict[str, Any] = {"cross_attention_dim": 768}  # the rest of the defaults is Stable Diffusion 1.5
        if model == "tiny-unet":
            sizes = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
            sizes |= {"cross_attention_dim": 16, "attention_head_dim": 8}
            sizes |= {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D")}
            sizes |= {"up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}
        self.model = _built(lambda: UNet2DConditionModel(**sizes), device)
        self._blocks = [_Block(each) for each in (*self.model.down_blocks, self.model.mid_block, *self.model.up_blocks)]
        self.count = len(self._blocks)

    def use(self, functions: list[Checkpoint]) -> None:
        """Let each block be checkpointed by its function."""
        for block, function in zip(self._blocks, functions, strict=True):
            block.function = function

    def batch(self, ctx: int) -> dict[str, Any]:
        """A square of ``ctx`` latent positions, a time, and 77 positions of text."""
        side, halvings = math.isqrt(ctx), len(self.model.down_blocks) - 1
        if side * side != ctx or side % 2**halvings:
            raise SystemExit(f"expected squares of multiples of {2**halvings} as lengths of a UNet; got {ctx}")
        one = next(self.model.parameters())
        generator = torch.Generator(one.device).manual_seed(ctx)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=one.device, generator=generator).to(one.dtype)

        text = draw(1, 77, self.model.config.cross_attention_dim)
        return {"sample": draw(1, 4, side, side), "timestep": 10, "encoder_hidden_states": text}

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The predicted noise."""
        return self.model(**batch).sample  # type: ignore[no-any-return]

    def offloaded_by_transformers(self) -> list[Checkpoint]:
        """Not there."""
        raise Skipped("transformers' offload=True is for its own models, not for diffusers'")


class _Block:
    """Stands in for the forward of a block, all of whose tensors, in tuples too, are the region's arguments."""

    def __init__(self, module: nn.Module) -> None:
        self._forward = module.forward
        self.function: Checkpoint | None = None
        module.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, layout = tree_flatten((args, kwargs))

        def region(*leaves: Any) -> Any:
            args, kwargs = tree_unflatten(leaves, layout)
            return self._forward(*args, **kwargs)

        assert self.function is not None
        return self.function(region, *leaves)


def build(model: str, layers: int | None, device: torch.device) -> Stack | UNet:
    """One of ``MODELS``, of ``layers`` layers where it is a stack of them."""
    if not model.endswith("unet"):
        return Stack(model, layers or _LAYERS, device)
    if layers is not None:
        raise SystemExit("expected no --layers for a UNet, which has the blocks that it has")
    return UNet(model, device)


def _built(make: Callable[[], Any], device: torch.device) -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    try:
        with device:
            made = make()
    finally:
        torch.set_default_dtype(before)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("norm" in name)
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    return made.train()


def _causal_lm(model: str, layers: int) -> tuple[Any, Any]:
    """Class and config, with a tiny vocabulary."""
    import transformers

    common: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 512, "pad_token_id": 0, "use_cache": False}
    if model == "gpt-oss-20b":
        return transformers.GptOssForCausalLM, transformers.GptOssConfig(**common, num_local_experts=32)
    if model.endswith("mamba"):
        sizes: dict[str, Any] = {"hidden_size": 2560, "num_heads": 80, "head_dim": 64, "n_groups": 1}  # Mamba2 2.7B
        if model == "tiny-mamba":
            sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 1}
            sizes |= {"state_size": 8, "chunk_size": 16}
        return transformers.Mamba2ForCausalLM, transformers.Mamba2Config(**common, **sizes)
    sizes = {}
    if model == "tiny":
        sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    config = transformers.MistralConfig(**common, **sizes, sliding_window=None)
    config._attn_implementation = "sdpa"
    return transformers.MistralForCausalLM, config
