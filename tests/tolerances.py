"""How far a kernel may be from the truth: no further than eager PyTorch in the same dtype, and a little."""

from __future__ import annotations

import torch

# Added to eager's error, relative to the largest magnitude of the true tensor. Eager may be exact by luck, on a row of
# one key for instance, where a kernel rounds once more.
SLACK = {
    torch.float32: 2e-6,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,
}


def assert_no_worse_than_eager(
    name: str, got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype
) -> None:
    """Largest error and error norm of ``got`` against those of ``eager``; infinities must be where they belong.

    Args:
        name: of the tensor, for the message.
        got: the kernel's result.
        eager: the same in plain PyTorch at the working precision.
        truth: the same in float64.
        dtype: the working precision.
    """
    assert got.shape == truth.shape, f"{name}: shape {list(got.shape)}, expected {list(truth.shape)}"
    got, eager, truth = got.detach().double().cpu(), eager.detach().double().cpu(), truth.detach().double().cpu()
    finite = truth.isfinite()
    assert torch.equal(got[~finite], truth[~finite]), f"{name}: infinities differ"
    got, eager, truth = got[finite], eager[finite], truth[finite]
    assert got.isfinite().all(), f"{name}: not finite where the truth is"
    if truth.numel() == 0:
        return
    error, allowed = (got - truth).abs().max(), (eager - truth).abs().max()
    limit = allowed + SLACK[dtype] * truth.abs().max()
    assert error <= limit, f"{name}: largest error {error:.3g}, eager's {allowed:.3g}, limit {limit:.3g}"
    # The norm averages over elements, so luck counts less and the slack is smaller.
    error, allowed = (got - truth).norm(), (eager - truth).norm()
    limit = 1.1 * allowed + 0.5 * SLACK[dtype] * truth.norm()
    assert error <= limit, f"{name}: error norm {error:.3g}, eager's {allowed:.3g}, limit {limit:.3g}"
