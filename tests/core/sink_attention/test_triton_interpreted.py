"""The Triton kernels in triton's interpreter, on the CPU, against the float64 reference.

The interpreter is chosen by the environment when triton is imported, so the cases run in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from attention_cases import CASES, HALF

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import sink_attention

triton = pytest.importorskip("triton")


def before(module: Any, *least: int) -> bool:
    return tuple(map(int, module.__version__.split(".")[:2])) < least


needs_interpreter = pytest.mark.skipif(
    before(triton, 3, 7) and not before(numpy, 2, 4),
    reason="the interpreter of triton before 3.7 does not run with numpy 2.4 and newer",
)

HERE = Path(__file__).resolve().parent
# bf16 is left to the GPU: the interpreter's bf16 arithmetic is not that of the device.
EXPECTED = [f"{name} {dtype}" for name in CASES for dtype in ("torch.float32", "torch.float16")[: 1 + (name in HALF)]]


def interpret(*arguments: str) -> subprocess.Popen[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


@pytest.fixture(scope="module")
def report() -> str:
    """What two processes print, each with half of the cases; it ends at a process's first failure."""
    names = list(CASES)
    running = [interpret(str(HERE / "attention_cases.py"), *names[n::2]) for n in range(2)]
    return "\n".join(process.communicate()[0] for process in running)


@needs_interpreter
@pytest.mark.parametrize("line", EXPECTED)
def test_no_worse_than_eager(report: str, line: str) -> None:
    assert f"passed: {line}\n" in report, report[-3000:]


@needs_interpreter
def test_narrow_windows_with_a_loop_for_whole_blocks() -> None:
    code = """
import sys
import torch
sys.path.insert(0, sys.argv[1])
from attention_cases import Case, run_case
from unsloth_plugins.core.sink_attention import triton_op
from unsloth_plugins.core.sink_attention.triton_tiles import Tile

launched = set()

def split(kernel, q, window):
    launched.add(kernel)
    return Tile(16, 16, 4, 1, split=True)

triton_op.pick = split
for window in (17, 40):
    for case in (
        Case((1, 83, 83, 8, 2, 16), options={"window": window}),
        Case((1, 50, 83, 4, 1, 16), options={"window": window}, sink=False),
        Case((1, 83, 83, 8, 1, 16), options={"window": window, "softcap": 5.0}, documents=((30, 1, 52),)),
        Case((1, 83, 83, 6, 2, 16), options={"window": window}, padding=((11, 0, 60),)),
    ):
        run_case(case, torch.float32, "cpu")
assert launched == {"forward", "dq", "dkdv"}
print("same")
"""
    output = interpret("-c", code, str(HERE)).communicate()[0]
    assert output.strip() == "same", output


@needs_interpreter
def test_only_the_requested_gradients_and_layouts_of_any_stride() -> None:
    code = """
import torch
from unsloth_plugins.core.sink_attention import sink_attention

torch.manual_seed(0)
inputs = [torch.randn(1, 20, 4, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(4)]

def grads(wanted, change=lambda x: x, **options):
    leaves = [x.clone().requires_grad_(n in wanted) for n, x in enumerate(inputs)]
    q, k, v = (change(x) for x in leaves[:3])
    # The gradient of a sum is expanded: all its strides are zero.
    sink_attention(q, k, v, leaves[3], backend="triton", **options).sum().backward()
    return [x.grad for x in leaves]

full = grads(range(4))
for wanted in ((0,), (1,), (2,), (3,), (0, 2), (1, 3)):
    for n, (some, all_of_them) in enumerate(zip(grads(wanted), full)):
        assert torch.equal(some, all_of_them) if n in wanted else some is None
columns_apart = lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)
for options in ({"change": columns_apart}, {"head_groups": 2}, {"head_groups": 7}):
    assert all(map(torch.equal, grads(range(4), **options), full))
q = inputs[0].clone().requires_grad_()
(once,) = torch.autograd.grad(sink_attention(q, *inputs[1:], backend="triton").square().sum(), q, create_graph=True)
try:
    once.sum().backward()
except RuntimeError as error:
    assert "once_differentiable" in str(error)
else:
    raise AssertionError("a second derivative was computed")
o = sink_attention(torch.empty(0, 3, 4, 16), torch.empty(0, 3, 2, 16), torch.empty(0, 3, 2, 16), backend="triton")
assert o.shape == (0, 3, 4, 16)
print("done")
"""
    output = interpret("-c", code).communicate()[0]
    assert output.endswith("done\n"), output


@pytest.mark.slow
@needs_interpreter
def test_case_29_torch_compile_changes_nothing() -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[1])
from attention_cases import run_compiled

for dynamic in (False, True):
    run_compiled("cpu", "triton", dynamic, (1, 33))
print("same")
"""
    output = interpret("-W", "ignore", "-c", code, str(HERE)).communicate()[0]
    assert output.endswith("same\n"), output


@needs_interpreter
def test_a_recompute_takes_the_output_that_survived_and_launches_no_forward() -> None:
    code = """
import torch
from torch.utils.checkpoint import checkpoint
from unsloth_plugins.core.offload.survivors import Survivors
from unsloth_plugins.core.sink_attention import sink_attention, triton_op

torch.manual_seed(0)
inputs = [torch.randn(1, 20, 4, 16), torch.randn(1, 20, 2, 16), torch.randn(1, 20, 2, 16), torch.randn(4)]
launches, launch = [], triton_op.forward_launch
triton_op.forward_launch = lambda *args, **options: (launches.append(1), launch(*args, **options))[1]

def grads(window, **options):
    leaves = [x.clone().requires_grad_() for x in inputs]
    attend = lambda *leaves: sink_attention(*leaves, window=window, backend="triton").sin()
    out = checkpoint(attend, *leaves, use_reentrant=False, early_stop=False, **options) if options else attend(*leaves)
    launches.clear()
    return torch.autograd.grad(out.sum(), leaves)

for window, runs in ((None, 0), (20, 0), (8, 1)):
    want, got = grads(window), grads(window, context_fn=Survivors(True).contexts)
    assert len(launches) == runs and all(map(torch.equal, got, want)), (window, launches)
print("done")
"""
    output = interpret("-c", code).communicate()[0]
    assert output.endswith("done\n"), output


def test_auto_is_the_reference_on_the_cpu_and_an_explicit_kernel_raises() -> None:
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in "qkv")
    assert torch.equal(sink_attention(q, k, v), sink_attention(q, k, v, backend="eager"))
    with pytest.raises(UnsupportedError, match="a tensor on cpu"):
        sink_attention(q, k, v, backend="triton")
    with pytest.raises(UnsupportedError, match="float64"):
        sink_attention(q.double(), k.double(), v.double(), backend="triton")
    with pytest.raises(UnsupportedError, match="head size 512"):
        sink_attention(*(torch.randn(1, 2, 1, 512) for _ in "qkv"), backend="triton")
    with pytest.raises(UnsupportedError, match="'flash'"):
        sink_attention(q, k, v, backend="flash")  # type: ignore[arg-type]


def test_importing_the_op_leaves_triton_alone() -> None:
    code = "import sys, unsloth_plugins.core.sink_attention; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
