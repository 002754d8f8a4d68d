"""Sink attention by flash-attn-4, where it is installed and measures faster than our kernels.

Its backward sums dq, and dk and dv of grouped heads, in float32 buffers of 20.5 kB a token at gpt-oss's shape. So it
runs by groups of key/value heads, which are independent of each other, and only one group's buffers exist at a time.

Shape suffixes as in `op`; N documents.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.offload.survivors import survive
from unsloth_plugins.core.sink_attention.masks import Remembered

GROUP_BYTES = 256 << 20  # of what backward sums in, in one group
WORK_BYTES = 4  # of an element of q: float32 sums of dq
_documents: Remembered[Any] = Remembered()
_holes: Remembered[bool] = Remembered()


def boundaries(documents_BS: torch.Tensor | None) -> tuple[torch.Tensor, int] | None:
    """Where documents begin and end in the flattened rows: int32 [N + 1], and the longest; ``None`` for whole rows.

    Reads the device once for the layers and the recompute that share ``documents_BS``.
    """
    if documents_BS is None:
        return None
    return _documents.get(documents_BS, None, lambda: _boundaries(documents_BS))  # type: ignore[no-any-return]


def _boundaries(documents_BS: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    batch, keys = documents_BS.shape
    starts_BS = torch.ones_like(documents_BS, dtype=torch.bool)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    starts_N = starts_BS.reshape(-1).nonzero()[:, 0]
    if starts_N.numel() == batch:
        return None
    ends_N = torch.nn.functional.pad(starts_N, (0, 1), value=batch * keys)
    return ends_N.to(torch.int32), int(ends_N.diff().max())


def has_holes(key_mask_BS: torch.Tensor | None) -> bool:
    """Whether any key is masked. Reads the device once per mask."""
    if key_mask_BS is None:
        return False
    return _holes.get(key_mask_BS, None, lambda: not bool(key_mask_BS.all()))


def heads_at_once(kv_heads: int, work_bytes: int, groups: int = 1) -> int:
    """Key/value heads of one group of backward: at least ``groups`` groups, and more where ``work_bytes``, which all
    heads together take, would pass ``GROUP_BYTES`` in one; at the least one head."""
    groups = max(groups, -(-work_bytes // GROUP_BYTES))
    return max(1, kv_heads // min(groups, kv_heads))


class _Fa4(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHD, k_BSKD, v_BSKD, sink_H, packed, window, scale, deterministic, head_groups):
        from flash_attn.cute.interface import _flash_attn_fwd

        options: dict[str, Any] = {"softmax_scale": scale, "causal": True}
        if window is not None:
            options |= {"window_size_left": window - 1, "window_size_right": 0}
        ends_N, longest = packed or (None, None)
        inputs = [q_BTHD, k_BSKD, v_BSKD]
        if packed is not None:
            inputs = [x.flatten(0, 1) for x in inputs]
            options |= {
                "cu_seqlens_q": ends_N,
                "cu_seqlens_k": ends_N,
                "max_seqlen_q": longest,
                "max_seqlen_k": longest,
            }

        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            o, lse, *_ = _flash_attn_fwd(*inputs, learnable_sink=sink_H, return_lse=True, **options)
            return o, lse

        o, lse = survive(attend) if window is None else attend()
        ctx.save_for_backward(*inputs, sink_H, o, lse, ends_N)
        ctx.options, ctx.deterministic, ctx.head_groups = options, deterministic, head_groups
        ctx.rows = q_BTHD.shape[:2]
        ctx.set_materialize_grads(False)
        if packed is not None:
            batch, queries = q_BTHD.shape[:2]
            o, lse = o.unflatten(0, (batch, queries)), lse.unflatten(1, (batch, queries)).transpose(0, 1)
            return o.detach(), lse.detach()  # no views: those may not be changed in place
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHD, dlse_BHT):
        from flash_attn.cute.interface import _flash_attn_bwd

        nothing = (None,) * 9
        if do_BTHD is None and dlse_BHT is None:
            return nothing
        q, k, v, sink_H, o, lse, ends_N = ctx.saved_tensors
        do = torch.zeros_like(o) if do_BTHD is None else do_BTHD.to(o.dtype).reshape(o.shape)
        if do.stride(-1) != 1:
            do = do.contiguous()
        dlse = dlse_BHT
        if dlse is not None and ends_N is not None:
            dlse = dlse.transpose(0, 1).reshape(lse.shape)
        heads, kv_heads = q.shape[-2], k.shape[-2]
        ratio = heads // kv_heads
        step = heads_at_once(kv_heads, q.numel() * WORK_BYTES, ctx.head_groups)
        grads = (
            [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)] if step < kv_heads else []
        )
        dsink_H = None if sink_H is None else torch.empty_like(sink_H)
        for begin in range(0, kv_heads, step):
            kv = slice(begin, min(begin + step, kv_heads))
            of_q = slice(kv.start * ratio, kv.stop * ratio)
            of_lse = (slice(None), of_q) if ends_N is None else (of_q,)
            part = _flash_attn_bwd(
                q[..., of_q, :],
                k[..., kv, :],
                v[..., kv, :],
                o[..., of_q, :],
                do[..., of_q, :],
                lse[of_lse].contiguous(),
                deterministic=ctx.deterministic,
                dlse=None if dlse is None else dlse[of_lse].contiguous(),
                learnable_sink=None if sink_H is None else sink_H[of_q].contiguous(),
                **ctx.options,
            )
            if dsink_H is not None:
                dsink_H[of_q] = part[3]
            if not grads:
                grads = list(part[:3])
                continue
            for whole, piece, of in zip(grads, part, (of_q, kv, kv), strict=False):
                whole[..., of, :] = piece
            del part, piece  # the next group gets the memory
        if ends_N is not None:
            grads = [grad.unflatten(0, ctx.rows) for grad in grads]
        need = ctx.needs_input_grad
        dq, dk, dv = (grad if needed else None for grad, needed in zip(grads, need[:3], strict=True))
        return dq, dk, dv, dsink_H if need[3] else None, *nothing[4:]


def sink_attention_fa4(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sink_H: torch.Tensor | None,
    *,
    window: int | None,
    documents_BS: torch.Tensor | None,
    scale: float,
    deterministic: bool,
    head_groups: int = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention with sinks by flash-attn-4; arguments as `op.sink_attention` has validated them, T = S.

    Args:
        deterministic: sum dq in a fixed order, which costs time.
        head_groups: at least so many groups of heads in backward; more where float32 sums of dq would pass 256 MiB.

    Returns:
        o_BTHD in the dtype of q, lse_BHT float32, the sink included.
    """
    if window is not None and window >= k_BSKD.shape[1]:
        window = None
    q_BTHD, k_BSKD, v_BSKD = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BTHD, k_BSKD, v_BSKD))
    sink_H = None if sink_H is None else sink_H.float()
    packed = boundaries(documents_BS)
    return _Fa4.apply(q_BTHD, k_BSKD, v_BSKD, sink_H, packed, window, scale, deterministic, head_groups)  # type: ignore[no-any-return]
