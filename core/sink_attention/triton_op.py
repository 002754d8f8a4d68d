"""Sink attention by the Triton kernels, as one autograd function.

Shape suffixes: B batch, T queries, S keys, H query heads, K key/value heads, G query heads per key/value head, D head
size, R blocks of queries.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.device import on
from unsloth_plugins.core.offload.survivors import survive
from unsloth_plugins.core.sink_attention.masks import Remembered, visible_range
from unsloth_plugins.core.sink_attention.triton_bwd import ROWS, dq_launch, row_sums_launch
from unsloth_plugins.core.sink_attention.triton_decode import decode
from unsloth_plugins.core.sink_attention.triton_dkdv import dkdv_launch
from unsloth_plugins.core.sink_attention.triton_fwd import forward_kernel, forward_launch
from unsloth_plugins.core.sink_attention.triton_tiles import Kernel, Tile, configs, is_narrow

# Whether the kernels were built for triton's interpreter, which runs them on the CPU.
INTERPRETED = not isinstance(forward_kernel, triton.runtime.JITFunction)


def run(launch: tuple[Any, int, dict[str, Any]], device: torch.device) -> None:
    """Launch a kernel on ``device``; an empty grid is no launch."""
    kernel, programs, arguments = launch
    if programs == 0:
        return
    with on(device):
        kernel[(programs,)](**arguments)


def pick(kernel: Kernel, q_BTHD: torch.Tensor, window: int | None) -> Tile:
    """The first configuration of the table for this input."""
    device = q_BTHD.device
    return configs(
        kernel,
        head_size=q_BTHD.shape[-1],
        dtype=q_BTHD.dtype,
        capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 6),
        narrow=is_narrow(window),
        queries=q_BTHD.shape[1],
    )[0]


_of_documents: Remembered[Any] = Remembered()


def _range(documents_BS: torch.Tensor | None, key_mask_BS: torch.Tensor | None, window: int | None) -> Any:
    """``visible_range``, computed once for the layers of a forward and its backward that share a window."""
    if documents_BS is None or key_mask_BS is not None:
        return visible_range(documents_BS, key_mask_BS, window)
    return _of_documents.get(documents_BS, window, lambda: visible_range(documents_BS, None, window))


def _rows(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where its last dimension is contiguous, which is all that the kernels need."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _TritonSinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHD, k_BSKD, v_BSKD, sink_H, documents_BS, key_mask_BS, window, scale, softcap, head_groups):
        q_BTHD, k_BSKD, v_BSKD = _rows(q_BTHD), _rows(k_BSKD), _rows(v_BSKD)
        first_BS, last_BS = _range(documents_BS, key_mask_BS, window)
        seen_BS = None if key_mask_BS is None else key_mask_BS.contiguous().view(torch.uint8)

        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            o_BTHD = torch.empty_like(q_BTHD, memory_format=torch.contiguous_format)
            lse_BHT = q_BTHD.new_empty((q_BTHD.shape[0], q_BTHD.shape[2], q_BTHD.shape[1]), dtype=torch.float32)
            run(
                forward_launch(
                    q_BTHD,
                    k_BSKD,
                    v_BSKD,
                    None if sink_H is None else sink_H.float().contiguous(),
                    first_BS,
                    seen_BS,
                    o_BTHD,
                    lse_BHT,
                    window=window,
                    scale=scale,
                    softcap=softcap,
                    narrow=is_narrow(window),
                    tile=pick("forward", q_BTHD, window),
                ),
                q_BTHD.device,
            )
            return o_BTHD, lse_BHT

        o_BTHD, lse_BHT = survive(attend) if window is None else attend()
        ctx.save_for_backward(q_BTHD, k_BSKD, v_BSKD, sink_H, first_BS, last_BS, seen_BS, o_BTHD, lse_BHT)
        ctx.options = (window, scale, softcap, head_groups)
        ctx.set_materialize_grads(False)
        return o_BTHD, lse_BHT

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHD, dlse_BHT):
        nothing = (None,) * 10
        if do_BTHD is None and dlse_BHT is None:
            return nothing
        q_BTHD, k_BSKD, v_BSKD, sink_H, first_BS, last_BS, seen_BS, o_BTHD, lse_BHT = ctx.saved_tensors
        window, scale, softcap, head_groups = ctx.options
        need_q, need_k, need_v, need_sink = ctx.needs_input_grad[:4]
        queries, heads = q_BTHD.shape[1:3]
        kv_heads = k_BSKD.shape[2]
        device = q_BTHD.device

        sink = sink_H.float().contiguous() if need_sink else None
        dsink_H = lse_BHT.new_empty(heads) if need_sink else None
        step, ratio = -(-kv_heads // head_groups), heads // kv_heads
        groups = [slice(begin, min(begin + step, kv_heads)) for begin in range(0, kv_heads, step)]

        def of_queries(kv):
            return slice(kv.start * ratio, kv.stop * ratio)

        def gradient_of_o(kv):
            if do_BTHD is None:
                return torch.zeros_like(q_BTHD[:, :, of_queries(kv)])
            return _rows(do_BTHD[:, :, of_queries(kv)].to(q_BTHD.dtype))

        deltas = []
        for kv in groups:
            of_q, do = of_queries(kv), gradient_of_o(kv)
            lse, dlse = lse_BHT[:, of_q], None if dlse_BHT is None else dlse_BHT[:, of_q]
            deltas.append(lse.new_empty(lse.shape))
            dsink_BHR = lse.new_empty((*lse.shape[:2], triton.cdiv(queries, ROWS))) if need_sink else None
            of_sink = None if sink is None else sink[of_q]
            run(row_sums_launch(o_BTHD[:, :, of_q], do, lse, dlse, of_sink, deltas[-1], dsink_BHR), device)
            if dsink_H is not None:
                dsink_H[of_q] = dsink_BHR.sum(dim=(0, 2))
        del o_BTHD  # in a checkpoint's recompute nobody else holds it: its memory goes to dq

        dq_BTHD = torch.empty_like(q_BTHD, memory_format=torch.contiguous_format) if need_q else None
        dk_BSKD, dv_BSKD = (
            torch.empty_like(x, memory_format=torch.contiguous_format) if need_k or need_v else None
            for x in (k_BSKD, v_BSKD)
        )
        shared = {"window": window, "scale": scale, "softcap": softcap, "narrow": is_narrow(window)}
        for kv, delta in zip(groups, deltas, strict=True):
            of_q, do = of_queries(kv), gradient_of_o(kv)
            q, k, v, lse = q_BTHD[:, :, of_q], k_BSKD[:, :, kv], v_BSKD[:, :, kv], lse_BHT[:, of_q]
            if dq_BTHD is not None:
                dq, tile = dq_BTHD[:, :, of_q], pick("dq", q_BTHD, window)
                run(dq_launch(q, k, v, do, lse, delta, first_BS, seen_BS, dq, tile=tile, **shared), device)
            if dk_BSKD is not None:
                dk, dv, tile = dk_BSKD[:, :, kv], dv_BSKD[:, :, kv], pick("dkdv", q_BTHD, window)
                run(dkdv_launch(q, k, v, do, lse, delta, last_BS, seen_BS, dk, dv, tile=tile, **shared), device)

        dsink_H = None if dsink_H is None else dsink_H.to(sink_H.dtype)
        return (dq_BTHD, dk_BSKD if need_k else None, dv_BSKD if need_v else None, dsink_H) + nothing[4:]


@torch.compiler.disable(reason="kernels and caches of our own")
def sink_attention_triton(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sink_H: torch.Tensor | None,
    *,
    window: int | None,
    documents_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    head_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention with sinks by the Triton kernels; arguments as `op.sink_attention` has validated them.

    Saves q, k, v, o and lse. Memory beyond the results: one float32 per query and head in the backward pass, which
    lets o go before it makes dq, and a copy of whichever of q, k, v and the gradient of o is not contiguous in D.
    Deterministic.

    Args:
        q_BTHD: [B, T, H, D] float16, bfloat16 or float32 queries, D <= 256, T <= S; query t sits at S - T + t.
        k_BSKD: [B, S, K, D] keys, K divides H.
        v_BSKD: [B, S, K, D] values.
        sink_H: [H] sink logits of any floating dtype, or None.
        window: a query sees the last ``window`` keys, itself included; None means all.
        documents_BS: [B, S] integer ids, a document being a run of equal ids; or None.
        key_mask_BS: [B, S] bool, False for padding, or None.
        scale: factor of q . k, applied before the cap.
        softcap: cap * tanh(x / cap), or None.
        head_groups: the backward pass takes the key/value heads in so many groups, one after the other. A copy of the
            gradient of o exists for one group at a time, the row sums for all; the result is the same.

    Returns:
        o_BTHD: [B, T, H, D] in the dtype of q.
        lse_BHT: [B, H, T] float32: natural log, the sink included; differentiable.
    """
    if window is not None and window >= k_BSKD.shape[1]:
        window = None
    if scale <= 0:
        # The kernels scale after they have taken a maximum.
        q_BTHD, scale = q_BTHD * ((scale > 0) - (scale < 0)), abs(scale) or 1.0
    inputs = (q_BTHD, k_BSKD, v_BSKD, *(() if sink_H is None else (sink_H,)))
    if q_BTHD.shape[1] == 1 and not (torch.is_grad_enabled() and any(x.requires_grad for x in inputs)):
        first_BS, _ = _range(documents_BS, key_mask_BS, window)
        return decode(
            _rows(q_BTHD),
            _rows(k_BSKD),
            _rows(v_BSKD),
            None if sink_H is None else sink_H.float().contiguous(),
            first_BS,
            None if key_mask_BS is None else key_mask_BS.contiguous().view(torch.uint8),
            window=window,
            scale=scale,
            softcap=softcap,
        )
    return _TritonSinkAttention.apply(
        q_BTHD, k_BSKD, v_BSKD, sink_H, documents_BS, key_mask_BS, window, scale, softcap, head_groups
    )
