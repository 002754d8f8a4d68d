"""Nested checkpoints of two layers: equal bits, half the bytes, and nothing left behind."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama, twin
from peft import LoraConfig, get_peft_model
from simulated_copies import SimulatedCopies
from test_offload_policy import Counted, FakeMemory
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from unsloth_plugins.core import apply
from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.offload import HostStore
from unsloth_plugins.core.offload.checkpoint import LayerCheckpoint
from unsloth_plugins.core.offload.pairs import Origin, Pairs

PAIRS: dict[str, Any] = {"gradient_checkpointing": True, "checkpoint_pairs": True, "offload_min_bytes": 0}
ONE = 2 * 16 * 64 * 4  # bytes of a layer's input, of `batch_of(2, 16)`


def equal(a: Any, b: Any) -> bool:
    same = all(torch.equal(a[2][name], b[2][name]) for name in a[2])
    return a[2].keys() == b[2].keys() and torch.equal(a[0], b[0]) and same


@pytest.mark.parametrize("policy", ["on_device", "offload_all", "min_memory"])
@pytest.mark.parametrize(("make", "layers"), [(tiny_gpt_oss, 4), (tiny_llama, 5)])
def test_bit_equal_to_plain_checkpointing_with_half_the_inputs(make: Any, layers: int, policy: Any) -> None:
    ref = make(num_hidden_layers=layers)
    ours, batch = twin(ref), batch_of(2, 16)
    apply(ref, gradient_checkpointing=True, memory_policy="on_device")
    applied = apply(ours, memory_policy=policy, **PAIRS)
    applied.store._engine = lambda device: SimulatedCopies(eager=0.3)
    counted, want = Counted(ours), loss_and_grads(ref, **batch)
    for _ in range(3):
        assert equal(loss_and_grads(ours, **batch), want)
        assert counted.take() == ([3, 2] * layers)[: layers - layers % 2] + [2] * (layers % 2)
    assert "of every second layer" in applied.report()
    assert applied.store.held_bytes == 0
    if policy != "on_device":
        assert applied.store.peak_bytes == applied.store.mapped_bytes == -(-layers // 2) * ONE
    with torch.no_grad():
        ours(**batch)
    assert counted.take() == [1] * layers and applied.store.held_bytes == 0


def test_dropout_and_autocast_are_the_same_in_all_three_runs() -> None:
    config = LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    ref = get_peft_model(tiny_gpt_oss(), config)
    ours, batch, results = twin(ref), batch_of(2, 16), []
    apply(ref, gradient_checkpointing=True, memory_policy="on_device")
    apply(ours, memory_policy="offload_all", **PAIRS)
    for model in (ref, ours):
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(loss_and_grads(model, **batch))
        results.append(torch.get_rng_state())
    assert equal(results[0], results[2]) and torch.equal(results[1], results[3])


def test_what_the_checkpoint_saves_beside_its_arguments_goes_to_the_store() -> None:
    """torch 2.11 saves an empty tensor before them."""
    store, x = HostStore(True, min_bytes=0), torch.ones(3, requires_grad=True)
    origin = Origin(lambda x: 2 * x, (x,), store, random=False)
    packed = [origin.pack(each) for each in (torch.empty(0, requires_grad=True), x, torch.zeros(2))]
    assert torch.equal(origin.compute(), 2 * x)
    assert [origin.unpack(each).tolist() for each in packed] == [[], [1.0, 1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("between", [lambda y: y * 1.5, lambda y: y.mul_(1.5)])
def test_a_hidden_state_that_is_not_what_the_layer_gave_is_kept_as_usual(between: Any) -> None:
    torch.manual_seed(0)
    blocks, store = [torch.nn.Linear(8, 8) for _ in range(4)], HostStore(True, min_bytes=0)
    results = []
    shared = Pairs()
    for layers in (None, [LayerCheckpoint(store, {}, None, index, shared) for index in range(4)]):
        leaf = y = torch.linspace(-1, 1, 32).view(4, 8).requires_grad_()
        for index, block in enumerate(blocks):
            y = block(y) if layers is None else layers[index](block, y)
            y = between(y) if index % 2 == 0 else y
        held = store.held_bytes
        results.append(torch.autograd.grad(y.sum(), [leaf, *(p for each in blocks for p in each.parameters())]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    del y
    # the second layer counts as the first of a pair then
    assert held == 3 * 4 * 32 and store.held_bytes == 0


def test_several_forwards_a_second_backward_and_an_exception_leave_nothing() -> None:
    ref = tiny_llama(num_hidden_layers=4)
    ours, batches = twin(ref), [batch_of(2, 16, seed=seed) for seed in range(3)]
    apply(ref, gradient_checkpointing=True, memory_policy="on_device")
    applied = apply(ours, memory_policy="offload_all", **PAIRS)
    applied.store._engine = lambda device: SimulatedCopies(eager=0.3)
    results = []
    for model in (ref, ours):
        model.train()
        losses = [model(**batch).loss for batch in batches]
        for which in (1, 0, 2):
            losses[which].backward(retain_graph=which == 1)
        losses[1].backward()
        results.append([p.grad.clone() for p in model.parameters()])
        model.zero_grad(set_to_none=True)
        del losses
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert applied.store.held_bytes == 0

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("interrupted")

    out = ours(**batches[0], output_hidden_states=True)
    out.hidden_states[1].register_hook(fail)  # between the two layers of a pair
    with pytest.raises(KeyError):
        out.loss.backward()
    del out
    ours.zero_grad(set_to_none=True)
    gc.collect()
    assert applied.store.held_bytes == 0
    assert equal(loss_and_grads(ours, **batches[0]), loss_and_grads(ref, **batches[0]))


def test_auto_counts_no_input_for_the_second_of_a_pair() -> None:
    ref = tiny_llama(num_hidden_layers=4)
    ours, batch = twin(ref), batch_of(2, 16)
    apply(ref, gradient_checkpointing=True, memory_policy="on_device")
    applied = apply(ours, **PAIRS)
    assert applied.budget is not None
    applied.budget.memory = FakeMemory(2 * ONE)
    counted, want = Counted(ours), loss_and_grads(ref, **batch)
    for runs in ([3, 2, 3, 2], [3, 2, 1, 1]):
        assert equal(loss_and_grads(ours, **batch), want)
        assert counted.take() == runs
    layers = [applied.budget._seen[index] for index in range(4)]
    assert [each.input_bytes for each in layers] == [ONE, 0, ONE, 0]
    assert all(each.kept_bytes == ONE for each in layers)  # the fake device measures nothing besides


def test_other_values_are_refused() -> None:
    for wrong in (0, 1, None, "yes"):
        with pytest.raises(ConfigError, match="checkpoint_pairs"):
            apply(tiny_llama(), checkpoint_pairs=wrong)


def test_memory_that_is_used_again_is_not_taken_for_an_output() -> None:
    pairs, store, origins = Pairs(), HostStore(False), []
    for _ in range(50):  # the allocator hands the same address out again and again, while somebody holds the origins
        hidden = torch.ones(16, requires_grad=True) * 1.0
        origins.append(Origin(torch.nn.Identity(), (hidden.detach(),), store, random=True))
        pairs.note(hidden, origins[-1])
        del hidden
        assert pairs.hooks((torch.ones(16),), store) is None


def test_sharded_layers_are_refused() -> None:
    model = tiny_llama()
    apply(model, **PAIRS)
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(UnsupportedError, match="FSDP2"):
            loss_and_grads(model, **batch_of(2, 16))
    finally:
        distributed.destroy_process_group()
