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
from typing import Any

import pytest
import torch
from merge_cases import save_llama, save_packed, tensors, train_llama, train_packed
from safetensors.torch import save_file

from unsloth_plugins.core.errors import ConflictError, ExportError
from unsloth_plugins.core.export import merge
from unsloth_plugins.core.export.folder import appearing, cleaned_config
from unsloth_plugins.core.export.tensors import Progress

MERGE = """
import os, signal, sys
from unsloth_plugins.core.export import merge
base, adapter, out, shard = sys.argv[1:5]
die_at = float(sys.argv[5]) if sys.argv[5:] else 2
def progress(done, total, name):
    if done >= die_at * total:
        os.kill(os.getpid(), signal.SIGKILL)
report = merge(base, adapter, out, max_shard_bytes=int(shard), progress=progress)
print(len(report.resumed), file=sys.stderr)
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
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(out), "20000000"]
    begin = time.monotonic()
    subprocess.run(command, check=True, capture_output=True)
    whole = time.monotonic() - begin
    reference = _digest(out)
    shutil.rmtree(out)
    seen = 0
    for step in range(10):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(whole * (0.45 + 0.05 * step))
        process.send_signal(signal.SIGKILL)
        process.wait()
        seen += (tmp_path / ".out.incomplete").exists()
        if out.exists():  # it was faster than the signal: then everything is there
            assert _digest(out).keys() == reference.keys()
            shutil.rmtree(out)
    assert seen > 0
    shutil.rmtree(tmp_path / ".out.incomplete", ignore_errors=True)
    for share in (0.3, 0.5, 0.8, 2):  # killed again and again, each time going on from the last
        done = subprocess.run([*command, str(share)], capture_output=True, text=True)
        assert done.returncode == (0 if share == 2 else -signal.SIGKILL), done.stderr
        assert out.exists() is (share == 2)
    assert int(done.stderr.split()[-1]) == 4  # of 6 files
    assert {k: v for k, v in _digest(out).items() if "json" not in k} == {
        k: v for k, v in reference.items() if "json" not in k
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    assert (_digest(base), _digest(adapter)) == kept


def _interrupt_after(share: float) -> Progress:
    def progress(done: int, total: int, name: str) -> None:
        if done > share * total:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize("dtype", ["fp32", "mxfp4"])
def test_an_interrupted_merge_goes_on_after_its_finished_files(tmp_path: Path, dtype: str) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter")
    options: dict[str, Any] = dict(dtype=dtype, max_shard_bytes=20_000)  # cuts between blocks and scales too
    wanted = merge(base, tmp_path / "adapter", tmp_path / "wanted", **options)
    assert len(wanted.files) > 8 and wanted.resumed == []
    for share in (0.4, 0.7):
        with pytest.raises(KeyboardInterrupt):
            merge(base, tmp_path / "adapter", tmp_path / "out", progress=_interrupt_after(share), **options)
        assert not (tmp_path / "out").exists() and (tmp_path / ".out.incomplete").is_dir()
    (tmp_path / ".out.incomplete" / wanted.files[1]).write_bytes(b"damaged")
    written: set[str] = set()
    report = merge(
        base, tmp_path / "adapter", tmp_path / "out", progress=lambda d, t, name: written.add(name), **options
    )
    assert len(report.resumed) > 5 and wanted.files[0] in report.resumed and wanted.files[1] not in report.resumed
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert written == {name for name, file in index.items() if file not in report.resumed}
    assert report.requantised == wanted.requantised
    got, want = _digest(tmp_path / "out"), _digest(tmp_path / "wanted")
    assert got == want
    files = json.loads((tmp_path / "out" / "export_manifest.json").read_text())["files"]
    assert files == {name: got[name] for name in report.files}
    assert not list(tmp_path.glob(".out*"))


def test_what_an_interrupted_merge_of_something_else_left_is_not_used(tmp_path: Path) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    train_llama(base, tmp_path / "other", r=2)
    changes: list[tuple[str, dict[str, Any]]] = [
        ("adapters", dict(adapter=tmp_path / "other")),
        ("adapters", dict(adapter={str(tmp_path / "adapter"): 0.5})),
        ("options, tensors", dict(dtype="bf16")),
        ("base", dict()),
    ]
    first: dict[str, Any] = dict(base=base, adapter=tmp_path / "adapter", output=tmp_path / "out", dtype="fp32")
    first["max_shard_bytes"] = 20_000
    for named, change in changes:
        with pytest.raises(KeyboardInterrupt):
            merge(**first, progress=_interrupt_after(0.5))
        if not change:
            content = tensors(base)
            content["model.layers.0.self_attn.q_proj.weight"][7] += 1
            save_file(content, base / "model.safetensors")
        report = merge(**(first | change), allow_other_base=True)
        assert report.resumed == [] and f"Started over: the unfinished run there had other {named}." in report.notes
        shutil.rmtree(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        merge(**first, progress=_interrupt_after(0.5))
    (tmp_path / ".out.incomplete" / "unfinished.json").write_text("{")
    report = merge(**first)
    assert report.resumed == [] and any("no record" in note for note in report.notes)


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
