"""Rows of a table in page-locked host memory, read by the device itself: only what is asked for crosses the bus."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unsloth_plugins.core.device import on

_WORDS = 1024  # of a row, for one program


@triton.jit
def _lookup_kernel(table_ptr, ids_ptr, rows_ptr, n_rows, ROW_WORDS: tl.constexpr, WORDS: tl.constexpr):
    """One program copies ``WORDS`` words of one row. An id outside of the table stops the device, as torch's own
    lookup does, and nothing outside is read."""
    index = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + index).to(tl.int64)
    is_there = (row >= 0) & (row < n_rows)
    tl.device_assert(is_there, "token id outside of the embedding")
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = word < ROW_WORDS
    value = tl.load(table_ptr + row * ROW_WORDS + word, mask=inside & is_there, other=0)
    tl.store(rows_ptr + index * ROW_WORDS + word, value, mask=inside)


def lookup_triton(table_VH: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """``table_VH[ids]`` on the device of ``ids``; the host waits for nothing.

    Args:
        table_VH: [V, H] of any dtype, contiguous, in host memory that the driver has page-locked.
        ids: integer of any shape, on CUDA, in [0, V): anything else is a device-side assertion.

    Returns:
        [*ids, H] with the dtype of ``table_VH``.
    """
    ids = ids.contiguous()
    rows = torch.empty(*ids.shape, table_VH.shape[1], dtype=table_VH.dtype, device=ids.device)
    if rows.numel() == 0:
        return rows
    n_bytes = table_VH.shape[1] * table_VH.element_size()
    word = next(each for each in (torch.int64, torch.int32, torch.int16, torch.uint8) if n_bytes % each.itemsize == 0)
    n_words = n_bytes // word.itemsize
    words = min(triton.next_power_of_2(n_words), _WORDS)
    grid = (ids.numel(), triton.cdiv(n_words, words))
    with on(ids.device):
        _lookup_kernel[grid](
            table_VH.view(word),
            ids,
            rows.view(word),
            table_VH.shape[0],
            ROW_WORDS=n_words,
            WORDS=words,
            debug=True,  # or triton leaves assertions out
            sanitize_overflow=False,
        )
    return rows
