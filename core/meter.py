"""What a training loop tells its user: tokens per second, peak memory, host memory, copies to the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from unsloth_plugins.core.device import peak_memory_gib, peak_process_gib

if TYPE_CHECKING:
    from unsloth_plugins.core.apply import Applied


class Meter:
    """Measures between ``start`` and ``stop``, so that evaluation, saving and loading of data do not count.

    Args:
        applied: what was done to each model that trains; their tokens and bytes add up.
        device: where the models are.

    Attributes:
        seconds: measured since the last ``read``.
    """

    def __init__(self, applied: Sequence[Applied], device: torch.device) -> None:
        self.applied, self.device, self.seconds = tuple(applied), device, 0.0
        self._tokens, self._since = self._seen(), time.perf_counter()
        self._sent_bytes, self._exposed_ms = self._copied()
        self._all_tokens, self._all_seconds, self._most = 0, 0.0, {"peak_memory_gib": 0.0, "host_gib": 0.0}
        self._reset_peaks()

    def start(self) -> None:
        """Training goes on from here."""
        self._since = time.perf_counter()

    def stop(self, *, wait: bool) -> None:
        """A step is over. ``wait`` lets the device finish first, so that its work counts as time."""
        if wait and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now

    def read(self) -> dict[str, float]:
        """The measurements since the last one, by the names under which every adapter logs them.

        ``tokens_per_s`` is of this process, padding included; ``peak_memory_gib`` the allocator's high-water mark on
        CUDA and the process's elsewhere; ``host_gib`` the high-water mark of checkpointed activations in host memory;
        ``sent_gib`` what was copied there; ``exposed_copy_ms`` how long computing waited for copies of activations
        in either direction (CUDA only), without those that are still under way, which count the next time.
        """
        seen = self._seen()
        sent_bytes, exposed_ms = self._copied()
        measured = {
            "tokens_per_s": round((seen - self._tokens) / max(self.seconds, 1e-9), 1),
            "peak_memory_gib": round(peak_memory_gib(self.device), 3),
            "host_gib": round(sum(each.store.peak_bytes for each in self.applied) / 2**30, 4),
            "sent_gib": round((sent_bytes - self._sent_bytes) / 2**30, 4),
            "exposed_copy_ms": round(exposed_ms - self._exposed_ms, 2),
        }
        self._all_tokens, self._all_seconds = self._all_tokens + seen - self._tokens, self._all_seconds + self.seconds
        self._most = {name: max(most, measured[name]) for name, most in self._most.items()}
        self.seconds, self._tokens, self._sent_bytes, self._exposed_ms = 0.0, seen, sent_bytes, exposed_ms
        self._reset_peaks()
        return measured

    def summary(self) -> str:
        """The end of a run: a line over everything measured since the meter was made, and one a model whose layers
        are checkpointed, with the plan of its last step and its copies.
        """
        self.read()
        speed = self._all_tokens / max(self._all_seconds, 1e-9)
        parts = [f"{self._all_tokens:,} tokens in {self._all_seconds:,.2f} s of training", f"{speed:,.0f} tokens/s"]
        if self.device.type != "cpu":
            parts.append(f"peak {self._most['peak_memory_gib']:.2f} GiB on {self.device}")
        parts.append(f"host {peak_process_gib():.2f} GiB, {self._most['host_gib']:.2f} of them activations")
        rows = [row for each in self.applied if (row := each.checkpointing.row()).state == "on"]
        return "\n".join([f"unsloth-plugins: {'; '.join(parts)}", *(f"  {row.feature}: {row.detail}" for row in rows)])

    def _seen(self) -> int:
        return sum(each.tokens_seen for each in self.applied)

    def _copied(self) -> tuple[int, float]:
        """Bytes sent to the host, and milliseconds that computing waited for copies, so far."""
        stores = [each.store for each in self.applied]
        return sum(store.sent_bytes for store in stores), sum(store.copy_ms()[1] for store in stores)

    def _reset_peaks(self) -> None:
        for each in self.applied:
            each.store.reset_peak()
