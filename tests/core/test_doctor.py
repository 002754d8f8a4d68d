"""The doctor: what it finds on this machine, and that each of its checks can fail."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unsloth_plugins.core import doctor
from unsloth_plugins.core.doctor import Finding


def by_name(found: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in found}


def test_a_machine_that_works(tmp_path: Path) -> None:
    found = by_name(doctor.examine(tmp_path))
    assert [finding for finding in found.values() if finding.state == "broken"] == []
    assert found["torch"].detail == torch.__version__ and "gradients too" in found["attention: eager"].detail
    assert {"Python", "host memory", "disk"} <= set(found)
    for finding in found.values():
        assert finding.detail
        if not torch.cuda.is_available() and finding.name == "GPU":
            assert finding.state == "missing" and finding.gain


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_machine_with_a_gpu(tmp_path: Path) -> None:
    found = by_name(doctor.examine(tmp_path))
    assert [finding for finding in found.values() if finding.state == "broken"] == []
    assert {"GPU 0", "page-locked memory", "PCIe", "kernels: norm", "kernels: MXFP4"} <= set(found)
    assert found["attention: triton"].state == "ok" and "GB/s" in found["PCIe"].detail


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    inputs = doctor._draw(cpu, x=(8, 8))
    assert doctor.compare(lambda x: x * x, lambda x: x**2, inputs, torch.float32) is None
    wrong = doctor.compare(lambda x: x * x * 1.001, lambda x: x**2, inputs, torch.float32)
    assert wrong is not None and wrong.startswith("output")
    gradient = doctor.compare(lambda x: x * x.detach(), lambda x: x**2, inputs, torch.float32)
    assert gradient is not None and gradient.startswith("x: error")
    real = doctor.sink_attention
    monkeypatch.setattr(doctor, "sink_attention", lambda *given, **options: real(*given, **options | {"window": None}))
    assert by_name(doctor.attention(cpu, torch.float32))["attention: eager"].state == "broken"


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
