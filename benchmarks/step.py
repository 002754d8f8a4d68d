"""One training step of gpt-oss, Mistral-7B or Gemma-7B at true size, LoRA on all linear layers, against its peers.

`--train full` trains all weights of a gpt-oss in bf16 instead. The 20.9 billion of gpt-oss-20b take 39 GiB, their bf16
gradients 39 and the two states of adamw_8bit 40: an H200 without a cap holds them (`--in-memory --cap-gib 141`), a
smaller card with fewer `--layers`. Only the sums of one layer's experts, or of the head, grow in float32.

Every implementation runs in a process of its own from the same checkpoint of random weights; they take turns, some
steps in a row after untimed ones, and medians are reported. The learning rate is zero, so every step sees the same
weights. With `--in-memory` there is no checkpoint, and ours alone. gpt-oss-120b is never written: LoRA is on attention
and on the experts of the last layers there. A step of minutes is taken once, after a short one that compiles:

    python -m benchmarks step --ctx 16384 --cap-gib 15 --weights streamed --policy min_memory
    python -m benchmarks step --model gpt-oss-120b --ctx 2048,8192
    python -m benchmarks step --model mistral-7b --in-memory --policy min_memory --cap-gib 23 --ctx 300000 \\
        --warm-up 1024 --steps 1 --repeats 1
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import rows
from benchmarks.models import SIZES, WEIGHTS, config_of, find_or_write_checkpoint
from benchmarks.worker import BUILDERS, MARK, POLICIES

_COLUMNS = ("impl", "weights", "ctx", "peak_gib", "reserved_gib", "host_gib", "step_s", "tok_s", "loss", "grad_norm")


_MEASURED = ("peak_gib", "reserved_gib", "host_gib", "step_s", "tok_s", "loss", "grad_norm")


def _lengths(text: str) -> list[int]:
    """Shortest first: after one that does not fit, no longer one is tried."""
    return sorted(int(part) for part in text.split(","))


def _tokens(text: str) -> int:
    if (tokens := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"expected tokens >= 0; got {tokens}")
    return tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--model", choices=sorted(WEIGHTS), default="gpt-oss-20b")
    parser.add_argument(
        "--weights",
        choices=("mxfp4", "streamed", "nf4", "bf16"),
        help="default: as the model is published or used; streamed: mxfp4 with ours' experts in host memory",
    )
    parser.add_argument(
        "--in-memory",
        action="store_true",
        help="no checkpoint, no peers but ours_...; gpt-oss-120b is always built like this",
    )
    parser.add_argument(
        "--expert-layers", type=int, help="LoRA on the experts of so many last layers (all; gpt-oss-120b: 4)"
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16"),
        default="bfloat16",
        help="of everything that is not packed, and of autocast (%(default)s); float16 with a gradient scaler",
    )
    parser.add_argument("--ctx", type=_lengths, default="2048,8192", help="lengths in tokens (%(default)s)")
    parser.add_argument(
        "--cap-gib",
        type=float,
        default=79.0,
        help="memory cap (%(default)s, an 80 GB card); what the card does not have is no cap",
    )
    parser.add_argument("--policy", choices=sorted(POLICIES), default="auto")
    parser.add_argument("--pairs", action="store_true", help="ours with checkpoint_pairs=True")
    parser.add_argument(
        "--train", choices=("lora", "full"), default="lora", help="full: all weights, of --weights bf16"
    )
    parser.add_argument("--lora-rank", type=int, default=32)
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--routing", choices=("balanced", "skewed"), default="balanced")
    parser.add_argument("--optimizer", choices=("adamw_8bit", "adamw"), default="adamw_8bit")
    parser.add_argument("--peers", default="", help=f"any of {', '.join(sorted(set(BUILDERS) - {'ours'}))}")
    parser.add_argument("--repeats", type=int, choices=range(1, 100), default=3, metavar="N")
    parser.add_argument("--steps", type=int, choices=range(1, 100), default=3, metavar="N", help="of one turn")
    parser.add_argument(
        "--warm-up",
        type=_tokens,
        metavar="TOKENS",
        help="of the untimed step before the first turn, 0 for none (as long as the timed ones)",
    )
    parser.add_argument("--checkpoint", type=Path, help="keep the random weights here, and use them if they are there")
    parser.add_argument("--peer-path", help="PYTHONPATH of the Unsloth peers, where they are not installed")
    parser.add_argument("--path", help="more PYTHONPATH for ours: flash-attn-4, where it is not installed")
    parser.add_argument("--commit", help="shown in the rows (default: git's)")
    parser.add_argument("--json", type=Path, help="write the rows here")


class Worker:
    """A child process that holds one implementation; it builds its model when it is first asked what it is about."""

    def __init__(self, impl: str, options: dict[str, Any], path: str | None, log: Path) -> None:
        self.impl = impl
        environment = dict(os.environ, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", UNSLOTH_DISABLE_STATISTICS="1")
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
        if path:
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (path, environment.get("PYTHONPATH"))))
        self._log = log.open("w")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", json.dumps(options | {"impl": impl})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd=Path(__file__).parent.parent,
        )

    @functools.cached_property
    def about(self) -> dict[str, Any]:
        """What it built, or why it could not: ``error``."""
        return self._reply_to("\n")

    def _reply_to(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the answer says how
            self._process.stdin.write(line)
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line[len(MARK) :])
                return answer
            self._log.write(line)
        return {"error": f"the process ended with status {self._process.wait()}"}

    def ask(self, ctx: int, *, warm_up: int, steps: int, report: bool) -> dict[str, Any]:
        """One measurement, see ``Stepper.measure``."""
        request = {"ctx": ctx, "warm_up": warm_up, "steps": steps, "report": report}
        return self._reply_to(json.dumps(request) + "\n")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._log.close()


def _measure(
    workers: list[Worker], options: argparse.Namespace, head: dict[str, Any], out: list[dict[str, Any]]
) -> None:
    """Add rows of implementations that take turns on the card to ``out``; numbers are ``None`` where one failed.

    The file has each row from its first turn on, so a run that is stopped keeps what it measured.
    """
    failed: dict[str, dict[str, Any]] = {}
    for ctx in options.ctx:
        warm_up = ctx if options.warm_up is None else options.warm_up
        answers: dict[str, list[dict[str, Any]]] = {worker.impl: [] for worker in workers}
        found: dict[str, dict[str, Any]] = {}
        for repeat in range(options.repeats):
            for worker in workers:
                mine = answers[worker.impl]
                if worker.impl not in failed:
                    first = repeat == 0
                    answer = worker.ask(ctx, warm_up=warm_up * first, steps=options.steps, report=first)
                    mine.append(answer)
                    if {"oom", "error"} & answer.keys():
                        failed[worker.impl] = {key: answer[key] for key in ("oom", "error") if key in answer}
                row = failed[worker.impl] if worker.impl in failed else _medians(ctx, mine)
                about = head | _about(worker, options) | {"ctx": ctx, "warm_up": warm_up}
                about |= {"repeats": len(mine), "steps": options.steps}
                found[worker.impl] = about | dict.fromkeys(_MEASURED) | row
                rows.write([*out, *found.values()], options.json)
        out.extend(found.values())
        print(rows.table(list(found.values()), _COLUMNS), flush=True)


def _medians(ctx: int, answers: list[dict[str, Any]]) -> dict[str, Any]:
    """What the answers of one implementation at one length come to."""
    seconds = statistics.median(answer["step_s"] for answer in answers)
    highest = {key: max(answer[key] for answer in answers) for key in ("peak_gib", "reserved_gib", "host_gib")}
    first = {key: answers[0][key] for key in ("loss", "grad_norm")}
    return highest | {"step_s": round(seconds, 4), "tok_s": round(ctx / seconds, 1)} | first


def _about(worker: Worker, options: argparse.Namespace) -> dict[str, Any]:
    """What a row says about its implementation."""
    ours = worker.impl.startswith("ours")
    return {
        "impl": worker.impl,
        "weights": _held(worker, options.weights),
        "policy": options.policy if ours else None,
        "pairs": options.pairs if ours else None,
        "backend": worker.about["backend"],
        "trainable_params": worker.about["trainable_params"],
        "versions": worker.about["versions"],
    }


def _held(worker: Worker, weights: str) -> str:
    """What a row says about weights: those of the process, which may not be able to hold what was asked for."""
    if worker.impl == "transformers" and weights in ("mxfp4", "streamed"):
        return "bf16"
    return held(worker.about, weights)


def held(about: dict[str, Any], weights: str) -> str:
    """The weights that a worker of ours holds, by what it says about itself: ``auto`` may have streamed them."""
    if weights in ("mxfp4", "streamed"):
        return "streamed" if about.get("streamed") else "mxfp4"
    return weights


def disagreements(steps: list[dict[str, Any]]) -> list[str]:
    """What keeps rows of one length from being comparable: trainable parameters, and over 1 % in loss or norm."""
    found = []
    for ctx in sorted({row["ctx"] for row in steps}):
        same = [row for row in steps if row["ctx"] == ctx and row["loss"] is not None]
        first = next((row for row in same if row["impl"] == "transformers"), same[0] if same else None)
        for row in same:
            assert first is not None
            if row["trainable_params"] != first["trainable_params"]:
                found.append(
                    f"{ctx}: {row['impl']} trains {row['trainable_params']} parameters, "
                    f"{first['impl']} {first['trainable_params']}"
                )
            for key in ("loss", "grad_norm"):
                if abs(row[key] / first[key] - 1) > 0.01:
                    found.append(f"{ctx}: {key} {row[key]:.4f} of {row['impl']}, {first[key]:.4f} of {first['impl']}")
    return found


def settings_of(options: argparse.Namespace, folder: Path | None) -> dict[str, Any]:
    """What a worker is told; without a ``folder`` it builds the model in memory."""
    return {
        "path": None if folder is None else str(folder),
        "model": options.model,
        "layers": options.layers,
        "routing": options.routing,
        "expert_layers": options.expert_layers,
        "weights": options.weights,
        "train": options.train,
        "rank": options.lora_rank,
        "policy": options.policy,
        "pairs": options.pairs,
        "optimizer": options.optimizer,
        "dtype": options.dtype,
        "cap_gib": options.cap_gib,
        "longest": max(options.ctx),
    }


def check(options: argparse.Namespace) -> None:
    """Fill in what depends on the model: ``weights``, ``in_memory``, ``expert_layers``; ``peers`` as a list.

    Raises:
        SystemExit: options that exclude each other.
    """
    options.peers = peers = [name for name in options.peers.split(",") if name]
    for name in peers:
        if name not in BUILDERS or name == "ours":
            sys.exit(f"--peers: expected any of {', '.join(sorted(set(BUILDERS) - {'ours'}))}; got {name!r}.")
    others = [name for name in peers if not name.startswith("ours")]
    options.weights = options.weights or WEIGHTS[options.model][0]
    largest = options.model == "gpt-oss-120b"
    options.in_memory = options.in_memory or largest
    if options.in_memory and others:
        sys.exit(f"a model built in memory: expected no --peers but ours_...; got {', '.join(others)}.")
    if options.expert_layers is not None and (others or options.model not in SIZES):
        sys.exit("--expert-layers: expected a gpt-oss and no --peers but ours_..., the others adapt all layers.")
    if largest and options.expert_layers is None:
        options.expert_layers = 4
    if options.weights not in WEIGHTS[options.model]:
        allowed = " or ".join(WEIGHTS[options.model])
        sys.exit(f"--weights: expected {allowed} for {options.model}; got {options.weights}.")
    if options.train == "full" and (options.weights != "bf16" or options.expert_layers is not None):
        sys.exit(f"--train full: expected --weights bf16 and no --expert-layers; got {options.weights}.")
    if options.train == "full" and set(others) - {"transformers"}:
        sys.exit(f"--train full: expected no --peers but transformers and ours_...; got {', '.join(others)}.")
    if options.dtype == "float16" and options.weights != "nf4":
        sys.exit(f"--dtype float16: expected --weights nf4; got {options.weights}. gpt-oss runs in bfloat16 here.")


def run(options: argparse.Namespace) -> int:
    """Write or find the checkpoint, start the processes, print a table."""
    check(options)
    head = rows.common("step", options.commit)
    head |= {
        "model": options.model,
        "layers": config_of(options.model, options.layers).num_hidden_layers,
        "train": options.train,
        "lora_rank": options.lora_rank if options.train == "lora" else None,
        "optimizer": options.optimizer,
        "dtype": options.dtype,
        "routing": options.routing,
        "cap_gib": options.cap_gib,
        "expert_layers": options.expert_layers,
    }
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.checkpoint or Path(scratch) / "model"
        if not options.in_memory:
            find_or_write_checkpoint(folder, options.model, options.layers, options.routing)
        packed = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        settings = settings_of(options, None if options.in_memory else folder)
        logs = options.json.parent if options.json else Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        out: list[dict[str, Any]] = []
        # transformers holds 16-bit weights: beside the others it would not leave them the capped memory.
        phases = [[name] for name in options.peers if name == "transformers"]
        phases.append(["ours", *(name for name in options.peers if name != "transformers")])
        for phase in phases:
            paths = {"ours": options.path, "unsloth": options.peer_path}
            started = [Worker(name, settings, paths.get(name.split("_")[0]), logs / f"{name}.log") for name in phase]
            workers = []
            for name, worker in zip(phase, started, strict=True):
                if "error" in worker.about:
                    out.append(head | {"impl": name, "ctx": None} | worker.about)
                    print(name, worker.about["error"], flush=True)
                    continue
                workers.append(worker)
                if "load" in worker.about and not options.in_memory:
                    load = rows.common("load", options.commit) | {"impl": name, "model": options.model}
                    load |= {"weights": options.weights, "packed_gib": round(packed / 2**30, 3)}
                    out.append(load | worker.about["load"])
            _measure(workers, options, head, out)
            for worker in workers:
                worker.close()
    steps = [row for row in out if row["bench"] == "step"]
    for line in disagreements([row for row in steps if "loss" in row]):
        print("They differ at", line)
    print({key: head[key] for key in head if key != "bench"})
    for row in out:
        if row["bench"] == "load":
            print("load", {key: row[key] for key in ("impl", "packed_gib", "peak_gib", "reserved_gib", "load_s")})
    print(rows.table(steps, _COLUMNS))
    return int(any("error" in row for row in steps))
