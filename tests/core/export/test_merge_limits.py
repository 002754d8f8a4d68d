"""Memory, disk and sudden death of a merge."""

from __future__ import annotations

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from merge_cases import save_llama, tensors, train_llama
from safetensors.torch import save_file

from unsloth_plugins.core.errors import ConflictError, ExportError
from unsloth_plugins.core.export import merge
from unsloth_plugins.core.export.folder import appearing, cleaned_config

MERGE = """
import sys
from unsloth_plugins.core.export import merge
base, adapter, out, shard = sys.argv[1:5]
merge(base, adapter, out, max_shard_bytes=int(shard))
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]  # ru_maxrss counts the parent too
print(int(peak.split()[1]) * 1024)
"""


def _large(folder: Path, layers: int = 12, size: int = 2048) -> tuple[Path, Path]:
    """A base of some hundred MB with the names of a Llama, and an adapter on half of its matrices."""
    base, adapter = folder / "base", folder / "adapter"
    base.mkdir()
    adapter.mkdir()
    draw = torch.Generator().manual_seed(0)
    weights, lora = {}, {}
    for layer in range(layers):
        for name in ("q_proj", "k_proj"):
            stem = f"model.layers.{layer}.self_attn.{name}"
            weights[f"{stem}.weight"] = torch.randn(size, size, generator=draw)
        stem = f"base_model.model.model.layers.{layer}.self_attn.q_proj"
        lora[f"{stem}.lora_A.weight"] = torch.randn(16, size, generator=draw)
        lora[f"{stem}.lora_B.weight"] = torch.randn(size, 16, generator=draw)
    save_file(weights, base / "model.safetensors")
    (base / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    save_file(lora, adapter / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": 16, "r": 16, "target_modules": ["q_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(base)}))
    return base, adapter


def _digest(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


@pytest.mark.slow
def test_case_14_memory_is_bounded_by_the_shard(tmp_path: Path) -> None:
    base, adapter = _large(tmp_path)
    assert (base / "model.safetensors").stat().st_size > 400e6
    shard = 40_000_000
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(tmp_path / "out"), str(shard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    largest = max(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert largest < shard + 10_000 and int(done.stdout) <= 2 * largest + 300e6
    before, after = tensors(base), tensors(tmp_path / "out")
    lora = tensors(adapter)
    name = "model.layers.3.self_attn.q_proj"
    a, b = (lora[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    torch.testing.assert_close(after[f"{name}.weight"], (before[f"{name}.weight"] + b @ a).bfloat16())


def test_case_14_refuses_first_when_the_disk_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(ExportError, match=r"[\d,]{9,} bytes free .* got 1,000\. Free [\d,]+ bytes"):
        merge(base, tmp_path / "adapter", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.slow
def test_case_14_killed_at_any_point_nothing_looks_complete(tmp_path: Path) -> None:
    base, adapter = _large(tmp_path, layers=6)
    kept = _digest(base), _digest(adapter)
    out = tmp_path / "out"
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(out), "40000000"]
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - begin
    reference = _digest(out)
    shutil.rmtree(out)
    seen = 0
    for step in range(10):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        time.sleep(whole * (0.45 + 0.05 * step))
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen += (tmp_path / ".out.incomplete").exists()
        if out.exists():  # it was faster than the signal: then everything is there
            assert _digest(out).keys() == reference.keys()
            shutil.rmtree(out)
    assert seen > 0
    subprocess.run(command, check=True, capture_output=True)
    assert {k: v for k, v in _digest(out).items() if "json" not in k} == {
        k: v for k, v in reference.items() if "json" not in k
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert (_digest(base), _digest(adapter)) == kept


def test_an_output_that_exists_or_is_being_written_is_refused(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    with appearing(tmp_path / "out"):
        with pytest.raises(ConflictError, match="another one"):
            merge(base, tmp_path / "adapter", tmp_path / "out")
    with pytest.raises(ExportError, match="does not exist yet"):
        merge(base, tmp_path / "adapter", tmp_path / "out")


def test_config_is_cleaned_at_every_depth() -> None:
    config = {
        "dtype": "float32",
        "quantization_config": {"quant_method": "mxfp4"},
        "text_config": {"torch_dtype": "float32", "vocab_size": 5, "quantization_config": {}},
        "audio_config": {"vocab_size": 7, "parts": [{"quantization_config": 1, "dtype": "float32"}]},
    }
    assert cleaned_config(config, dtype="bfloat16", vocab_size=9, tie_word_embeddings=None) == {
        "dtype": "bfloat16",
        "text_config": {"torch_dtype": "bfloat16", "vocab_size": 9},
        "audio_config": {"vocab_size": 7, "parts": [{"dtype": "bfloat16"}]},
    }
    assert cleaned_config({"a": 1}, dtype="float16", vocab_size=3) == {"a": 1, "dtype": "float16", "vocab_size": 3}


@pytest.mark.parametrize("damage", ["cut", "shard", "config"])
def test_an_incomplete_base_is_refused(tmp_path: Path, damage: str) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    weights = base / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "shard":
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (base / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        (base / "config.json").unlink()
    with pytest.raises(
        ExportError, match={"cut": "cut off", "shard": "00001-of-00002", "config": "config.json"}[damage]
    ):
        merge(base, tmp_path / "adapter", tmp_path / "out", allow_other_base=True)
