"""The same promises on a CUDA device, and those about its memory that a CPU can't show."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama

from unsloth_plugins.core import apply
from unsloth_plugins.core.experts.grouped import experts_grouped
from unsloth_plugins.core.experts.reference import experts_loop
from unsloth_plugins.core.layers import GPT_OSS
from unsloth_plugins.core.offload import HostStore, offload_checkpoint

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_same_loss_and_gradients_as_stock(make) -> None:  # type: ignore[no-untyped-def]
    ref = make().cuda()
    ours = copy.deepcopy(ref)
    applied = apply(
        ours, attention="triton", gradient_checkpointing=True, memory_policy="offload_all", offload_min_bytes=0
    )
    assert "triton sink attention (float32 on CUDA)" in applied.report()
    batch = {name: tensor.cuda() for name, tensor in batch_of(2, 33).items()}
    want, got = loss_and_grads(ref, **batch), loss_and_grads(ours, **batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert applied.store.total_bytes == len(applied.parts.layers) * 2 * 33 * 64 * 4 and applied.store.held_bytes == 0


def test_nothing_is_copied_while_there_is_plenty_of_memory() -> None:
    """``auto`` leaves inputs on the device below half of what the process may have, and moves them above."""
    total = torch.cuda.get_device_properties(0).total_memory
    x = torch.randn(1 << 20, device="cuda")
    store = HostStore("auto", min_bytes=0)
    assert HostStore.unpack(store.pack(x)).data_ptr() == x.data_ptr() and store.total_bytes == 0
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() * 1.9) / total)
    try:
        moved = store.pack(x)
        assert store.held_bytes == x.numel() * 4
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.equal(HostStore.unpack(moved), x)


def test_offloading_frees_the_device_and_changes_no_bit() -> None:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(1024, 1024, device="cuda") for _ in range(8)]
    results = []
    for offload in (False, True):
        store = HostStore(offload, min_bytes=0)
        x = torch.randn(16384, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).requires_grad_()
        torch.cuda.synchronize()
        before, y = torch.cuda.memory_allocated(), x
        for block in blocks:
            y = offload_checkpoint(block, y, store=store)
        held = torch.cuda.memory_allocated() - before
        grads = torch.autograd.grad(y.square().mean(), [x, *(p for block in blocks for p in block.parameters())])
        results.append((held, [g.cpu() for g in grads]))
    one = 16384 * 1024 * 4
    assert results[0][0] >= 8 * one and results[1][0] <= 3 * one  # the output, and two that are on their way
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))


def test_grouped_experts_in_bf16_within_the_loops_own_error() -> None:
    torch.manual_seed(0)
    n, hidden, size, count, top_k = 300, 64, 96, 8, 2
    shapes = ((count, hidden, 2 * size), (count, 2 * size), (count, size, hidden), (count, hidden))
    weights = [0.2 * torch.randn(shape, device="cuda", dtype=torch.float64) for shape in shapes]
    x = torch.randn(n, hidden, device="cuda", dtype=torch.float64)
    index = torch.rand(n, count, device="cuda")[:, : count - 1].topk(top_k).indices  # the last expert gets no token
    weight = torch.rand(n, top_k, device="cuda")
    outs = []
    low = torch.bfloat16
    for run, dtype in ((experts_loop, torch.float64), (experts_loop, low), (experts_grouped, low)):
        leaves = [t.to(dtype).requires_grad_() for t in (x, *weights)]
        out = run(*leaves, index, weight.to(dtype if dtype == torch.float64 else torch.float32), activation=GPT_OSS)
        outs.append([out, *torch.autograd.grad(out.sum(), leaves)])
    for truth, loop, grouped in zip(*outs, strict=True):
        loop_error, grouped_error = ((t.double() - truth).norm() for t in (loop, grouped))
        assert grouped_error <= 1.1 * loop_error + 1e-6 * truth.norm()
    assert not outs[2][1 + 1][-1].any()
