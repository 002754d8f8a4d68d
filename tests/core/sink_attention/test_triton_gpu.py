"""The Triton kernels on a CUDA device: the same cases in every dtype, and what only a device can show."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from attention_cases import CASES, Case, poisoned, run_case, run_compiled
from tolerances import assert_no_worse_than_eager

from unsloth_plugins.core.sink_attention import sink_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LARGE = {
    "1000 tokens": Case((2, 1000, 1000, 8, 2, 64)),
    "1000 tokens, window 128": Case((2, 1000, 1000, 8, 2, 64), options={"window": 128}),
    "1000 tokens, window 600": Case((1, 1000, 1000, 8, 2, 64), options={"window": 600}),
    "1000 tokens, heads of 128": Case((1, 1000, 1000, 8, 8, 128)),
    "1000 tokens, heads of 256": Case((1, 1000, 1000, 4, 2, 256), options={"softcap": 5.0}),
    "packed": Case((2, 1000, 1000, 8, 1, 64), documents=((1, 400, 127, 472), (128, 128, 744)), head_groups=1),
    "packed in a window": Case((1, 1000, 1000, 8, 2, 64), documents=((300, 1, 699),), options={"window": 128}),
    "padded": Case((2, 1000, 1000, 8, 2, 64), padding=((300, 0, 500), (0, 300, 3)), head_groups=2),
    "long decode": Case((2, 1, 3000, 8, 2, 64), padding=((0, 0, None), (700, 0, None))),
}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def plain_float32() -> Iterator[None]:
    """Eager float32 without TF32, whatever the environment says."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def skip_unless_supported(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("no bf16 on this device")


def gpt_oss_inputs(length: int, dtype: torch.dtype = torch.bfloat16, heads: int = 64) -> list[torch.Tensor]:
    """q, k, v and sinks of one row with gpt-oss's head size and ratio."""
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, length, heads, 64), (1, length, heads // 8, 64), (1, length, heads // 8, 64), (heads,))
    return [torch.randn(s, device="cuda", dtype=dtype, generator=generator).requires_grad_() for s in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_small_cases_no_worse_than_eager(name: str, dtype: torch.dtype) -> None:
    skip_unless_supported(dtype)
    run_case(CASES[name], dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LARGE)
def test_large_cases_no_worse_than_eager(name: str, dtype: torch.dtype) -> None:
    skip_unless_supported(dtype)
    run_case(LARGE[name], dtype, "cuda")


@pytest.mark.parametrize("head_size", [16, 40, 64, 96, 128, 192, 256])
def test_head_sizes(head_size: int) -> None:
    for window in (None, 33):
        case = Case((1, 257, 257, 4, 2, head_size), options={} if window is None else {"window": window})
        run_case(case, torch.float16, "cuda")
        run_case(dataclasses.replace(case, layout="bhtd", sink=False), torch.float16, "cuda")


@pytest.mark.parametrize("dynamic", [False, True])
def test_case_29_torch_compile_changes_nothing(dynamic: bool) -> None:
    run_compiled("cuda", "triton", dynamic, (1, 7, 127, 128, 129, 1025))


def test_auto_takes_the_kernels() -> None:
    inputs = gpt_oss_inputs(300, torch.float16)
    auto, kernels = (sink_attention(*inputs, backend=backend) for backend in ("auto", "triton"))  # type: ignore[arg-type]
    assert torch.equal(auto, kernels)
    assert not torch.equal(auto, sink_attention(*inputs, backend="eager"))


@pytest.mark.parametrize("window", [None, 128])
def test_every_run_gives_the_same_bits_and_head_groups_change_none(window: int | None) -> None:
    inputs = gpt_oss_inputs(3000)
    weight = torch.randn_like(inputs[0])
    first = None
    for head_groups in (1, 1, 1, 3, 8):
        with poisoned():
            o, lse = sink_attention(*inputs, window=window, head_groups=head_groups, return_lse=True)
            results = [o, lse, *torch.autograd.grad((o * weight).sum() + lse.sum(), inputs)]
        assert all(x.isfinite().all() for x in results)
        first = first or results
        assert all(map(torch.equal, results, first))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("window", [None, 128])
def test_case_18_memory_is_linear_in_length(window: int | None, trained: bool) -> None:
    peaks = []
    for length in (4096, 8192):
        inputs = gpt_oss_inputs(length)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.set_grad_enabled(trained):
            out = sink_attention(*inputs, window=window).sum()
            if trained:
                out.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del inputs, out
    assert peaks[1] < 2.1 * peaks[0]


def test_packed_documents_equal_the_documents_alone() -> None:
    q, k, v, sink = gpt_oss_inputs(700, heads=8)
    documents = torch.tensor([[0] * 251 + [1] * 449], device="cuda")
    packed = sink_attention(q, k, v, sink, documents_BS=documents)
    changed = k.detach().clone()
    changed[:, :251] += 1.0
    again = sink_attention(q, changed, v, sink, documents_BS=documents)
    assert torch.equal(again[:, 251:], packed[:, 251:]) and not torch.equal(again[:, :251], packed[:, :251])
    alone = sink_attention(q[:, 251:], k[:, 251:], v[:, 251:], sink)
    torch.testing.assert_close(alone, packed[:, 251:], atol=2e-2, rtol=2e-2)


def test_case_23_twenty_lengths_compile_a_bounded_number_of_kernels() -> None:
    from unsloth_plugins.core.sink_attention.triton_bwd import dq_kernel, row_sums_kernel
    from unsloth_plugins.core.sink_attention.triton_dkdv import dkdv_kernel
    from unsloth_plugins.core.sink_attention.triton_fwd import forward_kernel

    kernels = (forward_kernel, row_sums_kernel, dq_kernel, dkdv_kernel)

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    def step(length: int) -> None:
        sink_attention(*gpt_oss_inputs(length, heads=8), window=128).sum().backward()

    step(64)
    before = compiled()
    for length in range(65, 1000, 47):
        step(length)
    assert compiled() - before <= 2 * len(kernels)


def test_no_host_synchronisation() -> None:
    inputs = gpt_oss_inputs(500, heads=8)
    documents = torch.tensor([[0] * 100 + [1] * 400], device="cuda")
    mask = torch.ones(1, 500, dtype=torch.bool, device="cuda")
    for sync_is in ("warn", "error"):  # the first run compiles
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(sync_is)
        try:
            o = sink_attention(*inputs, window=100, documents_BS=documents, key_mask_BS=mask)
            torch.autograd.grad(o.sum(), inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_more_than_two_to_the_31_elements() -> None:
    length, window, rows = 524_288, 128, 300
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    inputs = gpt_oss_inputs(length)
    q, k, v, sink = inputs
    assert q.numel() >= 2**31
    weight = torch.randn(q.shape, device="cuda", dtype=q.dtype)
    o, lse = sink_attention(*inputs, window=window, return_lse=True, head_groups=4)
    grads = torch.autograd.grad(o, inputs, weight)
    dsink = torch.zeros(64, device="cuda", dtype=torch.float64)
    for head in range(64):
        delta = (o[0, :, head].detach().float() * weight[0, :, head].float()).sum(-1)
        dsink[head] = -(torch.exp(sink[head].float() - lse[0, head].detach()).double() * delta).sum()
    torch.testing.assert_close(grads[3].double(), dsink, rtol=2e-2, atol=2e-2 * dsink.abs().max().item())

    # A query and its gradient depend on the window before it; a key's gradients on the window after it.
    for begin in (0, length // 2 - 150, length - rows):
        first = max(0, begin - window + 1)
        part = [q[:, begin : begin + rows], k[:, first : begin + rows], v[:, first : begin + rows], sink]
        results = []
        for dtype, backend in ((torch.float64, "eager"), (torch.bfloat16, "eager")):
            leaves = [x.detach().to(dtype).requires_grad_() for x in part]
            out = sink_attention(*leaves, window=window, backend=backend)  # type: ignore[arg-type]
            more = torch.autograd.grad(out, leaves[:3], weight[:, begin : begin + rows].to(dtype))
            keys = slice(begin - first, None if begin + rows == length else rows - window + begin - first)
            results.append([out, more[0], more[1][:, keys], more[2][:, keys]])
        queries = slice(begin, begin + rows)
        keys = slice(begin, begin + rows if begin + rows == length else begin + rows - window)
        got = [o[:, queries], grads[0][:, queries], grads[1][:, keys], grads[2][:, keys]]
        for name, x, low, truth in zip(("o", "dq", "dk", "dv"), got, results[1], results[0], strict=True):
            assert_no_worse_than_eager(f"{name} from {begin}", x, low, truth, torch.bfloat16)
