"""Offloaded against plain checkpointing: a stack of layers of true width, forward and backward.

All implementations run the same layers in one process, by turns, so that a drift of the machine meets all. Times are
medians; ``spread`` is half the distance of the quartiles over the median. ``overhead`` compares pair by pair.
``host_gib`` is page-locked memory: ours is what the arena maps, that of peers what torch's allocator has in use.

The peer ``save_on_cpu`` is torch's, around plain checkpointing; ``transformers`` is its
``activation_checkpointing_enable(offload=True)``. Unsloth changes torch and transformers for the whole process, so
``benchmarks step`` runs it, in one of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks import rows
from benchmarks.offload_models import LENGTHS, MODELS, POSITIONS, Checkpoint, Skipped, Stack, UNet, build
from unsloth_plugins.core.offload import HostStore, offload_checkpoint
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.checkpoint import LayerCheckpoint

_COLUMNS = (
    *("model", "ctx", "policy", "impl", "step_ms", "spread", "overhead"),
    *("peak_gib", "host_gib", "exposed_copy_ms", "skipped"),
)
POLICIES = ("offload_all", "min_memory", "auto")
PEERS = ("save_on_cpu", "transformers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=MODELS, default="mistral-7b")
    parser.add_argument("--layers", type=int, help="of true width (8); a UNet has its own")
    lengths = f"tokens, or positions of the UNet's latents ({LENGTHS}; {POSITIONS}); 256K is 262144"
    parser.add_argument("--ctx", type=_numbers, help=lengths)
    parser.add_argument("--pairs", type=int, default=20, help="turns of each implementation (%(default)s)")
    parser.add_argument("--policies", type=_names, default="offload_all,auto", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--peers", type=_names, default="", help=f"any of {', '.join(PEERS)}")
    parser.add_argument("--cap-gib", type=float, help="memory cap of the device")
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def _numbers(text: str) -> list[int]:
    return [int(part.removesuffix("K")) * (1024 if part.endswith("K") else 1) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def plain(function: Callable[..., Any], *args: Any) -> Any:
    """torch's checkpointing, as every implementation but ours uses it."""
    return checkpoint(function, *args, use_reentrant=False)


class Implementation:
    """One way to checkpoint the blocks of the work.

    Raises:
        Skipped: it does not exist here.
    """

    def __init__(self, name: str, policy: str | None, work: Stack | UNet) -> None:
        self.name, self.policy, self.work = name, policy, work
        self.times: list[float] = []
        self.copies_ms: list[float] = []
        self.exposed_ms: list[float] = []
        self.ms_before = 0.0, 0.0
        self.peak_gib, self.host_bytes, self.stored_bytes, self.chosen = 0.0, 0, 0, ""
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if name == "save_on_cpu":
            self.context = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
        self.budget: MemoryBudget | None = None
        self.functions: list[Checkpoint] = [plain] * work.count
        if name == "transformers":
            self.functions = work.offloaded_by_transformers()
        if policy is not None:
            self.store = HostStore.for_policy(policy, min_bytes=0)
            self.functions = self._ours(policy)

    def _ours(self, policy: str) -> list[Checkpoint]:
        if not self.work.alike:
            return [functools.partial(offload_checkpoint, store=self.store)] * self.work.count
        count = self.store.layers = self.work.count
        if policy == "auto":
            self.budget = MemoryBudget()
            self.budget.layers = count
        keywords = {"use_reentrant": False}
        return [LayerCheckpoint(self.store, keywords, self.budget, index) for index in range(count)]

    def step(self, batch: dict[str, Any]) -> None:
        """One forward and backward, timed."""
        device = next(each.device for each in batch.values() if isinstance(each, torch.Tensor))
        self.work.use(self.functions)
        _synchronise(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.reset_peak_host_memory_stats()
        started = time.perf_counter()
        if self.budget is not None:
            self.budget.begin(device, batch["input_ids"].numel())
        with self.context():
            self.work.forward(batch).sum().backward()
        _synchronise(device)
        self.times.append((time.perf_counter() - started) * 1e3)
        self.work.model.zero_grad(set_to_none=True)
        if device.type == "cuda":
            self.peak_gib = max(self.peak_gib, torch.cuda.max_memory_allocated() / 2**30)
            self.host_bytes = torch.cuda.host_memory_stats()["active_bytes.peak"]
        if self.policy is not None:
            copies, exposed = self.store.copy_ms()
            self.copies_ms.append(copies - self.ms_before[0])
            self.exposed_ms.append(exposed - self.ms_before[1])
            self.ms_before = copies, exposed
            self.host_bytes, self.stored_bytes = self.store.mapped_bytes, self.store.peak_bytes
            if self.budget is not None and self.budget.plan is not None:
                self.chosen = self.budget.describe()

    def row(self, base: list[float]) -> dict[str, Any]:
        """What was measured; ``base`` are the times of plain checkpointing at the same turns."""
        times = self.times[-len(base) :]
        median = statistics.median(times)
        quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [median] * 3
        ours = self.policy is not None
        return {
            "impl": self.name,
            "policy": self.policy,
            "step_ms": round(median, 3),
            "spread": round((quartiles[2] - quartiles[0]) / 2 / median, 4),
            "overhead": round(statistics.median(a / b for a, b in zip(times, base, strict=True)) - 1, 4),
            "pairs": len(times),
            "peak_gib": round(self.peak_gib, 3),
            "host_gib": round(self.host_bytes / 2**30, 6),
            "stored_gib": round(self.stored_bytes / 2**30, 6) if ours else None,
            "copy_ms": round(statistics.median(self.copies_ms[-len(base) :]), 3) if ours else None,
            "exposed_copy_ms": round(statistics.median(self.exposed_ms[-len(base) :]), 3) if ours else None,
            "chosen": self.chosen or None,
        }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(work: Stack | UNet, ctx: int, pairs: int, kinds: list[tuple[str, str | None]]) -> list[dict[str, Any]]:
    """Rows of all implementations at one length; an ``oom`` row where one did not fit, or a reason in ``skipped``."""
    batch = work.batch(ctx)
    skipped: dict[int, str] = {}
    turns: dict[int, Implementation] = {}
    for index, (name, policy) in enumerate(kinds):
        try:
            turns[index] = Implementation(name, policy, work)
        except Skipped as reason:
            skipped[index] = str(reason)
    failed: set[int] = set()
    for turn in range(pairs + 3):  # the first three warm up, and let `auto` see a step
        for index in turns if turn % 2 else reversed(turns):
            if index in failed:
                continue
            try:
                turns[index].step(batch)
            except torch.OutOfMemoryError:
                failed.add(index)
                work.model.zero_grad(set_to_none=True)
                gc.collect()
                torch.cuda.empty_cache()
        if turn == 2:
            for each in turns.values():
                each.times, each.peak_gib = [], 0.0
    found: list[dict[str, Any]] = []
    for index, (name, policy) in enumerate(kinds):
        if index in skipped:
            found.append({"impl": name, "policy": policy, "skipped": skipped[index]})
        elif index in failed or 0 in failed:
            found.append({"impl": name, "policy": policy, "oom": index in failed})
        else:
            found.append(turns[index].row(turns[0].times))
    return found


def run(options: argparse.Namespace) -> int:
    """Measure, print and write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.cap_gib and device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory / 2**30
        torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap_gib / total))
    kinds: list[tuple[str, str | None]] = [("checkpoint", None)]
    kinds += [("ours", policy) for policy in options.policies] + [(peer, None) for peer in options.peers]
    unknown = (set(options.policies) - set(POLICIES)) | (set(options.peers) - set(PEERS))
    if unknown:
        raise SystemExit(f"expected policies of {', '.join(POLICIES)} and peers of {', '.join(PEERS)}; got {unknown}")
    work = build(options.model, options.layers, device)
    head = rows.common("offload", options.commit) | {"model": options.model, "layers": work.count}
    head |= {"cap_gib": options.cap_gib}
    out: list[dict[str, Any]] = []
    for ctx in options.ctx or _numbers(LENGTHS if work.alike else POSITIONS):
        found = measure(work, ctx, options.pairs, kinds)
        out += [head | {"ctx": ctx} | row for row in found]
        print(rows.table(out[-len(found) :], _COLUMNS), flush=True)
        rows.write(out, options.json)
        gc.collect()
    return 0
