"""Merge LoRA on attention and experts into a packed gpt-oss of true size: time, peak memory and disk of the process.

The process that merges is a child, so that nothing else counts; its peak is the kernel's high-water mark (VmHWM).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.models import SIZES, find_or_write_checkpoint
from benchmarks.rows import common, table, write
from unsloth_plugins.core.export.base import open_base

_CHILD = """
import json, sys, time
begin = time.perf_counter()
from unsloth_plugins.core.export import merge
base, adapter, out, dtype, shard, device = sys.argv[1:]
report = merge(base, adapter, out, dtype=dtype, max_shard_bytes=int(shard), device=device)
seconds = time.perf_counter() - begin
(peak,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
errors = [vars(error) for error in report.requantised.values()]
print(json.dumps([seconds, int(peak.split()[1]) * 1024, report.bytes_needed, len(report.merged), errors]))
"""
_COLUMNS = (
    "model",
    "dtype",
    "seconds",
    "peak_rss_gib",
    "largest_shard_gib",
    "base_gib",
    "output_gib",
    "error_over_change",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--model", choices=SIZES, default="gpt-oss-20b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--dtype", default="mxfp4", help="formats of the result, with commas: mxfp4, bf16, ...")
    parser.add_argument("--shard-gb", type=float, default=4.0, help="largest weight file in GB (10^9 bytes)")
    parser.add_argument("--device", default="cpu", help="where the sums are computed: cpu or cuda")
    parser.add_argument("--folder", type=Path, help="keep base and adapter here; the results are removed")
    parser.add_argument("--json", type=Path, help="write the rows here")


def run(options: argparse.Namespace) -> int:
    """Write what is merged, merge, print and keep the rows."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        find_or_write_checkpoint(folder / "base", options.model, options.layers, "balanced")
        if not (folder / "adapter").exists():
            write_adapter(folder / "base", folder / "adapter", options.lora_rank)
        rows = [_row(folder, dtype, options) for dtype in options.dtype.split(",")]
    print(table(rows, _COLUMNS))
    write(rows, options.json)
    return 0


def write_adapter(base: Path, folder: Path, rank: int) -> None:
    """Random LoRA in PEFT's format on attention and experts: changes of about a sixth of the weights' size."""
    draw = torch.Generator().manual_seed(1)
    opened = open_base(base)
    tensors = {}
    for name, info in opened.infos.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if name.endswith("_proj.weight"):
            (outputs, inputs), copies = info.shape, 1
        elif name in opened.packed:
            copies, inputs, outputs = info.shape
            stem = stem.rpartition(".")[0] + (".base_layer" if name.endswith("gate_up_proj") else "")
        else:
            continue
        for part, shape in (("A", (copies * rank, inputs)), ("B", (outputs, copies * rank))):
            tensors[f"{stem}.lora_{part}.weight"] = torch.randn(shape, generator=draw) * 0.02
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        "base_model_name_or_path": str(base.resolve()),
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=1))


def _row(folder: Path, dtype: str, options: argparse.Namespace) -> dict[str, Any]:
    out = folder / f"merged-{dtype}"
    line = [sys.executable, "-c", _CHILD, str(folder / "base"), str(folder / "adapter"), str(out), dtype]
    line += [str(int(options.shard_gb * 1e9)), options.device]
    done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    seconds, peak, needed, merged, errors = json.loads(done.stdout)
    sizes = [path.stat().st_size for path in out.iterdir()]
    layers = json.loads((out / "config.json").read_text())["num_hidden_layers"]
    for path in out.iterdir():
        path.unlink()
    out.rmdir()
    return {
        **common("merge"),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "ram_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "model": options.model,
        "layers": layers,
        "lora_rank": options.lora_rank,
        "dtype": dtype,
        "device": options.device,
        "threads": torch.get_num_threads(),
        "seconds": round(seconds, 1),
        "peak_rss_gib": round(peak / 2**30, 3),
        "largest_shard_gib": round(max(sizes) / 2**30, 3),
        "base_gib": _gib(folder / "base"),
        "adapter_gib": _gib(folder / "adapter"),
        "output_gib": round(sum(sizes) / 2**30, 3),
        "disk_asked_gib": round(needed / 2**30, 3),
        "merged_tensors": merged,
        "relative_error": _median(errors, "relative_error"),
        "error_over_change": _median(errors, "error_over_change"),
    }


def _gib(folder: Path) -> float:
    return round(sum(path.stat().st_size for path in folder.iterdir()) / 2**30, 3)


def _median(errors: list[dict[str, Any]], name: str) -> float | None:
    values = [error[name] for error in errors if error[name] is not None]
    return round(statistics.median(values), 4) if values else None


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
