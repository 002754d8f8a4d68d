"""What the formulas need to know of a model: sizes, read from a config that is there or from a built-in list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from unsloth_plugins.core.errors import ModelError, UnsupportedError

_DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "gemma", "gemma2", "gemma3_text")
_EXPERTS = {"gpt_oss": "intermediate_size", "mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}
FAMILIES = (*_EXPERTS, *_DENSE)
"""``model_type`` of transformers whose layers the formulas describe."""
ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
_FULL_EVERY = {"gpt_oss": 2, "gemma2": 2, "gemma3_text": 6}  # layers; the others of the family have a window


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model.

    Attributes:
        name: for people.
        family: one of ``FAMILIES``.
        hidden, intermediate, layers, heads, kv_heads, head_size, vocab: H, I, L, H, K, D, V as in the config.
        tied: the head is the embedding.
        biases: q, k, v (and o, but in Qwen2) have biases.
        experts, top_k: of each layer; 0 for dense models.
        routes_over_all: the weights of the chosen experts are parts of a softmax over all.
        trained_tokens: ``max_position_embeddings``, or ``None``.
        softcap: the logits are capped, which the loss kernel leaves to torch.
        windows: by layer, the keys that a token sees, itself included; ``None`` for all. Empty: all in every layer.
    """

    name: str
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    tied: bool = False
    biases: bool = False
    experts: int = 0
    top_k: int = 0
    routes_over_all: bool = False
    trained_tokens: int | None = None
    softcap: bool = False
    windows: tuple[int | None, ...] = ()

    @property
    def has_sinks(self) -> bool:
        """Attention with learned sinks."""
        return self.family == "gpt_oss"

    def has_full_attention(self, index: int) -> bool:
        """Whether that layer sees all keys, and not those of a window."""
        return not self.windows or self.windows[index] is None

    def layers_by_window(self) -> dict[int | None, list[int]]:
        """Layers of each kind, by their windows, in the order of the first of a kind."""
        found: dict[int | None, list[int]] = {}
        for index in range(self.layers):
            found.setdefault(self.windows[index] if self.windows else None, []).append(index)
        return found

    @property
    def norms_query_and_key(self) -> bool:
        """A norm over each head of q and k, which keeps its input."""
        return self.family in ("qwen3", "qwen3_moe", "gemma3_text")

    @property
    def norms_outputs(self) -> bool:
        """Norms behind attention and MLP as well, which keep their inputs."""
        return self.family in ("gemma2", "gemma3_text")

    @property
    def query_size(self) -> int:
        """All query heads together."""
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """All key heads together."""
        return self.kv_heads * self.head_size

    def linears(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of the linear layers of one decoder layer, experts apart."""
        fused = self.family == "phi3"
        sizes = {
            "q_proj": (self.hidden, self.query_size),
            "k_proj": (self.hidden, self.kv_size),
            "v_proj": (self.hidden, self.kv_size),
        }
        if fused:
            sizes = {"qkv_proj": (self.hidden, self.query_size + 2 * self.kv_size)}
        sizes["o_proj"] = self.query_size, self.hidden
        if self.experts:
            return sizes
        if fused:
            sizes["gate_up_proj"] = self.hidden, 2 * self.intermediate
        else:
            sizes |= dict.fromkeys(("gate_proj", "up_proj"), (self.hidden, self.intermediate))
        sizes["down_proj"] = self.intermediate, self.hidden
        return sizes

    def expert_linears(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the two projections of one expert; none in dense models."""
        return ((self.hidden, 2 * self.intermediate), (self.intermediate, self.hidden)) if self.experts else ()

    def small_parameters(self) -> int:
        """Of one layer: norms, biases, sinks, router; kept in 16 bits whatever the rest is stored in."""
        norms = self.hidden * (4 if self.norms_outputs else 2)
        norms += 2 * self.head_size * self.norms_query_and_key
        biases = (self.query_size + 2 * self.kv_size + self.hidden * (self.family != "qwen2")) * self.biases
        of_expert = sum(outputs for _, outputs in self.expert_linears()) + 1 if self.family == "gpt_oss" else 0
        experts = self.experts * (of_expert + self.hidden)
        return norms + biases + experts + self.heads * self.has_sinks

    def parameters(self) -> int:
        """Of the whole model."""
        linears = sum(inputs * outputs for inputs, outputs in self.linears().values())
        experts = self.experts * sum(inputs * outputs for inputs, outputs in self.expert_linears())
        outside = self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden
        return self.layers * (linears + experts + self.small_parameters()) + outside


def shape_of_config(config: Mapping[str, Any], name: str) -> ModelShape:
    """Sizes from a transformers config as a mapping.

    Raises:
        UnsupportedError: the layers of this kind of model are not described by the formulas.
    """
    if "text_config" in config and config.get("model_type") == "gemma3":
        config = config["text_config"]
    family = config.get("model_type", "")
    if family not in FAMILIES:
        raise UnsupportedError(
            expected=f"a model of type {', '.join(FAMILIES)}",
            got=f"{name}: {family or 'no model_type'}",
            remedy="For other models run one step and read the peak from the trainer's log; draw masks by --window.",
        )
    heads, size = config["num_attention_heads"], _EXPERTS.get(family)
    experts = (config.get("num_local_experts") or config["num_experts"]) if size else 0
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise UnsupportedError(
            expected="experts in every layer or in none",
            got=f"{name}: layers of both kinds",
            remedy="Run one step and read the peak from the trainer's log.",
        )
    return ModelShape(
        name=name,
        family=family,
        hidden=config["hidden_size"],
        intermediate=config[size or "intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocab=config["vocab_size"],
        tied=bool(config.get("tie_word_embeddings", False)),
        biases=family in ("gpt_oss", "qwen2") or bool(config.get("attention_bias", False)),
        experts=experts,
        top_k=config["num_experts_per_tok"] if size else 0,
        routes_over_all=family == "qwen3_moe" and not config.get("norm_topk_prob", False),
        trained_tokens=config.get("max_position_embeddings"),
        softcap=config.get("final_logit_softcapping") is not None,
        windows=_windows_of(config, family),
    )


def _windows_of(config: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    window, layers = config.get("sliding_window"), config["num_hidden_layers"]
    if window is None or not config.get("use_sliding_window", True):
        return ()
    kinds = config.get("layer_types")  # files that are older than that key go by the family
    if kinds is None:
        return _windows(family, window, layers)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows(family: str, window: int, layers: int) -> tuple[int | None, ...]:
    every = _FULL_EVERY.get(family, layers + 1)
    return tuple(window if (index + 1) % every else None for index in range(layers))


def find_shape(model: str | Mapping[str, Any] | Any) -> ModelShape:
    """Sizes of a folder, of a hub id that is cached, of a built-in name, or of a config.

    Args:
        model: a path or id; a config of transformers, or its ``to_dict()``. Nothing is downloaded.

    Raises:
        ModelError: no config was found under that name.
        UnsupportedError: see ``shape_of_config``.
    """
    if isinstance(model, Mapping):
        return shape_of_config(model, str(model.get("_name_or_path") or model.get("model_type")))
    if hasattr(model, "to_dict"):
        return find_shape(model.to_dict())
    known = BUILT_IN.get(_plain(str(model)))
    if known is not None and not Path(model).is_dir():
        return known
    from transformers import AutoConfig  # heavy: only where a config is read

    try:
        config = AutoConfig.from_pretrained(model, local_files_only=True)
    except (OSError, ValueError) as error:
        near = get_close_matches(_plain(str(model)), BUILT_IN, n=3)
        raise ModelError(
            expected="a folder with config.json, a hub id whose config is cached, or a built-in name",
            got=str(model),
            remedy=f"Did you mean {' or '.join(near)}?" if near else f"Built in: {', '.join(sorted(BUILT_IN))}.",
        ) from error
    return shape_of_config(config.to_dict(), str(model))


def _plain(name: str) -> str:
    """The last part of an id without what does not change its sizes."""
    name = name.rpartition("/")[2].lower().removeprefix("meta-")
    for end in ("-instruct", "-it", "-base", "-pt"):
        name = name.removesuffix(end)
    return name


def _model(name: str, family: str, sizes: tuple[int, ...], **more: Any) -> ModelShape:
    hidden, intermediate, layers, heads, kv_heads, head_size, vocab = sizes
    return ModelShape(name, family, hidden, intermediate, layers, heads, kv_heads, head_size, vocab, **more)


_GPT_OSS = (2880, 2880, 64, 8, 64, 201088)


def _gpt_oss(name: str, layers: int, experts: int) -> ModelShape:
    hidden, size, heads, kv_heads, head_size, vocab = _GPT_OSS
    more = dict(biases=True, experts=experts, top_k=4, trained_tokens=131072, windows=_windows("gpt_oss", 128, layers))
    return ModelShape(name, "gpt_oss", hidden, size, layers, heads, kv_heads, head_size, vocab, **more)  # type: ignore[arg-type]


_LLAMA = {"trained_tokens": 131072}
_QWEN = {"trained_tokens": 40960}
_GEMMA = {"tied": True, "trained_tokens": 8192}
_MODELS = (
    _gpt_oss("gpt-oss-20b", 24, 32),
    _gpt_oss("gpt-oss-120b", 36, 128),
    # hidden, intermediate, layers, heads, key/value heads, head size, vocabulary
    _model("mistral-7b-v0.3", "mistral", (4096, 14336, 32, 32, 8, 128, 32768), trained_tokens=32768),
    _model("llama-3.1-8b", "llama", (4096, 14336, 32, 32, 8, 128, 128256), **_LLAMA),
    _model("llama-3.1-70b", "llama", (8192, 28672, 80, 64, 8, 128, 128256), **_LLAMA),
    _model("llama-3.2-1b", "llama", (2048, 8192, 16, 32, 8, 64, 128256), tied=True, **_LLAMA),
    _model("llama-3.2-3b", "llama", (3072, 8192, 28, 24, 8, 128, 128256), tied=True, **_LLAMA),
    _model("qwen2.5-7b", "qwen2", (3584, 18944, 28, 28, 4, 128, 152064), biases=True, trained_tokens=131072),
    _model("qwen3-0.6b", "qwen3", (1024, 3072, 28, 16, 8, 128, 151936), tied=True, **_QWEN),
    _model("qwen3-1.7b", "qwen3", (2048, 6144, 28, 16, 8, 128, 151936), tied=True, **_QWEN),
    _model("qwen3-4b", "qwen3", (2560, 9728, 36, 32, 8, 128, 151936), tied=True, **_QWEN),
    _model("qwen3-8b", "qwen3", (4096, 12288, 36, 32, 8, 128, 151936), **_QWEN),
    _model("qwen3-14b", "qwen3", (5120, 17408, 40, 40, 8, 128, 151936), **_QWEN),
    _model("qwen3-32b", "qwen3", (5120, 25600, 64, 64, 8, 128, 151936), **_QWEN),
    _model("gemma-2b", "gemma", (2048, 16384, 18, 8, 1, 256, 256000), **_GEMMA),
    _model("gemma-7b", "gemma", (3072, 24576, 28, 16, 16, 256, 256000), **_GEMMA),
    _model(
        "gemma-2-2b",
        "gemma2",
        (2304, 9216, 26, 8, 4, 256, 256000),
        softcap=True,
        windows=_windows("gemma2", 4096, 26),
        **_GEMMA,
    ),
    _model(
        "gemma-2-9b",
        "gemma2",
        (3584, 14336, 42, 16, 8, 256, 256000),
        softcap=True,
        windows=_windows("gemma2", 4096, 42),
        **_GEMMA,
    ),
    _model(
        "gemma-2-27b",
        "gemma2",
        (4608, 36864, 46, 32, 16, 128, 256000),
        softcap=True,
        windows=_windows("gemma2", 4096, 46),
        **_GEMMA,
    ),
    _model(
        "gemma-3-1b",
        "gemma3_text",
        (1152, 6912, 26, 4, 1, 256, 262144),
        tied=True,
        trained_tokens=32768,
        windows=_windows("gemma3_text", 512, 26),
    ),
    _model(
        "mixtral-8x7b-v0.1", "mixtral", (4096, 14336, 32, 32, 8, 128, 32000), experts=8, top_k=2, trained_tokens=32768
    ),
    _model("qwen3-30b-a3b", "qwen3_moe", (2048, 768, 48, 32, 4, 128, 151936), experts=128, top_k=8, **_QWEN),
    _model("phi-4", "phi3", (5120, 17920, 40, 40, 10, 128, 100352), trained_tokens=16384),
    _model("smollm3-3b", "smollm3", (2048, 11008, 36, 16, 4, 128, 128256), tied=True, trained_tokens=65536),
    _model("smollm2-135m", "llama", (576, 1536, 30, 9, 3, 64, 49152), tied=True, trained_tokens=8192),
    _model("smollm2-360m", "llama", (960, 2560, 32, 15, 5, 64, 49152), tied=True, trained_tokens=8192),
    _model("smollm2-1.7b", "llama", (2048, 8192, 24, 32, 32, 64, 49152), tied=True, trained_tokens=8192),
)
BUILT_IN = {shape.name: shape for shape in _MODELS} | {
    "mistral-7b": _MODELS[2],
    "mixtral-8x7b": next(shape for shape in _MODELS if shape.family == "mixtral"),
}
"""Models that are known offline, by the last part of their id in lower case, without `-instruct` and the like."""
