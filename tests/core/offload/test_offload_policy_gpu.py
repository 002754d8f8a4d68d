"""What the policies do with the memory of a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_llama, twin
from torch.utils.checkpoint import checkpoint
from transformers import MambaConfig, MambaForCausalLM

from unsloth_plugins.core import apply
from unsloth_plugins.core.offload import HostStore, checkpoint_modules
from unsloth_plugins.core.offload.survivors import Survivors
from unsloth_plugins.core.sink_attention import sink_attention
from unsloth_plugins.core.sink_attention.backends import Call, why_not_fa4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def llama() -> Any:
    return tiny_llama(num_hidden_layers=8, hidden_size=512, intermediate_size=1536, num_attention_heads=8).cuda()


def peak(model: Any, batch: dict[str, torch.Tensor]) -> int:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model.train()
    model(**batch, use_cache=False).loss.backward()
    model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


def test_auto_keeps_what_fits_under_the_cap_and_changes_no_gradient() -> None:
    model, batch = llama(), {name: each.cuda() for name, each in batch_of(1, 8192).items()}
    # attention="triton": torch's own in float32 adds up its gradients in any order
    shared: dict[str, Any] = dict(attention="triton", gradient_checkpointing=True, offload_min_bytes=0)
    applied = apply(model, memory_policy="offload_all", **shared)
    want = loss_and_grads(model, **batch)
    least = peak(model, batch)
    applied = apply(model, memory_policy="on_device", attention="triton", gradient_checkpointing=False)
    most = peak(model, batch)
    applied.undo()
    assert most > 1.5 * least
    total = torch.cuda.get_device_properties(0).total_memory
    kept = []
    for share in (0.3, 0.6, 2.0):  # the last one has room for the recompute that keeping all saves
        applied = apply(model, **shared)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_per_process_memory_fraction((least + share * (most - least)) / 0.93 / total)
        try:
            for _ in range(4):
                got = loss_and_grads(model, **batch)
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert applied.budget is not None
        plan = applied.budget.plan
        kept.append(0 if plan is None else applied.budget.layers - plan.first_kept)
        applied.undo()
    assert kept[0] <= kept[1] < kept[2] == 8 and kept[1] > 0, kept


def test_mixed_lengths_stay_under_the_cap() -> None:
    model = llama()
    applied = apply(model, attention="triton", gradient_checkpointing=True, offload_min_bytes=0)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 3 * 2**30) / total)
    try:
        for length in (1024, 2048, 4096, 8192, 1024, 16384, 8192, 512, 16384, 4096) * 2:
            loss_and_grads(model, **{name: each.cuda() for name, each in batch_of(1, length).items()})
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert applied.store.held_bytes == 0


@pytest.mark.parametrize("backend", ["triton", "fa4"])
def test_what_full_attention_gave_survives_and_saves_its_run(backend: Any) -> None:
    reason = why_not_fa4(Call(torch.device("cuda"), torch.bfloat16, 64, 8, 8))
    if backend == "fa4" and reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    tokens = 32768
    q, k, v = (torch.randn(1, tokens, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (16, 2, 2))
    sink = torch.randn(16, device="cuda")
    held, results = [], []
    for keep in (False, True):
        leaves = [each.clone().requires_grad_() for each in (q, k, v, sink)]
        survivors = Survivors(keep)
        out = None  # the graph of the run before holds its inputs
        before = torch.cuda.memory_allocated()
        out = checkpoint(
            lambda *leaves: sink_attention(*leaves, backend=backend, deterministic=True).sin(),
            *leaves,
            use_reentrant=False,
            context_fn=survivors.contexts,
        )
        held.append(torch.cuda.memory_allocated() - before - out.numel() * 2)
        assert survivors.offered_bytes == tokens * 16 * (64 * 2 + 4)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            results.append(torch.autograd.grad(out.sum(), leaves))
            torch.cuda.synchronize()
        launches = sum(each.count for each in profile.key_averages())
        results[-1] = (launches, *results[-1])
    assert all(torch.equal(a, b) for a, b in zip(results[0][1:], results[1][1:], strict=True))
    assert results[1][0] < results[0][0], "no launch fewer"
    # a block of torch's allocator may be 1 MiB larger than asked for
    assert held[1] - held[0] == pytest.approx(tokens * 16 * (64 * 2 + 4), abs=3 << 20)


@pytest.mark.parametrize("policy", ["offload_all", "on_device"])
def test_pairs_are_bit_equal_to_plain_checkpointing_and_hold_half(policy: Any) -> None:
    ref = llama()
    ours, batch = twin(ref), {name: each.cuda() for name, each in batch_of(1, 2048).items()}
    shared: dict[str, Any] = dict(attention="triton", gradient_checkpointing=True, offload_min_bytes=0)
    apply(ref, memory_policy="on_device", **shared)
    applied = apply(ours, memory_policy=policy, checkpoint_pairs=True, **shared)
    for _ in range(3):
        want, got = loss_and_grads(ref, **batch), loss_and_grads(ours, **batch)
        assert torch.equal(want[0], got[0]) and all(torch.equal(want[2][name], got[2][name]) for name in want[2])
    assert applied.store.held_bytes == 0
    if policy == "offload_all":
        assert applied.store.peak_bytes == 4 * 2048 * 512 * 4
        for name, each in [*ref.named_parameters(), *ours.named_parameters()]:
            each.requires_grad_("norm" in name)  # gradients of all weights take more than the inputs of all layers
        assert peak(ours, batch) < peak(ref, batch)


def test_mamba_by_name_has_equal_gradients_and_a_lower_peak() -> None:
    torch.manual_seed(0)
    ref = MambaForCausalLM(MambaConfig(hidden_size=64, num_hidden_layers=6, vocab_size=160, state_size=4)).cuda()
    ours = twin(ref)
    batch = {name: each.cuda() for name, each in batch_of(2, 256).items()}
    checkpoint_modules(ours, r"backbone\.layers\.\d+", HostStore(True, min_bytes=0))
    want, got = loss_and_grads(ref, **batch), loss_and_grads(ours, **batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    there = torch.cuda.memory_allocated()
    assert peak(ours, batch) - there < 0.8 * (peak(ref, batch) - there)
