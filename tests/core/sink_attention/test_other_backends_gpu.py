"""flash-attn-4 and flex attention behind the same signature, against the float64 reference."""

from __future__ import annotations

import pytest
import torch
from attention_cases import Case, run_case

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import fa4, sink_attention
from unsloth_plugins.core.sink_attention.backends import Call, resolve_backend, why_not_fa4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CASES = {
    "257 tokens": Case((2, 257, 257, 8, 2, 64)),
    "one token": Case((1, 1, 1, 8, 1, 64)),
    "1000 tokens, heads of 128": Case((1, 1000, 1000, 8, 2, 128)),
    "no sink": Case((1, 1000, 1000, 8, 8, 64), sink=False),
    "window 128": Case((2, 1000, 1000, 8, 1, 64), options={"window": 128}),
    "heads first, by groups": Case((2, 300, 300, 16, 4, 64), layout="bhtd", head_groups=3),
    "packed": Case((2, 1000, 1000, 8, 1, 64), documents=((1, 400, 127, 472), (128, 128, 744))),
    "packed in a window, by groups": Case(
        (1, 1000, 1000, 8, 2, 64), documents=((300, 1, 699),), options={"window": 128}, head_groups=2
    ),
    "rows that are one document": Case((2, 300, 300, 8, 2, 64), documents=((300,), (300,))),
}
FLEX_ONLY = {
    "padded": Case((2, 300, 300, 8, 2, 64), padding=((100, 0, 150), (0, 100, 3))),
    "softcap": Case((1, 257, 257, 8, 2, 64), options={"softcap": 0.7}),
    "chunk after a cache": Case((2, 50, 257, 8, 2, 64)),
}


def needs_fa4() -> None:
    reason = why_not_fa4(Call(torch.device("cuda"), torch.bfloat16, 64, 8, 8))
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_fa4_no_worse_than_eager(name: str, dtype: torch.dtype) -> None:
    needs_fa4()
    run_case(CASES[name], dtype, "cuda", "fa4")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [n for n in CASES if "window" not in n and not n.startswith(("packed", "one t"))])
def test_cudnn_no_worse_than_eager(name: str, dtype: torch.dtype) -> None:
    run_case(CASES[name], dtype, "cuda", "cudnn")


@pytest.mark.parametrize("length", [64, 191, 192, 320, 704, 1088])
def test_cudnn_at_lengths_that_end_in_half_a_tile_with_low_logits(length: int) -> None:
    """Gradients stay finite where every normaliser is far below zero, with and without a sink."""
    q, k, v = (torch.randn(1, length, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    leaves = [x.requires_grad_() for x in (q.abs() * 5, -k.abs() * 5, v)]
    for sink in (None, torch.full((8,), -90.0, device="cuda")):
        o = sink_attention(*leaves, sink, backend="cudnn")
        grads = torch.autograd.grad(o.float().square().sum(), leaves)  # type: ignore[union-attr]
        assert all(grad.isfinite().all() for grad in grads)


def test_cudnn_sums_by_groups_of_heads_hold_little_memory() -> None:
    q = torch.randn(1, 32768, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 32768, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight = torch.randn_like(q)
    o = sink_attention(q, k, v, torch.randn(64, device="cuda"), backend="cudnn")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(o, [q, k, v], weight)  # type: ignore[arg-type]
    results = q.numel() * 2 + 2 * k.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < results * 2 + 1.5 * fa4.GROUP_BYTES


@pytest.mark.parametrize("name", ["257 tokens", "window 128", "packed", "no sink", *FLEX_ONLY])
def test_flex_no_worse_than_eager(name: str) -> None:
    run_case((CASES | FLEX_ONLY)[name], torch.bfloat16, "cuda", "flex")


def test_flex_promises_no_bits() -> None:
    q = torch.randn(1, 16, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="deterministic=True"):
        sink_attention(q, q, q, backend="flex", deterministic=True)


def test_auto_takes_fa4_where_the_table_says_so_and_never_with_padding() -> None:
    needs_fa4()
    device = torch.device("cuda")
    assert resolve_backend("auto", Call(device, torch.bfloat16, 64, 4096, 4096))[0] == "fa4"
    assert resolve_backend("auto", Call(device, torch.bfloat16, 64, 4096, 4096, window=128))[0] == "triton"
    q, k, v = (torch.randn(1, 4096, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    sink = torch.randn(8, device="cuda")
    whole, padded = (torch.ones(1, 4096, dtype=torch.bool, device="cuda") for _ in range(2))
    padded[:, :7] = False
    for mask, backend in ((whole, "fa4"), (padded, "triton")):
        auto = sink_attention(q, k, v, sink, key_mask_BS=mask)
        bare = sink_attention(q, k, v, sink, key_mask_BS=None if backend == "fa4" else mask, backend=backend)  # type: ignore[arg-type]
        assert torch.equal(auto, bare)


def test_fa4_sums_by_groups_of_heads_hold_little_memory() -> None:
    """At 32K tokens dq alone would take 512 MiB in float32; two groups hold half of it at a time."""
    needs_fa4()
    q = torch.randn(1, 32768, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 32768, 8, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    weight = torch.randn_like(q)
    o = sink_attention(q, k, v, torch.randn(64, device="cuda"), backend="fa4")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(o, [q, k, v], weight)  # type: ignore[arg-type]
    results = q.numel() * 2 + 2 * k.numel() * 2
    assert torch.cuda.max_memory_allocated() - before < results * 2 + 1.5 * fa4.GROUP_BYTES


@pytest.mark.parametrize("deterministic", [True, None])
def test_fa4_gives_the_same_bits_when_asked_to(deterministic: bool | None) -> None:
    needs_fa4()
    torch.use_deterministic_algorithms(deterministic is None)
    try:
        q = torch.randn(1, 2048, 16, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        k, v = (torch.randn(1, 2048, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        runs = []
        for _ in range(3):
            o = sink_attention(q, k, v, torch.ones(16, device="cuda"), backend="fa4", deterministic=deterministic)
            runs.append(torch.autograd.grad(o.sum(), [q, k, v]))  # type: ignore[union-attr]
        assert all(all(map(torch.equal, runs[0], run)) for run in runs[1:])
    finally:
        torch.use_deterministic_algorithms(False)
