"""LoRA on the experts of a gpt-oss, dense and packed, and its interchange with PEFT alone."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, twin
from peft import LoHaConfig, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import GptOssForCausalLM

import unsloth_plugins
from unsloth_plugins.core import lacks_adapters
from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.mxfp4 import pack_experts

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EVERYTHING = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
PARAMETERS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def _packed_and_dense(**options: object) -> tuple[GptOssForCausalLM, GptOssForCausalLM]:
    """A packed model, and the dense one with the same numbers."""
    dense = tiny_gpt_oss(**options)
    packed = pack_experts(twin(dense))
    for ours, stock in zip(packed.model.layers, dense.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            getattr(stock.mlp.experts, name).data.copy_(ours.mlp.experts.packed(name).dense(torch.float32))
    return packed, dense


def _randomise(model: torch.nn.Module, seed: int = 3) -> None:
    """B is zero at first, and then A has no gradient: give both numbers, by name."""
    for name, parameter in sorted(model.named_parameters()):
        if "lora_" in name:
            draw = torch.Generator().manual_seed(seed + len(name) + sum(map(ord, name)))
            parameter.data = torch.randn(parameter.shape, generator=draw).to(parameter) * 0.1


@pytest.fixture(params=["packed", "dense"])
def base(request: pytest.FixtureRequest) -> GptOssForCausalLM:
    """A base model of each kind."""
    return _packed_and_dense()[request.param == "dense"]


@pytest.mark.parametrize("targets", [EVERYTHING, r".*\.(q|k|v|o|gate|up|down)_proj"])
def test_case_8_expert_targets_are_adapted(base: GptOssForCausalLM, targets: object) -> None:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=targets))
    applied = unsloth_plugins.apply(model)
    assert "8 expert projections" in applied.report()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    attention = 4 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))
    experts = 4 * 4 * 4 * ((64 + 192) + (96 + 64))
    assert trainable == attention + experts
    _randomise(model)
    _, _, grads = loss_and_grads(model, **batch_of(4, 64))
    assert sum("experts" in name for name in grads) == 16
    for name, grad in grads.items():
        assert name.rpartition("lora_")[1] and grad.abs().sum() > 0
        if "experts" in name:
            per_expert = grad.view(4, -1) if "lora_A" in name else grad.view(grad.shape[0], -1, 4).permute(2, 0, 1)
            assert all(part.abs().sum() > 0 for part in per_expert), name
    assert unsloth_plugins.apply(model) is applied  # and nothing is added twice
    assert trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("kind", ["packed", "dense, applied first", "dense"])
@pytest.mark.parametrize("layers", [4, 8])
def test_case_8_all_linear_reaches_the_experts_or_says_that_it_does_not(kind: str, layers: int, caplog) -> None:  # type: ignore[no-untyped-def]
    """With 20 names and more PEFT shortens its list to q_proj, k_proj, v_proj, o_proj: nothing tells it from those."""
    types = ["sliding_attention", "full_attention"] * (layers // 2)
    packed, dense = _packed_and_dense(num_hidden_layers=layers, layer_types=types)
    base = packed if kind == "packed" else dense
    if "first" in kind:
        unsloth_plugins.apply(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    unsloth_plugins.apply(model)
    adapted = sum("experts" in name and "lora_" in name for name, _ in model.named_parameters())
    assert adapted == (0 if kind == "dense" else 4 * layers)
    assert any("on no expert" in record.getMessage() for record in caplog.records) == (kind == "dense")
    assert len(list(base.named_modules())) == len(set(map(id, base.modules())))  # nobody else sees the stand-ins


@pytest.mark.parametrize(
    ("targets", "wrong"),
    [
        (dict(target_modules=["q_proj", "dwon_proj"]), r"'dwon_proj', which matches nothing\. Did you mean `down"),
        (dict(target_modules=["q_proj", "shared_expert.down_proj"]), "shared_expert.down_proj"),
        (dict(target_modules=["q_proj", "layers.99.mlp.experts.down_proj"]), "layers.99"),
        (dict(target_modules=["q_proj"], target_parameters=["mlp.experts.dwon_proj"]), "mlp.experts.dwon_proj"),
        (dict(target_modules=["q_proj"], target_parameters=[*PARAMETERS, "experts.up_proj"]), "experts.up_proj"),
    ],
)
def test_case_8_a_target_without_match_is_named(base: GptOssForCausalLM, targets: dict[str, Any], wrong: str) -> None:
    model = get_peft_model(base, LoraConfig(r=4, **targets))
    with pytest.raises(ConfigError, match=wrong):
        unsloth_plugins.apply(model)


def test_case_8_other_adapters_do_not_reach_experts_and_say_so(base: GptOssForCausalLM) -> None:
    model = get_peft_model(base, LoHaConfig(r=4, target_modules=EVERYTHING))
    with pytest.raises(ConfigError, match="_proj', which matches nothing"):
        unsloth_plugins.apply(model)


def test_adapters_added_after_apply_are_completed_by_the_next(base: GptOssForCausalLM) -> None:
    applied = unsloth_plugins.apply(base)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING))
    assert lacks_adapters(model)
    assert unsloth_plugins.apply(model) is applied and not lacks_adapters(model)
    model.add_adapter("second", LoraConfig(r=4, target_modules=EVERYTHING))
    unsloth_plugins.apply(model)
    assert sum("experts" in name and "lora_" in name for name, _ in model.named_parameters()) == 32
    model.add_adapter("third", LoraConfig(r=4, target_modules=["q_proj", "dwon_proj"]))
    with pytest.raises(ConfigError, match="dwon_proj"):
        unsloth_plugins.apply(model)


def test_ranks_given_for_gate_and_up_are_those_of_the_fused_projection(tmp_path: Path) -> None:
    packed, dense = _packed_and_dense()
    options = dict(r=4, target_modules=EVERYTHING)
    ours = get_peft_model(packed, LoraConfig(**options, rank_pattern={"gate_proj": 2, "up_proj": 2}))
    unsloth_plugins.apply(ours)
    experts = ours.get_base_model().model.layers[0].mlp.experts
    assert (experts.r["default"], experts.base_layer.r["default"]) == (4, 2)
    ours.save_pretrained(tmp_path)
    PeftModel.from_pretrained(dense, tmp_path)
    uneven = get_peft_model(_packed_and_dense()[0], LoraConfig(**options, rank_pattern={"gate_proj": 2}))
    with pytest.raises(ConfigError, match="alike"):
        unsloth_plugins.apply(uneven)


def test_a_refused_apply_adds_no_adapter(base: GptOssForCausalLM) -> None:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING))
    for options in (dict(experts="grouped_mm"), dict(experts=None)):
        with pytest.raises(UnsupportedError):
            unsloth_plugins.apply(model, **options)
    assert not any("experts" in name and "lora_" in name for name, _ in model.named_parameters())


def test_half_of_a_fused_projection_is_refused(base: GptOssForCausalLM) -> None:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "up_proj"]))
    with pytest.raises(ConfigError, match="up_proj only"):
        unsloth_plugins.apply(model)


@pytest.mark.parametrize(
    "option", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "orthogonal"}]
)
def test_variants_are_refused_on_experts(base: GptOssForCausalLM, option: dict[str, object]) -> None:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING, **option))
    with pytest.raises(UnsupportedError, match=next(iter(option))):
        unsloth_plugins.apply(model)


def test_attention_only_stays_attention_only(base: GptOssForCausalLM) -> None:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=ATTENTION))
    assert "on every linear layer and on no expert" in unsloth_plugins.apply(model).report()
    assert not any("experts" in name and "lora_" in name for name, _ in model.named_parameters())


_NAMED = dict(target_modules=EVERYTHING)
_PARAMETERS = dict(target_modules=ATTENTION, target_parameters=PARAMETERS)
_PATTERNS = dict(rank_pattern={"experts.down_proj": 2}, alpha_pattern={"experts.gate_up_proj": 3})


@pytest.mark.parametrize(
    "options",
    [
        _NAMED | dict(r=4),
        _NAMED | dict(r=12, lora_alpha=7, use_rslora=True),
        _NAMED | dict(r=4) | _PATTERNS,
        _NAMED | dict(r=4, layers_to_transform=[1, 2]),
        _NAMED | dict(r=4, exclude_modules=["down_proj"]),
        _PARAMETERS | dict(r=4),
        _PARAMETERS | dict(r=12, lora_alpha=7, use_rslora=True),
        _PARAMETERS | dict(r=4) | _PATTERNS,
    ],
)
def test_peft_alone_reads_our_files_and_we_read_its(tmp_path: Path, options: dict[str, object]) -> None:
    packed, dense = _packed_and_dense()
    ours = get_peft_model(packed, LoraConfig(**options))
    unsloth_plugins.apply(ours)
    _randomise(ours)
    batch = batch_of(2, 33)
    want = ours.eval()(**batch).logits + 0
    ours.save_pretrained(tmp_path)
    stock = PeftModel.from_pretrained(dense, tmp_path)
    torch.testing.assert_close(stock(**batch).logits, want, rtol=1e-4, atol=1e-4)

    stock.save_pretrained(tmp_path / "stock")
    again = PeftModel.from_pretrained(_packed_and_dense()[0], tmp_path / "stock", is_trainable=True)
    unsloth_plugins.apply(again)
    torch.testing.assert_close(again.eval()(**batch).logits + 0, want, rtol=1e-4, atol=1e-4)
    mine, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, tmp_path / "stock"))
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("size", [dict(num_local_experts=4), dict(intermediate_size=64)])
def test_format_is_not_guessed_from_shapes(tmp_path: Path, size: dict[str, int]) -> None:
    """E = r, and hidden = expert size: every wrong unfolding has the right shape there."""
    packed, dense = _packed_and_dense(**size)
    ours = get_peft_model(packed, LoraConfig(r=4, target_modules=EVERYTHING))
    unsloth_plugins.apply(ours)
    _randomise(ours)
    ours.save_pretrained(tmp_path)
    batch = batch_of(2, 17)
    stock = PeftModel.from_pretrained(dense, tmp_path)
    torch.testing.assert_close(ours.eval()(**batch).logits + 0, stock(**batch).logits, rtol=1e-4, atol=1e-4)


def test_gradients_equal_those_of_peft_on_the_dequantised_model() -> None:
    packed, dense = _packed_and_dense()
    config = dict(r=4, target_modules=ATTENTION, target_parameters=PARAMETERS)
    ours, stock = (get_peft_model(m, LoraConfig(**config)) for m in (packed, dense))
    for model in (ours, stock):
        _randomise(model)
    unsloth_plugins.apply(ours)
    batch = batch_of(3, 40)
    loss, logits, grads = loss_and_grads(ours, **batch)
    want_loss, want_logits, wanted = loss_and_grads(stock, **batch)
    torch.testing.assert_close((loss, logits), (want_loss, want_logits), rtol=1e-4, atol=1e-4)
    assert grads.keys() == wanted.keys() and len(grads) == 48
    for name in grads:
        torch.testing.assert_close(grads[name], wanted[name], rtol=1e-4, atol=1e-5, msg=name)


def test_after_apply_peft_computes_past_the_dense_sum() -> None:
    """On dense experts PEFT's wrapper would build W + BA for all experts; the patched layer never does."""
    _, dense = _packed_and_dense()
    model = get_peft_model(dense, LoraConfig(r=4, target_modules=[], target_parameters=PARAMETERS))
    _randomise(model)
    batch = batch_of(2, 19)
    want = model(**batch).logits
    applied = unsloth_plugins.apply(model)
    wrapper = model.get_base_model().model.layers[0].mlp.experts
    calls = []
    wrapper.get_delta_weight = wrapper.get_delta_factors = lambda *_: calls.append(1)
    torch.testing.assert_close(model(**batch).logits + 0, want, rtol=1e-4, atol=1e-4)
    assert not calls
    del wrapper.get_delta_weight, wrapper.get_delta_factors
    applied.undo()
    assert torch.equal(model(**batch).logits, want)


def test_several_adapters_switch_and_switch_off(base: GptOssForCausalLM) -> None:
    batch = batch_of(2, 15)
    plain = base(**batch).logits
    model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING))
    unsloth_plugins.apply(model)
    model.add_adapter("second", LoraConfig(r=8, target_modules=EVERYTHING))
    unsloth_plugins.apply(model)
    _randomise(model)
    logits = {}
    for name in ("default", "second"):
        model.set_adapter(name)
        logits[name] = model.eval()(**batch).logits + 0
        trainable = [key for key, p in model.named_parameters() if p.requires_grad]
        assert len(trainable) == 48 and all(f".{name}." in key for key in trainable)
    assert (logits["default"] - logits["second"]).abs().max() > 1e-2
    with model.disable_adapter():
        torch.testing.assert_close(model(**batch).logits + 0, plain, rtol=1e-4, atol=1e-4)
    wrapper = model.get_base_model().model.layers[0].mlp.experts
    assert wrapper.parameter_name == "down_proj" and wrapper.base_layer.parameter_name == "gate_up_proj"
    assert not hasattr(wrapper.base_layer.base_layer, "base_layer")


def test_dropout_acts_in_training_only(base: GptOssForCausalLM, tmp_path: Path) -> None:
    model = get_peft_model(
        base, LoraConfig(r=4, lora_dropout=0.5, target_modules=["gate_proj", "up_proj", "down_proj", "q_proj"])
    )
    assert "dropout 0.5 is active" in unsloth_plugins.apply(model).report()
    _randomise(model)
    batch = batch_of(2, 15)
    first, second = (model.train()(**batch).logits + 0 for _ in range(2))
    assert (first - second).abs().max() > 1e-3
    assert torch.equal(model.eval()(**batch).logits + 0, model(**batch).logits + 0)
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["lora_dropout"] == 0
    experts = model.get_base_model().model.layers[0].mlp.experts
    assert experts.lora_dropout["default"].p == 0.5
    model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.manual_seed(5)
    _, _, grads = loss_and_grads(model, **batch)
    model.gradient_checkpointing_disable()
    torch.manual_seed(5)
    _, _, wanted = loss_and_grads(model, **batch)
    assert all(torch.equal(grads[name], wanted[name]) for name in wanted)


def test_adapters_are_not_merged_into_packed_bytes() -> None:
    packed, dense = _packed_and_dense()
    for base, refuses in ((packed, True), (dense, False)):
        model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING))
        unsloth_plugins.apply(model)
        _randomise(model)
        batch = batch_of(2, 15)
        want = model.eval()(**batch).logits + 0
        with pytest.raises(UnsupportedError, match="merge there") if refuses else contextlib.nullcontext():
            model.merge_adapter()
        if not refuses:
            torch.testing.assert_close(model(**batch).logits + 0, want, rtol=1e-4, atol=1e-4)
            model.unmerge_adapter()
            torch.testing.assert_close(model(**batch).logits + 0, want, rtol=1e-4, atol=1e-4)


def test_mixed_adapter_batches_are_refused(base: GptOssForCausalLM) -> None:
    model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING))
    unsloth_plugins.apply(model)
    with pytest.raises(UnsupportedError, match="mix adapters"):
        model.eval()(**batch_of(2, 5), adapter_names=["default", "__base__"])


def test_adapter_weights_follow_the_others_dtype() -> None:
    packed, _ = _packed_and_dense()
    for cast, want in ((True, torch.float32), (False, torch.bfloat16)):
        model = get_peft_model(
            twin(packed).bfloat16(), LoraConfig(r=4, target_modules=EVERYTHING), autocast_adapter_dtype=cast
        )
        unsloth_plugins.apply(model)
        assert {p.dtype for p in model.parameters() if p.requires_grad} == {want}
        _randomise(model)
        loss, _, grads = loss_and_grads(model, **batch_of(2, 9))
        assert loss.isfinite() and all(g.isfinite().all() for g in grads.values())


def test_case_1_fp16_experts_beyond_65504_train_like_float32() -> None:
    """Single experts give numbers that float16 does not hold; the two that every token takes nearly cancel."""
    dense = tiny_gpt_oss()
    peaks = []
    for layer in dense.model.layers:
        with torch.no_grad():
            layer.mlp.router.weight.zero_()
            layer.mlp.router.bias.copy_(torch.tensor([5.0, 5.05, 0.0, 0.0]))
            experts = layer.mlp.experts
            experts.down_proj[0] = torch.randn(96, 64) * 900
            for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj_bias"):
                getattr(experts, name)[1] = getattr(experts, name)[0]
            experts.down_proj[1] = -experts.down_proj[0]
            x = torch.randn(50, 64)
            gate_up = x @ experts.gate_up_proj[0]
            peaks.append((experts._apply_gate(gate_up) @ experts.down_proj[0]).abs().max())
    assert min(peaks) > 65504
    curves = []
    for dtype in (torch.float32, torch.float16):
        base = twin(dense).to(dtype)
        torch.manual_seed(0)
        model = get_peft_model(base, LoraConfig(r=4, target_modules=EVERYTHING))
        unsloth_plugins.apply(model)
        model.train()
        parameters = [p for p in model.parameters() if p.requires_grad]
        assert {p.dtype for p in parameters} == {torch.float32}
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024, enabled=dtype == torch.float16)
        losses = []
        for step in range(100):
            loss = model(**batch_of(2, 12, seed=step % 5)).loss
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            assert loss.isfinite() and norm.isfinite(), step
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            assert step < 10 or scaler.get_scale() >= before
            optimizer.zero_grad()
            losses.append(loss.item())
        curves.append(losses)
    assert curves[1] == pytest.approx(curves[0], rel=0.02)
    assert curves[0][-1] < curves[0][4] - 0.01
