"""Document ids for packed rows, computed on the device without a host synchronisation.

Shape suffixes: B batch, S tokens of a row, N documents.
"""

from __future__ import annotations

import torch

from unsloth_plugins.core.errors import ShapeError


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
