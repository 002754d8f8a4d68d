"""A gated MLP as one function that keeps only its input and works through the tokens in tiles.

    h = activation(gate(x)) * up(x),    y = down(h)

Backward makes gate, up and h again, tile by tile (gate and up not where they were held), and never y: the gradients of
down need h and dy alone. Where x came out of a frozen norm, backward starts and ends at the norm's input, so neither
the normalised tokens nor their gradient are there for all tokens.

Shape suffixes as in ``lora_linear``; J is what the first projections give together, gate before up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.layers.lora_linear import LinearPass, LoraProjection, tensors_of, with_seeds, with_tensors
from unsloth_plugins.core.layers.normed import may_pass_by, normed_of
from unsloth_plugins.core.layers.op import Implementation, gated, gated_backward
from unsloth_plugins.core.layers.reference import Activation
from unsloth_plugins.core.offload.tail import Kept, keep

TILE = 4096
"""Tokens of one tile: enough rows to run these GEMMs at full speed."""


@dataclass(frozen=True, eq=False)
class _Mlp:
    """What is not a tensor with a gradient. ``rule`` normalises x, where backward goes past a norm."""

    first: tuple[LoraProjection, ...]
    down: LoraProjection
    activation: Activation
    implementation: Implementation
    rule: Any = None

    def passes(self, dtype: torch.dtype, tokens: int, tensors: Sequence[torch.Tensor | None]) -> tuple[LinearPass, ...]:
        """The two steps, with ``tensors`` of both."""
        several, split = tokens > TILE, len(tensors_of(self.first))
        first = with_tensors(self.first, tensors[:split])
        down = with_tensors((self.down,), tensors[split:])
        return LinearPass(first, dtype, several=several), LinearPass(down, dtype, several=several)


def _forward(
    mlp: _Mlp, x_NI: torch.Tensor, tensors: Sequence[torch.Tensor | None], held: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """``held`` collects the outputs of the first projections of every tile."""
    first, down = mlp.passes(x_NI.dtype, x_NI.shape[0], tensors)
    out_NI = x_NI.new_empty((x_NI.shape[0], mlp.down.outputs))
    for start in range(0, x_NI.shape[0], TILE):
        rows = slice(start, start + TILE)
        inner = first.outputs(x_NI[rows], first.inner(x_NI[rows], start))
        if held is not None:
            held.extend(inner)
        h_NI = gated(*inner, activation=mlp.activation, implementation=mlp.implementation)
        del inner
        (out_NI[rows],) = down.outputs(h_NI, down.inner(h_NI, start))
    return out_NI


def _backward(
    mlp: _Mlp,
    dout_NI: torch.Tensor,
    x_NI: torch.Tensor,
    norm_N: torch.Tensor | None,
    tensors: Sequence[torch.Tensor | None],
    wanted: tuple[bool, Sequence[bool]],
    held: Sequence[torch.Tensor],
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Gradients of x (or of what the norm made it from) and of ``tensors``. ``held`` is left as it is."""
    want_x, want = wanted
    first, down = mlp.passes(dout_NI.dtype, x_NI.shape[0], tensors)
    want_first, want_down = want[: len(first.tensors)], want[len(first.tensors) :]
    dx_NI = torch.empty_like(x_NI) if want_x else None
    for number, start in enumerate(range(0, x_NI.shape[0], TILE)):
        rows = slice(start, start + TILE)
        source = part = x_NI[rows]
        if norm_N is not None:
            with torch.enable_grad():
                source = source.detach().requires_grad_()
                normal = mlp.rule(source, norm_N)
            part = normal.detach()
        z_NR = first.inner(part, start)
        count = len(mlp.first)
        inner = list(held[number * count : (number + 1) * count]) or first.outputs(part, z_NR)
        dh_NI, dz_NR = down.input_gradients((dout_NI[rows],), want_x=True, first=start)
        assert dh_NI is not None
        h_NI, d_inner = gated_backward(
            dh_NI, *inner, activation=mlp.activation, overwrite=not held, implementation=mlp.implementation
        )
        del inner, dh_NI
        down.add_gradients(h_NI, down.inner(h_NI, start), dz_NR, (dout_NI[rows],), want_down, start)
        del h_NI
        d_part, dz_NR = first.input_gradients(d_inner, want_x=want_x, first=start)
        first.add_gradients(part, z_NR, dz_NR, d_inner, want_first, start)
        if dx_NI is not None and d_part is not None:
            if norm_N is not None:
                (d_part,) = torch.autograd.grad(normal, source, d_part)
                del normal
            dx_NI[rows] = d_part
        del d_inner, d_part, part, source  # or the next tile's would be made beside them
    return dx_NI, [*first.gradients(want_first), *down.gradients(want_down)]


class _TiledMlp(torch.autograd.Function):
    """The tail itself: its inputs were kept just before, see ``offload.tail``."""

    @staticmethod
    def forward(
        ctx: Any, mlp: _Mlp, kept: Kept, present: Sequence[bool], hold: bool, values_NI: Any, source: Any, *tensors: Any
    ) -> torch.Tensor:
        ctx.mlp, ctx.kept, ctx.present = mlp, kept, present
        held: list[torch.Tensor] | None = [] if hold else None
        out = _forward(mlp, values_NI, _spread(tensors, present)[1:], held)
        if held:
            ctx.save_for_backward(*held)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NI: torch.Tensor) -> Any:
        source, *given = ctx.kept.tensors()
        norm_N, *tensors = _spread(given, ctx.present)
        want_x, *needed = ctx.needs_input_grad[5:]
        want = _spread(needed, ctx.present, False)[1:]
        x_NI = source.reshape(-1, source.shape[-1])
        dx_NI, grads = _backward(ctx.mlp, dout_NI, x_NI, norm_N, tensors, (want_x, want), ctx.saved_tensors)
        ctx.kept.over()
        of_given = (grad for grad, there in zip([None, *grads], ctx.present, strict=True) if there)
        return None, None, None, None, None, None if dx_NI is None else dx_NI.view_as(source), *of_given


def _spread(given: Sequence[Any], present: Sequence[bool], absent: Any = None) -> list[Any]:
    """Put ``absent`` where there is no tensor."""
    each = iter(given)
    return [next(each) if there else absent for there in present]


def tiled_mlp(
    x: torch.Tensor,
    first: Sequence[LoraProjection],
    down: LoraProjection,
    *,
    activation: Activation,
    hold: bool = False,
    implementation: Implementation = "reference",
) -> torch.Tensor:
    """``down(activation(gate(x)) * up(x))`` with frozen bases, with adapters or without.

    Args:
        x: float [..., I]; all products are in its dtype.
        first: the projections gate and up, or one that gives gate before up.
        hold: keep gate and up for backward, where there is memory for it.
        implementation: of the activation.

    Returns:
        [..., O of ``down``] in the dtype of ``x``.

    Raises:
        ShapeError: the projections do not fit each other.
    """
    if len({each.outputs for each in first}) != 1 or len(first) > 2:
        raise ShapeError(
            expected="gate and up of one size, or one projection that gives both",
            got=f"outputs {[each.outputs for each in first]}",
            remedy="Pass gate before up.",
        )
    *first, down = with_seeds((*first, down))
    mlp = _Mlp(tuple(first), down, activation, implementation)
    tensors = [*tensors_of(first), *tensors_of((down,))]
    x_NI = x.reshape(-1, x.shape[-1])
    given = [tensor for tensor in tensors if tensor is not None]
    if not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *given))):
        return _forward(mlp, x_NI, tensors).view(*x.shape[:-1], down.outputs)
    normed, source, norm_N = normed_of(x), x, None
    if normed is not None and may_pass_by(x, normed):
        source, norm_N = normed.x, normed.weight_N
        mlp = _Mlp(tuple(first), down, activation, implementation, normed.rule)
    present = tuple(tensor is not None for tensor in (norm_N, *tensors))
    given = [tensor for tensor in (norm_N, *tensors) if tensor is not None]
    kept, (source, *given) = keep(source, *given)
    out_NI = _TiledMlp.apply(mlp, kept, present, hold, x_NI.detach(), source, *given)
    return out_NI.view(*x.shape[:-1], down.outputs)  # type: ignore[no-any-return]
