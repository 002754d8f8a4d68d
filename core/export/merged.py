"""Base and adapters as one set of tensors, computed by rows when they are read: dequantise, add in float32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unsloth_plugins.core.errors import ExportError
from unsloth_plugins.core.export.adapter import Adapter, Changes, Term
from unsloth_plugins.core.export.base import Base
from unsloth_plugins.core.export.tensors import Info


class Merged:
    """The merged model's tensors. Building it checks everything; nothing but headers and small tensors is read.

    Args:
        base: the model that the adapters were trained on.
        adapters: in the order in which they are added.

    Attributes:
        infos: name -> the base's dtype, and the merged shape. Includes the head where it is no longer tied.
        tied: whether head and embedding are one tensor after the merge.
        vocab_size: rows of the embedding.

    Raises:
        ExportError, ConfigError: see ``Adapter.collect``.
    """

    def __init__(self, base: Base, adapters: Sequence[Adapter] = ()) -> None:
        self.base = base
        self.changes: dict[str, Changes] = {}
        self._factors: tuple[str | None, list[list[torch.Tensor]]] = None, []  # of the tensor read last
        for adapter in adapters:
            adapter.collect(base, self.changes)
        self.tied = base.tied
        if base.tied and base.embedding is not None:
            self._settle_tied(base.embedding, base.head)
        self.infos: dict[str, Info] = {}
        for name, info in base.infos.items():
            if not (self.tied and name == base.head):
                self.infos[name] = Info(info.dtype, self._shape(name, info.shape))
        if base.tied and not self.tied and base.embedding is not None and base.head not in self.infos:
            info = base.infos[base.embedding]
            self.infos[base.head] = Info(info.dtype, self._shape(base.head, info.shape))
        embedding = base.embedding
        self.vocab_size = self.infos[embedding].shape[0] if embedding else None
        if embedding and base.head in self.infos and self.infos[base.head].shape[0] != self.vocab_size:
            raise ExportError(
                expected=f"as many rows in {base.head} as in {embedding} ({self.vocab_size})",
                got=str(self.infos[base.head].shape[0]),
                remedy="The adapter's file lacks a resized matrix: merge the live model with merge_model, or name both "
                "matrices in modules_to_save.",
            )

    def _settle_tied(self, embedding: str, head: str) -> None:
        """Keep the tie where both sides end up equal; otherwise the head starts from the embedding's base."""
        below, above = self.changes.get(embedding, Changes()), self.changes.get(head)
        if above is None and not below.terms and below.trained is None:
            return  # trained rows and resizing reach the head through the tie
        if above is not None:
            if _same_whole(above, below) and _same_terms(above.terms, below.terms):
                self.changes.pop(head)
                return
        self.tied = False
        change = self.changes.setdefault(head, Changes())
        if change.base is None:
            change.base = below.base
        if not change.trained_rows:
            change.trained_rows = list(below.trained_rows)

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        change = self.changes.get(name)
        if change is None:
            return shape
        for stored in (change.base, change.trained):
            if stored is not None:
                shape = stored.source.infos[stored.key].shape
        beyond = [row for stored in change.trained_rows for row in stored.rows or () if row >= shape[0]]
        if beyond:
            raise ExportError(
                expected=f"trained rows among the {shape[0]} of {name}",
                got=f"row {beyond[0]}",
                remedy="Give the base that the adapter was trained on.",
            )
        for term in change.terms:
            if term.shape() != tuple(shape):
                raise ExportError(
                    expected=f"{term.a} and {term.b} to give shape {list(shape)}, that of {name}",
                    got=str(list(term.shape())),
                    remedy="Give the base that the adapter was trained on.",
                )
        return shape

    def changed(self, name: str) -> bool:
        """Whether the tensor differs from the base's stored one."""
        return name in self.changes or name not in self.base.infos

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows as they are stored where nothing changes them, else the float32 sum."""
        return self.before_and_after(name, begin, end)[1]

    def before_and_after(self, name: str, begin: int = 0, end: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows that the low-rank terms are added to, and the sum; the same tensor where there are none."""
        change = self.changes.get(name)
        whole = change.trained or change.base if change else None
        if whole is not None:
            before = whole.source.read(whole.key, begin, end).to(self.base.device)
        else:
            stored = name if name in self.base.infos else self.base.embedding
            assert stored is not None
            before = self.base.read(stored, begin, end)
        if change is None:
            return before, before
        before = before.float()
        for part in change.trained_rows:
            values = part.source.read(part.key).to(self.base.device).float()
            stop = begin + before.shape[0]
            for number, row in enumerate(part.rows or ()):
                if begin <= row < stop:
                    before[row - begin] = values[number]
        after = before
        for term, factors in zip(change.terms, self._factors_of(name, change), strict=True):
            after = after + term.rows(factors, begin, end)
        if not after.isfinite().all():
            raise ExportError(
                expected=f"finite numbers in {name} with the adapters added",
                got="nan or inf",
                remedy="Its training diverged, or a file is damaged: take an earlier checkpoint.",
            )
        return before, after

    def _factors_of(self, name: str, change: Changes) -> list[list[torch.Tensor]]:
        """A and B of every term, on the base's device; read once for all the pieces of a tensor."""
        if self._factors[0] != name:
            self._factors = None, []  # first: two tensors' need not fit
            self._factors = name, [[one.to(self.base.device) for one in term.factors()] for term in change.terms]
        return self._factors[1]


def _same_whole(head: Changes, embedding: Changes) -> bool:
    """Whether both start from equal tensors before LoRA; where the file has none, that is the base's embedding."""
    left, right = head.trained or head.base, embedding.trained or embedding.base
    if left is None or right is None:
        return (head.trained or embedding.trained) is None
    return torch.equal(left.source.read(left.key), right.source.read(right.key))


def _same_terms(head: Sequence[Term], embedding: Sequence[Term]) -> bool:
    """Whether the head's LoRA is the embedding's, transposed, as PEFT's ``ensure_weight_tying`` makes it."""
    if len(head) != len(embedding):
        return False
    for one, other in zip(head, embedding, strict=True):
        pairs = ((one.a, other.b), (one.b, other.a))
        if one.scaling != other.scaling or not all(
            torch.equal(one.source.read(left), other.source.read(right).T) for left, right in pairs
        ):
            return False
    return True
