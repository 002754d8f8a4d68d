"""Grouped GEMMs where ``torch._grouped_mm`` has no kernel: other GPUs than Hopper and Blackwell, fp16, fp32.

Shape suffixes: M rows sorted by expert, E experts, G of them, I inputs, O outputs. Rows of expert e are
``ends[e - 1] : ends[e]``, int32 on the device, so nothing waits for it. Sums are float32, in a fixed order,
without atomics; float32 inputs are rounded to TF32 only where torch's switch allows it. Offsets of rows and experts are
64 bits wide.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_OUTER = 8  # tiles of rows that share the weights in the cache


@triton.jit
def _product_kernel(
    x_ptr,
    w_ptr,
    ends_ptr,
    out_ptr,
    first_expert,
    n_experts,
    inputs,
    outputs,
    row_tiles,
    x_stride,
    w_stride_e,
    w_stride_i,
    w_stride_o,
    out_stride,
    PRECISION: tl.constexpr,
    E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    OUTER: tl.constexpr,
):
    """out[m, o] = sum_i x[m, i] w[e(m), i, o] for the rows of ``n_experts`` experts from ``first_expert`` on. One
    program makes a tile of rows of one expert; tiles past the last row of these experts do nothing."""
    program, column_tiles = tl.program_id(0), tl.cdiv(outputs, BLOCK_O)
    first = program // (OUTER * column_tiles) * OUTER
    size = tl.minimum(row_tiles - first, OUTER)
    within = program % (OUTER * column_tiles)
    tile, column_tile = first + within % size, within // size

    experts = tl.arange(0, E)
    number = first_expert + experts
    ends = tl.load(ends_ptr + number, mask=experts < n_experts, other=0)
    begins = tl.load(ends_ptr + number - 1, mask=(number > 0) & (experts < n_experts), other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tiles_until = tl.cumsum(tiles, 0)
    expert = tl.sum((tiles_until <= tile).to(tl.int32), 0)
    if expert >= n_experts:
        return
    mine = experts == expert
    before = tl.sum(tl.where(mine, tiles_until - tiles, 0), 0)
    begin, end = tl.sum(tl.where(mine, begins, 0), 0), tl.sum(tl.where(mine, ends, 0), 0)

    row = begin + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = column_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    inner = tl.arange(0, BLOCK_I)
    x_at = x_ptr + row.to(tl.int64)[:, None] * x_stride + inner[None, :]
    w_at = w_ptr + expert.to(tl.int64) * w_stride_e + inner[:, None] * w_stride_i + column[None, :] * w_stride_o
    total = tl.zeros((BLOCK_M, BLOCK_O), dtype=tl.float32)
    for start in range(0, inputs, BLOCK_I):
        inside = start + inner < inputs
        x = tl.load(x_at, mask=(row < end)[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at, mask=inside[:, None] & (column < outputs)[None, :], other=0.0)
        total = tl.dot(x, w, total, input_precision=PRECISION)
        x_at += BLOCK_I
        w_at += BLOCK_I * w_stride_i
    out_at = out_ptr + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=(row < end)[:, None] & (column < outputs)[None, :])


@triton.jit
def _reduce_kernel(
    x_ptr,
    y_ptr,
    ends_ptr,
    out_ptr,
    inputs,
    outputs,
    x_stride,
    y_stride,
    PRECISION: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """out[e, i, o] = sum of x[m, i] y[m, o] over the rows of e, added to what is there if so asked. One program makes
    a tile of one expert; where it has no rows, zeros."""
    expert = tl.program_id(1).to(tl.int64)
    column_tiles = tl.cdiv(outputs, BLOCK_O)
    row_tile, column_tile = tl.program_id(0) // column_tiles, tl.program_id(0) % column_tiles
    begin = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    i = row_tile * BLOCK_I + tl.arange(0, BLOCK_I)
    o = column_tile * BLOCK_O + tl.arange(0, BLOCK_O)
    m = tl.arange(0, BLOCK_M)
    x_at = x_ptr + (begin + m).to(tl.int64)[None, :] * x_stride + i[:, None]
    y_at = y_ptr + (begin + m).to(tl.int64)[:, None] * y_stride + o[None, :]
    total = tl.zeros((BLOCK_I, BLOCK_O), dtype=tl.float32)
    for start in range(begin, end, BLOCK_M):
        inside = start + m < end
        x = tl.load(x_at, mask=inside[None, :] & (i < inputs)[:, None], other=0.0)
        y = tl.load(y_at, mask=inside[:, None] & (o < outputs)[None, :], other=0.0)
        total = tl.dot(x, y, total, input_precision=PRECISION)
        x_at += BLOCK_M * x_stride
        y_at += BLOCK_M * y_stride
    out_at = out_ptr + (expert * inputs + i.to(tl.int64)[:, None]) * outputs + o[None, :]
    within = (i < inputs)[:, None] & (o < outputs)[None, :]
    if ACCUMULATE:
        total += tl.load(out_at, mask=within, other=0.0)
    tl.store(out_at, total, mask=within)


def uses_tensor_cores(x: torch.Tensor) -> bool:
    """Whether triton multiplies on them: 16 bits, compute capability 8.0 or newer."""
    capable = x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) >= (8, 0)
    return capable and x.dtype != torch.float32


def _precision(x: torch.Tensor) -> str:
    """What becomes of float32: TF32 only where torch's own products may use it and the device has it."""
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device) < (8, 0):
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _blocks(x: torch.Tensor, *sizes: int) -> tuple[list[int], int]:
    """Sides of the tile of a product, powers of two from 16 on, which is the least for ``tl.dot``, and its warps."""
    most = 128 if uses_tensor_cores(x) else 64
    sides = [max(16, min(most, triton.next_power_of_2(size))) for size in sizes]
    return sides, 8 if sides == [most, most] and x.dtype != torch.float32 else 4


def grouped_product(
    x_MI: torch.Tensor,
    w_GIO: torch.Tensor,
    ends_E: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    first: int = 0,
    out_MO: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[m] times the matrix of its expert, for the rows of G experts; the other rows of the result are not touched.

    Args:
        x_MI: bf16, fp16 or fp32; rows may be part of wider ones.
        w_GIO: the same dtype, any strides: matrices of experts ``first`` to ``first + G``, by default of all.
        ends_E: int32, where the rows of each expert end; the last is M.
        out_MO: contiguous, in ``out_dtype``, to be filled.

    Returns:
        [M, O] in ``out_dtype``: ``out_MO`` where it was given. A row's bits do not depend on the grouping.
    """
    (count, inputs), (n_experts, _, outputs) = x_MI.shape, w_GIO.shape
    if out_MO is None:
        out_MO = torch.empty((count, outputs), dtype=out_dtype, device=x_MI.device)
    if not count:
        return out_MO
    (block_m, block_o), warps = _blocks(x_MI, triton.cdiv(count, ends_E.shape[0]), outputs)
    row_tiles = triton.cdiv(count, block_m) + n_experts - 1  # each expert may have a tile that is not full
    _product_kernel[(row_tiles * triton.cdiv(outputs, block_o),)](
        x_MI,
        w_GIO,
        ends_E,
        out_MO,
        first,
        n_experts,
        inputs,
        outputs,
        row_tiles,
        x_MI.stride(0),
        *w_GIO.stride(),
        out_MO.stride(0),
        PRECISION=_precision(x_MI),
        E=triton.next_power_of_2(n_experts),
        BLOCK_M=block_m,
        BLOCK_O=block_o,
        BLOCK_I=32,
        OUTER=_OUTER,
        num_warps=warps,
        num_stages=3,
    )
    return out_MO


def grouped_reduce(
    x_MI: torch.Tensor, y_MO: torch.Tensor, ends_E: torch.Tensor, total_EIO: torch.Tensor | None
) -> torch.Tensor:
    """x^T y over the rows of each expert.

    Args:
        x_MI, y_MO: one dtype, bf16, fp16 or fp32; rows may be part of wider ones.
        ends_E: int32, where the rows of each expert end.
        total_EIO: float32, contiguous; the result is added to it.

    Returns:
        float32 [E, I, O]: ``total_EIO`` where it was given.
    """
    inputs, outputs, n_experts = x_MI.shape[1], y_MO.shape[1], ends_E.shape[0]
    out_EIO = total_EIO
    if out_EIO is None:
        out_EIO = torch.empty((n_experts, inputs, outputs), dtype=torch.float32, device=x_MI.device)
    (block_i, block_o), warps = _blocks(x_MI, inputs, outputs)
    _reduce_kernel[(triton.cdiv(inputs, block_i) * triton.cdiv(outputs, block_o), n_experts)](
        x_MI,
        y_MO,
        ends_E,
        out_EIO,
        inputs,
        outputs,
        x_MI.stride(0),
        y_MO.stride(0),
        PRECISION=_precision(x_MI),
        ACCUMULATE=total_EIO is not None,
        BLOCK_M=32,
        BLOCK_I=block_i,
        BLOCK_O=block_o,
        num_warps=warps,
        num_stages=3,
    )
    return out_EIO
