"""Sink attention by the cuDNN kernels that torch brings, where they measure faster than ours.

cuDNN knows no sink. But a sink only scales the output: with L = log(exp(lse) + exp(sink)), o' = o exp(lse - L), and the
backward pass of flash attention is that of the sink attention when it is given o' and L in place of o and lse, since it
forms the probabilities as exp(s - L) and their mean as the sum of do o' (Dao, FlashAttention-2, arXiv:2307.08691,
algorithm 2). The sink's own gradient is the sum of -exp(sink - L) do o'.

The backward pass sums dq in float32 and makes dk and dv of every query head, so it runs by groups of key/value heads as
in `fa4`. Its sums are in no fixed order.

Shape suffixes as in `op`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.offload.survivors import survive
from unsloth_plugins.core.sink_attention.fa4 import heads_at_once

WORK_BYTES = 8  # of an element of q: float32 sums of dq, and dk and dv of every query head
PRODUCT_BYTES = 32 << 20  # of float32 do * o for the sink's gradient


def _forward(q_BHTD: torch.Tensor, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, scale: float) -> Any:
    """Causal attention without a sink: o_BHTD in the layout of q, lse [B, H, T] or [B, H, T, 1] float32."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    return attend(q_BHTD, k_BKTD, v_BKTD, None, True, 0.0, True, False, scale=scale)[:2]


def _backward(
    do: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: Any, lse: Any, scale: float
) -> Any:
    """Gradients of q, k and v in their layouts; all [B, H or K, T, D], ``lse`` as `_forward` gave it."""
    of_dropout = torch.empty((), dtype=torch.int64, device=q.device)  # its random state: there is none
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths = (None, None, q.shape[2], k.shape[2])
    return backward(do, q, k, v, o, lse, of_dropout, of_dropout, None, *lengths, 0.0, True, scale=scale)


def _sink_gradient(do: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, sink_H: torch.Tensor) -> torch.Tensor:
    """dsink_H in float32 of the given heads, a few at a time: do and o are [B, H, T, D] in 16 bits."""
    at_once = max(1, o.shape[1] * PRODUCT_BYTES // (4 * o.numel()))
    of_heads = (*(x.split(at_once, dim=1) for x in (do, o, lse)), sink_H.split(at_once))
    parts = []
    for do_BHTD, o_BHTD, lse_BHT, sink in zip(*of_heads, strict=True):
        delta_BHT = (do_BHTD.float() * o_BHTD).sum(-1)
        share_BHT = (sink[:, None].float() - lse_BHT.reshape(delta_BHT.shape)).exp()
        parts.append(-(share_BHT * delta_BHT).sum((0, 2)))
    return torch.cat(parts)


class _Cudnn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHD, k_BTKD, v_BTKD, sink_H, scale, head_groups):
        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            o_BHTD, lse = _forward(q_BTHD.transpose(1, 2), k_BTKD.transpose(1, 2), v_BTKD.transpose(1, 2), scale)
            if sink_H is not None:
                lse_BHT = lse.view(lse.shape[:3])
                whole_BHT = torch.logaddexp(lse_BHT, sink_H[:, None].float())
                o_BHTD.mul_((lse_BHT - whole_BHT).exp_().unsqueeze(-1))
                lse_BHT.copy_(whole_BHT)
            return o_BHTD, lse

        o_BHTD, lse = survive(attend)
        ctx.save_for_backward(q_BTHD, k_BTKD, v_BTKD, sink_H, o_BHTD, lse)
        ctx.scale, ctx.head_groups = scale, head_groups
        return o_BHTD.transpose(1, 2).detach()  # no view: that may not be changed in place

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHD):
        q_BTHD, k_BTKD, v_BTKD, sink_H, o_BHTD, lse = ctx.saved_tensors
        q, k, v, do = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKD, do_BTHD))
        if do.dtype != o_BHTD.dtype or do.stride() != o_BHTD.stride():
            do = torch.empty_like(o_BHTD).copy_(do)
        heads, kv_heads = q.shape[1], k.shape[1]
        ratio = heads // kv_heads
        step = heads_at_once(kv_heads, q.numel() * WORK_BYTES, ctx.head_groups)
        grads = [torch.empty_like(x) for x in (q, k, v)] if step < kv_heads else []
        dsink_H = torch.empty_like(sink_H, dtype=torch.float32) if ctx.needs_input_grad[3] else None
        for begin in range(0, kv_heads, step):
            kv = slice(begin, min(begin + step, kv_heads))
            of_q = slice(kv.start * ratio, kv.stop * ratio)
            part = _backward(
                do[:, of_q], q[:, of_q], k[:, kv], v[:, kv], o_BHTD[:, of_q], lse[:, of_q].contiguous(), ctx.scale
            )
            if dsink_H is not None:
                dsink_H[of_q] = _sink_gradient(do[:, of_q], o_BHTD[:, of_q], lse[:, of_q], sink_H[of_q])
            if not grads:
                grads = list(part)
                continue
            for whole, piece, of in zip(grads, part, (of_q, kv, kv), strict=True):
                whole[:, of] = piece
            del part, piece  # the next group gets the memory
        need = ctx.needs_input_grad
        dq, dk, dv = (x.transpose(1, 2) if needed else None for x, needed in zip(grads, need[:3], strict=True))
        return dq, dk, dv, None if dsink_H is None else dsink_H.to(sink_H.dtype), None, None


def sink_attention_cudnn(
    q_BTHD: torch.Tensor,
    k_BTKD: torch.Tensor,
    v_BTKD: torch.Tensor,
    sink_H: torch.Tensor | None,
    *,
    scale: float,
    head_groups: int = 1,
) -> torch.Tensor:
    """Full causal attention with sinks by cuDNN; arguments as `op.sink_attention` has validated them, T = S.

    Args:
        head_groups: at least so many groups of heads in backward; more where what it sums in would pass 256 MiB.

    Returns:
        o_BTHD in the dtype of q.
    """
    q_BTHD, k_BTKD, v_BTKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BTHD, k_BTKD, v_BTKD))
    return _Cudnn.apply(q_BTHD, k_BTKD, v_BTKD, sink_H, scale, head_groups)  # type: ignore[no-any-return]
