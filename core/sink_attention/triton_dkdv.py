"""Backward kernel of sink attention for keys and values: one program per block of keys, a loop over the queries.

Shape suffixes as in `op`; inside kernels M queries and N keys of one block, D the head size padded to a power of two.

The program of a key head goes through all query heads of its group, so the sums over the group never leave registers.
Everything is formed transposed, [N, M], which makes P^T and dS^T left operands straight from registers.

Source: as `triton_bwd`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.sink_attention.triton_common import (
    CAUSAL,
    LOG2E,
    WINDOW,
    backward_inputs,
    block_start,
    capped_tanh,
    load_rows,
    options,
    schedule,
    store_rows,
    strides,
)
from unsloth_plugins.core.sink_attention.triton_tiles import Tile


@triton.jit
def _dkdv_step(
    dk_ND,
    dv_ND,
    k_ND,
    v_ND,
    q,
    do,
    lse,
    delta,
    stride_q,
    stride_do,
    t_begin,
    queries,
    offset,
    j_N,
    last_N,
    scale,
    softcap,
    HEAD: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    HAS_LAST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what the queries t_begin .. t_begin + M of one head contribute to dk (without the scale) and dv."""
    q_MD = load_rows(q, t_begin, stride_q, queries, HEAD, M, D, MASKED)
    do_MD = load_rows(do, t_begin, stride_do, queries, HEAD, M, D, MASKED)
    t_M = t_begin + tl.arange(0, M)
    if MASKED:
        here_M = t_M < queries
        lse2_M = tl.load(lse + t_M, mask=here_M, other=float("inf")) * LOG2E
        delta_M = tl.load(delta + t_M, mask=here_M, other=0.0)
    else:
        lse2_M = tl.load(lse + t_M) * LOG2E
        delta_M = tl.load(delta + t_M)
    lse2_M = tl.where(lse2_M == float("-inf"), float("inf"), lse2_M)

    logits_NM = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee")
    if SOFTCAP:
        logits_NM = capped_tanh(logits_NM * scale, softcap)
        slope_NM = 1.0 - logits_NM * logits_NM
        p_NM = tl.exp2(logits_NM * (softcap * LOG2E) - lse2_M[None, :])
    else:
        p_NM = tl.exp2(logits_NM * (scale * LOG2E) - lse2_M[None, :])
    if MASKED:
        i_M = t_M + offset
        allowed_NM = i_M[None, :] >= j_N[:, None]
        if HAS_LAST:
            allowed_NM = allowed_NM & (i_M[None, :] <= last_N[:, None])
        p_NM = tl.where(allowed_NM, p_NM, 0.0)
    dv_ND = tl.dot(p_NM.to(do_MD.dtype), do_MD, dv_ND, input_precision="ieee")
    dp_NM = tl.dot(v_ND, tl.trans(do_MD), input_precision="ieee")
    dx_NM = p_NM * (dp_NM - delta_M[None, :])
    if SOFTCAP:
        dx_NM = dx_NM * slope_NM
    dk_ND = tl.dot(dx_NM.to(q_MD.dtype), q_MD, dk_ND, input_precision="ieee")
    return dk_ND, dv_ND


@triton.jit
def query_blocks(
    last,
    j_begin,
    queries,
    keys,
    window,
    M: tl.constexpr,
    N: tl.constexpr,
    RANGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Which blocks of queries a block of N keys is seen by; the mirror of `key_blocks`, in query numbers.

    Returns:
        left, left_begin, right, right_begin: two runs of blocks that need a mask (the diagonal and the far edge);
        full_begin, full_end: the queries between them, whole blocks that see every key of the block.
    """
    offset = keys - queries
    j_last = tl.minimum(j_begin + N, keys) - 1
    if RANGE == CAUSAL:
        full_to = queries
        end = queries
    elif RANGE == WINDOW:
        full_to = tl.minimum(j_begin + window - offset, queries)
        end = tl.minimum(j_last + window - offset, queries)
    else:
        full_to = tl.load(last + j_begin) + 1 - offset
        end = tl.load(last + j_last) + 1 - offset
    left_begin = tl.maximum(j_begin - offset, 0) // M * M
    end = tl.maximum(end, left_begin)
    if SPLIT:
        full_begin = (tl.maximum(j_last - offset, 0) + M - 1) // M * M
        full_end = tl.maximum(full_to, 0) // M * M
        # No whole block: everything is the left run.
        full_begin = tl.where(full_begin < full_end, full_begin, end)
        full_end = tl.maximum(full_begin, full_end)
    else:
        full_begin = end
        full_end = end
    left = (full_begin - left_begin + M - 1) // M
    right = (tl.maximum(end - full_end, 0) + M - 1) // M
    return left, left_begin, right, full_end, full_begin, full_end


@triton.jit(do_not_specialize=["lse_stride_b", "batch", "queries", "keys", "window"])
def dkdv_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    last,
    key_mask,
    dk,
    dv,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    dk_stride_b,
    dk_stride_s,
    dk_stride_h,
    dv_stride_b,
    dv_stride_s,
    dv_stride_h,
    lse_stride_b,
    batch,
    heads,
    groups,
    queries,
    keys,
    window,
    scale,
    softcap,
    HEAD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    RANGE: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    blocks = tl.cdiv(keys, N)
    kv_heads = heads // groups
    # The first keys are seen by the most queries.
    block, row = schedule(blocks, batch * kv_heads, 4)
    j_begin = block * N
    b = tl.cast(row // kv_heads, tl.int64)
    h_kv = tl.cast(row % kv_heads, tl.int64)
    h = h_kv * groups
    q += b * q_stride_b + h * q_stride_h
    do += b * do_stride_b + h * do_stride_h
    lse += b * lse_stride_b + h * queries
    delta += (b * heads + h) * queries
    j_N = j_begin + tl.arange(0, N)
    offset = keys - queries

    last_N = j_N
    if RANGE == WINDOW:
        last_N = j_N + window - 1
    elif last is not None:
        last += b * keys
        last_N = tl.load(last + j_N, mask=j_N < keys, other=-1)
    left, left_begin, right, right_begin, full_begin, full_end = query_blocks(
        last, j_begin, queries, keys, window, M, N, RANGE, SPLIT
    )
    k_ND = load_rows(k + b * k_stride_b + h_kv * k_stride_h, j_begin, k_stride_s, keys, HEAD, N, D, True)
    v_ND = load_rows(v + b * v_stride_b + h_kv * v_stride_h, j_begin, v_stride_s, keys, HEAD, N, D, True)
    dk_ND = tl.zeros([N, D], tl.float32)
    dv_ND = tl.zeros([N, D], tl.float32)

    # The heads of the group and their blocks are one loop, so that its pipeline fills only once.
    if SPLIT:
        whole = (full_end - full_begin) // M
        for n in tl.range(0, groups * whole):
            g = tl.cast(n // whole, tl.int64)
            start = full_begin + n % whole * M
            dk_ND, dv_ND = _dkdv_step(
                dk_ND, dv_ND, k_ND, v_ND, q + g * q_stride_h, do + g * do_stride_h, lse + g * queries,
                delta + g * queries, q_stride_t, do_stride_t, start, queries, offset, j_N, last_N, scale, softcap,
                HEAD, M, D, RANGE != 0, SOFTCAP, False,
            )  # fmt: skip
    partial = left + right
    for n in tl.range(0, groups * partial):
        g = tl.cast(n // partial, tl.int64)
        start = block_start(n % partial, left, left_begin, right_begin, M)
        dk_ND, dv_ND = _dkdv_step(
            dk_ND, dv_ND, k_ND, v_ND, q + g * q_stride_h, do + g * do_stride_h, lse + g * queries,
            delta + g * queries, q_stride_t, do_stride_t, start, queries, offset, j_N, last_N, scale, softcap,
            HEAD, M, D, RANGE != 0, SOFTCAP, True,
        )  # fmt: skip

    dk_ND = dk_ND * scale
    if key_mask is not None:
        # Rows of a block of keys don't mix, so a key that nobody may see is struck out here, once.
        seen_N = tl.load(key_mask + b * keys + j_N, mask=j_N < keys, other=0) != 0
        dk_ND = tl.where(seen_N[:, None], dk_ND, 0.0)
        dv_ND = tl.where(seen_N[:, None], dv_ND, 0.0)
    store_rows(dk + b * dk_stride_b + h_kv * dk_stride_h, j_begin, dk_stride_s, keys, dk_ND, HEAD, N, D)
    store_rows(dv + b * dv_stride_b + h_kv * dv_stride_h, j_begin, dv_stride_s, keys, dv_ND, HEAD, N, D)


def dkdv_launch(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    do_BTHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    delta_BHT: torch.Tensor,
    last_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    dk_BSKD: torch.Tensor,
    dv_BSKD: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    narrow: bool,
    tile: Tile,
) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, number of programs and arguments of the gradients of k and v; ``dk_BSKD`` and ``dv_BSKD`` are written.

    Arguments as of `triton_bwd.dq_launch`, with ``last_BS`` in place of ``first_BS``.
    """
    batch, queries, heads, head_size = q_BTHD.shape
    keys, kv_heads = k_BSKD.shape[1:3]
    arguments = {
        **backward_inputs(q_BTHD, k_BSKD, v_BSKD, do_BTHD, lse_BHT, delta_BHT, key_mask_BS),
        "last": last_BS,
        "dk": dk_BSKD,
        "dv": dv_BSKD,
        **strides("dk", "bsh", dk_BSKD),
        **strides("dv", "bsh", dv_BSKD),
        **options(batch, heads, kv_heads, queries, keys, window, last_BS, scale, softcap, head_size, narrow, tile),
    }
    return dkdv_kernel, batch * kv_heads * triton.cdiv(keys, tile.n), arguments
