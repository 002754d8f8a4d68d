"""Packed experts in host memory: a model computes the same bits, and everything else finds the bytes."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama
from live_bytes import LiveBytes
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from simulated_copies import SimulatedCopies, stream_through_copies
from torch.multiprocessing.reductions import StorageWeakRef

from unsloth_plugins.core import applied_to, apply
from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.experts import ExpertLora, fused
from unsloth_plugins.core.layers.swiglu import GPT_OSS
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.models.gpt_oss import GPT_OSS as BINDING
from unsloth_plugins.core.models.streaming import PackedWeights, choose_weights
from unsloth_plugins.core.mxfp4 import PackedWeight, encode, load_mxfp4, pack_experts
from unsloth_plugins.core.mxfp4.weight import HostWeight
from unsloth_plugins.core.offload.weights import StreamedPiece, WeightStream
from unsloth_plugins.core.planner.live import outgrown

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> SimulatedCopies:
    return stream_through_copies(monkeypatch)


def _with_adapters(**options: Any) -> Any:
    model = get_peft_model(
        pack_experts(tiny_gpt_oss()), LoraConfig(r=4, target_modules=EVERYTHING, init_lora_weights=False)
    )
    apply(model, **options)
    draw = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=draw) * 0.1
    return model


def _bytes(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.dtype == torch.uint8}


def _equal(one: Any, two: Any) -> bool:
    same = torch.equal(one[0], two[0]) and torch.equal(one[1], two[1]) and one[2].keys() == two[2].keys()
    return same and all(torch.equal(one[2][name], two[2][name]) for name in one[2])


@pytest.mark.parametrize(
    "options", [{}, {"gradient_checkpointing": True}, {"gradient_checkpointing": True, "checkpoint_pairs": True}]
)
def test_steps_and_evaluations_are_bit_equal_to_resident_ones(copies: SimulatedCopies, options: dict[str, Any]) -> None:
    resident = _with_adapters(weights="resident", **options)
    streamed = _with_adapters(weights="streamed", **options)
    for seed in range(4):
        batch = batch_of(2, 17 + seed, seed=seed)
        assert _equal(loss_and_grads(resident, **batch), loss_and_grads(streamed, **batch))
        with torch.no_grad():
            assert torch.equal(resident.eval()(**batch).loss, streamed.eval()(**batch).loss)
        with torch.inference_mode():
            assert torch.equal(resident(**batch).logits + 0, streamed(**batch).logits + 0)
    assert applied_to(streamed).stream.sent_bytes > 0
    report = applied_to(streamed).report()
    assert "weights                 on          packed experts of 4 layers" in report
    assert "GiB copied to the device so far" in report
    assert "packed experts stay with the model (asked for)" in applied_to(resident).report()


def test_generates_the_same_tokens(copies: SimulatedCopies) -> None:
    ids = batch_of(2, 5)["input_ids"]
    tokens = [
        _with_adapters(weights=weights).generate(input_ids=ids, max_new_tokens=8, do_sample=False)
        for weights in ("resident", "streamed")
    ]
    assert torch.equal(*tokens)


def test_undo_gives_the_bytes_back_and_leaves_no_memory_of_ours(copies: SimulatedCopies) -> None:
    model = pack_experts(tiny_gpt_oss())
    batch, before = batch_of(2, 9), {name: p.clone() for name, p in _bytes(model).items()}
    want = loss_and_grads(model, **batch)
    identities = [id(p) for p in model.parameters()]
    applied = apply(model, weights="streamed")
    loss_and_grads(model, **batch)
    assert len(copies.pinned) == 16
    applied.undo()
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(p, before[name]) for name, p in _bytes(model).items()) and applied.stream.host_bytes == 0
    assert _equal(loss_and_grads(model, **batch), want)


def test_bytes_stay_on_the_host_when_the_model_moves() -> None:
    model = pack_experts(tiny_gpt_oss())
    order = [name for name, _ in model.named_parameters()]
    apply(model, weights="streamed")
    model.to(torch.float64).to("meta")
    assert {p.device.type for p in _bytes(model).values()} == {"cpu"}
    assert {p.device.type for name, p in model.named_parameters() if name not in _bytes(model)} == {"meta"}
    assert [name for name, _ in model.named_parameters()] == order


def test_on_the_cpu_nothing_is_copied() -> None:
    model = pack_experts(tiny_gpt_oss())
    at = [p.data_ptr() for p in _bytes(model).values()]
    applied = apply(model, weights="streamed")
    loss_and_grads(model, **batch_of(2, 9))
    assert [p.data_ptr() for p in _bytes(model).values()] == at and applied.stream.sent_bytes == 0


def test_memory_to_copy_from_is_made_at_the_first_pass_on_a_device(copies: SimulatedCopies) -> None:
    """As for a model that is moved to its device after apply."""
    model, batch = _with_adapters(weights="resident"), batch_of(2, 9)
    want = loss_and_grads(model, **batch)
    stream = apply(model, weights="auto").stream
    assert stream is None  # the CPU has nothing to spare
    applied_to(model).undo()
    streamed = _with_adapters(weights="streamed")
    stream = applied_to(streamed).stream
    for key in list(stream._homes):
        stream.leave(key, stream._homes[key].parameters, torch.device("cpu"))
    assert not stream._homes
    assert _equal(loss_and_grads(streamed, **batch), want) and len(stream._homes) == 9


def test_files_hold_the_same_bytes_and_loaded_ones_are_used(copies: SimulatedCopies, tmp_path: Path) -> None:
    model, other = pack_experts(tiny_gpt_oss()), pack_experts(tiny_gpt_oss(seed=1))
    model.save_pretrained(tmp_path / "before")
    apply(model, weights="streamed")
    batch = batch_of(2, 9)
    loss_and_grads(model, **batch)
    model.save_pretrained(tmp_path / "after")
    stored = [load_file(tmp_path / when / "model.safetensors") for when in ("before", "after")]
    assert stored[0].keys() == stored[1].keys() and all(torch.equal(stored[0][k], stored[1][k]) for k in stored[0])
    load_mxfp4(tmp_path / "after")
    model.load_state_dict(other.state_dict())
    apply(other, weights="resident")
    assert _equal(loss_and_grads(model, **batch), loss_and_grads(other, **batch))


def test_a_deep_copy_streams_its_own_bytes(copies: SimulatedCopies) -> None:
    model, batch = _with_adapters(weights="streamed"), batch_of(2, 9)
    want = loss_and_grads(model, **batch)
    twin = copy.deepcopy(model)
    assert applied_to(twin).stream is not applied_to(model).stream
    for p in _bytes(model).values():
        p.zero_()
    assert _equal(loss_and_grads(twin, **batch), want)
    applied_to(twin).undo()
    applied_to(model).undo()
    assert not _equal(loss_and_grads(model, **batch), want)


def test_merging_reads_streamed_experts(copies: SimulatedCopies, tmp_path: Path) -> None:
    from unsloth_plugins.core.export import merge_model

    for weights in ("resident", "streamed"):
        merge_model(_with_adapters(weights=weights), tmp_path / weights, dtype="fp32")
    merged = [load_file(tmp_path / weights / "model.safetensors") for weights in ("resident", "streamed")]
    assert all(torch.equal(merged[0][name], merged[1][name]) for name in merged[0])


class _Card:
    """A device of so many bytes, of which so many are taken."""

    def __init__(self, allowed: int, taken: int) -> None:
        self.bytes = allowed, taken

    def is_known(self, device: torch.device) -> bool:
        return True

    def allowed(self, device: torch.device) -> int:
        return self.bytes[0]

    def allocated(self, device: torch.device) -> int:
        return self.bytes[1]


def test_auto_streams_where_a_step_has_no_room() -> None:
    base = pack_experts(tiny_gpt_oss())
    parts: ModelParts = BINDING.find(base)  # type: ignore[assignment]
    layer = 2 * 2 * 4 * (64 * 192 + 96 * 64)  # two layers' experts in 16 bits
    for free, streamed in ((layer - 1, True), (layer, False)):
        assert choose_weights(parts, "auto", _Card(10**9, 10**9 - free))[0] is streamed  # type: ignore[arg-type]
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj"]))
    need = layer + 12 * sum(p.numel() for p in model.parameters() if p.requires_grad)
    for free, streamed in ((need - 1, True), (need, False)):
        chosen, why = choose_weights(parts, "auto", _Card(10**9, 10**9 - free))  # type: ignore[arg-type]
        assert chosen is streamed and "GiB free beside the model" in why
    assert choose_weights(parts, "resident", _Card(1, 1)) == (False, "asked for")  # type: ignore[arg-type]


def test_auto_streams_before_a_step_that_is_too_long(copies: SimulatedCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_adapters(gradient_checkpointing=True)
    applied = applied_to(model)
    assert applied is not None
    short, long = batch_of(1, 16), batch_of(1, 512)
    want = loss_and_grads(model, **short), loss_and_grads(model, **long)
    applied._longest = 0  # nobody had looked: there is no memory to speak of on a CPU
    taken = 10**8  # by the model, and by Adam's states
    free = next(n for n in range(0, 10**9, 10**4) if outgrown(applied, 16, _Card(taken + n, taken)) is None)  # type: ignore[arg-type]
    assert outgrown(applied, 512, _Card(taken + free, taken)) is not None  # type: ignore[arg-type]
    monkeypatch.setattr(sys.modules[apply.__module__], "DeviceMemory", lambda: _Card(taken + free, taken))
    assert _equal(loss_and_grads(model, **short), want[0]) and applied.stream is None
    assert _equal(loss_and_grads(model, **long), want[1]) and applied.stream is not None
    assert "512 tokens need up to" in applied.report() and applied.stream.sent_bytes > 0
    assert _equal(loss_and_grads(model, **short), want[0])
    applied.undo()
    assert all(p.device.type == "cpu" for p in _bytes(model).values())


def test_experts_leave_before_the_long_step_has_tensors_and_come_back_once(
    copies: SimulatedCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: none of the step is there when they leave, and nothing holds their bytes when its first module runs."""
    model = _with_adapters(gradient_checkpointing=True)
    applied = applied_to(model)
    assert applied is not None
    short, long = batch_of(1, 16), batch_of(1, 512)
    want, before = loss_and_grads(model, **long), {name: p.clone() for name, p in _bytes(model).items()}
    identities = [id(p) for p in model.parameters()]
    applied._longest, card = 0, _Card(10**9, 10**8)
    monkeypatch.setattr(sys.modules[apply.__module__], "DeviceMemory", lambda: card)
    loss_and_grads(model, **short)
    model.zero_grad()
    card.bytes = 10**8, 10**8
    there = [StorageWeakRef(p.untyped_storage()) for p in _bytes(model).values()]
    left: list[int] = []
    found: list[tuple[int, int]] = []
    send, lookup = PackedWeights.send, model.get_input_embeddings()
    with LiveBytes(*model.parameters(), *long.values()) as alive:

        def noted(self: PackedWeights, why: str, patches: Any) -> None:
            left.append(alive.now())
            send(self, why, patches)

        monkeypatch.setattr(PackedWeights, "send", noted)
        lookup.register_forward_pre_hook(
            lambda *_: found.append((sum(not each.expired() for each in there), alive.now()))
        )
        model(**long).loss.backward()
        model.zero_grad()
    host = sum(p.nbytes for p in _bytes(model).values()) + lookup.weight.nbytes
    assert len(left) == 1 and left[0] < 512 * 64 * 4, "less than one layer's input"
    assert found[0][0] == 0 and found[0][1] - left[0] < 1.1 * host, "moved, not copied"
    applied.undo()
    assert [id(p) for p in model.parameters()] == identities and applied.stream is not None
    assert applied.stream.host_bytes == 0
    assert all(torch.equal(p, before[name]) for name, p in _bytes(model).items())
    apply(model, weights="resident", gradient_checkpointing=True)
    assert _equal(loss_and_grads(model, **long), want)


def test_decoded_weights_that_would_be_dropped_are_no_reason_to_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    model = _with_adapters(gradient_checkpointing=True)
    applied = applied_to(model)
    assert applied is not None and applied.budget is not None and applied.budget.holding_bytes > 0
    taken = 10**8
    free = next(n for n in range(0, 10**9, 10**4) if outgrown(applied, 64, _Card(taken + n, taken)) is None)  # type: ignore[arg-type]
    card = _Card(taken + free, taken + free)  # all that is free is in decoded weights

    class Decoded:
        held_bytes = layer_bytes = free

        def keep(self, count: int) -> None:
            card.bytes = taken + free, taken + min(count, 1) * free

    applied.budget.decoded, applied._longest = Decoded(), 0
    monkeypatch.setattr(sys.modules[apply.__module__], "DeviceMemory", lambda: card)
    loss_and_grads(model, **batch_of(1, 64))
    assert applied.stream is None and card.bytes == (taken + free, taken)


@pytest.mark.parametrize("change", ["full", "no checkpoints"])
def test_nobody_guesses_for_what_the_formulas_do_not_describe(change: str) -> None:
    model = _with_adapters(gradient_checkpointing=change != "no checkpoints")
    applied = applied_to(model)
    assert applied is not None
    if change == "full":
        model.get_input_embeddings().weight.requires_grad_()
    assert outgrown(applied, 512, _Card(1, 1)) is None  # type: ignore[arg-type]


def test_what_cannot_be_streamed_is_refused_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (tiny_llama(), tiny_gpt_oss()):
        with pytest.raises(UnsupportedError, match="packed MXFP4 experts"):
            apply(model, weights="streamed")
        assert applied_to(model) is None
    packed = pack_experts(tiny_gpt_oss())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(UnsupportedError, match="got 2 processes"):
        apply(packed, weights="streamed")
    assert applied_to(packed) is None
    parts: ModelParts = BINDING.find(packed)  # type: ignore[assignment]
    assert choose_weights(parts, "auto", _Card(1, 1)) == (False, "2 processes")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="weights"):
        apply(packed, weights="stream")  # type: ignore[call-overload]


# --- single weights, and the fused experts in triton's interpreter


def _weights(copies: SimulatedCopies) -> tuple[list[PackedWeight], list[HostWeight]]:
    torch.manual_seed(0)
    stream = WeightStream(engine=lambda device: copies, everywhere=True)
    resident, streamed = [], []
    for key, shape in enumerate([(5, 64, 64), (5, 64, 32)]):
        blocks, scales = encode(torch.randn(shape))
        resident.append(PackedWeight(blocks.clone(), scales.clone()))
        parameters = tuple(torch.nn.Parameter(part, requires_grad=False) for part in (blocks, scales))
        streamed.append(HostWeight(*parameters, StreamedPiece(stream, key, parameters, torch.device("cpu"))))
    return resident, streamed


def test_every_way_to_read_a_weight() -> None:
    for want, got in zip(*_weights(SimulatedCopies()), strict=True):
        assert got.shape == want.shape and got.device == want.device
        for dtype in (torch.float32, torch.bfloat16):
            assert torch.equal(got.dense(dtype), want.dense(dtype))
            assert torch.equal(got.dense(dtype, 3), want.dense(dtype, 3))
        chosen = torch.tensor([4, 0, 4, 4, 2])
        assert torch.equal(got.chosen(chosen).dense(torch.float32), want.chosen(chosen).dense(torch.float32))
        assert torch.equal(got.chosen(chosen).dense(torch.float32)[0], want.dense(torch.float32, 4))


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "fused_experts", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
def test_the_fused_experts_give_the_same_bits() -> None:
    results = []
    for weights in _weights(SimulatedCopies(0, 0.3)):
        torch.manual_seed(1)
        shapes = [(9, 64), (5, 8, 64), (5, 8, 64), (5, 8, 32), (5, 8, 64)]
        x, a1, b1, a2, b2 = (torch.randn(shape, requires_grad=True) for shape in shapes)
        index, weight = torch.rand(9, 5).topk(2, 1).indices, torch.rand(9, 2)
        for _ in range(3):
            y = fused.experts_fused(
                x,
                weights[0],
                torch.zeros(5, 64),
                weights[1],
                torch.zeros(5, 64),
                index,
                weight,
                activation=GPT_OSS,
                gate_up_lora=(ExpertLora(a1, b1, 0.5),),
                down_lora=(ExpertLora(a2, b2, 0.5),),
            )
            results.append([y, *torch.autograd.grad(y.square().sum(), (x, a1, b1, a2, b2))])
    assert all(all(map(torch.equal, each, results[0])) for each in results)
