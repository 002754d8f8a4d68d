"""`accelerate launch` on two gloo processes: ranks agree bit for bit, and train as one process with all the batches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from merge_cases import tensors

from unsloth_plugins.core.export import merge

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("two_processes.py")
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=2", "--num_machines=1"]
LAUNCH += ["--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0"]
SHARDING = {
    "ddp": ["--multi_gpu"],  # means a process each; the script keeps to the CPU
    "fsdp2": ["--use_fsdp", "--fsdp_version=2", "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP"],
}


def run(command: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    line = [*command, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, env=environment, timeout=240)


def results(folder: Path, ranks: int) -> list[dict[str, Any]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(ranks)]


@pytest.fixture(scope="module", params=["lora", "head"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    done = run([sys.executable], "ddp", 2, request.param, folder)
    assert done.returncode == 0, done.stderr
    return request.param, results(folder, 1)[0]


@pytest.mark.parametrize("mode", ["ddp", "fsdp2"])
def test_case_2_ranks_agree_and_gradients_are_the_mean(
    mode: str, alone: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """``head`` has experts without tokens and a frozen twin of the head, which DDP finds unused."""
    kind, wanted = alone
    done = run(LAUNCH + SHARDING[mode], mode, 1, kind, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unsloth-plugins on GptOss") == done.stdout.count("unsloth-plugins: ") == 1
    assert done.stderr.count("LoRA r=4 added") == 1  # the first process speaks
    first, second = results(tmp_path, 2)
    assert len(wanted["trained"]) == 4 * (2 + 2) * 2 + (kind == "head")
    assert first["trained"].keys() == second["trained"].keys() == wanted["trained"].keys()
    assert all(torch.equal(first["trained"][name], second["trained"][name]) for name in wanted["trained"])
    torch.testing.assert_close(first["trained"], wanted["trained"], rtol=0, atol=1e-6)  # SGD: also the gradients
    assert first["losses"] == pytest.approx(wanted["losses"], abs=1e-6) and len(first["losses"]) == 3
    assert first["materialized"] == second["materialized"] == 0  # the wrapper looks at the logits and leaves them lazy
    assert len(first["packed"]) == 4 * 4
    held = [{local / whole for whole, local in each["packed"].values()} for each in (first, second)]
    assert held == [{0.5} if mode == "fsdp2" else {1.0}] * 2


@pytest.mark.parametrize(("mode", "options"), [("ddp", []), ("fsdp2", ["--fsdp_state_dict_type=FULL_STATE_DICT"])])
def test_adapters_of_several_processes_know_their_base(mode: str, options: list[str], tmp_path: Path) -> None:
    done = run([*LAUNCH, *SHARDING[mode], *options], mode, 1, "lora", tmp_path)
    assert done.returncode == 0, done.stderr
    for folder in (tmp_path / "out" / "checkpoint-3", tmp_path / "final"):
        notes = merge(tmp_path / "base0", folder, tmp_path / f"{folder.name}-merged").notes
        assert "checked by the fingerprint" in notes[0]
    if mode == "ddp":  # the first process alone merges, and what it merges is what was saved
        assert [each["has_merged"] for each in results(tmp_path, 2)] == [True, False]
        merge(tmp_path / "base0", tmp_path / "final", tmp_path / "wanted", dtype="fp32")
        found, wanted = tensors(tmp_path / "merged"), tensors(tmp_path / "wanted")
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
