"""The merged model out of the Trainer's callback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from merge_cases import logits, reload, routing_gaps, save_packed, small_tokenizer, tensors
from peft import LoraConfig, get_peft_model
from test_callback import Rows, arguments, lora
from tqdm import tqdm
from transformers import Trainer

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export import live, merge
from unsloth_plugins.core.mxfp4 import load_mxfp4
from unsloth_plugins.hf_trainer import UnslothCallback


def trainer_of(model: Any, folder: Path, callback: UnslothCallback, **options: Any) -> Trainer:
    return Trainer(model, arguments(folder / "run"), train_dataset=Rows([24] * 16), callbacks=[callback], **options)


def test_the_end_of_training_writes_the_merged_model_with_tokenizer_and_licence(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    (base / "LICENSE").write_text("of the base")
    targets = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(load_mxfp4(base, dtype=torch.float32), LoraConfig(r=4, target_modules=targets))
    callback = UnslothCallback(save_merged=tmp_path / "out", merged_dtype="fp32")
    tokenizer = small_tokenizer()
    trainer_of(model, tmp_path, callback, processing_class=tokenizer).train()
    torch.testing.assert_close(logits(reload(tmp_path / "out")), logits(model.eval()), rtol=1e-4, atol=1e-4)
    assert (tmp_path / "out" / "LICENSE").read_text() == "of the base"
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    merge(base, tmp_path / "out-adapter", tmp_path / "again", dtype="fp32")  # the adapter was kept, and fits the base
    once, again = tensors(tmp_path / "out"), tensors(tmp_path / "again")
    assert once.keys() == again.keys() and all(torch.equal(once[name], again[name]) for name in once)
    report = callback.save_merged(tmp_path / "packed", dtype="mxfp4")
    assert report is not None and len(report.requantised) == 8
    # Three small steps change less than 4 bits can tell apart, and that is said.
    assert all((error.error_over_change or 0) > 1 for error in report.requantised.values())
    assert any("In 8 of 8 tensors rounding to 4 bits is larger" in note for note in report.notes)


@pytest.mark.parametrize("quiet", [False, True])
def test_the_merge_at_the_end_shows_its_progress(quiet: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(live, "tqdm", Bar)
    callback = UnslothCallback(save_merged=tmp_path / "out", quiet=quiet)
    trainer_of(lora(tiny_llama()), tmp_path, callback).train()
    assert [bar.n == bar.total > 0 for bar in bars] == ([] if quiet else [True])


def test_what_was_trained_is_in_the_merged_model_of_16_and_of_4_bits(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    start = logits(load_mxfp4(base, dtype=torch.float32))
    model = lora(load_mxfp4(base, dtype=torch.float32), target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"])
    args = arguments(tmp_path / "run", learning_rate=5e-2, max_steps=12)
    callback = UnslothCallback(save_merged=tmp_path / "exact", merged_dtype="fp32")
    Trainer(model, args, train_dataset=Rows([24] * 32), callbacks=[callback]).train()
    want = logits(model.eval())
    moved = (want - start).norm()
    assert moved > 0.5 * start.norm()
    exact = reload(tmp_path / "exact")
    gaps = routing_gaps(exact)
    torch.testing.assert_close(logits(exact), want, rtol=1e-4, atol=1e-4)
    clear = torch.stack(gaps).amin(0) > 0.02  # a nearer choice of experts may fall otherwise after rounding
    assert clear.float().mean() > 0.3
    merge(base, tmp_path / "exact-adapter", tmp_path / "bf16")
    rounded = logits(reload(tmp_path / "bf16"))
    torch.testing.assert_close(rounded.flatten(0, 1)[clear], want.flatten(0, 1)[clear], rtol=2e-2, atol=2e-2)
    assert (rounded - want).norm() < 0.1 * moved
    report = merge(base, tmp_path / "exact-adapter", tmp_path / "mxfp4", dtype="mxfp4")
    packed = logits(load_mxfp4(tmp_path / "mxfp4", dtype=torch.float32))
    assert (packed - want).norm() < 0.5 * moved and (packed - want).norm() < (packed - start).norm()
    assert all(error.relative_error < 0.15 for error in report.requantised.values())
    assert not any("4 bits" in note for note in report.notes)


def test_checkpoints_and_final_folders_know_their_base_by_its_tensors(tmp_path: Path) -> None:
    base, other = (save_packed(tmp_path / name, seed=seed) for name, seed in (("base", 0), ("other", 1)))
    model = get_peft_model(load_mxfp4(base, dtype=torch.float32), LoraConfig(r=4, target_modules=["q_proj"]))
    args = arguments(tmp_path / "run", save_strategy="steps", save_steps=2, max_steps=2)
    trainer = Trainer(model, args, train_dataset=Rows([24] * 16), callbacks=[UnslothCallback()])
    trainer.train()
    trainer.save_model()
    for folder in (tmp_path / "run" / "checkpoint-2", tmp_path / "run"):
        assert "fingerprint" in merge(base, folder, tmp_path / f"{folder.name}-merged").notes[0]
        with pytest.raises(ExportError, match="fingerprint"):
            merge(other, folder, tmp_path / "none")


def test_what_would_prevent_the_merge_stops_before_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "taken-adapter").mkdir()
    for model, options, error, named in (
        (lora(tiny_llama()), dict(save_merged=tmp_path / "there"), ExportError, "does not exist yet"),
        (lora(tiny_llama()), dict(save_merged=tmp_path / "taken"), ExportError, "does not exist yet"),
        (lora(tiny_llama(), use_dora=True), dict(save_merged=tmp_path / "out"), UnsupportedError, "use_dora"),
        (lora(tiny_llama(), lora_bias=True), dict(save_merged=tmp_path / "out"), UnsupportedError, "lora_bias"),
        (lora(tiny_llama()), dict(save_merged=tmp_path / "out", merged_dtype="mxfp4"), UnsupportedError, "gpt_oss"),
        (
            lora(tiny_gpt_oss(intermediate_size=48)),
            dict(save_merged=tmp_path / "out", merged_dtype="mxfp4"),
            UnsupportedError,
            "multiple of 32",
        ),
        (tiny_llama(), dict(save_merged=tmp_path / "out"), ConfigError, "save_pretrained"),
    ):
        trainer = trainer_of(model, tmp_path, UnslothCallback(**options))
        with pytest.raises(error, match=named):
            trainer.train()
        assert trainer.state.global_step == 0
    with pytest.raises(ConfigError, match="trainer.train"):
        UnslothCallback().save_merged(tmp_path / "out")
    assert not (tmp_path / "out").exists()
