"""Which GGUF tensors and metadata a Hugging Face model becomes, for llama.cpp's own graph of that architecture.

Names come from the ``gguf`` package's tables. llama.cpp rotates neighbouring pairs (2i, 2i+1) in its ``llama`` graph,
transformers rotates (i, i + d/2): there the rows of q and k are reordered within each head. The other graphs rotate
like transformers.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from unsloth_plugins.core.errors import ExportError, UnsupportedError
from unsloth_plugins.core.export.base import object_in, spans
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.tensors import Info

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
}
"""transformers' model_type -> llama.cpp's architecture."""

_BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GPT_OSS_BLOCK = _BLOCK | {"post_attention_layernorm": "post_attention_norm", "mlp.router": "ffn_gate_inp"}
_GEMMA_2_AND_3_BLOCK = _BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_BLOCKS = {"gpt-oss": _GPT_OSS_BLOCK, "gemma2": _GEMMA_2_AND_3_BLOCK, "gemma3": _GEMMA_2_AND_3_BLOCK}
_BIASES = {
    "llama": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"}
    | {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"},
    "qwen2": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"},
    "gpt-oss": {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.router"},
}
"""Modules whose biases llama.cpp's graph adds; the other architectures have none."""

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


@dataclass(frozen=True)
class Piece:
    """One GGUF tensor.

    Attributes:
        name: in the GGUF.
        shape: outermost dimension first.
        source: name of the merged tensor that it comes from.
        rows: iterates over its float32 numbers along the first dimension.
        always_f32: whether llama.cpp wants it in float32 whatever the file's type.
        expert: "gate", "up" or "down" for the experts' weights.
        outputs: what happened to the order of its outputs, for numbers of shape [..., out, any].
    """

    name: str
    shape: tuple[int, ...]
    source: str
    rows: Callable[[], Iterator[torch.Tensor]]
    always_f32: bool = False
    expert: str | None = None
    outputs: Callable[[torch.Tensor], torch.Tensor] = lambda numbers: numbers


def architecture_of(config: dict[str, Any]) -> str:
    """llama.cpp's name of the architecture.

    Raises:
        UnsupportedError: one that is not exported here.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise UnsupportedError(
            expected=f"model_type to be one of {', '.join(ARCHITECTURES)}",
            got=repr(kind),
            remedy="Merge to safetensors, and convert that with llama.cpp's own converter.",
        )
    return ARCHITECTURES[kind]


def head_size(config: dict[str, Any]) -> int:
    """Numbers of one attention head."""
    if config.get("head_dim"):
        return _count(config, "head_dim")
    return _count(config, "hidden_size") // _count(config, "num_attention_heads")


def _number(config: Mapping[str, Any], *names: str, default: float | None = None, kind: type = float) -> Any:
    """What the config has under the first of these names that it has: a number above 0.

    Raises:
        ExportError: neither that nor a default, or something else is there.
    """
    value = next((config[name] for name in names if config.get(name) is not None), default)
    kinds = (int,) if kind is int else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < math.inf:
        raise ExportError(
            expected=f"{' or '.join(names)} in the model's config to be a {'whole ' * (kind is int)}number above 0",
            got="none" if value is None else reprlib.repr(value),
            remedy="Give the folder of a whole model; its config.json may be damaged.",
        )
    return kind(value)


_count = partial(_number, kind=int)


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """Rope settings, wherever this version of the config keeps them; ``rope_type`` and ``rope_theta`` always there.

    Of a Gemma 3, those of its full layers.
    """
    parameters = object_in(config, "rope_parameters")
    if "full_attention" in parameters:
        parameters = object_in(parameters, "full_attention")
    rope = object_in(config, "rope_scaling") | parameters
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope.setdefault("rope_theta", config.get("rope_theta", 1e6 if config["model_type"] == "gemma3_text" else 1e4))
    if rope["rope_type"] not in ("default", "linear", "yarn", "llama3"):
        raise UnsupportedError(
            expected="rope of type default, linear, yarn or llama3",
            got=repr(rope["rope_type"]),
            remedy="Merge to safetensors, and convert that with llama.cpp's own converter.",
        )
    return rope


def check_graph(config: dict[str, Any]) -> None:
    """Refuse the settings that llama.cpp's graph of the architecture does not have.

    Source: llama.cpp's graphs, which write activations as constants.

    Raises:
        UnsupportedError: the setting is named.
    """
    arch = architecture_of(config)
    if arch == "gpt-oss":  # hidden_act is not used
        for name, constant in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
            if config.get(name, constant) != constant:
                raise _differs(config, f"{name} {constant}", config[name])
        return
    if arch.startswith("gemma"):
        name = "hidden_act" if arch == "gemma" else "hidden_activation"
        good: tuple[str, ...] = ("gelu_pytorch_tanh", "gelu_python_tanh", "gelu_new", "gelu_fast")
        good += ("gelu",) * (arch == "gemma")  # what its first files call the tanh one
    else:
        name, good = "hidden_act", ("silu", "swish")
    if config.get(name, good[0]) not in good:
        raise _differs(config, f"{name} {good[0]}", repr(config[name]))


def _differs(config: dict[str, Any], expected: str, got: Any) -> UnsupportedError:
    return UnsupportedError(
        expected=f"{expected}, as in llama.cpp's {ARCHITECTURES[config['model_type']]}",
        got=str(got),
        remedy="Merge to safetensors, and run that with transformers or vLLM.",
    )


def pieces_of(merged: Merged) -> list[Piece]:
    """Every GGUF tensor of the merged model.

    Raises:
        UnsupportedError: an architecture or rope that is not exported here, or a setting that llama.cpp's graph of
            the architecture does not have.
        ExportError: a tensor that has no place in the GGUF.
    """
    config = merged.base.config
    arch = architecture_of(config)
    check_graph(config)
    pieces: list[Piece] = []
    for name, info in merged.infos.items():
        pieces += _convert(merged, arch, name, info)
    rope = rope_of(config)
    if rope["rope_type"] == "llama3":
        factors = _llama3_factors(rope, head_size(config))
        pieces.append(Piece("rope_freqs.weight", tuple(factors.shape), "", lambda: iter([factors]), always_f32=True))
    return pieces


def _convert(merged: Merged, arch: str, name: str, info: Info) -> list[Piece]:
    if name.endswith("rotary_emb.inv_freq"):
        return []
    add = 1.0 if arch.startswith("gemma") and name.endswith("norm.weight") else 0.0

    def plain(target: str, always_f32: bool = False) -> list[Piece]:
        def rows() -> Iterator[torch.Tensor]:
            for begin, end in spans(info):
                yield merged.read(name, begin, end).float() + add

        return [Piece(target, info.shape, name, rows, always_f32 or len(info.shape) == 1)]

    if name in _TOP:
        return plain(_TOP[name])
    parts = name.split(".")
    if parts[:2] != ["model", "layers"] or len(parts) < 4:
        raise _no_place(name, arch)
    block, rest = f"blk.{parts[2]}", ".".join(parts[3:])
    if arch == "gpt-oss":
        if rest == "self_attn.sinks":
            return plain(f"{block}.attn_sinks.weight")
        if rest.startswith("mlp.experts."):
            return _experts(merged, block, name, info)
    module, _, kind = rest.rpartition(".")
    table = _BLOCKS.get(arch, _BLOCK)
    if module not in table or kind not in ("weight", "bias"):
        raise _no_place(name, arch)
    if kind == "bias" and module not in _BIASES.get(arch, ()):
        setting = "mlp_bias" if module.startswith("mlp.") else "attention_bias"
        raise _differs(merged.base.config, f"no {setting}", name)
    target = f"{block}.{table[module]}.{kind}"
    if arch == "llama" and module in ("self_attn.q_proj", "self_attn.k_proj"):
        config, counted = merged.base.config, ["num_attention_heads"]
        if module.endswith("k_proj"):
            counted.insert(0, "num_key_value_heads")
        heads, size = _count(config, *counted), head_size(config)
        if info.shape[0] != heads * size:
            raise ExportError(
                expected=f"{heads} heads of {size} in {name}, by {counted[0]} of the model's config",
                got=f"{info.shape[0]} rows",
                remedy="Give the folder of a whole model; its config.json may be damaged.",
            )

        def in_pairs(whole: torch.Tensor) -> torch.Tensor:
            return whole.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(whole.shape)

        def reordered() -> Iterator[torch.Tensor]:
            yield in_pairs(merged.read(name).float())

        return [Piece(target, info.shape, name, reordered, len(info.shape) == 1, outputs=in_pairs)]
    return plain(target, always_f32=module == "mlp.router")


def _experts(merged: Merged, block: str, name: str, info: Info) -> list[Piece]:
    """gate and up lie interleaved in one tensor, even and odd, and become two; [E, in, out] becomes [E, out, in]."""
    projection = name.rpartition(".")[2]
    is_bias = projection.endswith("_bias")
    if len(info.shape) != (2 if is_bias else 3):
        raise ExportError(
            expected=f"{name} with {2 if is_bias else 3} dimensions",
            got=str(list(info.shape)),
            remedy="The model is damaged: download or save it again.",
        )
    kind = "bias" if is_bias else "weight"
    projection = projection.removesuffix("_bias")
    if projection not in ("gate_up_proj", "down_proj"):
        raise _no_place(name, "gpt-oss")
    parts = {"gate": 0, "up": 1} if projection == "gate_up_proj" else {"down": None}
    found = []
    for part, offset in parts.items():

        def every_other(wide: torch.Tensor, offset: int | None = offset) -> torch.Tensor:
            return wide if offset is None else wide[:, offset::2]

        def rows(pick: Callable[[torch.Tensor], torch.Tensor] = every_other) -> Iterator[torch.Tensor]:
            for begin, end in spans(info):
                wide = merged.read(name, begin, end).float()
                yield pick(wide if is_bias else wide.transpose(-1, -2))

        outputs = info.shape[-1] // (1 if offset is None else 2)
        shape = (info.shape[0], outputs) if is_bias else (info.shape[0], outputs, info.shape[1])
        target = f"{block}.ffn_{part}_exps.{kind}"
        expert = None if is_bias else part
        found.append(Piece(target, shape, name, rows, always_f32=is_bias, expert=expert, outputs=every_other))
    return found


def _no_place(name: str, arch: str) -> ExportError:
    return ExportError(
        expected=f"only tensors that llama.cpp's {arch} has",
        got=name,
        remedy="Merge to safetensors, and convert that with llama.cpp's own converter.",
    )


def _llama3_factors(rope: dict[str, Any], size: int) -> torch.Tensor:
    """By how much each rotation is slowed down.

    Source: ``transformers.modeling_rope_utils._compute_llama3_parameters``.
    """
    turn = 1.0 / _number(rope, "rope_theta") ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    length = 2 * math.pi / turn
    context, factor = _number(rope, "original_max_position_embeddings"), _number(rope, "factor")
    low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
    smooth = (context / length - low) / (high - low)
    between = 1.0 / ((1 - smooth) / factor + smooth)
    slowed = torch.where(length > context / low, factor, torch.where(length < context / high, 1.0, between))
    return slowed.float()


def _attention_factor(rope: dict[str, Any]) -> float:
    """What yarn multiplies cos and sin by, relative to 1 + 0.1 ln(factor), which llama.cpp multiplies by on its own.

    Source: ``transformers.modeling_rope_utils._compute_yarn_parameters``.
    """
    log = math.log(_number(rope, "factor"))
    if rope.get("attention_factor") is not None:
        wanted = _number(rope, "attention_factor")
    elif rope.get("mscale") and rope.get("mscale_all_dim"):
        wanted = (1 + 0.1 * _number(rope, "mscale") * log) / (1 + 0.1 * _number(rope, "mscale_all_dim") * log)
    else:
        return 1.0
    return float(wanted / (1 + 0.1 * log))


def add_metadata(writer: Any, merged: Merged, notes: list[str]) -> None:
    """Sizes, attention and rope into the writer.

    Args:
        writer: a ``gguf.GGUFWriter``.
        notes: what llama.cpp computes otherwise than transformers is added.
    """
    import gguf

    config = merged.base.config
    size = head_size(config)
    context = _count(config, "max_position_embeddings")
    writer.add_context_length(context)
    writer.add_embedding_length(_count(config, "hidden_size"))
    writer.add_block_count(_count(config, "num_hidden_layers"))
    writer.add_feed_forward_length(_count(config, "intermediate_size"))
    writer.add_head_count(_count(config, "num_attention_heads"))
    writer.add_head_count_kv(_count(config, "num_key_value_heads", "num_attention_heads"))
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(_number(config, "rms_norm_eps"))
    writer.add_vocab_size(merged.vocab_size)
    writer.add_rope_dimension_count(size)
    rope = rope_of(config)
    writer.add_rope_freq_base(_number(rope, "rope_theta"))
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(_number(rope, "factor"))
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(_count(rope, "original_max_position_embeddings", default=context))
        writer.add_rope_scaling_yarn_beta_fast(_number(rope, "beta_fast", default=32.0))
        writer.add_rope_scaling_yarn_beta_slow(_number(rope, "beta_slow", default=1.0))
        factor = _attention_factor(rope)
        if factor != 1:
            writer.add_rope_scaling_attn_factors(factor)
        if rope.get("truncate") is False:
            notes.append("llama.cpp rounds the borders of yarn's ramp, this model does not: logits differ slightly.")
    if config["model_type"] == "gpt_oss":
        writer.add_sliding_window(_count(config, "sliding_window"))
        writer.add_expert_count(_count(config, "num_local_experts"))
        writer.add_expert_used_count(_count(config, "num_experts_per_tok", "experts_per_token"))
        writer.add_expert_feed_forward_length(_count(config, "intermediate_size"))
    elif config["model_type"] in ("gemma2", "gemma3_text"):
        _add_gemma(writer, config, rope)
    elif config.get("sliding_window") and config.get("use_sliding_window", True):
        window = _count(config, "sliding_window")
        if window < context:
            notes.append(f"llama.cpp ignores this model's window of {window} tokens: longer texts differ.")


def _add_gemma(writer: Any, config: dict[str, Any], rope: dict[str, Any]) -> None:
    """Sliding and full layers of Gemma 2 and 3. What llama.cpp's graph has no setting for is refused if it differs.

    Source: llama.cpp, ``gemma2`` and ``gemma3``: their hyperparameters and graphs.
    """
    second = config["model_type"] == "gemma2"
    layers = _count(config, "num_hidden_layers")
    pattern = 2 if second else _count(config, "sliding_window_pattern", default=6)
    full = [(n + 1) % pattern == 0 for n in range(layers)]
    if kinds := config.get("layer_types"):
        full = [kind == "full_attention" for kind in (kinds if isinstance(kinds, list) else [kinds])]
        pattern = full.index(True) + 1 if any(full) else layers + 1
    local = object_in(object_in(config, "rope_parameters"), "sliding_attention")
    largest = layers == (46 if second else 62)  # the 27B models, which it knows by that
    scale = _count(config, "hidden_size") // _count(config, "num_attention_heads") if largest else head_size(config)
    cap = config.get("attn_logit_softcapping", 50.0 if second else None)
    for expected, got, good in (
        ("full layers at equal distances", full, full == [(n + 1) % pattern == 0 for n in range(layers)]),
        ("every second layer full", full, not second or pattern == 2),
        ("rope of type default or linear", rope["rope_type"], rope["rope_type"] in ("default", "linear")),
        ("rope of type default in sliding layers", local, local.get("rope_type", "default") == "default"),
        (f"query_pre_attn_scalar {scale}", scalar := config.get("query_pre_attn_scalar", 256), scalar == scale),
        ("attn_logit_softcapping" if second else "no attn_logit_softcapping", cap, (cap is not None) == second),
        ("attention that looks back only", "both ways", not config.get("use_bidirectional_attention")),
    ):
        if not good:
            raise _differs(config, expected, got)
    writer.add_sliding_window(_count(config, "sliding_window"))
    if second:
        writer.add_attn_logit_softcapping(_number(config, "attn_logit_softcapping", default=50.0))
    else:
        writer.add_sliding_window_pattern(pattern)
        local_base = _number(config, "rope_local_base_freq", default=1e4)
        writer.add_rope_freq_base_swa(_number(local, "rope_theta", default=local_base))
    if config.get("final_logit_softcapping", 30.0 if second else None) is not None:
        writer.add_final_logit_softcapping(_number(config, "final_logit_softcapping", default=30.0))
