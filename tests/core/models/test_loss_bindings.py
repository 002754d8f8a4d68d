"""The chunked loss of real model classes against transformers' own: capped and scaled logits, heads of every kind."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import batch_of, loss_and_grads, tiny_gemma, tiny_llama
from peft import LoraConfig, get_peft_model

import unsloth_plugins
from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.loss import LazyLogits
from unsloth_plugins.core.models import causal_lm
from unsloth_plugins.core.models.causal_lm import chunked_losses

SIZES: dict[str, Any] = dict(
    num_hidden_layers=1,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=160,
    pad_token_id=0,
    attn_implementation="eager",
)
TRANSFORMED = {
    "softcap": ("Gemma2", {"final_logit_softcapping": 2.0}),
    "divided": ("Granite", {"logits_scaling": 3.0}),
    "multiplied": ("Cohere", {"logit_scale": 0.25}),
}


def chunked(model: Any, chunk_mib: int = 1) -> Any:
    twin = copy.deepcopy(model)
    unsloth_plugins.apply(twin, attention=None, layers=None, experts=None, loss="chunked", loss_chunk_mib=chunk_mib)
    return twin


def same(stock: Any, ours: Any, **batch: Any) -> None:
    """Loss and gradients, the logits never computed before somebody reads them."""
    before = chunked_losses(getattr(ours, "get_base_model", lambda: ours)()) or 0
    want, got = (loss_and_grads(model, **batch) for model in (stock, ours))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert chunked_losses(getattr(ours, "get_base_model", lambda: ours)()) == before + 1
    logits = ours(**batch).logits
    assert isinstance(logits, LazyLogits) and logits._real is None


@pytest.mark.parametrize("kind", TRANSFORMED)
def test_logits_that_a_model_caps_or_scales(kind: str) -> None:
    name, options = TRANSFORMED[kind]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | options))
    stock = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    same(stock, chunked(stock), **batch_of(2, 9))


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["own head", "tied head"])
@pytest.mark.parametrize("rows", [163, 192, 100])
@pytest.mark.parametrize("first", ["resize", "apply"])
def test_a_resized_vocabulary(build: Any, rows: int, first: str) -> None:
    stock = build()
    ours = chunked(stock) if first == "apply" else None
    for model in filter(None, (stock, ours)):
        torch.manual_seed(5)
        model.resize_token_embeddings(rows, mean_resizing=False)
    if ours is None:
        ours = chunked(stock)
    ids = torch.arange(18).view(2, 9) * (rows - 1) // 17  # the last row too
    same(stock, ours, input_ids=ids, labels=ids)
    with pytest.raises(ShapeError, match=rf"labels in \[0, {rows}\)"):
        ours(input_ids=ids, labels=ids + 1)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma], ids=["own head", "tied head"])
@pytest.mark.parametrize(
    "settings",
    [
        {"modules_to_save": ["lm_head", "embed_tokens"]},
        {"modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    ],
    ids=["both saved", "embedding saved", "LoRA on both"],
)
@pytest.mark.filterwarnings("ignore:.*tied.*")
def test_embedding_and_head_in_training(build: Any, settings: dict[str, Any]) -> None:
    torch.manual_seed(2)
    config = LoraConfig(**({"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False} | settings))
    stock = get_peft_model(build(), config)
    same(stock, chunked(stock), **batch_of(2, 9))


@pytest.mark.parametrize("head", ["frozen", "trained", "LoRA"])
def test_nothing_to_learn_is_zero_and_not_nan(head: str) -> None:
    torch.manual_seed(2)
    options = {"frozen": {}, "trained": {"modules_to_save": ["lm_head"]}, "LoRA": {}}[head]
    targets = ["q_proj", "lm_head"] if head == "LoRA" else ["q_proj"]
    ours = chunked(get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=targets, **options)))
    batch = batch_of(2, 9)
    batch["labels"][:] = -100
    loss, _, grads = loss_and_grads(ours, **batch)
    assert loss.item() == 0 and grads and not any(grad.any() for grad in grads.values())


@pytest.mark.parametrize("label", [160, -1])
@pytest.mark.parametrize("head", ["plain", "LoRA"])
def test_a_label_out_of_range_is_named(head: str, label: int) -> None:
    targets = ["q_proj", "lm_head"] if head == "LoRA" else ["q_proj"]
    ours = chunked(get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=targets)))
    batch = batch_of(2, 9)
    batch["labels"][1, 4] = label
    with pytest.raises(ShapeError, match=rf"expected labels in \[0, 160\) or ignore_index=-100; got {label}\."):
        ours(**batch)


@pytest.mark.parametrize("head", ["plain", "LoRA"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_is_float32_whatever_the_weights(dtype: torch.dtype, head: str) -> None:
    """And nearer to the truth than one rounding in that dtype."""
    targets = ["q_proj", "lm_head"] if head == "LoRA" else ["q_proj"]
    model = get_peft_model(tiny_llama().to(dtype), LoraConfig(r=4, target_modules=targets))
    truth = copy.deepcopy(model).double()(**batch_of(2, 9)).loss
    loss = chunked(model)(**batch_of(2, 9)).loss
    assert loss.dtype == torch.float32
    assert (loss.double() - truth).abs() < 4 * torch.finfo(dtype).eps


def test_case_15_micro_batches_with_the_count_of_all_add_up_to_the_batch() -> None:
    """Label counts 3, 50, 7 and 120: means of micro-batches would weigh them alike."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 160, (4, 121), generator=draw)
    labels = torch.full_like(ids, -100)
    for row, count in enumerate((3, 50, 7, 120)):
        labels[row, 1 : 1 + count] = ids[row, 1 : 1 + count]
    stock = tiny_llama()
    ours = chunked(stock).train()
    want = loss_and_grads(stock, input_ids=ids, labels=labels)
    total = torch.zeros(())
    for row in range(4):
        part = slice(row, row + 1)
        loss = ours(input_ids=ids[part], labels=labels[part], num_items_in_batch=torch.tensor(180)).loss
        loss.backward()
        total += loss.detach()
    torch.testing.assert_close(total, want[0], rtol=1e-6, atol=1e-6)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, want[2][name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("read", [False, True], ids=["lazy", "read before"])
@pytest.mark.parametrize("head", ["plain", "LoRA", "softcap"])
def test_label_smoothing_given_to_the_model(head: str, read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's smoothing of the shifted logits; transformers' loss would take the option and do nothing."""
    if head == "softcap":
        config = transformers.Gemma2Config(**(SIZES | {"final_logit_softcapping": 2.0}))
        stock: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    else:
        torch.manual_seed(2)
        targets = ["q_proj", "lm_head"] if head == "LoRA" else ["q_proj"]
        stock = get_peft_model(tiny_llama(), LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    ours = chunked(stock) if not read else copy.deepcopy(stock)
    if read:
        unsloth_plugins.apply(ours, attention=None, layers=None, experts=None)
        never = type("Never", (), {"__new__": lambda _, hidden, head, *more, **options: head(hidden)})
        monkeypatch.setattr(causal_lm, "LazyLogits", never)
    batch = batch_of(2, 9)
    batch["labels"][0, :4] = -100
    logits = stock.train()(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
    want = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
    want.backward()
    got = ours.train()(**batch, label_smoothing=0.1).loss
    got.backward()
    torch.testing.assert_close(got, want)
    for (name, mine), theirs in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-6)
