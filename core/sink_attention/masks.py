"""Document ids for packed rows and the range of keys that a query sees, on the device without a host synchronisation.

Shape suffixes: B batch, T positions of a row, S keys, N documents.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch

from unsloth_plugins.core.errors import ShapeError

_Value = TypeVar("_Value")


class Remembered(Generic[_Value]):
    """What was computed from the tensor seen last, by further arguments: all layers of a forward ask the same.

    The tensor is known by identity and version, so one that was changed in place is computed anew, and held weakly:
    what was computed from it goes when it goes.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[torch.Tensor] | None = None
        self._version = 0
        self._values: dict[Hashable, _Value] = {}

    def get(self, tensor: torch.Tensor, key: Hashable, compute: Callable[[], _Value]) -> _Value:
        """The value for ``tensor`` and ``key``."""
        if tensor.is_inference():  # has no version
            return compute()
        if self._of is None or self._of() is not tensor or self._version != tensor._version:
            self._of, self._version, self._values = weakref.ref(tensor, self._forget), tensor._version, {}
        values = self._values
        if key not in values:
            values[key] = compute()
        return values[key]

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        if self._of is gone:
            self._of, self._values = None, {}


def documents_from_position_ids(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Number the documents of each row: a new one starts where a position is not the previous position plus one.

    This is the rule that transformers itself uses to recognise packed rows.

    Args:
        position_ids_BT: [B, T] integer positions, restarting in each document.

    Returns:
        [B, T] int64 ids, 0 for the first document of a row, non-decreasing along it.
    """
    if position_ids_BT.dim() != 2:
        raise ShapeError(
            expected="position_ids of shape [batch, tokens]",
            got=str(list(position_ids_BT.shape)),
            remedy="Add the batch dimension with position_ids[None].",
        )
    starts_BT = torch.zeros_like(position_ids_BT, dtype=torch.int64)
    starts_BT[:, 1:] = position_ids_BT[:, 1:] != position_ids_BT[:, :-1] + 1
    return starts_BT.cumsum(dim=1)


def documents_from_cu_seqlens(cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """Number the documents of one row from their cumulative lengths.

    Token t belongs to document n when cu_seqlens[n] <= t < cu_seqlens[n + 1]. Empty documents own no token; tokens
    after the last boundary form one more document.

    Args:
        cu_seqlens: [N + 1] integer boundaries, non-decreasing, starting with 0.
        total: number of tokens in the row, known to the host.

    Returns:
        [1, total] int64 ids, non-decreasing along the row.
    """
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ShapeError(
            expected="cu_seqlens of shape [documents + 1]",
            got=str(list(cu_seqlens.shape)),
            remedy="Pass the cumulative lengths of one flattened row, starting with 0.",
        )
    tokens_S = torch.arange(total, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    return (torch.searchsorted(cu_seqlens.contiguous(), tokens_S, right=True) - 1)[None]


def number_runs(documents_BS: torch.Tensor) -> torch.Tensor:
    """Number the runs of equal ids of each row: an id that comes back after another one starts a new document.

    Args:
        documents_BS: [B, S] ids of any dtype.

    Returns:
        [B, S] int64, 0 for the first run of a row, non-decreasing along it.
    """
    starts_BS = torch.zeros_like(documents_BS, dtype=torch.int64)
    starts_BS[:, 1:] = documents_BS[:, 1:] != documents_BS[:, :-1]
    return starts_BS.cumsum(dim=1)


def visible_range(
    documents_BS: torch.Tensor | None, key_mask_BS: torch.Tensor | None, window: int | None
) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
    """The first key that each position sees, and the last position that sees each key.

    Causality, the window, documents and left padding all leave a position i one run of keys, first[i] .. i, whose
    begin never moves back along the row. So first[i] <= j <= i decides whether i sees j, a block of queries
    i .. i' needs the keys first[i] .. i', and a block of keys j .. j' is needed by the queries j .. last[j'].
    Other holes of the key mask are not in the range; they stay a mask on the keys.

    Args:
        documents_BS: [B, S] ids; a document is a run of equal ids. None for one document a row.
        key_mask_BS: [B, S] bool, or None.
        window: keys that a position sees, itself included, or None.

    Returns:
        first_BS [B, S] int32, possibly larger than its own position: that position sees nothing.
        last_BS [B, S] int32, possibly smaller than its own position: nothing sees that key.
        (None, None) where causality and the window say everything.
    """
    if documents_BS is None and key_mask_BS is None:
        return None, None
    given = documents_BS if documents_BS is not None else key_mask_BS
    assert given is not None
    batch, keys = given.shape
    at_S = torch.arange(keys, device=given.device)
    first_BS = at_S.new_zeros((batch, keys))
    if documents_BS is not None:
        starts_BS = at_S[1:] * (documents_BS[:, 1:] != documents_BS[:, :-1])
        first_BS[:, 1:] = starts_BS.cummax(dim=1).values if keys > 1 else starts_BS
    if key_mask_BS is not None:
        padding_B1 = (~key_mask_BS).to(torch.int64).cumprod(dim=1).sum(dim=1, keepdim=True)
        first_BS = torch.maximum(first_BS, padding_B1)
    if window is not None:
        first_BS = torch.maximum(first_BS, at_S - (window - 1))
    last_BS = torch.searchsorted(first_BS, at_S.expand(batch, -1).contiguous(), right=True) - 1
    return first_BS.to(torch.int32), last_BS.to(torch.int32)
