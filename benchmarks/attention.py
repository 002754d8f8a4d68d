"""Sink attention against PyTorch's own attention kernels, forward and backward, bf16, one row of tokens.

    python -m benchmarks attention --seq 8192,32768 --head-dim 64 --window 128,0 --json FILE    (needs a CUDA device)
    python -m benchmarks attention --seq 32768 --head-dim 64 --window 128,0 --sweep
    python -m benchmarks attention --seq 1024,8192,32768 --decode

Window 0 is full causal attention. Head size 64 is measured with gpt-oss's 64 query and 8 key/value heads, any other
with 32 and 8. `sdpa_flash` and `sdpa_cudnn` know no sink and no window; `flex` gets the sink through its normaliser.
TFLOP/s count two products forward and five backward over the pairs of tokens that see each other, whatever a kernel
really computes. `--decode` times one new token against so many cached ones, without gradients, for batches of 1 and 8,
against what transformers' gpt-oss computes in eager mode. `--sweep` times every candidate of
core/sink_attention/triton_tiles.py kernel by kernel instead.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks import rows
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import documents_from_cu_seqlens, sink_attention
from unsloth_plugins.core.sink_attention.backends import Backend

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Problem:
    """Inputs of one measurement: one row of ``length`` tokens, packed or not."""

    def __init__(self, length: int, head_dim: int, window: int, packed: bool) -> None:
        self.length, self.head_dim, self.window = length, head_dim, window
        self.heads, self.kv_heads = (64, 8) if head_dim == 64 else (32, 8)
        generator = torch.Generator("cuda").manual_seed(length)
        shapes = [(1, length, heads, head_dim) for heads in (self.heads, self.kv_heads, self.kv_heads, self.heads)]
        q, k, v, self.weight = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator) for shape in shapes
        )
        self.inputs = [x.requires_grad_() for x in (q, k, v, torch.randn(self.heads, device="cuda"))]
        self.documents_BS: torch.Tensor | None = None
        lengths = [length]
        if packed:
            # Uneven documents: 1/2, 1/4, 1/8 and twice 1/16 of the row.
            lengths = [length // 2, length // 4, length // 8, length // 16]
            lengths.append(length - sum(lengths))
            boundaries = torch.tensor([0, *lengths], device="cuda").cumsum(0)
            self.documents_BS = documents_from_cu_seqlens(boundaries, length)
        reach = window or length
        self.pairs = sum(min(n, reach) * (2 * n - min(n, reach) + 1) // 2 for n in lengths)


def ours(backend: Backend) -> Callable[[Problem], Run]:
    """The op with one backend."""

    def make(problem: Problem) -> Run:
        documents_BS, window = problem.documents_BS, problem.window or None
        return lambda *x: sink_attention(*x, window=window, documents_BS=documents_BS, backend=backend)  # type: ignore[return-value]

    return make


def sdpa(backend: SDPBackend) -> Callable[[Problem], Run | None]:
    """PyTorch's scaled_dot_product_attention by one backend; full causal attention only, without the sink."""

    def make(problem: Problem) -> Run | None:
        if problem.window or problem.documents_BS is not None:
            return None

        def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)

        return run

    return make


def flex(problem: Problem) -> Run:
    """Compiled flex attention; the sink scales the output by sigmoid(lse - sink)."""
    window, documents_BS = problem.window, problem.documents_BS

    def allowed(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        keep = i >= j
        if window:
            keep = keep & (i - j < window)
        if documents_BS is not None:
            keep = keep & (documents_BS[0, i] == documents_BS[0, j])
        return keep

    torch.compiler.reset()  # every shape compiles anew, and there is a limit per function
    mask = create_block_mask(allowed, None, None, problem.length, problem.length, device="cuda", _compile=True)
    compiled = torch.compile(flex_attention, dynamic=False)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        o, lse = compiled(*heads_first, block_mask=mask, enable_gqa=True, return_lse=True)
        return (o * torch.sigmoid(lse - sink[:, None]).unsqueeze(-1).to(o.dtype)).transpose(1, 2)

    return run


IMPLEMENTATIONS: dict[str, Callable[[Problem], Run | None]] = {
    "auto": ours("auto"),
    "triton": ours("triton"),
    "fa4": ours("fa4"),
    "cudnn": ours("cudnn"),
    "sdpa_flash": sdpa(SDPBackend.FLASH_ATTENTION),
    "sdpa_cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
}


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of one of several calls in a row, by CUDA events, after two that warm up."""
    for _ in range(2):
        function()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        function()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in itertools.pairwise(events))


def measure(problem: Problem, run: Run, repeats: int) -> dict[str, float]:
    """Times and rates of one implementation. The forward pass is measured as in training, saving for backward."""
    leaves = problem.inputs

    def both() -> None:
        torch.autograd.grad(run(*leaves), leaves, problem.weight, allow_unused=True)

    fwd, fwd_bwd = milliseconds(lambda: run(*leaves), repeats), milliseconds(both, repeats)
    flops = 4 * problem.heads * problem.head_dim * problem.pairs
    return {
        "fwd_ms": round(fwd, 4),
        "fwd_bwd_ms": round(fwd_bwd, 4),
        "fwd_tflops": round(flops / fwd / 1e9, 1),
        "fwd_bwd_tflops": round(3.5 * flops / fwd_bwd / 1e9, 1),
    }


def sweep(problem: Problem, repeats: int) -> None:
    """Time each kernel with each candidate of the table, and print them, the fastest first."""
    from unsloth_plugins.core.sink_attention.masks import visible_range
    from unsloth_plugins.core.sink_attention.triton_bwd import dq_launch
    from unsloth_plugins.core.sink_attention.triton_dkdv import dkdv_launch
    from unsloth_plugins.core.sink_attention.triton_fwd import forward_launch
    from unsloth_plugins.core.sink_attention.triton_op import run
    from unsloth_plugins.core.sink_attention.triton_tiles import Kernel, configs, is_narrow

    q, k, v, sink = (x.detach() for x in problem.inputs)
    window = problem.window or None
    first_BS, last_BS = visible_range(problem.documents_BS, None, window)
    o, dq, dk, dv = (torch.empty_like(x) for x in (q, q, k, v))
    lse = torch.empty(1, problem.heads, problem.length, device="cuda")
    delta = torch.zeros_like(lse)
    narrow = is_narrow(window)
    shared: dict[str, Any] = {"window": window, "scale": problem.head_dim**-0.5, "softcap": None, "narrow": narrow}
    backward = (q, k, v, problem.weight, lse, delta)
    launches: dict[Kernel, Callable[..., Any]] = {
        "forward": lambda tile: forward_launch(q, k, v, sink, first_BS, None, o, lse, tile=tile, **shared),
        "dq": lambda tile: dq_launch(*backward, first_BS, None, dq, tile=tile, **shared),
        "dkdv": lambda tile: dkdv_launch(*backward, last_BS, None, dk, dv, tile=tile, **shared),
    }
    products = {"forward": 2, "dq": 3, "dkdv": 4}
    for kernel, launch in launches.items():
        results = []
        for tile in configs(
            kernel,
            head_size=problem.head_dim,
            dtype=q.dtype,
            capability=torch.cuda.get_device_capability(),
            narrow=narrow,
            queries=problem.length,
        ):
            one = launch(tile)
            results.append((milliseconds(lambda one=one: run(one, q.device), repeats), tile))  # type: ignore[misc]
        best, *others = sorted(results, key=lambda result: result[0])
        work = 2 * products[kernel] * problem.heads * problem.head_dim * problem.pairs
        print(f"  {kernel:<8} best  {best[0]:9.3f} ms {work / best[0] / 1e9:7.1f} TFLOP/s  {best[1]}")
        for time, tile in others:
            print(f"  {'':<8}       {time:9.3f} ms {work / time / 1e9:7.1f} TFLOP/s  {tile}", flush=True)


def eager_decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor) -> torch.Tensor:
    """One query a row [B, H, 1, D] against [B, K, S, D], every step materialised as in transformers' gpt-oss."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
    column = sink.reshape(1, -1, 1, 1).expand(logits.shape[0], -1, 1, 1)
    logits = torch.cat([logits, column], dim=-1)
    logits = logits - logits.max(dim=-1, keepdim=True).values
    return F.softmax(logits, dim=-1, dtype=logits.dtype)[..., :-1] @ v


@torch.no_grad()
def decode(length: int, batch: int, repeats: int) -> dict[str, float]:
    """Milliseconds of one new token at gpt-oss's shape, by implementation."""
    q, k, v = (torch.randn(batch, h, s, 64, device="cuda").bfloat16() for h, s in ((64, 1), (8, length), (8, length)))
    sink = torch.randn(64, device="cuda").bfloat16()
    rows_first = [x.transpose(1, 2) for x in (q, k, v)]  # as views: a cache is stored heads first
    return {
        "triton": milliseconds(lambda: sink_attention(*rows_first, sink, backend="triton"), repeats),
        "eager": milliseconds(lambda: eager_decode(q, k, v, sink), repeats),
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seq", type=numbers, default=[8192, 32768], help="lengths in tokens")
    parser.add_argument("--head-dim", type=numbers, default=[64], help="head sizes")
    parser.add_argument("--window", type=numbers, default=[128, 0], help="windows, 0 for full attention")
    parser.add_argument(
        "--packed", choices=("no", "yes", "both"), default="no", help="documents in the row (%(default)s)"
    )
    parser.add_argument("--impl", default=",".join(IMPLEMENTATIONS), help="implementations (%(default)s)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--decode", action="store_true", help="one new token against a cache instead")
    parser.add_argument("--sweep", action="store_true", help="time the candidate configurations of our kernels")
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def run(options: argparse.Namespace) -> int:
    """Measure every combination and print its rows as they come."""
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device; got none. This benchmark measures GPU kernels.")
    common = rows.common("attention", options.commit)
    out: list[dict[str, Any]] = []
    if options.decode:
        for length in options.seq:
            for batch in (1, 8):
                for name, took in decode(length, batch, options.repeats).items():
                    row = {"impl": name, "seq_len": length, "queries": 1, "batch": batch, "fwd_ms": round(took, 4)}
                    print(row, flush=True)
                    out.append(common | row)
        rows.write(out, options.json)
        return 0
    packings = {"no": [False], "yes": [True], "both": [False, True]}[options.packed]
    shapes = [(s, d, w, p) for d in options.head_dim for w in options.window for p in packings for s in options.seq]
    for length, head_dim, window, packed in shapes:
        shape = {"seq_len": length, "head_dim": head_dim, "window": window, "packed": packed}
        print(" ".join(f"{name}={value}" for name, value in shape.items()), flush=True)
        problem = Problem(length, head_dim, window, packed)
        if options.sweep:
            sweep(problem, options.repeats)
            continue
        for name in options.impl.split(","):
            gc.collect()
            torch.cuda.empty_cache()
            try:
                implementation = IMPLEMENTATIONS[name](problem)
                if implementation is None:
                    continue
                result: dict[str, Any] = measure(problem, implementation, options.repeats)
            except (RuntimeError, torch.OutOfMemoryError, UnsupportedError) as error:
                result = {"error": str(error).splitlines()[0]}
            print(f"  {name:<11}" + "  ".join(f"{key} {value}" for key, value in result.items()), flush=True)
            out.append({**common, "impl": name, **shape, **result})
            rows.write(out, options.json)
    return 0
