"""MXFP4 -> bf16, fp16 or fp32 on CUDA in one pass: reads 17 bytes a block, writes 32 numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on

_BLOCKS = 256  # MX blocks of 32 numbers for one program


@triton.jit
def _decode_kernel(blocks_ptr, scales_ptr, out_ptr, n_blocks, row_blocks, out_stride, BLOCKS: tl.constexpr):
    """One program decodes ``BLOCKS`` consecutive blocks; every offset is 64 bits wide."""
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    byte_at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = (block < n_blocks)[:, None]
    byte = tl.load(blocks_ptr + byte_at, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales_ptr + block, mask=block < n_blocks, other=0).to(tl.int32)
    bits = tl.where(scale == 0, 1 << 22, scale << 23)
    bits = tl.where(scale == 255, 0x7FC00000, bits)
    factor = bits.to(tl.float32, bitcast=True)[:, None]
    code = tl.join(byte & 15, byte >> 4)
    # Twice the magnitude is 0, 1, 2, 3, 4, 6, 8, 12: the code itself up to 4, then two steps more, then the rest.
    magnitude = code & 7
    twice = tl.where(magnitude < 5, magnitude, tl.where(magnitude == 5, 6, 8 + (magnitude & 1) * 4))
    # Times minus one, and not minus: Triton's minus subtracts from zero, which would lose the sign of a zero.
    number = twice.to(tl.float32) * tl.where(code > 7, -0.5, 0.5)
    value = tl.reshape(number, (BLOCKS, 32)) * factor
    begin = block // row_blocks * out_stride + block % row_blocks * 32
    at = begin[:, None] + tl.arange(0, 32)[None, :]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside)


def decode_triton(blocks_RB: torch.Tensor, scales_R: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """``codec.decode`` into ``out``.

    Args:
        blocks_RB: uint8 [..., R, 16], contiguous, on CUDA.
        scales_R: uint8 [..., R], contiguous.
        out: [..., 32 R] bf16, fp16 or fp32; rows may be part of wider ones, all at one distance.

    Returns:
        ``out``.
    """
    n_blocks = scales_R.numel()
    with on(out.device):
        _decode_kernel[(triton.cdiv(n_blocks, _BLOCKS),)](
            blocks_RB, scales_R, out, n_blocks, scales_R.shape[-1], out.stride(-2), BLOCKS=_BLOCKS, num_warps=8
        )
    return out
