"""The examples as their tops say to run them: one task, the same losses in all three trainers."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import yaml
from axolotl_runs import axolotl, losses

pytestmark = pytest.mark.slow
EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 12


def example(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "1000"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.timeout(900)
def test_examples_give_the_same_losses(tmp_path: Path) -> None:
    from train import pretrained_job

    options = Namespace(model=None, data=None, ctx=256, steps=STEPS, lora_rank=16, output=tmp_path, no_compare=True)
    (hf,) = pretrained_job(options, torch.device("cpu"))
    assert len(hf.losses) == STEPS and hf.losses[-1] < hf.losses[0]

    printed = example("lightning_train.py", tmp_path)  # fails where resuming or the stock run differ
    (line,) = [line for line in printed.splitlines() if line.startswith("losses with strategy='unsloth':")]
    assert [float(loss) for loss in line.partition(":")[2].split()] == pytest.approx(hf.losses, abs=1e-3)

    example("prepare_axolotl.py", tmp_path)
    settings = yaml.safe_load((EXAMPLES / "axolotl.yml").read_text())
    axolotl("train", settings | {"save_strategy": "steps", "save_steps": STEPS}, tmp_path)
    assert losses(tmp_path / "runs/axolotl/out") == pytest.approx(hf.losses, abs=1e-3)
