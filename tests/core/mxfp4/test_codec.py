"""The MXFP4 codec against the format's definition in float64."""

from __future__ import annotations

import pytest
import torch

from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.mxfp4 import PackedWeight, decode, encode
from unsloth_plugins.core.mxfp4.codec import FP4_VALUES
from unsloth_plugins.core.mxfp4.weight import LogicalParameter


def _every_scale() -> tuple[torch.Tensor, torch.Tensor]:
    """All 256 scale bytes: blocks of any codes, of small ones, of one zero among the rest."""
    draw = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (256, 60, 16), dtype=torch.uint8, generator=draw)
    blocks[:, :20] &= 0x11
    blocks[:, 20:40] &= 0xBB
    blocks[:, 0] = 0
    return blocks, torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 60).contiguous()


def _by_definition(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Code by code in float64, low nibble first."""
    codes = torch.empty(*blocks.shape[:-1], 32, dtype=torch.int64)
    codes[..., 0::2], codes[..., 1::2] = (blocks % 16).long(), (blocks // 16).long()
    factor = torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.long() - 127)
    return torch.tensor(FP4_VALUES, dtype=torch.float64)[codes] * factor[..., None]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal bit for bit, signs of zero included; NaN equals NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(0).view(torch.int32), other.nan_to_num(0).view(torch.int32)
    )


def test_case_36_every_code_under_every_scale() -> None:
    blocks, scales = _every_scale()
    truth = _by_definition(blocks, scales)
    got = decode(blocks, scales).unflatten(-1, (-1, 32))
    assert got[255].isnan().all() and not got[:255].isnan().any()
    finite = truth.abs() <= torch.finfo(torch.float32).max
    finite[255] = False
    assert finite[:254].float().mean() > 0.99
    assert torch.equal(got.double()[finite], truth[finite])
    assert torch.equal(got[:255].signbit(), truth[:255].signbit())
    for scale in (64, 127, 140):
        row = decode(torch.arange(1, 256, 16, dtype=torch.uint8)[None], torch.tensor([scale], dtype=torch.uint8))
        assert row[0::2].eq(0.5 * 2.0 ** (scale - 127)).all()
        assert row[1::2].tolist() == [value * 2.0 ** (scale - 127) for value in FP4_VALUES]


def test_bf16_is_exact_too() -> None:
    blocks, scales = _every_scale()
    wide, narrow = decode(blocks, scales), decode(blocks, scales, torch.bfloat16)
    assert _same(narrow.float(), wide)


def test_decoded_numbers_survive_encoding() -> None:
    blocks, scales = _every_scale()
    x = decode(blocks, scales)
    again_blocks, again_scales = encode(x)
    assert _same(decode(again_blocks, again_scales), x)
    large = ((blocks & 7) >= 6).any(-1) | ((blocks >> 4 & 7) >= 6).any(-1)
    large &= x.unflatten(-1, (-1, 32)).isfinite().all(-1)
    assert large.float().mean() > 0.3
    assert torch.equal(again_blocks[large], blocks[large]) and torch.equal(again_scales[large], scales[large])


def test_rounds_to_nearest_ties_to_even() -> None:
    x = torch.zeros(32)
    x[:12] = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.26, -5.1, 7.9, 0.2])
    assert decode(*encode(x))[:12].tolist() == [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -0.5, -6.0, 6.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_error_is_at_most_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(64, 96, dtype=torch.float64).to(dtype)
    error = (decode(*encode(x), torch.float64) - x.double()).unflatten(-1, (-1, 32)).abs()
    largest = x.double().unflatten(-1, (-1, 32)).abs().amax(-1, keepdim=True)
    assert (error <= largest / 4 + 1e-9).all()


def test_zeros_nan_and_infinity() -> None:
    x = torch.zeros(4, 32)
    x[1, 3], x[2, 5], x[2, 6], x[3, 0] = float("nan"), float("-inf"), 2.0**126, -0.0
    blocks, scales = encode(x)
    y = decode(blocks, scales)
    assert scales[:, 0].tolist() == [0, 255, 253, 0]
    assert y[1].isnan().all() and y[2, 5] == float("-inf") and y[2, 6] == 2.0**126
    assert not y[0].any() and y[3, 0].signbit() and not blocks[1].any()


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ShapeError, match="multiple of 32"):
        encode(torch.zeros(3, 33))
    with pytest.raises(ShapeError, match="multiple of 32"):
        encode(torch.zeros(32, dtype=torch.int64))
    with pytest.raises(ShapeError, match="_blocks"):
        decode(torch.zeros(2, 15, dtype=torch.uint8), torch.zeros(2, dtype=torch.uint8))
    with pytest.raises(ShapeError, match="_blocks"):
        PackedWeight(torch.zeros(2, 2, 1, 16), torch.zeros(2, 2, 1))


def test_packed_weight_is_the_transposed_matrix() -> None:
    dense = torch.randn(3, 64, 40)  # [expert, in, out]
    weight = PackedWeight(*encode(dense.transpose(1, 2)))
    assert weight.shape == dense.shape
    torch.testing.assert_close(weight.dense(torch.float32), dense, rtol=0.34, atol=0.6)
    assert torch.equal(weight.dense(torch.float32)[1], weight.dense(torch.float32, 1))


def test_logical_parameter_has_a_shape_and_no_numbers() -> None:
    stand_in = LogicalParameter.of(torch.Size((3, 4, 5)), torch.bfloat16, torch.device("cpu"))
    assert stand_in.shape == (3, 4, 5) and stand_in.ndim == 3 and stand_in.dtype == torch.bfloat16
    assert stand_in.device.type == "cpu"
    for use in (lambda t: t + 1, lambda t: t.data.add_(1), lambda t: t.sum(), lambda t: t.clone()):
        with pytest.raises(Exception, match="merge there"):
            use(stand_in)
