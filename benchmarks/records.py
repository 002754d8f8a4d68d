"""The records: every run behind the README's tables, one after the other, and the tables.

A run whose rows are already in the folder is not run again, so a stopped one goes on when started once more. Progress
goes to ``progress.txt`` there, so that it can be started detached. Longest contexts start at the planner's answer and
go up or down from there by single steps, each in a process of its own.

    nohup python -m benchmarks records --out runs/records &
    python -m benchmarks records --table benchmarks/results/*-step.json --plot records.png
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import rows, step
from benchmarks.models import config_of
from unsloth_plugins.core.planner import plan

_GRID = 256  # tokens
_STEP = 32  # a longer or shorter context differs by this part of the planner's
_TRIES = 6

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run.

    Attributes:
        arguments: of ``python -m benchmarks step``.
        longest: search for the longest context under the cap, instead of measuring given ones.
    """

    arguments: str
    longest: bool = False


_LONGEST = "--in-memory --policy min_memory --warm-up 1024"
_ONCE = f"{_LONGEST} --steps 1 --repeats 1"  # a step of minutes; the short one before it compiles
_MISTRAL = "--model mistral-7b"
RUNS = {
    "gpt-oss-mxfp4": Run("--ctx 2048,8192,32768 --peers unsloth,ours_triton --repeats 2"),
    "gpt-oss-mxfp4-64k": Run("--ctx 65536 --peers unsloth,ours_triton --steps 1 --repeats 1"),
    "gpt-oss-flex": Run("--ctx 8192,32768 --peers unsloth,ours_flex --repeats 1"),
    "gpt-oss-skewed": Run("--routing skewed --ctx 8192,32768 --peers unsloth --repeats 1"),
    "gpt-oss-bf16": Run("--weights bf16 --ctx 2048,8192,32768 --peers transformers --repeats 2"),
    "gpt-oss-full": Run("--train full --weights bf16 --in-memory --cap-gib 141 --ctx 2048 --repeats 1"),
    "gpt-oss-120b": Run("--model gpt-oss-120b --ctx 2048,8192 --repeats 1"),
    "gpt-oss-min-memory": Run("--policy min_memory --ctx 8192,65536 --repeats 1"),
    "gpt-oss-16k": Run("--in-memory --weights streamed --cap-gib 15 --ctx 16384 --repeats 1"),
    "mistral-nf4": Run(f"{_MISTRAL} --ctx 2048,8192,32768 --peers unsloth,transformers,ours_triton --repeats 2"),
    "mistral-nf4-64k": Run(f"{_MISTRAL} --ctx 65536 --peers unsloth,ours_triton --steps 1 --repeats 1"),
    "mistral-min-memory": Run(f"{_MISTRAL} --policy min_memory --ctx 8192,65536 --repeats 1"),
    "mistral-fp16": Run(f"{_MISTRAL} --in-memory --dtype float16 --cap-gib 15 --ctx 16384 --repeats 1"),
    "gemma-nf4": Run("--model gemma-7b --ctx 2048,8192 --peers transformers --repeats 1"),
    "gpt-oss-131k": Run(f"{_ONCE} --cap-gib 23 --ctx 131072"),
    "gpt-oss-700k": Run(f"{_ONCE} --ctx 700000"),
    "gpt-oss-bf16-400k": Run(f"{_ONCE} --weights bf16 --ctx 400000"),
    "mistral-300k": Run(f"{_MISTRAL} {_ONCE} --cap-gib 23 --ctx 300000"),
    "mistral-400k": Run(f"{_MISTRAL} {_ONCE} --ctx 400000"),
    "million-two-layers": Run(f"{_ONCE} --layers 2 --ctx 700000,1000000"),
    "longest-15": Run(f"{_LONGEST} --cap-gib 15 --weights streamed", longest=True),
    "longest-23": Run(f"{_LONGEST} --cap-gib 23", longest=True),
    "longest-47": Run(f"{_LONGEST} --cap-gib 47", longest=True),
    "longest-79": Run(f"{_LONGEST} --cap-gib 79", longest=True),
    "longest-bf16-79": Run(f"{_LONGEST} --weights bf16 --cap-gib 79", longest=True),
    **{
        f"mistral-longest-{gib}": Run(f"{_MISTRAL} {_LONGEST} --cap-gib {gib}", longest=True)
        for gib in (7, 11, 15, 23, 79)
    },
}
_LIMITS = ("cap_gib", "weights", "ctx", "peak_gib", "reserved_gib", "host_gib", "tok_s", "predicted", "too_long")


def _names(text: str) -> list[str]:
    for name in (names := [part for part in text.split(",") if part]):
        if name not in RUNS:
            raise argparse.ArgumentTypeError(f"expected any of {', '.join(RUNS)}; got {name!r}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", type=_names, default=",".join(RUNS), help="with commas, of %(default)s")
    parser.add_argument("--out", type=Path, default=Path("runs/records"), help="folder for rows (%(default)s)")
    parser.add_argument("--checkpoints", type=Path, help="keep random weights here (default: in the folder for rows)")
    parser.add_argument("--more", default="", help="arguments of step that are added to every run: --peer-path ...")
    parser.add_argument("--host-ram-gib", type=float, help="host memory to plan with (default: the machine's)")
    parser.add_argument("--table", type=Path, nargs="+", metavar="FILE", help="run nothing: tables of these rows")
    parser.add_argument("--plot", type=Path, help="tokens/s and peak memory over the length, as a picture")


def step_options(arguments: str) -> argparse.Namespace:
    """As the command line of ``step`` reads them."""
    parser = argparse.ArgumentParser(prog="step")
    step.add_arguments(parser)
    return parser.parse_args(arguments.split())


def search(fits: Callable[[int], bool], start: int) -> tuple[int | None, int | None]:
    """The longest context that was seen to fit and the shortest that was seen not to, in at most ``_TRIES`` steps.

    Goes up from ``start`` while it fits, or else down until it does, a 32nd of ``start`` at a time.
    """
    stride = max(_GRID, start // _STEP // _GRID * _GRID)
    good, bad, ctx = None, None, start
    for _ in range(_TRIES):
        if ctx <= 0:
            break
        if fits(ctx):
            good, ctx = ctx, ctx + stride
        else:
            bad, ctx = ctx, ctx - stride
        if ctx in (good, bad):
            break
    return good, bad


def one_step(options: argparse.Namespace, ctx: int, log: Path) -> Row:
    """One step of ours at that length in a process of its own, and what its worker said about itself.

    Raises:
        RuntimeError: it failed for another reason than memory.
    """
    settings = step.settings_of(argparse.Namespace(**vars(options) | {"ctx": [ctx]}), None)
    worker = step.Worker("ours", settings, options.path, log)
    try:
        answer = worker.about
        if "error" not in answer:
            answer = answer | worker.ask(ctx, warm_up=options.warm_up or 0, steps=1, report=True)
    finally:
        worker.close()
    if "error" in answer:
        raise RuntimeError(f"{answer['error']}; see {log}")
    return answer


def measure_longest(options: argparse.Namespace, host_ram_gib: float, folder: Path) -> list[Row]:
    """The longest context under the cap: one row."""
    step.check(options)
    if options.train == "full":
        raise RuntimeError("the planner describes LoRA; expected --train lora for the longest context.")
    weights = options.weights
    placed = {"weights": "streamed"} if weights == "streamed" else {}
    dtype: Any = "mxfp4" if weights == "streamed" else weights
    planned = plan(
        config_of(options.model, options.layers),
        vram_gib=options.cap_gib + 1,  # a cap has no driver in it
        host_ram_gib=host_ram_gib,
        dtype=dtype,
        lora_rank=options.lora_rank,
        optimizer=options.optimizer,
        memory_policy=options.policy,
        checkpoint_pairs=options.pairs,
        **placed,
    ).longest
    if not planned:
        raise RuntimeError(f"the planner knows of no context that fits {options.cap_gib} GiB and {host_ram_gib:.0f}.")
    measured: dict[int, Row] = {}

    def fits(ctx: int) -> bool:
        measured[ctx] = answer = one_step(options, ctx, folder / f"{ctx}.log")
        print(f"{options.cap_gib:g} GiB, {ctx} tokens: {'out of memory' if 'oom' in answer else answer}", flush=True)
        return "oom" not in answer

    good, bad = search(fits, planned)
    about = measured[good if good is not None else planned]
    row = rows.common("longest", options.commit) | {"model": options.model, "impl": "ours", "cap_gib": options.cap_gib}
    row |= {name: getattr(options, name) for name in ("policy", "pairs", "lora_rank", "optimizer", "dtype")}
    row |= {"weights": step.held(about, weights), "predicted": planned, "too_long": bad, "ctx": good}
    kept = ("backend", "trainable_params", "versions", "peak_gib", "reserved_gib", "host_gib", "step_s")
    kept += ("loss", "grad_norm")
    row |= {name: about.get(name) for name in kept}
    return [row | {"tok_s": round(good / about["step_s"], 1) if good is not None else None}]


def _measure(run: Run, options: argparse.Namespace, folder: Path) -> list[Row]:
    """The rows of one run; what it prints goes to the progress file."""
    checkpoints = options.checkpoints or options.out / "checkpoints"
    asked = step_options(f"{run.arguments} {options.more}")
    asked.json = folder / "rows.json"
    if run.longest:
        return measure_longest(asked, options.host_ram_gib or _host_gib(), folder)
    if not asked.in_memory:
        checkpoints.mkdir(parents=True, exist_ok=True)
        asked.checkpoint = checkpoints / f"{asked.model}-{asked.routing}"
    status = step.run(asked)
    found: list[Row] = json.loads(asked.json.read_text())
    if status:
        errors = [row["error"] for row in found if "error" in row]
        raise RuntimeError(f"step ended with status {status}: {errors}; its rows are in {asked.json}.")
    return found


def _host_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def measure(options: argparse.Namespace) -> bool:
    """Run what has no rows yet; whether all of it ended well."""
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    with (options.out / "progress.txt").open("a", buffering=1) as progress, contextlib.redirect_stdout(progress):
        for name in options.only:
            target, folder = options.out / f"{name}.json", options.out / name
            if target.exists():
                print(f"{name}: there already")
                continue
            print(f"{name}: begins ({RUNS[name].arguments})")
            folder.mkdir(exist_ok=True)
            try:
                rows.write(_measure(RUNS[name], options, folder), target)
            except (Exception, SystemExit) as error:
                failed.append(name)
                traceback.print_exc(file=progress)
                print(f"{name}: failed: {error}", file=sys.stderr)
            print(f"{name}: {'failed' if name in failed else 'done'}")
    return not failed


def _versions(found: Iterable[Row]) -> str:
    merged: dict[str, str] = {}
    for row in found:
        merged |= row["versions"]
    names = ("torch", "triton", "transformers", "unsloth", "flash-attn-4")
    return ", ".join(f"{name} {merged[name]}" for name in names if name in merged)


_SETUP = (
    *("model", "layers", "cap_gib", "train", "lora_rank", "expert_layers", "optimizer", "dtype", "routing"),
    *("gpu", "date", "commit"),
)


def groups(found: list[Row]) -> list[list[Row]]:
    """Rows of ``step`` that were measured with the same settings on the same day."""
    out: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if row["bench"] == "step" and row.get("ctx") is not None:
            out.setdefault(tuple(row.get(name) for name in _SETUP), []).append(row)
    return list(out.values())


def by_label(group: list[Row]) -> dict[str, dict[int, Row]]:
    """The rows of each implementation by length; weights and policy are in its name where they differ."""
    policies = {row["policy"] for row in group if row["policy"]}
    weights = {row["weights"] for row in group}
    pairs = {bool(row.get("pairs")) for row in group}
    out: dict[str, dict[int, Row]] = {}
    for row in group:
        parts = [row["impl"]]
        parts += [row["weights"]] if len(weights) > 1 else []
        parts += [row["policy"]] if len(policies) > 1 and row["policy"] else []
        parts += ["pairs"] if len(pairs) > 1 and row.get("pairs") else []
        out.setdefault(", ".join(parts), {})[row["ctx"]] = row
    return dict(sorted(out.items(), key=lambda item: item[0].startswith("ours")))  # peers first


def _cell(row: Row | None, peer: Row | None) -> str:
    if row is None:
        return ""
    if row.get("tok_s") is None:
        return "out of memory" if row.get("oom") else "failed"
    text = f"{row['tok_s']:,.0f} ({row['peak_gib']:.1f})"
    if peer is None or peer is row or not peer.get("tok_s"):
        return text
    return f"{text}, {row['tok_s'] / peer['tok_s']:.2f}x"


def _markdown(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    lines = [list(head), *map(list, body)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


_USUAL = {"dtype": "bfloat16", "routing": "balanced"}


def step_table(group: list[Row]) -> str:
    """Tokens/s and peaks by length; the others with how many times Unsloth's speed, or transformers' without it."""
    labels, first = by_label(group), group[0]
    peers = [name for name in labels if not name.startswith("ours")]
    peer = next((name for name in peers if name.startswith("unsloth")), peers[0] if peers else None)
    lengths = sorted({row["ctx"] for row in group})
    body = [
        [f"{ctx:,}", *(_cell(got.get(ctx), labels[peer].get(ctx) if peer else None) for got in labels.values())]
        for ctx in lengths
    ]
    trained = "all weights" if first.get("train") == "full" else f"LoRA r={first['lora_rank']}"
    about = f"{first['model']}, {first['layers']} layers, {trained}, {first['optimizer']}"
    about += "".join(f", {first[name]}" for name, usual in _USUAL.items() if first.get(name, usual) != usual)
    about += f", {first['gpu']} capped to {first['cap_gib']:g} GiB, {first['date']}, {first['commit']}"
    head = ["tokens", *(f"{label}: tokens/s (peak GiB)" for label in labels)]
    return f"{about} ({_versions(group)}):\n\n{_markdown(head, body)}\n\n{_agreement(group)}".rstrip()


def _agreement(group: list[Row]) -> str:
    """How far losses and gradient norms of one length are apart."""
    apart = {"loss": 0.0, "grad_norm": 0.0}
    for ctx in {row["ctx"] for row in group}:
        for name in apart:
            values = [row[name] for row in group if row["ctx"] == ctx and row.get(name) is not None]
            if len(values) > 1:
                apart[name] = max(apart[name], max(values) / min(values) - 1)
    if not any(apart.values()):
        return ""
    return f"At one length losses differ by at most {apart['loss']:.2%}, gradient norms by {apart['grad_norm']:.2%}."


def limit_table(found: list[Row]) -> str:
    """The longest contexts."""

    def cell(value: Any) -> str:
        return "none" if value is None else f"{value:,}" if isinstance(value, int | float) else str(value)

    body = [[cell(row[name]) for name in _LIMITS] for row in sorted(found, key=lambda row: float(row["cap_gib"]))]
    about = ", ".join(sorted({f"{row['model']} on {row['gpu']}, {row['date']}, {row['commit']}" for row in found}))
    return f"Longest context, one whole step: {about} ({_versions(found)}):\n\n{_markdown(_LIMITS, body)}"


def tables(found: list[Row]) -> str:
    """All tables of the rows, as Markdown."""
    limits = [row for row in found if row["bench"] == "longest"]
    return "\n\n".join([*map(step_table, groups(found)), *([limit_table(limits)] if limits else [])])


def plot(found: list[Row], path: Path) -> None:
    """Tokens/s and peak memory over the length, a column for each group."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    all_groups = groups(found)
    figure, axes = plt.subplots(
        2, len(all_groups), figsize=(4.5 * len(all_groups), 6), squeeze=False, sharex="col", layout="constrained"
    )
    for column, group in zip(axes.T, all_groups, strict=True):
        first = group[0]
        column[0].set_title(f"{first['model']}, {first['cap_gib']:g} GiB, {first['date']}", fontsize=9)
        for axis, (name, title) in zip(column, (("tok_s", "tokens/s"), ("peak_gib", "peak GiB")), strict=True):
            for label, got in by_label(group).items():
                points = sorted((ctx, row[name]) for ctx, row in got.items() if row.get(name) is not None)
                axis.plot(*zip(*points, strict=True) if points else ([], []), marker="o", label=label)
            axis.set_xscale("log", base=2)
            axis.set_ylim(bottom=0)
            axis.set_ylabel(title)
        column[1].set_xlabel("tokens")
        column[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def run(options: argparse.Namespace) -> int:
    """Measure what is missing, then print the tables."""
    well = True
    files = options.table
    if files is None:
        well = measure(options)
        files = [file for name in options.only if (file := options.out / f"{name}.json").exists()]
    found = [row for file in files for row in json.loads(file.read_text())]
    if not (text := tables(found)):
        sys.exit("expected rows of `step` or of longest contexts; got none. See progress.txt, or name other files.")
    print(text)
    if options.plot is not None:
        if not groups(found):
            sys.exit("--plot: expected rows of `step`; got none.")
        plot(found, options.plot)
    return int(not well)
