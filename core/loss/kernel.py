"""Cross entropy of one chunk of logits in place on CUDA: the logits become their gradient, and nothing is copied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on

_WIDTH = 4096  # logits of a row handled at a time
_WARPS = 8


@triton.jit
def _cross_entropy_kernel(
    logits_ptr,
    labels_ptr,
    loss_ptr,
    factor_ptr,
    stride,
    n_vocab,
    ignore_index,
    smoothing,
    WANT_GRAD: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """One program a row: an online log-sum-exp, then the gradient over the logits that were read."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    logits = logits_ptr + row * stride
    kept = label != ignore_index
    top = float("-inf")
    total = 0.0
    plain_sum = 0.0
    for start in range(0, n_vocab, WIDTH):
        at = start + tl.arange(0, WIDTH)
        x = tl.load(logits + at, mask=at < n_vocab, other=float("-inf")).to(tl.float32)
        new_top = tl.maximum(top, tl.max(x, axis=0))
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), axis=0)
        top = new_top
        plain_sum += tl.sum(tl.where(at < n_vocab, x, 0.0), axis=0)
    lse = top + tl.log(total)
    of_label = tl.load(logits + label, mask=kept, other=0.0).to(tl.float32)
    loss = (1.0 - smoothing) * (lse - of_label) + smoothing * (lse - plain_sum / n_vocab)
    tl.store(loss_ptr + row, tl.where(kept, loss, 0.0))
    if WANT_GRAD:
        factor = tl.load(factor_ptr).to(tl.float32) if HAS_FACTOR else 1.0
        for start in range(0, n_vocab, WIDTH):
            at = start + tl.arange(0, WIDTH)
            x = tl.load(logits + at, mask=at < n_vocab, other=float("-inf")).to(tl.float32)
            grad = tl.exp(x - lse) - smoothing / n_vocab - tl.where(at == label, 1.0 - smoothing, 0.0)
            grad = tl.where(kept, grad * factor, 0.0)
            tl.store(logits + at, grad.to(logits_ptr.dtype.element_ty), mask=at < n_vocab)


def chunk_loss_in_place(
    raw_CV: torch.Tensor,
    labels_C: torch.Tensor,
    factor: torch.Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    want_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``reference.chunk_loss``, but that ``raw_CV`` itself becomes the gradient.

    Args:
        raw_CV: bf16, fp16 or fp32 [C, V], contiguous in V.
        labels_C: integer [C].
        factor: 0-dimensional, multiplied into the gradient; ``None`` for one.
    """
    if not raw_CV.shape[0]:
        return raw_CV.new_zeros((), dtype=torch.float32), raw_CV if want_grad else None
    loss_C = torch.empty(raw_CV.shape[0], dtype=torch.float32, device=raw_CV.device)
    with on(raw_CV.device):
        _cross_entropy_kernel[(raw_CV.shape[0],)](
            raw_CV,
            labels_C,
            loss_C,
            factor if factor is not None else loss_C,
            raw_CV.stride(0),
            raw_CV.shape[1],
            ignore_index,
            label_smoothing,
            WANT_GRAD=want_grad,
            HAS_FACTOR=factor is not None,
            WIDTH=_WIDTH,
            num_warps=_WARPS,
        )
    return loss_C.sum(), raw_CV if want_grad else None
