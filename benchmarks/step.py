"""One training step of gpt-oss at true size, random weights, LoRA on attention: transformers alone against the patch.

    python benchmarks/step.py --ctx 2048,4096 --json FILE      (needs one CUDA device; 20b takes 42 GiB to build)

Per length: one warm-up step, whose loss and gradient norm are reported, then the median of the timed ones. The
learning rate is zero, so every row sees the same weights.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GptOssConfig

import unsloth_plugins


def build(layers: int) -> torch.nn.Module:
    """gpt-oss-20b with ``layers`` of its 24 layers, bf16, on the device, checkpointed."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        base = AutoModelForCausalLM.from_config(GptOssConfig(num_hidden_layers=layers, num_local_experts=32))
    torch.set_default_dtype(torch.float32)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    model = get_peft_model(base, LoraConfig(r=32, lora_alpha=32, target_modules=targets))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> tuple[float, float]:
    """Loss and gradient norm of one whole step."""
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.item(), norm.item()


def measure(model: torch.nn.Module, optimizer: torch.optim.Optimizer, ctx: int, repeats: int) -> dict[str, object]:
    """One row; ``oom`` where it does not fit under the cap."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    ids = torch.randint(0, 200_000, (1, ctx), device="cuda", generator=torch.Generator("cuda").manual_seed(ctx))
    try:
        loss, norm = step(model, optimizer, ids)
        seconds = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step(model, optimizer, ids)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        optimizer.zero_grad(set_to_none=True)
        return {"ctx": ctx, "oom": True}
    median = statistics.median(seconds)
    return {
        "ctx": ctx,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
        "step_s": round(median, 3),
        "tok_s": round(ctx / median),
        "loss": loss,
        "grad_norm": norm,
    }


def main() -> int:
    """Measure the stock model, then the same one patched, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ctx", default="2048,4096,8192", help="lengths in tokens (%(default)s)")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--cap-gib", type=float, default=79.0, help="memory cap (%(default)s, an 80 GB card)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("expected a CUDA device; got none. This benchmark measures device memory.")
    total = torch.cuda.get_device_properties(0).total_memory / 2**30
    torch.cuda.set_per_process_memory_fraction(min(1.0, options.cap_gib / total))
    model = build(options.layers)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=0.0)
    common = {
        "bench": "step",
        "model": "gpt-oss-20b",
        "weights": "bf16",
        "layers": options.layers,
        "lora": "r=32 on q,k,v,o",
        "trainable_params": sum(p.numel() for p in trainable),
        "optimizer": "adamw",
        "cap_gib": options.cap_gib,
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: version(name) for name in ("torch", "transformers", "peft", "unsloth-plugins")},
        "date": date.today().isoformat(),
    }
    rows = []
    for name in ("transformers", "ours"):
        if name == "ours":
            print(unsloth_plugins.apply(model).report(), flush=True)
        for ctx in map(int, options.ctx.split(",")):
            rows.append({**common, "impl": name, **measure(model, optimizer, ctx, options.repeats)})
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1) + "\n")
            if rows[-1].get("oom"):
                break
    print(common)
    for row in rows:
        print(*(row.get(key, "oom") for key in ("impl", "ctx", "peak_gib", "reserved_gib", "step_s", "tok_s", "loss")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
