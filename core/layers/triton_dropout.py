"""Dropout in Triton: one pass over memory, random numbers from the seed and the element's place.

y = x / (1 - p) where u >= p, else 0; with ADD, y is added to what is in the output. Arithmetic is float32.

A program owns one row's stretch of four times WIDTH elements: one Philox counter (place in the first quarter, row)
gives the uniform u of four elements, a quarter apart. Seven rounds pass BigCrush; source: Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on

_WIDTH = 256  # a quarter of a program's elements


@triton.jit
def _drop(x_ptr, out_ptr, at, random, width, p, scale, ADD: tl.constexpr):
    inside = at < width
    y = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32) * scale
    y = tl.where(tl.uint_to_uniform_float(random) >= p, y, 0.0)
    if ADD:
        y += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["seed"])
def _dropout_kernel(
    x_ptr, out_ptr, seed, width, x_stride, out_stride, p, scale, ADD: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0)
    x_ptr += row.to(tl.int64) * x_stride
    out_ptr += row.to(tl.int64) * out_stride
    quarter = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    none = quarter * 0
    r0, r1, r2, r3 = tl.philox(seed, quarter, none + row, none, none, 7)
    at = tl.program_id(1) * 4 * WIDTH + tl.arange(0, WIDTH)
    _drop(x_ptr, out_ptr, at, r0, width, p, scale, ADD)
    _drop(x_ptr, out_ptr, at + WIDTH, r1, width, p, scale, ADD)
    _drop(x_ptr, out_ptr, at + 2 * WIDTH, r2, width, p, scale, ADD)
    _drop(x_ptr, out_ptr, at + 3 * WIDTH, r3, width, p, scale, ADD)


def dropout_launch(x_MI: torch.Tensor, out_MI: torch.Tensor, *, p: float, seed: int, add: bool) -> None:
    """Into ``out_MI``, or added to it; both [M, I] with a contiguous last dimension."""
    if not x_MI.numel():
        return
    scale = 1 / (1 - p) if p < 1 else 0.0
    with on(x_MI.device):
        _dropout_kernel[(x_MI.shape[0], triton.cdiv(x_MI.shape[1], 4 * _WIDTH))](
            x_MI, out_MI, seed, x_MI.shape[1], x_MI.stride(0), out_MI.stride(0), p, scale,
            ADD=add, WIDTH=_WIDTH, num_warps=2,
        )  # fmt: skip
