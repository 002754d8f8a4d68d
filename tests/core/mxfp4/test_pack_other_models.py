"""Packed experts of other models than gpt-oss: tiny ones of the real classes against their own decoded weights."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import batch_of, loss_and_grads, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn

import unsloth_plugins
from unsloth_plugins.core.errors import ModelError, UnsupportedError
from unsloth_plugins.core.export.base import open_base
from unsloth_plugins.core.models.experts import PROJECTIONS, PackedExperts
from unsloth_plugins.core.mxfp4 import decode, load_mxfp4, pack_experts

SIZES: dict[str, Any] = dict(
    num_hidden_layers=2,
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=160,
    num_local_experts=5,
    num_experts=5,
    num_experts_per_tok=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {},
    "Qwen3Moe": {},
    "Qwen2Moe": {"shared_expert_intermediate_size": 32},
    "Olmoe": {"intermediate_size": 32},
    "DeepseekV3": dict(
        head_dim=8,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        num_experts=8,
        num_local_experts=8,
        n_group=2,
        topk_group=1,
        num_key_value_heads=4,
        first_k_dense_replace=1,
    ),
}
LORA: dict[str, Any] = dict(r=4, lora_alpha=8, init_lora_weights=False)
TARGETS = ["experts.gate_up_proj", "experts.down_proj"]


def build(family: str, **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | more))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.3)
    return model.eval()


def packed_and_decoded(family: str) -> tuple[Any, Any]:
    """A packed model, and a stock one whose dense experts hold the decoded numbers."""
    dense = build(family)
    packed = pack_experts(copy.deepcopy(dense))
    for ours, theirs in zip(packed.model.layers, dense.model.layers, strict=True):
        if not hasattr(theirs.mlp, "experts"):
            continue
        assert isinstance(ours.mlp.experts, PackedExperts)
        for name in PROJECTIONS:
            logical = getattr(ours.mlp.experts, name)
            weight = getattr(theirs.mlp.experts, name)
            assert (logical.shape, logical.dtype, logical.device) == (weight.shape, weight.dtype, weight.device)
            weight.data.copy_(decode(*ours.mlp.experts.bytes_of(name)))
    return packed, dense


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("applied", [False, True])
def test_logits_are_those_of_the_decoded_weights(family: str, applied: bool) -> None:
    packed, dense = packed_and_decoded(family)
    if applied:
        report = unsloth_plugins.apply(packed).report()
        assert "binding: moe" in report and "packed MXFP4" in report
    want, got = (model(**batch_of(2, 19)) for model in (dense, packed))
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("weights", ["resident", "streamed"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe"])
def test_lora_on_packed_experts_trains_as_on_decoded_ones(family: str, weights: Any) -> None:
    packed, dense = packed_and_decoded(family)
    models = [
        get_peft_model(model, LoraConfig(**LORA, target_modules=["q_proj"], target_parameters=TARGETS))
        for model in (packed, dense)
    ]
    models[0].load_state_dict(
        {name: each for name, each in models[1].state_dict().items() if "lora_" in name}, strict=False
    )
    unsloth_plugins.apply(models[0], weights=weights)
    (loss, logits, grads), (want_loss, want_logits, want_grads) = (
        loss_and_grads(model, True, **batch_of(2, 19)) for model in models
    )
    torch.testing.assert_close(loss, want_loss, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits, want_logits, rtol=1e-5, atol=1e-4)
    assert grads.keys() == want_grads.keys() and sum("experts" in name for name in grads) == 8
    for name, want in want_grads.items():
        assert (grads[name] - want).norm() <= 3e-5 * want.norm(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_and_loaded_again_bit_for_bit(family: str, tmp_path: Path) -> None:
    packed = pack_experts(build(family))
    packed.save_pretrained(tmp_path / "one")
    again = load_mxfp4(tmp_path / "one")
    assert again.state_dict().keys() == packed.state_dict().keys()
    assert all(torch.equal(each, packed.state_dict()[name]) for name, each in again.state_dict().items())
    assert torch.equal(again(**batch_of(1, 9)).logits, packed(**batch_of(1, 9)).logits)
    again.save_pretrained(tmp_path / "two")
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()
    for folder in ("one", "two"):
        config = json.loads((tmp_path / folder / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "unsloth_mxfp4"  # nobody takes it for a gpt-oss
    with pytest.raises(UnsupportedError, match="16-bit model that this one was made from"):
        open_base(tmp_path / "one")


def test_what_cannot_be_packed() -> None:
    with pytest.raises(ModelError, match=r"Mixtral.*LlamaForCausalLM"):
        pack_experts(tiny_llama())
    with pytest.raises(ModelError, match="multiple of 32"):
        pack_experts(build("Mixtral", intermediate_size=48))
    with pytest.raises(ModelError, match="dense experts without adapters"):
        pack_experts(pack_experts(build("Mixtral")))
    with pytest.raises(ModelError, match="gelu|SwiGLU"):
        pack_experts(build("Mixtral", hidden_act="gelu"))
