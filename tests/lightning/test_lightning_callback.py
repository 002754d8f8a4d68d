"""UnslothCallback under Lightning's own strategies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt_oss, tiny_llama
from fitting import EXPERTS, ROOTS, batches, classes, lora, module_of, root_of, trainer_of
from torch.utils.data import DataLoader

from unsloth_plugins.core import UnslothConfig, applied_to, apply
from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import ConfigError, ConflictError, ModelError, UnsupportedError
from unsloth_plugins.core.planner import live
from unsloth_plugins.lightning import UnslothCallback

pl = root_of("lightning.pytorch")


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_the_callback_gives_the_same_curve(make, late: bool, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    losses = []
    for callbacks in ([], [UnslothCallback(offload_min_bytes=0, gradient_checkpointing=True)]):
        module = module_of(pl, lambda: lora(make()), late)
        trainer = trainer_of(pl, tmp_path, callbacks=callbacks)
        trainer.fit(module, batches())
        losses.append(module.losses)
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
    (applied,) = callbacks[0].applied
    assert applied.store.total_bytes > 0 and trainer.progress_bar_metrics["tokens_per_s"] > 0


class FakeMemory(DeviceMemory):
    """A device of 64 MiB."""

    def is_known(self, device: torch.device) -> bool:
        return True

    def allowed(self, device: torch.device) -> int:
        return 64 << 20


def checkpointed() -> torch.nn.Module:
    model = tiny_llama().bfloat16()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return lora(model)


def unsloth_trainer(folder: Path, way: str) -> Any:
    options = {"strategy": "unsloth"} if way == "strategy" else {"callbacks": [UnslothCallback()]}
    return trainer_of(pl, folder, **options)


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_the_report_says_what_fits_and_what_cannot_is_refused(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(live, "DeviceMemory", FakeMemory)
    with caplog.at_level(logging.INFO):
        unsloth_trainer(tmp_path, way).fit(module_of(pl, checkpointed), batches())
    (report,) = {record.message for record in caplog.records if "tokens a batch fit at the most" in record.message}
    (line,) = [line for line in report.splitlines() if line.startswith("  memory")]
    assert "0.06 GiB" in line and "AdamW" not in line  # the optimizer is there already
    long = DataLoader([batch_of(1, 1 << 21)], batch_size=None)
    with pytest.raises(UnsupportedError, match="2,097,152 tokens to fit in 0.06 GiB"):
        unsloth_trainer(tmp_path, way).fit(module_of(pl, checkpointed), long)


@pytest.mark.parametrize("way", ["strategy", "callback"])
def test_out_of_memory_says_what_to_change(way: str, tmp_path: Path) -> None:
    module, failure = module_of(pl, checkpointed), torch.OutOfMemoryError("full")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure

    module.on_after_backward = fail
    with pytest.raises(torch.OutOfMemoryError) as caught:
        unsloth_trainer(tmp_path, way).fit(module, batches())
    assert caught.value is failure
    (note,) = failure.__notes__
    assert "48 tokens a batch" in note and "8-bit AdamW" in note and "fewer tokens a batch" in note


def test_adapters_on_experts(tmp_path: Path) -> None:
    module = module_of(pl, lambda: lora(tiny_gpt_oss(), EXPERTS))
    trainer = trainer_of(pl, tmp_path, callbacks=[UnslothCallback()])
    trainer.fit(module, batches())
    names = [name for name, p in module.named_parameters() if p.requires_grad and ".experts." in name]
    assert len(names) == 4 * 2 * 2
    assert all(module.get_parameter(name).abs().max() > 0 for name in names)
    with pytest.raises(ConflictError, match="strategy='unsloth'"):
        late = module_of(pl, lambda: lora(tiny_gpt_oss(), EXPERTS), late=True)
        trainer_of(pl, tmp_path, callbacks=[UnslothCallback()]).fit(late, batches())


def test_validate_alone(tmp_path: Path) -> None:
    callback = UnslothCallback(quiet=True)
    trainer_of(pl, tmp_path, callbacks=[callback]).validate(module_of(pl, tiny_llama, True), batches(1), verbose=False)
    assert len(callback.applied) == 1


@pytest.mark.parametrize("name", ["UnslothCallback", "UnslothStrategy", "UnslothFSDPStrategy"])
def test_quiet_is_a_switch(name: str) -> None:
    with pytest.raises(ConfigError, match="`quiet` to be one of True, False; got 'no'"):
        getattr(classes(pl), name)(quiet="no")


def test_refusals(tmp_path: Path) -> None:
    module = module_of(pl, tiny_llama)
    with pytest.raises(ConflictError, match="Remove UnslothCallback"):
        trainer_of(pl, tmp_path, strategy="unsloth", callbacks=[UnslothCallback()]).fit(module, batches())
    with pytest.raises(ConflictError, match="one UnslothCallback; got 2"):
        both = [UnslothCallback(), UnslothCallback(loss=None)]
        trainer_of(pl, tmp_path, callbacks=both).fit(module, batches())
    assert applied_to(module.model) is None
    with pytest.raises(UnsupportedError, match="16-true"):
        trainer_of(pl, tmp_path, precision="16-true", callbacks=[UnslothCallback()]).fit(module, batches())
    with pytest.raises(ConflictError, match="ModelParallelStrategy"):
        trainer = trainer_of(pl, tmp_path)
        trainer.strategy.__class__ = type("X", (type(trainer.strategy),), {})
        sharding = type("ModelParallelStrategy", (), {})
        UnslothCallback().setup(type("T", (), {"strategy": sharding()})(), module, "fit")
    with pytest.raises(ModelError, match="without a submodule"):
        empty = module_of(pl, torch.nn.Identity)
        empty.configure_optimizers = lambda: None
        trainer_of(pl, tmp_path, callbacks=[UnslothCallback()]).fit(empty, batches())
    for wrong, right in (("loss_chunk_mb", "loss_chunk_mib"), ("quite", "quiet")):
        with pytest.raises(ConfigError, match=f"Did you mean `{right}`"):
            UnslothCallback(**{wrong: 1})
    assert classes(pl).UnslothCallback(UnslothConfig(loss=None)).config.loss is None


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp_notebook"])
def test_processes_that_would_lose_adapters_on_experts_are_refused(root: str, strategy: str, tmp_path: Path) -> None:
    pl = root_of(root)

    def setup(strategy: str, stage: str, model: Any) -> bool:
        callback = classes(pl).UnslothCallback(quiet=True)
        callback.setup(trainer_of(pl, tmp_path, strategy=strategy, devices=2), module_of(pl, lambda: model), stage)
        return len(callback.applied) == 1

    model = lora(tiny_gpt_oss(), EXPERTS)
    with pytest.raises(ConflictError, match=r"strategy='ddp'.*apply\(self.model\)"):
        setup(strategy, "fit", model)
    assert applied_to(model) is None
    assert setup("ddp", "fit", lora(tiny_gpt_oss(), EXPERTS))
    assert setup(strategy, "validate", lora(tiny_gpt_oss(), EXPERTS))
    assert setup(strategy, "fit", lora(tiny_gpt_oss()))
    apply(model)
    assert setup(strategy, "fit", model)
