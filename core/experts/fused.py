"""The experts of one layer as one function that keeps only its input and works through the tokens in tiles.

LoRA costs next to nothing, see ``projection``. Backward recomputes the first
projection (unless its output was held) and the activation, tile by tile, and never the second: the routing weight's
gradient is <dOut W^T, h> + <dOut, bias>.

Shape suffixes as in ``kernels``; N tokens of one tile, r LoRA rank padded to a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from unsloth_plugins.core.device import on
from unsloth_plugins.core.experts.gemm import GEMMS, GroupedGemm, TritonGemm
from unsloth_plugins.core.experts.matmul import ExpertLora, Weight
from unsloth_plugins.core.experts.projection import (
    DecodedLayer,
    GroupedProjection,
    Projection,
    Term,
    WholeProjection,
    needs_memory,
)
from unsloth_plugins.core.layers.normed import Rule, may_pass_by, normed_of
from unsloth_plugins.core.layers.swiglu import Swiglu
from unsloth_plugins.core.offload.tail import Kept, keep

TILE = 8192
"""Tokens of one tile: enough rows to run grouped GEMMs at full speed."""
_FEW = 4
"""Choices for each expert, up to which one without any is likely enough to look for: e^-4 under even routing."""


@dataclass(eq=False)
class _Routing:
    """One tile's rows in the order of their experts."""

    token_M: torch.Tensor
    expert_M: torch.Tensor
    ends_E: torch.Tensor
    place_NK: torch.Tensor
    order_M: torch.Tensor


def _route(index_NK: torch.Tensor, n_experts: int) -> _Routing:
    flat_M = index_NK.reshape(-1).to(torch.int16)  # radix sort takes a pass for each byte
    expert_M, order_M = flat_M.sort(stable=True)
    edges_E = torch.arange(1, n_experts + 1, device=flat_M.device, dtype=torch.int16)
    ends_E = torch.searchsorted(expert_M, edges_E, out_int32=True)
    place_M = torch.empty_like(order_M)
    place_M[order_M] = torch.arange(order_M.shape[0], device=order_M.device)
    return _Routing(order_M // index_NK.shape[1], expert_M, ends_E, place_M.view_as(index_NK), order_M)


def _used(index_NK: torch.Tensor, n_experts: int) -> torch.Tensor | None:
    """Which experts were chosen, bool [E]; ``None`` for so many tokens that nearly all are."""
    if index_NK.numel() > _FEW * n_experts:
        return None
    used_E = torch.zeros(n_experts, dtype=torch.bool, device=index_NK.device)
    return used_E.index_fill_(0, index_NK.reshape(-1), True)


@dataclass(frozen=True, eq=False)
class _Layer:
    """What does not change from step to step. ``rule`` normalises x, where backward goes past a norm."""

    gate_up: Weight
    gate_up_bias_EJ: torch.Tensor | None
    down: Weight
    down_bias_EH: torch.Tensor | None
    scalings: tuple[float, float]
    activation: Swiglu
    gemm: GroupedGemm
    decoded: DecodedLayer | None
    weights_limit: int | None
    rule: Rule | None

    @property
    def base(self) -> tuple[Weight | torch.Tensor | None, ...]:
        """Weight and bias of the first projection and of the second."""
        return self.gate_up, self.gate_up_bias_EJ, self.down, self.down_bias_EH

    @property
    def trained(self) -> tuple[bool, ...]:
        """Which of ``base`` need a gradient."""
        return tuple(isinstance(each, torch.Tensor) and each.requires_grad for each in self.base)

    @property
    def n_experts(self) -> int:
        return self.gate_up.shape[0]

    def projections(
        self,
        x: torch.Tensor,
        adapters: Sequence[torch.Tensor | None],
        written: int | None = None,
        used_E: torch.Tensor | None = None,
    ) -> tuple[Projection, Projection]:
        """``written``: by which pass the adapters were last written into what is kept; ``None`` writes them.
        ``used_E``: see ``Term``; what is kept has all experts.
        """
        a1, b1, a2, b2 = adapters
        terms = Term(self.gate_up, a1, b1, self.scalings[0]), Term(self.down, a2, b2, self.scalings[1])
        if self.decoded is not None and self.decoded.keeps(terms, x.dtype):
            return self.decoded.projections(terms, x.dtype, self.gemm, written)
        first, second = (self._projection(term._replace(used_E=used_E), x.dtype) for term in terms)
        return first, second

    def _projection(self, term: Term, dtype: torch.dtype) -> Projection:
        if self.weights_limit is None or not needs_memory(term):
            return WholeProjection(term, dtype, self.gemm)
        assert isinstance(self.gemm, TritonGemm)
        return GroupedProjection(term, dtype, self.gemm, self.weights_limit)


def _forward(
    layer: _Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    index: torch.Tensor,
    adapters: Any,
    held: list[torch.Tensor] | None = None,
    used_E: torch.Tensor | None = None,
) -> torch.Tensor:
    """``held`` collects the first projection's output, one tensor [M, J] a tile. ``used_E``: see ``Term``."""
    from unsloth_plugins.core.experts import kernels  # needs triton: only where it runs

    first, second = layer.projections(x, adapters, used_E=used_E)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for start in range(0, x.shape[0], TILE):
        part = slice(start, start + TILE)
        index_NK, weight_NK = index[part].contiguous(), weight[part].contiguous()
        route = _route(index_NK, layer.n_experts)
        rows_MK = first.rows(route.token_M.shape[0])
        kernels.gather_rows(x[part], route.token_M, rows_MK[:, : first.inputs])
        first.complete(rows_MK, route.ends_E)
        gate_up_MJ = first(rows_MK, route.ends_E)
        if held is not None:
            held.append(gate_up_MJ)
        del rows_MK
        hidden_MK = second.rows(route.token_M.shape[0])
        kernels.swiglu(
            gate_up_MJ,
            layer.gate_up_bias_EJ,
            route.expert_M,
            hidden_MK[:, : second.inputs],
            activation=layer.activation,
        )
        del gate_up_MJ
        second.complete(hidden_MK, route.ends_E)
        kernels.combine(
            second(hidden_MK, route.ends_E),
            route.place_NK,
            out[part],
            index_NK=index_NK,
            weight_NK=weight_NK,
            bias_EH=layer.down_bias_EH,
        )
    return out


class _Gradients:
    """Sums over tiles of one projection's adapter gradients, float32: dA [E, r, in] and dB [E, r, out]."""

    def __init__(self, gemm: GroupedGemm, a: torch.Tensor | None, scaling: float) -> None:
        self.gemm, self.rank, self.scaling = gemm, 0 if a is None else a.shape[1], scaling
        self.a: torch.Tensor | None = None
        self.b: torch.Tensor | None = None

    def add(
        self, x_MI: torch.Tensor, dxa_Mr: torch.Tensor, xa_Mr: torch.Tensor, dy_MO: torch.Tensor, ends: Any
    ) -> None:
        """dA += s (dxa)^T x and dB += (s x A)^T dy, expert by expert."""
        self.a = self.gemm.reduce(dxa_Mr, x_MI, ends, self.a)
        self.b = self.gemm.reduce(xa_Mr, dy_MO, ends, self.b)

    def result(self, a: torch.Tensor | None, b: torch.Tensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """In the shapes and dtypes of the adapter."""
        if a is None or b is None or self.a is None or self.b is None:
            return None, None
        return (self.a[:, : self.rank].float() * self.scaling).to(a.dtype), self.b[:, : self.rank].to(b.dtype)


class _BaseGradients:
    """Sums over tiles of the gradients of one projection's trained weight and bias, in float32."""

    def __init__(self, gemm: GroupedGemm, weight: Weight, bias_EO: torch.Tensor | None) -> None:
        self.gemm = gemm
        self.weight = weight if isinstance(weight, torch.Tensor) and weight.requires_grad else None
        self.bias_EO = bias_EO if bias_EO is not None and bias_EO.requires_grad else None
        self._weight: torch.Tensor | None = None
        self._bias_EO: torch.Tensor | None = None

    def add_weight(self, x_MI: torch.Tensor, dy_MO: torch.Tensor, ends_E: torch.Tensor) -> None:
        """dW += x^T dy, expert by expert, in the order in which W is stored."""
        if self.weight is not None:
            pair = (x_MI, dy_MO) if self.weight.stride(-1) == 1 else (dy_MO, x_MI)
            self._weight = self.gemm.reduce(*pair, ends_E, self._weight)

    def add_bias(self, share_ER: torch.Tensor, dy_RO: torch.Tensor) -> None:
        """db += share dy."""
        part_EO = _wide_product(share_ER, dy_RO)
        self._bias_EO = part_EO if self._bias_EO is None else self._bias_EO.add_(part_EO)

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """In the shapes and dtypes of weight and bias."""
        d_weight, d_bias_EO = self._weight, self._bias_EO
        if d_weight is not None and self.weight is not None:
            d_weight = d_weight.to(self.weight.dtype)
            d_weight = d_weight if self.weight.stride(-1) == 1 else d_weight.transpose(1, 2)
        if d_bias_EO is not None and self.bias_EO is not None:
            d_bias_EO = d_bias_EO.to(self.bias_EO.dtype)
        return d_weight, d_bias_EO


def _wide_product(x_EM: torch.Tensor, y_MO: torch.Tensor) -> torch.Tensor:
    """x y in float32, 16-bit inputs as they are where the device multiplies them so."""
    if x_EM.is_cuda and x_EM.dtype == y_MO.dtype != torch.float32:
        return torch.mm(x_EM, y_MO, out_dtype=torch.float32)
    return x_EM.float() @ y_MO.float()


def _backward(
    layer: _Layer,
    dout: torch.Tensor,
    x: torch.Tensor,
    norm_H: torch.Tensor | None,
    weight: torch.Tensor,
    index: torch.Tensor,
    adapters: Any,
    held: Sequence[torch.Tensor],
    written: int | None,
) -> tuple[torch.Tensor | None, ...]:
    """``x`` and its gradient are those of the norm's input where there is ``norm_H``, the norm's weight."""
    from unsloth_plugins.core.experts import kernels

    a1, b1, a2, b2 = adapters
    first, second = layer.projections(x, adapters, written)
    grads = _Gradients(layer.gemm, a1, layer.scalings[0]), _Gradients(layer.gemm, a2, layer.scalings[1])
    base = (
        _BaseGradients(layer.gemm, layer.gate_up, layer.gate_up_bias_EJ),
        _BaseGradients(layer.gemm, layer.down, layer.down_bias_EH),
    )
    experts_E1 = torch.arange(layer.n_experts, device=x.device)[:, None]
    dx = torch.empty_like(x, memory_format=torch.contiguous_format)
    d_weight = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for start in range(0, x.shape[0], TILE):
        part = slice(start, start + TILE)
        index_NK = index[part].contiguous()
        route = _route(index_NK, layer.n_experts)
        ends_E, count = route.ends_E, route.token_M.shape[0]
        weight_M = weight[part].reshape(-1)[route.order_M]
        rows_MK = first.rows(count)
        x_NH = x[part]
        if layer.rule is not None and norm_H is not None:
            with torch.enable_grad():
                source_NH = x_NH.detach().requires_grad_()
                normal_NH = layer.rule(source_NH, norm_H)
            x_NH = normal_NH.detach()
        kernels.gather_rows(x_NH, route.token_M, rows_MK[:, : first.inputs])
        first.complete(rows_MK, ends_E)
        gate_up_MJ = held[start // TILE] if held else first(rows_MK, ends_E)

        dout_MH = torch.empty((count, x.shape[1]), dtype=x.dtype, device=x.device)
        kernels.gather_rows(dout[part], route.token_M, dout_MH)
        dh_MK, more_MI = second.transposed(dout_MH, ends_E)
        has_more = more_MI is not None
        if more_MI is None:
            more_MI = torch.empty((count, second.inputs), dtype=x.dtype, device=x.device)
        in_place = not held and gate_up_MJ.dtype == x.dtype  # held ones may be asked for again
        d_gate_up_MJ = gate_up_MJ if in_place else torch.empty_like(gate_up_MJ, dtype=x.dtype)
        d_weight_M = kernels.swiglu_backward(
            gate_up_MJ,
            layer.gate_up_bias_EJ,
            route.expert_M,
            weight_M,
            dh_MK[:, : second.inputs],
            more_MI,
            has_more=has_more,
            activation=layer.activation,
            out_MJ=d_gate_up_MJ,
        )
        hidden_MI = more_MI.to(x.dtype)  # what the kernel made of it
        del gate_up_MJ
        d_weight[part] = d_weight_M[route.place_NK]
        if layer.down_bias_EH is not None:
            d_weight[part] += (dout[part].float() @ layer.down_bias_EH.float().T).gather(1, index_NK)
        scale_M1 = weight_M[:, None].to(torch.float32)
        if base[1].bias_EO is not None:
            share_NKE = (index_NK[..., None] == experts_E1[:, 0]) * weight[part][..., None].float()
            base[1].add_bias(share_NKE.sum(1).T, dout[part])
        if second.a_ErI is not None:
            dha_Mr = (dh_MK[:, second.inputs :] * scale_M1).to(x.dtype)
            ha_Mr = layer.gemm.product(hidden_MI, second.a_ErI.transpose(1, 2), ends_E)
            grads[1].add(hidden_MI, dha_Mr, (ha_Mr * scale_M1).to(x.dtype), dout_MH, ends_E)
            del dha_Mr, ha_Mr
        if base[1].weight is not None:
            base[1].add_weight(torch.mul(hidden_MI, scale_M1, out=hidden_MI), dout_MH, ends_E)
        del dh_MK, more_MI, hidden_MI, dout_MH

        d_rows_MK, more_MH = first.transposed(d_gate_up_MJ, ends_E)
        if first.a_ErI is not None:
            x_MI, xa_Mr = rows_MK[:, : first.inputs], rows_MK[:, first.inputs :]
            dxa_Mr = d_rows_MK[:, first.inputs :].to(x.dtype).contiguous()
            grads[0].add(x_MI, dxa_Mr, xa_Mr.contiguous(), d_gate_up_MJ, ends_E)
            del x_MI, xa_Mr, dxa_Mr
        base[0].add_weight(rows_MK[:, : first.inputs], d_gate_up_MJ, ends_E)
        if base[0].bias_EO is not None:
            base[0].add_bias((route.expert_M == experts_E1).to(x.dtype), d_gate_up_MJ)
        kernels.combine(d_rows_MK[:, : first.inputs], route.place_NK, dx[part], more_MH=more_MH)
        if layer.rule is not None and norm_H is not None:
            dx[part] = torch.autograd.grad(normal_NH, source_NH, dx[part])[0]
            del normal_NH, source_NH
        del x_NH, rows_MK, d_gate_up_MJ, d_rows_MK, more_MH  # or the next tile's would be made beside them
    of_adapters = (*grads[0].result(a1, b1), *grads[1].result(a2, b2))
    return dx, d_weight.to(weight.dtype), *of_adapters, *base[0].result(), *base[1].result()


class _Experts(torch.autograd.Function):
    """The tail itself: its inputs were kept just before, see ``offload.tail``."""

    @staticmethod
    def forward(
        ctx: Any,
        layer: _Layer,
        kept: Kept | None,
        present: Any,
        hold: bool,
        index: Any,
        x: Any,
        source: Any,
        weight: Any,
        *parameters: Any,
    ):  # type: ignore[no-untyped-def]
        """``source``: what x was normalised from, or x itself, which gets the gradient. ``parameters``: the adapters
        that are present, then the trained ones of ``layer.base``."""
        adapters = parameters[: sum(present)]
        ctx.layer, ctx.kept, ctx.present, ctx.trained = layer, kept, present, layer.trained
        held: list[torch.Tensor] = []
        with on(x.device):
            out = _forward(layer, x, weight, index, _spread(adapters, present), held if hold else None)
        ctx.written = None if layer.decoded is None else layer.decoded.writes
        if held:
            ctx.save_for_backward(*held)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        index, source, weight, *others = ctx.kept.tensors()
        norm_H = others.pop() if ctx.layer.rule is not None else None
        with on(source.device):
            spread, dout = _spread(others, ctx.present), grads[0].contiguous()
            out = _backward(ctx.layer, dout, source, norm_H, weight, index, spread, ctx.saved_tensors, ctx.written)
        ctx.kept.over()
        return (
            None,
            None,
            None,
            None,
            None,
            None,
            *out[:2],
            *(g for g, there in zip(out[2:], (*ctx.present, *ctx.trained), strict=True) if there),
        )


def _spread(adapters: Sequence[torch.Tensor], present: Sequence[bool]) -> list[torch.Tensor | None]:
    """Put ``None`` where there is no adapter."""
    given = iter(adapters)
    return [next(given) if there else None for there in present]


def can_fuse(*loras: Sequence[ExpertLora]) -> bool:
    """Whether this function serves: adapters without dropout."""
    return not any(term.dropout for lora in loras for term in lora)


def _joined(lora: Sequence[ExpertLora]) -> Sequence[ExpertLora]:
    """Several adapters as one, of the sum of their ranks."""
    if len(lora) < 2:
        return lora
    a_ErI = torch.cat([term.a_ErI * term.scaling for term in lora], 1)
    return (ExpertLora(a_ErI, torch.cat([term.b_ErO for term in lora], 1), 1.0),)


def experts_fused(
    x_NH: torch.Tensor,
    gate_up_EHJ: Weight,
    gate_up_bias_EJ: torch.Tensor | None,
    down_EIH: Weight,
    down_bias_EH: torch.Tensor | None,
    index_NK: torch.Tensor,
    weight_NK: torch.Tensor,
    *,
    activation: Swiglu,
    gate_up_lora: Sequence[ExpertLora] = (),
    down_lora: Sequence[ExpertLora] = (),
    hold: bool = False,
    gemm: GroupedGemm = GEMMS["grouped_mm"],
    decoded: DecodedLayer | None = None,
    weights_limit: int | None = None,
) -> torch.Tensor:
    """See ``op.experts``; N tokens here are all, not one tile. ``can_fuse`` says when it may be called."""
    given: list[torch.Tensor | None] = []
    gate_up_lora, down_lora = _joined(gate_up_lora), _joined(down_lora)
    for lora in (gate_up_lora, down_lora):
        given += [lora[0].a_ErI, lora[0].b_ErO] if lora else [None, None]
    present = tuple(tensor is not None for tensor in given)
    adapters = [tensor for tensor in given if tensor is not None]
    scalings = tuple(lora[0].scaling if lora else 1.0 for lora in (gate_up_lora, down_lora))
    base = (gate_up_EHJ, gate_up_bias_EJ, down_EIH, down_bias_EH)
    x_NH = x_NH.contiguous()
    normed = normed_of(x_NH) if torch.is_grad_enabled() else None
    passes_by = normed is not None and normed.x.dtype == x_NH.dtype and may_pass_by(x_NH, normed)
    rule = normed.rule if normed is not None and passes_by else None
    layer = _Layer(*base, scalings, activation, gemm, decoded, weights_limit, rule)  # type: ignore[arg-type]
    trained = [each for each, needed in zip(layer.base, layer.trained, strict=True) if needed]
    wanted = torch.is_grad_enabled() and (trained or any(t.requires_grad for t in (x_NH, weight_NK, *adapters)))
    if not wanted:
        with on(x_NH.device):
            return _forward(layer, x_NH, weight_NK, index_NK, given, used_E=_used(index_NK, layer.n_experts))
    source_NH = normed.x.contiguous() if normed is not None and passes_by else x_NH
    if not any(t.requires_grad for t in (source_NH, weight_NK, *adapters)):  # only the base is trained
        source_NH = source_NH.detach().requires_grad_()
    norm = [normed.weight_N] if normed is not None and passes_by else []
    kept, (index_NK, source_NH, weight_NK, *others) = keep(index_NK, source_NH, weight_NK, *adapters, *norm)
    adapters = others[: len(adapters)]
    x_NH = x_NH.detach()
    return _Experts.apply(layer, kept, present, hold, index_NK, x_NH, source_NH, weight_NK, *adapters, *trained)  # type: ignore[no-any-return]
