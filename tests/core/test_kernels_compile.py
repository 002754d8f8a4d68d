"""The kernels of the experts, layers, MXFP4 and the loss compile for every supported GPU, without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).resolve().parent / "compile_other_kernels.py"
# Compute capability -> KB of shared memory that one program can have.
SHARED_KB = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize("capability", SHARED_KB)
def test_programs_fit_and_spill_nothing(capability: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), str(capability), "float16" if capability == 75 else "bfloat16"]
    path = os.pathsep.join([str(SCRIPT.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    paths = {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | paths)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"] for row in rows} == {
        *("_gather_kernel", "_swiglu_kernel", "_swiglu_backward_kernel", "_combine_kernel"),
        *("_product_kernel", "_reduce_kernel"),
        *("_decode_kernel", "_cross_entropy_kernel", "part_kernel", "join_kernel"),
        *("_forward_kernel", "_backward_kernel", "_rope_kernel", "_lookup_kernel"),
        "_dropout_kernel",
    }
    for row in rows:
        assert row["shared"] <= SHARED_KB[capability] * 1024 and row["spilled"] == 0, row
