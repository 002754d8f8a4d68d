"""Faults that other implementations had: replayed state, and what is left behind after many steps."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama, twin
from peft import LoraConfig, get_peft_model
from simulated_copies import SimulatedCopies

from unsloth_plugins.core import apply
from unsloth_plugins.core.offload import HostStore, offload_checkpoint
from unsloth_plugins.core.sink_attention import sink_attention


def tensors_alive() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_case_19_dropout_autocast_and_routing_are_the_same_in_the_recompute() -> None:
    base = tiny_gpt_oss()
    for layer in base.model.layers:
        layer.mlp.router.weight.data[1] = layer.mlp.router.weight.data[0]  # exact ties
        layer.mlp.router.bias.data[:2] = 0.0
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    plain = get_peft_model(base, config)
    ours = twin(plain)
    applied = apply(ours, attention="eager", gradient_checkpointing=True, memory_policy="offload_all")
    apply(plain, attention="eager", gradient_checkpointing=False)
    applied.store.min_bytes, applied.store._engine = 0, lambda device: SimulatedCopies(eager=0.3)
    ids = torch.randint(2, 160, (2, 12), generator=torch.Generator().manual_seed(0))
    results = []
    for model in (plain, ours):
        model.train()
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), grads, torch.get_rng_state()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][2], results[1][2])
    assert results[0][1].keys() == results[1][1].keys() and len(results[0][1]) == 16
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])
    assert applied.store.sent_bytes > 0 and applied.store.held_bytes == 0


@pytest.mark.parametrize("early_stop", [True, False])
def test_case_47_nothing_is_left_after_many_steps_of_a_region_that_ends_with_our_op(early_stop: bool) -> None:
    torch.manual_seed(0)
    q_proj, kv_proj = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)
    sink, copies = torch.randn(2, requires_grad=True), SimulatedCopies(eager=0.3)
    store = HostStore(True, min_bytes=0, engine=lambda device: copies)

    def block(x: torch.Tensor) -> torch.Tensor:
        q = q_proj(x).view(1, 6, 2, 8)
        k = kv_proj(x).view(1, 6, 2, 8)
        return sink_attention(q, k, k.sin(), sink).reshape(1, 6, 16)

    alive, grads = [], []
    for step in range(25):
        x = torch.linspace(-1, 1, 96).view(1, 6, 16).requires_grad_()
        y = x
        for _ in range(2):
            y = offload_checkpoint(block, y, store=store, early_stop=early_stop)
        grads = list(torch.autograd.grad(y.square().sum(), [x, sink]))
        del y, x
        if step in (5, 24):
            alive.append((tensors_alive(), store.mapped_bytes, store.held_bytes))
    assert alive[0] == alive[1] and alive[0][2] == 0
    leaf = torch.linspace(-1, 1, 96).view(1, 6, 16).requires_grad_()
    want = torch.autograd.grad(block(block(leaf)).square().sum(), [leaf, sink])
    assert all(torch.equal(a, b) for a, b in zip(want, grads, strict=True))


def test_case_47_nothing_is_left_after_many_steps_of_a_model() -> None:
    model = tiny_gpt_oss()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    applied = apply(model.train(), gradient_checkpointing=True, memory_policy="offload_all")
    applied.store.min_bytes, applied.store._engine = 0, lambda device: SimulatedCopies(eager=0.3)
    ids, alive = torch.arange(2, 14)[None], []
    for step in range(20):
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad(set_to_none=True)
        if step in (5, 19):
            alive.append((tensors_alive(), applied.store.mapped_bytes, applied.store.held_bytes))
    assert alive[1][0] <= alive[0][0] and alive[0][1:] == alive[1][1:] and alive[0][2] == 0


@pytest.mark.parametrize("pairs", [False, True])
def test_case_33_an_expert_without_tokens_and_a_backward_that_is_tried_again(pairs: bool) -> None:
    ref = tiny_gpt_oss()
    for layer in ref.model.layers:
        layer.mlp.router.bias.data[3] = -1e4  # nobody goes there
    ours, batch = twin(ref), batch_of(2, 12)
    apply(ref, attention="eager", gradient_checkpointing=False)
    options: dict[str, Any] = {"memory_policy": "offload_all", "offload_min_bytes": 0, "checkpoint_pairs": pairs}
    applied = apply(ours, attention="eager", gradient_checkpointing=True, **options)
    applied.store._engine = lambda device: SimulatedCopies(eager=0.3)
    want, mapped = loss_and_grads(ref, **batch), []
    for _ in range(3):
        ours.train()
        out = ours(**batch, output_hidden_states=True)
        out.hidden_states[2].register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            out.loss.backward()
        del out
        gc.collect()
        assert applied.store.held_bytes == 0
        got = loss_and_grads(ours, **batch)
        assert want[2].keys() == got[2].keys() and all(torch.equal(want[2][name], got[2][name]) for name in want[2])
        assert applied.store.held_bytes == 0
        mapped.append(applied.store.mapped_bytes)
    assert mapped[0] == mapped[2]


def test_case_33_a_block_of_two_outputs_of_which_one_is_used() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    store, grads = HostStore(True, min_bytes=0, engine=lambda device: SimulatedCopies(eager=0.3)), []

    def block(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return first(x).tanh(), second(x).tanh()

    for ours in (False, True, True):
        leaf = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        used, _ = offload_checkpoint(block, leaf, store=store) if ours else block(leaf)
        grads.append(torch.autograd.grad(used.sum(), [leaf, *first.parameters()]))
        del used, _
        assert store.held_bytes == 0
    assert all(torch.equal(a, b) for got in grads[1:] for a, b in zip(grads[0], got, strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the resident set from Linux")
@pytest.mark.parametrize("pairs", [False, True])
def test_case_30_200_steps_of_mixed_lengths_with_evaluations_leave_the_process_as_it_was(pairs: bool) -> None:
    model = tiny_llama(num_hidden_layers=4)
    options: dict[str, Any] = {"memory_policy": "offload_all", "offload_min_bytes": 0, "checkpoint_pairs": pairs}
    applied = apply(model, gradient_checkpointing=True, **options)
    resident_mib, mapped = [], []
    for step in range(200):
        loss_and_grads(model, **batch_of(2, (150, 32, 256, 65)[step % 4], seed=step))
        if step % 10 == 9:
            model.eval()
            with torch.no_grad():
                model(**batch_of(2, 200, seed=step))
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        resident_mib.append(pages * os.sysconf("SC_PAGE_SIZE") / 2**20)
        mapped.append(applied.store.mapped_bytes)
        assert applied.store.held_bytes == 0
    early, late = max(resident_mib[40:60]), max(resident_mib[180:])
    assert late <= 1.05 * early, (early, late)
    assert len(set(mapped[4:])) == 1
