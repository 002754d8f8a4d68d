"""Long training: stock transformers against the patched model, the same numbers in, step by step.

Both are built from the same seed and take turns, a step each, on the same text in the same order; every loss of both is
kept. SmolLM2-135M trains on windows of long documents (State of the Union addresses) on everything that can be patched.
The small random gpt-oss (windows, sinks, experts; text as bytes) trains on documents packed into one row, where stock,
with eager attention, has a padded row for each document: a leak between documents would show.

On a CPU ours runs its plain PyTorch parts, with ``--device cuda`` its kernels.

Two runs whose numbers differ by a rounding part in the end, at once where a near-tie sends a token to another expert.
``--control`` shows how far: stock once more, with every trained number moved by one part in 2^23. In ``gpt-oss-all``
each token goes to all experts, so that there are no ties.

    python -m benchmarks training --cases smollm2-lora-float32,gpt-oss-full-float32 --steps 300 --json rows.json
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import rows
from unsloth_plugins import apply

FLOAT32_WITHIN = 1e-3  # of a loss: every step of the curves in float32
FINAL_WITHIN = 0.02  # of a loss: means of the last steps in any dtype
_LAST = 20
_DISTANCES = ("max_diff", "mean_diff", "final_diff", "control_max_diff", "control_mean_diff", "rounding")
_COLUMNS = ("case", "ctx", "steps", "first", "stock_last", "ours_last", *_DISTANCES)
_RATES = {"lora": 2e-4, "full": 2e-5}
_BYTES = 260  # vocabulary of the small models: 4 and a byte; 0 and 1 are padding and the end

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        model: ``"smollm2"``, ``"gpt-oss"`` (small and random), ``"gpt-oss-all"`` or ``"llama"`` (tiny and random).
        method: ``"lora"`` on all linear layers and, on packed MXFP4, on experts; or ``"full"``.
        dtype: of the weights that don't train, and of autocast; ``"nf4"`` is bitsandbytes' with bfloat16.
    """

    model: str
    method: str
    dtype: str

    @property
    def name(self) -> str:
        """As on the command line."""
        return f"{self.model}-{self.method}-{self.dtype}"

    @property
    def compute(self) -> torch.dtype:
        """The dtype of autocast."""
        return torch.bfloat16 if self.dtype == "nf4" else getattr(torch, self.dtype)

    @property
    def is_gpt_oss(self) -> bool:
        """One of the small ones with experts."""
        return self.model.startswith("gpt-oss")

    @property
    def rate(self) -> float:
        """The learning rate: higher for random weights."""
        return _RATES[self.method] if self.model == "smollm2" else 2e-3


_DTYPES = ("float32", "bfloat16", "float16")
CASES = {
    case.name: case
    for case in (
        *(Case("smollm2", method, dtype) for method in ("lora", "full") for dtype in _DTYPES),
        Case("smollm2", "lora", "nf4"),
        *(
            Case(model, method, dtype)
            for model in ("gpt-oss", "gpt-oss-all")
            for method in ("lora", "full")
            for dtype in _DTYPES[:2]
        ),
        Case("llama", "lora", "float32"),
    )
}
DEFAULT = "gpt-oss-full-float32,gpt-oss-lora-float32,smollm2-lora-float32,smollm2-lora-bfloat16,smollm2-lora-nf4"


def _cases(text: str) -> list[Case]:
    for name in (names := [part for part in text.split(",") if part]):
        if name not in CASES:
            raise argparse.ArgumentTypeError(f"expected any of {', '.join(CASES)}; got {name!r}")
    return [CASES[name] for name in names]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=_cases, default=DEFAULT, help=f"with commas, of {', '.join(CASES)}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ctx", type=int, default=512, help="tokens of a step (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--control", action="store_true", help="stock once more, from numbers moved by a rounding")
    parser.add_argument("--no-checkpointing", action="store_true", help="no gradient checkpointing in either")
    parser.add_argument("--data", type=Path, nargs="+", help="text files, one document each (default: addresses)")
    parser.add_argument("--rows", type=Path, nargs="+", default=[], help="files of earlier runs: their rows come first")
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here, and the curves beside them as a .png")


def documents(data: list[Path] | None, seed: int) -> list[str]:
    """The texts, in an order drawn from ``seed``."""
    if data is None:
        sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
        try:
            from assets import sotu_texts
        finally:
            sys.path.pop(0)
        data = sotu_texts()
    texts = [path.read_text() for path in data]
    random.Random(seed).shuffle(texts)
    return texts


def windows(texts: list[str], tokenizer: Any, ctx: int) -> Iterator[Batch]:
    """Rows of ``ctx`` tokens, each within one document; after the last one the first comes again."""
    found = 0
    for text in itertools.cycle(texts):
        ids = tokenizer(text)["input_ids"]
        for start in range(0, len(ids) - ctx + 1, ctx):
            found += 1
            row_1T = torch.tensor([ids[start : start + ctx]])
            yield {"input_ids": row_1T, "labels": row_1T}
        if not found and text is texts[-1]:
            sys.exit(f"--ctx: expected a document of at least {ctx} tokens; got none. Use a smaller one or more text.")


def encode(text: str) -> dict[str, list[int]]:
    """Text as bytes, for models without a tokenizer."""
    return {"input_ids": [byte + _BYTES - 256 for byte in text.encode()]}


def packs(texts: list[str], ctx: int, seed: int) -> Iterator[list[list[int]]]:
    """Documents that fill ``ctx`` tokens together: paragraphs, cut to lengths between 16 and ctx / 2."""
    draw = random.Random(seed)
    paragraphs = [part for text in texts for part in text.split("\n") if len(part) >= 16]
    if not paragraphs:
        sys.exit("--data: expected paragraphs of 16 characters or more; got none.")
    pack: list[list[int]] = []
    for paragraph in itertools.cycle(paragraphs):
        room = ctx - sum(map(len, pack))
        ids = encode(paragraph)["input_ids"][: min(draw.randint(16, max(16, ctx // 2)), room)]
        pack.append(ids)
        if room - len(ids) < 16:
            yield pack
            pack = []


def padded(pack: list[list[int]]) -> Batch:
    """A row for each document, padded on the right: [documents, longest]."""
    longest = max(map(len, pack))
    rows_NT = torch.tensor([ids + [0] * (longest - len(ids)) for ids in pack])
    mask_NT = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in pack])
    return {"input_ids": rows_NT, "attention_mask": mask_NT, "labels": rows_NT.masked_fill(mask_NT == 0, -100)}


def flattened(pack: list[list[int]]) -> Batch:
    """All documents in one row [1, tokens]; positions start again in each, and nothing predicts its first token."""
    ids_1T = torch.tensor([list(itertools.chain(*pack))])
    positions_1T = torch.cat([torch.arange(len(ids)) for ids in pack])[None]
    return {
        "input_ids": ids_1T,
        "position_ids": positions_1T,
        "labels": ids_1T.masked_fill(positions_1T == 0, -100),
    }


def pairs(case: Case, options: argparse.Namespace) -> Iterator[tuple[Batch, Batch]]:
    """What stock and ours see at each step."""
    texts = documents(options.data, options.seed)
    if case.is_gpt_oss:
        for pack in packs(texts, options.ctx, options.seed):
            yield padded(pack), flattened(pack)
    tokenizer: Any = encode
    if case.model == "smollm2":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(_smollm2())
    for batch in windows(texts, tokenizer, options.ctx):
        yield batch, batch


def _smollm2() -> str:
    sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
    try:
        from assets import smollm2_dir
    finally:
        sys.path.pop(0)
    return str(smollm2_dir())


def _base(case: Case, seed: int) -> Any:
    """The model before LoRA, in float32 where it trains."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    torch.manual_seed(seed)
    dtype = torch.float32 if case.method == "full" else case.compute
    if case.model != "smollm2":
        return (_gpt_oss(case.model) if case.is_gpt_oss else _llama()).to(dtype)
    if case.dtype != "nf4":
        return AutoModelForCausalLM.from_pretrained(_smollm2(), dtype=dtype)
    four_bit = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(_smollm2(), dtype=dtype, quantization_config=four_bit)
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # else stock's gradients may be wrong on such CPUs
    return model


def _gpt_oss(name: str) -> Any:
    """Four layers, windows of 32 tokens in every second one, sinks ~ N(0, 2), two of four experts or all."""
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=32,
        num_local_experts=4,
        num_experts_per_tok=2 if name == "gpt-oss" else 4,
        vocab_size=_BYTES,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        eos_token_id=1,
        attn_implementation="eager",
    )
    model = GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, std=2.0)
    return model


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = dict(hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2)
    return LlamaForCausalLM(LlamaConfig(**size, num_hidden_layers=2, vocab_size=_BYTES, pad_token_id=0, eos_token_id=1))


def build(case: Case, options: argparse.Namespace, *, ours: bool) -> tuple[Any, str]:
    """The model, ready to train, and the report of what was patched."""
    from unsloth_plugins.core.mxfp4 import pack_experts

    model = _base(case, options.seed)
    packed = case.is_gpt_oss and case.method == "lora"
    if packed:
        held = model if ours else _base(case, options.seed)
        pack_experts(held)
        if not ours:
            _copy_decoded(held, model)
    if case.method == "lora":
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(options.seed)
        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, **_targets(packed)))
    model.to(options.device)
    if not options.no_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    report = apply(model, **_everything(case, options.device)).report() if ours else ""
    return model.train(), report


def _targets(packed: bool) -> dict[str, Any]:
    if not packed:
        return {"target_modules": "all-linear"}
    return {
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }


def _copy_decoded(packed: Any, dense: Any) -> None:
    """Give the dense experts of stock the numbers of the packed ones."""
    for source, target in zip(packed.model.layers, dense.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            weight = getattr(target.mlp.experts, name)
            weight.data.copy_(source.mlp.experts.packed(name).dense(weight.dtype))


def _everything(case: Case, device: str) -> dict[str, Any]:
    """Options that patch all there is: on CUDA the kernels, elsewhere their definitions in plain PyTorch."""
    if device != "cpu":
        return {"attention": "triton"}
    return {"attention": "eager", "layers": "reference", **({"lora": "fused"} if case.method == "lora" else {})}


class Learner:
    """A model with its optimizer."""

    def __init__(self, model: Any, case: Case, device: str) -> None:
        self.model, self.case, self.device = model, case, device
        self.trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=case.rate, weight_decay=0.0)
        self.scaler = torch.amp.GradScaler(device, enabled=case.compute == torch.float16)

    def move_by_a_rounding(self, seed: int) -> None:
        """Multiply every trained number by 1 + 2^-23 or 1 - 2^-23."""
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.trainable:
                signs = torch.randint(0, 2, parameter.shape, generator=draw).to(parameter) * 2 - 1
                parameter.mul_(1 + signs * 2**-23)

    def step(self, batch: Batch) -> float:
        """One step; the loss before it."""
        batch = {name: value.to(self.device) for name, value in batch.items()}
        narrow: Any = contextlib.nullcontext()
        if self.case.compute != torch.float32:
            narrow = torch.autocast(self.device, dtype=self.case.compute)
        with narrow:
            loss = self.model(**batch, use_cache=False).loss
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.trainable, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def compare(stock: list[float], ours: list[float]) -> dict[str, float]:
    """Largest and mean distance of two curves, and the difference of the means of their last steps."""
    apart = [abs(one - other) for one, other in zip(stock, ours, strict=True)]
    last = [sum(curve[-_LAST:]) / len(curve[-_LAST:]) for curve in (stock, ours)]
    return {
        "first": stock[0],
        "stock_last": last[0],
        "ours_last": last[1],
        "max_diff": max(apart),
        "mean_diff": sum(apart) / len(apart),
        "final_diff": last[1] - last[0],
    }


def measure(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Train both, and the control where it is asked for, and compare."""
    model, report = build(case, options, ours=True)
    learners = {"stock": Learner(build(case, options, ours=False)[0], case, options.device)}
    learners["ours"] = Learner(model, case, options.device)
    if options.control:
        learners["control"] = Learner(build(case, options, ours=False)[0], case, options.device)
        learners["control"].move_by_a_rounding(options.seed)
    print(case.name, report, sep="\n", flush=True)
    losses: dict[str, list[float]] = {name: [] for name in learners}
    for step, (plain, packed) in enumerate(itertools.islice(pairs(case, options), options.steps), 1):
        for name, learner in learners.items():
            losses[name].append(learner.step(packed if name == "ours" else plain))
        if step % 10 == 0 or step == options.steps:
            print(case.name, "step", step, {name: round(curve[-1], 6) for name, curve in losses.items()}, flush=True)
    control = compare(losses["stock"], losses["control"]) if options.control else {}
    return {
        "case": case.name,
        "model": case.model,
        "method": case.method,
        "dtype": case.dtype,
        "device": options.device,
        "ctx": options.ctx,
        "steps": options.steps,
        "seed": options.seed,
        "optimizer": "adamw",
        "learning_rate": case.rate,
        "checkpointing": not options.no_checkpointing,
        "trainable_params": sum(p.numel() for p in learners["ours"].trainable),
        "patched": report,
        **compare(losses["stock"], losses["ours"]),
        **{f"control_{name}": control[name] for name in ("max_diff", "mean_diff", "final_diff") if control},
        **{name: [round(loss, 7) for loss in curve] for name, curve in losses.items()},
    }


def add_rounding(found: list[dict[str, Any]]) -> None:
    """Give narrow rows ``rounding``: the mean distance of stock's curve from its own one in float32."""
    same = ("model", "method", "ctx", "steps", "seed", "learning_rate", "device")
    for row in found:
        for exact in found:
            if exact["dtype"] == "float32" != row["dtype"] and all(row[key] == exact[key] for key in same):
                row["rounding"] = compare(exact["stock"], row["stock"])["mean_diff"]


def plot(found: list[dict[str, Any]], path: Path) -> None:
    """Both curves of each row above their difference."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2, len(found), figsize=(4 * len(found), 5), squeeze=False, sharex="col", height_ratios=(2, 1)
    )
    for (upper, lower), row in zip(axes.T, found, strict=True):
        steps = range(1, row["steps"] + 1)
        upper.plot(steps, row["stock"], color="0.7", linewidth=2.5, label="transformers")
        upper.plot(steps, row["ours"], color="C0", linewidth=0.8, label="patched")
        for name, label, color in (("control", "stock moved by a rounding", "0.7"), ("ours", "patched", "C0")):
            if name in row:
                apart = [b - a for a, b in zip(row["stock"], row[name], strict=True)]
                lower.plot(steps, apart, color=color, linewidth=0.8, label=label)
        lower.legend(fontsize=7)
        upper.set_title(row["case"], fontsize=9)
        lower.set_xlabel("step")
    axes[0][0].set_ylabel("training loss")
    axes[1][0].set_ylabel("difference")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def faults(found: list[dict[str, Any]]) -> list[str]:
    """Curves that do not overlap as they must."""
    out = []
    for row in found:
        within = max(FLOAT32_WITHIN, 2 * row.get("control_max_diff", 0.0))
        if row["dtype"] == "float32" and not row["max_diff"] <= within:
            out.append(f"{row['case']}: a step differs by {row['max_diff']:.2e}, more than {within:.2e}")
        if not abs(row["final_diff"]) <= FINAL_WITHIN:
            out.append(f"{row['case']}: the end differs by {row['final_diff']:.2e}, more than {FINAL_WITHIN}")
    return out


def run(options: argparse.Namespace) -> int:
    """Run the cases, print a table, write the rows and the curves."""
    wrong = [case.name for case in options.cases if case.dtype == "float16" and options.device == "cpu"]
    if wrong:
        sys.exit(f"--cases: expected --device cuda for float16; got cpu for {', '.join(wrong)}.")
    found: list[dict[str, Any]] = [row for path in options.rows for row in json.loads(path.read_text())]
    for case in options.cases:
        found.append(rows.common("training", options.commit) | measure(case, options))
        rows.write(found, options.json)
    add_rounding(found)
    rows.write(found, options.json)
    print(rows.table(found, _COLUMNS))
    if options.json is not None:
        plot(found, options.json.with_suffix(".png"))
    for line in (wrong := faults(found)):
        print("They differ:", line)
    return int(bool(wrong))
