"""Fine-tune a causal LM with LoRA in the Hugging Face Trainer: once stock, once with UnslothCallback, and compare.

Without arguments it needs no GPU and no hub: SmolLM2-135M, gpt-oss's tokenizer and presidential addresses come as
packages. A small random gpt-oss (windows, sinks, packed documents) is then written in the published MXFP4 layout,
loaded packed, and trained with LoRA on attention and experts; stopped half-way and resumed. With arguments it is your
run, on whatever device there is:

    python examples/train.py --model mistralai/Mistral-7B-v0.3 --data my.jsonl --ctx 8192 --steps 200
    python examples/train.py --model openai/gpt-oss-20b --data my.jsonl --ctx 8192 --steps 200

It takes ``pip install 'unsloth-plugins[export,cli]'``.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from assets import gpt_oss_tokenizer_dir, smollm2_dir, sotu_texts
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from torch.nn import Module
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorWithFlattening,
    GptOssConfig,
    GptOssForCausalLM,
    Trainer,
    TrainingArguments,
    set_seed,
)

from unsloth_plugins.core.device import is_accelerator
from unsloth_plugins.core.mxfp4 import load_mxfp4, pack_experts
from unsloth_plugins.hf_trainer import UnslothCallback

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

console = Console()


@dataclass
class Result:
    """What one run showed."""

    name: str
    losses: list[float]
    seconds: float
    perplexity: tuple[float, float] | None = None
    logs: list[dict[str, float]] = field(default_factory=list)


def read_texts(path: Path) -> list[str]:
    """Documents of a .jsonl file (a ``text`` field each) or one document of any other text file."""
    if not path.is_file():
        sys.exit(f"--data: expected a file; got {path}. Pass a .jsonl file with a `text` field, or a text file.")
    if path.suffix != ".jsonl":
        return [path.read_text()]
    texts = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"])
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            sys.exit(f"--data: expected an object with a `text` field in {path}, line {number}; got {error!r}.")
    return texts


def windows(texts: list[str], tokenizer: Any, ctx: int, most: int) -> list[dict[str, list[int]]]:
    """The first ``most`` windows of ``ctx`` tokens, each within one document."""
    rows: list[dict[str, list[int]]] = []
    for text in texts:
        ids = tokenizer(text)["input_ids"]
        for start in range(0, len(ids) - ctx + 1, ctx):
            rows.append({"input_ids": ids[start : start + ctx], "labels": ids[start : start + ctx]})
            if len(rows) == most:
                return rows
    return rows


def arguments(folder: Path, steps: int, device: torch.device, **options: Any) -> TrainingArguments:
    """The same settings for every run of this script."""
    settings = dict(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=1,
        per_device_eval_batch_size=1,
        learning_rate=2e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        seed=0,
        use_cpu=not is_accelerator(device),
    )
    return TrainingArguments(**(settings | options))


def fine_tune(
    name: str,
    make: Any,
    train: list[dict[str, list[int]]],
    held_out: list[dict[str, list[int]]],
    args: TrainingArguments,
    *,
    ours: bool,
    collator: Any = None,
    resume: bool = False,
) -> tuple[Result, Module]:
    """One run of the Trainer from a model built anew. ``ours`` adds the callback and changes nothing else."""
    console.rule(name)
    model = make()
    callbacks = [UnslothCallback()] if ours else []
    trainer = Trainer(model, args, collator, train_dataset=train, eval_dataset=held_out or None, callbacks=callbacks)
    before = math.exp(trainer.evaluate()["eval_loss"]) if held_out else math.nan
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume or None)
    seconds = time.perf_counter() - started
    after = math.exp(trainer.evaluate()["eval_loss"]) if held_out else math.nan
    logs = [log for log in trainer.state.log_history if "loss" in log]
    perplexity = (before, after) if held_out else None
    return Result(name, [log["loss"] for log in logs], seconds, perplexity, logs), model


def adapted(make: Any, rank: int, targets: Any) -> Any:
    """A maker of the model with LoRA on it, equal each time."""

    def build() -> Module:
        set_seed(0)
        return get_peft_model(make(), LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets))

    return build


def is_mxfp4(source: str) -> bool:
    """Whether the checkpoint has packed experts, which transformers alone can't train."""
    stored = getattr(AutoConfig.from_pretrained(source), "quantization_config", None)
    return isinstance(stored, dict) and stored.get("quant_method") == "mxfp4"


def pretrained_job(options: argparse.Namespace, device: torch.device) -> list[Result]:
    """A pretrained model on long documents: stock against ours."""
    source = options.model or str(smollm2_dir())
    texts = read_texts(options.data) if options.data else [path.read_text() for path in sotu_texts()[::20]]
    tokenizer = AutoTokenizer.from_pretrained(source)
    rows = windows(texts, tokenizer, options.ctx, max(options.steps, 4) + 4)
    if len(rows) < 8:
        sys.exit(
            f"--data: expected at least 8 windows of {options.ctx} tokens; got {len(rows)}. "
            "Use a smaller --ctx or more text."
        )
    held_out, train = rows[-4:], rows[:-4]
    dtype = torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    packed = is_mxfp4(source)

    def load() -> Module:
        if packed:
            return load_mxfp4(source, dtype=dtype, device_map={"": device})
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device)

    make = adapted(load, options.lora_rank, "all-linear")
    args = arguments(options.output / "pretrained", options.steps, device, gradient_checkpointing=True)
    runs = [("ours", True)] if options.no_compare or packed else [("stock", False), ("ours", True)]
    results = []
    for name, ours in runs:
        result, model = fine_tune(name, make, train, held_out, args, ours=ours)
        results.append(result)
        if ours:
            model.save_pretrained(options.output / "adapter")
            tokenizer.save_pretrained(options.output / "adapter")
        del model
    return results


def gpt_oss_job(options: argparse.Namespace, device: torch.device) -> list[Result]:
    """A small packed gpt-oss on packed documents: one unbroken run, and one stopped half-way and resumed."""
    tokenizer = AutoTokenizer.from_pretrained(gpt_oss_tokenizer_dir())
    texts = [text for path in sotu_texts()[1::20] for text in path.read_text().split("\n") if len(text) > 200]
    train = [{"input_ids": tokenizer(text)["input_ids"][:120]} for text in texts[:96]]
    config = GptOssConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=len(tokenizer),
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = options.output / "small-gpt-oss-mxfp4"
    set_seed(0)
    written = GptOssForCausalLM(config)
    for layer in written.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
        for name in ("gate_up_proj", "down_proj"):
            torch.nn.init.normal_(getattr(layer.mlp.experts, name), std=0.1)
    pack_experts(written).save_pretrained(folder)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    make = adapted(lambda: load_mxfp4(folder, device_map={"": device}), 8, targets)

    def args(folder: str, steps: int) -> TrainingArguments:
        return arguments(
            options.output / folder,
            steps,
            device,
            per_device_train_batch_size=4,
            learning_rate=5e-3,
            gradient_checkpointing=True,
            save_strategy="steps",
            save_steps=6,
            eval_strategy="no",
        )

    pack = DataCollatorWithFlattening()
    whole, _ = fine_tune("packed gpt-oss, unbroken", make, train, [], args("whole", 12), ours=True, collator=pack)
    fine_tune("packed gpt-oss, first half", make, train, [], args("half", 6), ours=True, collator=pack)
    rest, _ = fine_tune(
        "packed gpt-oss, resumed", make, train, [], args("half", 12), ours=True, collator=pack, resume=True
    )
    return [whole, rest]


def summary(results: list[Result]) -> None:
    """The closing table."""
    table = Table(title="Result")
    for column in ("run", "loss first -> last", "held-out perplexity", "max loss difference", "s/step", "tokens/s"):
        table.add_column(column, justify="left" if column == "run" else "right")
    first = results[0]
    for result in results:
        difference = "" if result is first else f"{difference_of(first, result):.1e}"
        perplexity = "" if result.perplexity is None else f"{result.perplexity[0]:.2f} -> {result.perplexity[1]:.2f}"
        speeds = [log["tokens_per_s"] for log in result.logs[1:] if "tokens_per_s" in log]
        table.add_row(
            result.name,
            f"{result.losses[0]:.4f} -> {result.losses[-1]:.4f}",
            perplexity,
            difference,
            f"{result.seconds / len(result.losses):.2f}",
            f"{sorted(speeds)[len(speeds) // 2]:.0f}" if speeds else "",
        )
    console.print(table)


def difference_of(one: Result, other: Result) -> float:
    """Largest difference of two loss curves over their common last steps."""
    common = min(len(one.losses), len(other.losses))
    return max(abs(a - b) for a, b in zip(one.losses[-common:], other.losses[-common:], strict=True))


def plot(results: list[list[Result]], path: Path) -> None:
    """Loss curves, one panel per job."""
    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 3.5), squeeze=False)
    for axis, job in zip(axes[0], results, strict=True):
        for result, style in zip(job, ("-", "--", ":"), strict=False):
            first = max(len(r.losses) for r in job) - len(result.losses)
            steps = range(first + 1, first + 1 + len(result.losses))
            axis.plot(steps, result.losses, style, label=result.name, linewidth=3 if style == "-" else 1.5)
        axis.set(xlabel="step", ylabel="training loss")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run the jobs; the exit status says whether what they are there to show held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="hub id or folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--data", type=Path, help=".jsonl with a `text` field, or a text file")
    parser.add_argument("--ctx", type=int, default=256, help="tokens per row (%(default)s)")
    parser.add_argument("--steps", type=int, default=12, help="optimizer steps (%(default)s)")
    parser.add_argument("--lora-rank", type=int, default=16, help="rank of LoRA on all linear layers (%(default)s)")
    parser.add_argument("--output", type=Path, default=Path("runs/train"), help="folder for results (%(default)s)")
    parser.add_argument("--no-compare", action="store_true", help="leave out the stock run")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    jobs = [pretrained_job(options, device)]
    if options.model is None:
        jobs.append(gpt_oss_job(options, device))
    for job in jobs:
        summary(job)
    plot(jobs, options.output / "loss.png")
    console.print(f"Adapter in {options.output / 'adapter'}, loss curves in {options.output / 'loss.png'}.")

    ours = jobs[0][-1]
    assert ours.perplexity is not None
    failed = []
    if ours.perplexity[1] >= ours.perplexity[0]:
        failed.append("held-out perplexity did not fall")
    if len(jobs[0]) == 2 and difference_of(*jobs[0]) > 0.02:
        failed.append(f"stock and ours differ by {difference_of(*jobs[0]):.2e} in loss")
    if len(jobs) == 2 and device.type == "cpu" and difference_of(*jobs[1]) != 0:
        failed.append("the resumed run is not the unbroken one")
    for reason in failed:
        console.print(f"[bold red]{reason}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
