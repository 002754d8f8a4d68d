"""The loss head, hidden states to their gradient, bf16, frozen head: ours, torch's own, Liger and cut-cross-entropy.

    python -m benchmarks loss --tokens 8192,32768 --vocab 128256,201088 --json FILE    (needs a CUDA device)

Peak GiB is what a call adds to inputs and weights. cut-cross-entropy runs with its gradient filter off.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks import rows
from benchmarks.attention import milliseconds, numbers
from unsloth_plugins.core.loss import linear_cross_entropy

Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def implementations() -> dict[str, Run]:
    """Those that are installed."""
    runs: dict[str, Run] = {
        "ours": lambda h, w, y: linear_cross_entropy(h, w, y),
        "torch": lambda h, w, y: F.cross_entropy(F.linear(h, w).float(), y),
    }
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

        def liger(h: torch.Tensor, w: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            out: Any = LigerFusedLinearCrossEntropyFunction.apply(h, w, y)
            return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

        runs["liger"] = liger
    except ImportError:
        pass
    try:
        import cut_cross_entropy

        runs["cce"] = lambda h, w, y: cut_cross_entropy.linear_cross_entropy(h, w, y, filter_eps=None)
    except ImportError:
        pass
    return runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=numbers, default=[8192, 32768])
    parser.add_argument("--vocab", type=numbers, default=[128256, 201088])
    parser.add_argument("--hidden", type=int, default=2880)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def run(options: argparse.Namespace) -> int:
    """Measure every combination and print its rows as they come."""
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device; got none. This benchmark measures GPU kernels.")
    common = rows.common("loss", options.commit)
    out: list[dict[str, Any]] = []
    for vocab in options.vocab:
        weight = torch.randn(vocab, options.hidden, device="cuda", dtype=torch.bfloat16) * 0.02
        for tokens in options.tokens:
            hidden = torch.randn(tokens, options.hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            labels = torch.randint(0, vocab, (tokens,), device="cuda")
            for impl, function in implementations().items():
                gc.collect()
                torch.cuda.empty_cache()

                def both(function: Run = function, inputs: Any = (hidden, weight, labels)) -> None:
                    torch.autograd.grad(function(*inputs), inputs[0])

                try:
                    both()
                    torch.cuda.reset_peak_memory_stats()
                    before = torch.cuda.memory_allocated()
                    result: dict[str, Any] = {"fwd_bwd_ms": round(milliseconds(both, options.repeats), 3)}
                    result["peak_gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
                except (RuntimeError, TypeError) as error:
                    result = {"error": str(error).splitlines()[0]}
                out.append({**common, "tokens": tokens, "vocab": vocab, "impl": impl, **result})
                print(rows.table(out[-1:], ("tokens", "vocab", "impl", "fwd_bwd_ms", "peak_gib")), flush=True)
                rows.write(out, options.json)
    return 0
