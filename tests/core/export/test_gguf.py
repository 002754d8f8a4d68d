"""GGUF files as the ``gguf`` package reads them: every number, type and piece of metadata."""

from __future__ import annotations

import json
import math
import re
import socket
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from conftest import tiny_gpt_oss
from merge_cases import randomise, save_llama, save_packed, small_tokenizer, tensors, train_llama, train_packed
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export import export_gguf, export_gguf_adapter, merge
from unsloth_plugins.core.export.gguf import ggml_mxfp4
from unsloth_plugins.core.export.gguf_layout import _add_gemma, check_graph, rope_of
from unsloth_plugins.core.mxfp4 import decode


def _read(file: Path) -> tuple[dict[str, np.ndarray], dict[str, Any], dict[str, str]]:
    reader = gguf.GGUFReader(file)
    values, types = {}, {}
    for tensor in reader.tensors:
        types[tensor.name] = tensor.tensor_type.name.lower()
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        values[tensor.name] = numbers.reshape([int(n) for n in reversed(tensor.shape)])
    return values, {name: field.contents() for name, field in reader.fields.items()}, types


def _llama(tmp_path: Path, **options: object) -> Path:
    folder = save_llama(tmp_path / "base", **options)
    small_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("quant", ["f32", "bf16", "f16"])
def test_case_5_adapter_alone_becomes_a_gguf(tmp_path: Path, quant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def blocked(*_: object) -> None:
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", blocked)
    monkeypatch.setenv("PATH", "")
    base = _llama(tmp_path)
    train_llama(base, tmp_path / "adapter", target_modules=["q_proj", "down_proj"])
    report = export_gguf(base, tmp_path / "m.gguf", adapter=tmp_path / "adapter", quant=quant)
    dtype = {"f32": "fp32", "f16": "fp16"}.get(quant, quant)
    merge(base, tmp_path / "adapter", tmp_path / "merged", dtype=dtype)
    values, fields, types = _read(tmp_path / "m.gguf")
    merged = {name: tensor.float().numpy() for name, tensor in tensors(tmp_path / "merged").items()}
    assert len(values) == len(merged) == 3 + 2 * 9 and values.keys() == report.tensors.keys() == types.keys()
    for name, target in (("mlp.down_proj", "ffn_down"), ("self_attn.v_proj", "attn_v"), ("mlp.up_proj", "ffn_up")):
        assert np.array_equal(values[f"blk.1.{target}.weight"], merged[f"model.layers.1.{name}.weight"])
    assert np.array_equal(values["output.weight"], merged["lm_head.weight"])
    q = merged["model.layers.0.self_attn.q_proj.weight"].reshape(4, 2, 8, 64)
    for pair in range(8):  # transformers rotates (i, i + 8), llama.cpp (2 i, 2 i + 1)
        got = values["blk.0.attn_q.weight"].reshape(4, 16, 64)[:, 2 * pair : 2 * pair + 2]
        assert np.array_equal(got, q[:, :, pair])
    assert types["blk.0.attn_norm.weight"] == "f32" and types["blk.0.attn_q.weight"] == quant
    assert fields["general.architecture"] == "llama" and fields["llama.attention.head_count_kv"] == 2
    assert not list(tmp_path.glob(".m*"))


@pytest.mark.parametrize("quant", ["q4_k_m", "q6_k", "iq2_xs"])
def test_case_5_a_type_of_another_tool_fails_before_any_work(tmp_path: Path, quant: str) -> None:
    with pytest.raises(UnsupportedError, match=f"llama-quantize model.gguf out.gguf {quant.upper()}"):
        export_gguf(tmp_path / "not-even-there", tmp_path / "m.gguf", quant=quant)
    with pytest.raises(ConfigError, match="'q9'"):
        export_gguf(tmp_path / "not-even-there", tmp_path / "m.gguf", quant="q9")


def test_nibbles_are_reordered_exactly() -> None:
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (5, 7, 16), dtype=torch.uint8, generator=draw)
    scales = torch.randint(60, 200, (5, 7), dtype=torch.uint8, generator=draw)
    packed = ggml_mxfp4(blocks, scales).flatten(-2).numpy()
    got = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(got, decode(blocks, scales).numpy())
    byte = ggml_mxfp4(torch.arange(16, dtype=torch.uint8)[None] * 16 + 1, torch.tensor([127], dtype=torch.uint8))
    assert byte[0, 0] == 127 and byte[0, 1] == 0x11 and byte[0, 2] == 0x80


@pytest.mark.parametrize("quant", ["mxfp4", "f32"])
def test_gpt_oss_experts_keep_their_numbers(tmp_path: Path, quant: str) -> None:
    base = save_packed(tmp_path / "base")
    small_tokenizer().save_pretrained(base)
    train_packed(base, tmp_path / "adapter", layers_to_transform=[1])
    export_gguf(base, tmp_path / "m.gguf", adapter=tmp_path / "adapter", quant=quant)
    values, fields, types = _read(tmp_path / "m.gguf")
    merge(base, tmp_path / "adapter", tmp_path / "merged", dtype="mxfp4" if quant == "mxfp4" else "fp32")
    merge(tmp_path / "merged", [], tmp_path / "dense", dtype="fp32")
    dense = {name: tensor.numpy() for name, tensor in tensors(tmp_path / "dense").items()}
    for layer in range(4):
        experts = f"model.layers.{layer}.mlp.experts"
        gate_up, down = (dense[f"{experts}.{name}"].swapaxes(1, 2) for name in ("gate_up_proj", "down_proj"))
        for name, want in (("gate", gate_up[:, 0::2]), ("up", gate_up[:, 1::2]), ("down", down)):
            assert types[f"blk.{layer}.ffn_{name}_exps.weight"] == quant
            assert np.array_equal(values[f"blk.{layer}.ffn_{name}_exps.weight"], want), name
        biases = dense[f"{experts}.gate_up_proj_bias"]
        assert np.array_equal(values[f"blk.{layer}.ffn_up_exps.bias"], biases[:, 1::2])
        assert np.array_equal(values[f"blk.{layer}.attn_sinks.weight"], dense[f"model.layers.{layer}.self_attn.sinks"])
    for key, want in (
        ("attention.sliding_window", 8),
        ("expert_count", 4),
        ("expert_used_count", 2),
        ("rope.scaling.type", "yarn"),
        ("rope.scaling.factor", 32.0),
        ("rope.scaling.original_context_length", 4096),
        ("attention.key_length", 16),
    ):
        assert fields[f"gpt-oss.{key}"] == want, key


def test_case_22_tied_and_parted_heads_and_new_rows(tmp_path: Path) -> None:
    base = _llama(tmp_path, tie_word_embeddings=True)
    export_gguf(base, tmp_path / "tied.gguf")
    assert "output.weight" not in _read(tmp_path / "tied.gguf")[0]
    train_llama(base, tmp_path / "adapter", modules_to_save=["embed_tokens", "lm_head"])
    export_gguf(base, tmp_path / "parted.gguf", adapter=tmp_path / "adapter", quant="f32")
    values, fields, _ = _read(tmp_path / "parted.gguf")
    adapter = tensors(tmp_path / "adapter")
    assert np.array_equal(values["output.weight"], adapter["base_model.model.lm_head.weight"].numpy())
    assert np.array_equal(values["token_embd.weight"], adapter["base_model.model.model.embed_tokens.weight"].numpy())
    assert len(fields["tokenizer.ggml.tokens"]) == 160
    grown = AutoModelForCausalLM.from_pretrained(base)
    grown.resize_token_embeddings(168)
    model = get_peft_model(grown, LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"]))
    randomise(model)
    model.save_pretrained(tmp_path / "grown", save_embedding_layers=True)
    export_gguf(base, tmp_path / "grown.gguf", adapter=tmp_path / "grown", quant="f32")
    merge(base, tmp_path / "grown", tmp_path / "merged", dtype="fp32")
    values, fields, _ = _read(tmp_path / "grown.gguf")
    merged = tensors(tmp_path / "merged")
    assert values["token_embd.weight"].shape == (168, 64) == values["output.weight"].shape
    assert np.array_equal(values["token_embd.weight"], merged["model.embed_tokens.weight"].numpy())
    assert np.array_equal(values["output.weight"], merged["lm_head.weight"].numpy())
    assert len(fields["tokenizer.ggml.tokens"]) == 168


def test_vocabulary_types_and_ids(tmp_path: Path) -> None:
    base = _llama(tmp_path)
    tokenizer = small_tokenizer()
    tokenizer.add_tokens(["<|im_end|>"], special_tokens=True)
    tokenizer.chat_template = "{{ messages }}<|im_end|>"
    tokenizer.save_pretrained(base)
    export_gguf(base, tmp_path / "m.gguf", quant="q8_0")
    _, fields, types = _read(tmp_path / "m.gguf")
    assert "tokenizer.ggml.scores" not in fields
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[:3] == ["<pad>", "</s>", "<s>"] and kinds[:3] == [3, 3, 3]
    extra = tokenizer.convert_tokens_to_ids("<extra>")
    assert tokens[extra] == "<extra>" and kinds[extra] == 4 and kinds[extra - 1] == 1
    assert tokens[-1] == "[PAD159]" and kinds[-1] == 5 and len(tokens) == len(kinds) == 160
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
    assert fields["tokenizer.chat_template"] == "{{ messages }}<|im_end|>"
    assert fields["tokenizer.ggml.eot_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    ids = [fields[f"tokenizer.ggml.{name}_token_id"] for name in ("padding", "eos", "bos")]
    assert ids == [0, 1, 2] and fields["tokenizer.ggml.add_bos_token"] is False
    assert types["blk.0.ffn_down.weight"] == "q8_0"


def _sentencepiece_like(**options: Any) -> PreTrainedTokenizerFast:
    """As transformers makes it of a SentencePiece BPE model: a few letters, their merges, and all bytes."""
    words = ["\u2581t", "he", "\u2581the", "\u2581a"]
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("\u2581", "a"), ("\u2581th", "e")]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581thea", "\u2581th", *words]
    model = models.BPE(
        {piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False, **options)
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("scheme", ["first", "never"])
def test_sentencepiece_vocabulary_has_scores_bytes_and_the_space(tmp_path: Path, scheme: str) -> None:
    base = save_llama(tmp_path / "base", vocab_size=300)
    tokenizer = _sentencepiece_like(prepend_scheme=scheme)
    tokenizer.save_pretrained(base)
    report = export_gguf(base, tmp_path / "m.gguf", quant="f32")
    _, fields, _ = _read(tmp_path / "m.gguf")
    tokens, kinds, scores = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    assert fields["tokenizer.ggml.model"] == "llama" and "tokenizer.ggml.merges" not in fields
    assert fields["tokenizer.ggml.add_space_prefix"] is (scheme == "first")
    assert any("puts a space" in note for note in report.notes) is (scheme == "first")
    assert kinds[:3] == [2, 3, 3] and kinds[3:259] == [6] * 256 and set(kinds[259 : len(tokenizer)]) == {1}
    by_token = dict(zip(tokens, scores, strict=True))
    assert [by_token[one] for one in ("\u2581t", "he", "\u2581the", "\u2581a", "t")] == [0, -1, -2, -3, -5]
    assert kinds[len(tokenizer) :] == [5] * (300 - len(tokenizer))


def test_without_the_gguf_package_it_says_so_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UnsupportedError, match=r"unsloth-plugins\[export\]"):
        export_gguf(tmp_path / "not-even-there", tmp_path / "m.gguf")


def test_rows_that_no_block_divides_are_named(tmp_path: Path) -> None:
    base = _llama(tmp_path, intermediate_size=80)
    report = export_gguf(base, tmp_path / "m.gguf", quant="q4_0")
    assert len(report.notes) == 2 and "blk.0.ffn_down.weight stays in f16" in report.notes[0]
    assert report.tensors["blk.0.ffn_up.weight"] == "q4_0"


def test_added_tokens_without_a_row_are_left_out_where_nothing_needs_them(tmp_path: Path) -> None:
    """As a token for images that a text model's embedding lacks, or a padding token just added."""
    base = _llama(tmp_path, vocab_size=151)
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
    tokenizer.add_tokens(["<image>"])
    assert len(tokenizer) == 153
    tokenizer.save_pretrained(base)
    notes = export_gguf(base, tmp_path / "m.gguf").notes
    assert any("2 added tokens, such as '<|pad|>' with id 151, are left out" in note for note in notes)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(tmp_path / "m.gguf").fields.items()}
    assert len(fields["tokenizer.ggml.tokens"]) == len(fields["tokenizer.ggml.token_type"]) == 151
    assert "tokenizer.ggml.padding_token_id" not in fields and "<image>" not in fields["tokenizer.ggml.tokens"]
    tokenizer.chat_template = "{{ '<image>' }}{{ messages }}"
    tokenizer.save_pretrained(base)
    with pytest.raises(ExportError, match="ids below 151.*'<image>' with id 152"):
        export_gguf(base, tmp_path / "chats.gguf")
    small_tokenizer(size=155).save_pretrained(base)
    with pytest.raises(ExportError, match="the tokenizer that the model was trained with"):
        export_gguf(base, tmp_path / "other.gguf")


@pytest.mark.parametrize("name", ["m.txt", "m", "m.gguf.bak"])
def test_a_gguf_is_called_so(name: str, tmp_path: Path) -> None:
    for export in (export_gguf, export_gguf_adapter):
        arguments = ("base", tmp_path / name) if export is export_gguf else ("base", "adapter", tmp_path / name)
        with pytest.raises(ConfigError, match=rf"ends in .gguf.*got {name}\. Call it .*\.gguf"):
            export(*arguments)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    base = _llama(tmp_path)
    with pytest.raises(UnsupportedError, match="gpt_oss for mxfp4"):
        export_gguf(base, tmp_path / "m.gguf", quant="mxfp4")
    too_many = small_tokenizer()
    too_many.add_tokens([f"<{n}>" for n in range(120)])
    too_many.save_pretrained(base)
    too_many.eos_token = "<119>"
    too_many.save_pretrained(base)
    with pytest.raises(ExportError, match="ids below 160"):
        export_gguf(base, tmp_path / "m.gguf")
    config = json.loads((base / "config.json").read_text())
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    for change, named in (({"model_type": "mamba"}, "mamba"), ({"rope_parameters": rope}, "dynamic")):
        (base / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(UnsupportedError, match=named):
            export_gguf(base, tmp_path / "m.gguf")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".m*"))


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        ("llama", {"hidden_act": "gelu"}, "hidden_act silu, as in llama.cpp's llama; got 'gelu'"),
        ("qwen2", {"hidden_act": "relu"}, "hidden_act silu, as in llama.cpp's qwen2; got 'relu'"),
        ("gemma", {"hidden_act": "silu"}, "hidden_act gelu_pytorch_tanh, as in llama.cpp's gemma"),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation gelu_pytorch_tanh, as in llama.cpp's gemma2"),
        ("qwen3", {"attention_bias": True}, "no attention_bias, as in llama.cpp's qwen3"),
        ("gemma", {"attention_bias": True}, "no attention_bias, as in llama.cpp's gemma"),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(
    kind: str, options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, head_dim=16)
    config = AutoConfig.for_model(kind, vocab_size=160, num_key_value_heads=1, **(sizes | options))
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    small_tokenizer().save_pretrained(tmp_path / "base")
    with pytest.raises(UnsupportedError, match=re.escape(named)):
        export_gguf(tmp_path / "base", tmp_path / "m.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["base"]


@pytest.mark.parametrize("change", [{"swiglu_limit": 5.0}, {"swiglu_alpha": 1.0}])
def test_a_gpt_oss_with_another_swiglu_is_refused(change: dict[str, float]) -> None:
    check_graph({"model_type": "gpt_oss", "swiglu_limit": 7.0, "hidden_act": "silu"})
    with pytest.raises(UnsupportedError, match=f"{next(iter(change))} .*, as in llama.cpp's gpt-oss"):
        check_graph({"model_type": "gpt_oss"} | change)


@pytest.mark.parametrize(
    ("change", "written"),
    [
        ({}, None),
        ({"attention_factor": 0.1 * math.log(4) + 1}, None),
        ({"mscale": 1.0, "mscale_all_dim": 0.0}, None),
        ({"attention_factor": 1.0}, 1 / (0.1 * math.log(4) + 1)),
        ({"attention_factor": 1.0, "mscale": 2.0, "mscale_all_dim": 1.0}, 1 / (0.1 * math.log(4) + 1)),
        ({"mscale": 0.7, "mscale_all_dim": 0.7}, 1 / (0.1 * math.log(4) + 1)),
    ],
)
def test_attention_factor_of_yarn(change: dict[str, float], written: float | None, tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64} | change
    export_gguf(_llama(tmp_path, rope_parameters=rope), tmp_path / "m.gguf")
    got = _read(tmp_path / "m.gguf")[1].get("llama.rope.scaling.attn_factor")
    assert got == (None if written is None else pytest.approx(written, rel=1e-6))


@pytest.mark.parametrize(("name", "dimensions"), [("down_proj_bias", 2), ("gate_up_proj", 3)])
def test_experts_of_a_wrong_shape_are_refused(name: str, dimensions: int, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_gpt_oss().save_pretrained(base)
    small_tokenizer().save_pretrained(base)
    content = tensors(base)
    name = f"model.layers.2.mlp.experts.{name}"
    content[name] = content[name].flatten()
    save_file(content, base / "model.safetensors")
    with pytest.raises(ExportError, match=f"{name} with {dimensions} dimensions"):
        export_gguf(base, tmp_path / "m.gguf")


GEMMA3 = dict(
    model_type="gemma3_text",
    num_hidden_layers=4,
    num_attention_heads=4,
    hidden_size=64,
    head_dim=16,
    query_pre_attn_scalar=16,
    sliding_window=8,
    layer_types=["sliding_attention", "full_attention"] * 2,
)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
            "equal distances",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}, "default or linear"),
        ({"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}}, "in sliding layers"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 16"),
        ({"attn_logit_softcapping": 50.0}, "no attn_logit_softcapping"),
        ({"use_bidirectional_attention": True}, "looks back only"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"] * 4}, "every second layer full"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, "attn_logit_softcapping, as in llama.cpp's gemma2"),
    ],
)
def test_a_gemma_that_llama_cpp_computes_otherwise_is_refused(change: dict[str, Any], named: str) -> None:
    writer = gguf.GGUFWriter(None, "gemma3")
    config = GEMMA3 | change
    with pytest.raises(UnsupportedError, match=named):
        _add_gemma(writer, config, rope_of(config))


@pytest.mark.parametrize(
    ("change", "pattern", "local"),
    [
        ({}, 2, 10000.0),
        ({"layer_types": ["sliding_attention"] * 4}, 5, 10000.0),
        ({"layer_types": None, "sliding_window_pattern": 3, "rope_local_base_freq": 5000.0}, 3, 5000.0),  # older files
        ({"num_hidden_layers": 62, "layer_types": None, "hidden_size": 672}, 6, 10000.0),  # the 27B model's scale
    ],
)
def test_the_two_kinds_of_layers_of_a_gemma3(change: dict[str, Any], pattern: int, local: float) -> None:
    writer = gguf.GGUFWriter(None, "gemma3")
    config = GEMMA3 | change | ({"query_pre_attn_scalar": 168} if "hidden_size" in change else {})
    _add_gemma(writer, config, rope_of(config))
    values = {name.removeprefix("gemma3."): field.value for name, field in writer.kv_data[0].items()}
    assert values["attention.sliding_window_pattern"] == pattern and values["attention.sliding_window"] == 8
    assert values["rope.freq_base_swa"] == local and rope_of(config)["rope_theta"] == 1e6


def test_other_tokenizers_are_refused(tmp_path: Path) -> None:
    base = _llama(tmp_path)
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    with pytest.raises(ExportError, match="a tokenizer in"):
        export_gguf(base, tmp_path / "m.gguf")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(base)
    with pytest.raises(UnsupportedError, match="byte-level BPE"):
        export_gguf(base, tmp_path / "m.gguf")
    tokenizer = small_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save_pretrained(base)
    with pytest.raises(UnsupportedError, match="splits text like"):
        export_gguf(base, tmp_path / "m.gguf")


@pytest.mark.parametrize(
    ("steps", "taken"), [([], True), ([normalizers.NFC()], True), ([normalizers.NFC(), normalizers.Lowercase()], False)]
)
def test_a_sequence_of_normalizers_is_what_is_in_it(steps: list[Any], taken: bool, tmp_path: Path) -> None:
    base, tokenizer = _llama(tmp_path), small_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.save_pretrained(base)
    if taken:
        assert export_gguf(base, tmp_path / "m.gguf").files
    else:
        with pytest.raises(UnsupportedError, match=r"normalised by \['NFC', 'Lowercase'\]"):
            export_gguf(base, tmp_path / "m.gguf")
