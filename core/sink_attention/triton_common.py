"""Pieces that the forward and the backward kernels share.

Shape suffixes inside kernels: M queries and N keys of one block, D the head size padded to a power of two.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.sink_attention.triton_tiles import Tile, padded_head_size

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# How a kernel learns the first key that a query sees (`RANGE`).
CAUSAL = tl.constexpr(0)  # it sees all keys up to itself
WINDOW = tl.constexpr(1)  # arithmetic
VECTOR = tl.constexpr(2)  # from first_BS and last_BS of `masks.visible_range`


@triton.jit
def load_rows(base, start, stride, rows, HEAD: tl.constexpr, R: tl.constexpr, D: tl.constexpr, CHECKED: tl.constexpr):
    """[R, D] tile: rows start .. start + R of a matrix [rows, HEAD] with contiguous columns, zero outside of it.

    The start is 64 bits wide, the offsets inside of the tile 32. ``CHECKED=False`` promises that all R rows exist.
    """
    at_R = tl.arange(0, R)
    at_D = tl.arange(0, D)
    tile = base + tl.cast(start, tl.int64) * stride + (at_R[:, None] * stride + at_D[None, :])
    if CHECKED:
        if HEAD < D:
            return tl.load(tile, mask=(start + at_R < rows)[:, None] & (at_D < HEAD)[None, :], other=0.0)
        else:
            return tl.load(tile, mask=(start + at_R < rows)[:, None], other=0.0)
    else:
        if HEAD < D:
            return tl.load(tile, mask=(at_D < HEAD)[None, :], other=0.0)
        else:
            return tl.load(tile)


@triton.jit
def store_rows(base, start, stride, rows, value_RD, HEAD: tl.constexpr, R: tl.constexpr, D: tl.constexpr):
    """Inverse of `load_rows`, checked; the value is rounded to the pointer's type."""
    at_R = tl.arange(0, R)
    at_D = tl.arange(0, D)
    tile = base + tl.cast(start, tl.int64) * stride + (at_R[:, None] * stride + at_D[None, :])
    mask = (start + at_R < rows)[:, None] & (at_D < HEAD)[None, :]
    tl.store(tile, value_RD.to(base.dtype.element_ty), mask=mask)


@triton.jit
def schedule(blocks, rows, TOGETHER: tl.constexpr):
    """Block and row (batch and head) of this program, in the order in which they should start.

    Block 0 is the longest. Within TOGETHER rows all blocks 0 come first, then all blocks 1: a long block that starts
    late would run alone at the end. Not over all rows, so that neighbours in time read the same keys.
    """
    program = tl.program_id(0)
    first = program // (blocks * TOGETHER) * TOGETHER
    here = tl.minimum(rows - first, TOGETHER)
    n = program - first * blocks
    return n // here, first + n % here


@triton.jit
def query_rows(start, stride_t, stride_h, M: tl.constexpr, PACK: tl.constexpr):
    """[M] offsets of the rows of M / PACK queries from ``start`` on, PACK neighbouring heads of each, heads fastest."""
    at_M = tl.arange(0, M)
    t_M = tl.cast(start + at_M // PACK, tl.int64)
    return t_M * stride_t + tl.cast(at_M % PACK, tl.int64) * stride_h


@triton.jit
def load_queries(base, rows_M, here_M, HEAD: tl.constexpr, D: tl.constexpr):
    """[M, D] tile of the rows at those offsets, zero where ``here_M`` is false."""
    at_D = tl.arange(0, D)
    mask = here_M[:, None] & (at_D < HEAD)[None, :]
    return tl.load(base + rows_M[:, None] + at_D[None, :], mask=mask, other=0.0)


@triton.jit
def store_queries(base, rows_M, here_M, value_MD, HEAD: tl.constexpr, D: tl.constexpr):
    """Inverse of `load_queries`; the value is rounded to the pointer's type."""
    at_D = tl.arange(0, D)
    mask = here_M[:, None] & (at_D < HEAD)[None, :]
    tl.store(base + rows_M[:, None] + at_D[None, :], value_MD.to(base.dtype.element_ty), mask=mask)


@triton.jit
def block_start(n, left, left_begin, right_begin, BLOCK: tl.constexpr):
    """Start of the n-th block of two runs of blocks: ``left`` blocks from left_begin, the rest from right_begin."""
    return tl.where(n < left, left_begin + n * BLOCK, right_begin + (n - left) * BLOCK)


@triton.jit
def capped_tanh(x, softcap):
    """tanh(x / softcap), from one exp2; saturates without overflow to NaN."""
    return 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2E / softcap)))


@triton.jit
def key_blocks(
    first,
    i_begin,
    keys,
    window,
    M: tl.constexpr,
    N: tl.constexpr,
    RANGE: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Which blocks of keys M queries at key positions i_begin .. i_begin + M need.

    Returns:
        left, left_begin, right, right_begin: two runs of blocks that need a mask (the edge and the diagonal);
        full_begin, full_end: the keys between them, whole blocks that every query of the block sees.
    """
    end = tl.minimum(i_begin + M, keys)
    if RANGE == CAUSAL:
        low = 0
        full_from = 0
    elif RANGE == WINDOW:
        low = tl.maximum(i_begin - window + 1, 0)
        full_from = tl.maximum(end - window, 0)
    else:
        low = tl.load(first + i_begin)
        full_from = tl.load(first + end - 1)
    left_begin = low
    if SPLIT:
        left_begin = low // N * N
        full_begin = (full_from + N - 1) // N * N
        full_end = (i_begin + 1) // N * N
        if RANGE != CAUSAL:
            # No whole block: everything is the left run.
            full_begin = tl.where(full_begin < full_end, full_begin, tl.maximum(end, left_begin))
            full_end = tl.maximum(full_begin, full_end)
    else:
        full_begin = tl.maximum(end, left_begin)
        full_end = full_begin
    left = (full_begin - left_begin + N - 1) // N
    right = (tl.maximum(end - full_end, 0) + N - 1) // N
    return left, left_begin, right, full_end, full_begin, full_end


def strides(name: str, dimensions: str, x: torch.Tensor) -> dict[str, int]:
    """Strides of the first three dimensions, as the kernels name them."""
    return {f"{name}_stride_{letter}": x.stride(n) for n, letter in enumerate(dimensions)}


def heads_in_block(groups: int, queries: int, narrow: bool, m: int) -> int:
    """How many heads of a group share a block of ``m`` rows (PACK), so that their keys are read once.

    It pays where a block has few queries, or where few queries to a block mean fewer keys: a narrow window needs
    window + queries - 1 of them. A power of two that divides the group.
    """
    if not narrow and queries >= m:
        return 1
    return min(groups & -groups, m)


def options(
    batch: int,
    heads: int,
    kv_heads: int,
    queries: int,
    keys: int,
    window: int | None,
    range_BS: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    head_size: int,
    narrow: bool,
    tile: Tile,
) -> dict[str, Any]:
    """Arguments that every kernel over blocks takes."""
    return {
        "batch": batch,
        "heads": heads,
        "groups": heads // kv_heads,
        "queries": queries,
        "keys": keys,
        "window": window or 0,
        "scale": float(scale),
        "softcap": float(softcap or 0.0),
        "HEAD": head_size,
        "M": tile.m,
        "N": tile.n,
        "D": padded_head_size(head_size),
        "RANGE": 2 if range_BS is not None else 1 if window is not None else 0,
        "SPLIT": not narrow if tile.split is None else tile.split,
        "SOFTCAP": softcap is not None,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
    }


def backward_inputs(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    do_BTHD: torch.Tensor,
    lse_BHT: torch.Tensor,
    delta_BHT: torch.Tensor,
    key_mask_BS: torch.Tensor | None,
) -> dict[str, Any]:
    """Arguments that both gradient kernels read."""
    return {
        "q": q_BTHD,
        "k": k_BSKD,
        "v": v_BSKD,
        "do": do_BTHD,
        "lse": lse_BHT,
        "delta": delta_BHT,
        "key_mask": key_mask_BS,
        **strides("q", "bth", q_BTHD),
        **strides("k", "bsh", k_BSKD),
        **strides("v", "bsh", v_BSKD),
        **strides("do", "bth", do_BTHD),
        "lse_stride_b": lse_BHT.stride(0),
    }
