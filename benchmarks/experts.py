"""The expert blocks of gpt-oss, router included, with LoRA: ours beside transformers' grouped_mm and PEFT.

    python -m benchmarks experts --tokens 8192,32768 --json FILE    (numbers mean something on a CUDA device)

A stack of blocks runs forward, then backward, and times are per block: streamed weights need a next block to be
fetched for. Weights are `mxfp4` and `streamed` (packed; on the device, on the host) and `bf16`. `skewed` routing biases
the router so that some experts get several times the tokens. TFLOP/s count the GEMMs that an implementation executes,
by the formulas that are printed; what is decoded, sorted and activated is not in them.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM

import unsloth_plugins
from benchmarks import rows
from benchmarks.attention import numbers
from benchmarks.models import SIZES, build, skew_router

_COLUMNS = ("impl", "weights", "routing", "tokens", "fwd_ms", "bwd_ms", "fwd_tflops", "bwd_tflops", "peak_gib")
KINDS = (("ours", "mxfp4"), ("ours", "streamed"), ("ours", "bf16"), ("transformers", "bf16"))
FORMULAS = {
    "ours": (
        "fwd 2M(HJ + IH + r(J + 2H + I)), bwd 2M(2HJ + IH + r(3J + 5H + 3I)): "
        "W and B in one GEMM, the first projection computed again in backward, the second not"
    ),
    "transformers": (
        "fwd 2M(HJ + IH) + 2Er(HJ + IH), bwd 4M(HJ + IH) + 4Er(HJ + IH): "
        "W + BA is built for every expert, and has a gradient of its own"
    ),
}
LEGEND = "M = tokens x experts a token, H hidden size, I expert size, J = 2I, E experts, r LoRA rank"


def flops(impl: str, *, m: int, h: int, i: int, e: int, r: int) -> tuple[int, int]:
    """Floating-point operations of the GEMMs of one block, forward and backward; see ``FORMULAS``."""
    j = 2 * i
    base = h * j + i * h
    if impl == "ours":
        rank = -(-r // 8) * 8
        forward = base + rank * (j + 2 * h + i)
        backward = 2 * h * j + i * h + rank * (3 * j + 5 * h + 3 * i)
        return 2 * m * forward, 2 * m * backward
    return 2 * (m + e * r) * base, 4 * (m + e * r) * base


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=sorted(SIZES), default="gpt-oss-20b", help="whose width (%(default)s)")
    parser.add_argument("--tokens", type=numbers, default=[8192, 32768], help="rows of each block")
    parser.add_argument("--blocks", type=int, default=4, help="in the stack (%(default)s)")
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--routing", type=_names, default="balanced,skewed", help="of balanced, skewed (%(default)s)")
    parser.add_argument("--kinds", type=_names, default="", help=f"of {', '.join(map('-'.join, KINDS))} (all)")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def stack(config: Any, impl: str, weights: str, routing: str, rank: int, device: torch.device) -> list[nn.Module]:
    """The expert blocks of a model with LoRA on all experts; B is not zero."""
    if weights == "bf16":
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
        try:
            with device:
                model: Any = GptOssForCausalLM(config)
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(False).normal_(std=0.02)
                if name.endswith("router.bias") and routing == "skewed":
                    parameter.copy_(skew_router(parameter.shape[0]))
        model.set_experts_implementation("grouped_mm")
    else:
        model = build(config, weights, routing, device)
        if device.type != "cuda":
            model.float()
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapted: Any = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_parameters=parameters))
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter, std=0.01)
    if impl == "ours":
        kept = "streamed" if weights == "streamed" else "resident"
        unsloth_plugins.apply(adapted, weights=kept)
    return [layer.mlp for layer in adapted.get_base_model().model.layers]


def _now(device: torch.device) -> Callable[[], float]:
    """Milliseconds since now, when all that was started is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()

    def since() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) * 1e3

    return since


def measure(blocks: list[nn.Module], tokens: int, width: int, repeats: int) -> dict[str, Any]:
    """Milliseconds a block and the peak of a pass, after two passes that warm up."""
    device = next(p for p in blocks[0].parameters() if p.is_floating_point()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(1, tokens, width, device=device, dtype=dtype, requires_grad=True)
    trained = [p for block in blocks for p in block.parameters() if p.requires_grad]
    forward, backward = [], []
    for turn in range(repeats + 2):
        if turn == 2 and device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        since, y = _now(device), x
        for block in blocks:
            y = y + block(y)[0]
        forward.append(since())
        since = _now(device)
        torch.autograd.grad(y, [x, *trained], torch.ones_like(y))
        backward.append(since())
        del y
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
    each = {"fwd_ms": forward[2:], "bwd_ms": backward[2:]}
    found: dict[str, Any] = {name: round(statistics.median(ms) / len(blocks), 4) for name, ms in each.items()}
    return found | {"peak_gib": peak and round(peak, 3)}


def run(options: argparse.Namespace) -> int:
    """Measure every kind at every length, print and write."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kinds = [kind for kind in KINDS if not options.kinds or "-".join(kind) in options.kinds]
    unknown = set(options.kinds) - set(map("-".join, KINDS)) or set(options.routing) - {"balanced", "skewed"}
    if unknown:
        raise SystemExit(f"expected --kinds and --routing as in --help; got {', '.join(sorted(unknown))}")
    size = SIZES[options.model] | {"num_hidden_layers": options.blocks, "vocab_size": 512}
    config = GptOssConfig(**size, pad_token_id=0)  # type: ignore[arg-type]
    head = rows.common("experts", options.commit) | {"model": options.model, "blocks": options.blocks}
    head |= {"lora_rank": options.lora_rank}
    out: list[dict[str, Any]] = []
    for routing in options.routing:
        for impl, weights in kinds:
            blocks = stack(config, impl, weights, routing, options.lora_rank, device)
            for tokens in options.tokens:
                row = head | {"impl": impl, "weights": weights, "routing": routing, "tokens": tokens}
                try:
                    row |= measure(blocks, tokens, config.hidden_size, options.repeats)
                    row |= _rates(row, config)
                except torch.OutOfMemoryError:
                    row["oom"] = True
                out.append(row)
                rows.write(out, options.json)
                print(rows.table([row], _COLUMNS), flush=True)
            del blocks
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    for impl, formula in FORMULAS.items():
        print(f"{impl}: {formula}")
    print(LEGEND)
    print(rows.table(out, _COLUMNS))
    return 0


def _rates(row: dict[str, Any], config: Any) -> dict[str, float]:
    counts = flops(
        row["impl"],
        m=row["tokens"] * config.num_experts_per_tok,
        h=config.hidden_size,
        i=config.intermediate_size,
        e=config.num_local_experts,
        r=row["lora_rank"],
    )
    return {
        f"{way}_tflops": round(n / row[f"{way}_ms"] / 1e9, 1) for way, n in zip(("fwd", "bwd"), counts, strict=True)
    }
