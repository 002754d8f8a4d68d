"""LoRA on linear layers in one product, against PEFT's own three layers."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn

from unsloth_plugins.core import apply

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def lora(model: nn.Module, **options) -> nn.Module:  # type: ignore[no-untyped-def]
    torch.manual_seed(1)
    peft = get_peft_model(model, LoraConfig(r=4, lora_alpha=12, target_modules=ATTENTION, **options))
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.1)
    return peft


def row(applied, feature: str = "lora"):  # type: ignore[no-untyped-def]
    applied.report()
    return next((each for each in applied.rows if each.feature == feature), None)


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
@pytest.mark.parametrize("rslora", [False, True])
def test_loss_and_every_gradient_equal_peft(make, rslora) -> None:  # type: ignore[no-untyped-def]
    ref = lora(make(), use_rslora=rslora)
    ours = copy.deepcopy(ref)
    applied = apply(ours, attention=None, experts=None, loss=None)
    assert row(applied).state == "on" and row(applied).detail.startswith(f"{4 * len(applied.parts.layers)} linear")
    want, got = loss_and_grads(ref, **batch_of(2, 9)), loss_and_grads(ours, **batch_of(2, 9))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    applied.undo()
    assert all("forward" not in vars(m) and "_unsloth_lora" not in vars(m) for m in ours.modules())
    again = loss_and_grads(ours, **batch_of(2, 9))
    torch.testing.assert_close(again, want, rtol=0, atol=0)


def test_under_autocast_within_what_peft_itself_is_off() -> None:
    ref = lora(tiny_llama())
    ours = copy.deepcopy(ref)
    truth = loss_and_grads(copy.deepcopy(ref).double(), **batch_of(2, 17))
    apply(ours, attention=None, loss=None)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock, got = loss_and_grads(ref, **batch_of(2, 17)), loss_and_grads(ours, **batch_of(2, 17))
    assert abs(got[0] - truth[0]) <= abs(stock[0] - truth[0]) + 1e-2
    for name, want in truth[2].items():
        room, error = ((each[2][name].double() - want).norm() for each in (stock, got))
        assert error <= 1.5 * room + 1e-3 * want.norm(), name


def test_adapters_switched_added_merged_and_disabled_are_followed() -> None:
    ref = lora(tiny_llama())
    ref.add_adapter("second", LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "v_proj"]))
    for name, parameter in ref.named_parameters():
        if "second" in name:
            parameter.data.normal_(std=0.1)
    ours = copy.deepcopy(ref)
    apply(ours, attention=None, loss=None)
    batch = batch_of(1, 8)

    def same() -> None:
        with torch.no_grad():
            torch.testing.assert_close(ours(**batch).logits, ref(**batch).logits, rtol=1e-5, atol=1e-5)

    same()
    for step in ("set_adapter", "both", "merge", "unmerge"):
        for model in (ref, ours):
            if step == "set_adapter":
                model.set_adapter("second")
            elif step == "both":
                model.base_model.set_adapter(["default", "second"])
            else:
                getattr(model.base_model, f"{step}_adapter")()
        same()
    with ref.disable_adapter(), ours.disable_adapter():
        same()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora_dropout": 0.1}, "LoRA dropout"),
        ({"use_dora": True}, "a variant of LoRA"),
        ({"lora_bias": True}, "a bias in the adapter"),
        ({"bias": "all"}, "a base layer that is trained"),
    ],
)
def test_what_is_left_to_peft_is_said(options, reason) -> None:  # type: ignore[no-untyped-def]
    make = tiny_gpt_oss if "bias" in options else tiny_llama
    ours = lora(make(), **options)
    applied = apply(ours, attention=None, experts=None, loss=None)
    assert row(applied).state == "left alone" and reason in row(applied).detail


def test_an_adapter_that_comes_after_apply_is_fused_before_its_first_step() -> None:
    model = tiny_llama()
    applied = apply(model, attention=None, loss=None)
    assert row(applied) is None
    peft = lora(model).train()
    peft(**batch_of(1, 8)).loss.backward()
    assert sum("_unsloth_lora" in vars(m) for m in model.modules()) == 4 * len(applied.parts.layers)


def test_switched_off() -> None:
    ours = lora(tiny_llama())
    applied = apply(ours, lora=None)
    assert row(applied).state == "left alone" and not any("_unsloth_lora" in vars(m) for m in ours.modules())


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_4bit_weights_equal_peft_and_are_not_repacked_on_the_cpu(kind: str, nested: bool) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    model = tiny_llama()
    for layer in model.model.layers:
        for name in ATTENTION:
            old = getattr(layer.self_attn, name)
            new = bnb.nn.Linear4bit(
                old.in_features, old.out_features, bias=False, quant_type=kind, compress_statistics=nested,
                compute_dtype=torch.float32,
            )  # fmt: skip
            new.weight = bnb.nn.Params4bit(old.weight.data, False, quant_type=kind, compress_statistics=nested)
            setattr(layer.self_attn, name, new.to("cpu"))
    ref = lora(model)
    ours = copy.deepcopy(ref)
    applied = apply(ours, attention=None, loss=None)
    assert row(applied).state == "on" and "left to PEFT" not in row(applied).detail
    ours.eval()
    with torch.no_grad():
        ours(**batch_of(1, 8))  # case: a forward without gradients before training
    ours.train()
    want, got = loss_and_grads(ref, **batch_of(2, 9)), loss_and_grads(ours, **batch_of(2, 9))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    told = [m for m in ours.modules() if getattr(m, "support_avx512bf16_for_cpu", False)]
    assert not told
