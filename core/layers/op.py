"""Front doors of norms, rotary embedding and gated activations: validation and the autograd functions.

Shape suffixes as in ``reference``.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.device import why_no_triton
from unsloth_plugins.core.errors import ShapeError, UnsupportedError
from unsloth_plugins.core.layers import reference
from unsloth_plugins.core.layers.reference import Activation, NormRule

Implementation = Literal["triton", "reference"]
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@functools.cache
def why_reference(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels don't run there in that dtype, or ``None``."""
    if dtype not in _DTYPES:
        return f"{dtype}"
    return why_no_triton(device, dtype)


def resolve_implementation(
    choice: Literal["auto", "triton", "reference"], device: torch.device, dtype: torch.dtype
) -> tuple[Implementation, str]:
    """What ``choice`` means on this device, and why.

    Raises:
        UnsupportedError: ``triton`` was asked for and does not run here.
    """
    if choice == "reference":
        return "reference", "asked for"
    reason = why_reference(device, dtype)
    if reason is None:
        return "triton", f"{dtype} on CUDA"
    if choice == "triton":
        raise UnsupportedError(
            expected="bf16, fp16 or fp32 on an NVIDIA GPU for layers='triton'",
            got=reason,
            remedy="Use layers='auto'.",
        )
    return "reference", reason


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[M, N] with a contiguous last dimension."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] == 1 else flat.contiguous()


def _no_view(x: torch.Tensor) -> torch.Tensor:
    """An output as autograd takes it for new: models change some in place, which it refuses of views, and gradients of
    one tensor are added in place only where nothing else knows the memory."""
    return x.detach()


class _RmsNorm(torch.autograd.Function):
    """Saves x (or x + residual) and 1 / rms."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight_N: torch.Tensor, residual: Any, eps: float, rule: str) -> Any:
        from unsloth_plugins.core.layers.triton_norm import rms_norm_forward  # needs triton: only where it runs

        one_plus = rule == "one_plus"
        y_MN, total_MN, rstd_M = rms_norm_forward(
            _rows(x),
            weight_N.contiguous(),
            None if residual is None else _rows(residual),
            eps=eps,
            cast_first=rule == "cast_first",
            one_plus=one_plus,
        )
        ctx.save_for_backward(x if residual is None else total_MN, weight_N, rstd_M)
        ctx.one_plus = one_plus
        if residual is None:
            return _no_view(y_MN.view(x.shape))
        ctx.set_materialize_grads(False)
        return _no_view(y_MN.view(x.shape)), _no_view(total_MN.view(x.shape))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, more: torch.Tensor | None = None) -> Any:
        from unsloth_plugins.core.layers.triton_norm import rms_norm_backward

        x, weight_N, rstd_M = ctx.saved_tensors
        if dy is None:
            return more, None, more, None, None
        dx_MN, dw_N = rms_norm_backward(
            _rows(dy).contiguous(),
            None if more is None else _rows(more).contiguous(),
            _rows(x),
            weight_N.contiguous(),
            rstd_M,
            one_plus=ctx.one_plus,
            want_weight=ctx.needs_input_grad[1],
        )
        dx = _no_view(dx_MN.view(dy.shape))
        residual = dx if ctx.needs_input_grad[2] else None
        return dx, None if dw_N is None else dw_N.to(weight_N.dtype), residual, None, None


def rms_norm(
    x: torch.Tensor,
    weight_N: torch.Tensor,
    *,
    eps: float,
    rule: NormRule = "cast_first",
    residual: torch.Tensor | None = None,
    implementation: Implementation = "reference",
) -> Any:
    """``reference.rms_norm`` of ``x``, or of ``x + residual``.

    Args:
        x: float [..., N].
        weight_N: float [N]; frozen, it costs no gradient.
        eps, rule: see ``reference.rms_norm``.
        residual: as ``x``, added to it first.
        implementation: ``triton`` takes bf16, fp16 and fp32.

    Returns:
        [..., N]; with a residual the pair (norm, x + residual).

    Raises:
        ShapeError: weight or residual do not fit ``x``.
    """
    if weight_N.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        got = f"{list(weight_N.shape)}" + ("" if residual is None else f" and {list(residual.shape)}")
        raise ShapeError(
            expected=f"weight [{x.shape[-1]}]" + ("" if residual is None else f" and residual {list(x.shape)}"),
            got=got,
            remedy="Normalise over the last dimension.",
        )
    if implementation == "triton":
        if residual is not None and residual.dtype != x.dtype:
            raise ShapeError(
                expected=f"residual in {x.dtype}", got=f"{residual.dtype}", remedy="Add it before the norm instead."
            )
        return _RmsNorm.apply(x, weight_N, residual, eps, rule)
    if residual is None:
        return reference.rms_norm(x, weight_N, eps=eps, rule=rule)
    total = x + residual
    return reference.rms_norm(total, weight_N, eps=eps, rule=rule), total


class _Rope(torch.autograd.Function):
    """Saves cosines and sines, which are the model's and shared by its layers."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, half: int, in_place: bool) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.half, ctx.dtypes = half, (q.dtype, k.dtype)
        if in_place:
            torch.autograd.graph.increment_version((q, k))
            new_q, new_k = q.detach(), k.detach()
        else:
            new_q, new_k = _like(q, half, cos.dtype), _like(k, half, cos.dtype)
        _launch(q, k, new_q, new_k, cos, sin, half, back=False)
        return _no_view(new_q), _no_view(new_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: torch.Tensor, dk: torch.Tensor) -> Any:
        cos, sin = ctx.saved_tensors
        dq, dk = (d if d.stride(-1) == 1 else d.contiguous() for d in (dq, dk))
        new_q, new_k = _like(dq, ctx.half), _like(dk, ctx.half)
        _launch(dq, dk, new_q, new_k, cos, sin, ctx.half, back=True)
        return new_q.to(ctx.dtypes[0]), new_k.to(ctx.dtypes[1]), None, None, None, None


def _like(x_BHTD: torch.Tensor, half: int, other: torch.dtype | None = None) -> torch.Tensor:
    """Memory for the rotated x, token after token; what is not rotated is copied."""
    dtype = x_BHTD.dtype if other is None else torch.promote_types(x_BHTD.dtype, other)
    out = torch.empty_like(x_BHTD.transpose(1, 2), dtype=dtype, memory_format=torch.contiguous_format).transpose(1, 2)
    if 2 * half < x_BHTD.shape[-1]:
        out.copy_(x_BHTD)
    return out


def _launch(q: Any, k: Any, new_q: Any, new_k: Any, cos: Any, sin: Any, half: int, *, back: bool) -> None:
    from unsloth_plugins.core.layers.triton_rope import rope_launch  # needs triton: only where it runs

    rope_launch(q, k, new_q, new_k, cos, sin, half=half, back=back)


def rope(
    q_BHTD: torch.Tensor,
    k_BSTD: torch.Tensor,
    cos_BTR: torch.Tensor,
    sin_BTR: torch.Tensor,
    *,
    per_pair: bool = False,
    in_place: bool = False,
    implementation: Implementation = "reference",
) -> tuple[torch.Tensor, torch.Tensor]:
    """``reference.rotate`` of queries and keys, H query heads and S key heads.

    Args:
        q_BHTD, k_BSTD: float [B, H, T, D] and [B, S, T, D], any strides.
        cos_BTR, sin_BTR: see ``reference.rotate``; they get no gradient. Scaling (linear, dynamic, YaRN, ...) and the
            positions of packed documents are in them.
        per_pair: cos and sin hold one angle a pair, R/2, as gpt-oss's do.
        in_place: the kernel may overwrite q and k, which nobody else may need: autograd notices when somebody does.
            Not done where the result has another dtype or would be a changed leaf.

    Returns:
        The rotated q and k, in the wider dtype of each and of cos.

    Raises:
        ShapeError: heads, tokens or sizes do not fit together.
    """
    size = q_BHTD.shape[-1]
    angles = cos_BTR.shape[-1] * (2 if per_pair else 1)
    fits = (
        k_BSTD.shape[::2] == q_BHTD.shape[::2]
        and k_BSTD.shape[-1] == size
        and cos_BTR.shape == sin_BTR.shape
        and cos_BTR.shape[0] in (1, q_BHTD.shape[0])
        and cos_BTR.shape[1] == q_BHTD.shape[2]
        and angles <= size
        and angles % 2 == 0
    )
    if not fits:
        raise ShapeError(
            expected="q [B, H, T, D], k [B, S, T, D] and cos, sin [B, T, R] with R <= D",
            got=f"{list(q_BHTD.shape)}, {list(k_BSTD.shape)}, {list(cos_BTR.shape)} and {list(sin_BTR.shape)}",
            remedy="Pass heads before tokens, and the model's own cosines and sines.",
        )
    if implementation == "reference":
        both = (reference.rotate(x, cos_BTR, sin_BTR, per_pair=per_pair) for x in (q_BHTD, k_BSTD))
        return next(both), next(both)
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_BHTD, k_BSTD))
    cos, sin = cos_BTR.contiguous(), sin_BTR.contiguous()
    own = all(
        x.dtype == torch.promote_types(x.dtype, cos.dtype) and not (x.is_leaf and x.requires_grad) for x in (q, k)
    )
    return _Rope.apply(q, k, cos, sin, angles // 2, in_place and own)  # type: ignore[no-any-return]


class _Gated(torch.autograd.Function):
    """Saves gate and up, not the output."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
        from unsloth_plugins.core.layers.triton_glu import gated_forward  # needs triton: only where it runs

        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        gated_forward(_rows(gate), _rows(up), _rows(out), activation=activation)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from unsloth_plugins.core.layers.triton_glu import gated_backward

        gate, up = ctx.saved_tensors
        d_gate, d_up = (torch.empty(gate.shape, dtype=gate.dtype, device=gate.device) for _ in range(2))
        rows = (_rows(x) for x in (d_out, gate, up, d_gate, d_up))
        gated_backward(*rows, activation=ctx.activation)
        return d_gate, d_up, None


class _GatedPair(torch.autograd.Function):
    """As ``_Gated`` for gate and up that are the halves of one tensor; so is the gradient."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        from unsloth_plugins.core.layers.triton_glu import gated_forward

        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        size = gate_up.shape[-1] // 2
        out = torch.empty((*gate_up.shape[:-1], size), dtype=gate_up.dtype, device=gate_up.device)
        both = _rows(gate_up)
        gated_forward(both[:, :size], both[:, size:], _rows(out), activation=activation)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor) -> Any:
        from unsloth_plugins.core.layers.triton_glu import gated_backward

        (gate_up,) = ctx.saved_tensors
        size = gate_up.shape[-1] // 2
        d_both = torch.empty(gate_up.shape, dtype=gate_up.dtype, device=gate_up.device)
        both, d_rows = _rows(gate_up), _rows(d_both)
        halves = (both[:, :size], both[:, size:], d_rows[:, :size], d_rows[:, size:])
        gated_backward(_rows(d_out), *halves, activation=ctx.activation)
        return d_both, None


def gated(
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: Activation = "silu",
    implementation: Implementation = "reference",
) -> torch.Tensor:
    """``activation(gate) * up``: SwiGLU with ``silu``, GeGLU with ``gelu_tanh`` or ``gelu``.

    Args:
        gate: float [..., I], or [..., 2 I] with gate before up when ``up`` is ``None``.
        up: [..., I] in the same dtype.

    Returns:
        [..., I]. The kernel rounds once, at the end.

    Raises:
        ShapeError: gate and up differ in shape or dtype, or there is no half to split at.
    """
    if up is None:
        if gate.shape[-1] % 2:
            raise ShapeError(
                expected="gate and up in one tensor of even size",
                got=f"{list(gate.shape)}",
                remedy="Pass up as the second argument.",
            )
        if implementation == "triton":
            return _GatedPair.apply(gate, activation)  # type: ignore[no-any-return]
        return reference.gated(*gate.chunk(2, -1), activation=activation)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ShapeError(
            expected="gate and up of one shape and dtype",
            got=f"{list(gate.shape)} {gate.dtype} and {list(up.shape)} {up.dtype}",
            remedy="Pass the outputs of both projections as they come.",
        )
    if implementation == "triton":
        return _Gated.apply(gate, up, activation)  # type: ignore[no-any-return]
    return reference.gated(gate, up, activation=activation)


def gated_backward(
    d_out: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None = None,
    *,
    activation: Activation = "silu",
    overwrite: bool = False,
    implementation: Implementation = "reference",
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """What ``gated`` gave, made again, and the gradients of ``gate`` and ``up`` (of ``gate`` alone where it has both).

    Args:
        d_out: float [M, I], gradient of the output.
        gate, up: as for ``gated``, [M, I] or [M, 2 I].
        overwrite: the kernel may write the gradients into gate and up.
    """
    given = (gate,) if up is None else (gate, up)
    if implementation == "reference":
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in given]
            out = gated(*leaves, activation=activation)
        return out.detach(), torch.autograd.grad(out, leaves, d_out)
    from unsloth_plugins.core.layers.triton_glu import gated_backward as launch  # needs triton: only where it runs

    out = torch.empty_like(d_out)
    grads = given if overwrite else tuple(torch.empty_like(each) for each in given)
    halves = (*gate.chunk(2, -1), *grads[0].chunk(2, -1)) if up is None else (*given, *grads)
    launch(d_out, *halves, activation=activation, out_MI=out)
    return out, grads
