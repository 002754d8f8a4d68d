"""Sink attention in plain PyTorch: the truth that kernels are tested against, and the backend that runs anywhere.

Shape suffixes: B batch, T queries, S keys, H query heads, K key/value heads, G = H / K query heads per key/value
head, D head size; t and s are the queries and the keys of one block.

Maths, per query head, with x_ij = scale * q_i . k_j, S_ij = x_ij or softcap * tanh(x_ij / softcap), and the sink s:

    allowed(i, j) = j <= i, i - j < window, same document, key j not padding;   i is key-aligned: i = S - T + t
    L_i  = log(exp(s) + sum_{allowed j} exp(S_ij));   P_ij = exp(S_ij - L_i);   O_i = sum_j P_ij v_j
    D_i  = dO_i . O_i - dL_i
    dS_ij = P_ij (dO_i . v_j - D_i);   dx_ij = dS_ij (1 - (S_ij / softcap)^2)
    dq_i = scale sum_j dx_ij k_j;   dk_j = scale sum_i dx_ij q_i;   dv_j = sum_i P_ij dO_i
    ds   = -sum_{batch, i} exp(s - L_i) D_i

A row with no allowed key gives O = 0 and L = s (-inf without a sink) and passes no gradient to q, k, v.

Source: the sink is the one of gpt-oss (openai/gpt-oss torch/model.py, ``sdpa``): one more softmax column per head
whose probability is dropped. The backward is the flash-attention recomputation from L (Dao et al. 2022, algorithm 4),
which holds unchanged when O and L include the sink. Checked with ``torch.autograd.gradcheck`` in float64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.offload.survivors import survive


def _group_rows(x_BtHD: torch.Tensor, kv_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, t, H, D] -> [B, K, G * t, D]: the query heads of one key/value head share one matrix product."""
    x_BKGtD = x_BtHD.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4)
    return x_BKGtD.to(dtype).flatten(2, 3)


def _ungroup_rows(x_BKRD: torch.Tensor, groups: int) -> torch.Tensor:
    """[B, K, G * t, D] -> [B, t, H, D], the inverse of `_group_rows` (the dtype stays)."""
    return x_BKRD.unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _query_blocks(queries: int, keys: int, window: int | None, block_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield each block of queries with the keys that causality and the window leave to it."""
    offset = keys - queries
    for begin in range(0, queries, block_size):
        end = min(begin + block_size, queries)
        first_key = 0 if window is None else max(0, offset + begin - window + 1)
        yield slice(begin, end), slice(first_key, offset + end)


def allowed_block(
    rows: slice,
    cols: slice,
    offset: int,
    window: int | None,
    documents_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    device: torch.device,
) -> torch.Tensor:
    """Boolean mask of one block of queries and keys, [1 or B, 1, 1, t, s]; ``offset`` is S - T."""
    at_t = torch.arange(rows.start + offset, rows.stop + offset, device=device)
    at_s = torch.arange(cols.start, cols.stop, device=device)
    distance_ts = at_t[:, None] - at_s[None, :]
    allowed_Bts = (distance_ts >= 0)[None]
    if window is not None:
        allowed_Bts = allowed_Bts & (distance_ts < window)
    if documents_BS is not None:
        of_query_Bt = documents_BS[:, rows.start + offset : rows.stop + offset]
        allowed_Bts = allowed_Bts & (of_query_Bt[:, :, None] == documents_BS[:, None, cols])
    if key_mask_BS is not None:
        allowed_Bts = allowed_Bts & key_mask_BS[:, None, cols]
    return allowed_Bts[:, None, None]


def _logits(
    q_BKRD: torch.Tensor, k_BKsD: torch.Tensor, allowed: torch.Tensor, groups: int, scale: float, softcap: float | None
) -> torch.Tensor:
    """Scaled, capped and masked logits of one block, [B, K, G, t, s]; -inf where a key is not allowed."""
    logits = (q_BKRD @ k_BKsD.transpose(-1, -2)).mul_(scale).unflatten(2, (groups, -1))
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    return logits.masked_fill_(~allowed, float("-inf"))


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BTHD, k_BSKD, v_BSKD, sink_H, documents_BS, key_mask_BS, window, scale, softcap, block_size):
        batch, queries, heads, _ = q_BTHD.shape
        keys, kv_heads = k_BSKD.shape[1:3]
        groups = heads // kv_heads
        compute = torch.float64 if q_BTHD.dtype == torch.float64 else torch.float32

        def attend() -> tuple[torch.Tensor, torch.Tensor]:
            o_BTHD = torch.empty_like(q_BTHD, memory_format=torch.contiguous_format)
            lse_BHT = q_BTHD.new_empty((batch, heads, queries), dtype=compute)
            # Autocast would turn the float32 products below into half precision.
            with torch.autocast(q_BTHD.device.type, enabled=False):
                sink_KG11 = None if sink_H is None else sink_H.to(compute).view(kv_heads, groups, 1, 1)
                for rows, cols in _query_blocks(queries, keys, window, block_size):
                    q = _group_rows(q_BTHD[:, rows], kv_heads, compute)
                    k = k_BSKD[:, cols].transpose(1, 2).to(compute)
                    v = v_BSKD[:, cols].transpose(1, 2).to(compute)
                    allowed = allowed_block(rows, cols, keys - queries, window, documents_BS, key_mask_BS, q.device)
                    p = _logits(q, k, allowed, groups, scale, softcap)

                    top = p.amax(dim=-1, keepdim=True)
                    if sink_KG11 is not None:
                        top = torch.maximum(top, sink_KG11)
                    top = top.masked_fill(top == float("-inf"), 0.0)  # an empty row without a sink
                    p.sub_(top).exp_()
                    total = p.sum(dim=-1, keepdim=True)
                    if sink_KG11 is not None:
                        total = total + torch.exp(sink_KG11 - top)
                    o = (p.flatten(2, 3) @ v) / total.masked_fill(total == 0, 1.0).flatten(2, 3)
                    o_BTHD[:, rows] = _ungroup_rows(o, groups).to(o_BTHD.dtype)
                    lse_BHT[:, :, rows] = (total.log() + top).squeeze(-1).flatten(1, 2)
            return o_BTHD, lse_BHT

        o_BTHD, lse_BHT = survive(attend) if window is None or window >= keys else attend()
        ctx.save_for_backward(q_BTHD, k_BSKD, v_BSKD, sink_H, documents_BS, key_mask_BS, lse_BHT)
        ctx.options = (window, scale, softcap, block_size)
        ctx.set_materialize_grads(False)
        return o_BTHD, lse_BHT

    @staticmethod
    @once_differentiable
    def backward(ctx, do_BTHD, dlse_BHT):
        nothing = (None,) * 10
        if do_BTHD is None and dlse_BHT is None:
            return nothing
        q_BTHD, k_BSKD, v_BSKD, sink_H, documents_BS, key_mask_BS, lse_BHT = ctx.saved_tensors
        window, scale, softcap, block_size = ctx.options
        need_q, need_k, need_v, need_sink = ctx.needs_input_grad[:4]
        queries, heads = q_BTHD.shape[1:3]
        keys, kv_heads = k_BSKD.shape[1:3]
        groups = heads // kv_heads
        compute = lse_BHT.dtype

        # With the heads before the keys, every block's addition runs over contiguous memory.
        dq_BTHD = torch.empty_like(q_BTHD, memory_format=torch.contiguous_format) if need_q else None
        kv_shape = (k_BSKD.shape[0], kv_heads, keys, k_BSKD.shape[-1])
        dk_BKSD = k_BSKD.new_zeros(kv_shape, dtype=compute) if need_k else None
        dv_BKSD = v_BSKD.new_zeros(kv_shape, dtype=compute) if need_v else None
        dsink_KG = lse_BHT.new_zeros((kv_heads, groups)) if need_sink else None

        with torch.autocast(q_BTHD.device.type, enabled=False):
            sink_KG11 = sink_H.to(compute).view(kv_heads, groups, 1, 1) if need_sink else None
            for rows, cols in _query_blocks(queries, keys, window, block_size):
                q = _group_rows(q_BTHD[:, rows], kv_heads, compute)
                k = k_BSKD[:, cols].transpose(1, 2).to(compute)
                allowed = allowed_block(rows, cols, keys - queries, window, documents_BS, key_mask_BS, q.device)
                logits = _logits(q, k, allowed, groups, scale, softcap)
                lse = lse_BHT[:, :, rows].unflatten(1, (kv_heads, groups)).unsqueeze(-1)
                empty = lse == float("-inf")
                lse = lse.masked_fill(empty, 0.0)
                p = torch.exp(logits - lse)

                if do_BTHD is None:
                    dp, delta = None, torch.zeros_like(lse)
                else:
                    do = _group_rows(do_BTHD[:, rows], kv_heads, compute)
                    if need_v:
                        dv_BKSD[:, :, cols] += p.flatten(2, 3).transpose(-1, -2) @ do
                    if not (need_q or need_k or need_sink):
                        continue
                    v = v_BSKD[:, cols].transpose(1, 2).to(compute)
                    dp = (do @ v.transpose(-1, -2)).unflatten(2, (groups, -1))
                    # sum_j P_ij dP_ij is dO_i . O_i, without the rounding of a half precision O.
                    delta = (p * dp).sum(dim=-1, keepdim=True)
                if dlse_BHT is not None:
                    dlse = dlse_BHT[:, :, rows].to(compute).unflatten(1, (kv_heads, groups)).unsqueeze(-1)
                    delta = delta - dlse.masked_fill(empty, 0.0)

                if need_sink:
                    dsink_KG -= (torch.exp(sink_KG11 - lse) * delta).sum(dim=(0, 3, 4))
                if not (need_q or need_k):
                    continue
                dx = p.mul_(-delta if dp is None else dp.sub_(delta))
                if softcap is not None:
                    # A masked logit is -inf here; its dx is already zero and must not meet inf.
                    slope = 1.0 - (logits.masked_fill_(~allowed, 0.0) / softcap).square_()
                    dx.mul_(slope)
                dx = dx.mul_(scale).flatten(2, 3)
                if need_q:
                    dq_BTHD[:, rows] = _ungroup_rows(dx @ k, groups).to(dq_BTHD.dtype)
                if need_k:
                    dk_BKSD[:, :, cols] += dx.transpose(-1, -2) @ q

        dk_BSKD = dk_BKSD.transpose(1, 2).to(k_BSKD.dtype) if need_k else None
        dv_BSKD = dv_BKSD.transpose(1, 2).to(v_BSKD.dtype) if need_v else None
        dsink_H = dsink_KG.flatten().to(sink_H.dtype) if need_sink else None
        return (dq_BTHD, dk_BSKD, dv_BSKD, dsink_H) + nothing[4:]


def sink_attention_reference(
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
    block_size: int = 256,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention with sinks, one block of queries at a time; arguments as `op.sink_attention` has validated them.

    The largest temporary holds B * H * block_size * min(S, window + block_size) numbers: linear in S. With a window
    only the keys of the band are visited, so time is linear too. Everything is computed and accumulated in float32
    (float64 for float64 inputs), and the result doesn't depend on ``block_size`` beyond rounding.

    Args:
        q_BTHD: [B, T, H, D] queries, T <= S; query t sits at key position S - T + t.
        k_BSKD: [B, S, K, D] keys, K divides H; query head h reads key head h // (H / K).
        v_BSKD: [B, S, K, D] values.
        sink_H: [H] sink logits of any floating dtype, or None.
        window: a query sees the last ``window`` keys, itself included; None means all.
        documents_BS: [B, S] integer document ids, or None.
        key_mask_BS: [B, S] bool, False for padding, or None.
        scale: factor of q . k, applied before the cap.
        softcap: cap * tanh(x / cap), or None.
        block_size: queries per block.

    Returns:
        o_BTHD: [B, T, H, D] in the dtype of q.
        lse_BHT: [B, H, T] float32 (float64 for float64): natural log, the sink included; differentiable.
    """
    return _SinkAttention.apply(
        q_BTHD, k_BSKD, v_BSKD, sink_H, documents_BS, key_mask_BS, window, scale, softcap, block_size
    )
