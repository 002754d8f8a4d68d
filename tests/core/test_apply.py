"""apply, report and undo on tiny models of real classes."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from types import MethodType
from typing import Any

import pytest
import torch
from conftest import TINY, batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama, twin
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import MambaConfig, MambaForCausalLM, PreTrainedModel

from unsloth_plugins.core import UnslothConfig, applied_to, apply
from unsloth_plugins.core.errors import ConfigError, ModelError, UnsupportedError
from unsloth_plugins.core.loss import LazyLogits

LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False)


def _state(model: nn.Module) -> dict[str, dict[str, object]]:
    """Every attribute of every module, hooks and config contents included."""
    out = {}
    for name, module in model.named_modules():
        seen = {key: value for key, value in vars(module).items() if not key.startswith("__")}
        for key in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_modules", "_parameters", "_buffers"):
            seen[key] = dict(seen[key])
        if "config" in seen:
            seen["config contents"] = copy.deepcopy(vars(seen["config"]))
        out[name] = seen
    return out


@pytest.mark.parametrize("checkpointing", ["auto", True])
def test_same_loss_logits_and_gradients_as_stock(tiny, checkpointing) -> None:  # type: ignore[no-untyped-def]
    ref = twin(tiny)
    apply(tiny, gradient_checkpointing=checkpointing)
    batch = batch_of(2, 19)
    for want, got in zip(loss_and_grads(ref, **batch), loss_and_grads(tiny, **batch), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_undo_restores_every_attribute_and_bit(tiny) -> None:  # type: ignore[no-untyped-def]
    batch = batch_of(2, 11)
    before, state = loss_and_grads(tiny, **batch), _state(tiny)
    applied = apply(tiny, gradient_checkpointing=True)
    assert _state(tiny) != state  # the comparison can fail
    loss_and_grads(tiny, **batch)
    applied.undo()
    applied.undo()
    assert _state(tiny) == state
    assert applied_to(tiny) is None
    after = loss_and_grads(tiny, **batch)
    assert torch.equal(before[0], after[0]) and torch.equal(before[1], after[1])
    assert before[2].keys() == after[2].keys() and all(torch.equal(before[2][k], after[2][k]) for k in before[2])


def test_applying_twice_changes_nothing_and_other_options_undo_the_first() -> None:
    model = tiny_gpt_oss()
    state = _state(model)
    first = apply(model)
    patched = _state(model)
    assert apply(model) is first and _state(model) == patched
    second = apply(model, loss=None)
    assert second is not first and applied_to(model) is second
    second.undo()
    assert _state(model) == state


def test_only_this_instance_changes_even_with_a_shared_config() -> None:
    config = tiny_gpt_oss().config
    one, two = type(tiny_gpt_oss())(config), type(tiny_gpt_oss())(config)
    state = _state(two)
    apply(one)
    assert _state(two) == state and two.config._attn_implementation == "eager"


def test_config_changes_made_while_applied_survive_undo() -> None:
    model = tiny_gpt_oss()
    original = model.config
    applied = apply(model)
    model.config.use_cache = False
    applied.undo()
    assert model.config is original and original.use_cache is False and original._attn_implementation == "eager"


@pytest.mark.parametrize("wrap", [False, True])
def test_a_patched_model_is_pickled_after_undo_only(tiny: PreTrainedModel, wrap: bool) -> None:
    targets = ["c_attn"] if tiny.config.model_type == "gpt2" else ["q_proj"]
    model = get_peft_model(tiny, LoraConfig(r=2, target_modules=targets)) if wrap else tiny
    batch = batch_of(2, 9)
    wanted = model.eval()(**batch).logits
    applied = apply(model, attention="auto" if "gpt2" in tiny.config.model_type else "eager")
    for save in (pickle.dumps, lambda whole: torch.save(whole, io.BytesIO())):
        with pytest.raises(UnsupportedError, match="applied.undo"):
            save(model)
    model(**batch)  # a refusal leaves it as it was
    applied.undo()
    again = pickle.loads(pickle.dumps(model))
    assert torch.equal(again(**batch).logits, wanted)


@pytest.mark.parametrize(
    ("answer", "wanted"),
    [
        ("cpu: eager", "no kernel: a tensor on cpu"),
        ("cuda: triton and fa4", "no kernel: a tensor on cpu"),  # rank 0's model is not where this one is
        ("cpu: triton and fa4", "since it takes triton and fa4; got a rank that would take eager"),
        ("cpu: triton", "attention backend 'triton' runs; got a tensor on cpu"),
    ],
)
def test_what_another_rank_0_means_for_this_one(answer: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unsloth_plugins.core.models.attention.answer_of_first", lambda question, mine: answer)
    model = tiny_gpt_oss()
    state = _state(model)
    if wanted.startswith("no kernel"):
        assert wanted in apply(model).report()
        return
    with pytest.raises(UnsupportedError, match=wanted):
        apply(model)
    assert _state(model) == state


def test_min_memory_takes_experts_by_groups_where_a_layer_has_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's grouped GEMM can't begin in the middle of the rows, so ours stands in; asked for, it stays."""
    for name, value in (("supports_grouped_mm", True), ("why_no_triton", None)):
        monkeypatch.setattr(f"unsloth_plugins.core.experts.op.{name}", lambda *_, value=value: value)
    model = tiny_gpt_oss()
    few = "triton (float32 on CUDA, a few experts at a time)"
    applied = apply(model, memory_policy="min_memory")
    assert few not in applied.report()  # they fit at once
    applied.undo()
    monkeypatch.setattr("unsloth_plugins.core.models.experts.GROUPS_FROM", 1)
    assert few in apply(model, memory_policy="min_memory").report()
    assert "grouped_mm" in apply(model).report()
    assert "grouped_mm (asked for)" in apply(model, memory_policy="min_memory", experts="grouped_mm").report()


def test_min_memory_takes_our_kernels_in_place_of_sdpa_where_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    assert model.config._attn_implementation == "sdpa"
    assert "no sinks; sdpa stays" in apply(model, memory_policy="min_memory").report()  # no kernel on a CPU
    attention = "unsloth_plugins.core.models.attention"
    monkeypatch.setattr(f"{attention}.why_not_triton", lambda call: None)
    monkeypatch.setattr(f"{attention}.resolve_backend", lambda choice, call: (choice, "a test"))
    assert "no sinks; sdpa stays" in apply(model).report()
    applied = apply(model, memory_policy="min_memory")
    assert "triton sink attention" in applied.report() and "in place of sdpa" in applied.report()
    assert model.config._attn_implementation == "unsloth_sinks"
    applied.undo()
    assert model.config._attn_implementation == "sdpa"
    for chosen in (tiny_llama(attn_implementation="eager"), tiny_llama(attention_dropout=0.1)):
        assert "triton" not in apply(chosen, memory_policy="min_memory").report()


def test_the_chosen_attention_reaches_the_op_of_this_model_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from unsloth_plugins.core.sink_attention import transformers_backend

    chosen, run = [], transformers_backend.sink_attention

    def spy(*args: Any, backend: str, **kwargs: Any) -> Any:
        chosen.append(backend)
        return run(*args, backend=backend, **kwargs)

    monkeypatch.setattr(transformers_backend, "sink_attention", spy)
    one, two = tiny_gpt_oss(), tiny_gpt_oss()
    state = _state(one)
    applied = apply(one, attention="eager")
    assert "eager sink attention (asked for)" in applied.report()
    assert "eager sink attention (no kernel: a tensor on cpu)" in apply(two).report()
    batch = batch_of(1, 5)
    one(**batch)
    two(**batch)
    assert chosen == ["eager"] * 4 + ["auto"] * 4
    applied.undo()
    assert _state(one) == state


def test_report_says_what_was_and_was_not_taken() -> None:
    report = apply(tiny_gpt_oss()).report()
    assert "gpt_oss" in report and "sink attention" in report and "float32" in report
    report = apply(tiny_llama()).report()
    assert "no sinks" in report and "chunked cross entropy" in report
    applied = apply(TINY["gpt2"]())
    assert applied.parts.binding == "generic" and "not recognised" in applied.report()
    assert {row.feature: row.state for row in applied.rows}["loss"] == "on"


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_the_report_speaks_of_the_device_that_the_model_is_on_now(name: str) -> None:
    model = get_peft_model(TINY[name](), LORA)
    applied = apply(model)
    on_cpu = applied.report()
    assert "a tensor on cpu" in on_cpu
    model.to("meta")
    assert applied.report() == on_cpu.replace("a tensor on cpu", "a tensor on meta")
    assert [row.detail for row in applied.rows if "on cpu" in row.detail] == []


def test_a_report_where_what_was_asked_for_cannot_run_says_so_and_the_forward_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As after a move from a GPU to the CPU."""
    model = tiny_gpt_oss()
    with monkeypatch.context() as gpu:
        gpu.setattr("unsloth_plugins.core.experts.op.why_no_triton", lambda *_: None)
        gpu.setattr("unsloth_plugins.core.models.attention.resolve_backend", lambda choice, call: (choice, "a test"))
        applied = apply(model, experts="triton", attention="triton")
        assert "can't run here" not in applied.report()
    report = applied.report()
    for detail in ("dense, triton", "triton sink attention"):
        assert f"{detail} (asked for, and can't run here: a tensor on cpu)" in report
    with pytest.raises(UnsupportedError, match="a tensor on cpu"):
        model(**batch_of(1, 5))


def test_a_plain_module_is_left_alone_and_says_so() -> None:
    applied = apply(nn.Sequential(nn.Linear(2, 2)))
    assert {row.state for row in applied.rows} == {"left alone"}
    applied.undo()


@pytest.mark.parametrize("first", ["peft", "apply"])
def test_before_or_after_peft(first: str) -> None:
    ref = get_peft_model(tiny_gpt_oss(), LORA)
    base = tiny_gpt_oss()
    if first == "apply":
        apply(base)
        model = get_peft_model(base, LORA)
    else:
        model = get_peft_model(base, LORA)
        apply(model)
    model.load_state_dict(ref.state_dict())
    batch = batch_of(2, 13)
    want, got = loss_and_grads(ref, **batch), loss_and_grads(model, **batch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert applied_to(model) is applied_to(base)


@pytest.mark.parametrize("first", ["peft", "apply"])
@pytest.mark.parametrize("how", ["modules_to_save", "lora"])
def test_trained_head_is_not_ignored(first: str, how: str) -> None:
    settings = (
        dict(target_modules=["q_proj"], modules_to_save=["lm_head"])
        if how == "modules_to_save"
        else dict(target_modules=["q_proj", "lm_head"], lora_dropout=0.0)
    )
    config = LoraConfig(r=4, init_lora_weights=False, **settings)
    ref, base = get_peft_model(tiny_llama(), config), tiny_llama()
    if first == "apply":
        apply(base)
    model = get_peft_model(base, config)
    apply(model)
    model.load_state_dict(ref.state_dict())
    batch = batch_of(2, 13)
    want, got = loss_and_grads(ref, **batch), loss_and_grads(model, **batch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert any("lm_head" in name for name in got[2])
    out = model(**batch)
    assert isinstance(out.logits, LazyLogits) and out.logits._real is None  # the chunked path was taken
    applied_to(model).undo()
    torch.testing.assert_close(loss_and_grads(model, **batch), want, rtol=0, atol=0)


def test_logits_are_computed_only_when_read() -> None:
    model, ref = tiny_llama(), tiny_llama()
    apply(model)
    batch = batch_of(2, 9)
    out = model(**batch)
    assert isinstance(out.logits, LazyLogits) and out.logits._real is None
    assert torch.equal(out.logits + 0, ref(**batch).logits)
    assert not isinstance(model(input_ids=batch["input_ids"]).logits, LazyLogits)
    assert inspect.signature(model.forward) == inspect.signature(ref.forward)


def test_training_in_eval_mode_counts_tokens_and_says_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny_llama().eval()
    applied = apply(model, gradient_checkpointing=True)
    batch = batch_of(2, 9)
    with torch.no_grad():
        model(**batch)
    assert applied.tokens_seen == 0 and "eval mode" not in caplog.text
    model(**batch).loss.backward()
    model(**batch).loss.backward()
    assert applied.tokens_seen == 2 * 18 and applied.report().count("eval mode") == 1
    assert caplog.text.count("call train() of it") == 1
    teacher = tiny_llama().eval().requires_grad_(False)
    frozen = apply(teacher, gradient_checkpointing=True)
    teacher(**batch)
    assert frozen.tokens_seen == 0 and "eval mode" not in frozen.report()


@pytest.mark.parametrize("trained", [True, False])
def test_logits_first_read_after_a_step_are_those_of_the_forward_or_an_error(trained: bool) -> None:
    model = tiny_llama().train()
    model.lm_head.requires_grad_(trained)
    apply(model)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    batch = batch_of(2, 9)
    want = model(**batch).logits.detach()
    out, read = model(**batch), model(**batch).logits.detach()
    out.loss.backward()
    optimizer.step()
    assert torch.equal(read, want)
    if trained:
        with pytest.raises(UnsupportedError, match=r"before the optimizer's step.*logits\.detach"):
            out.logits.argmax(-1)
    else:
        assert torch.equal(out.logits.detach(), want)


def test_logits_read_without_gradients_first_still_have_them_later() -> None:
    model = tiny_llama()
    apply(model)
    out = model.train()(**batch_of(2, 7))
    with torch.no_grad():
        assert not out.logits.argmax(-1).requires_grad
        plain = out.logits + 0
    logits = out.logits + 0
    assert logits.requires_grad and torch.equal(logits, plain)


def test_logits_read_outside_autocast_are_those_of_the_model() -> None:
    model = tiny_llama().bfloat16()
    model.lm_head.float()
    apply(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model(**batch_of(2, 7))
        inside = out.logits.detach() + 0
    assert torch.equal(out.logits.detach() + 0, inside) and inside.dtype == torch.bfloat16


def test_a_loss_that_is_not_transformers_own_is_not_claimed() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    batch = {"input_ids": torch.randint(2, 64, (2, 5)), "labels": torch.randint(2, 64, (2, 5))}
    applied = apply(model)
    model(**batch).loss.backward()
    assert "loss                    left alone" in applied.report()
    apply(model, loss="chunked")
    with pytest.raises(UnsupportedError, match="computes one of its own"):
        model(**batch)


def test_undo_reaches_pefts_copies_of_the_head() -> None:
    model = tiny_llama()
    applied = apply(model)
    config = LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])
    peft = get_peft_model(model, config)
    peft(**batch_of(1, 5))
    applied.undo()
    assert not any("_unsloth_head" in vars(module) or "forward" in vars(module) for module in peft.modules())


@pytest.mark.parametrize("implementation", [{"attention_dropout": 0.1}, {"attn_implementation": "flex_attention"}])
def test_sinks_that_are_left_alone_are_warned_about(implementation, caplog) -> None:  # type: ignore[no-untyped-def]
    model = tiny_gpt_oss(**implementation)
    apply(model)
    assert any("left alone" in record.getMessage() and record.levelname == "WARNING" for record in caplog.records)


def test_loss_honours_what_trainers_pass() -> None:
    model, ref = tiny_llama(), tiny_llama()
    apply(model)
    batch = batch_of(2, 9)
    shifted = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:].contiguous()
    for extra in ({"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"shift_labels": shifted}):
        torch.testing.assert_close(model(**batch, **extra).loss, ref(**batch, **extra).loss)
    batch["labels"][:] = -100
    assert model(**batch).loss.item() == 0


@pytest.mark.parametrize("name", ["gpt_oss", "llama"])
def test_a_deep_copy_is_a_patched_model_of_its_own(name: str) -> None:
    model = TINY[name]()
    apply(model, gradient_checkpointing=True)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    ref = TINY[name]()
    ref.load_state_dict(other.state_dict())
    batch = batch_of(2, 9)
    torch.testing.assert_close(loss_and_grads(other, **batch), loss_and_grads(ref, **batch), rtol=1e-5, atol=1e-5)
    applied = applied_to(other)
    assert applied is not applied_to(model) and applied.tokens_seen == 18 and applied_to(model).tokens_seen == 0
    applied.undo()
    assert applied_to(other) is None and applied_to(model) is not None
    torch.testing.assert_close(loss_and_grads(other, **batch), loss_and_grads(ref, **batch), rtol=0, atol=0)


def test_checkpointing_that_the_user_switches_on_later_is_followed() -> None:
    model = tiny_llama()
    applied = apply(model)
    applied.store.min_bytes = 0
    batch = batch_of(2, 9)
    loss_and_grads(model, **batch)
    assert applied.store.total_bytes == 0
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_and_grads(model, **batch)
    assert applied.store.total_bytes == 2 * 2 * 9 * 64 * 4  # two layers, one input each
    assert applied.store.held_bytes == 0


def test_a_step_walks_through_no_modules_and_still_sees_layers_and_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_llama()
    applied = apply(model)
    applied.store.min_bytes = 0
    batch, one = batch_of(2, 9), 2 * 9 * 64 * 4
    loss_and_grads(model, **batch)
    walk, walks = torch.nn.Module.named_modules, []
    monkeypatch.setattr(
        torch.nn.Module, "named_modules", lambda self, *args, **kw: walks.append(1) or walk(self, *args, **kw)
    )
    model.train()
    model(**batch).loss.backward()
    assert not walks
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_and_grads(model, **batch)
    assert applied.store.total_bytes == 2 * one
    model.model.layers.append(tiny_llama(1).model.layers[0])  # one that nobody has seen
    model.model.config.num_hidden_layers = 3
    model.gradient_checkpointing_disable()
    loss_and_grads(model, **batch)
    assert applied.store.total_bytes == 2 * one
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    loss_and_grads(model, **batch)
    assert applied.store.total_bytes == 5 * one
    model.model.layers = torch.nn.ModuleList(list(model.model.layers)[:1])
    loss_and_grads(model, **batch)
    assert applied.store.total_bytes == 6 * one


def test_adapters_added_between_steps_are_found() -> None:
    model = tiny_llama()
    applied = apply(model, gradient_checkpointing=True, lora="fused")
    applied.store.min_bytes = 0
    batch = batch_of(2, 9)
    loss_and_grads(model, **batch)
    peft = get_peft_model(model, LORA)
    loss_and_grads(peft, **batch)
    assert "4 linear layers" in applied.report()
    assert applied.store.total_bytes == 4 * 2 * 9 * 64 * 4


def test_a_checkpoint_function_of_the_trainers_own_stays() -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def own(function, *args):  # type: ignore[no-untyped-def]
        return function(*args)

    for layer in model.model.layers:
        layer._gradient_checkpointing_func = own
    model.model._gradient_checkpointing_func = own
    report = apply(model).report()
    assert "of its own" in report and all(layer._gradient_checkpointing_func is own for layer in model.model.layers)


@pytest.mark.skipif(
    not hasattr(PreTrainedModel, "activation_checkpointing_enable"), reason="this transformers does not offload"
)
def test_transformers_own_offloading_stays_and_the_report_names_ours() -> None:
    model = tiny_llama()
    applied = apply(model, memory_policy="offload_all")
    model.activation_checkpointing_enable(offload=True)
    theirs = [layer._gradient_checkpointing_func for layer in model.model.layers]
    assert "offload=True" in applied.report() and "memory_policy" in applied.report()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == theirs
    model.activation_checkpointing_enable()
    assert "offload=True" not in applied.report() and "non-reentrant" in applied.report()
    applied.undo()


@pytest.mark.skipif(
    "every_n_layers" not in inspect.signature(PreTrainedModel._set_gradient_checkpointing).parameters,
    reason="this transformers checkpoints all layers or none",
)
def test_layers_that_the_user_leaves_out_run_without_a_checkpoint() -> None:
    model, batch = tiny_llama(), batch_of(2, 9)
    want = loss_and_grads(model, **batch)
    applied = apply(model, offload_min_bytes=0)
    model.activation_checkpointing_enable(every_n_layers=2)
    got = loss_and_grads(model, **batch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert [layer.gradient_checkpointing for layer in model.model.layers] == [True, False]
    assert applied.store.layers == 1 and applied.store.total_bytes == 2 * 9 * 64 * 4


def test_case_3_adapters_get_the_gradients_of_the_run_without_checkpointing() -> None:
    batch = batch_of(2, 13)
    grads = []
    for checkpointing in (False, True):
        model = get_peft_model(tiny_gpt_oss(), LORA)
        applied = apply(model, gradient_checkpointing=checkpointing)
        calls: list[int] = []
        for layer in applied.parts.decoder.layers:
            layer.self_attn.q_proj.register_forward_hook(lambda *_, seen=calls: seen.append(1))
        grads.append(loss_and_grads(model, **batch)[2])
        assert len(calls) == 4 * (1 + checkpointing)
    assert all(g.any() for g in grads[0].values()) and len(grads[0]) == 16
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_case_36_train_and_eval_agree_with_stock(dtype: torch.dtype) -> None:
    """Gate and up are pushed past the clamp in both signs; B = 3."""
    truth_model, ref = tiny_gpt_oss(), tiny_gpt_oss()
    for model in (truth_model, ref):
        for layer in model.model.layers:
            layer.mlp.experts.gate_up_proj.data.mul_(8)
    ours = twin(ref).to(dtype)
    ref = ref.to(dtype)
    applied = apply(ours)
    batch = batch_of(3, 17)
    seen = []
    gate = truth_model.model.layers[0].mlp.experts
    router = truth_model.model.layers[0].mlp.router
    router.register_forward_hook(lambda m, a, o: seen.append(a[0] @ gate.gate_up_proj[0]))
    with torch.no_grad():
        truth = truth_model(**batch).logits
        assert all((side > 7).any() and (side < -7).any() for side in (seen[0][..., ::2], seen[0][..., 1::2]))
        for train in (True, False):
            got, want = ours.train(train)(**batch).logits + 0, ref.train(train)(**batch).logits
            if dtype == torch.float32:
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
            else:
                # Another expert for a near-tie moves single tokens in stock bf16 too, so compare the median token.
                error = [(x.float() - truth).norm(dim=-1).median() for x in (got, want)]
                assert error[0] <= 1.2 * error[1]
    assert applied.rows[1].state == "on"


class TestErrors:
    def test_misspelt_option(self) -> None:
        with pytest.raises(ConfigError, match="gradient_checkpointing"):
            UnslothConfig.from_options(gradient_checkpoint=True)

    @pytest.mark.parametrize(
        "options",
        [
            {"attention": "fast"},
            {"loss_chunk_mib": 0},
            {"gradient_checkpointing": 1},
            {"memory_policy": "yes"},
            {"host_memory_gib": 0},
        ],
    )
    def test_wrong_value(self, options: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match=next(iter(options))):
            UnslothConfig(**options)  # type: ignore[arg-type]

    def test_not_a_module(self) -> None:
        with pytest.raises(ModelError, match="str"):
            apply("openai/gpt-oss-20b")  # type: ignore[arg-type]

    def test_explicit_choice_that_cannot_run_changes_nothing(self) -> None:
        model = tiny_gpt_oss()
        state = _state(model)
        with pytest.raises(UnsupportedError, match="grouped_mm"):
            apply(model, experts="grouped_mm")
        assert _state(model) == state
        with pytest.raises(UnsupportedError, match="attention"):
            apply(TINY["gpt2"](), attention="eager")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels could run")
    def test_attention_kernels_without_a_device_for_them(self) -> None:
        model = tiny_gpt_oss()
        state = _state(model)
        with pytest.raises(UnsupportedError, match="triton.*cpu"):
            apply(model, attention="triton")
        assert _state(model) == state

    @pytest.mark.skipif(not hasattr(PreTrainedModel, "reset_kernels"), reason="this transformers can't switch them off")
    def test_kernels_from_the_hub_that_nothing_of_ours_replaces_stay(self) -> None:
        config = MambaConfig(hidden_size=16, state_size=4, num_hidden_layers=2, vocab_size=32)
        model = MambaForCausalLM(config).train()
        model.use_kernels = True
        calls = []
        layer = next(each for each in model.modules() if vars(each).get("_kernel_funcs"))
        name, function = next(iter(layer._kernel_funcs.items()))  # on a CPU all of them fall back: this one stands in
        plain = function.forward
        function.forward = MethodType(lambda self, *args, **kw: (calls.append(name), plain(*args, **kw))[1], function)
        applied = apply(model)
        assert "; 1 of what apply does not replace stay" in applied.report()
        model.eval().train()(input_ids=torch.tensor([[1, 2, 3]]))
        assert calls and not model.use_kernels
        applied.undo()
        assert model.use_kernels

    def test_attention_dropout(self) -> None:
        model = tiny_gpt_oss(attention_dropout=0.1)
        assert "dropout" in apply(model).report()
        with pytest.raises(UnsupportedError, match="dropout"):
            apply(model, attention="eager")

    def test_kernels_from_the_hub_that_stay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(PreTrainedModel, "reset_kernels", raising=False)
        model = tiny_llama()
        model._use_kernels = True
        with pytest.raises(ModelError, match="use_kernels"):
            apply(model)

    @pytest.mark.skipif(not hasattr(PreTrainedModel, "reset_kernels"), reason="this transformers can't switch them off")
    @pytest.mark.parametrize("wrapped", [False, True])
    def test_kernels_from_the_hub_are_off_until_undo(self, wrapped: bool) -> None:
        model = tiny_llama().train()
        model.use_kernels = True
        before = {name: module.forward for name, module in model.named_modules()}
        applied = apply(nn.ModuleDict({"inner": model}) if wrapped else model)
        assert not model.use_kernels and "Hub kernels" in applied.report()
        ours = {name: module.forward for name, module in model.named_modules()}
        assert ours != before
        for mode in (False, True):
            assert {name: module.forward for name, module in model.train(mode).named_modules()} == ours
        applied.undo()
        assert model.use_kernels
        assert {name: module.forward for name, module in model.named_modules()} == before
