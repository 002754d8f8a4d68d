"""What the callback prints, and where its measurements go."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from test_callback import Rows, arguments, lora
from transformers import Trainer
from transformers.trainer_callback import DefaultFlowCallback, TrainerCallback

from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.planner import live
from unsloth_plugins.hf_trainer import UnslothCallback, explain_out_of_memory, report_first

MEASURED = {"tokens_per_s", "peak_memory_gib", "host_gib", "sent_gib", "exposed_copy_ms"}


class Integration(TrainerCallback):
    """Stands where the trainer puts wandb and others: ahead of a user's callbacks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


def built(folder: Path, callback: UnslothCallback) -> tuple[Trainer, Integration]:
    rows = Rows([24] * 16)
    trainer = Trainer(lora(tiny_llama()), arguments(folder), train_dataset=rows, callbacks=[callback])
    integration = Integration()
    trainer.callback_handler.callbacks.insert(1, integration)
    return trainer, integration


def test_a_table_at_the_start_and_a_line_at_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer, _ = built(tmp_path, UnslothCallback())
    trainer.train()
    printed = capsys.readouterr().out
    assert printed.count("unsloth-plugins on LlamaForCausalLM") == 1
    (line,) = [line for line in printed.splitlines() if line.startswith("unsloth-plugins: ")]
    tokens, seconds, speed = re.match(r".*: (\S+) tokens in (\S+) s of training; (\S+) tokens/s; host", line).groups()  # type: ignore[union-attr]
    assert tokens == "144" and float(seconds) > 0 and float(speed.replace(",", "")) > 0


def test_quiet_and_other_ranks_print_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built(tmp_path, UnslothCallback(quiet=True))[0].train()
    trainer, _ = built(tmp_path, UnslothCallback())
    trainer.state.is_world_process_zero = False
    trainer.is_world_process_zero = lambda: False  # type: ignore[method-assign]
    trainer.train()
    assert "unsloth-plugins" not in capsys.readouterr().out


class FakeMemory(DeviceMemory):
    """A device of 64 MiB."""

    def is_known(self, device: torch.device) -> bool:
        return True

    def allowed(self, device: torch.device) -> int:
        return 64 << 20


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "DeviceMemory", FakeMemory)


@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor"])
def test_the_report_says_what_fits(
    optim: str, small_device: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = arguments(tmp_path, gradient_checkpointing=True, optim=optim)
    model = lora(tiny_llama().bfloat16())
    Trainer(model, settings, train_dataset=Rows([24] * 16), callbacks=[UnslothCallback()]).train()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  memory")]
    assert re.search(r"about [\d,]+ tokens a batch fit at the most", line) and "0.06 GiB" in line
    assert ("with AdamW" in line) is (optim == "adafactor")


def test_a_batch_that_cannot_fit_is_refused_before_its_forward(small_device: None, tmp_path: Path) -> None:
    rows = Rows([24] * 2, width=1 << 20)
    model = lora(tiny_llama().bfloat16())
    settings = arguments(tmp_path, gradient_checkpointing=True)
    trainer = Trainer(model, settings, train_dataset=rows, callbacks=[UnslothCallback(quiet=True)])
    with pytest.raises(UnsupportedError, match="2,097,152 tokens to fit in 0.06 GiB"):
        trainer.train()


def test_out_of_memory_in_a_step_says_what_to_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, _ = built(tmp_path, UnslothCallback(quiet=True))
    explain_out_of_memory(trainer)
    explain_out_of_memory(trainer)  # harmless
    failure = torch.OutOfMemoryError("full")

    def fail(*args: Any, **kwargs: Any) -> None:
        raise failure

    monkeypatch.setattr(trainer.accelerator, "backward", fail)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.train()
    (note,) = failure.__notes__
    assert caught.value is failure and "48 tokens a batch" in note


def test_report_first_reaches_the_integrations(tmp_path: Path) -> None:
    trainer, integration = built(tmp_path, UnslothCallback(quiet=True))
    trainer.train()
    assert not any(MEASURED & log.keys() for log in integration.seen)
    trainer, integration = built(tmp_path, UnslothCallback(quiet=True))
    for _ in range(2):
        report_first(trainer)
    kinds = [type(callback) for callback in trainer.callback_handler.callbacks]
    assert kinds[:3] == [DefaultFlowCallback, UnslothCallback, Integration] and kinds.count(UnslothCallback) == 1
    trainer.train()
    logs = [log for log in integration.seen if "loss" in log]
    assert len(logs) == 3 and all(log.keys() >= MEASURED for log in logs)
    assert [log["tokens_per_s"] for log in logs] == [
        log["tokens_per_s"] for log in trainer.state.log_history if "loss" in log
    ]
