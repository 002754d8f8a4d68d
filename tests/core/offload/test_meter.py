"""What the adapters log of copies, and what they print at the end."""

from __future__ import annotations

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_llama
from simulated_copies import SimulatedCopies

from unsloth_plugins.core import apply
from unsloth_plugins.core.meter import Meter

INPUTS = 4 * 16 * 128 * 64 * 4  # bytes: layers, rows, tokens, hidden size, float32


class Timed(SimulatedCopies):
    """Computing waits 5 ms for each copy that is late."""

    def copy_ms(self) -> tuple[float, float]:
        return 9.0 * self.waits, 5.0 * self.waits


def test_copies_are_counted_since_the_last_read_and_told_at_the_end() -> None:
    model, copies = tiny_llama(num_hidden_layers=4), Timed()
    applied = apply(model, gradient_checkpointing=True, memory_policy="offload_all", offload_min_bytes=1 << 19)
    applied.store._engine = lambda device: copies
    batch = batch_of(16, 128)
    loss_and_grads(model, **batch)  # before the meter: not counted
    meter = Meter([applied], torch.device("cpu"))
    late = copies.waits
    assert meter.read()["sent_gib"] == meter.read()["exposed_copy_ms"] == 0
    for steps in (1, 2):
        before = copies.waits
        for _ in range(steps):
            loss_and_grads(model, **batch)
        read = meter.read()
        assert read["sent_gib"] == pytest.approx(steps * INPUTS / 2**30, abs=6e-5) and read["sent_gib"] > 1e-3
        assert read["exposed_copy_ms"] == 5.0 * (copies.waits - before) > 0
    assert late > 0
    first, second = meter.summary().splitlines()
    assert first.startswith("unsloth-plugins: ") and second.startswith("  gradient checkpointing: non-reentrant")
    assert f"waited for {5 * copies.waits} ms" in second
    applied.undo()


def test_the_summary_is_one_line_without_checkpointing() -> None:
    applied = apply(tiny_llama())
    assert len(Meter([applied], torch.device("cpu")).summary().splitlines()) == 1
