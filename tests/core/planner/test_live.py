"""The planner on models that are there, on a device whose memory the test decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt2, tiny_llama
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, MixtralConfig

from unsloth_plugins.core import Applied, apply
from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.planner import live
from unsloth_plugins.core.planner.memory import adapter_parameters

LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])


class Memory(DeviceMemory):
    """A device of so many MiB."""

    def __init__(self, mib: float = 0) -> None:
        self.mib = mib

    def is_known(self, device: torch.device) -> bool:
        return True

    def allowed(self, device: torch.device) -> int:
        return int(self.mib * 2**20)


def applied_of(model: Any, lora: Any = LORA, **options: Any) -> Applied:
    return apply(get_peft_model(model, lora) if lora else model, **({"gradient_checkpointing": True} | options))


def test_the_setup_is_read_from_the_model() -> None:
    shape, setup = live.setup_of(applied_of(tiny_llama().bfloat16()))
    assert (setup.dtype, setup.lora_rank, setup.lora_targets) == ("bf16", 4, "attention") and shape.layers == 2
    everywhere = LoraConfig(r=8, target_modules="all-linear")
    applied = applied_of(tiny_llama().half(), everywhere)
    shape, setup = live.setup_of(applied)
    assert (setup.dtype, setup.lora_rank, setup.lora_targets) == ("fp16", 8, "all")
    trained = sum(p.numel() for p in applied.model.parameters() if p.requires_grad)
    assert shape.layers * adapter_parameters(shape, setup) == trained


@pytest.mark.parametrize("targets", [["q_proj", "w1", "w2", "w3"], ["q_proj"]])
def test_the_rank_of_experts_whose_gate_and_up_peft_joins(targets: list[str]) -> None:
    config = MixtralConfig(
        **dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=160),
        **dict(num_key_value_heads=2, num_local_experts=4, pad_token_id=0),
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    _, setup = live.setup_of(applied_of(model, LoraConfig(r=4, target_modules=targets)))
    assert (setup.lora_rank, setup.lora_targets) == (4, "all" if len(targets) > 1 else "attention")


@pytest.mark.parametrize(
    ("build", "lora", "options", "word"),
    [
        (lambda: tiny_llama(), LORA, {}, "float32"),
        (lambda: tiny_llama().bfloat16(), None, {}, "in training"),
        (lambda: tiny_llama().bfloat16(), LORA, {"gradient_checkpointing": "auto"}, "gradient checkpointing"),
        (lambda: tiny_gpt2().bfloat16(), LoraConfig(r=4, target_modules=["c_attn"]), {}, "gpt2"),
        (lambda: tiny_llama().bfloat16(), LORA, {"loss": None}, "`loss`"),
    ],
)
def test_what_is_not_described_is_said_and_not_refused(build: Any, lora: Any, options: Any, word: str) -> None:
    applied = applied_of(build(), lora, **options)
    found = live.forecast(applied, 64, memory=Memory(1))
    assert found is not None and found.state == "left alone" and found.fits is None and word in found.detail
    live.check_possible(applied, 1 << 30, Memory(1))


def test_a_forecast_says_whether_it_fits_and_how_much_does() -> None:
    applied = applied_of(tiny_llama().bfloat16())
    fits = live.forecast(applied, 64, optimizer="adamw", memory=Memory(64))
    short = live.forecast(applied, 1 << 20, memory=Memory(64))
    unknown = live.forecast(applied, None, memory=Memory(64))
    assert fits and fits.fits is True and "64 tokens a batch take about" in fits.detail and "AdamW" not in fits.detail
    assert short and short.fits is False and "with AdamW" in short.detail
    assert unknown and unknown.fits is None and "at the most" in unknown.detail
    assert live.forecast(applied, 64) is None  # on a CPU there is nothing to say


def test_the_first_training_forward_is_refused_where_it_cannot_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory(8)
    monkeypatch.setattr(live, "DeviceMemory", lambda: memory)
    applied = applied_of(tiny_llama().bfloat16())
    batch = batch_of(2, 9)
    applied.model.eval()(**batch)
    applied.model.train()
    with pytest.raises(UnsupportedError, match=r"18 tokens to fit in 0.01 GiB.*at the least, of them.*Would fit"):
        applied.model(**batch)
    memory.mib = 64
    applied.model(**batch).loss.backward()
    memory.mib = 8  # no second time: it runs
    applied.model(**batch).loss.backward()


def test_out_of_memory_is_answered_with_what_to_change() -> None:
    applied = applied_of(tiny_llama().bfloat16())
    applied.model.train()(**batch_of(2, 9)).loss.backward()
    error, other = torch.OutOfMemoryError("full"), ValueError("full")
    for each in (error, other):
        live.explain(each, applied)
    assert not hasattr(other, "__notes__")
    (note,) = error.__notes__
    assert "18 tokens" in note and "8-bit AdamW" in note and "the base in nf4" in note and "fewer tokens" in note
    bare, error = applied_of(tiny_llama(), gradient_checkpointing="auto"), torch.OutOfMemoryError("full")
    live.explain(error, bare)
    assert "gradient_checkpointing=True" in error.__notes__[0] and "min_memory" in error.__notes__[0]
