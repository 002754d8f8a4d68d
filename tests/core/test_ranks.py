"""Two gloo processes that differ in what they could run take the attention backend that rank 0 takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

# Run as a script on each rank: the interpreter makes the kernels run on a CPU, on the ranks that have it.
CODE = """
import logging, sys
sys.path[:0] = [sys.argv[1]]
import torch.distributed as dist
from conftest import batch_of, tiny_gpt_oss
from unsloth_plugins.core import apply, ranks
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import transformers_backend

logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=int(sys.argv[3]), world_size=2)
chosen, run = set(), transformers_backend.sink_attention

def spy(*args, backend, **kwargs):
    chosen.add(backend)
    return run(*args, backend=backend, **kwargs)

transformers_backend.sink_attention = spy
model = tiny_gpt_oss()
try:
    attention = apply(model).rows[0].detail
    model(**batch_of(1, 5))
    print("attention:", attention.split(",")[0], chosen)
    model = tiny_gpt_oss(head_dim=32)
    if dist.get_rank() == 1:
        ranks.WAIT = ranks.timedelta(seconds=1)
        apply(model)
except UnsupportedError as error:
    print("refused:", error)
dist.barrier()
"""


def run_two(tmp_path: Path, interpreted: set[int]) -> list[str]:
    running = []
    for rank in range(2):
        environment = os.environ | {"TRITON_INTERPRET": str(int(rank in interpreted)), "OMP_NUM_THREADS": "1"}
        arguments = [str(Path(__file__).parents[1]), str(tmp_path / "store"), str(rank)]
        command = [sys.executable, "-c", CODE, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, **pipes, text=True, env=environment))
    outputs = [process.communicate(timeout=200) for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    return [output for output, _ in outputs]


def test_the_choice_of_rank_0_is_everyones_and_it_alone_speaks(tmp_path: Path) -> None:
    first, second = run_two(tmp_path, interpreted={1})
    assert "attention: eager sink attention (no kernel: a tensor on cpu) {'auto'}" in first
    assert "attention: eager sink attention (chosen by rank 0) {'eager'}" in second
    assert first.count("unsloth-plugins on GptOss") == 1 and "unsloth-plugins on GptOss" not in second
    assert "no answer within 1 s" in second and "refused" not in first  # a model that rank 0 does not apply to


def test_a_rank_that_cannot_follow_says_so(tmp_path: Path) -> None:
    first, second = run_two(tmp_path, interpreted={0})
    assert "attention: triton sink attention (interpreted) {'auto'}" in first
    assert "refused: expected inputs, a device and packages with which attention backend 'triton' runs" in second
