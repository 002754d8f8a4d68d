"""RMSNorm in Triton: one pass over memory forward, one backward.

A program owns rows of [M, N] and keeps them in registers; arithmetic is float32. With r = rsqrt(mean(x^2) + eps), the
normalised n = x r and h = dy * w (w the weight, one more than it under ``one_plus``):

    dx = r (h - n mean(h n)),    dw = sum over rows of dy n

dw is summed in two stages, per program over its rows and then over programs, in a fixed order. A residual is added
before the norm, rounded as the model would, and its gradient, that of the sum, is added to dx.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, rstd_ptr,
    n_rows, size, x_stride, residual_stride, eps,
    HAS_RESIDUAL: tl.constexpr, CAST_FIRST: tl.constexpr, ONE_PLUS: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < n_rows) & (column < size)
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = row * size + column
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, axis=1, keep_dims=True) / size + eps)
    tl.store(rstd_ptr + row, rstd, mask=row < n_rows)
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if ONE_PLUS:
        weight += 1.0
    y = x * rstd
    if CAST_FIRST:
        y = y.to(x_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + at, (y * weight).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    dy_ptr, more_ptr, x_ptr, weight_ptr, rstd_ptr, dx_ptr, part_ptr,
    n_rows, size, x_stride, steps,
    HAS_MORE: tl.constexpr, ONE_PLUS: tl.constexpr, WANT_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    if ONE_PLUS:
        weight += 1.0
    d_weight = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    for step in range(0, steps):
        row = (program * steps + step) * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < n_rows) & (column < size)
        at = row * size + column
        dy = tl.load(dy_ptr + at, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row, mask=row < n_rows, other=0.0)
        normal = x * rstd
        if WANT_WEIGHT:
            d_weight += dy * normal
        h = dy * weight
        mean = tl.sum(h * normal, axis=1, keep_dims=True) / size
        dx = (h - normal * mean) * rstd
        if HAS_MORE:
            dx += tl.load(more_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WANT_WEIGHT:
        total = tl.sum(d_weight, axis=0, keep_dims=True)
        tl.store(part_ptr + program * size + column, total, mask=column < size)


@functools.cache
def _tile(size: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program."""
    width = triton.next_power_of_2(size)
    rows = max(1, 2048 // width) if width <= 512 else 1
    return rows, width, min(32, max(4, rows * width // 512))


@functools.cache
def _programs(index: int | None) -> int:
    """Programs among which the rows are divided when each keeps a sum over its own."""
    return 2 * torch.cuda.get_device_properties(index or 0).multi_processor_count


def rms_norm_forward(
    x_MN: torch.Tensor,
    weight_N: torch.Tensor,
    residual_MN: torch.Tensor | None,
    *,
    eps: float,
    cast_first: bool,
    one_plus: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, what was normalised (``x_MN`` itself without a residual), and 1 / rms, float32 [M].

    Args:
        x_MN, residual_MN: bf16, fp16 or fp32 [M, N] of one dtype, last dimension contiguous.
        weight_N: contiguous [N].
        cast_first, one_plus: see ``reference.rms_norm``.
    """
    n_rows, size = x_MN.shape
    rows, width, warps = _tile(size)
    dtype = torch.promote_types(x_MN.dtype, weight_N.dtype) if cast_first else x_MN.dtype
    y_MN = torch.empty((n_rows, size), dtype=dtype, device=x_MN.device)
    total_MN = x_MN if residual_MN is None else torch.empty_like(y_MN, dtype=x_MN.dtype)
    rstd_M = torch.empty(n_rows, dtype=torch.float32, device=x_MN.device)
    other_MN = x_MN if residual_MN is None else residual_MN
    if n_rows:
        with on(x_MN.device):
            _forward_kernel[(triton.cdiv(n_rows, rows),)](
                x_MN, other_MN, weight_N, y_MN, total_MN, rstd_M,
                n_rows, size, x_MN.stride(0), other_MN.stride(0), eps,
                HAS_RESIDUAL=residual_MN is not None, CAST_FIRST=cast_first, ONE_PLUS=one_plus,
                ROWS=rows, WIDTH=width, num_warps=warps,
            )  # fmt: skip
    return y_MN, total_MN, rstd_M


def rms_norm_backward(
    dy_MN: torch.Tensor,
    more_MN: torch.Tensor | None,
    x_MN: torch.Tensor,
    weight_N: torch.Tensor,
    rstd_M: torch.Tensor,
    *,
    one_plus: bool,
    want_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx in the dtype of x, with ``more_MN`` added, and dw in float32 where wanted. dy and more are contiguous."""
    n_rows, size = x_MN.shape
    rows, width, warps = _tile(size)
    blocks = triton.cdiv(n_rows, rows)
    steps = 1
    if want_weight and x_MN.is_cuda:
        steps = triton.cdiv(blocks, _programs(x_MN.device.index))
    elif want_weight:
        steps = triton.cdiv(blocks, 8)
    programs = triton.cdiv(blocks, max(1, steps))
    dx_MN = torch.empty((n_rows, size), dtype=x_MN.dtype, device=x_MN.device)
    part_PN = torch.empty((programs, size), dtype=torch.float32, device=x_MN.device) if want_weight else None
    if n_rows:
        with on(x_MN.device):
            _backward_kernel[(programs,)](
                dy_MN, more_MN if more_MN is not None else dy_MN, x_MN, weight_N, rstd_M, dx_MN,
                part_PN if part_PN is not None else rstd_M,
                n_rows, size, x_MN.stride(0), steps,
                HAS_MORE=more_MN is not None, ONE_PLUS=one_plus, WANT_WEIGHT=want_weight,
                ROWS=rows, WIDTH=width, num_warps=warps,
            )  # fmt: skip
    return dx_MN, None if part_PN is None else part_PN.sum(0)
