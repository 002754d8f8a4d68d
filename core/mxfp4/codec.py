"""MXFP4 in plain torch: the definition that kernels are tested against.

A block is 32 numbers along the input dimension: 32 four-bit codes (E2M1) in 16 bytes, the earlier number in the low
nibble, and one scale byte (E8M0) that stands for 2 ** (byte - 127); byte 255 is NaN. Shape suffixes: R blocks of a row,
B = 16 bytes of a block.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.3.3 (E2M1), 5.4.1 (E8M0), 6.3 (conversion).
"""

from __future__ import annotations

import torch

from unsloth_plugins.core.errors import ShapeError

BLOCK = 32
BYTES = BLOCK // 2
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each code stands for."""

_NAN_SCALE, _BIAS = 255, 127
_INFINITY_SCALE = 253  # 6 * 2 ** 126 is beyond float32, and every finite number of byte 254 is a code here as well
_MAX_EXPONENT = 2  # of the largest code, 6 = 1.5 * 2 ** 2


def scale_values(scales: torch.Tensor) -> torch.Tensor:
    """2 ** (byte - 127) in float32 by its bits, exact for the subnormal of byte 0 as well; NaN for 255.

    Args:
        scales: uint8 of any shape.

    Returns:
        float32 of the same shape.
    """
    bits = scales.to(torch.int32) << 23
    bits = torch.where(scales == 0, 1 << 22, bits)
    bits = torch.where(scales == _NAN_SCALE, 0x7FC00000, bits)
    return bits.view(torch.float32)


def decode(blocks_RB: torch.Tensor, scales_R: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Numbers from packed bytes, exact wherever they are finite in ``dtype``.

    Args:
        blocks_RB: uint8 [..., R, 16].
        scales_R: uint8 [..., R].
        dtype: of the result. bfloat16 and float32 hold every finite number of the format; float16 overflows to
            infinity and underflows as a cast from float32 does.

    Returns:
        [..., 32 R]. A block with scale 255 is NaN throughout.

    Raises:
        ShapeError: not packed bytes.
    """
    check_packed(blocks_RB, scales_R)
    table = torch.tensor(FP4_VALUES, dtype=torch.float32, device=blocks_RB.device)
    codes = torch.stack((blocks_RB & 15, blocks_RB >> 4), dim=-1).flatten(-2)
    values = table[codes.to(torch.int32)] * scale_values(scales_R)[..., None]
    return values.flatten(-2).to(dtype)


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest code, ties to the even one, under the scale 2 ** (floor(log2(largest magnitude)) - 2).

    That scale brings the largest magnitude of a block into [4, 8); what exceeds 6 becomes 6. It makes ``decode`` of
    the result exact whenever ``x`` is itself decoded, with equal bytes for blocks that hold a finite code of magnitude
    4 or 6. A block of zeros has scale byte 0; one with NaN has scale byte 255 and codes 0. Infinity becomes 6 under
    scale byte 253, which float32 decodes to infinity again.

    Args:
        x: floating point [..., n], n a multiple of 32. Blocks run along the last dimension.

    Returns:
        blocks uint8 [..., n / 32, 16] and scales uint8 [..., n / 32].

    Raises:
        ShapeError: ``n`` is not a multiple of 32.
    """
    if not x.is_floating_point() or x.ndim < 1 or x.shape[-1] % BLOCK:
        raise ShapeError(
            expected=f"floating point numbers whose last dimension is a multiple of {BLOCK}",
            got=f"{x.dtype} {list(x.shape)}",
            remedy="Put the input dimension last; pad it if the format allows padding.",
        )
    wide = x.to(torch.promote_types(x.dtype, torch.float32)).unflatten(-1, (-1, BLOCK))
    magnitude = wide.abs()
    largest = magnitude.amax(-1)
    nan, infinite = largest.isnan(), largest.isinf()
    exponent = torch.frexp(torch.where(nan | infinite, 1.0, largest)).exponent - 1 - _MAX_EXPONENT + _BIAS
    byte = exponent.clamp(0, _NAN_SCALE - 1).masked_fill(largest == 0, 0)
    byte = byte.masked_fill(infinite, _INFINITY_SCALE).masked_fill(nan, _NAN_SCALE)
    scales = byte.to(torch.uint8)

    scaled = magnitude / scale_values(scales)[..., None].to(wide.dtype)
    code = torch.zeros_like(scaled, dtype=torch.uint8)
    # Half-way points; a tie goes to the code with the even number, so every second comparison includes equality.
    for number, half_way in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        code += (scaled >= half_way) if number % 2 else (scaled > half_way)
    code |= wide.signbit().to(torch.uint8) << 3
    code = code.masked_fill(nan[..., None], 0)
    return code[..., ::2] | (code[..., 1::2] << 4), scales


def check_packed(blocks_RB: torch.Tensor, scales_R: torch.Tensor) -> None:
    """Raise ``ShapeError`` unless these are uint8 blocks of 16 bytes with one scale each."""
    if (
        blocks_RB.dtype != torch.uint8
        or scales_R.dtype != torch.uint8
        or blocks_RB.shape != (*scales_R.shape, BYTES)
        or scales_R.ndim < 1
    ):
        raise ShapeError(
            expected=f"uint8 blocks [..., R, {BYTES}] and uint8 scales [..., R]",
            got=f"{blocks_RB.dtype} {list(blocks_RB.shape)} and {scales_R.dtype} {list(scales_R.shape)}",
            remedy="Pass the `*_blocks` and `*_scales` of one projection as they are in the checkpoint.",
        )
