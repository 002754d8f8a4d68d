"""Every binding on a tiny random model of the real class: norms, rotary embedding and MLPs give stock's numbers.

On the CPU with the references, in a process of its own with interpreted kernels, and on CUDA with the kernels.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from types import MethodType
from typing import Any

import pytest
import torch
import transformers
from conftest import loss_and_grads
from torch import nn

import unsloth_plugins
from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.layers import op
from unsloth_plugins.core.models import layers as binding

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]
SIZES: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=160,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    attn_implementation="eager",
)
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
# Config class, options, and what must be found.
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, int]]] = {
    "llama": ("Llama", {}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "llama3": (
        "Llama",
        {"rope_parameters": {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2},
    ),
    "llama_yarn": ("Llama", {"rope_parameters": YARN}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "mistral": ("Mistral", {"sliding_window": 6}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "qwen2": ("Qwen2", {}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "qwen3": ("Qwen3", {}, {"norms": 9, "rotary embeddings": 2, "gated MLPs": 2}),
    "gemma": ("Gemma", {}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "gemma2": ("Gemma2", {"sliding_window": 6}, {"norms": 9, "rotary embeddings": 2, "gated MLPs": 2}),
    "gemma3": ("Gemma3Text", {"sliding_window": 6}, {"norms": 13, "rotary embeddings": 2, "gated MLPs": 2}),
    "phi3": ("Phi3", {"sliding_window": None}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "phi3_partial": (
        "Phi3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "sliding_window": 6,
        },
        {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2},
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}, {"norms": 5, "rotary embeddings": 2, "gated MLPs": 2}),
    "mixtral": ("Mixtral", {**EXPERTS, "sliding_window": None}, {"norms": 5, "rotary embeddings": 2}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**EXPERTS, "mlp_only_layers": [1]},
        {"norms": 9, "rotary embeddings": 2, "gated MLPs": 1},
    ),
    "gpt_oss": ("GptOss", EXPERTS, {"norms": 5, "rotary embeddings": 2}),
}


def build(family: str, **options: Any) -> Any:
    name, more, _ = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**(SIZES | more | options))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for module_name, parameter in model.named_parameters():
        if "norm" in module_name:
            nn.init.normal_(parameter, mean=0.5, std=0.3)
        elif "sinks" in module_name or "experts" in module_name:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def patched(model: Any, device: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A copy with nothing but layers applied, by the kernels where there are any."""
    if INTERPRETED:
        for module in (op, binding):
            monkeypatch.setattr(module, "why_reference", lambda device, dtype: None)
    twin = copy.deepcopy(model)
    choice: Any = "triton" if INTERPRETED or device == "cuda" else "reference"
    unsloth_plugins.apply(twin, attention=None, experts=None, loss=None, layers=choice)
    return twin


def batches(device: str) -> dict[str, dict[str, torch.Tensor]]:
    """Plain, padded on the left, and two documents packed in a row."""
    ids = torch.randint(3, 160, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    positions = torch.cat((torch.arange(8), torch.arange(5)))[None]
    out = {
        "plain": {"input_ids": ids, "labels": ids},
        "padded": {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},
        "packed": {"input_ids": ids[:1], "position_ids": positions, "labels": ids[:1], "use_cache": False},
    }
    return {name: {k: v.to(device) if torch.is_tensor(v) else v for k, v in b.items()} for name, b in out.items()}


@pytest.mark.skipif(INTERPRETED, reason="is that process")
@pytest.mark.slow
def test_interpreted_kernels() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    command += ["-k", "same_numbers and (gemma-cpu or phi3_partial)"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_numbers_as_stock(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build(family).to(device)
    ours = patched(stock, device, monkeypatch)
    assert_counts(ours, family)
    for name, batch in batches(device).items():
        if INTERPRETED and name != "padded":
            continue
        for train in (True, False) if name == "plain" else (True,):
            want, got = (loss_and_grads(model, train=train, **batch) for model in (stock, ours))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def assert_counts(model: Any, family: str) -> None:
    row = next(row for row in unsloth_plugins.core.applied_to(model).rows if row.feature == "layers")  # type: ignore
    counts = ", ".join(f"{count} {kind}" for kind, count in FAMILIES[family][2].items())
    assert row.state == "on" and row.detail.startswith(counts + ":"), row


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["llama", "gemma3", "phi3", "qwen3_moe"])
def test_generation_with_a_cache_and_left_padding(family: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build(family).to(device)
    ours = patched(stock, device, monkeypatch)
    batch = batches(device)["padded"]
    options: dict[str, Any] = dict(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
    want, got = (model.generate(**inputs, **options) for model in (stock, ours))
    assert torch.equal(want, got)
    for row in range(2):
        real = inputs["attention_mask"][row].bool()
        alone = ours.generate(inputs["input_ids"][row][real][None], **options)
        assert torch.equal(alone[0, -6:], got[row, -6:])


@pytest.mark.skipif(INTERPRETED, reason="the references are tested")
@pytest.mark.parametrize("family", ["smollm", *FAMILIES])
def test_all_parts_together_give_stocks_numbers(family: str) -> None:
    """Attention, layers, experts and loss; train and eval, padded, packed, and with a cache."""
    stock = build("llama", tie_word_embeddings=True) if family == "smollm" else build(family)
    ours = copy.deepcopy(stock)
    applied = unsloth_plugins.apply(ours, attention="eager", layers="reference", loss="chunked", loss_chunk_mib=1)
    assert applied.parts.binding != "generic"
    runs = batches("cpu")
    if family == "gpt_oss":
        del runs["packed"]  # stock's documents see each other
    for name, batch in runs.items():
        real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
        # A padded token attends to nothing here and to everything in stock, so it may predict nothing.
        before = nn.functional.pad(real, (1, 0), value=True)[:, :-1]
        batch = batch | {"labels": batch["labels"].masked_fill(~before, -100)}
        for train in (True, False):
            (loss, logits, grads), got = (loss_and_grads(model, train=train, **batch) for model in (stock, ours))
            torch.testing.assert_close(got[0], loss, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[1][real], logits[real], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(got[2], grads, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
    options: dict[str, Any] = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    inputs = {key: runs["padded"][key] for key in ("input_ids", "attention_mask")}
    want, got = (model.eval().generate(**inputs, **options) for model in (stock, ours))
    assert torch.equal(want, got)
    past, new = inputs["input_ids"][:1, :9], inputs["input_ids"][:1, 9:]
    for model in (stock, ours):
        with torch.no_grad():
            cache = model(past, use_cache=True).past_key_values
            steps = torch.cat([model(token[None], past_key_values=cache).logits + 0 for token in new.T], 1)
        torch.testing.assert_close(steps, stock(inputs["input_ids"][:1]).logits[:, 9:], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("family", ["phi3", "phi3_partial"])
def test_attention_kernels_on_slices_of_one_projection(family: str) -> None:
    stock = build(family, head_dim=16).to("cuda")
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, attention="triton", layers="triton", loss=None)
    for name, batch in batches("cuda").items():
        if name != "padded":  # its padded tokens differ, see above
            want, got = (loss_and_grads(model, **batch) for model in (stock, ours))
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_on_cuda_is_no_further_from_the_truth_than_stock(family: str) -> None:
    """Logits and gradient norms; routing may differ in bf16, so mixtures are left out."""
    if "experts" in str(FAMILIES[family][1]):
        pytest.skip("near-ties route differently in bf16")
    truth = build(family).to("cuda").bfloat16().double()
    stock = copy.deepcopy(truth).bfloat16()
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, attention=None, experts=None, loss=None, layers="triton")
    batch = batches("cuda")["plain"]
    (_, want, grads), (_, eager, eager_grads), (_, got, our_grads) = (
        loss_and_grads(model, **batch) for model in (truth, stock, ours)
    )
    assert (got.double() - want).norm() <= 1.1 * (eager.double() - want).norm()
    for name, grad in grads.items():
        room = (eager_grads[name].double() - grad).norm()
        assert (our_grads[name].double() - grad).norm() <= 1.25 * room + 1e-3 * grad.norm(), name


def test_undo_and_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    ours = patched(model, "cpu", monkeypatch)
    twin = copy.deepcopy(ours)
    kept = twin.model.norm.forward
    assert isinstance(kept, MethodType) and kept.__self__ is twin.model.norm
    for each in (ours, twin):
        before = [dict(vars(module)).keys() for module in model.modules()]
        unsloth_plugins.core.applied_to(each).undo()  # type: ignore[union-attr]
        assert [dict(vars(module)).keys() for module in each.modules()] == before
    x = torch.randn(2, 32)
    assert torch.equal(kept(x), model.model.norm(x))  # one that outlives undo is the class's again


def test_hooks_on_projections_see_what_they_see_in_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = build("llama")
    ours = patched(stock, "cpu", monkeypatch)
    calls: list[bool] = []
    real = binding.rope
    monkeypatch.setattr(binding, "rope", lambda *x, **o: (calls.append(o["in_place"]), real(*x, **o))[1])
    ours(**batches("cpu")["plain"])
    ours.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *_: None)
    ours(**batches("cpu")["plain"])
    assert calls == [True, True, False, True]


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_rotation_inside_a_module_of_the_package_kernels(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is installed, transformers' function is an instance of a class like this one."""

    def wrapped(func: Any) -> nn.Module:
        class Func(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return func(*args, **kwargs)

        return Func()

    module = getattr(transformers.models, family)
    modeling = getattr(module, f"modeling_{family}")
    stock = build(family)
    wanted = loss_and_grads(stock, **batches("cpu")["plain"])
    if not isinstance(modeling.apply_rotary_pos_emb, nn.Module):  # where it is not installed
        monkeypatch.setattr(modeling, "apply_rotary_pos_emb", wrapped(modeling.apply_rotary_pos_emb))
    binding._known.cache_clear()
    try:
        applied = unsloth_plugins.apply(stock, layers="reference")
        got = loss_and_grads(stock, **batches("cpu")["plain"])
    finally:
        binding._known.cache_clear()
    assert "2 rotary embeddings" in applied.report()
    torch.testing.assert_close(got, wanted)


def test_a_rotation_that_was_replaced_since_is_not_taken_for_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    unsloth_plugins.apply(build("llama"), layers="reference")
    modeling = transformers.models.llama.modeling_llama
    monkeypatch.setattr(modeling, "apply_rotary_pos_emb", lambda q, k, cos, sin, unsqueeze_dim=1: (q, k))
    applied = unsloth_plugins.apply(build("llama"), layers="reference")
    assert "norms" in applied.report() and "rotary" not in applied.report()


def test_what_computes_something_else_is_left_alone() -> None:
    class Scaled(transformers.models.llama.modeling_llama.LlamaRMSNorm):  # type: ignore[misc,name-defined]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden)

    model = build("llama")
    model.model.norm.__class__ = Scaled
    foreign = model.model.layers[0].mlp
    foreign.act_fn = nn.ReLU()
    foreign.forward = MethodType(type(foreign).forward, foreign)
    model.model.layers[1].mlp.act_fn = nn.ReLU()
    applied = unsloth_plugins.apply(model, layers="reference")
    row = next(row for row in applied.rows if row.feature == "layers")
    assert row.detail.startswith("4 norms, 2 rotary embeddings: plain PyTorch")


def test_auto_leaves_the_cpu_alone_and_triton_says_why() -> None:
    model = build("llama")
    batch = batches("cpu")["plain"]
    before = model(**batch).logits
    applied = unsloth_plugins.apply(model)
    assert "left alone" in applied.report() and "kernels on CUDA only (a tensor on cpu)" in applied.report()
    assert torch.equal(model(**batch).logits + 0, before)
    with pytest.raises(UnsupportedError, match="got a tensor on cpu"):
        unsloth_plugins.apply(model, layers="triton")
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32))
    assert "no norm, rotary embedding or MLP recognised" in unsloth_plugins.apply(gpt2).report()
    with pytest.raises(UnsupportedError, match="layers='reference'; got GPT2LMHeadModel"):
        unsloth_plugins.apply(gpt2, layers="reference")
    with pytest.raises(ConfigError, match="`layers` to be one of"):
        unsloth_plugins.apply(model, layers="fast")
