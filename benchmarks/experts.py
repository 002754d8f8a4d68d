"""The expert blocks of gpt-oss, router included, with LoRA: ours beside transformers' grouped_mm and PEFT.

    python -m benchmarks experts --tokens 8192,32768 --json FILE    (numbers mean something on a CUDA device)
    python -m benchmarks experts --decode

A stack of blocks runs forward, then backward, and times are per block: streamed weights need a next block to be
fetched for. Weights are `mxfp4` and `streamed` (packed; on the device, on the host) and `bf16`. `skewed` routing biases
the router so that some experts get several times the tokens. TFLOP/s count the GEMMs that an implementation executes,
by the formulas that are printed; what is decoded, sorted and activated is not in them. `working_gib` is the peak of one
block alone without what was there before, its output and the gradient of its input; adapters' gradients are in it.

Rows of `dequantise` time the MXFP4 kernel on the first projection, as training calls it; GB/s count bytes read and
written, beside a copy of as many. `--decode` times one new token of batches of 1 and 8 instead, without gradients, with
adapters and without; the peers are transformers' loop over the chosen experts and its batched_mm.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM

import unsloth_plugins
from benchmarks import rows
from benchmarks.attention import milliseconds, numbers
from benchmarks.models import SIZES, build, skew_router
from unsloth_plugins.core.mxfp4 import PackedWeight
from unsloth_plugins.core.mxfp4.codec import BLOCK

_COLUMNS = ("impl", "weights", "routing", "tokens", "fwd_ms", "bwd_ms", "fwd_tflops", "bwd_tflops", "peak_gib")
_COLUMNS += ("working_gib",)
_DEQUANTISE = ("op", "impl", "dtype", "ms", "gb_s")
_DECODE = ("op", "impl", "weights", "routing", "lora_rank", "batch", "ms")
KINDS = (("ours", "mxfp4"), ("ours", "streamed"), ("ours", "bf16"), ("transformers", "bf16"))
BATCHES = (1, 8)
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
    parser.add_argument("--decode", action="store_true", help="one new token of a batch instead")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def stack(
    config: Any, impl: str, weights: str, routing: str, rank: int, device: torch.device, stock: str = "grouped_mm"
) -> list[nn.Module]:
    """The expert blocks of a model with LoRA on all experts; B is not zero. Rank 0 is no LoRA.

    ``stock``: how transformers' own experts are computed.
    """
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
        model.set_experts_implementation(stock)
    else:
        model = build(config, weights, routing, device)
        if device.type != "cuda":
            model.float()
    base = model
    if rank:
        parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        model = get_peft_model(model, LoraConfig(r=rank, lora_alpha=rank, target_parameters=parameters))
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter, std=0.01)
    if impl == "ours":
        kept = "streamed" if weights == "streamed" else "resident"
        unsloth_plugins.apply(model, weights=kept)
    return [layer.mlp for layer in base.model.layers]


def _place(block: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Where a block runs, and in which dtype."""
    device = next(p for p in block.parameters() if p.is_floating_point()).device
    return device, torch.bfloat16 if device.type == "cuda" else torch.float32


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
    device, dtype = _place(blocks[0])
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
    working = _working_gib(blocks[0], x) if device.type == "cuda" else None
    return found | {"peak_gib": peak and round(peak, 3), "working_gib": working and round(working, 3)}


def _working_gib(block: nn.Module, x: torch.Tensor) -> float:
    """What one block takes besides its input, its output and the gradients of both."""
    trained = [p for p in block.parameters() if p.requires_grad]
    dy, size = torch.ones_like(x), x.numel() * x.element_size()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = block(x)[0]
    forward = torch.cuda.max_memory_allocated() - before - size
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(y, [x, *trained], dy)
    backward = torch.cuda.max_memory_allocated() - before - 2 * size
    return max(forward, backward) / 2**30


def _call_ms(function: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call of several in a row, so that the device does not wait for the host's first."""
    row = 10

    def calls() -> None:
        for _ in range(row):
            function()

    if device.type == "cuda":
        return milliseconds(calls, repeats) / row
    times = []
    for _ in range(repeats):
        since = _now(device)
        calls()
        times.append(since())
    return statistics.median(times) / row


def dequantise(config: Any, rank: int, repeats: int, device: torch.device) -> list[dict[str, Any]]:
    """Rows of the MXFP4 kernel for one layer's first projection, and of a copy of as many bytes."""
    experts, outputs, inputs = config.num_local_experts, 2 * config.intermediate_size, config.hidden_size
    shape = (experts, outputs, inputs // BLOCK)
    blocks = torch.randint(0, 256, (*shape, BLOCK // 2), dtype=torch.uint8, device=device)
    packed = PackedWeight(blocks, torch.full(shape, 120, dtype=torch.uint8, device=device))
    out: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        wide = torch.empty((experts, outputs, inputs + rank), dtype=dtype, device=device)
        target = wide[..., :inputs]
        n_bytes = packed.blocks_EORB.numel() + packed.scales_EOR.numel() + target.numel() * dtype.itemsize
        halves = torch.empty((2, n_bytes // 2), dtype=torch.uint8, device=device)
        calls: dict[str, Callable[[], object]] = {
            "ours": functools.partial(packed.decode_into, target),
            "copy": functools.partial(halves[0].copy_, halves[1]),
        }
        for impl, call in calls.items():
            ms = _call_ms(call, device, repeats)
            row = {"op": "dequantise", "impl": impl, "dtype": str(dtype).removeprefix("torch.")}
            out.append(row | {"ms": round(ms, 4), "gb_s": round(n_bytes / ms / 1e6, 1)})
    return out


@torch.no_grad()
def decode_ms(blocks: list[nn.Module], batch: int, width: int, repeats: int) -> float:
    """Milliseconds a block for one token of each row of a batch."""
    device, dtype = _place(blocks[0])
    x = torch.randn(batch, 1, width, device=device, dtype=dtype)

    def passes() -> None:
        y = x
        for block in blocks:
            y = y + block(y)[0]

    return _call_ms(passes, device, repeats) / len(blocks)


def _rows(options: argparse.Namespace, config: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every kind at every length, forward and backward, then the kernel that decodes weights."""
    kinds = [kind for kind in KINDS if not options.kinds or "-".join(kind) in options.kinds]
    for routing, (impl, weights) in itertools.product(options.routing, kinds):
        blocks = stack(config, impl, weights, routing, options.lora_rank, device)
        for tokens in options.tokens:
            row: dict[str, Any] = {"op": "train", "impl": impl, "weights": weights, "routing": routing}
            row |= {"tokens": tokens, "lora_rank": options.lora_rank}
            try:
                row |= measure(blocks, tokens, config.hidden_size, options.repeats)
                row |= _rates(row, config)
            except torch.OutOfMemoryError:
                row["oom"] = True
            yield row
        del blocks
        _free(device)
    if ("ours", "mxfp4") in kinds:
        yield from dequantise(config, options.lora_rank, options.repeats, device)


def _decode_rows(options: argparse.Namespace, config: Any, device: torch.device) -> Iterator[dict[str, Any]]:
    """Every kind at every batch, without adapters and with them."""
    kinds = [(*kind, "eager") for kind in KINDS if not options.kinds or "-".join(kind) in options.kinds]
    kinds += [("transformers", "bf16", "batched_mm")] if ("transformers", "bf16", "eager") in kinds else []
    for routing, rank, (impl, weights, stock) in itertools.product(options.routing, (0, options.lora_rank), kinds):
        blocks = stack(config, impl, weights, routing, rank, device, stock)
        name = f"{impl}_{stock}" if impl == "transformers" else impl
        for batch in BATCHES:
            row = {"op": "decode", "impl": name, "weights": weights, "routing": routing, "lora_rank": rank}
            yield row | {"batch": batch, "ms": round(decode_ms(blocks, batch, config.hidden_size, options.repeats), 4)}
        del blocks
        _free(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(options: argparse.Namespace) -> int:
    """Measure what was asked for; print and write rows as they come."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = set(options.kinds) - set(map("-".join, KINDS)) or set(options.routing) - {"balanced", "skewed"}
    if unknown:
        raise SystemExit(f"expected --kinds and --routing as in --help; got {', '.join(sorted(unknown))}")
    size = SIZES[options.model] | {"num_hidden_layers": options.blocks, "vocab_size": 512}
    config = GptOssConfig(**size, pad_token_id=0)  # type: ignore[arg-type]
    head = rows.common("experts", options.commit) | {"model": options.model, "blocks": options.blocks}
    columns = {"train": _COLUMNS, "dequantise": _DEQUANTISE, "decode": _DECODE}
    out: list[dict[str, Any]] = []
    for row in _decode_rows(options, config, device) if options.decode else _rows(options, config, device):
        out.append(head | row)
        rows.write(out, options.json)
        print(rows.table([row], columns[row["op"]]), flush=True)
    if not options.decode:
        for impl, formula in FORMULAS.items():
            print(f"{impl}: {formula}")
        print(LEGEND)
    for op, shown in columns.items():
        if of_op := [row for row in out if row["op"] == op]:
            print(rows.table(of_op, shown))
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
