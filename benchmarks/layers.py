"""Norms, rotary embedding and gated activations: ours, transformers' own and Liger's, bf16, forward and backward.

    python -m benchmarks layers --tokens 2048,8192,32768 --json FILE    (needs a CUDA device)

The shapes are Mistral-7B's (`wide` rows of 4096, 32 query and 8 key heads of 128, inner size 14336) and gpt-oss-20b's
(rows of 2880, 64 and 8 heads of 64). Norm weights are frozen as in LoRA, and trained in the rows whose op ends in
`_trained`. GB/s count each input and output once: what a perfect kernel would move, whatever an implementation does.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from benchmarks import rows
from benchmarks.attention import milliseconds, numbers
from unsloth_plugins.core.layers import gated, rms_norm, rope

Tensors = list[torch.Tensor]
Run = Callable[..., Any]


def _random(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(grad)


def _norms(tokens: int, size: int, trained: bool) -> tuple[Tensors, dict[str, Run], int]:
    module: Any = modeling_llama.LlamaRMSNorm(size, eps=1e-5).to("cuda", torch.bfloat16)
    weight = module.weight.requires_grad_(trained)
    x = _random(1, tokens, size)
    runs: dict[str, Run] = {
        "ours": lambda x: rms_norm(x, weight, eps=1e-5, implementation="triton"),
        "transformers": module,
    }
    try:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        runs["liger"] = lambda x: LigerRMSNormFunction.apply(x, weight, 1e-5, 0.0, "llama", False)
    except ImportError:
        pass
    return [x], runs, x.numel()


def _residual_norms(tokens: int, size: int, trained: bool) -> tuple[Tensors, dict[str, Run], int]:
    module: Any = modeling_llama.LlamaRMSNorm(size, eps=1e-5).to("cuda", torch.bfloat16)
    weight = module.weight.requires_grad_(trained)
    x, residual = _random(1, tokens, size), _random(1, tokens, size)

    def stock(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return module(total), total

    runs: dict[str, Run] = {
        "ours": lambda x, r: rms_norm(x, weight, eps=1e-5, residual=r, implementation="triton"),
        "transformers": stock,
    }
    try:
        from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction

        runs["liger"] = lambda x, r: LigerFusedAddRMSNormFunction.apply(x, r, weight, 1e-5, 0.0, "llama", False)
    except ImportError:
        pass
    return [x, residual], runs, 2 * x.numel()


def _rotary(tokens: int, heads: int, kv_heads: int, size: int) -> tuple[Tensors, dict[str, Run], int]:
    per_pair = heads == 64  # gpt-oss
    angle = torch.rand(1, tokens, size // 2, device="cuda")
    angle = angle if per_pair else torch.cat((angle, angle), -1)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    q, k = _random(1, tokens, heads, size), _random(1, tokens, kv_heads, size)

    def heads_first(run: Run) -> Run:
        return lambda q, k: run(q.transpose(1, 2), k.transpose(1, 2))

    stock = (modeling_gpt_oss if per_pair else modeling_llama).apply_rotary_pos_emb
    runs = {
        "ours": heads_first(lambda q, k: rope(q, k, cos, sin, per_pair=per_pair, implementation="triton")),
        "transformers": heads_first(lambda q, k: stock(q, k, cos, sin)),
    }
    try:
        from liger_kernel.ops.rope import LigerRopeFunction

        if not per_pair:  # it overwrites q and k
            runs["liger"] = heads_first(lambda q, k: LigerRopeFunction.apply(q, k, cos, sin))
    except ImportError:
        pass
    return [q, k], runs, q.numel() + k.numel()


def _gates(tokens: int, size: int, activation: Any) -> tuple[Tensors, dict[str, Run], int]:
    gate, up = _random(1, tokens, size), _random(1, tokens, size)
    name = "silu" if activation == "silu" else "gelu_pytorch_tanh"
    small = LlamaConfig(hidden_size=16, intermediate_size=16, num_attention_heads=1, hidden_act=name)
    act_fn = modeling_llama.LlamaMLP(small).act_fn
    runs: dict[str, Run] = {
        "ours": lambda g, u: gated(g, u, activation=activation, implementation="triton"),
        "transformers": lambda g, u: act_fn(g) * u,
    }
    try:
        from liger_kernel.ops.geglu import LigerGELUMulFunction
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        other = LigerSiLUMulFunction if activation == "silu" else LigerGELUMulFunction
        runs["liger"] = lambda g, u: other.apply(g, u)
    except ImportError:
        pass
    return [gate, up], runs, 2 * gate.numel()


# Name: what makes it for a number of tokens, and the elements of its output over those of its inputs.
OPS: dict[str, tuple[Callable[[int], tuple[Tensors, dict[str, Run], int]], float]] = {
    "rms_norm 4096": (lambda n: _norms(n, 4096, False), 1),
    "rms_norm 2880": (lambda n: _norms(n, 2880, False), 1),
    "rms_norm_trained 4096": (lambda n: _norms(n, 4096, True), 1),
    "rms_norm_residual 4096": (lambda n: _residual_norms(n, 4096, False), 1),
    "rope 32x8x128": (lambda n: _rotary(n, 32, 8, 128), 1),
    "rope 64x8x64": (lambda n: _rotary(n, 64, 8, 64), 1),
    "swiglu 14336": (lambda n: _gates(n, 14336, "silu"), 0.5),
    "geglu 14336": (lambda n: _gates(n, 14336, "gelu_tanh"), 0.5),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--tokens", type=numbers, default=[2048, 8192, 32768], help="rows of each op")
    parser.add_argument("--ops", default="", help=f"names that start with one of these, of {', '.join(OPS)}")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def _measure(leaves: Tensors, run: Run, elements: int, more: float, repeats: int) -> dict[str, float]:
    outputs = run(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    weights = [torch.randn_like(x) for x in outputs]
    del outputs

    def both() -> None:
        out = run(*leaves)
        torch.autograd.grad(out if isinstance(out, tuple) else (out,), leaves, weights)

    fwd, fwd_bwd = milliseconds(lambda: run(*leaves), repeats), milliseconds(both, repeats)
    size = elements * 2  # bf16
    moved = size * (1 + more) + size * (
        2 + more
    )  # backward reads the inputs and the gradient, writes as many as inputs
    return {"fwd_ms": round(fwd, 4), "fwd_bwd_ms": round(fwd_bwd, 4), "gb_s": round(moved / fwd_bwd / 1e6, 1)}


def run(options: argparse.Namespace) -> int:
    """Measure every op and implementation and print its rows as they come."""
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device; got none. This benchmark measures GPU kernels.")
    common = rows.common("layers", options.commit)
    wanted = tuple(name for name in options.ops.split(",") if name) or ("",)
    out: list[dict[str, Any]] = []
    for name, (make, more) in OPS.items():
        if not name.startswith(wanted):
            continue
        op, shape = name.split()
        for tokens in options.tokens:
            gc.collect()
            torch.cuda.empty_cache()
            leaves, runs, elements = make(tokens)
            for impl, function in runs.items():
                try:
                    result: dict[str, Any] = _measure(leaves, function, elements, more, options.repeats)
                except (RuntimeError, torch.OutOfMemoryError, TypeError) as error:
                    result = {"error": str(error).splitlines()[0]}
                out.append({**common, "op": op, "shape": f"{tokens}x{shape}", "impl": impl, **result})
                rows.write(out, options.json)
            print(rows.table(out[-len(runs) :], ("op", "shape", "impl", "fwd_ms", "fwd_bwd_ms", "gb_s")), flush=True)
    return 0
