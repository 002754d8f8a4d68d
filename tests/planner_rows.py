"""Measured steps against the planner: the table of docs/planning.md, and the speeds that `plan` shows.

    make measured   # after rows were added to benchmarks/results

Of rows with the same settings the newest counts. A row that the planner is not held to stands in ``LEFT_OUT`` with the
reason, and is in the table all the same.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import UnslothPluginsError
from unsloth_plugins.core.planner.memory import Peak, Setup, adapter_parameters, check, predict
from unsloth_plugins.core.planner.shape import BUILT_IN, ModelShape

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "planning.md"
SPEEDS = ROOT / "core" / "planner" / "measured.py"
GIB = 2**30
LOW, HIGH = -0.03, 0.05  # of the measured peak, by which a prediction may differ

OLDER = {"h200-2026-12-02-step.json"}
"""Files with rows that others of the same day replace: of rows of one day that of the last file by name counts."""

_FRAMES = "what the frames of a recompute still held counted as kept by its layer, so fewer layers were kept"
_SHARED = "its card was shared with processes that kept experts decoded"
LEFT_OUT: dict[tuple[str, str, str, int], str] = {
    ("h200-2026-12-02-adapters.json", "bare", "auto", 16384): _FRAMES,
    ("h200-2026-12-02-adapters.json", "hf", "auto", 16384): _FRAMES,
    ("h200-2026-12-02-adapters.json", "lightning", "auto", 16384): _FRAMES,
    ("h200-2026-12-02-adapters.json", "axolotl", "auto", 16384): _FRAMES,
    ("h200-2026-12-02-memory.json", "ours_triton", "auto", 8192): _FRAMES,
    ("h200-2026-12-02-memory.json", "ours_triton", "auto", 16384): _FRAMES,
    (
        "h200-2026-12-02-memory.json",
        "ours_triton",
        "min_memory",
        65536,
    ): "experts kept the tokens that their norms gave",
    ("h200-2026-12-02-step-fa4.json", "ours", "auto", 32768): _FRAMES,
    ("h200-2026-12-02-step-fa4.json", "ours_triton", "auto", 8192): _SHARED,
    ("h200-2026-12-02-step-fa4.json", "ours_triton", "auto", 32768): _FRAMES,
    ("h200-2026-12-02-step-mistral.json", "ours_triton", "auto", 32768): _FRAMES,
    ("h200-2026-12-02-step-mistral.json", "ours", "auto", 32768): _FRAMES,
    ("h200-2026-12-03-step.json", "ours_triton", "auto", 65536): _FRAMES,
}
"""By `name_of`: rows that need not lie between ``LOW`` and ``HIGH``, and what was so then."""

Row = dict[str, Any]
_DEFAULTS: Row = {"dtype": "bfloat16", "routing": "balanced", "pairs": False, "expert_layers": None}
_SETTINGS = ("bench", "model", "layers", "weights", "policy", "lora_rank", "optimizer", "cap_gib", "impl", *_DEFAULTS)


def name_of(row: Row) -> tuple[str, str, str, int]:
    """File, implementation, policy and tokens."""
    return row["file"], row["impl"], row["policy"], row["ctx"]


def is_ours(row: Row) -> bool:
    """A whole step of ours that was measured on a GPU."""
    ours = row["bench"] == "adapters" or str(row.get("impl")).startswith("ours")
    return row["bench"] in ("step", "longest", "adapters") and ours and row.get("peak_gib") is not None


def newest(folder: Path = RESULTS) -> list[Row]:
    """Of each setting and length the newest row, with its file as ``file``.

    One step by itself also gets its memory from the driver: it takes the place of several in a row nowhere.
    """

    def age(file: Path) -> tuple[str, bool, str]:
        return file.name[: len("h200-2026-12-02")], file.name not in OLDER, file.name

    found: dict[tuple[Any, ...], Row] = {}
    for file in sorted(folder.glob("h200-*.json"), key=age):
        for row in filter(is_ours, json.loads(file.read_text())):
            row = _DEFAULTS | {"layers": _shape(row).layers} | row | {"file": file.name}
            place = (*(row[name] for name in _SETTINGS), row["ctx"])
            if place not in found or row.get("steps") != 1 or found[place].get("steps") == 1:
                found[place] = row
    return list(found.values())


def _shape(row: Row) -> ModelShape:
    shape = BUILT_IN[row["model"]]
    layers = row.get("layers") or shape.layers
    return replace(shape, layers=layers, windows=shape.windows[:layers])


def setup_of(row: Row) -> Setup:
    """How the step of that row was run."""
    streamed = row["weights"] == "streamed"
    asked = str(row["impl"]).partition("_")
    attention = asked[2] if asked[0] == "ours" and asked[2] else backend_of(row)
    config = UnslothConfig(
        memory_policy=row["policy"],
        checkpoint_pairs=row["pairs"] or False,
        attention="auto" if attention == "sdpa" else attention,  # type: ignore[arg-type]
        weights="streamed" if streamed else "auto",
    )
    return Setup("mxfp4" if streamed else row["weights"], row["lora_rank"], "all", row["optimizer"], config)


def prediction(row: Row) -> Peak | str:
    """What the planner says of that step, or why it says nothing."""
    shape, setup = _shape(row), setup_of(row)
    try:
        check(shape, setup)
    except UnslothPluginsError as error:
        return f"not described: {error.got}"
    if row["trainable_params"] != shape.layers * adapter_parameters(shape, setup):
        return "not described: others than all linear layers have adapters, or none"
    return predict(shape, setup, row["ctx"], int(row["cap_gib"] * GIB), spend=True)


def backend_of(row: Row) -> str:
    """What full attention ran by, as the row has it from the report."""
    return next((name for name in ("fa4", "cudnn", "flex", "sdpa") if name in row.get("backend", "")), "triton")


def table() -> str:
    """Every newest row beside its prediction."""
    lines = [
        "| model, base | policy, cap | tokens | run | measured GiB | predicted | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in newest():
        told = prediction(row)
        about = f"| {row['model']}, {row['weights']} | `{row['policy']}`, {row['cap_gib']:g} GiB | {row['ctx']:,} "
        about += f"| {_run(row)} | {row['peak_gib']:.2f} | "
        if isinstance(told, str):
            lines.append(f"{about}| {told} |")
            continue
        peak = told.device_bytes / GIB
        why = LEFT_OUT.get(name_of(row))
        lines.append(f"{about}{peak:.2f} | {peak / row['peak_gib'] - 1:+.1%}{f': {why}' if why else ''} |")
    return "\n".join(lines)


def _run(row: Row) -> str:
    parts = [row["impl"]] if row["bench"] == "adapters" else []
    parts += [f"{row['layers']} layers"] if row["layers"] != BUILT_IN[row["model"]].layers else []
    parts += ["longest"] if row["bench"] == "longest" else []
    parts += [name for name in ("skewed", "float16") if name in (row["routing"], row["dtype"])]
    parts += ["pairs"] if row["pairs"] else []
    return ", ".join([*parts, backend_of(row), row["date"]])


def speeds() -> str:
    """Every newest row of a whole model, LoRA r=32 everywhere, 8-bit AdamW and ``auto``, as ``measured`` has them."""
    lines = []
    for row in newest():
        asked = (row["bench"], row["policy"], row["lora_rank"], row["optimizer"], row["routing"], row["expert_layers"])
        whole = row["layers"] == BUILT_IN[row["model"]].layers and row["dtype"] == "bfloat16" and not row["pairs"]
        if asked == ("step", "auto", 32, "adamw_8bit", "balanced", None) and whole:
            card, setup = row["gpu"].removeprefix("NVIDIA ").replace(" ", "_"), setup_of(row)
            about = (row["file"], card, row["model"], setup.dtype, backend_of(row), f"{row['cap_gib']:g}")
            lines.append(" ".join([*about, str(row["ctx"]), str(row["tok_s"])]))
    return "\n".join(lines)


def rewritten(path: Path, begin: str, text: str, end: str) -> str:
    """The file's text with ``text`` between the marks.

    Raises:
        ValueError: it has no place for it.
    """
    new = f"{begin}\n{text}\n{end}"
    out, count = re.subn(re.escape(begin) + r".*?" + re.escape(end), lambda _: new, path.read_text(), flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"expected one pair of marks in {path}; got {count}")
    return out


def files() -> dict[Path, str]:
    """What both files have to be."""
    return {
        DOCS: rewritten(DOCS, "<!-- written by `make measured` -->", table(), "<!-- end of measured -->"),
        SPEEDS: rewritten(SPEEDS, '_ROWS = """', speeds(), '"""  # written by `make measured`'),
    }


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
