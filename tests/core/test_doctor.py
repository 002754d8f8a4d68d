"""The doctor: what it finds on this machine, and that each of its checks can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unsloth_plugins.core import doctor
from unsloth_plugins.core.doctor import Finding

CPU = torch.device("cpu")
KERNELS = ("norm", "gate", "rope", "grouped GEMM", "MXFP4")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "interpreted", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "6 passed" in done.stdout, done.stdout[-3000:]


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


def test_a_machine_that_works(tmp_path: Path) -> None:
    found = by_name(doctor.examine(tmp_path))
    assert [finding for finding in found.values() if finding.state == "broken"] == []
    assert found["torch"].detail == torch.__version__ and "gradients too" in found["attention: eager"].detail
    assert {"Python", "host memory", "disk"} <= set(found)
    assert all("gradients too" in found[name].detail for name in ("experts", "LoRA linear", "loss"))
    for finding in found.values():
        assert finding.detail
        if not torch.cuda.is_available() and finding.name == "GPU":
            assert finding.state == "missing" and finding.gain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_machine_with_a_gpu(tmp_path: Path) -> None:
    found = by_name(doctor.examine(tmp_path))
    assert [finding for finding in found.values() if finding.state == "broken"] == []
    assert {"GPU 0", "page-locked memory", "PCIe", *(f"kernels: {name}" for name in KERNELS)} <= set(found)
    assert "GEMM" in found["experts"].detail
    assert found["attention: triton"].state == "ok" and "GB/s" in found["PCIe"].detail


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = doctor._draw(CPU, x=(8, 8))
    assert doctor.compare(lambda x: x * x, lambda x: x**2, inputs, torch.float32) is None
    wrong = doctor.compare(lambda x: x * x * 1.001, lambda x: x**2, inputs, torch.float32)
    assert wrong is not None and wrong.startswith("output")
    gradient = doctor.compare(lambda x: x * x.detach(), lambda x: x**2, inputs, torch.float32)
    assert gradient is not None and gradient.startswith("x: error")
    real = doctor.sink_attention
    monkeypatch.setattr(doctor, "sink_attention", lambda *given, **options: real(*given, **options | {"window": None}))
    assert by_name(doctor.attention(CPU, torch.float32))["attention: eager"].state == "broken"


def a_little_off(real: Any) -> Any:
    """The same op with results that are 1 % off."""

    def wrong(*given: Any, **options: Any) -> Any:
        out = real(*given, **options)
        return tuple(x * 1.01 for x in out) if isinstance(out, tuple) else out * 1.01

    return wrong


@pytest.mark.parametrize(
    ("op", "name"), [("experts", "experts"), ("lora_linears", "LoRA linear"), ("linear_cross_entropy", "loss")]
)
def test_a_wrong_op_is_found(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(doctor, op)

    def wrong(*given: Any, implementation: Any = None, **options: Any) -> Any:
        if implementation is None:
            return a_little_off(real)(*given, **options)
        out = real(*given, implementation="reference", **options)
        return out if implementation == "reference" else out * 1.01

    monkeypatch.setattr(doctor, op, wrong)
    if op == "experts":  # served by its own reference on a CPU
        monkeypatch.setattr(doctor, "resolve_implementation", lambda *given: ("triton", ""))
    states = {each: finding.state for each, finding in by_name(doctor.ops(CPU, torch.float32)).items()}
    assert states == {each: "broken" if each == name else "ok" for each in ("experts", "LoRA linear", "loss")}


def test_who_serves_where_torch_has_no_grouped_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "a loop over experts serves" in doctor.grouped_gemm(CPU, torch.float32)[0].gain
    monkeypatch.setattr(doctor, "resolve_implementation", lambda *given: ("triton", ""))  # as on an A100
    assert "our Triton grouped GEMM serves" in doctor.grouped_gemm(CPU, torch.float32)[0].gain
    assert doctor.kernels(CPU, torch.float32)[0].state == "missing"


@needs_interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interpreted_kernels_are_right(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_no_triton", lambda device, dtype: None)
    found = by_name(doctor.kernels(CPU, dtype))
    assert {name: each.state for name, each in found.items()} == {f"kernels: {name}": "ok" for name in KERNELS}


@needs_interpreter
@pytest.mark.parametrize(("op", "name"), [("rms_norm", "norm"), ("gated", "gate"), ("rope", "rope")])
def test_interpreted_kernels_that_are_wrong_are_found(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "why_no_triton", lambda device, dtype: None)
    real = getattr(doctor, op)
    wrong = a_little_off(real)
    monkeypatch.setattr(
        doctor, op, lambda *given, **more: (wrong if "implementation" in more else real)(*given, **more)
    )
    found = by_name(doctor.kernels(CPU, torch.float32))
    broken = [each for each, finding in found.items() if finding.state == "broken"]
    assert broken == [f"kernels: {name}"]


@needs_interpreter
def test_interpreted_grouped_gemm_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    gemm = doctor.GEMMS["triton"]
    monkeypatch.setattr(type(gemm), "reduce", a_little_off(type(gemm).reduce))
    found = doctor._check_gemm("kernels: grouped GEMM", "triton", CPU, torch.float32)
    assert found.state == "broken" and found.detail.startswith("w: error")


def test_what_is_required_and_absent_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["torch>=99", "no-such-package>=1", "peft>=0.1", 'other>=1; extra == "x"']
    monkeypatch.setattr(doctor, "requires", lambda name: needed)
    found = by_name(doctor.packages())
    assert found["torch"].state == found["no-such-package"].state == "broken" and "torch>=99" in found["torch"].detail
    assert found["peft"].state == "ok" and "other" not in found


def test_a_driver_that_torch_cannot_use_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert [finding.state for finding in doctor.gpus()] == ["broken"]


def test_a_part_that_raises_is_a_finding() -> None:
    def part() -> list[Finding]:
        raise OSError("no such thing\nmore")

    assert doctor.guarded("disk", part) == [Finding("disk", "broken", "OSError: no such thing")]
