"""Forward kernel of sink attention: a program per block of queries and head, online softmax over blocks of keys.

Shape suffixes as in `op`; inside kernels M queries and N keys of one block, D the head size padded to a power of two.

The running maximum starts at the sink and the running sum at exp(sink - maximum), so the sink costs nothing later.
Logits are kept in units of log2(e): one fused multiply-add and one exp2 each. Blocks that every query of the program
sees whole skip the mask; blocks that none of them sees are not visited.

Source: online softmax after Milakov and Gimelshein 2018, tiling after Dao 2023 (FlashAttention-2, algorithm 1).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.sink_attention.triton_common import (
    LN2,
    LOG2E,
    WINDOW,
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
from unsloth_plugins.core.sink_attention.triton_tiles import Tile


@triton.jit
def _attend(
    acc_MD,
    top_M,
    total_M,
    q_MD,
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
    """Fold the keys start .. start + N into the running output, maximum and sum."""
    k_ND = load_rows(k, start, stride_k, keys, HEAD, N, D, MASKED)
    logits_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
    if SOFTCAP:
        logits_MN = capped_tanh(logits_MN * scale, softcap)
        factor = softcap * LOG2E
    else:
        factor = scale * LOG2E
    j_N = start + tl.arange(0, N)
    if MASKED:
        allowed_MN = j_N[None, :] <= i_M[:, None]
        if HAS_FIRST:
            allowed_MN = allowed_MN & (j_N[None, :] >= first_M[:, None])
        logits_MN = tl.where(allowed_MN, logits_MN, float("-inf"))
    if key_mask is not None:
        seen_N = tl.load(key_mask + j_N, mask=j_N < keys, other=0) != 0
        logits_MN = tl.where(seen_N[None, :], logits_MN, float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(logits_MN, 1) * factor)
    p_MN = tl.exp2(logits_MN * factor - new_top_M[:, None])
    shrink_M = tl.exp2(top_M - new_top_M)
    total_M = total_M * shrink_M + tl.sum(p_MN, 1)
    v_ND = load_rows(v, start, stride_v, keys, HEAD, N, D, MASKED)
    acc_MD = acc_MD * shrink_M[:, None]
    acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision="ieee")
    return acc_MD, new_top_M, total_M


@triton.jit(do_not_specialize=["batch", "queries", "keys", "window"])
def forward_kernel(
    q,
    k,
    v,
    sink,
    first,
    key_mask,
    o,
    lse,
    q_stride_b,
    q_stride_t,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    o_stride_b,
    o_stride_t,
    o_stride_h,
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
    # The last queries see the most keys.
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
    # Finite, so that a row that has seen no key yet never computes inf - inf.
    top_M = tl.full([M], -1e30, tl.float32)
    total_M = tl.zeros([M], tl.float32)
    if sink is not None:
        sink2_M = tl.load(sink + h_M) * LOG2E
        top_M = tl.maximum(top_M, sink2_M)
        total_M = tl.where(top_M == sink2_M, 1.0, 0.0)
    acc_MD = tl.zeros([M, D], tl.float32)

    for n in tl.range(0, tl.maximum(left + right, 1)):
        start = block_start(n, left, left_begin, right_begin, N)
        acc_MD, top_M, total_M = _attend(
            acc_MD, top_M, total_M, q_MD, k, v, key_mask, k_stride_s, v_stride_s, start, keys, i_M, first_M,
            scale, softcap, HEAD, N, D, RANGE != 0, SOFTCAP, True,
        )  # fmt: skip
    if SPLIT:
        for start in tl.range(full_begin, full_end, N):
            acc_MD, top_M, total_M = _attend(
                acc_MD, top_M, total_M, q_MD, k, v, key_mask, k_stride_s, v_stride_s, start, keys, i_M, first_M,
                scale, softcap, HEAD, N, D, RANGE != 0, SOFTCAP, False,
            )  # fmt: skip

    empty_M = total_M == 0.0
    total_M = tl.where(empty_M, 1.0, total_M)
    o_rows_M = query_rows(t_begin, o_stride_t, o_stride_h, M, PACK)
    store_queries(o + b * o_stride_b + h * o_stride_h, o_rows_M, here_M, acc_MD / total_M[:, None], HEAD, D)
    lse_M = top_M * LN2
    if sink is not None:
        # Where the sink is the maximum, without the rounding of two factors, which exp(sink - lse) would show.
        sink_M = tl.load(sink + h_M)
        lse_M = tl.where(top_M == sink_M * LOG2E, sink_M, lse_M)
    lse_M = tl.where(empty_M, float("-inf"), lse_M + tl.log2(total_M) * LN2)
    tl.store(lse + (b * heads + h_M) * queries + t_M, lse_M, mask=here_M)


def forward_launch(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sink_H: torch.Tensor | None,
    first_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    o_BTHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
    narrow: bool,
    tile: Tile,
) -> tuple[Any, int, dict[str, Any]]:
    """Kernel, number of programs and arguments of the forward pass; ``o_BTHD`` and ``lse_BHT`` are written.

    Args:
        q_BTHD, k_BSKD, v_BSKD: contiguous in D, otherwise strided as they come.
        sink_H: float32, or None.
        first_BS: int32 from `masks.visible_range` (the window included), or None.
        key_mask_BS: uint8, or None.
        o_BTHD: like q; contiguous in D.
        lse_BHT: contiguous float32.
        window: keys that a query sees; read only without ``first_BS``.
        scale: > 0.
        softcap: cap of the logits, or None.
        narrow: the window is (`triton_tiles.is_narrow`): blocks have few queries, and one masked loop unless the tile
            says otherwise.
        tile: launch configuration.
    """
    batch, queries, heads, head_size = q_BTHD.shape
    keys, kv_heads = k_BSKD.shape[1:3]
    arguments: dict[str, Any] = {
        "q": q_BTHD,
        "k": k_BSKD,
        "v": v_BSKD,
        "sink": sink_H,
        "first": first_BS,
        "key_mask": key_mask_BS,
        "o": o_BTHD,
        "lse": lse_BHT,
        **strides("q", "bth", q_BTHD),
        **strides("k", "bsh", k_BSKD),
        **strides("v", "bsh", v_BSKD),
        **strides("o", "bth", o_BTHD),
        **options(batch, heads, kv_heads, queries, keys, window, first_BS, scale, softcap, head_size, narrow, tile),
    }
    arguments["PACK"] = pack = heads_in_block(heads // kv_heads, queries, narrow, tile.m)
    return forward_kernel, batch * heads // pack * triton.cdiv(queries, tile.m // pack), arguments
