"""Backward kernels of sink attention for queries: the row sums, then dq by a loop over blocks of keys.

Shape suffixes as in `op`; inside kernels M queries and N keys of one block, D the head size padded to a power of two.

Each output element is written by exactly one program, so nothing is accumulated in memory: no atomics, no float32
copy of dq, and the result is the same in every run. The price is that the logits are formed twice,
here and in `triton_dkdv`.

Source: the formulas of `reference`; recomputation from the log normaliser after Dao et al. 2022 (algorithm 4).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.sink_attention.triton_common import (
    LOG2E,
    WINDOW,
    backward_inputs,
    block_start,
    capped_tanh,
    heads_in_block,
    key_blocks,
    load_queries,
    load_rows,
    options,
    query_rows,
    schedule,
    store_queries,
    strides,
)
from unsloth_plugins.core.sink_attention.triton_tiles import Tile, padded_head_size

ROWS = 128  # rows of o and do per program of the row sums
# ln(2) in two parts; products of the first with small integers are exact (Cody and Waite 1980).
LN2_HIGH = tl.constexpr(0.693359375)
LN2_LOW = tl.constexpr(-2.1219444005469057e-4)


@triton.jit
def _exp(x):
    """exp(x) for x <= 0; x log2(e) as a whole would be rounded to an error of 1e-6 of the result where x is -30."""
    x = tl.maximum(x, -200.0)
    n = tl.floor(x * LOG2E + 0.5)
    rest = (x - n * LN2_HIGH) - n * LN2_LOW
    return tl.exp2(n) * tl.exp2(rest * LOG2E)


@triton.jit(do_not_specialize=["lse_stride_b", "dlse_stride_b", "dlse_stride_h", "dlse_stride_t", "queries"])
def row_sums_kernel(
    o,
    do,
    lse,
    dlse,
    sink,
    delta,
    dsink,
    o_stride_b,
    o_stride_t,
    o_stride_h,
    do_stride_b,
    do_stride_t,
    do_stride_h,
    lse_stride_b,
    dlse_stride_b,
    dlse_stride_h,
    dlse_stride_t,
    heads,
    queries,
    HEAD: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """delta = sum_D o * do - dlse, and this block's share of the sink's gradient, -sum exp(sink - lse) * delta."""
    blocks = tl.cdiv(queries, M)
    program = tl.program_id(0)
    t_begin = program % blocks * M
    row = program // blocks
    b = tl.cast(row // heads, tl.int64)
    h = tl.cast(row % heads, tl.int64)
    at_M = t_begin + tl.arange(0, M)
    here_M = at_M < queries

    o_MD = load_rows(o + b * o_stride_b + h * o_stride_h, t_begin, o_stride_t, queries, HEAD, M, D, True)
    do_MD = load_rows(do + b * do_stride_b + h * do_stride_h, t_begin, do_stride_t, queries, HEAD, M, D, True)
    delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    # +inf in place of -inf: an empty row's probabilities are then exp(x - inf) = 0.
    lse_M = tl.load(lse + b * lse_stride_b + h * queries + at_M, mask=here_M, other=float("inf"))
    lse_M = tl.where(lse_M == float("-inf"), float("inf"), lse_M)
    if dlse is not None:
        at_dlse_M = dlse + b * dlse_stride_b + h * dlse_stride_h + tl.cast(at_M, tl.int64) * dlse_stride_t
        dlse_M = tl.load(at_dlse_M, mask=here_M, other=0.0).to(tl.float32)
        delta_M -= tl.where(lse_M == float("inf"), 0.0, dlse_M)
    tl.store(delta + tl.cast(row, tl.int64) * queries + at_M, delta_M, mask=here_M)
    if sink is not None:
        p_M = _exp(tl.load(sink + h) - lse_M)
        tl.store(dsink + tl.cast(row, tl.int64) * blocks + program % blocks, -tl.sum(p_M * delta_M, 0))


@triton.jit
def _dq_step(
    acc_MD,
    q_MD,
    do_MD,
    lse2_M,
    delta_M,
    k,
    v,
    key_mask,
    stride_k,
    stride_v,
    start,
    keys,
    i_M,
    first_M,
    scale,
    softcap,
    HEAD: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    HAS_FIRST: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add what the keys start .. start + N contribute to dq (without the scale)."""
    k_ND = load_rows(k, start, stride_k, keys, HEAD, N, D, MASKED)
    v_ND = load_rows(v, start, stride_v, keys, HEAD, N, D, MASKED)
    logits_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if SOFTCAP:
        logits_MN = capped_tanh(logits_MN * scale, softcap)
        slope_MN = 1.0 - logits_MN * logits_MN
        p_MN = tl.exp2(logits_MN * (softcap * LOG2E) - lse2_M[:, None])
    else:
        p_MN = tl.exp2(logits_MN * (scale * LOG2E) - lse2_M[:, None])
    j_N = start + tl.arange(0, N)
    if MASKED:
        allowed_MN = j_N[None, :] <= i_M[:, None]
        if HAS_FIRST:
            allowed_MN = allowed_MN & (j_N[None, :] >= first_M[:, None])
        p_MN = tl.where(allowed_MN, p_MN, 0.0)
    if key_mask is not None:
        seen_N = tl.load(key_mask + j_N, mask=j_N < keys, other=0) != 0
        p_MN = tl.where(seen_N[None, :], p_MN, 0.0)
    dp_MN = tl.dot(do_MD, tl.trans(v_ND), input_precision="ieee")
    dx_MN = p_MN * (dp_MN - delta_M[:, None])
    if SOFTCAP:
        dx_MN = dx_MN * slope_MN
    return tl.dot(dx_MN.to(k_ND.dtype), k_ND, acc_MD, input_precision="ieee")


@triton.jit(do_not_specialize=["lse_stride_b", "batch", "queries", "keys", "window"])
def dq_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    first,
    key_mask,
    dq,
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
    dq_stride_b,
    dq_stride_t,
    dq_stride_h,
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
    PACK: tl.constexpr,
    RANGE: tl.constexpr,
    SPLIT: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    blocks = tl.cdiv(queries, M // PACK)
    block, row = schedule(blocks, batch * heads // PACK, 8)
    t_begin = (blocks - 1 - block) * (M // PACK)
    row *= PACK
    b = tl.cast(row // heads, tl.int64)
    h = tl.cast(row % heads, tl.int64)
    i_begin = keys - queries + t_begin
    k += b * k_stride_b + h // groups * k_stride_h
    v += b * v_stride_b + h // groups * v_stride_h
    t_M = t_begin + tl.arange(0, M) // PACK
    h_M = h + tl.arange(0, M) % PACK
    i_M = keys - queries + t_M
    here_M = t_M < queries

    if key_mask is not None:
        key_mask += b * keys
    first_M = i_M
    if RANGE == WINDOW:
        first_M = i_M - window + 1
    elif first is not None:
        first += b * keys
        first_M = tl.load(first + i_M, mask=here_M, other=0)
    left, left_begin, right, right_begin, full_begin, full_end = key_blocks(
        first, i_begin, keys, window, M // PACK, N, RANGE, SPLIT
    )

    q_rows_M = query_rows(t_begin, q_stride_t, q_stride_h, M, PACK)
    q_MD = load_queries(q + b * q_stride_b + h * q_stride_h, q_rows_M, here_M, HEAD, D)
    do_rows_M = query_rows(t_begin, do_stride_t, do_stride_h, M, PACK)
    do_MD = load_queries(do + b * do_stride_b + h * do_stride_h, do_rows_M, here_M, HEAD, D)
    lse2_M = tl.load(lse + b * lse_stride_b + h_M * queries + t_M, mask=here_M, other=float("inf")) * LOG2E
    lse2_M = tl.where(lse2_M == float("-inf"), float("inf"), lse2_M)
    delta_M = tl.load(delta + (b * heads + h_M) * queries + t_M, mask=here_M, other=0.0)
    acc_MD = tl.zeros([M, D], tl.float32)

    for n in tl.range(0, tl.maximum(left + right, 1)):
        start = block_start(n, left, left_begin, right_begin, N)
        acc_MD = _dq_step(
            acc_MD, q_MD, do_MD, lse2_M, delta_M, k, v, key_mask, k_stride_s, v_stride_s, start, keys, i_M,
            first_M, scale, softcap, HEAD, N, D, RANGE != 0, SOFTCAP, True,
        )  # fmt: skip
    if SPLIT:
        for start in tl.range(full_begin, full_end, N):
            acc_MD = _dq_step(
                acc_MD, q_MD, do_MD, lse2_M, delta_M, k, v, key_mask, k_stride_s, v_stride_s, start, keys, i_M,
                first_M, scale, softcap, HEAD, N, D, RANGE != 0, SOFTCAP, False,
            )  # fmt: skip
    dq_rows_M = query_rows(t_begin, dq_stride_t, dq_stride_h, M, PACK)
    store_queries(dq + b * dq_stride_b + h * dq_stride_h, dq_rows_M, here_M, acc_MD * scale, HEAD, D)


def row_sums_launch(
    o_BTHD: torch.Tensor,
    do_BTHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    dlse_BHT: torch.Tensor | None,
    sink_H: torch.Tensor | None,
    delta_BHT: torch.Tensor,
    dsink_BHR: torch.Tensor | None,
) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, number of programs and arguments of the row sums; ``delta_BHT`` and ``dsink_BHR`` are written.

    Args:
        o_BTHD, do_BTHD: contiguous in D.
        lse_BHT: float32, contiguous but for its batches.
        dlse_BHT: any strides, or None.
        sink_H: float32, or None when its gradient is not wanted.
        delta_BHT: contiguous float32.
        dsink_BHR: contiguous float32, one column per `ROWS` queries; to be summed over B and R.
    """
    batch, queries, heads, head_size = o_BTHD.shape
    dlse_strides = (0, 0, 0) if dlse_BHT is None else dlse_BHT.stride()
    arguments = {
        "o": o_BTHD,
        "do": do_BTHD,
        "lse": lse_BHT,
        "dlse": dlse_BHT,
        "sink": sink_H,
        "delta": delta_BHT,
        "dsink": dsink_BHR,
        **strides("o", "bth", o_BTHD),
        **strides("do", "bth", do_BTHD),
        "lse_stride_b": lse_BHT.stride(0),
        **{f"dlse_stride_{letter}": stride for letter, stride in zip("bht", dlse_strides, strict=True)},
        "heads": heads,
        "queries": queries,
        "HEAD": head_size,
        "M": ROWS,
        "D": padded_head_size(head_size),
        "num_warps": 4,
    }
    return row_sums_kernel, batch * heads * triton.cdiv(queries, ROWS), arguments


def dq_launch(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    do_BTHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    delta_BHT: torch.Tensor,
    first_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    dq_BTHD: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    narrow: bool,
    tile: Tile,
) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, number of programs and arguments of the gradient of q; ``dq_BTHD`` is written.

    Arguments as of `triton_fwd.forward_launch`; ``delta_BHT`` is the result of the row sums.
    """
    batch, queries, heads, head_size = q_BTHD.shape
    keys, kv_heads = k_BSKD.shape[1:3]
    arguments = {
        **backward_inputs(q_BTHD, k_BSKD, v_BSKD, do_BTHD, lse_BHT, delta_BHT, key_mask_BS),
        "first": first_BS,
        "dq": dq_BTHD,
        **strides("dq", "bth", dq_BTHD),
        **options(batch, heads, kv_heads, queries, keys, window, first_BS, scale, softcap, head_size, narrow, tile),
    }
    arguments["PACK"] = pack = heads_in_block(heads // kv_heads, queries, narrow, tile.m)
    return dq_kernel, batch * heads // pack * triton.cdiv(queries, tile.m // pack), arguments
