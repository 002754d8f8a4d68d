"""Rotary embedding of queries and keys in one launch, in place or not.

A program owns all heads of one token: cosines and sines are read once for queries and keys. Arithmetic is float32,
rounded once. The gradient is the rotation back: the same kernel with the second half's sine and the first's exchanged.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on


@triton.jit
def _turn(
    x_ptr, out_ptr, cos1, sin1, cos2, sin2, stride_h, stride_out, n_heads,
    HALF: tl.constexpr, WIDTH: tl.constexpr, HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    head, column = tl.arange(0, HEADS)[:, None].to(tl.int64), tl.arange(0, WIDTH)[None, :]
    inside = (head < n_heads) & (column < HALF)
    at = x_ptr + head * stride_h + column
    first = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=inside, other=0.0).to(tl.float32)
    if BACK:
        new_first, new_second = first * cos1 + second * sin2, second * cos2 - first * sin1
    else:
        new_first, new_second = first * cos1 - second * sin1, second * cos2 + first * sin2
    to = out_ptr + head * stride_out + column
    tl.store(to, new_first.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(to + HALF, new_second.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, n_tokens,
    q_b, q_h, q_t, k_b, k_h, k_t, qo_b, qo_h, qo_t, ko_b, ko_h, ko_t, c_b, c_t,
    q_heads, k_heads,
    HALF: tl.constexpr, SECOND: tl.constexpr, WIDTH: tl.constexpr,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    batch = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, WIDTH)[None, :]
    angle = batch * c_b + token * c_t + column
    cos1 = tl.load(cos_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)
    sin1 = tl.load(sin_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)
    cos2, sin2 = cos1, sin1
    if SECOND:
        cos2 = tl.load(cos_ptr + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
        sin2 = tl.load(sin_ptr + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    _turn(
        q_ptr + batch * q_b + token * q_t, q_out_ptr + batch * qo_b + token * qo_t,
        cos1, sin1, cos2, sin2, q_h, qo_h, q_heads, HALF, WIDTH, Q_HEADS, BACK,
    )  # fmt: skip
    _turn(
        k_ptr + batch * k_b + token * k_t, k_out_ptr + batch * ko_b + token * ko_t,
        cos1, sin1, cos2, sin2, k_h, ko_h, k_heads, HALF, WIDTH, K_HEADS, BACK,
    )  # fmt: skip


def rope_launch(
    q_BHTD: torch.Tensor,
    k_BSTD: torch.Tensor,
    q_out_BHTD: torch.Tensor,
    k_out_BSTD: torch.Tensor,
    cos_BTR: torch.Tensor,
    sin_BTR: torch.Tensor,
    *,
    half: int,
    back: bool,
) -> None:
    """Rotate the first ``2 * half`` elements of each head from q, k into the outputs, which may be q and k.

    Args:
        q_BHTD, k_BSTD, q_out_BHTD, k_out_BSTD: any strides, the last dimension contiguous.
        cos_BTR, sin_BTR: [B or 1, T, half or 2 half] with equal strides.
        back: rotate by the opposite angle.
    """
    batch, q_heads, tokens, _ = q_BHTD.shape
    if not q_BHTD.numel():
        return
    k_heads = k_BSTD.shape[1]
    width, heads = triton.next_power_of_2(half), triton.next_power_of_2(q_heads)
    with on(q_BHTD.device):
        _rope_kernel[(tokens, batch)](
            q_BHTD, k_BSTD, q_out_BHTD, k_out_BSTD, cos_BTR, sin_BTR, tokens,
            *q_BHTD.stride()[:3], *k_BSTD.stride()[:3], *q_out_BHTD.stride()[:3], *k_out_BSTD.stride()[:3],
            cos_BTR.stride(0) if cos_BTR.shape[0] > 1 else 0, cos_BTR.stride(1),
            q_heads, k_heads,
            HALF=half, SECOND=cos_BTR.shape[-1] == 2 * half, WIDTH=width,
            Q_HEADS=heads, K_HEADS=triton.next_power_of_2(k_heads), BACK=back,
            num_warps=min(8, max(1, heads * width // 512)),
        )  # fmt: skip
