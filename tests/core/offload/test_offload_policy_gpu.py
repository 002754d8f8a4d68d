"""What the policies do with the memory of a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_llama, twin
from transformers import MambaConfig, MambaForCausalLM

from unsloth_plugins.core import apply
from unsloth_plugins.core.offload import HostStore, checkpoint_modules

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
