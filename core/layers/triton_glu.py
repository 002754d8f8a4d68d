"""Gated activations in Triton, elementwise over rows of gate and up that may lie in one tensor or in two.

With a(g) the activation: out = a(g) u, du = a(g) d, dg = a'(g) u d. Arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on

_WIDTH = 1024  # elements of a program


@triton.jit
def _activate(g, KIND: tl.constexpr):
    """a(g) and a'(g)."""
    if KIND == "silu":
        s = 1.0 / (1.0 + tl.exp(-g))
        return g * s, s * (1.0 + g * (1.0 - s))
    elif KIND == "gelu_tanh":
        inner = 0.7978845608028654 * (g + 0.044715 * g * g * g)
        t = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
        slope = 0.7978845608028654 * (1.0 + 0.134145 * g * g)
        return 0.5 * g * (1.0 + t), 0.5 * (1.0 + t) + 0.5 * g * (1.0 - t * t) * slope
    else:
        cdf = 0.5 * (1.0 + tl.erf(g * 0.7071067811865476))
        return g * cdf, cdf + g * 0.3989422804014327 * tl.exp(-0.5 * g * g)


@triton.jit
def _forward_kernel(
    gate_ptr, up_ptr, out_ptr, width, gate_stride, up_stride, out_stride, KIND: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < width
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, _ = _activate(gate, KIND)
    tl.store(out_ptr + row * out_stride + at, (value * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    d_ptr, gate_ptr, up_ptr, d_gate_ptr, d_up_ptr, out_ptr,
    width, d_stride, gate_stride, up_stride, d_gate_stride, d_up_stride, out_stride,
    WANT_OUT: tl.constexpr, KIND: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < width
    d = tl.load(d_ptr + row * d_stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + at, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activate(gate, KIND)
    if WANT_OUT:
        tl.store(out_ptr + row * out_stride + at, (value * up).to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(d_gate_ptr + row * d_gate_stride + at, (slope * up * d).to(d_gate_ptr.dtype.element_ty), mask=inside)
    tl.store(d_up_ptr + row * d_up_stride + at, (value * d).to(d_up_ptr.dtype.element_ty), mask=inside)


def _grid(x_MI: torch.Tensor) -> tuple[int, int]:
    return x_MI.shape[0], triton.cdiv(x_MI.shape[1], _WIDTH)


def gated_forward(gate_MI: torch.Tensor, up_MI: torch.Tensor, out_MI: torch.Tensor, *, activation: str) -> None:
    """``activation(gate) * up`` into ``out_MI``, which may be gate or up; all [M, I], last dimension contiguous."""
    if not gate_MI.numel():
        return
    with on(gate_MI.device):
        _forward_kernel[_grid(gate_MI)](
            gate_MI, up_MI, out_MI, gate_MI.shape[1], gate_MI.stride(0), up_MI.stride(0), out_MI.stride(0),
            KIND=activation, WIDTH=_WIDTH, num_warps=4,
        )  # fmt: skip


def gated_backward(
    d_MI: torch.Tensor,
    gate_MI: torch.Tensor,
    up_MI: torch.Tensor,
    d_gate_MI: torch.Tensor,
    d_up_MI: torch.Tensor,
    *,
    activation: str,
    out_MI: torch.Tensor | None = None,
) -> None:
    """Gradients of gate and up, and where asked the forward's output again. Outputs may be the inputs' memory."""
    if not gate_MI.numel():
        return
    out = d_MI if out_MI is None else out_MI
    with on(gate_MI.device):
        _backward_kernel[_grid(gate_MI)](
            d_MI, gate_MI, up_MI, d_gate_MI, d_up_MI, out, gate_MI.shape[1],
            d_MI.stride(0), gate_MI.stride(0), up_MI.stride(0), d_gate_MI.stride(0), d_up_MI.stride(0), out.stride(0),
            WANT_OUT=out_MI is not None, KIND=activation, WIDTH=_WIDTH, num_warps=4,
        )  # fmt: skip
