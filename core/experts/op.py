"""Front door of the experts: routing, validation, choice of implementation.

Shape suffixes: N tokens, H hidden size, E experts, K choices per token, I expert size, J = 2 I.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.device import supports_grouped_mm, why_no_triton
from unsloth_plugins.core.errors import ShapeError, UnsupportedError
from unsloth_plugins.core.experts.few import experts_few
from unsloth_plugins.core.experts.fused import TILE, can_fuse, experts_fused
from unsloth_plugins.core.experts.gemm import GEMMS
from unsloth_plugins.core.experts.grouped import experts_grouped
from unsloth_plugins.core.experts.matmul import ExpertLora, Weight
from unsloth_plugins.core.experts.projection import DecodedLayer
from unsloth_plugins.core.experts.reference import experts_loop
from unsloth_plugins.core.layers.swiglu import GPT_OSS, Swiglu

_HALVES = (torch.bfloat16, torch.float16)
Choice = Literal["auto", "reference", "grouped_mm", "triton"]
_NEEDS = {
    "grouped_mm": "bf16 experts on a CUDA device of compute capability 9.x or 10.x for experts='grouped_mm'",
    "triton": "bf16, fp16 or fp32 experts on a CUDA device that triton compiles for, for experts='triton'",
}


class _WideProduct(torch.autograd.Function):
    """x W^T of 16-bit numbers on CUDA in float32: their products are exact in it, so tensor cores lose nothing."""

    @staticmethod
    def forward(ctx: Any, x_NH: torch.Tensor, weight_EH: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_NH if ctx.needs_input_grad[1] else None, weight_EH)
        return torch.mm(x_NH, weight_EH.T, out_dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_NE: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x_NH, weight_EH = ctx.saved_tensors
        dx_NH = (dy_NE @ weight_EH.float()).to(weight_EH.dtype) if ctx.needs_input_grad[0] else None
        dw_EH = (dy_NE.T @ x_NH.float()).to(weight_EH.dtype) if ctx.needs_input_grad[1] else None
        return dx_NH, dw_EH


def top_k_routing(
    x_NH: torch.Tensor, weight_EH: torch.Tensor, bias_E: torch.Tensor | None, top_k: int, *, normalise: bool = True
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Router logits, softmax over the chosen (over all without ``normalise``), and their indices, in float32 or wider.

    transformers routes in the model's dtype; float32 keeps near-ties the same in recompute and across devices.

    Returns:
        logits [N, E], weights [N, K], indices int64 [N, K].
    """
    wide = torch.promote_types(x_NH.dtype, torch.float32)
    with torch.autocast(x_NH.device.type, enabled=False):
        if x_NH.is_cuda and x_NH.dtype == weight_EH.dtype and x_NH.dtype in _HALVES:
            logits_NE = _WideProduct.apply(x_NH, weight_EH)
            if bias_E is not None:
                logits_NE = logits_NE + bias_E
        else:
            logits_NE = F.linear(x_NH.to(wide), weight_EH.to(wide), None if bias_E is None else bias_E.to(wide))
        top_NK, index_NK = logits_NE.topk(top_k, dim=-1)
        if normalise:
            return logits_NE, top_NK.softmax(-1), index_NK
        return logits_NE, (top_NK - logits_NE.logsumexp(-1, keepdim=True)).exp(), index_NK


def _why_no_gemm(kind: Literal["grouped_mm", "triton"], device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a grouped GEMM does not run natively, or ``None``."""
    if kind == "grouped_mm":
        return None if supports_grouped_mm(device, dtype) else f"{dtype} on {device}"
    if dtype not in (*_HALVES, torch.float32):
        return f"{dtype} on {device}"
    return why_no_triton(device, dtype)


def resolve_implementation(
    choice: Choice, device: torch.device, dtype: torch.dtype, *, by_groups: bool = False
) -> tuple[Literal["reference", "grouped_mm", "triton"], str]:
    """What ``choice`` means on this device, and why.

    Args:
        by_groups: ``auto`` takes ``triton`` before ``grouped_mm``, which can't take the experts by groups.

    Raises:
        UnsupportedError: a grouped GEMM was asked for that does not run here.
    """
    if choice == "reference":
        return "reference", "asked for"
    if choice != "auto":
        if (reason := _why_no_gemm(choice, device, dtype)) is not None:
            raise UnsupportedError(expected=_NEEDS[choice], got=reason, remedy="Use experts='auto'.")
        return choice, "asked for"
    name = str(dtype).removeprefix("torch.")
    if by_groups and _why_no_gemm("triton", device, dtype) is None:
        return "triton", f"{name} on CUDA, a few experts at a time"
    if _why_no_gemm("grouped_mm", device, dtype) is None:
        return "grouped_mm", f"{name} on CUDA"
    if (reason := _why_no_gemm("triton", device, dtype)) is None:
        return "triton", f"{name} on CUDA, where torch has no grouped GEMM for it"
    return "reference", f"no grouped GEMM for {reason}"


def _in_tiles(
    run: Any, x_NH: torch.Tensor, w1: Any, b1: Any, w2: Any, b2: Any, index_NK: Any, weight_NK: Any, **options: Any
) -> torch.Tensor:
    """``run`` on some tokens at a time, each time under a checkpoint, whose recompute draws the same dropout."""
    parts = [
        checkpoint(run, x_TH, w1, b1, w2, b2, index_TK, weight_TK, use_reentrant=False, **options)
        for x_TH, index_TK, weight_TK in zip(*(t.split(TILE) for t in (x_NH, index_NK, weight_NK)), strict=True)
    ]
    return torch.cat(parts)


def experts(
    x_NH: torch.Tensor,
    gate_up_EHJ: Weight,
    gate_up_bias_EJ: torch.Tensor | None,
    down_EIH: Weight,
    down_bias_EH: torch.Tensor | None,
    index_NK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    activation: Swiglu = GPT_OSS,
    gate_up_lora: Sequence[ExpertLora] = (),
    down_lora: Sequence[ExpertLora] = (),
    implementation: Literal["reference", "grouped_mm", "triton"] = "reference",
    hold: bool = False,
    decoded: DecodedLayer | None = None,
    weights_limit: int | None = None,
) -> torch.Tensor:
    """``sum_k weight_nk * (activation(x_n W_gate_up[e] + b) W_down[e] + b')`` with e = index_nk, differentiable in all.

    Args:
        x_NH: float [N, H].
        gate_up_EHJ, gate_up_bias_EJ: [E, H, 2 I] and [E, 2 I] or ``None``.
        down_EIH, down_bias_EH: [E, I, H] and [E, H] or ``None``. Weights are dense, of any strides, or packed; they are
            cast to the dtype of ``x_NH`` where they are used.
        index_NK, weight_NK: from ``top_k_routing``.
        activation: how gate and up lie in J, and what becomes of them.
        gate_up_lora, down_lora: adapters, in any floating dtype; the products are in the dtype of ``x_NH``.
        implementation: ``grouped_mm`` and ``triton``, which differ in the grouped GEMM, work through the tokens in
            tiles and keep only the input; with dropout in an adapter, and on other devices than CUDA, by a checkpoint
            for each tile, which runs the experts forward once more. A few tokens without gradients take only the
            matrices of their own experts: fewer choices than experts one matrix a choice, more in the tiled form.
        hold: let the tiled form keep the first projection's output, 4 I K bytes a token, and not recompute it in
            backward. The other forms keep it in any case.
        decoded: where the tiled form may leave packed weights that it has decoded, for its next passes.
        weights_limit: bytes. ``triton`` then decodes (or, to append an adapter, copies) the weights of so few experts
            at a time that they take no more, or of one, and does so anew for each tile; the results are the same.

    Returns:
        [N, H] in the dtype of ``x_NH``. The weighted sum is float32 or wider.

    Raises:
        ShapeError: shapes do not fit together.
        UnsupportedError: ``weights_limit`` for ``grouped_mm``.
    """
    if weights_limit is not None and implementation == "grouped_mm":
        raise UnsupportedError(
            expected="implementation='triton' or 'reference' for weights_limit",
            got="'grouped_mm', whose kernel can't begin in the middle of the rows",
            remedy="Use 'triton', or leave weights_limit out.",
        )
    n_experts, hidden, twice = gate_up_EHJ.shape
    if x_NH.ndim != 2 or x_NH.shape[1] != hidden or down_EIH.shape != (n_experts, twice // 2, hidden):
        raise ShapeError(
            expected=f"x [N, {hidden}] and down_proj [{n_experts}, {twice // 2}, {hidden}]",
            got=f"{list(x_NH.shape)} and {list(down_EIH.shape)}",
            remedy="Flatten batch and time; weights are stored [expert, in, out].",
        )
    for name, shape, lora in (("gate_up", gate_up_EHJ.shape, gate_up_lora), ("down", down_EIH.shape, down_lora)):
        for term in lora:
            a, b = term.a_ErI.shape, term.b_ErO.shape
            if a[:2] != b[:2] or (a[0], a[2], b[2]) != tuple(shape):
                raise ShapeError(
                    expected=f"{name} LoRA of A [{shape[0]}, r, {shape[1]}] and B [{shape[0]}, r, {shape[2]}]",
                    got=f"{list(a)} and {list(b)}",
                    remedy="Unfold PEFT's lora_A as (E, r, in) and its lora_B as (out, r, E).",
                )
    run: Any = experts_loop
    if implementation != "reference":
        gemm = GEMMS[implementation]
        fusible = x_NH.is_cuda and can_fuse(gate_up_lora, down_lora)
        run = functools.partial(experts_fused, hold=hold, decoded=decoded) if fusible else experts_grouped
        run = functools.partial(run, gemm=gemm, weights_limit=weights_limit)
        if not fusible and x_NH.shape[0] > TILE:
            run = functools.partial(_in_tiles, run)
        if fusible and not torch.is_grad_enabled() and index_NK.numel() < n_experts:
            run = experts_few
    return run(
        x_NH,
        gate_up_EHJ,
        gate_up_bias_EJ,
        down_EIH,
        down_bias_EH,
        index_NK,
        weight_NK,
        activation=activation,
        gate_up_lora=gate_up_lora,
        down_lora=down_lora,
    )
