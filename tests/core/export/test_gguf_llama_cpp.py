"""GGUF files as the real llama.cpp reads and runs them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from assets import gemma3_tokenizer_dir, gpt_oss_tokenizer_dir, mistral_tokenizer_dir, smollm2_dir, sotu_texts
from llama_cpp import LlamaCpp
from merge_cases import EVERYTHING, randomise, train_packed
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from unsloth_plugins.core.export import export_gguf, export_gguf_adapter, merge
from unsloth_plugins.core.mxfp4 import pack_experts

pytestmark = pytest.mark.slow

PROBES = [
    "Hello world",
    "  leading and   inner runs of spaces  ",
    "tabs\t\tand\nnewlines\n\n\nand\r\nmore",
    "It's we'll I'D they've DON'T",
    "1 12 123 1234 12345678 3.14159 1,000,000",
    "def f(x):\n    return x**2  # comment\n",
    "你好，世界。こんにちは 안녕하세요",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈 end",
    "naïve café Ünïcödé Ελληνικά русский",
    "a<|im_start|>user\nhi<|im_end|>\n",
    "<|start|>assistant<|channel|>final<|message|>hi<|return|>",
    "HTTPServer camelCase snake_case kebab-case https://example.org/a?b=c&d",
    "!!!???...---///\\\\\\",
]


@torch.no_grad()
def _greedy(model: PreTrainedModel, ids: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """transformers' continuation and its log probabilities at the first place."""
    prompt = torch.tensor([ids])
    out = model.generate(prompt, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0)
    return out[0, len(ids) :].tolist(), model(prompt).logits[0, -1].float().log_softmax(-1)


def _assert_close(got: dict[int, float], want: torch.Tensor, tolerance: float) -> None:
    assert max(abs(value - want[token].item()) for token, value in got.items()) < tolerance


def _same_tokens(llama: LlamaCpp, tokenizer: Any) -> None:
    for text in PROBES:
        assert llama.tokenize(text) == tokenizer(text).input_ids, text


@pytest.mark.parametrize("quant", ["f32", "f16"])
def test_smollm2_continues_as_in_transformers(tmp_path: Path, quant: str) -> None:
    folder = smollm2_dir()
    report = export_gguf(folder, tmp_path / "model.gguf", quant=quant)
    assert report.notes == []
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("The history of Rome began when").input_ids
    tokens, first = _greedy(model, ids, 32)
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        got, best = llama.complete(ids, 32)
        assert got == tokens
        _assert_close(best[0], first, 0.05)
        _same_tokens(llama, tokenizer)


def test_smollm2_with_an_adapter_and_quantised(tmp_path: Path) -> None:
    folder = smollm2_dir()
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), LoraConfig(r=8, target_modules=EVERYTHING)
    )
    randomise(model, std=0.06)
    model.save_pretrained(tmp_path / "adapter")
    ids = AutoTokenizer.from_pretrained(folder)("The history of Rome began when").input_ids
    tokens, first = _greedy(model.eval(), ids, 32)
    with model.disable_adapter():
        _, untrained = _greedy(model, ids, 1)
    for quant, tolerance in (("f16", 0.05), ("q8_0", 0.3), ("q4_0", 2.0)):
        export_gguf(folder, tmp_path / f"{quant}.gguf", adapter=tmp_path / "adapter", quant=quant)
        with LlamaCpp(tmp_path / f"{quant}.gguf") as llama:
            got, best = llama.complete(ids, 32 if quant == "f16" else 1)
        _assert_close(best[0], first, tolerance)
        if quant == "f16":
            assert got == tokens
            assert max(abs(value - untrained[token].item()) for token, value in best[0].items()) > 0.2


def _small_gpt_oss(folder: Path, packed: bool) -> Path:
    tokenizer = AutoTokenizer.from_pretrained(gpt_oss_tokenizer_dir())
    config = transformers.GptOssConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=201088,
        layer_types=["sliding_attention", "full_attention"],
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "sinks" in name or "bias" in name:
            torch.nn.init.normal_(parameter, std=1.0 if "sinks" in name else 0.1)
        elif "experts" in name or "lm_head" in name or "embed" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model = pack_experts(model) if packed else model
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def test_perplexity_of_a_long_address_is_that_of_transformers(tmp_path: Path) -> None:
    folder = smollm2_dir()
    export_gguf(folder, tmp_path / "model.gguf", quant="f16")
    longest = max(sotu_texts(), key=lambda path: path.stat().st_size)
    ids = AutoTokenizer.from_pretrained(folder)(longest.read_text()).input_ids[:512]
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits[0]
    want = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])).exp().item()
    with LlamaCpp(tmp_path / "model.gguf", context=600) as llama:
        losses = [-llama.logprob(ids[:end], ids[end]) for end in range(1, len(ids))]
    got = torch.tensor(losses).mean().exp().item()
    print(f"perplexity of 512 tokens: transformers {want:.4f}, llama.cpp {got:.4f}")
    assert 5 < want < 100 and got == pytest.approx(want, rel=0.005)


@pytest.mark.parametrize(("quant", "equal"), [("f32", 32), ("f16", 32), ("bf16", 1), ("mxfp4", 1)])
def test_small_gpt_oss_with_its_own_tokenizer(tmp_path: Path, quant: str, equal: int) -> None:
    folder = _small_gpt_oss(tmp_path / "base", packed=True)
    export_gguf(folder, tmp_path / "model.gguf", quant=quant)
    merge(folder, [], tmp_path / "dense", dtype="fp32")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Call me Ishmael. Some years ago, never mind how long precisely, having little money in my purse, I sailed."
    ids = tokenizer(text).input_ids
    assert len(ids) > 2 * 8  # beyond the window
    tokens, first = _greedy(model, ids, 32)
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        got, best = llama.complete(ids, 32)
        _assert_close(best[0], first, 0.05)
        assert got[:equal] == tokens[:equal]
        _same_tokens(llama, tokenizer)


def test_small_gpt_oss_with_an_adapter(tmp_path: Path) -> None:
    folder = _small_gpt_oss(tmp_path / "base", packed=True)
    model = train_packed(folder, tmp_path / "adapter", std=0.3)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The quick brown fox jumps over the lazy dog").input_ids
    with torch.no_grad():
        first = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    for quant in ("f32", "f16"):
        export_gguf(folder, tmp_path / f"{quant}.gguf", adapter=tmp_path / "adapter", quant=quant)
        merge(folder, tmp_path / "adapter", tmp_path / quant, dtype=quant.replace("f", "fp"))
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / quant, dtype=torch.float32)
        tokens, _ = _greedy(merged, ids, 32)
        with torch.no_grad():
            logits = merged(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
        with LlamaCpp(tmp_path / f"{quant}.gguf") as llama:
            _assert_close(llama.complete(ids, 1)[1][0], first, 0.05)
            if quant == "f32":
                assert llama.complete(ids, 32)[0] == tokens
            got = [llama.complete(ids + tokens[:count], 1)[0][0] for count in range(32)]
        # for f16 weights llama.cpp rounds what they multiply, too: 0.07 at most here, one token of 32
        best = logits.log_softmax(-1).topk(2).values
        clear = (best[:, 0] - best[:, 1] > 0.1).tolist()
        assert sum(clear) > 20
        assert all(one == other for one, other, is_clear in zip(got, tokens, clear, strict=True) if is_clear), quant
        assert sum(one != other for one, other in zip(got, tokens, strict=True)) <= (quant == "f16")
    report = export_gguf(folder, tmp_path / "mxfp4.gguf", adapter=tmp_path / "adapter", quant="mxfp4")
    assert report.tensors["blk.1.ffn_down_exps.weight"] == "mxfp4"
    merge(folder, tmp_path / "adapter", tmp_path / "packed", dtype="mxfp4")
    merge(tmp_path / "packed", [], tmp_path / "unpacked", dtype="fp32")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "unpacked", dtype=torch.float32)
    with torch.no_grad():
        first = again(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    with LlamaCpp(tmp_path / "mxfp4.gguf") as llama:
        _assert_close(llama.complete(ids, 1)[1][0], first, 0.05)


@torch.no_grad()
def test_an_adapter_alone_on_the_real_small_model(tmp_path: Path) -> None:
    folder = smollm2_dir()
    targets = [*EVERYTHING[:4], "up_proj", "down_proj"]
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        LoraConfig(r=8, lora_alpha=12, use_rslora=True, target_modules=targets, rank_pattern={"q_proj": 3}),
    )
    randomise(model, std=0.05)
    model.save_pretrained(tmp_path / "adapter")
    ids = AutoTokenizer.from_pretrained(folder)("The history of Rome began when").input_ids
    tokens, first = _greedy(model.eval(), ids, 16)
    export_gguf(folder, tmp_path / "base.gguf", quant="f16")
    export_gguf_adapter(folder, tmp_path / "adapter", tmp_path / "lora.gguf", quant="f32")
    with LlamaCpp(tmp_path / "base.gguf") as llama:
        plain = llama.complete(ids, 1)[1][0]
    assert max(abs(value - first[token].item()) for token, value in plain.items()) > 0.2
    with LlamaCpp(tmp_path / "base.gguf", lora=tmp_path / "lora.gguf") as llama:
        got, best = llama.complete(ids, 16)
    _assert_close(best[0], first, 0.05)
    assert got == tokens


@torch.no_grad()
def test_an_adapter_alone_on_experts_and_an_untied_embedding(tmp_path: Path) -> None:
    folder = _small_gpt_oss(tmp_path / "base", packed=True)
    model = train_packed(folder, tmp_path / "adapter", std=0.3, target_modules=[*EVERYTHING, "embed_tokens", "lm_head"])
    ids = AutoTokenizer.from_pretrained(folder)("The quick brown fox jumps over the lazy dog").input_ids
    first = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    with model.disable_adapter():
        untrained = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    assert (first - untrained).abs().max() > 0.5
    export_gguf(folder, tmp_path / "base.gguf", quant="mxfp4")
    export_gguf_adapter(folder, tmp_path / "adapter", tmp_path / "lora.gguf")
    with LlamaCpp(tmp_path / "base.gguf", lora=tmp_path / "lora.gguf") as llama:
        _assert_close(llama.complete(ids, 1)[1][0], first, 0.05)


def test_a_file_in_several_parts(tmp_path: Path) -> None:
    folder = smollm2_dir()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The history of Rome began when").input_ids
    report = export_gguf(folder, tmp_path / "model.gguf", quant="f16", max_shard_bytes=100_000_000)
    assert [path.name for path in report.files] == [f"model-0000{n}-of-00003.gguf" for n in (1, 2, 3)]
    tokens, first = _greedy(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids, 16)
    with LlamaCpp(report.output) as llama:
        got, best = llama.complete(ids, 16)
        _same_tokens(llama, tokenizer)
    _assert_close(best[0], first, 0.05)
    assert got == tokens


@pytest.mark.parametrize(
    ("kind", "tokenizer_dir"), [("mistral", mistral_tokenizer_dir), ("gemma", gemma3_tokenizer_dir)]
)
def test_real_sentencepiece_tokenizers(tmp_path: Path, kind: str, tokenizer_dir: Callable[[], Path]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir())
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=1, head_dim=16)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=1, vocab_size=max(tokenizer.get_vocab().values()) + 1)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, sliding_window=None, **sizes)).eval()
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quant="f16")
    ids = tokenizer("It's a truth universally acknowledged: 12 名, naïve 😀\n").input_ids
    _, first = _greedy(model, ids, 1)
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        _assert_close(llama.complete(ids, 1)[1][0], first, 0.05)
        for text in PROBES:
            if kind == "mistral" and text.startswith(" "):
                assert "puts a space" in report.notes[0]
                text = text.lstrip()
            assert llama.tokenize(text) == tokenizer(text).input_ids, text


_LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
_YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
_FAMILIES = [
    ("llama", dict(attention_bias=True, num_key_value_heads=2)),
    ("llama", dict(rope_parameters=_LLAMA3, max_position_embeddings=256, head_dim=32, num_key_value_heads=2)),
    ("llama", dict(rope_parameters=dict(rope_type="linear", rope_theta=10000.0, factor=4.0), num_key_value_heads=4)),
    ("mistral", dict(num_key_value_heads=2, sliding_window=None)),
    ("qwen2", dict(num_key_value_heads=2, tie_word_embeddings=True)),
    ("qwen3", dict(num_key_value_heads=2, head_dim=32)),
    ("gemma", dict(num_key_value_heads=1, head_dim=32)),
    ("llama", dict(rope_parameters=_YARN, max_position_embeddings=256)),
    ("llama", dict(rope_parameters=_YARN | dict(attention_factor=1.0), max_position_embeddings=256)),
    (
        "qwen2",
        dict(
            rope_parameters=_YARN | dict(mscale=0.5, mscale_all_dim=0.2),
            max_position_embeddings=256,
            num_key_value_heads=2,
        ),
    ),
    ("llama", dict(attention_bias=True, mlp_bias=True, num_key_value_heads=2)),
]


@pytest.mark.parametrize(("kind", "options"), _FAMILIES)
def test_families_give_transformers_logprobs(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir())
    settings = dict(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(settings | options)))
    for parameter in model.parameters():
        with torch.no_grad():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.eval().save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    report = export_gguf(tmp_path / "model", tmp_path / "model.gguf", quant="f32")
    assert report.notes == []
    ids = tokenizer("A sentence that is long enough for positions to matter: " * 6).input_ids
    assert len(ids) > 64
    tokens, first = _greedy(model, ids, 4)
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        got, best = llama.complete(ids, 4)
    _assert_close(best[0], first, 0.02)
    assert got == tokens


_LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
_LOCAL = {"rope_type": "default", "rope_theta": 5e3}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("gemma2", dict(num_hidden_layers=4, attn_logit_softcapping=2.0, final_logit_softcapping=5.0)),
        ("gemma3_text", dict(num_hidden_layers=6, final_logit_softcapping=5.0)),  # five sliding layers, and a full one
        (
            "gemma3_text",
            dict(
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                rope_parameters={"full_attention": _LINEAR, "sliding_attention": _LOCAL},
            ),
        ),
    ],
)
def test_gemma_2_and_3_continue_as_in_transformers(tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    sizes: dict[str, Any] = dict(hidden_size=64, intermediate_size=96, head_dim=32, query_pre_attn_scalar=32)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, sliding_window=8, vocab_size=49152)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(sizes | options))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed" in name:
                parameter.mul_(4)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir())
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    assert export_gguf(tmp_path / "model", tmp_path / "model.gguf", quant="f32").notes == []
    ids = tokenizer("Call me Ishmael. Some years ago, never mind how long precisely, I sailed.").input_ids
    assert len(ids) > 2 * sizes["sliding_window"]
    tokens, first = _greedy(model, ids, 32)
    assert len(set(tokens)) > 4
    with LlamaCpp(tmp_path / "model.gguf") as llama:
        got, best = llama.complete(ids, 32)
    _assert_close(best[0], first, 0.02)
    assert got == tokens
