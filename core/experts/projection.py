"""One projection of all experts as a grouped GEMM takes it: base and adapter in one product.

LoRA costs next to nothing: B is appended to the weights as further rows of the inner dimension and s x A to the sorted
tokens as further columns, so one grouped GEMM accumulates base and adapter together in float32. Packed weights are
decoded into such a buffer, dense ones with an adapter copied into one, for one pass; where memory is left, a layer's
decoded ones stay for the next passes, and where it is short, a buffer holds a few experts at a time.

Shape suffixes: M sorted rows, E experts, G of them, I inputs, O outputs, r LoRA rank padded to a multiple of 8,
K = I + r.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from unsloth_plugins.core.experts.gemm import GroupedGemm, TritonGemm
from unsloth_plugins.core.experts.matmul import RANK_STEP, Weight, group_size
from unsloth_plugins.core.mxfp4.weight import HostWeight, PackedWeight


class Term(NamedTuple):
    """A base [E, I, O] and its adapter, or none: A [E, r, I], B [E, r, O], s.

    ``used_E``: bool, which experts have rows: packed weights of others are not decoded. ``None``: any may have some.
    """

    weight: Weight
    a: torch.Tensor | None
    b: torch.Tensor | None
    scaling: float
    used_E: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Padded; 0 without an adapter."""
        return 0 if self.a is None or self.b is None else -(-self.a.shape[1] // RANK_STEP) * RANK_STEP

    def here(self) -> Term:
        """With streamed bytes on the device, for as long as the result is held."""
        return self._replace(weight=self.weight.here()) if isinstance(self.weight, PackedWeight) else self

    def part(self, first: int, last: int) -> Term:
        """Of experts ``first`` to ``last - 1``."""
        packed = isinstance(self.weight, PackedWeight)
        weight = self.weight.part(first, last) if packed else self.weight[first:last]  # type: ignore[union-attr,index]
        a, b, used_E = (None if each is None else each[first:last] for each in (self.a, self.b, self.used_E))
        return Term(weight, a, b, self.scaling, used_E)


def _weights(term: Term, dtype: torch.dtype) -> torch.Tensor:
    """[E, I + r, O] in new memory, the rows of r unwritten; by outputs where W is, so that these rows are columns."""
    (n_experts, inputs, outputs), rank = term.weight.shape, term.rank
    if isinstance(term.weight, PackedWeight):
        whole_EOK = torch.empty((n_experts, outputs, inputs + rank), dtype=dtype, device=term.weight.device)
        term.weight.decode_into(whole_EOK[..., :inputs], term.used_E)
        return whole_EOK.transpose(1, 2)
    by_outputs = term.weight.stride(-1) != 1
    shape = (n_experts, outputs, inputs + rank) if by_outputs else (n_experts, inputs + rank, outputs)
    whole = torch.empty(shape, dtype=dtype, device=term.weight.device)
    whole_EKO = whole.transpose(1, 2) if by_outputs else whole
    whole_EKO[:, :inputs] = term.weight
    return whole_EKO


def _write_b(weight_EKO: torch.Tensor, term: Term) -> None:
    """Append B, zeros up to the padded rank."""
    if term.b is not None and term.rank:
        b_ErO = weight_EKO[:, term.weight.shape[1] :]
        b_ErO[:, : term.b.shape[1]] = term.b.detach()
        b_ErO[:, term.b.shape[1] :] = 0


class Projection(ABC):
    """Products of the sorted rows of a tile with one projection, its adapter included.

    Attributes:
        inputs: I.
        a_ErI: s A, padded with zeros; ``None`` without an adapter.
    """

    def __init__(self, term: Term, dtype: torch.dtype, gemm: GroupedGemm) -> None:
        self.inputs, self.dtype, self.device = term.weight.shape[1], dtype, term.weight.device
        self.gemm = gemm
        self.a_ErI: torch.Tensor | None = None
        self._write_a(term)

    def _write_a(self, term: Term) -> None:
        if term.a is None or not term.rank:
            return
        (n_experts, rank, inputs), padded = term.a.shape, term.rank
        new = torch.zeros if padded != rank else torch.empty
        self.a_ErI = new((n_experts, padded, inputs), dtype=self.dtype, device=self.device)
        torch.mul(term.a.detach(), term.scaling, out=self.a_ErI[:, :rank])

    @abstractmethod
    def _product(self, rows: torch.Tensor, ends_E: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        """Rows [M, I + r] times the weights [M, O], or rows [M, O] times their transposes."""

    def rows(self, count: int) -> torch.Tensor:
        """Memory for sorted inputs with room for s x A."""
        rank = 0 if self.a_ErI is None else self.a_ErI.shape[1]
        return torch.empty((count, self.inputs + rank), dtype=self.dtype, device=self.device)

    def complete(self, rows_MK: torch.Tensor, ends_E: torch.Tensor) -> None:
        """Fill in s x A behind x."""
        if self.a_ErI is not None:
            x_MI = rows_MK[:, : self.inputs]
            rows_MK[:, self.inputs :] = self.gemm.product(x_MI, self.a_ErI.transpose(1, 2), ends_E)

    def __call__(self, rows_MK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        return self._product(rows_MK, ends_E)

    def transposed(self, dy_MO: torch.Tensor, ends_E: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients [M, I + r] of the rows, and what reaches x by way of A, [M, I]."""
        d_rows_MK = self._product(dy_MO, ends_E, transposed=True)
        if self.a_ErI is None:
            return d_rows_MK, None
        return d_rows_MK, self.gemm.product(d_rows_MK[:, self.inputs :].to(dy_MO.dtype), self.a_ErI, ends_E)


class WholeProjection(Projection):
    """All experts at once. Packed weights are decoded, dense ones copied where something has to be appended.

    Attributes:
        weight_EKO: weights with B appended.
    """

    def __init__(self, term: Term, dtype: torch.dtype, gemm: GroupedGemm) -> None:
        super().__init__(term, dtype, gemm)
        if not needs_memory(term):
            self.weight_EKO: torch.Tensor = term.weight.to(dtype)  # type: ignore[union-attr]
            return
        self.weight_EKO = _weights(term, dtype)
        _write_b(self.weight_EKO, term)

    def write(self, term: Term) -> None:
        """Put another adapter, or a new state of it, in the place of the one before."""
        self._write_a(term)
        _write_b(self.weight_EKO, term)

    def _product(self, rows: torch.Tensor, ends_E: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        weight = self.weight_EKO.transpose(1, 2) if transposed else self.weight_EKO
        return self.gemm.product(rows, weight, ends_E)


class GroupedProjection(Projection):
    """A few experts at a time, in memory that the next ones get: each product decodes or copies them anew.

    Args:
        limit: the most bytes of one group's weights, but at least one expert is taken.
    """

    def __init__(self, term: Term, dtype: torch.dtype, gemm: TritonGemm, limit: int) -> None:
        super().__init__(term, dtype, gemm)
        n_experts, inputs, outputs = term.weight.shape
        self._term = term.here()
        self._group_gemm = gemm
        self._step = group_size(n_experts, (inputs + term.rank) * outputs * dtype.itemsize, limit)

    def _product(self, rows: torch.Tensor, ends_E: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
        out: torch.Tensor | None = None
        for first in range(0, ends_E.shape[0], self._step):
            part = self._term.part(first, first + self._step)
            weight_GKO = _weights(part, self.dtype)
            _write_b(weight_GKO, part)
            weight = weight_GKO.transpose(1, 2) if transposed else weight_GKO
            out = self._group_gemm.product_of_group(rows, weight, ends_E, first, out)
            del weight, weight_GKO  # the next ones get the memory
        assert out is not None
        return out


def needs_memory(term: Term) -> bool:
    """Whether the weights can't be used where they lie."""
    return isinstance(term.weight, PackedWeight) or term.rank > 0


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
        self._kept: list[WholeProjection] = []

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
            self._kept = [WholeProjection(term, dtype, gemm) for term in terms]
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
