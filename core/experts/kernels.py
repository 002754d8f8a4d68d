"""What happens around the grouped GEMMs of the experts, one pass over memory each, without atomics.

Shape suffixes: N tokens, K choices per token, M = N K rows sorted by expert, E experts, H hidden size, I expert size,
J = 2 I with gate and up interleaved or one behind the other. Row offsets are 64 bits wide; arithmetic is float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.layers.swiglu import Swiglu

_WIDTH = 1024  # columns handled at a time


@triton.jit
def _gather_kernel(x_ptr, token_ptr, out_ptr, width, x_stride, out_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int64)
    for start in range(0, width, WIDTH):
        at = start + tl.arange(0, WIDTH)
        values = tl.load(x_ptr + token * x_stride + at, mask=at < width)
        tl.store(out_ptr + row * out_stride + at, values, mask=at < width)


@triton.jit
def _biased(gate_up_ptr, bias_ptr, at, inside, HAS_BIAS: tl.constexpr):
    values = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        values += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return values


@triton.jit
def _activation(
    gate_up_ptr,
    bias_ptr,
    start,
    width,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gate and up with their biases at columns ``start`` and on of I, before and after the clamps, and the sigmoid."""
    if INTERLEAVED:
        both = 2 * start + tl.arange(0, 2 * WIDTH)
        values = _biased(gate_up_ptr, bias_ptr, both, both < 2 * width, HAS_BIAS)
        raw_gate, raw_up = tl.split(tl.reshape(values, (WIDTH, 2)))
    else:
        at = start + tl.arange(0, WIDTH)
        raw_gate = _biased(gate_up_ptr, bias_ptr, at, at < width, HAS_BIAS)
        raw_up = _biased(gate_up_ptr, bias_ptr, width + at, at < width, HAS_BIAS)
    gate, up = raw_gate, raw_up
    if CLAMP:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    sigmoid = 1.0 / (1.0 + tl.exp(-ALPHA * gate))
    return raw_gate, raw_up, gate, up, sigmoid


@triton.jit
def _swiglu_kernel(
    gate_up_ptr,
    bias_ptr,
    expert_ptr,
    out_ptr,
    width,
    out_stride,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ptr + row).to(tl.int64)
    for start in range(0, width, WIDTH):
        at = start + tl.arange(0, WIDTH)
        _, _, gate, up, sigmoid = _activation(
            gate_up_ptr + row * 2 * width,
            bias_ptr + expert * 2 * width,
            start,
            width,
            ALPHA,
            LIMIT,
            CLAMP,
            HAS_BIAS,
            INTERLEAVED,
            WIDTH,
        )
        hidden = (up + OFFSET) * gate * sigmoid
        tl.store(out_ptr + row * out_stride + at, hidden.to(out_ptr.dtype.element_ty), mask=at < width)


@triton.jit
def _swiglu_backward_kernel(
    gate_up_ptr,
    bias_ptr,
    expert_ptr,
    weight_ptr,
    dh_ptr,
    more_ptr,
    d_gate_up_ptr,
    d_weight_ptr,
    width,
    dh_stride,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    CLAMP: tl.constexpr,
    OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_MORE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.load(expert_ptr + row).to(tl.int64)
    weight = tl.load(weight_ptr + row).to(tl.float32)
    product = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, width, WIDTH):
        at = start + tl.arange(0, WIDTH)
        raw_gate, raw_up, gate, up, sigmoid = _activation(
            gate_up_ptr + row * 2 * width,
            bias_ptr + expert * 2 * width,
            start,
            width,
            ALPHA,
            LIMIT,
            CLAMP,
            HAS_BIAS,
            INTERLEAVED,
            WIDTH,
        )
        hidden = (up + OFFSET) * gate * sigmoid
        dh = tl.load(dh_ptr + row * dh_stride + at, mask=at < width, other=0.0).to(tl.float32)
        if HAS_MORE:
            dh += tl.load(more_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        product += dh * hidden
        dh *= weight
        d_gate = dh * (up + OFFSET) * sigmoid * (1.0 + ALPHA * gate * (1.0 - sigmoid))
        d_up = dh * gate * sigmoid
        if CLAMP:
            d_gate = tl.where(raw_gate <= LIMIT, d_gate, 0.0)
            d_up = tl.where((raw_up <= LIMIT) & (raw_up >= -LIMIT), d_up, 0.0)
        tl.store(more_ptr + row * width + at, hidden.to(more_ptr.dtype.element_ty), mask=at < width)
        place = d_gate_up_ptr + row * 2 * width
        kind = d_gate_up_ptr.dtype.element_ty
        if INTERLEAVED:
            both = 2 * start + tl.arange(0, 2 * WIDTH)
            d_both = tl.reshape(tl.join(d_gate, d_up), (2 * WIDTH,))
            tl.store(place + both, d_both.to(kind), mask=both < 2 * width)
        else:
            tl.store(place + at, d_gate.to(kind), mask=at < width)
            tl.store(place + width + at, d_up.to(kind), mask=at < width)
    tl.store(d_weight_ptr + row, tl.sum(product, axis=0))


@triton.jit
def _combine_kernel(
    y_ptr,
    more_ptr,
    place_ptr,
    index_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    width,
    y_stride,
    K: tl.constexpr,
    HAS_MORE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, width, WIDTH):
        at = start + tl.arange(0, WIDTH)
        total = tl.zeros((WIDTH,), dtype=tl.float32)
        for k in tl.static_range(K):
            row = tl.load(place_ptr + token * K + k).to(tl.int64)
            part = tl.load(y_ptr + row * y_stride + at, mask=at < width, other=0.0).to(tl.float32)
            if HAS_MORE:
                part += tl.load(more_ptr + row * width + at, mask=at < width, other=0.0).to(tl.float32)
            if HAS_BIAS:
                expert = tl.load(index_ptr + token * K + k).to(tl.int64)
                part += tl.load(bias_ptr + expert * width + at, mask=at < width, other=0.0).to(tl.float32)
            if WEIGHTED:
                part *= tl.load(weight_ptr + token * K + k).to(tl.float32)
            total += part
        tl.store(out_ptr + token * width + at, total.to(out_ptr.dtype.element_ty), mask=at < width)


def gather_rows(x_NH: torch.Tensor, token_M: torch.Tensor, out_MH: torch.Tensor) -> None:
    """out[m] = x[token[m]]; the rows of both may be part of wider ones."""
    _gather_kernel[(token_M.shape[0],)](
        x_NH, token_M, out_MH, x_NH.shape[1], x_NH.stride(0), out_MH.stride(0), WIDTH=_WIDTH
    )


def _constants(activation: Swiglu) -> dict[str, Any]:
    return {
        "ALPHA": activation.alpha,
        "LIMIT": activation.limit or 0.0,
        "CLAMP": activation.limit is not None,
        "OFFSET": activation.offset,
        "INTERLEAVED": activation.interleaved,
    }


def swiglu(
    gate_up_MJ: torch.Tensor,
    bias_EJ: torch.Tensor | None,
    expert_M: torch.Tensor,
    out_MI: torch.Tensor,
    *,
    activation: Swiglu,
) -> None:
    """out = the activation of gate_up + bias[expert]; rows of ``out`` may be part of wider ones."""
    _swiglu_kernel[(expert_M.shape[0],)](
        gate_up_MJ,
        bias_EJ if bias_EJ is not None else gate_up_MJ,
        expert_M,
        out_MI,
        out_MI.shape[1],
        out_MI.stride(0),
        HAS_BIAS=bias_EJ is not None,
        **_constants(activation),
        WIDTH=_WIDTH,
        num_warps=8,
    )


def swiglu_backward(
    gate_up_MJ: torch.Tensor,
    bias_EJ: torch.Tensor | None,
    expert_M: torch.Tensor,
    weight_M: torch.Tensor,
    dh_MI: torch.Tensor,
    more_MI: torch.Tensor,
    *,
    has_more: bool,
    activation: Swiglu,
    out_MJ: torch.Tensor | None = None,
) -> torch.Tensor:
    """Backward of ``swiglu``, in place: ``more`` becomes the activation and ``gate_up`` its own gradient.

    Args:
        weight_M: routing weight of each row.
        dh_MI: gradient of the activation without that weight; rows may be part of wider ones.
        more_MI: a second part of that gradient where ``has_more``; contiguous.
        out_MJ: takes the gradient of ``gate_up``, which then stays as it is.

    Returns:
        float32 [M], the gradient of ``weight`` but for the bias of the down projection: <dh + more, activation>.
    """
    d_weight_M = torch.empty(expert_M.shape, dtype=torch.float32, device=expert_M.device)
    _swiglu_backward_kernel[(expert_M.shape[0],)](
        gate_up_MJ,
        bias_EJ if bias_EJ is not None else gate_up_MJ,
        expert_M,
        weight_M,
        dh_MI,
        more_MI,
        gate_up_MJ if out_MJ is None else out_MJ,
        d_weight_M,
        more_MI.shape[1],
        dh_MI.stride(0),
        HAS_BIAS=bias_EJ is not None,
        **_constants(activation),
        HAS_MORE=has_more,
        WIDTH=_WIDTH,
        num_warps=8,
    )
    return d_weight_M


def combine(
    y_MH: torch.Tensor,
    place_NK: torch.Tensor,
    out_NH: torch.Tensor,
    *,
    more_MH: torch.Tensor | None = None,
    index_NK: torch.Tensor | None = None,
    weight_NK: torch.Tensor | None = None,
    bias_EH: torch.Tensor | None = None,
) -> None:
    """out[n] = sum_k (y + more)[place[n, k]], or sum_k weight[n, k] (y[place[n, k]] + bias[index[n, k]]).

    Args:
        y_MH: rows may be part of wider ones.
        place_NK: the row of y that belongs to each choice of each token.
        more_MH: contiguous, or ``None``.
        weight_NK: for the weighted sum.
        index_NK, bias_EH: both for a bias, or none.
    """
    _combine_kernel[(out_NH.shape[0],)](
        y_MH,
        more_MH if more_MH is not None else y_MH,
        place_NK,
        index_NK if index_NK is not None else place_NK,
        weight_NK if weight_NK is not None else y_MH,
        bias_EH if bias_EH is not None else y_MH,
        out_NH,
        out_NH.shape[1],
        y_MH.stride(0),
        K=place_NK.shape[1],
        HAS_MORE=more_MH is not None,
        WEIGHTED=weight_NK is not None,
        HAS_BIAS=bias_EH is not None,
        WIDTH=_WIDTH,
    )
