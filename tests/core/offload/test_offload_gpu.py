"""The copy engine of CUDA: a slow copy stream, a small arena, several streams, and what the device holds meanwhile."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from unsloth_plugins.core.offload import HostStore, offload_checkpoint
from unsloth_plugins.core.offload.engine import CudaCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

WIDTH = 512


class Delayed(CudaCopies):
    """Every copy starts some milliseconds late."""

    def _copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> Any:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(3_000_000)
        return super()._copy(stream, target, source)


class Block(torch.nn.Module):
    """Saves x, its transpose, an offset slice and shifted labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = torch.nn.Linear(WIDTH, WIDTH, device="cuda"), torch.nn.Dropout(0.1)

    def forward(self, x, x_T, part, labels):  # type: ignore[no-untyped-def]
        mixed = x + self.drop(self.inner(x)) + (x_T @ x).sum(0) * 1e-4
        return torch.tanh(mixed + torch.nn.functional.pad(part, (0, 0, 1, 0)) * labels[:, None] * 1e-3)


def step(blocks: list[Block], x: torch.Tensor, store: HostStore) -> list[torch.Tensor]:
    torch.manual_seed(3)
    leaf = y = x.clone().requires_grad_()
    labels = torch.arange(len(x), device="cuda")
    for block in blocks:
        y = offload_checkpoint(block, y, y.T, y[1:], labels.roll(-1), store=store) * 1.01
    return list(torch.autograd.grad(y.square().sum(), [leaf, *(p for b in blocks for p in b.parameters())]))


@contextlib.contextmanager
def other_stream(used: bool) -> Iterator[None]:
    if not used:
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("used", [False, True])
def test_case_21_50_steps_with_late_copies_are_bit_equal_to_plain_checkpointing(used: bool) -> None:
    torch.manual_seed(0)
    blocks = [Block() for _ in range(6)]
    unlimited = HostStore(True, min_bytes=0)
    step(blocks, torch.randn(774, WIDTH, device="cuda"), unlimited)
    need = unlimited.mapped_bytes
    plain, late = HostStore(False), HostStore(True, min_bytes=0, engine=Delayed, limit_bytes=need)
    for n in range(50):
        x = torch.randn(700 + 37 * (n % 3), WIDTH, device="cuda")
        with other_stream(used):
            want, got = step(blocks, x, plain), step(blocks, x, late)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), n
        del want, got
    assert late.held_bytes == 0 and late.mapped_bytes == need <= 1.02 * late.peak_bytes


def test_host_bytes_are_those_stored_and_the_device_holds_about_two_layers() -> None:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(1024, 1024, bias=False, device="cuda").requires_grad_(False) for _ in range(16)]
    store = HostStore(True, min_bytes=0)
    x = torch.randn(16384, 1024, device="cuda", requires_grad=True)
    one = x.numel() * 4
    for _ in range(3):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, y = torch.cuda.memory_allocated(), x
        for block in blocks:
            y = offload_checkpoint(block, y, store=store)
        assert torch.cuda.memory_allocated() - before <= 3.01 * one  # the output, and two on their way
        y.sum().backward()
        # two pieces, the gradient and its next one, the recomputed output, an expanded gradient of the sum
        assert torch.cuda.max_memory_allocated() - before <= 6.01 * one
        del y
        x.grad = None
    assert store.peak_bytes == 16 * one and store.mapped_bytes <= 1.02 * store.peak_bytes
    copies_ms, exposed_ms = store.copy_ms()
    assert copies_ms > 0 and exposed_ms >= 0


def test_case_30_200_steps_of_mixed_lengths_leave_host_and_device_memory_flat() -> None:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(WIDTH, WIDTH, device="cuda") for _ in range(8)]
    store, seen = HostStore(True, min_bytes=0), []
    for n in range(200):
        y = torch.randn((4096, 1024, 2048, 3000)[n % 4], WIDTH, device="cuda", requires_grad=True)
        for block in blocks:
            y = offload_checkpoint(block, y, store=store)
        y.sum().backward()
        with torch.no_grad():
            offload_checkpoint(blocks[0], y, store=store)
        for block in blocks:
            block.zero_grad()
        del y
        resident = int(Path("/proc/self/statm").read_text().split()[1])  # pages
        seen.append((store.mapped_bytes, torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), resident))
    mapped, allocated, reserved, resident_pages = zip(*seen, strict=True)
    assert store.held_bytes == 0 and len(set(mapped[4:])) == 1
    for device in (allocated, reserved):
        assert max(device[100:]) <= max(device[4:100])
    assert max(resident_pages[180:]) <= 1.05 * max(resident_pages[40:60])


def test_case_13_a_registration_that_fails_does_not_fail_the_next_launch() -> None:
    engine = CudaCopies(torch.device("cuda"))
    memory = torch.zeros(1 << 20, dtype=torch.uint8)
    assert engine.pin(memory)
    assert not engine.pin(memory)  # registered already: an error of the driver
    assert torch.ones(4, device="cuda").sum().item() == 4
    engine.unpin(memory)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_a_store_serves_several_devices() -> None:
    store, results = HostStore(True, min_bytes=0), []
    torch.manual_seed(0)
    first, second = torch.nn.Linear(WIDTH, WIDTH, device="cuda:0"), torch.nn.Linear(WIDTH, WIDTH, device="cuda:1")
    x = torch.randn(512, WIDTH, device="cuda:0", requires_grad=True)
    for used in (HostStore(False), store):
        y = x
        for _ in range(3):
            y = offload_checkpoint(first, y, store=used)
            y = offload_checkpoint(second, y.to("cuda:1"), store=used).to("cuda:0")
        results.append(torch.autograd.grad(y.sum(), [x, *first.parameters(), *second.parameters()]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert len(store._transfers) == 2
