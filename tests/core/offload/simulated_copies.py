"""A copy engine on the CPU whose copies happen late, in any order that two streams allow, poisoned until then.

Computing happens at once, as if the device had got far ahead of its copies; so whatever forgets to wait for a copy
reads poison, and whatever lets memory go too early is caught when the copy runs.
"""

from __future__ import annotations

import ctypes
import functools
import random
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from unsloth_plugins.core.models import streaming
from unsloth_plugins.core.offload.weights import WeightStream


class Copy:
    """One copy that has not run yet. It knows its memory by address only, as a device does."""

    def __init__(self, source: torch.Tensor, target: torch.Tensor, before: list[Copy]) -> None:
        self.source, self.target = _Place(source), _Place(target)
        self.before, self.done = before, False

    def run(self) -> None:
        """Run it after all that must run before it."""
        if self.done:
            return
        self.done = True
        for each in self.before:
            each.run()
        self.before = []
        self.target.tensor().copy_(self.source.tensor())


class _Place:
    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storage, self.address, self.n_bytes = StorageWeakRef(storage), tensor.data_ptr(), tensor.numel()

    def tensor(self) -> torch.Tensor:
        assert not self.storage.expired(), "memory was let go before its copy was over"
        return torch.frombuffer((ctypes.c_uint8 * self.n_bytes).from_address(self.address), dtype=torch.uint8)


class SimulatedCopies:
    """See the module. ``eager`` is the chance that a copy has run when somebody calls."""

    def __init__(self, seed: int = 0, eager: float = 0.0, pinned_bytes: int | None = None) -> None:
        self.draw, self.eager, self.pinned_bytes = random.Random(seed), eager, pinned_bytes
        self.last: dict[str, Copy | None] = {"in": None, "out": None}
        self.waiting: list[Copy] = []
        self.pinned: dict[int, int] = {}
        self.waits = 0

    def pin(self, memory_N: torch.Tensor) -> bool:
        if self.pinned_bytes is not None and sum(self.pinned.values()) + memory_N.numel() > self.pinned_bytes:
            return False
        self.pinned[memory_N.data_ptr()] = memory_N.numel()
        return True

    def unpin(self, memory_N: torch.Tensor) -> None:
        del self.pinned[memory_N.data_ptr()]

    def to_host(self, source_N: torch.Tensor, host_N: torch.Tensor, after: Any) -> Copy:
        if after is None or after.done:
            host_N.fill_(255)
        return self._start("out", source_N, host_N, after)

    def to_device(self, host_N: torch.Tensor, after: Any) -> tuple[torch.Tensor, Copy]:
        target_N = torch.empty_like(host_N).fill_(255)
        return target_N, self._start("in", host_N, target_N, after)

    def wait(self, mark: Copy) -> None:
        self.waits += not mark.done
        mark.run()
        self._some()

    def use(self, tensor_N: torch.Tensor) -> None:
        pass

    def mark(self) -> Copy:
        """Computing happens at once."""
        nothing = torch.empty(0, dtype=torch.uint8)
        return Copy(nothing, nothing, [])

    def is_done(self, mark: Copy) -> bool:
        self._some()
        return mark.done

    def block(self, mark: Copy) -> None:
        mark.run()

    def copy_ms(self) -> tuple[float, float]:
        return 0.0, 0.0

    def _start(self, way: str, source: torch.Tensor, target: torch.Tensor, after: Copy | None) -> Copy:
        before = [each for each in (self.last[way], after) if each is not None]
        copy = Copy(source, target, before)
        self.last[way] = copy
        self.waiting.append(copy)
        self._some()
        return copy

    def _some(self) -> None:
        """Run a few of the waiting copies, any of them."""
        while self.waiting and self.draw.random() < self.eager:
            self.waiting.pop(self.draw.randrange(len(self.waiting))).run()
        self.waiting = [each for each in self.waiting if not each.done]


def stream_through_copies(monkeypatch: pytest.MonkeyPatch) -> SimulatedCopies:
    """Streamed weights with the CPU as a device with late copies."""
    copies = SimulatedCopies(0, 0.3)
    stream = functools.partial(WeightStream, engine=lambda device: copies, everywhere=True)
    monkeypatch.setattr(streaming, "WeightStream", stream)
    return copies
