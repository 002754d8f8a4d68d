"""Two gloo processes on a CPU: ranks agree bit for bit, and gradients are the mean of the single ones."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fitting import ROOTS, root_of

from unsloth_plugins.lightning.checkpoints import BASE_SUMS

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).with_name("two_processes.py")


def run(root: str, strategy: str, devices: int, accumulate: int, folder: Path, experts: str) -> str:
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), root, strategy, str(devices), str(accumulate), str(folder), experts]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return done.stderr


STRATEGIES = ["unsloth", "unsloth_ddp", "unsloth_fsdp"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("root", ROOTS)
def test_ranks_agree_and_gradients_are_the_mean(root: str, strategy: str, tmp_path: Path) -> None:
    root_of(root)
    trained = trained_by_two_and_by_one(root, strategy, tmp_path, "all")
    assert len(trained) == 4 * (2 + 2) * 2


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_case_2_experts_without_tokens_and_a_trained_head(strategy: str, tmp_path: Path) -> None:
    trained = trained_by_two_and_by_one("lightning.pytorch", strategy, tmp_path, "some")
    assert len(trained) == 4 * (2 + 2) * 2 + 1
    for name, value in trained.items():
        if ".experts." in name and ".lora_B." in name:
            by_expert = value.unflatten(1, (4, 4)).abs().amax((0, 1))  # PEFT's columns: (rank, expert)
            assert (by_expert > 0).tolist() == [True, True, False, False]


def trained_by_two_and_by_one(root: str, strategy: str, tmp_path: Path, experts: str) -> dict[str, torch.Tensor]:
    """What both ranks trained alike, and one process by accumulation."""
    printed = run(root, strategy, 2, 1, tmp_path / "two", experts)
    runs = 6 if strategy == "unsloth_fsdp" else 1
    assert printed.count("unsloth-plugins on GptOss") == runs  # rank 0 only
    run(root, "unsloth", 1, 2, tmp_path / "one", experts)
    both = [torch.load(tmp_path / "two" / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert all(each["n_packed"] == 4 * 4 for each in both)
    assert [each["held"] for each in both] == [{0.5 if strategy == "unsloth_fsdp" else 1.0}] * 2
    first, second = (each["trained"] for each in both)
    alone = torch.load(tmp_path / "one" / "rank0.pt", weights_only=False)["trained"]
    assert first.keys() == second.keys() == alone.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.testing.assert_close(first, alone, rtol=0, atol=1e-6)
    stored, by_one = (torch.load(tmp_path / each / "last.ckpt", weights_only=False) for each in ("two", "one"))
    assert stored["state_dict"].keys() == first.keys()
    assert len(stored[BASE_SUMS]) > 4 * 4 and stored[BASE_SUMS] == by_one[BASE_SUMS]  # sharded or not
    return first
