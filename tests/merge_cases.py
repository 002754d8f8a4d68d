"""Bases, adapters and comparisons that the export tests share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from conftest import batch_of, tiny_gpt_oss, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, Mxfp4Config, PreTrainedModel, PreTrainedTokenizerFast

import unsloth_plugins
from unsloth_plugins.core.mxfp4 import load_mxfp4, pack_experts

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]


def randomise(model: torch.nn.Module, std: float = 0.1, seed: int = 3) -> None:
    """Numbers for everything trainable, by name, so that no delta is zero."""
    for name, parameter in sorted(model.named_parameters()):
        draw = torch.Generator().manual_seed(seed + len(name) + sum(map(ord, name)))
        numbers = torch.randn(parameter.shape, generator=draw).to(parameter) * std
        if "lora_" in name:
            parameter.data.copy_(numbers)  # in place: PEFT ties an adapter of the head by a view
        elif parameter.requires_grad:
            parameter.data += numbers


def save_packed(folder: Path, **options: object) -> Path:
    """A packed gpt-oss on disk, everything else in float32."""
    pack_experts(tiny_gpt_oss(**options)).save_pretrained(folder)
    return folder


def save_llama(folder: Path, **options: object) -> Path:
    """A Llama on disk in float32."""
    tiny_llama(**options).save_pretrained(folder)
    return folder


def small_tokenizer(size: int = 150, **options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE below 160 ids: the bytes of a few letters only."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<pad>", "</s>", "<s>"]
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    words = [
        f"{a}{b}{c}"
        for a in ("th", "qu", "br", "f", "l")
        for b in ("e", "i", "o", "u")
        for c in ("ck", "wn", "x", "zy")
    ]
    backend.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog 0123456789", " ".join(words)] * 5, trainer
    )
    assert backend.get_vocab_size() == size
    names = dict(pad_token="<pad>", eos_token="</s>", bos_token="<s>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **(names | options))
    tokenizer.add_tokens(["<extra>"])
    return tokenizer


def train_packed(base: Path, adapter: Path, std: float = 0.1, **options: Any) -> PeftModel:
    """A packed model with random LoRA on it, saved to ``adapter`` as well."""
    model = get_peft_model(
        load_mxfp4(base, dtype=torch.float32), LoraConfig(**({"r": 4, "target_modules": EVERYTHING} | options))
    )
    unsloth_plugins.apply(model)
    randomise(model, std)
    model.save_pretrained(adapter)
    return model.eval()


def train_llama(base: Path, adapter: Path, **options: Any) -> PeftModel:
    """The same for a Llama, without our patches."""
    loaded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(loaded, LoraConfig(**({"r": 4, "target_modules": ATTENTION} | options)))
    randomise(model)
    model.save_pretrained(adapter)
    return model.eval()


@torch.no_grad()
def logits(model: torch.nn.Module, seed: int = 0) -> torch.Tensor:
    """Of a fixed batch, in float32."""
    return model(**batch_of(2, 33, seed=seed)).logits.float() + 0


def routing_gaps(model: torch.nn.Module) -> list[torch.Tensor]:
    """Filled by each forward: by how much the last expert chosen beats the first one left out, per layer and token."""
    gaps: list[torch.Tensor] = []

    def note(router: Any, inputs: tuple[torch.Tensor, ...], _: Any) -> None:
        scores = torch.nn.functional.linear(inputs[0].flatten(0, -2), router.weight, router.bias)
        best = scores.sort(-1, descending=True).values
        gaps.append(best[:, router.top_k - 1] - best[:, router.top_k])

    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.router.register_forward_hook(note)
    return gaps


def reload(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As stock transformers loads it, MXFP4 decoded; nothing may be missing or left over."""
    quantized = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    packed = quantized.get("quant_method") == "mxfp4"
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if packed else {}  # else kernels from the Hub
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    return model.eval()


def stored(folder: Path) -> Iterator[tuple[str, torch.Tensor, str]]:
    """All tensors of a folder: name, tensor, file."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name), file.name


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder by name."""
    return {name: tensor for name, tensor, _ in stored(folder)}
