"""Runs of documents and visible ranges, against the mask written out."""

from __future__ import annotations

import pytest
import torch

from unsloth_plugins.core.sink_attention import sink_attention
from unsloth_plugins.core.sink_attention.masks import Remembered, number_runs, visible_range

DOCUMENTS = torch.tensor([[3, 3, 3, 9, 9, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 0, 7]])
PADDING = torch.tensor([[False] * 4 + [True] * 6, [True] * 10])
HOLES = torch.tensor([[True, True, False, True, True, True, True, True, False, False], [False] * 10])


def dense(documents: torch.Tensor | None, left_padding: torch.Tensor | None, window: int | None) -> torch.Tensor:
    """[B, S, S] bool: position i sees key j, holes other than left padding left out."""
    i, j = torch.arange(10)[:, None], torch.arange(10)[None, :]
    seen = (j <= i)[None].expand(2, -1, -1)
    if window is not None:
        seen = seen & (i - j < window)
    if documents is not None:
        seen = seen & (documents[:, :, None] == documents[:, None, :])
    if left_padding is not None:
        seen = seen & (left_padding.to(torch.int64).cumsum(1) > 0)[:, None, :]
    return seen


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("padding", [None, PADDING, HOLES], ids=["no mask", "left", "holes"])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "documents"])
def test_the_range_is_the_mask(
    documents: torch.Tensor | None, padding: torch.Tensor | None, window: int | None
) -> None:
    first, last = visible_range(documents, padding, window)
    if documents is None and padding is None:
        assert first is None and last is None
        return
    assert first is not None and last is not None and first.dtype == last.dtype == torch.int32
    assert (first[:, 1:] >= first[:, :-1]).all() and (last[:, 1:] >= last[:, :-1]).all()
    i, j = torch.arange(10)[None, :, None], torch.arange(10)[None, None, :]
    expected = dense(documents, padding, window)
    assert torch.equal((first[:, :, None] <= j) & (j <= i), expected)
    assert torch.equal((i <= last[:, None, :]) & (j <= i), expected)


def test_a_row_of_one_token() -> None:
    first, last = visible_range(torch.zeros(2, 1), torch.tensor([[True], [False]]), 4)
    assert first is not None and last is not None
    assert first.tolist() == [[0], [1]] and last.tolist() == [[0], [-1]]


def test_an_id_that_comes_back_is_a_new_document() -> None:
    ids = torch.tensor([[5, 5, 2, 5, 5]])
    assert number_runs(ids).tolist() == [[0, 0, 1, 2, 2]]
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, 8) for _ in "qkv")
    again = sink_attention(q, k, v, documents_BS=ids)
    assert torch.equal(again, sink_attention(q, k, v, documents_BS=torch.tensor([[0, 0, 1, 2, 2]])))
    assert torch.equal(again[:, 3:], sink_attention(q[:, 3:], k[:, 3:], v[:, 3:]))


def test_what_layers_share_is_computed_once_and_forgotten_with_the_tensor() -> None:
    import gc
    import weakref

    remembered: Remembered[torch.Tensor] = Remembered()
    calls = []

    def of(tensor: torch.Tensor, key: int) -> torch.Tensor:
        return remembered.get(tensor, key, lambda: calls.append(key) or tensor + key)

    first = torch.zeros(2)
    assert of(first, 1) is of(first, 1) and of(first, 2) is not of(first, 1)
    assert calls == [1, 2]
    first.add_(1)  # in place: the same tensor with other numbers
    assert of(first, 1).tolist() == [2, 2] and calls == [1, 2, 1]
    other = torch.zeros(2)
    assert of(other, 1).tolist() == [1, 1] and of(first, 1).tolist() == [2, 2] and len(calls) == 5
    value = weakref.ref(of(other, 1))
    del other
    gc.collect()
    assert value() is None
    with torch.inference_mode():
        assert of(torch.zeros(2), 3).tolist() == [3, 3]
