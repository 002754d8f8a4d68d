"""What every row of every benchmark carries, and where rows go."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    *("torch", "triton", "transformers", "peft", "bitsandbytes", "unsloth"),
    *("flash-attn-4", "liger-kernel", "cut-cross-entropy"),
)


def versions() -> dict[str, str]:
    """Of Python and of what is installed of ``PACKAGES`` in this process."""
    return {"python": platform.python_version()} | versions_of(*PACKAGES)


def versions_of(*packages: str) -> dict[str, str]:
    """Those of ``packages`` that are installed."""
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def common(bench: str, commit: str | None = None) -> dict[str, Any]:
    """Name of the benchmark, machine, versions, commit and date."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)"
    head = {"bench": bench, "gpu": gpu, "versions": versions(), "commit": commit or _commit()}
    return head | {"date": date.today().isoformat()}


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write(rows: Sequence[dict[str, Any]], path: Path | None) -> None:
    """Write the rows as one JSON list."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(list(rows), indent=1) + "\n")


def table(rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> str:
    """A plain table of some columns."""
    cells = [list(columns)] + [[_short(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells)


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)
