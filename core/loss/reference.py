"""Chunked linear cross entropy in plain torch.

Shape suffixes: N tokens, C tokens of one chunk, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

Transform = Callable[[torch.Tensor], torch.Tensor]
_STEP = 128  # rows of tiles that products are made of on GPUs


def chunk_tokens(n_vocab: int, chunk_mib: int, bytes_each: int = 12) -> int:
    """Tokens per chunk so that what is alive of each logit fits in ``chunk_mib``: a multiple of 128, or fewer than 128.

    By default that is 12 bytes: the logit, its float32 copy and its gradient.
    """
    tokens = chunk_mib * 2**20 // (bytes_each * n_vocab)
    return tokens - tokens % _STEP if tokens > _STEP else max(1, tokens)


def _chunk_loss(
    logits_CV: torch.Tensor, labels_C: torch.Tensor, ignore_index: int, label_smoothing: float, want_grad: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sum over the chunk of (1 - e) * nll + e * mean(-log p), and its gradient with respect to the float32 logits.

    d/dz = p - (1 - e) * onehot - e / V, zero in rows that are ignored.
    """
    kept_C = labels_C != ignore_index
    safe_C = labels_C.masked_fill(~kept_C, 0)[:, None]
    lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
    nll_C = (lse_C1 - logits_CV.gather(1, safe_C))[:, 0]
    if label_smoothing:
        nll_C = (1 - label_smoothing) * nll_C + label_smoothing * (lse_C1[:, 0] - logits_CV.mean(-1))
    loss = torch.where(kept_C, nll_C, 0.0).sum()
    if not want_grad:
        return loss, None
    grad_CV = (logits_CV - lse_C1).exp_()
    if label_smoothing:
        grad_CV -= label_smoothing / logits_CV.shape[1]
    grad_CV.scatter_add_(1, safe_C, torch.full_like(safe_C, -(1 - label_smoothing), dtype=grad_CV.dtype))
    return loss, grad_CV.masked_fill_(~kept_C[:, None], 0.0)


def chunk_loss(
    raw_CV: torch.Tensor,
    labels_C: torch.Tensor,
    factor: torch.Tensor | None,
    *,
    ignore_index: int,
    label_smoothing: float,
    want_grad: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Summed loss of one chunk in float32 or wider, and its gradient, times ``factor``, in the dtype of ``raw_CV``."""
    wide_CV = raw_CV.to(torch.promote_types(raw_CV.dtype, torch.float32))
    loss, grad_CV = _chunk_loss(wide_CV, labels_C, ignore_index, label_smoothing, want_grad)
    if grad_CV is None:
        return loss, None
    return loss, (grad_CV if factor is None else grad_CV.mul_(factor)).to(raw_CV.dtype)


class ChunkedLinearCrossEntropy(torch.autograd.Function):
    """``sum_n CE(transform(x W^T + b), label) * scale`` with one chunk of logits alive at a time.

    Gradients are formed in forward, chunk by chunk, so backward only multiplies them by the incoming scalar: the head
    runs once. It does so in place where the graph is not kept for another backward. The logits and their gradient have
    the dtype of hidden and weight as in the unchunked computation, the softmax and the sum over tokens are float32
    (float64 for float64), and a trainable head's dW is accumulated in it.
    In float16 the gradients wait without the factors (1 / tokens, and a gradient scaler's), which would underflow or
    overflow there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None,
        labels_N: torch.Tensor,
        scale: torch.Tensor,
        transform: Transform | None,
        ignore_index: int,
        label_smoothing: float,
        tokens: int,
        accumulate: torch.dtype,
        chunk: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    ) -> torch.Tensor:
        wants = ctx.needs_input_grad[:3]
        unscaled = hidden_NH.dtype == torch.float16
        factor = None if unscaled else scale
        rule: dict[str, Any] = dict(ignore_index=ignore_index, label_smoothing=label_smoothing, want_grad=any(wants))
        loss = hidden_NH.new_zeros((), dtype=accumulate)
        d_hidden_NH = torch.empty_like(hidden_NH) if wants[0] else None
        d_weight_VH = torch.zeros_like(weight_VH, dtype=accumulate) if wants[1] else None
        d_bias_V = torch.zeros_like(bias_V, dtype=accumulate) if bias_V is not None and wants[2] else None
        for start in range(0, hidden_NH.shape[0], tokens):
            rows = slice(start, start + tokens)
            raw_CV = F.linear(hidden_NH[rows], weight_VH, bias_V)
            if transform is None:
                part, grad_CV = chunk(raw_CV, labels_N[rows], factor, **rule)
            else:
                with torch.set_grad_enabled(any(wants)):
                    leaf_CV = raw_CV.detach().requires_grad_(any(wants))
                    logits_CV = transform(leaf_CV).to(accumulate)
                part, grad_CV = chunk_loss(logits_CV.detach(), labels_N[rows], factor, **rule)
                if grad_CV is not None:
                    (grad_CV,) = torch.autograd.grad(logits_CV, leaf_CV, grad_CV)
            loss += part
            if grad_CV is None:
                continue
            if d_hidden_NH is not None:
                torch.mm(grad_CV, weight_VH, out=d_hidden_NH[rows])
            if d_weight_VH is not None:
                d_weight_VH += grad_CV.T @ hidden_NH[rows]
            if d_bias_V is not None:
                d_bias_V += grad_CV.sum(0, dtype=accumulate)
            del raw_CV, grad_CV  # or the next chunk's logits would be made beside them
        if not unscaled:
            d_weight_VH = None if d_weight_VH is None else d_weight_VH.to(weight_VH.dtype)
            d_bias_V = None if d_bias_V is None or bias_V is None else d_bias_V.to(bias_V.dtype)
        ctx.save_for_backward(d_hidden_NH, d_weight_VH, d_bias_V, scale if unscaled else None)
        ctx.tokens = tokens
        return loss * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        *grads, scale = ctx.saved_tensors
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        if scale is None:
            scaled = [None if g is None else _times(g, grad.to(g.dtype), keep) for g in grads]
        else:
            scaled = [None if g is None else _times_in_half(g, grad * scale, ctx.tokens, keep) for g in grads]
        return *scaled, *[None] * 8


def _times(x: torch.Tensor, factor: torch.Tensor, keep: bool) -> torch.Tensor:
    return x * factor if keep else x.mul_(factor)


def _times_in_half(x: torch.Tensor, factor: torch.Tensor, rows: int, keep: bool) -> torch.Tensor:
    """x * factor in float16, multiplied in the factor's wider dtype some rows at a time."""
    out = torch.empty_like(x, dtype=torch.float16) if keep or x.dtype != torch.float16 else x
    for part, target in zip(x.split(rows), out.split(rows), strict=True):
        target.copy_(part * factor if part.dtype == factor.dtype else part.to(factor.dtype) * factor)
    return out
