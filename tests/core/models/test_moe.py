"""Mixtures of experts of the real classes at tiny size: stock's logits, loss and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from conftest import batch_of, loss_and_grads
from peft import LoraConfig, get_peft_model
from torch import nn

import unsloth_plugins
from unsloth_plugins.core import applied_to
from unsloth_plugins.core.models import recognise

SIZES: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=32,
    intermediate_size=48,
    moe_intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=160,
    num_local_experts=5,
    num_experts=5,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
LOGITS = dict(output_router_logits=True, router_aux_loss_coef=0.1)
SHARED = dict(shared_expert_intermediate_size=16)
DEEP = dict(
    kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
    num_experts=8, num_local_experts=8, n_group=2, topk_group=1, num_key_value_heads=4, first_k_dense_replace=1,
)  # fmt: skip
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
WHERE = [("cpu", 1e-5), pytest.param("cuda", 1e-4, marks=[pytest.mark.gpu, on_cuda])]
# Config class, options, layers with experts, whether the router is known.
FAMILIES: dict[str, tuple[str, dict[str, Any], int, bool]] = {
    "mixtral": ("Mixtral", LOGITS, 2, True),
    "mixtral_jitter": ("Mixtral", {"router_jitter_noise": 0.2}, 2, True),
    "qwen3_moe": ("Qwen3Moe", {"norm_topk_prob": True, **LOGITS}, 2, True),
    "qwen3_moe_plain": ("Qwen3Moe", {"norm_topk_prob": False, "mlp_only_layers": [1]}, 1, True),
    "qwen2_moe": ("Qwen2Moe", SHARED, 2, True),
    "olmoe": ("Olmoe", {}, 2, True),
    "deepseek_v3": ("DeepseekV3", DEEP, 1, False),
}
# What PEFT makes of them is up to PEFT: it knows the names in old checkpoints of two of the three.
TARGETS: dict[str, dict[str, Any]] = {
    "mixtral": dict(target_modules=["q_proj", "w1", "w2", "w3"]),
    "qwen3_moe": dict(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]),
    "qwen2_moe": dict(target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
}


def build(family: str) -> Any:
    name, more, _, _ = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(SIZES | more))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def _equal(ours: nn.Module, stock: nn.Module, train: bool = True, tolerance: float = 1e-5) -> None:
    batch = {name: tensor.to(next(ours.parameters()).device) for name, tensor in batch_of(2, 19).items()}
    results = []
    for model in (ours, stock):
        torch.manual_seed(3)  # of the noise
        results.append(loss_and_grads(model, train, **batch))
    (loss, logits, grads), (want_loss, want_logits, want_grads) = results
    torch.testing.assert_close(loss, want_loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(logits, want_logits, rtol=tolerance, atol=10 * tolerance)
    assert grads.keys() == want_grads.keys()
    for name, want in want_grads.items():
        error = (grads[name] - want).norm() / want.norm().clamp_min(1e-6)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize(("device", "tolerance"), WHERE)
def test_equals_stock_in_logits_and_every_gradient(device: str, tolerance: float, family: str, train: bool) -> None:
    stock = build(family).to(device)
    ours = copy.deepcopy(stock)
    applied = unsloth_plugins.apply(ours)
    _, _, layers, routed = FAMILIES[family]
    assert applied.parts.binding == "moe"
    routing = "routing in float32" if routed else "the model's own routing"
    assert f"{routing}, {layers} layers" in applied.report()
    _equal(ours, stock, train, tolerance)
    applied.undo()
    assert applied_to(ours) is None and not any("forward" in vars(module) for module in ours.modules())


def test_router_logits_and_the_auxiliary_loss_are_still_there() -> None:
    stock = build("qwen3_moe")
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours)
    want, got = (model(**batch_of(2, 11)) for model in (stock, ours))
    assert want.aux_loss > 0
    torch.testing.assert_close(got.aux_loss, want.aux_loss)
    torch.testing.assert_close(got.router_logits, want.router_logits)


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(("device", "tolerance"), WHERE)
def test_lora_on_experts_is_pefts_without_its_sums(device, tolerance, family: str, first: bool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    from peft.tuners.lora.layer import ParamWrapper

    config = LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **TARGETS[family])
    base = build(family).to(device)
    torch.manual_seed(1)
    stock = get_peft_model(copy.deepcopy(base), copy.deepcopy(config))
    torch.manual_seed(1)
    if first:
        unsloth_plugins.apply(base)
    ours = get_peft_model(base, copy.deepcopy(config))
    applied = unsloth_plugins.apply(ours)
    assert sum("experts" in name and "lora_A" in name for name, _ in ours.named_parameters()) == 4
    ours.load_state_dict(stock.state_dict())
    sums: list[int] = []
    activate = ParamWrapper._activate_lora
    monkeypatch.setattr(ParamWrapper, "_activate_lora", lambda self, *a: sums.append(id(self)) or activate(self, *a))
    _equal(ours, stock, tolerance=3 * tolerance)
    ours_wrappers = {id(module) for module in ours.modules()}
    assert sums and not ours_wrappers & set(sums)
    applied.undo()
    _equal(ours, stock, tolerance=3 * tolerance)
    assert ours_wrappers & set(sums)


def test_a_replaced_forward_is_left_alone() -> None:
    model = build("mixtral")
    for layer in model.model.layers:
        layer.mlp.experts.forward = type(layer.mlp.experts).forward.__get__(layer.mlp.experts)
    assert recognise(model).binding == "generic"
    assert "none recognised" in unsloth_plugins.apply(model).report()


def test_a_patched_model_is_recognised_again() -> None:
    model = build("mixtral")
    unsloth_plugins.apply(model)
    parts = recognise(model)
    assert parts.binding == "moe" and all(layer.router is not None for layer in parts.layers)
