"""Offloaded against plain checkpointing: a stack of decoder layers of true width, forward and backward.

All implementations run the same layers in one process, by turns, so that a drift of the machine meets all. Times are
medians; ``spread`` is half the distance of the quartiles over the median. ``overhead`` compares pair by pair.
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
from torch import nn
from torch.utils.checkpoint import checkpoint

import unsloth_plugins
from benchmarks import rows
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.checkpoint import LayerCheckpoint
from unsloth_plugins.core.offload.host import HostStore

_COLUMNS = ("impl", "policy", "ctx", "step_ms", "spread", "overhead", "peak_gib", "host_gib", "exposed_copy_ms")
MODELS = ("mistral-7b", "gpt-oss-20b", "tiny")
POLICIES = ("offload_all", "min_memory", "auto")
PEERS = ("save_on_cpu",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=MODELS, default="mistral-7b")
    parser.add_argument("--layers", type=int, default=8, help="of true width (%(default)s)")
    parser.add_argument("--ctx", type=_numbers, default="2048,8192,32768", help="lengths in tokens (%(default)s)")
    parser.add_argument("--pairs", type=int, default=20, help="turns of each implementation (%(default)s)")
    parser.add_argument("--policies", type=_names, default="offload_all,auto", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--peers", type=_names, default="", help=f"any of {', '.join(PEERS)}")
    parser.add_argument("--cap-gib", type=float, help="memory cap of the device")
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def stack(model: str, layers: int, device: torch.device) -> Any:
    """A causal LM of ``layers`` layers with a tiny vocabulary; random weights, of which the norms train."""
    from transformers import GptOssConfig, GptOssForCausalLM, MistralConfig, MistralForCausalLM

    common: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 512, "pad_token_id": 0, "use_cache": False}
    if model == "gpt-oss-20b":
        config: Any = GptOssConfig(**common, num_local_experts=32)
        kind: Any = GptOssForCausalLM
    else:
        size = {} if model == "mistral-7b" else dict(hidden_size=64, intermediate_size=96, num_attention_heads=4)
        sizes = size | ({} if model == "mistral-7b" else {"num_key_value_heads": 2, "head_dim": 16})
        config = MistralConfig(**common, **sizes, sliding_window=None)
        config._attn_implementation = "sdpa"
        kind = MistralForCausalLM
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            made = kind(config)
    finally:
        torch.set_default_dtype(before)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_("norm" in name)
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.02)
    unsloth_plugins.apply(made, gradient_checkpointing=False)  # attention and experts, the same for all
    return made.train()


def plain(function: Callable[..., Any], *args: Any) -> Any:
    """torch's checkpointing, as every implementation but ours uses it."""
    return checkpoint(function, *args, use_reentrant=False)


class Implementation:
    """One way to checkpoint the layers of the stack."""

    def __init__(self, name: str, policy: str | None, model: Any) -> None:
        self.name, self.policy, self.model = name, policy, model
        self.times: list[float] = []
        self.copies_ms: list[float] = []
        self.exposed_ms: list[float] = []
        self.ms_before = 0.0, 0.0
        self.peak_gib, self.host_bytes, self.stored_bytes, self.chosen = 0.0, 0, 0, ""
        self.context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
        if name == "save_on_cpu":
            self.context = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=torch.cuda.is_available())
        count = len(model.model.layers)
        self.budget: MemoryBudget | None = None
        self.functions: list[Callable[..., Any]] = [plain] * count
        if policy is not None:
            self.store = HostStore.for_policy(policy, min_bytes=0)
            self.store.layers = count
            if policy == "auto":
                self.budget = MemoryBudget()
                self.budget.layers = count
            keywords = {"use_reentrant": False}
            self.functions = [LayerCheckpoint(self.store, keywords, self.budget, index) for index in range(count)]

    def step(self, ids: torch.Tensor) -> None:
        """One forward and backward, timed."""
        device = ids.device
        for layer, function in zip(self.model.model.layers, self.functions, strict=True):
            layer.gradient_checkpointing, layer._gradient_checkpointing_func = True, function
        _synchronise(device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        if self.budget is not None:
            self.budget.begin(device, ids.numel())
        with self.context():
            self.model.model(input_ids=ids).last_hidden_state.sum().backward()
        _synchronise(device)
        self.times.append((time.perf_counter() - started) * 1e3)
        if device.type == "cuda":
            self.peak_gib = max(self.peak_gib, torch.cuda.max_memory_allocated() / 2**30)
        self.model.zero_grad(set_to_none=True)
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
        ours = self.name == "ours"
        return {
            "impl": self.name,
            "policy": self.policy,
            "step_ms": round(median, 3),
            "spread": round((quartiles[2] - quartiles[0]) / 2 / median, 4),
            "overhead": round(statistics.median(a / b for a, b in zip(times, base, strict=True)) - 1, 4),
            "pairs": len(times),
            "peak_gib": round(self.peak_gib, 3),
            "host_gib": round(self.host_bytes / 2**30, 4) if ours else None,
            "stored_gib": round(self.stored_bytes / 2**30, 4) if ours else None,
            "copy_ms": round(statistics.median(self.copies_ms[-len(base) :]), 3) if ours else None,
            "exposed_copy_ms": round(statistics.median(self.exposed_ms[-len(base) :]), 3) if ours else None,
            "chosen": self.chosen or None,
        }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(model: Any, ctx: int, pairs: int, kinds: list[tuple[str, str | None]]) -> list[dict[str, Any]]:
    """Rows of all implementations at one length; an ``oom`` row where one did not fit."""
    device = next(model.parameters()).device
    ids = torch.randint(3, 512, (1, ctx), device=device, generator=torch.Generator(device).manual_seed(ctx))
    found = []
    turns = [Implementation(name, policy, model) for name, policy in kinds]
    failed: set[int] = set()
    for turn in range(pairs + 3):  # the first three warm up, and let `auto` see a step
        order = range(len(turns)) if turn % 2 else reversed(range(len(turns)))
        for index in order:
            if index in failed:
                continue
            try:
                turns[index].step(ids)
            except torch.OutOfMemoryError:
                failed.add(index)
                model.zero_grad(set_to_none=True)
                gc.collect()
                torch.cuda.empty_cache()
        if turn == 2:
            for each in turns:
                each.times, each.peak_gib = [], 0.0
    base = next(each.times for each in turns if each.name == "checkpoint")
    for index, each in enumerate(turns):
        if index in failed or 0 in failed:
            found.append({"impl": each.name, "policy": each.policy, "oom": index in failed})
        else:
            found.append(each.row(base))
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
    model = stack(options.model, options.layers, device)
    head = rows.common("offload", options.commit) | {"model": options.model, "layers": options.layers}
    head |= {"cap_gib": options.cap_gib}
    out: list[dict[str, Any]] = []
    for ctx in options.ctx:
        found = measure(model, ctx, options.pairs, kinds)
        out += [head | {"ctx": ctx} | row for row in found]
        print(rows.table(out[-len(found) :], _COLUMNS), flush=True)
        rows.write(out, options.json)
        gc.collect()
    return 0
