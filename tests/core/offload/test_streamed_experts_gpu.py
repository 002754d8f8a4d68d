"""Streamed experts on a CUDA device: real streams, delayed on purpose, and the memory that is saved."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss
from peft import LoraConfig, get_peft_model

from unsloth_plugins.core import applied_to, apply
from unsloth_plugins.core.mxfp4 import pack_experts
from unsloth_plugins.core.offload.engine import CudaCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
EVERYTHING = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(params=[False, True], ids=["prompt", "delayed"])
def _delay(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that run late, as on a slow bus."""
    if request.param:
        copy = CudaCopies._copy

        def late(self: CudaCopies, stream: torch.cuda.Stream, *args: Any) -> Any:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(2_000_000)
            return copy(self, stream, *args)

        monkeypatch.setattr(CudaCopies, "_copy", late)


@functools.cache
def _reference() -> list[Any]:
    """What resident experts give."""
    return _steps(_model(weights="resident"))


def _model(before: str = "cuda", **options: Any) -> Any:
    """A bf16 model with LoRA everywhere; applied on the device ``before``, then moved."""
    base = pack_experts(tiny_gpt_oss(num_local_experts=8)).bfloat16().to(before)
    model = get_peft_model(base, LoraConfig(r=8, target_modules=EVERYTHING))
    apply(model, gradient_checkpointing=True, **options)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))  # a streamed embedding changes the order
            parameter.data = (torch.randn(parameter.shape, generator=draw) * 0.1).to(parameter)
    return model.cuda()


def _steps(model: Any) -> list[Any]:
    """Some steps of several lengths, an evaluation and a few tokens in between."""
    found: list[Any] = []
    for seed, length in enumerate((33, 70, 33, 21)):
        batch = {name: ids.cuda() for name, ids in batch_of(2, length, seed=seed).items()}
        loss, logits, grads = loss_and_grads(model, **batch)
        found += [loss, logits, *grads.values()]
        with torch.no_grad():
            found.append(model.eval()(**batch).loss)
            found.append(model(input_ids=batch["input_ids"][:1, :3]).logits)
    return found


@pytest.mark.usefixtures("_delay")
@pytest.mark.parametrize("before", ["cuda", "cpu"])
@pytest.mark.parametrize("other_stream", [False, True])
def test_every_bit_is_that_of_resident_experts(before: str, other_stream: bool) -> None:
    model = _model(before, weights="streamed")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if other_stream else torch.cuda.current_stream()):
        got = _steps(model)
        torch.cuda.current_stream().synchronize()
    assert all(map(torch.equal, got, _reference())) and len(got) == len(_reference())
    assert {p.device.type for p in model.parameters() if p.dtype == torch.uint8} == {"cpu"}
    assert "GiB copied to the device so far in" in applied_to(model).report()


def test_device_memory_is_that_of_the_rest_and_comes_back_with_undo() -> None:
    options = dict(hidden_size=512, intermediate_size=512, num_local_experts=32)
    model = pack_experts(tiny_gpt_oss(**options)).bfloat16().cuda()
    before = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
    size = sum(p.numel() for p in before.values())
    held = torch.cuda.memory_allocated()
    applied = apply(model, weights="streamed")
    assert held - torch.cuda.memory_allocated() >= 0.99 * size
    ids = batch_of(1, 64)["input_ids"].cuda()
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        for _ in range(3):
            model(input_ids=ids, use_cache=False)
    layer = 32 * (512 * 1024 + 512 * 512)
    room = 3 * layer + (16 << 20)  # decoded in 16 bits, the packed bytes of a layer and more, what is computed
    assert torch.cuda.max_memory_allocated() - held + size < room
    applied.undo()
    assert all(torch.equal(p, before[name]) and p.is_cuda for name, p in model.named_parameters() if name in before)


def _frozen() -> Any:
    return pack_experts(tiny_gpt_oss(vocab_size=20000)).bfloat16().requires_grad_(False).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_embedding_is_read_on_the_host_without_waiting(dtype: torch.dtype) -> None:
    model = _frozen().to(dtype)
    table = model.model.embed_tokens.weight
    want, held = table.detach().clone(), torch.cuda.memory_allocated()
    packed = sum(p.numel() for p in model.parameters() if p.dtype == torch.uint8)
    applied = apply(model, weights="streamed")
    assert table.device.type == "cpu" and model.device.type == "cuda"
    freed = held - torch.cuda.memory_allocated()
    assert freed >= 0.99 * (packed + table.numel() * table.element_size())
    ids = torch.randint(0, 20000, (3, 333), device="cuda")
    model.model.embed_tokens(ids)  # compiles the kernel
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = model.model.embed_tokens(ids)
        few = model.model.embed_tokens(ids.int()[:, ::7])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(rows, want[ids]) and torch.equal(few, want[ids[:, ::7]])
    applied.undo()
    assert table.is_cuda and torch.equal(table, want) and next(iter(model.parameters())) is table


def test_generates_and_evaluates_as_with_a_resident_embedding() -> None:
    model, ids = _frozen(), batch_of(2, 16)["input_ids"].cuda()
    found = []
    for weights in ("resident", "streamed"):
        applied = apply(model, weights=weights)
        tokens = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False)
        with torch.no_grad():
            found.append((model(input_ids=ids).logits + 0, tokens))
        applied.undo()
    assert all(map(torch.equal, *found))


def test_an_id_outside_of_the_table_stops_the_device() -> None:
    code = """
import torch
from conftest import tiny_gpt_oss
from unsloth_plugins.core import apply
from unsloth_plugins.core.mxfp4 import pack_experts

model = pack_experts(tiny_gpt_oss()).requires_grad_(False).cuda()
apply(model, weights="streamed")
model.model.embed_tokens(torch.tensor([[160]], device="cuda"))
torch.cuda.synchronize()
"""
    tests = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([tests, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert done.returncode != 0 and "device-side assert" in done.stderr, done.stderr[-3000:]


def test_auto_looks_at_the_memory_that_is_left() -> None:
    options = dict(num_hidden_layers=2, hidden_size=1024, intermediate_size=1024, num_local_experts=16)
    model = pack_experts(tiny_gpt_oss(**options, layer_types=["full_attention"] * 2)).bfloat16().cuda()
    two_layers = 2 * 2 * 16 * 3 * 1024 * 1024
    assert apply(model).stream is None
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 0.9 * two_layers) / total)
    try:
        assert apply(model, loss=None).stream is not None
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_the_device_has_the_memory_of_experts_that_leave() -> None:
    """Not torch's allocator, in pieces between what stays."""
    torch.cuda.empty_cache()
    options = dict(num_hidden_layers=4, hidden_size=1024, intermediate_size=1024, num_local_experts=32)
    base = pack_experts(tiny_gpt_oss(**options)).bfloat16().cuda()
    model = get_peft_model(base, LoraConfig(r=8, target_modules=EVERYTHING)).cuda()
    applied = apply(model, gradient_checkpointing=True)
    assert applied.stream is None and applied._weights is not None
    packed = [p for p in model.parameters() if p.dtype == torch.uint8]
    torch.cuda.empty_cache()
    reserved, allocated = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    n_bytes = sum(p.nbytes for p in packed)
    applied._weights.send("asked for", applied._patches)
    assert allocated - torch.cuda.memory_allocated() >= n_bytes
    assert reserved - torch.cuda.memory_reserved() >= 0.9 * n_bytes
    applied.undo()
    assert all(p.is_cuda for p in packed) and torch.cuda.memory_allocated() >= allocated - 2**20
