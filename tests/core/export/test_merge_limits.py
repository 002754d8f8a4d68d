"""Memory, disk and sudden death of a merge."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import save_llama, save_packed, small_tokenizer, tensors, train_llama, train_packed
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from unsloth_plugins.core.errors import ConflictError, ExportError
from unsloth_plugins.core.export import merge, merge_model
from unsloth_plugins.core.export.folder import appearing, cleaned_config
from unsloth_plugins.core.export.tensors import FileTensors, Progress

MERGE = """
import os, signal, sys
from unsloth_plugins.core.export import merge, merge_model
base, adapter, out, shard = sys.argv[1:5]
die_at = float(sys.argv[5]) if sys.argv[5:] else 2
def progress(done, total, name):
    if done >= die_at * total:
        os.kill(os.getpid(), signal.SIGKILL)
print("begin", flush=True)
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


def test_an_adapter_is_read_once_however_many_pieces_its_tensors_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gpt-oss each expert is a piece: reading all experts' factors for each one would be quadratic."""
    base, adapter = _large(tmp_path, layers=1)
    seen: list[str] = []
    read = FileTensors.read_numbers

    def noted(self: FileTensors, name: str, begin: int, end: int) -> torch.Tensor:
        seen.extend([name] * (".lora_" in name))
        return read(self, name, begin, end)

    monkeypatch.setattr(FileTensors, "read_numbers", noted)
    pieces: list[str] = []
    merge(base, adapter, tmp_path / "merged", progress=lambda done, total, name: pieces.append(name))
    assert pieces.count("model.layers.0.self_attn.q_proj.weight") > 2
    stem = "base_model.model.model.layers.0.self_attn.q_proj"
    assert sorted(seen) == [f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"]


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
    assert largest < shard + 10_000 and int(done.stdout.split()[-1]) <= 2 * largest + 300e6
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


def _visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def _weights(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in _digest(folder).items() if "json" not in name}


@pytest.mark.slow
def test_case_14_killed_at_any_time_nothing_looks_complete(tmp_path: Path) -> None:
    base, adapter = _large(tmp_path, layers=6)
    kept = _digest(base), _digest(adapter)
    out = tmp_path / "out"
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(out), "20000000"]

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "begin\n"  # imports are over
        return process

    process = start()
    begin = time.monotonic()
    process.communicate()
    whole = time.monotonic() - begin
    reference = _weights(out)
    assert len(reference) == 6
    shutil.rmtree(out)
    times = random.Random(14)
    killed = 0
    for turn in range(40):
        process = start()
        time.sleep(times.uniform(0, whole))
        process.kill()
        process.communicate()
        assert (_digest(base), _digest(adapter)) == kept
        if process.returncode == 0:  # it was faster than the signal: then everything is there
            assert _weights(out) == reference
        else:
            killed += 1
            assert _visible(tmp_path) == ["adapter", "base"] + ["out"] * out.exists()  # killed after the rename
        if out.exists() or turn % 2:  # every other time another one is killed on top
            if not out.exists():
                subprocess.run(command, check=True, capture_output=True)
            assert _weights(out) == reference
            shutil.rmtree(out)
        if killed == 8:
            break
    assert killed == 8


@pytest.mark.slow
def test_case_14_killed_again_and_again_it_goes_on_from_the_last(tmp_path: Path) -> None:
    base, adapter = _large(tmp_path, layers=6)
    merge(base, adapter, tmp_path / "reference", max_shard_bytes=20_000_000)
    out = tmp_path / "out"
    command = [sys.executable, "-c", MERGE, str(base), str(adapter), str(out), "20000000"]
    for share in (0.15, 0.25, 0.4, 2):  # the second half of the bytes are those of hashes
        done = subprocess.run([*command, str(share)], capture_output=True, text=True)
        assert done.returncode == (0 if share == 2 else -signal.SIGKILL), done.stderr
        assert out.exists() is (share == 2)
    assert int(done.stderr.split()[-1]) == 4  # of 6 files
    assert _weights(out) == _weights(tmp_path / "reference")
    shutil.rmtree(tmp_path / "reference")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]


GGUF = """
import os, signal, sys
from unsloth_plugins.core.export import export_gguf
base, adapter, out, die_at = sys.argv[1:]
def progress(done, total, name):
    if done >= float(die_at) * total:
        os.kill(os.getpid(), signal.SIGKILL)
export_gguf(base, out, adapter=adapter, quant="f16", progress=progress)
"""
LIVE = """
import os, signal, sys
from peft import PeftModel
from transformers import AutoModelForCausalLM
from unsloth_plugins.core.export import merge_model
base, adapter, out, die_at = sys.argv[1:]
def progress(done, total, name):
    if done >= float(die_at) * total:
        os.kill(os.getpid(), signal.SIGKILL)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
merge_model(model, out, max_shard_bytes=20_000, progress=progress)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "name"), [(GGUF, "out.gguf"), (LIVE, "out")])
def test_a_killed_export_and_a_killed_live_merge_start_over(tmp_path: Path, script: str, name: str) -> None:
    if script == GGUF:
        pytest.importorskip("gguf", reason="needs gguf")
    base, adapter, out = save_llama(tmp_path / "base"), tmp_path / "adapter", tmp_path / name
    small_tokenizer().save_pretrained(base)
    train_llama(base, adapter)
    kept = _digest(base), _digest(adapter)

    def run(share: float) -> int:
        command = [sys.executable, "-c", script, str(base), str(adapter), str(out), str(share)]
        return subprocess.run(command, capture_output=True).returncode

    assert run(2) == 0
    reference = _weights(out) if out.is_dir() else out.read_bytes()
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    shares = random.Random(17)
    for _ in range(3):
        assert run(shares.random()) == -signal.SIGKILL
        assert _visible(tmp_path) == ["adapter", "base"] and len(list(tmp_path.iterdir())) > 2
        assert (_digest(base), _digest(adapter)) == kept
    assert run(2) == 0
    assert (_weights(out) if out.is_dir() else out.read_bytes()) == reference
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", name]
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
    for share in (0.25, 0.45):
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
    hashed = {name.removeprefix("hash of ") for name in written if name.startswith("hash of ")}
    assert hashed >= set(report.resumed)
    tensors_written = {name for name in written if not name.startswith("hash of ")}
    assert tensors_written == {name for name, file in index.items() if file not in report.resumed}
    assert report.requantised == wanted.requantised
    got, want = _digest(tmp_path / "out"), _digest(tmp_path / "wanted")
    assert got == want
    files = json.loads((tmp_path / "out" / "export_manifest.json").read_text())["files"]
    assert files == {name: got[name] for name in report.files}
    assert not list(tmp_path.glob(".out*"))


def test_a_disk_that_fills_up_late_costs_no_finished_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    options: dict[str, Any] = dict(dtype="fp32", max_shard_bytes=20_000)
    wanted = merge(base, tmp_path / "adapter", tmp_path / "wanted", **options)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full)  # after the last weight file
        with pytest.raises(OSError, match="No space left"):
            merge(base, tmp_path / "adapter", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    assert merge(base, tmp_path / "adapter", tmp_path / "out", **options).resumed == wanted.files
    assert _digest(tmp_path / "out") == _digest(tmp_path / "wanted")


def test_the_progress_ends_with_the_work(tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    train_packed(base, tmp_path / "adapter")
    calls: list[tuple[int, int, str]] = []

    def note(done: int, total: int, name: str) -> None:
        calls.append((done, total, name))

    options: dict[str, Any] = dict(dtype="mxfp4", max_shard_bytes=20_000)
    with pytest.raises(KeyboardInterrupt):
        merge(base, tmp_path / "adapter", tmp_path / "out", progress=_interrupt_after(0.3), **options)
    report = merge(base, tmp_path / "adapter", tmp_path / "out", progress=note, **options)
    manifest = json.loads((tmp_path / "out" / "export_manifest.json").read_text())
    (total,) = {total for _, total, _ in calls}
    before = tensors(base)
    hashed = sum(before[name].nbytes for name in manifest["base_sha256"])
    assert total == hashed + sum(tensor.nbytes for tensor in tensors(tmp_path / "out").values())
    done = [done for done, _, _ in calls]
    assert done == sorted(done) and done[-1] == total
    names = list(dict.fromkeys(name for _, _, name in calls))
    assert len(report.resumed) > 2
    assert names[: len(report.resumed)] == [f"hash of {name}" for name in report.resumed]
    assert names[-len(manifest["base_sha256"]) :] == [f"hash of {name}" for name in manifest["base_sha256"]]


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
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for there in ("out", "link"):
        with pytest.raises(ExportError, match="does not exist yet"):
            merge(base, tmp_path / "adapter", tmp_path / there)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_and_synced_folders_is_written_with_a_warning(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = save_llama(tmp_path / "base")
    train_llama(base, tmp_path / "adapter")
    sync = os.fsync

    def no_lock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    def files_only(file: int) -> None:
        if stat.S_ISDIR(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        sync(file)

    monkeypatch.setattr(fcntl, "flock", no_lock)
    monkeypatch.setattr(os, "fsync", files_only)
    merge(base, tmp_path / "adapter", tmp_path / "out")
    assert "has no locks" in caplog.text and (tmp_path / "out" / "config.json").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base", "out"]
    number = errno.EIO  # a disk that fails is another thing
    with pytest.raises(OSError, match="Input/output error"):
        merge(base, tmp_path / "adapter", tmp_path / "second")


def test_outputs_below_home_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_llama(tmp_path / "base")
    model = train_llama(base, tmp_path / "adapter")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert merge("~/base", "~/adapter", "~/out").output == tmp_path / "out"
    merge_model(model, "~/live", adapter_output="~/kept")
    assert all((tmp_path / name).is_dir() for name in ("out", "live", "kept"))


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


@pytest.mark.parametrize(
    ("part", "change"),
    [
        (".absmax", None),
        (".absmax", lambda t: t[:-1]),
        (".absmax", lambda t: t.float()),
        (".nested_absmax", lambda t: t[:0]),
        (".nested_quant_map", lambda t: t[:128]),
        (".quant_map", None),
        (".quant_map", lambda t: t[None]),
        (".quant_state.bitsandbytes__nf4", None),
        (".quant_state.bitsandbytes__nf4", lambda t: t[:-4]),
        ("", lambda t: t[: len(t) // 2]),
        ("", None),
    ],
)
def test_damaged_four_bit_weights_are_refused(part: str, change: Any, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    raw, base = save_llama(tmp_path / "raw", intermediate_size=128), tmp_path / "base"
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    AutoModelForCausalLM.from_pretrained(raw, quantization_config=settings).save_pretrained(base)
    name = "model.layers.1.mlp.down_proj.weight"
    _replace(base, f"{name}{part}", change)
    with pytest.raises(ExportError, match=f"weight {name} in 4 bits .* with all its parts"):
        merge(base, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("scales", lambda t: t.flatten(1)),
        ("scales", lambda t: t[:0]),
        ("scales", lambda t: t[:-1]),
        ("scales", lambda t: t.float()),
        ("blocks", lambda t: t.flatten(2)),
        ("blocks", lambda t: t[..., :8]),
    ],
)
def test_damaged_packed_experts_are_refused(name: str, change: Any, tmp_path: Path) -> None:
    base = save_packed(tmp_path / "base")
    _replace(base, f"model.layers.1.mlp.experts.down_proj_{name}", change)
    with pytest.raises(ExportError, match=r"down_proj_blocks of shape \[experts, outputs, blocks, 16\]"):
        merge(base, [], tmp_path / "out", dtype="mxfp4")
    assert not (tmp_path / "out").exists()


def _replace(folder: Path, name: str, change: Any) -> None:
    content = tensors(folder)
    old = content.pop(name)
    if change is not None:
        content[name] = change(old).contiguous()
    save_file(content, folder / "model.safetensors")
