"""One projection of all experts as a grouped GEMM takes it: base and adapter in one product.

LoRA costs next to nothing: B is appended to the weights as further rows of the inner dimension and s x A to the sorted
tokens as further columns, so one grouped GEMM accumulates base and adapter together in float32. Packed weights are
decoded into such a buffer, dense ones with an adapter copied into one, for one pass; where memory is left, a layer's
decoded ones stay for the next passes.

Shape suffixes: M sorted rows, E experts, I inputs, O outputs, r LoRA rank padded to a multiple of 8, K = I + r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from unsloth_plugins.core.experts.gemm import GroupedGemm
from unsloth_plugins.core.experts.matmul import RANK_STEP, Weight
from unsloth_plugins.core.mxfp4.weight import HostWeight, PackedWeight


class Term(NamedTuple):
    """A base [E, I, O] and its adapter, or none: A [E, r, I], B [E, r, O], s."""

    weight: Weight
    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float

    @property
    def rank(self) -> int:
        """Padded; 0 without an adapter."""
        return 0 if self.a is None or self.b is None else -(-self.a.shape[1] // RANK_STEP) * RANK_STEP


@dataclass(eq=False)
class Projection:
    """Weights with B appended [E, I + r, O], and s A as [E, r, I]."""

    weight_EKO: torch.Tensor
    a_ErI: torch.Tensor | None
    gemm: GroupedGemm

    @classmethod
    def of(cls, term: Term, dtype: torch.dtype, gemm: GroupedGemm) -> Projection:
        """Packed weights are decoded, dense ones copied where something has to be appended."""
        weight, rank = term.weight, term.rank
        if not rank and not isinstance(weight, PackedWeight):
            return cls(weight.to(dtype), None, gemm)
        n_experts, inputs, outputs = weight.shape
        if isinstance(weight, PackedWeight) or weight.stride(-1) != 1:  # by outputs: what is appended are columns
            whole_EOK = torch.empty((n_experts, outputs, inputs + rank), dtype=dtype, device=weight.device)
            if isinstance(weight, PackedWeight):
                weight.decode_into(whole_EOK[..., :inputs])
            else:
                whole_EOK[..., :inputs] = weight.transpose(1, 2)
            made = cls(whole_EOK.transpose(1, 2), None, gemm)
        else:
            made = cls(torch.empty((n_experts, inputs + rank, outputs), dtype=dtype, device=weight.device), None, gemm)
            made.weight_EKO[:, :inputs] = weight
        made.write(term)
        return made

    def write(self, term: Term) -> None:
        """Put the adapter where it belongs."""
        if term.a is None or term.b is None:
            return
        rank, more = term.a.shape[1], term.rank - term.a.shape[1]
        new = torch.zeros if more else torch.empty
        like: Any = dict(dtype=self.weight_EKO.dtype, device=self.weight_EKO.device)
        self.a_ErI = new((term.a.shape[0], term.rank, term.a.shape[2]), **like)
        torch.mul(term.a.detach(), term.scaling, out=self.a_ErI[:, :rank])
        b_ErO = self.weight_EKO[:, self.inputs :]
        b_ErO[:, :rank] = term.b.detach()
        if more:
            b_ErO[:, rank:] = 0

    @property
    def inputs(self) -> int:
        """I."""
        return self.weight_EKO.shape[1] - (0 if self.a_ErI is None else self.a_ErI.shape[1])

    def rows(self, count: int) -> torch.Tensor:
        """Memory for sorted inputs with room for s x A."""
        like = self.weight_EKO
        return torch.empty((count, like.shape[1]), dtype=like.dtype, device=like.device)

    def complete(self, rows_MK: torch.Tensor, ends_E: torch.Tensor) -> None:
        """Fill in s x A behind x."""
        if self.a_ErI is not None:
            x_MI = rows_MK[:, : self.inputs]
            rows_MK[:, self.inputs :] = self.gemm.product(x_MI, self.a_ErI.transpose(1, 2), ends_E)

    def __call__(self, rows_MK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        return self.gemm.product(rows_MK, self.weight_EKO, ends_E)

    def transposed(self, dy_MO: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients [M, I + r] of the rows, and what reaches x by way of A, [M, I]."""
        d_rows_MK = self.gemm.product(dy_MO, self.weight_EKO.transpose(1, 2), ends_E)
        if self.a_ErI is None:
            return d_rows_MK, None
        return d_rows_MK, self.gemm.product(d_rows_MK[:, self.inputs :].to(dy_MO.dtype), self.a_ErI, ends_E)


class DecodedLayer:
    """The projections of one layer, kept from pass to pass while ``wanted``.

    The frozen base stays as it was decoded. Adapters change between steps, and no counter tells of every optimizer that
    they did, so each forward writes them anew. Its backward finds them there, or writes them again where another
    forward came in between.

    Attributes:
        wanted: whether there is memory for them.
        writes: how often adapters were written.
    """

    def __init__(self) -> None:
        self.wanted, self.writes = False, 0
        self._bytes: list[Any] = []  # of the packed weights that were decoded: held, so that no other has their address
        self._form: tuple[Any, ...] = ()
        self._kept: list[Projection] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodedLayer:
        return DecodedLayer()  # a copy of a model decodes for itself

    @property
    def held_bytes(self) -> int:
        """On the device."""
        tensors = [each for kept in self._kept for each in (kept.weight_EKO, kept.a_ErI) if each is not None]
        return sum(each.numel() * each.element_size() for each in tensors)

    def drop(self) -> None:
        """Free them."""
        self._bytes, self._form, self._kept = [], (), []

    def keeps(self, terms: Sequence[Term], dtype: torch.dtype) -> bool:
        """Whether these are to be kept: packed, on the device, in 16 bits."""
        packed = all(isinstance(t.weight, PackedWeight) and not isinstance(t.weight, HostWeight) for t in terms)
        return self.wanted and packed and dtype.itemsize == 2

    def projections(
        self, terms: tuple[Term, Term], dtype: torch.dtype, gemm: GroupedGemm, written: int | None
    ) -> tuple[Projection, Projection]:
        """Those of ``terms``, with the adapters as pass number ``written`` has left them, or written now."""
        packed: list[Any] = [each for t in terms for each in (t.weight.blocks_EORB, t.weight.scales_EOR)]  # type: ignore[union-attr]
        form = (dtype, gemm, *(t.rank for t in terms), *(each._version for each in packed))
        same = len(packed) == len(self._bytes) and all(a is b for a, b in zip(packed, self._bytes, strict=True))
        if form != self._form or not same:
            self.drop()
            self._kept = [Projection.of(term, dtype, gemm) for term in terms]
            self._bytes, self._form = packed, form
            self.writes += 1
        elif written is None or written != self.writes:
            for kept, term in zip(self._kept, terms, strict=True):
                kept.write(term)
            self.writes += 1
        first, second = self._kept
        return first, second


class DecodedExperts:
    """The decoded experts of a model's layers: of the last ones, as many as there is memory for.

    Args:
        layer_bytes: what one layer takes without adapters.
        layers: their number.
    """

    def __init__(self, layer_bytes: int, layers: int) -> None:
        self.layers = [DecodedLayer() for _ in range(layers)]
        self._layer_bytes = layer_bytes

    @property
    def held_bytes(self) -> int:
        """On the device now."""
        return sum(layer.held_bytes for layer in self.layers)

    @property
    def layer_bytes(self) -> int:
        """What one layer takes, with the adapters that were seen."""
        return max(self._layer_bytes, *(layer.held_bytes for layer in self.layers))

    def keep(self, count: int) -> None:
        """Of the last ``count`` layers; others are freed now."""
        for place, layer in enumerate(reversed(self.layers)):
            layer.wanted = place < count
            if not layer.wanted:
                layer.drop()
