"""Forward kernels for one new token against a cache: the keys are split over programs, whose results are joined.

The kernels over blocks of queries would have one program a key head for a single query, 8 of them for gpt-oss. Here
each goes through a part of the keys; parts are independent softmaxes, joined by their log normalisers and the sink.

Shape suffixes as in `op`; C parts of the keys. Inside kernels M query heads of one key head and N keys of one block.

Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on
from unsloth_plugins.core.sink_attention.triton_common import LN2, LOG2E, strides
from unsloth_plugins.core.sink_attention.triton_fwd import _attend
from unsloth_plugins.core.sink_attention.triton_tiles import padded_head_size

_PROGRAMS = 256  # about two for each multiprocessor of a large device
_LEAST = 128  # keys of a part


@triton.jit(do_not_specialize=["kv_heads", "keys", "begin", "part", "parts"])
def part_kernel(
    q,
    k,
    v,
    first,
    key_mask,
    o,
    lse,
    q_stride_b,
    q_stride_h,
    k_stride_b,
    k_stride_s,
    k_stride_h,
    v_stride_b,
    v_stride_s,
    v_stride_h,
    kv_heads,
    groups,
    keys,
    begin,
    part,
    parts,
    scale,
    softcap,
    HEAD: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    D: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """The heads of one key head over the keys begin + c part .. begin + (c + 1) part."""
    program = tl.program_id(0)
    c = program % parts
    row = program // parts
    b = tl.cast(row // kv_heads, tl.int64)
    h_kv = tl.cast(row % kv_heads, tl.int64)
    at_M = tl.arange(0, M)
    at_D = tl.arange(0, D)
    here_M = at_M < groups
    h_M = h_kv * groups + at_M
    here_MD = here_M[:, None] & (at_D < HEAD)[None, :]
    q_MD = tl.load(q + b * q_stride_b + h_M[:, None] * q_stride_h + at_D[None, :], mask=here_MD, other=0.0)
    k += b * k_stride_b + h_kv * k_stride_h
    v += b * v_stride_b + h_kv * v_stride_h
    if key_mask is not None:
        key_mask += b * keys
    low = begin + c * part
    end = tl.minimum(low + part, keys)
    if first is not None:
        first_key = tl.load(first + b * keys + keys - 1)
    else:
        first_key = begin
    i_M = tl.zeros([M], tl.int32) + (end - 1)
    first_M = tl.zeros([M], tl.int32) + first_key
    top_M = tl.full([M], -1e30, tl.float32)
    total_M = tl.zeros([M], tl.float32)
    acc_MD = tl.zeros([M, D], tl.float32)
    for start in tl.range(tl.maximum(low, first_key // N * N), end, N):
        acc_MD, top_M, total_M = _attend(
            acc_MD, top_M, total_M, q_MD, k, v, key_mask, k_stride_s, v_stride_s, start, keys, i_M, first_M,
            scale, softcap, HEAD, N, D, True, SOFTCAP, True,
        )  # fmt: skip
    empty_M = total_M == 0.0
    acc_MD = acc_MD / tl.where(empty_M, 1.0, total_M)[:, None]
    lse_M = tl.where(empty_M, float("-inf"), (top_M + tl.log2(total_M)) * LN2)
    at_lse_M = (b * kv_heads * groups + h_M) * parts + c
    tl.store(lse + at_lse_M, lse_M, mask=here_M)
    tl.store(o + at_lse_M[:, None] * HEAD + at_D[None, :], acc_MD, mask=here_MD)


@triton.jit(do_not_specialize=["parts"])
def join_kernel(part_o, part_lse, sink, o, lse, heads, parts, HEAD: tl.constexpr, C: tl.constexpr, D: tl.constexpr):
    """One program a head: the parts weighed by exp(lse - lse of all), the sink among them."""
    row = tl.cast(tl.program_id(0), tl.int64)
    at_C = tl.arange(0, C)
    at_D = tl.arange(0, D)
    lse2_C = tl.load(part_lse + row * parts + at_C, mask=at_C < parts, other=float("-inf")) * LOG2E
    top = tl.maximum(tl.max(lse2_C, 0), -1e30)
    sink2 = float("-inf")
    if sink is not None:
        sink2 = tl.load(sink + row % heads) * LOG2E
        top = tl.maximum(top, sink2)
    weight_C = tl.exp2(lse2_C - top)
    total = tl.sum(weight_C, 0) + tl.exp2(sink2 - top)
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    inside = (at_C < parts)[:, None] & (at_D < HEAD)[None, :]
    o_CD = tl.load(part_o + (row * parts + at_C)[:, None] * HEAD + at_D[None, :], mask=inside, other=0.0)
    o_D = tl.sum(o_CD * weight_C[:, None], 0) / total
    tl.store(o + row * HEAD + at_D, o_D.to(o.dtype.element_ty), mask=at_D < HEAD)
    tl.store(lse + row, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2))


def decode(
    q_BTHD: torch.Tensor,
    k_BSKD: torch.Tensor,
    v_BSKD: torch.Tensor,
    sink_H: torch.Tensor | None,
    first_BS: torch.Tensor | None,
    key_mask_BS: torch.Tensor | None,
    *,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One query a row, T = 1, without gradients. Arguments as of `triton_fwd.forward_launch`.

    Returns:
        o_BTHD in the dtype of q and lse_BHT float32.
    """
    batch, _, heads, head_size = q_BTHD.shape
    keys, kv_heads = k_BSKD.shape[1:3]
    begin = 0 if window is None or first_BS is not None else max(0, keys - window)
    # float16 serves compute capability 7.5 too, where a larger block spills registers.
    block = 64 if q_BTHD.dtype == torch.bfloat16 and head_size <= 128 else 32
    wanted = max(1, _PROGRAMS // (batch * kv_heads))
    part = triton.cdiv(max(_LEAST, triton.cdiv(keys - begin, wanted)), block) * block
    parts = triton.cdiv(keys - begin, part)
    size = padded_head_size(head_size)
    part_o = q_BTHD.new_empty((batch, heads, parts, head_size), dtype=torch.float32)
    part_lse = q_BTHD.new_empty((batch, heads, parts), dtype=torch.float32)
    o_BTHD = torch.empty_like(q_BTHD, memory_format=torch.contiguous_format)
    lse_BHT = q_BTHD.new_empty((batch, heads, 1), dtype=torch.float32)
    q_strides = strides("q", "bth", q_BTHD)
    del q_strides["q_stride_t"]
    with on(q_BTHD.device):
        part_kernel[(batch * kv_heads * parts,)](
            q=q_BTHD,
            k=k_BSKD,
            v=v_BSKD,
            first=first_BS,
            key_mask=key_mask_BS,
            o=part_o,
            lse=part_lse,
            **q_strides,
            **strides("k", "bsh", k_BSKD),
            **strides("v", "bsh", v_BSKD),
            kv_heads=kv_heads,
            groups=heads // kv_heads,
            keys=keys,
            begin=begin,
            part=part,
            parts=parts,
            scale=float(scale),
            softcap=float(softcap or 0.0),
            HEAD=head_size,
            M=max(16, triton.next_power_of_2(heads // kv_heads)),
            N=block,
            D=size,
            SOFTCAP=softcap is not None,
            num_warps=4,
            num_stages=2,
        )
        join_kernel[(batch * heads,)](
            part_o,
            part_lse,
            sink_H,
            o_BTHD,
            lse_BHT,
            heads,
            parts,
            HEAD=head_size,
            C=triton.next_power_of_2(parts),
            D=size,
            num_warps=4,
        )
    return o_BTHD, lse_BHT
