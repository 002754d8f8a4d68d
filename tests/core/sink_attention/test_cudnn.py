"""What surrounds cuDNN's attention (the sink, groups of heads, layouts), with the reference in place of its kernels."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from attention_cases import Case, run_case

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import backends, cudnn, fa4, sink_attention

CASES = {
    "full": Case((2, 80, 80, 8, 4, 16)),
    "no sink": Case((2, 80, 80, 8, 4, 16), sink=False),
    "a sink of minus infinity": Case((2, 80, 80, 8, 4, 16), first_sink=float("-inf")),
    "heads first": Case((2, 80, 80, 8, 4, 16), layout="bhtd"),
    "rows that are one document": Case((2, 80, 80, 8, 4, 16), documents=((80,), (80,))),
    "a window beyond the row": Case((2, 80, 80, 8, 4, 16), options={"window": 80}),
}


class StandIn:
    """cuDNN as our calls see it: no sink, and a backward that trusts the o and the normaliser that it is given.

    Attributes:
        heads: key/value heads of each backward.
    """

    def __init__(self) -> None:
        self.heads: list[int] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Any:
        """o in the layout of q, lse with a last dimension of one."""
        p, values = self._logits(q, k, scale), _of_queries(q, v)
        lse = p.logsumexp(-1, keepdim=True)
        return torch.empty_like(q).copy_((p - lse).exp() @ values), lse

    def _logits(self, q: torch.Tensor, k: torch.Tensor, scale: float) -> torch.Tensor:
        future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        return (q.float() @ _of_queries(q, k).mT * scale).masked_fill(future, float("-inf"))

    def backward(self, do: Any, q: Any, k: Any, v: Any, o: Any, lse: Any, scale: float) -> Any:
        """Algorithm 2 of FlashAttention-2, in one block."""
        assert do.stride() == o.stride() and lse.is_contiguous()
        self.heads.append(k.shape[1])
        keys, values, of_o = _of_queries(q, k), _of_queries(q, v), do.float()
        p = (self._logits(q, k, scale) - lse).exp()
        ds = p * (of_o @ values.mT - (of_o * o.float()).sum(-1, keepdim=True)) * scale
        by_kv = (x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype) for x in (ds.mT @ q.float(), p.mT @ of_o))
        return ((ds @ keys).to(q.dtype), *by_kv)


def _of_queries(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The keys or values of every query head, in float32."""
    return k.float().repeat_interleave(q.shape[1] // k.shape[1], 1)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """In place of the kernels, on a device that has them."""
    it = StandIn()
    monkeypatch.setattr(cudnn, "_forward", it.forward)
    monkeypatch.setattr(cudnn, "_backward", it.backward)
    monkeypatch.setattr(backends, "_why_no_cudnn", lambda device: None)
    backends.resolve_backend.cache_clear()
    yield it
    backends.resolve_backend.cache_clear()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("head_groups", "heads"), [(1, [4]), (2, [2, 2]), (3, [1] * 4), (9, [1] * 4)])
@pytest.mark.parametrize("name", CASES)
def test_no_worse_than_eager(
    name: str, head_groups: int, heads: list[int], dtype: torch.dtype, stand_in: StandIn
) -> None:
    run_case(Case(**{**vars(CASES[name]), "head_groups": head_groups}), dtype, "cpu", "cudnn")
    assert stand_in.heads == heads


def test_float32_sums_beyond_the_bound_are_made_by_groups(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fa4, "GROUP_BYTES", 2 * 80 * 8 * 16 * cudnn.WORK_BYTES // 2)
    run_case(CASES["full"], torch.bfloat16, "cpu", "cudnn")
    assert stand_in.heads == [2, 2]


def test_only_the_requested_gradients(stand_in: StandIn) -> None:
    given = [torch.randn(2, 80, heads, 16, dtype=torch.bfloat16) for heads in (8, 4, 4)] + [torch.randn(8)]

    def grads(wanted: set[int]) -> list[torch.Tensor | None]:
        leaves = [x.clone().requires_grad_(n in wanted) for n, x in enumerate(given)]
        sink_attention(*leaves, backend="cudnn", head_groups=2).square().sum().backward()  # type: ignore[union-attr]
        return [leaf.grad for leaf in leaves]

    whole = grads({0, 1, 2, 3})
    for wanted in ({0}, {1, 2}, {3}):
        for n, (some, every) in enumerate(zip(grads(wanted), whole, strict=True)):
            assert torch.equal(some, every) if n in wanted else some is None  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"key_mask_BS": torch.tensor([[True, False, True]])}, "a key mask with zeros"),
        ({"documents_BS": torch.tensor([[0, 0, 1]])}, "packed documents"),
        ({"window": 2}, "a window"),
        ({"softcap": 2.0}, "a softcap"),
        ({"return_lse": True}, "return_lse=True"),
        ({"deterministic": True}, "no fixed order"),
    ],
)
def test_what_cudnn_cannot_do_is_refused(options: dict[str, Any], reason: str, stand_in: StandIn) -> None:
    q = torch.randn(1, 3, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=reason):
        sink_attention(q, q, q, backend="cudnn", **options)


def test_no_device_no_cudnn() -> None:
    q = torch.randn(1, 3, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="no flash attention for: cpu"):
        sink_attention(q, q, q, backend="cudnn")


def test_what_it_computed_survives_to_the_recompute(stand_in: StandIn) -> None:
    """A checkpointed region that keeps its results runs the kernel once."""
    from torch.utils.checkpoint import checkpoint

    from unsloth_plugins.core.offload.survivors import Survivors

    runs, forward = [], stand_in.forward
    q, k, v = (torch.randn(1, 80, heads, 16, dtype=torch.bfloat16, requires_grad=True) for heads in (8, 4, 4))
    sink = torch.randn(8, requires_grad=True)

    def attend(*x: torch.Tensor) -> torch.Tensor:
        return sink_attention(*x, backend="cudnn")  # type: ignore[return-value]

    def counted(*args: Any) -> Any:
        runs.append(1)
        return forward(*args)

    cudnn._forward = counted  # the fixture puts the real one back
    whole = torch.autograd.grad(attend(q, k, v, sink).square().sum(), (q, k, v, sink))
    for keep in (True, False):
        runs.clear()
        kept = Survivors(keep)
        o = checkpoint(attend, q, k, v, sink, use_reentrant=False, context_fn=kept.contexts)
        again = torch.autograd.grad(o.square().sum(), (q, k, v, sink))
        assert len(runs) == (1 if keep else 2)
        assert all(map(torch.equal, whole, again))
