"""What surrounds flash-attn-4 (groups of heads, packed rows, windows), with the reference in place of the package."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from attention_cases import Case, document_ids, run_case

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import backends, fa4, sink_attention
from unsloth_plugins.core.sink_attention.reference import sink_attention_reference

DOCUMENTS = ((50, 1, 29), (20, 40, 20))
CASES = {
    "full": Case((2, 80, 80, 8, 4, 16)),
    "no sink": Case((2, 80, 80, 8, 4, 16), sink=False),
    "one token": Case((2, 1, 1, 4, 2, 16)),
    "window": Case((2, 80, 80, 8, 4, 16), options={"window": 16}),
    "window beyond the row": Case((1, 80, 80, 4, 2, 16), options={"window": 80}),
    "heads first": Case((2, 80, 80, 8, 4, 16), layout="bhtd"),
    "packed": Case((2, 80, 80, 8, 4, 16), documents=DOCUMENTS),
    "packed in a window, without a sink": Case(
        (2, 80, 80, 8, 4, 16), documents=DOCUMENTS, options={"window": 16}, sink=False
    ),
    "rows that are one document": Case((2, 80, 80, 8, 4, 16), documents=((80,), (80,))),
}


class StandIn:
    """``flash_attn.cute.interface`` as our calls see it.

    Attributes:
        heads: key/value heads of each backward.
    """

    def __init__(self) -> None:
        self.heads: list[int] = []

    def forward(self, q: Any, k: Any, v: Any, *, learnable_sink: Any, return_lse: bool, **options: Any) -> Any:
        """o and lse in the layout of q, [T, H, D] for packed rows."""
        assert return_lse
        with torch.no_grad():
            return _attend(q, k, v, learnable_sink, **options)

    def backward(
        self, q: Any, k: Any, v: Any, o: Any, do: Any, lse: Any, *, deterministic: bool, dlse: Any, learnable_sink: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Gradients of q, k, v and the sinks of the heads given, whose o and lse have to be theirs."""
        self.heads.append(k.shape[-2])
        given = (q, k, v) if learnable_sink is None else (q, k, v, learnable_sink)
        leaves = [x.detach().requires_grad_() for x in given]
        with torch.enable_grad():
            again, normaliser = _attend(*leaves[:3], leaves[3] if len(leaves) > 3 else None, **options)
            torch.testing.assert_close(again, o)
            torch.testing.assert_close(normaliser, lse)
            loss = (again * do).sum() + (0 if dlse is None else (normaliser * dlse).sum())
        grads = torch.autograd.grad(loss, leaves)
        return grads if len(grads) == 4 else (*grads, None)


def _attend(
    q: Any, k: Any, v: Any, sink_H: Any, *, softmax_scale: float, causal: bool,
    window_size_left: int | None = None, window_size_right: int | None = None,
    cu_seqlens_q: Any = None, cu_seqlens_k: Any = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
) -> Any:  # fmt: skip
    assert causal and window_size_right == (None if window_size_left is None else 0)
    documents_BS = None
    if cu_seqlens_q is not None:
        assert cu_seqlens_q.dtype == torch.int32 and torch.equal(cu_seqlens_q, cu_seqlens_k)
        lengths = cu_seqlens_q.diff()
        assert max_seqlen_q == max_seqlen_k == lengths.max()
        documents_BS = torch.repeat_interleave(lengths)[None]
        q, k, v = q[None], k[None], v[None]
    o, lse = sink_attention_reference(
        q, k, v, sink_H,
        window=None if window_size_left is None else window_size_left + 1, documents_BS=documents_BS,
        key_mask_BS=None, scale=softmax_scale, softcap=None, block_size=64,
    )  # fmt: skip
    return (o, lse) if cu_seqlens_q is None else (o[0], lse[0])


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """In place of the package, which the backend then takes for one that runs here."""
    it, interface = StandIn(), ModuleType("flash_attn.cute.interface")
    interface._flash_attn_fwd, interface._flash_attn_bwd = it.forward, it.backward  # type: ignore[attr-defined]
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", interface)
    monkeypatch.setattr(backends, "why_not_fa4", lambda call: "a key mask with zeros" if call.padded else None)
    backends.resolve_backend.cache_clear()
    return it


@pytest.fixture(autouse=True)
def forget_choices() -> Any:
    """Choices of a backend that were made with the stand-in."""
    yield
    backends.resolve_backend.cache_clear()


@pytest.mark.parametrize(("head_groups", "heads"), [(1, [4]), (2, [2, 2]), (3, [1] * 4), (9, [1] * 4)])
@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_eager(name: str, head_groups: int, heads: list[int], stand_in: StandIn) -> None:
    case = CASES[name]
    run_case(Case(**{**vars(case), "head_groups": head_groups}), torch.float32, "cpu", "fa4")
    assert stand_in.heads == (heads if case.shape[4] == 4 else [2] if head_groups == 1 else [1, 1])


def test_float32_sums_beyond_the_bound_are_made_by_groups(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "GROUP_BYTES", 2 * 80 * 8 * 16 * 4 // 2)
    run_case(CASES["full"], torch.float32, "cpu", "fa4")
    assert stand_in.heads == [2, 2]


def test_only_the_requested_gradients(stand_in: StandIn) -> None:
    given = [torch.randn(2, 80, heads, 16) for heads in (8, 4, 4)] + [torch.randn(8)]

    def grads(wanted: set[int]) -> list[torch.Tensor | None]:
        leaves = [x.clone().requires_grad_(n in wanted) for n, x in enumerate(given)]
        sink_attention(*leaves, backend="fa4", head_groups=2).square().sum().backward()  # type: ignore[union-attr]
        return [leaf.grad for leaf in leaves]

    whole = grads({0, 1, 2, 3})
    for wanted in ({0}, {1, 2}, {3}):
        for n, (some, every) in enumerate(zip(grads(wanted), whole, strict=True)):
            assert torch.equal(some, every) if n in wanted else some is None  # type: ignore[arg-type]


def test_padding_is_refused_and_a_mask_of_ones_is_none(stand_in: StandIn) -> None:
    q = torch.randn(2, 5, 2, 16)
    mask = torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(  # type: ignore[arg-type]
        sink_attention(q, q, q, key_mask_BS=mask, backend="fa4"), sink_attention(q, q, q, backend="fa4")
    )
    mask[1, 0] = False  # the same tensor, changed in place
    with pytest.raises(UnsupportedError, match="a key mask with zeros"):
        sink_attention(q, q, q, key_mask_BS=mask, backend="fa4")


def test_boundaries_are_of_the_flattened_rows_and_of_more_than_a_document_a_row() -> None:
    found = fa4.boundaries(document_ids(DOCUMENTS, "cpu"))
    assert found is not None and found[0].tolist() == [0, 50, 51, 80, 100, 140, 160] and found[1] == 50
    assert fa4.boundaries(None) is None and fa4.boundaries(document_ids(((80,), (80,)), "cpu")) is None


@pytest.mark.parametrize(("backend", "reason"), [("fa4", "flash-attn-4 not installed|a device"), ("flex", "on cpu")])
def test_what_cannot_run_here_raises(backend: Any, reason: str) -> None:
    q = torch.randn(1, 5, 2, 16)
    with pytest.raises(UnsupportedError, match=f"backend '{backend}' runs; got .*({reason})"):
        sink_attention(q, q, q, backend=backend)
