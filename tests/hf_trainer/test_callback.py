"""UnslothCallback in the real Trainer, on tiny models, against the Trainer alone."""

from __future__ import annotations

import functools
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments, set_seed

from unsloth_plugins.core import applied_to
from unsloth_plugins.core.errors import ConfigError, ConflictError
from unsloth_plugins.core.loss import LazyLogits
from unsloth_plugins.core.models import causal_lm, streaming
from unsloth_plugins.core.mxfp4 import pack_experts
from unsloth_plugins.core.offload.weights import WeightStream
from unsloth_plugins.hf_trainer import UnslothCallback, prepare_model

LORA = dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])


class Rows(Dataset):
    """Random rows of which the first ``lengths[i]`` tokens carry labels."""

    def __init__(self, lengths: list[int], width: int = 24, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = []
        for length in lengths:
            ids = torch.randint(2, 160, (width,), generator=generator)
            self.rows.append({"input_ids": ids, "labels": ids.where(torch.arange(width) < length, -100)})

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    settings = dict(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        per_device_train_batch_size=2,
        max_steps=3,
        logging_steps=1,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_strategy="no",
        disable_tqdm=True,
        seed=1,
        max_grad_norm=1e9,
    )
    return TrainingArguments(**(settings | options))


def lora(base: torch.nn.Module, **options: Any) -> PeftModel:
    set_seed(3)
    return get_peft_model(base, LoraConfig(**(LORA | options)))


def run(model: torch.nn.Module, folder: Path, ours: bool, rows: Dataset | None = None, **options: Any) -> Trainer:
    callbacks = [UnslothCallback(offload_min_bytes=0)] if ours else []
    trainer = Trainer(model, arguments(folder, **options), train_dataset=rows or Rows([24] * 16), callbacks=callbacks)
    trainer.train()
    return trainer


def curve(trainer: Trainer, key: str = "loss") -> list[float]:
    return [log[key] for log in trainer.state.log_history if key in log]


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_callback_alone_is_enough_and_gives_the_same_curve(make, checkpointing, tmp_path) -> None:  # type: ignore[no-untyped-def]
    options = {"gradient_checkpointing": checkpointing}
    stock, ours = (run(lora(make()), tmp_path, flag, **options) for flag in (False, True))
    assert curve(ours) == pytest.approx(curve(stock), abs=2e-5)
    assert curve(ours, "grad_norm") == pytest.approx(curve(stock, "grad_norm"), rel=1e-4)
    assert applied_to(ours.model) is not None and applied_to(stock.model) is None
    assert all(value > 0 for key in ("tokens_per_s", "peak_memory_gib") for value in curve(ours, key))
    held = applied_to(ours.model).store
    assert (held.total_bytes > 0) == checkpointing and held.held_bytes == 0


def test_case_3_checkpointing_without_kwargs_trains_every_adapter(tmp_path: Path) -> None:
    model = lora(tiny_gpt_oss())
    assert model.config.use_cache
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    run(model, tmp_path, True, gradient_checkpointing=True)
    assert len(before) == 16
    assert all(not torch.equal(p, before[n]) for n, p in model.named_parameters() if n in before)


def test_case_3_off_everywhere_runs_each_layer_once_a_step(tmp_path: Path) -> None:
    model, calls = lora(tiny_gpt_oss()), []
    for layer in model.get_base_model().model.layers:
        layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(1))
    run(model, tmp_path, True)
    assert len(calls) == 3 * 4


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_case_15_accumulation_weighs_tokens_not_batches(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    rows = Rows([3, 50, 7, 120], width=120)
    results = []
    for batch, accumulate in ((4, 1), (1, 4)):
        model = lora(make())
        trainer = run(
            model,
            tmp_path,
            True,
            rows,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=accumulate,
            max_steps=1,
            optim="sgd",
        )
        results.append((curve(trainer), {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}))
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)
    torch.testing.assert_close(results[0][1], results[1][1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_case_17_resume_continues_bit_equal(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """LoRA with trained embedding and head, dropout on, a save in the middle, everything built anew."""
    extra = dict(modules_to_save=["embed_tokens", "lm_head"], lora_dropout=0.3)
    options = dict(save_strategy="steps", save_steps=3, max_steps=6, gradient_checkpointing=True)
    whole = run(lora(make(), **extra), tmp_path / "whole", True, **options)
    run(lora(make(), **extra), tmp_path / "half", True, **(options | {"max_steps": 3}))
    model = lora(make(), **extra)
    trainer = Trainer(
        model,
        arguments(tmp_path / "half", **options),
        train_dataset=Rows([24] * 16),
        callbacks=[UnslothCallback(offload_min_bytes=0)],
    )
    trainer.train(resume_from_checkpoint=True)
    assert curve(trainer) == curve(whole)
    wanted = dict(whole.model.named_parameters())
    assert all(torch.equal(p, wanted[name]) for name, p in model.named_parameters())
    for got, want in zip(
        trainer.optimizer.state_dict()["state"].values(), whole.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(torch.as_tensor(got[k]), torch.as_tensor(want[k])) for k in want)
    assert sum(name.endswith("lora_A.default.weight") for name in wanted) == 2 * model.config.num_hidden_layers


def test_evaluation_with_and_without_metrics(tmp_path: Path) -> None:
    seen = {}

    def metrics(prediction) -> dict[str, float]:  # type: ignore[no-untyped-def]
        seen["shape"] = prediction.predictions.shape
        seen["logits"] = torch.as_tensor(prediction.predictions)
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    results = []
    for ours in (False, True):
        trainer = Trainer(
            tiny_llama(),
            arguments(tmp_path),
            eval_dataset=Rows([24] * 3),
            compute_metrics=metrics,
            callbacks=[UnslothCallback()] if ours else [],
        )
        results.append((trainer.evaluate(), seen.pop("logits")))
    assert seen["shape"] == (3, 24, 160)
    torch.testing.assert_close(results[0][1], results[1][1])
    assert results[0][0]["eval_loss"] == pytest.approx(results[1][0]["eval_loss"], abs=1e-5)
    assert results[0][0]["eval_accuracy"] == results[1][0]["eval_accuracy"]
    trainer = Trainer(tiny_llama(), arguments(tmp_path), eval_dataset=Rows([24] * 3), callbacks=[UnslothCallback()])
    assert math.isfinite(trainer.evaluate()["eval_loss"])


def test_load_best_model_at_end(tmp_path: Path) -> None:
    trainer = Trainer(
        lora(tiny_llama()),
        arguments(
            tmp_path,
            max_steps=4,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="steps",
            save_steps=1,
            load_best_model_at_end=True,
            learning_rate=0.5,
        ),
        train_dataset=Rows([24] * 16),
        eval_dataset=Rows([24] * 4, seed=5),
        callbacks=[UnslothCallback()],
    )
    trainer.train()
    best = min(log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
@pytest.mark.parametrize("head", [{}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "lm_head"]}])
def test_label_smoothing_never_computes_all_logits(make, head, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """In training, with micro-batches of unlike numbers of labels, and in evaluation."""
    rows = Rows([3, 24, 7, 20] * 4)
    options = dict(label_smoothing_factor=0.1, per_device_train_batch_size=1, gradient_accumulation_steps=2)
    more = dict(eval_strategy="steps", eval_steps=2, prediction_loss_only=True)
    trainers = []
    for ours in (False, True):
        if ours:
            monkeypatch.setattr(LazyLogits, "materialize", lambda _: pytest.fail("all logits were computed"))
        callbacks = [UnslothCallback()] if ours else []
        trainer = Trainer(
            lora(make(), **head),
            arguments(tmp_path, **options, **more),
            train_dataset=rows,
            eval_dataset=rows,
            callbacks=callbacks,
        )
        trainer.train()
        trainers.append(trainer)
    for key in ("loss", "eval_loss"):
        assert curve(trainers[1], key) == pytest.approx(curve(trainers[0], key), abs=2e-5)
    assert curve(trainers[1], "grad_norm") == pytest.approx(curve(trainers[0], "grad_norm"), rel=1e-4)
    report = trainers[1].callback_handler.callbacks[1].applied.report()
    assert "chunked cross entropy" in report and "the trainer's, on chunks of the logits" in report


@pytest.mark.parametrize("why", ["the loss is not chunked", "DDP and FSDP look in the model's output"])
def test_label_smoothing_on_all_logits_is_said(why: str, tmp_path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    callback = UnslothCallback(loss=None if "chunked" in why else "auto")
    if "DDP" in why:
        monkeypatch.setattr(causal_lm, "is_distributed", lambda: True)
    Trainer(lora(tiny_llama()), arguments(tmp_path, label_smoothing_factor=0.1), callbacks=[callback])
    assert [record.message for record in caplog.records if why in record.message] and why in callback.applied.report()


def test_the_next_trainer_without_label_smoothing_gets_plain_logits(tmp_path: Path) -> None:
    model = lora(tiny_llama())
    for factor in (0.1, 0.0):
        Trainer(model, arguments(tmp_path, label_smoothing_factor=factor), callbacks=[UnslothCallback()])
        logits = model(input_ids=torch.ones(1, 4, dtype=torch.int64)).logits
        assert isinstance(logits, LazyLogits) == bool(factor)
    assert "smoothing" not in applied_to(model).report()


def test_custom_losses_get_real_logits(tmp_path: Path) -> None:
    def custom(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    losses = []
    for callbacks in ([], [UnslothCallback()]):
        trainer = Trainer(
            lora(tiny_llama()),
            arguments(tmp_path, label_smoothing_factor=0.1),
            train_dataset=Rows([24] * 16),
            callbacks=callbacks,
            compute_loss_func=custom,
        )
        trainer.train()
        losses.append(curve(trainer))
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)


def test_bf16_mixed_precision(tmp_path: Path) -> None:
    stock, ours = (run(lora(tiny_llama()), tmp_path, flag, bf16=True) for flag in (False, True))
    assert curve(ours) == pytest.approx(curve(stock), rel=5e-3)


def test_prepare_model_keeps_its_options(tmp_path: Path) -> None:
    model = prepare_model(lora(tiny_llama()), loss=None)
    applied = applied_to(model)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Rows([24] * 8), callbacks=[UnslothCallback()])
    trainer.train()
    assert applied_to(model) is applied and applied.config.loss is None


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"torch_compile": True}, "torch_compile"),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, "fsdp version 1"),
        ({"deepspeed": {"zero_optimization": {"stage": 3}}}, "deepspeed"),
        ({"activation_offloading": True}, "activation_offloading"),
        (
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
            "use_reentrant",
        ),
    ],
)
def test_conflicts_are_refused_before_anything_changes(options, word, tmp_path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    import transformers.trainer

    monkeypatch.setattr(transformers.trainer, "is_liger_kernel_available", lambda: True, raising=False)
    model, args = lora(tiny_llama()), arguments(tmp_path)
    for name, value in options.items():
        setattr(args, name, value)
        setattr(args, name.replace("gradient_checkpointing", "activation_checkpointing"), value)
    with pytest.raises(ConflictError, match=word):
        UnslothCallback().on_init_end(args, None, None, model=model)  # type: ignore[arg-type]
    assert applied_to(model) is None


def test_fsdp_asked_for_by_accelerates_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, args = lora(tiny_llama()), arguments(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "1")
    with pytest.raises(ConflictError, match=r"ACCELERATE_USE_FSDP in the environment\. Set .*fsdp_version: 2"):
        UnslothCallback().on_init_end(args, None, None, model=model)  # type: ignore[arg-type]
    monkeypatch.setenv("FSDP_VERSION", "2")
    UnslothCallback().on_init_end(args, None, None, model=model)  # type: ignore[arg-type]
    assert applied_to(model) is not None


def test_another_trainer_with_other_options_after_mixed_precision(tmp_path: Path) -> None:
    """accelerate leaves its autocast wrapper around the patched forward, and undo leaves it to accelerate."""
    model = lora(tiny_llama())
    run(model, tmp_path, True, bf16=True)
    callback = UnslothCallback(memory_policy="on_device", loss_chunk_mib=8)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Rows([24] * 8), callbacks=[callback])
    trainer.train()
    assert len(curve(trainer)) == 3 and "chunked cross entropy, at most 8 MiB" in callback.applied.report()


def test_speed_counts_training_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: a batch of two rows of 24 tokens takes a second, evaluation a thousand."""
    now = 0.0
    monkeypatch.setattr("unsloth_plugins.core.meter.time", SimpleNamespace(perf_counter=lambda: now))

    class TimedRows(Rows):
        seconds = 0.5

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            nonlocal now
            now += self.seconds
            return super().__getitem__(index)

    class SlowRows(TimedRows):
        seconds = 250.0

    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=1)
    trainer = Trainer(
        lora(tiny_llama()), args, None, TimedRows([24] * 16), SlowRows([24] * 4), callbacks=[UnslothCallback()]
    )
    trainer.train()
    speeds = curve(trainer, "tokens_per_s")
    assert speeds == [24, 48, 48]  # one batch is loaded ahead, in the first step


def test_a_prepared_models_own_options_decide_about_conflicts(tmp_path: Path) -> None:
    model = prepare_model(lora(tiny_llama()), gradient_checkpointing=False)
    args = arguments(tmp_path, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": True})
    UnslothCallback().on_init_end(args, None, None, model=model)  # type: ignore[arg-type]


def test_experts_asked_for_between_building_and_training_are_refused(tmp_path: Path) -> None:
    """The adapter of a prepared model is completed when the trainer is built; later its optimizer would not know it."""
    everything = dict(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    model = prepare_model(tiny_gpt_oss())
    model = lora(model, **everything)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Rows([24] * 8), callbacks=[UnslothCallback()])
    assert sum("experts" in name and "lora_" in name for name, _ in model.named_parameters()) == 16
    model.add_adapter("second", LoraConfig(r=2, **everything))
    with pytest.raises(ConflictError, match="Add adapters before the trainer"):
        trainer.train()


@pytest.mark.parametrize("late", ["callback", "model"])
def test_expert_lora_that_would_come_after_the_optimizer_is_refused(late: str, tmp_path: Path) -> None:
    def make() -> PeftModel:
        return lora(tiny_gpt_oss(), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])

    given: dict[str, Any] = dict(args=arguments(tmp_path), train_dataset=Rows([24] * 8))
    if late == "callback":
        trainer = Trainer(make(), **given)
        trainer.add_callback(UnslothCallback())
    else:
        trainer = Trainer(model_init=make, callbacks=[UnslothCallback()], **given)
    with pytest.raises(ConflictError, match="in model_init too"):
        trainer.train()


@pytest.mark.parametrize("applied_first", [False, True])
def test_an_optimizer_that_the_trainer_is_given_knows_the_experts_or_is_refused(
    applied_first: bool, tmp_path: Path
) -> None:
    model: Any = lora(tiny_gpt_oss(), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    model = prepare_model(model) if applied_first else model
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    trainer = Trainer(
        model,
        arguments(tmp_path),
        train_dataset=Rows([24] * 8),
        callbacks=[UnslothCallback()],
        optimizers=(optimizer, None),  # type: ignore[arg-type]
    )
    if not applied_first:
        with pytest.raises(ConflictError, match="before making the optimizer"):
            trainer.train()
        return
    trainer.train()
    trained = [p for name, p in model.named_parameters() if "experts" in name and "lora_B" in name]
    assert len(trained) == 8 and all(p.any() for p in trained)


def test_apply_in_model_init_trains_experts(tmp_path: Path) -> None:
    def make() -> PeftModel:
        return prepare_model(lora(tiny_gpt_oss(), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]))

    trainer = Trainer(
        model_init=make, args=arguments(tmp_path), train_dataset=Rows([24] * 8), callbacks=[UnslothCallback()]
    )
    trainer.train()
    trained = [p for name, p in trainer.model.named_parameters() if "experts" in name and "lora_B" in name]
    assert len(trained) == 8 and all(p.any() for p in trained)


def test_a_second_callback_is_refused_and_a_second_trainer_is_not(tmp_path: Path) -> None:
    model, rows = lora(tiny_llama()), Rows([24] * 8)
    for callbacks in ([UnslothCallback()], [UnslothCallback(loss=None)]):
        Trainer(model, arguments(tmp_path), train_dataset=rows, callbacks=callbacks).train()
    trainer = Trainer(
        model, arguments(tmp_path), train_dataset=rows, callbacks=[UnslothCallback(), UnslothCallback(loss=None)]
    )
    with pytest.raises(ConflictError, match="one UnslothCallback in a trainer"):
        trainer.train()


def test_a_merged_dtype_that_nobody_knows_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="'bf17'"):
        UnslothCallback(merged_dtype="bf17")


def test_a_launcher_that_compiles_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(ConflictError, match="dynamo_backend"):
        UnslothCallback().on_init_end(arguments(tmp_path), None, None, model=lora(tiny_llama()))  # type: ignore[arg-type]


def test_several_gpus_in_one_process_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args._n_gpu = 2
    with pytest.raises(ConflictError, match="torchrun"):
        UnslothCallback().on_init_end(args, None, None, model=lora(tiny_llama()))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "right"), [("loss_chunk_mb", "loss_chunk_mib"), ("quite", "quiet"), ("save_merge", "save_merged")]
)
def test_misspelt_option_names_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean `{right}`"):
        UnslothCallback(**{wrong: 1})


@pytest.mark.parametrize("wrong", [{"quiet": "no"}, {"quiet": 1}, {"save_merged": True}])
def test_options_of_the_callback_of_a_wrong_type_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"`{next(iter(wrong))}` to be .* got .*{next(iter(wrong.values()))}"):
        UnslothCallback(**wrong)


def test_streamed_experts_train_and_resume_like_resident_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copied at once on the CPU, which stands for a device; the Trainer moves the model there and saves it."""
    monkeypatch.setattr(streaming, "WeightStream", functools.partial(WeightStream, everywhere=True))
    experts = dict(target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    curves = []
    for weights in ("resident", "streamed", "streamed, resumed"):
        model = lora(pack_experts(tiny_gpt_oss()), **experts)
        callback = UnslothCallback(weights=weights.split(",")[0], gradient_checkpointing=True)
        folder = tmp_path / weights.split(",")[0]
        args = arguments(folder, max_steps=6, save_strategy="steps", save_steps=3)
        trainer = Trainer(model, args, train_dataset=Rows([20] * 12), callbacks=[callback])
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if "resumed" in weights else None)
        curves.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
        stream = callback.applied.stream
        assert (stream is None) == (weights == "resident")
        assert stream is None or (stream.sent_bytes > stream.host_bytes > 0)
    assert curves[0] == curves[1] == curves[2] and len(curves[0]) == 6
