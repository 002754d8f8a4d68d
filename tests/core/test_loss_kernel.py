"""The loss's kernel against its reference: in triton's interpreter on the CPU, and on CUDA.

The interpreter is chosen by the environment when triton is imported, so there this file runs itself in a process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from unsloth_plugins.core.loss import kernel, linear_cross_entropy
from unsloth_plugins.core.loss.op import IN_PLACE_MIB
from unsloth_plugins.core.loss.reference import chunk_loss

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "12 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n_vocab", [1, 64, 150])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("factor", [None, 0.37])
def test_equals_the_reference(device: str, n_vocab: int, smoothing: float, factor: float | None, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(kernel, "_WIDTH", 64)
    draw = torch.Generator().manual_seed(n_vocab)
    logits = (torch.randn(9, n_vocab, generator=draw) * 5).to(device)
    labels = torch.randint(0, n_vocab, (9,), generator=draw).to(device)
    labels[3] = -100
    times = None if factor is None else torch.tensor(factor, device=device)
    rule = dict(ignore_index=-100, label_smoothing=smoothing)
    want, wanted = chunk_loss(logits, labels, times, want_grad=True, **rule)
    untouched = logits.clone()
    loss, nothing = kernel.chunk_loss_in_place(logits, labels, times, want_grad=False, **rule)
    assert nothing is None and torch.equal(logits, untouched)
    again, grad = kernel.chunk_loss_in_place(logits, labels, times, want_grad=True, **rule)
    assert grad is logits and torch.equal(loss, again) and not grad[3].any()
    torch.testing.assert_close((loss, grad), (want, wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_loss_and_gradients_on_cuda_are_no_worse_than_the_reference(dtype: torch.dtype) -> None:
    """Against float64, in several chunks, with a vocabulary that is no multiple of anything."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(700, 96), torch.randn(5003, 96) * 0.3
    labels = torch.randint(0, 5003, (700,))
    labels[::7] = -100
    results = {}
    for name, device, kind in (("truth", "cpu", torch.float64), ("reference", "cpu", dtype), ("ours", "cuda", dtype)):
        h, w = (x.to(device, dtype).to(kind).requires_grad_() for x in (hidden, weight))
        loss = linear_cross_entropy(h, w, labels.to(device), chunk_mib=1)
        results[name] = [loss, *torch.autograd.grad(loss, (h, w))]
    for number in range(3):
        truth = results["truth"][number].double()
        error, room = ((results[n][number].cpu().double() - truth).norm() / truth.norm() for n in ("ours", "reference"))
        assert error <= 1.5 * room + 1e-6, f"{number}: {error:.1e} against {room:.1e}"


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("chunk_mib", [64, 512])
def test_the_chunk_bounds_memory_on_cuda(chunk_mib: int) -> None:
    """One chunk of logits and one gradient of the hidden states, in forward and in backward."""
    hidden = torch.randn(8192, 2048, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(100_000, 2048, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 100_000, (8192,), device="cuda")
    linear_cross_entropy(hidden, weight, labels, chunk_mib=chunk_mib).backward()  # cuBLAS takes its workspace
    hidden.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, labels, chunk_mib=chunk_mib).backward()
    limit = min(chunk_mib, IN_PLACE_MIB) * 2**20 + hidden.numel() * 2
    assert torch.cuda.max_memory_allocated() - before <= 1.02 * limit
