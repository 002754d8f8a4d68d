"""Our grouped GEMMs against float64, expert by expert: in triton's interpreter on the CPU, and on CUDA."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from tolerances import assert_no_worse_than_eager

from unsloth_plugins.core.experts.gemm import GEMMS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
CASES = [
    *(pytest.param("cpu", dtype, marks=needs_interpreter) for dtype in (torch.float32, torch.float16)),
    *(
        pytest.param("cuda", dtype, marks=[pytest.mark.gpu, on_cuda])
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
    ),
]
COUNTS = {
    "one row": [0, 1, 0],
    "uneven": [5, 0, 70, 1, 0, 33],
    "one expert has all": [0, 0, 150],
    "no rows": [0, 0],
}


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "41 passed" in done.stdout, done.stdout[-3000:]


def _rows(counts: list[int], width: int, room: int, device: str, dtype: torch.dtype) -> torch.Tensor:
    """Rows that are part of wider ones, beside NaN."""
    wide = torch.full((sum(counts), width + room), torch.nan, device=device, dtype=dtype)
    wide[:, :width] = torch.randn(sum(counts), width, device=device)
    return wide[:, :width]


def _ends(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("inputs", "outputs", "by_outputs"), [(33, 70, True), (1, 3, False), (64, 130, False)])
def test_product(device, dtype, counts, inputs, outputs, by_outputs) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    x, ends = _rows(counts, inputs, 3, device, dtype), _ends(counts, device)
    w = torch.randn(len(counts), inputs, outputs, device=device).to(dtype)
    if by_outputs:
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    expert = torch.repeat_interleave(torch.arange(len(counts), device=device), torch.tensor(counts, device=device))
    parts = [(x[expert == e], w[e]) for e in range(len(counts))]
    truth, eager = (torch.cat([a.to(to) @ b.to(to) for a, b in parts]) for to in (torch.float64, dtype))
    got = GEMMS["triton"].product(x, w, ends)
    assert got.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    assert_no_worse_than_eager("y", got, eager, truth, dtype)


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_product_by_groups_of_experts_changes_no_bit(device, dtype, counts) -> None:  # type: ignore[no-untyped-def]
    """Each group fills its own rows and touches no other."""
    torch.manual_seed(0)
    x, ends = _rows(counts, 33, 3, device, dtype), _ends(counts, device)
    w = torch.randn(len(counts), 33, 70, device=device).to(dtype)
    gemm: Any = GEMMS["triton"]
    want = gemm.product(x, w, ends)
    for step in (1, 2, 4):
        got = torch.full_like(want, torch.nan)
        for first in range(0, len(counts), step):
            last = min(first + step, len(counts))
            before = got.clone()
            assert gemm.product_of_group(x, w[first:last], ends, first, got) is got
            begin, end = (0 if first == 0 else int(ends[first - 1])), int(ends[last - 1])
            before[begin:end] = want[begin:end]
            assert torch.equal(got.nan_to_num(7), before.nan_to_num(7))
        assert torch.equal(got, want)


@pytest.mark.parametrize(("device", "dtype"), CASES)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_reduce_and_its_running_sum(device, dtype, counts) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    gemm, ends = GEMMS["triton"], _ends(counts, device)
    x, y = _rows(counts, 3, 5, device, dtype), _rows(counts, 140, 1, device, dtype)
    edges = [0, *ends.tolist()]
    truth, eager = (
        torch.stack([x[a:b].to(to).T @ y[a:b].to(to) for a, b in zip(edges, edges[1:], strict=False)])
        for to in (torch.float64, dtype)
    )
    once = gemm.reduce(x, y, ends)
    assert once.dtype == torch.float32
    assert_no_worse_than_eager("x^T y", once, eager, truth, dtype)
    twice = gemm.reduce(x, y, ends, once.clone())
    torch.testing.assert_close(twice, 2 * once)


@pytest.mark.parametrize(("device", "dtype"), [case for case in CASES if case.values[1] != torch.float32])
def test_gradients_of_the_product(device, dtype) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    counts = COUNTS["uneven"]
    x = torch.randn(sum(counts), 24, device=device).to(dtype).requires_grad_()
    w = torch.randn(len(counts), 40, 24, device=device).to(dtype).requires_grad_()
    ends = _ends(counts, device)
    y = GEMMS["triton"].product(x, w.transpose(1, 2), ends)
    dy = torch.randn_like(y).to(dtype)
    results = [torch.autograd.grad(y, (x, w), dy.to(y.dtype))]
    expert = torch.repeat_interleave(torch.arange(len(counts), device=device), torch.tensor(counts, device=device))
    for to in (dtype, torch.float64):
        leaves = [t.detach().to(to).requires_grad_() for t in (x, w)]
        loop = torch.cat([leaves[0][expert == e] @ leaves[1][e].T for e in range(len(counts))])
        results.append(torch.autograd.grad(loop, leaves, dy.to(to)))
    for name, got, eager, truth in zip(("dx", "dw"), *results, strict=True):
        assert got.dtype == dtype
        assert_no_worse_than_eager(name, got, eager, truth, dtype)
