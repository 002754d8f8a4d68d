"""Tokens per second that were measured, from benchmarks/results. What is not here is not known, and is not guessed.

All rows: one card, batch 1, LoRA r=32 on all linear layers, 8-bit AdamW, ``memory_policy="auto"``, a cap of 79 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from unsloth_plugins.core.planner.memory import Setup


@dataclass(frozen=True)
class Measured:
    """One row.

    Attributes:
        source: its file in benchmarks/results.
        attention: ``triton``, or ``fa4`` where flash-attn-4 was installed.
    """

    source: str
    card: str
    model: str
    dtype: str
    attention: str
    tokens: int
    tokens_per_s: float


_MODEL = ("H200", "gpt-oss-20b", "mxfp4")
ROWS = (
    Measured("h200-2026-12-02-step-decoded.json", *_MODEL, "triton", 2048, 7044.6),
    Measured("h200-2026-12-02-step-decoded.json", *_MODEL, "triton", 8192, 20911.4),
    Measured("h200-2026-12-02-step.json", *_MODEL, "triton", 32768, 14008.3),
    Measured("h200-2026-12-02-step-decoded.json", *_MODEL, "fa4", 2048, 6773.1),
    Measured("h200-2026-12-02-step-decoded.json", *_MODEL, "fa4", 8192, 21656.0),
    Measured("h200-2026-12-02-step.json", *_MODEL, "fa4", 32768, 16722.2),
)


def find_measured(card: str | None, model: str, setup: Setup, tokens: int | None = None) -> list[Measured]:
    """Rows of that card, model and setup; of one length where ``tokens`` is given."""
    asked = (setup.lora_rank, setup.lora_targets, setup.optimizer, setup.config.memory_policy)
    if asked != (32, "all", "adamw_8bit", "auto"):
        return []
    rows = [row for row in ROWS if (row.card, row.model, row.dtype) == (card, model, setup.dtype)]
    return [row for row in rows if tokens in (None, row.tokens)]
