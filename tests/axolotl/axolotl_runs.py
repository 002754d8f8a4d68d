"""A folder with a tiny model, tokenizer and data, and Axolotl's command line on it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

# Axolotl's telemetry waits for a network; it reads its switch when it is imported.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", AXOLOTL_DO_NOT_TRACK="1")
PLUGIN = "unsloth_plugins.axolotl.UnslothPlugin"

if importlib.util.find_spec("axolotl.integrations") is None:
    pytest.skip("axolotl is not installed: `make test-axolotl`", allow_module_level=True)


def write_assets(folder: Path, model: Any) -> None:
    """The model, a tokenizer of letters and 48 short lines of text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder / "model")
    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {chr(97 + i): 3 + i for i in range(26)}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(folder / "model")
    text = "the quick brown fox jumps over the lazy dog and runs away"
    rows = [{"text": text[i % 7 : 20 + 3 * (i % 11)]} for i in range(48)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_adapter(folder: Path, model: Any, targets: list[str], **options: Any) -> str:
    """A fresh LoRA adapter on disk. Axolotl does not seed the one that it makes, so runs could not be compared."""
    from peft import LoraConfig, get_peft_model
    from transformers import set_seed

    from unsloth_plugins.core import apply

    set_seed(3)
    adapted = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options))
    apply(adapted)  # adds adapters on experts
    adapted.save_pretrained(folder / "adapter")
    return str(folder / "adapter")


def config(folder: Path, **options: Any) -> dict[str, Any]:
    """The smallest config that trains on a CPU, with our plugin. ``None`` removes a key."""
    settings: dict[str, Any] = dict(
        base_model=str(folder / "model"),
        tokenizer_type="AutoTokenizer",
        plugins=[PLUGIN],
        datasets=[{"path": str(folder / "data.jsonl"), "ds_type": "json", "type": "completion", "field": "text"}],
        dataset_prepared_path=str(folder / "prepared"),
        output_dir=str(folder / "out"),
        val_set_size=0,
        sequence_len=128,
        sample_packing=False,
        adapter="lora",
        lora_r=4,
        lora_alpha=8,
        lora_target_modules=["q_proj", "v_proj"],
        micro_batch_size=2,
        gradient_accumulation_steps=1,
        max_steps=3,
        learning_rate=0.01,
        optimizer="adamw_torch",
        lr_scheduler="constant",
        bf16=False,
        fp16=False,
        tf32=False,
        attn_implementation="eager",
        gradient_checkpointing=True,
        logging_steps=1,
        save_strategy="no",
        dataset_num_proc=1,
        seed=7,
    )
    return {key: value for key, value in (settings | options).items() if value is not None}


def axolotl(
    command: str, settings: dict[str, Any], folder: Path, *arguments: str, check: bool = True, answers: str = ""
) -> str:
    """Standard output and error of ``axolotl <command>``, with ``answers`` typed in."""
    path = folder / "config.yml"
    path.write_text(yaml.safe_dump(settings))
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PATH"] = os.pathsep.join((str(Path(sys.executable).parent), env.get("PATH", "")))  # torchrun
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parent), env.get("PYTHONPATH"))))
    if command in ("train", "inference") and "--launcher" not in arguments:
        arguments = ("--launcher", "python", *arguments)
    line = [sys.executable, "-m", "axolotl.cli.main", command, str(path), *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env=env, cwd=folder, input=answers)
    assert not check or done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def state(folder: Path) -> dict[str, Any]:
    """The trainer's state of the last checkpoint below ``folder``."""
    last = max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return json.loads((last / "trainer_state.json").read_text())


def losses(folder: Path) -> list[float]:
    return [log["loss"] for log in state(folder)["log_history"] if "loss" in log]
