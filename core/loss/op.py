"""Front door of the loss: validation, normalisation, and the choice of how the head is evaluated."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.errors import ConfigError, ShapeError
from unsloth_plugins.core.loss.reference import (
    ChunkedLinearCrossEntropy,
    Transform,
    _chunk_loss,
    chunk_loss,
    chunk_tokens,
)

IN_PLACE_MIB = 252
"""MiB of logits of a chunk that the kernel works on, at most: 640 tokens of 201,088 logits, 1,024 of 128,256. With
fewer the product that makes the gradient of their hidden states has too few tiles (benchmarks/results, loss-sweep).

The chunk comes on top of the gradient of the hidden states (32,768 tokens of 2,880 numbers: 180 MiB), which is all that
backward holds."""


def _check_labels(labels_N: torch.Tensor, n_vocab: int, ignore_index: int) -> None:
    wrong_N = (labels_N != ignore_index) & ((labels_N < 0) | (labels_N >= n_vocab))
    if bool(wrong_N.any()):
        raise ShapeError(
            expected=f"labels in [0, {n_vocab}) or ignore_index={ignore_index}",
            got=f"{labels_N[wrong_N][0].item()}",
            remedy="The tokenizer and the model's vocabulary do not match, or padding was not set to ignore_index.",
        )


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ConfigError(
            expected="label_smoothing in [0, 1)", got=str(label_smoothing), remedy="Pass 0 for none; 0.1 is common."
        )


def _scale(labels_N: torch.Tensor, num_items: torch.Tensor | int | None, ignore_index: int, dtype: torch.dtype):
    """1 / number of tokens that the loss is averaged over; 1 / max(count, 1), so no valid label gives zero, not NaN."""
    if num_items is None:
        num_items = (labels_N != ignore_index).sum()
    count = torch.as_tensor(num_items, device=labels_N.device).to(dtype)
    return 1 / count.clamp(min=1)


def linear_cross_entropy(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    labels_N: torch.Tensor,
    *,
    bias_V: torch.Tensor | None = None,
    num_items: torch.Tensor | int | None = None,
    transform: Transform | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_mib: int = 512,
) -> torch.Tensor:
    """Mean cross entropy of ``hidden @ weight.T + bias`` against labels that are already shifted.

    Args:
        hidden_NH: float [N, H].
        weight_VH: float [V, H], same dtype. Frozen weights cost no gradient.
        labels_N: integer [N] in [0, V) or ``ignore_index``.
        bias_V: float [V] or ``None``.
        num_items: tokens to divide by; ``None`` divides by the number of labels that count.
        transform: elementwise function of the logits (softcap, scale), differentiated by torch chunk by chunk.
        label_smoothing: weight of the uniform distribution, in [0, 1).
        chunk_mib: MiB of logits, their float32 copy and their gradient alive at once. On CUDA, without a transform, the
            logits become their gradient; then it is at most ``IN_PLACE_MIB``, unless the weights are trained: each
            chunk adds to the gradient of all of them.

    Returns:
        float32 scalar (float64 for float64). No label that counts gives 0 with zero gradients.

    Raises:
        ConfigError: a smoothing out of range.
        ShapeError: shapes do not match, or a label is out of range.
    """
    n_vocab = weight_VH.shape[0]
    _check_smoothing(label_smoothing)
    if hidden_NH.ndim != 2 or weight_VH.ndim != 2 or hidden_NH.shape[1] != weight_VH.shape[1]:
        raise ShapeError(
            expected="hidden_NH [N, H] and weight_VH [V, H] of one H",
            got=f"{list(hidden_NH.shape)} and {list(weight_VH.shape)}",
            remedy="Flatten batch and time, and pass the head's weight as nn.Linear stores it.",
        )
    if labels_N.shape != hidden_NH.shape[:1]:
        raise ShapeError(
            expected=f"labels_N [{hidden_NH.shape[0]}]",
            got=f"{list(labels_N.shape)}",
            remedy="Pass one label, already shifted, per row of hidden_NH.",
        )
    _check_labels(labels_N, n_vocab, ignore_index)
    device = hidden_NH.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_NH, weight_VH = hidden_NH.to(dtype), weight_VH.to(dtype)
        bias_V = None if bias_V is None else bias_V.to(dtype)
    accumulate = torch.promote_types(hidden_NH.dtype, torch.float32)
    chunk, bytes_each = chunk_loss, 12
    if hidden_NH.is_cuda and transform is None and accumulate == torch.float32:
        from unsloth_plugins.core.loss.kernel import chunk_loss_in_place  # needs triton: only where it runs

        chunk, bytes_each = chunk_loss_in_place, hidden_NH.element_size()
        if not weight_VH.requires_grad:
            chunk_mib = min(chunk_mib, IN_PLACE_MIB)
    with torch.autocast(device, enabled=False):
        return ChunkedLinearCrossEntropy.apply(
            hidden_NH,
            weight_VH,
            bias_V,
            labels_N,
            _scale(labels_N, num_items, ignore_index, accumulate),
            transform,
            ignore_index,
            label_smoothing,
            chunk_tokens(n_vocab, chunk_mib, bytes_each),
            accumulate,
            chunk,
        )


class _SummedChunk(torch.autograd.Function):
    """The summed cross entropy of one chunk of logits, its gradient formed in forward."""

    @staticmethod
    def forward(ctx, logits_CV, labels_C, ignore_index, label_smoothing):  # type: ignore[no-untyped-def]
        loss, grad_CV = _chunk_loss(logits_CV, labels_C, ignore_index, label_smoothing, ctx.needs_input_grad[0])
        ctx.save_for_backward(grad_CV)
        return loss

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        (grad_CV,) = ctx.saved_tensors
        return grad_CV * grad, None, None, None


def head_cross_entropy(
    hidden_NH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    n_vocab: int,
    labels_N: torch.Tensor,
    *,
    num_items: torch.Tensor | int | None = None,
    transform: Transform | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_mib: int = 512,
) -> torch.Tensor:
    """``linear_cross_entropy`` for any head (LoRA, quantised): each chunk is checkpointed and the head called on it.

    Args, returns and errors as ``linear_cross_entropy``; ``head`` maps [C, H] to [C, V] and is differentiated by torch.
    """
    _check_smoothing(label_smoothing)
    _check_labels(labels_N, n_vocab, ignore_index)

    def part(hidden_CH: torch.Tensor, labels_C: torch.Tensor) -> torch.Tensor:
        logits_CV = head(hidden_CH)
        if transform is not None:
            logits_CV = transform(logits_CV)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return _SummedChunk.apply(logits_CV, labels_C, ignore_index, label_smoothing)

    tokens = chunk_tokens(n_vocab, chunk_mib)
    parts = [
        checkpoint(part, hidden_CH, labels_C, use_reentrant=False)
        for hidden_CH, labels_C in zip(hidden_NH.split(tokens), labels_N.split(tokens), strict=True)
    ]
    loss = torch.stack(parts).sum()
    return loss * _scale(labels_N, num_items, ignore_index, loss.dtype)


class _TokenLogProbs(torch.autograd.Function):
    """log p of the label and the sum of log p over the vocabulary, for each token of one chunk of logits.

    With z the logits: d log p_y / dz = onehot - p, d sum / dz = 1 - V p.
    """

    @staticmethod
    def forward(ctx, logits_CV, labels_C1):  # type: ignore[no-untyped-def]
        lse_C1 = logits_CV.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits_CV, lse_C1, labels_C1)
        picked_C1 = logits_CV.gather(1, labels_C1) - lse_C1
        total_C1 = logits_CV.sum(-1, keepdim=True) - logits_CV.shape[1] * lse_C1
        return picked_C1[:, 0], total_C1[:, 0]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_picked_C, d_total_C):  # type: ignore[no-untyped-def]
        logits_CV, lse_C1, labels_C1 = ctx.saved_tensors
        d_picked_C1, d_total_C1 = d_picked_C[:, None], d_total_C[:, None]
        grad_CV = (logits_CV - lse_C1).exp_()
        grad_CV.mul_(-(d_picked_C1 + logits_CV.shape[1] * d_total_C1)).add_(d_total_C1)
        return grad_CV.scatter_add_(1, labels_C1, d_picked_C1), None


def token_log_probs(
    hidden_NH: torch.Tensor,
    head: Callable[[torch.Tensor], torch.Tensor],
    n_vocab: int,
    labels_N: torch.Tensor,
    *,
    transform: Transform | None = None,
    chunk_mib: int = 512,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token the log-probability of its label and the sum of all log-probabilities, for losses built on them.

    Args:
        hidden_NH, head, transform, chunk_mib: as for ``head_cross_entropy``. Each chunk is checkpointed.
        labels_N: integer [N] in [0, V).

    Returns:
        float32 [N] each (float64 for float64).

    Raises:
        ShapeError: a label is out of range.
    """
    _check_labels(labels_N, n_vocab, ignore_index=-100)

    def part(hidden_CH: torch.Tensor, labels_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits_CV = head(hidden_CH)
        if transform is not None:
            logits_CV = transform(logits_CV)
        logits_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
        return _TokenLogProbs.apply(logits_CV, labels_C[:, None])  # type: ignore[no-any-return]

    tokens = chunk_tokens(n_vocab, chunk_mib)
    parts = [
        checkpoint(part, hidden_CH, labels_C, use_reentrant=False)
        for hidden_CH, labels_C in zip(hidden_NH.split(tokens), labels_N.split(tokens), strict=True)
    ]
    picked, total = (torch.cat(each) for each in zip(*parts, strict=True))
    return picked, total
