"""MXFP4 -> bf16, fp16 or fp32 on CUDA in one pass: reads 17 bytes a block, writes 32 numbers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on

_WORDS = 2048  # of eight numbers each, for one program: a thread loads 4 bytes and stores 16


@triton.jit
def _decode_kernel(
    words_ptr,
    scales_ptr,
    used_ptr,
    out_ptr,
    n_words,
    out_stride,
    ROW_WORDS: tl.constexpr,
    EXPERT_WORDS: tl.constexpr,
    SOME: tl.constexpr,
    WORDS: tl.constexpr,
):
    """One program decodes ``WORDS`` consecutive words; the numbers of a word are its nibbles, lowest first."""
    word = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    inside = word < n_words
    if SOME:
        inside = inside & (tl.load(used_ptr + word // EXPERT_WORDS, mask=inside, other=0) != 0)
    nibbles = tl.load(words_ptr + word, mask=inside, other=0)[:, None] >> (4 * tl.arange(0, 8))[None, :]
    scale = tl.load(scales_ptr + word // 4, mask=inside, other=0).to(tl.int32)
    bits = tl.where(scale == 0, 1 << 22, scale << 23)
    factor = tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)[:, None]
    # E2M1 has the layout of float32 but for the width of its exponent: at the low end of float32's it is 2**126 too
    # small, subnormals (0 and 1/2) and the sign of zero included.
    number = (((nibbles & 7) << 22) | ((nibbles & 8) << 28)).to(tl.float32, bitcast=True)
    value = number * 8.507059173023462e37 * factor
    row = word // ROW_WORDS
    at = (row.to(tl.int64) * out_stride + (word - row * ROW_WORDS) * 8)[:, None] + tl.arange(0, 8)[None, :]
    tl.store(out_ptr + at, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def decode_triton(
    blocks_RB: torch.Tensor, scales_R: torch.Tensor, out: torch.Tensor, used_E: torch.Tensor | None = None
) -> torch.Tensor:
    """``codec.decode`` into ``out``.

    Args:
        blocks_RB: uint8 [..., R, 16], contiguous, on CUDA.
        scales_R: uint8 [..., R], contiguous.
        out: [..., 32 R] bf16, fp16 or fp32; rows may be part of wider ones, all at one distance.
        used_E: bool, for each index of the first dimension whether it is decoded; others stay as ``out`` has them.

    Returns:
        ``out``.
    """
    words = blocks_RB.view(torch.int32)
    n_words = words.numel()
    with on(out.device):
        _decode_kernel[(triton.cdiv(n_words, _WORDS),)](
            words,
            scales_R,
            scales_R if used_E is None else used_E.view(torch.uint8),
            out,
            n_words,
            out.stride(-2),
            ROW_WORDS=4 * scales_R.shape[-1],
            EXPERT_WORDS=n_words // scales_R.shape[0],
            SOME=used_E is not None,
            WORDS=_WORDS,
            num_warps=8,
        )
    return out
