"""Models of true size with random weights: gpt-oss in its published layout, Mistral and Gemma in NF4.

Written as checkpoints, or built in memory.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GemmaConfig,
    GptOssConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
)

from unsloth_plugins.core.mxfp4.quantizer import PackedMxfp4Config, replace_experts

SIZES: dict[str, dict[str, int]] = {
    "gpt-oss-20b": dict(num_hidden_layers=24, num_local_experts=32),
    "gpt-oss-120b": dict(num_hidden_layers=36, num_local_experts=128),
    "tiny": dict(
        num_hidden_layers=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=512,
    ),
}
DENSE: dict[str, dict[str, int]] = {
    "mistral-7b": dict(
        num_hidden_layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32768,
    ),
    "tiny-mistral": dict(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
    ),
    "gemma-7b": dict(
        num_hidden_layers=28,
        hidden_size=3072,
        intermediate_size=24576,
        num_attention_heads=16,
        num_key_value_heads=16,
        head_dim=256,
        vocab_size=256000,
    ),
    "tiny-gemma": dict(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        vocab_size=512,
    ),
}
WEIGHTS = dict.fromkeys(SIZES, ("mxfp4", "streamed", "bf16")) | dict.fromkeys(DENSE, ("nf4",))
_SCALE = 120  # 2 ** -7 times codes up to 6: a standard deviation near 0.02
_SKEW = 3.0  # bias of the first expert over the last one's, for skewed routing


def config_of(model: str, layers: int | None) -> Any:
    """The config of ``model``, with fewer layers where asked."""
    size: dict[str, Any] = dict((SIZES | DENSE)[model])
    if layers:
        size["num_hidden_layers"] = layers
    size |= dict(bos_token_id=0, pad_token_id=1, eos_token_id=2)
    if model in SIZES:
        return GptOssConfig(**size)
    size["max_position_embeddings"] = 1 << 20
    if "gemma" in model:
        return GemmaConfig(**size)
    return MistralConfig(**size, sliding_window=None, tie_word_embeddings=False)


def find_or_write_checkpoint(folder: Path, model: str, layers: int | None, routing: str) -> None:
    """Write the checkpoint unless it is there.

    Raises:
        SystemExit: another one is there.
    """
    asked = {"model": model, "layers": config_of(model, layers).num_hidden_layers, "routing": routing}
    label = folder / "benchmark.json"
    if not folder.exists():
        write_checkpoint(folder, model, layers, routing)
        label.write_text(json.dumps(asked))
    there = json.loads(label.read_text()) if label.is_file() else None
    if there != asked:
        sys.exit(f"--checkpoint: expected {asked} or no folder in {folder}; got {there}. Name another folder.")


def write_checkpoint(folder: Path, model: str, layers: int | None, routing: str) -> None:
    """Write random weights, one file a layer, with config and a byte-level tokenizer.

    Args:
        folder: is created.
        model: a key of ``SIZES`` or ``DENSE``.
        layers: number of layers, ``None`` for all.
        routing: ``"balanced"`` (random router) or ``"skewed"`` (some experts get several times the tokens).
    """
    folder.mkdir(parents=True)
    config = config_of(model, layers)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    draw = torch.Generator(device).manual_seed(0)
    with torch.device("meta"):
        skeleton: Any = AutoModelForCausalLM.from_config(config)
        if model in SIZES:
            replace_experts(skeleton)
    files: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in skeleton.named_parameters():
        part = name.split(".")[2] if ".layers." in name else "rest"
        files.setdefault(part, {})[name] = parameter
    index: dict[str, str] = {}
    total = 0
    for part, parameters in files.items():
        file = f"model-{part}.safetensors"
        tensors = {name: _random(name, p, routing, draw, device) for name, p in parameters.items()}
        if model in DENSE:
            tensors = _in_nf4(tensors, device)
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, file)
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    config.dtype, config.architectures = torch.bfloat16, [type(skeleton).__name__]
    if model in DENSE:
        config.quantization_config = NF4.to_dict()
    else:
        config.quantization_config = PackedMxfp4Config(["model.layers.*.self_attn", "lm_head"]).to_dict()
    config.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def build(config: Any, weights: str, routing: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A frozen model on ``device``, as random as ``write_checkpoint``'s, with no file and hardly any memory besides.

    Args:
        config: from ``config_of``, or another of these families.
        weights: ``"mxfp4"`` or ``"streamed"`` for packed experts, ``"nf4"``, or ``"bf16"`` for all in ``dtype``.
        routing: as for ``write_checkpoint``.
        dtype: of what is not packed.
    """
    with init_empty_weights(include_buffers=False):
        model: Any = AutoModelForCausalLM.from_config(config)
    if weights in ("mxfp4", "streamed"):
        with torch.device("meta"):
            replace_experts(model)
    linears = _take_linears(model) if weights == "nf4" else []
    buffers = {name: buffer for name, buffer in model.named_buffers() if not buffer.is_meta}  # computed, not loaded
    model.to(dtype).to_empty(device=device)
    model.tie_weights()
    for name, buffer in buffers.items():
        owner, _, last = name.rpartition(".")
        setattr(model.get_submodule(owner), last, buffer.to(device))
    draw = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if (fixed := _fixed(name, parameter, routing)) is not None:
                parameter.copy_(fixed)
            elif name.endswith("_blocks"):
                parameter.random_(0, 256, generator=draw)
            else:
                parameter.normal_(std=0.02, generator=draw)
        for parent, name, (outputs, inputs) in linears:
            weight = torch.empty(outputs, inputs, dtype=dtype, device=device).normal_(std=0.02, generator=draw)
            setattr(parent, name, _linear_4bit(weight))
    model.is_loaded_in_4bit = weights == "nf4"  # what PEFT asks for
    return model.eval()


def _take_linears(model: Any) -> list[tuple[nn.Module, str, tuple[int, ...]]]:
    """The linear layers of decoder layers, which are taken out: parent, name, outputs and inputs."""
    found = []
    for parent in list(model.model.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                found.append((parent, name, tuple(child.weight.shape)))
                setattr(parent, name, nn.Identity())
    return found


def _linear_4bit(weight: torch.Tensor) -> nn.Module:
    """A linear layer without bias in NF4, quantised twice, of this weight (outputs, inputs)."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    outputs, inputs = weight.shape
    layer = Linear4bit(inputs, outputs, bias=False, compute_dtype=weight.dtype, quant_type="nf4", device="meta")
    layer.weight = Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer)
    return layer.to(weight.device)  # packs it


NF4 = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.bfloat16,
)


def _in_nf4(tensors: dict[str, torch.Tensor], device: str) -> dict[str, torch.Tensor]:
    """Linear layers of decoder layers as bitsandbytes saves them, quantised twice; the rest as it is."""
    from bitsandbytes.functional import quantize_4bit

    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj." not in name:
            out[name] = tensor
            continue
        packed, state = quantize_4bit(tensor.to(device), compress_statistics=True, quant_type="nf4")
        out[name] = packed.cpu()
        out |= {f"{name}.{key}": value.cpu() for key, value in state.as_dict(packed=True).items()}
    return out


def _fixed(name: str, like: torch.Tensor, routing: str) -> torch.Tensor | None:
    """Parameters that are not drawn."""
    if name.endswith("_scales"):
        return torch.full(like.shape, _SCALE, dtype=torch.uint8)
    if "norm" in name:
        return torch.ones(like.shape, dtype=torch.bfloat16)
    if name.endswith("router.bias") and routing == "skewed":
        return skew_router(like.shape[0])
    return None


def _random(name: str, like: torch.Tensor, routing: str, draw: torch.Generator, device: str) -> torch.Tensor:
    if (fixed := _fixed(name, like, routing)) is not None:
        return fixed
    if name.endswith("_blocks"):
        return torch.randint(0, 256, like.shape, dtype=torch.uint8, device=device, generator=draw).cpu()
    return (torch.randn(like.shape, device=device, generator=draw) * 0.02).to(torch.bfloat16).cpu()


def skew_router(experts: int) -> torch.Tensor:
    """The bias of a router that gives some experts several times the tokens of others, bf16."""
    return torch.linspace(_SKEW, 0, experts).to(torch.bfloat16)


def _tokenizer() -> Any:
    alphabet = {"<s>": 0, "<pad>": 1, "</s>": 2}
    alphabet |= {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 3)}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>")
