"""Tokens per second that were measured, from benchmarks/results. What is not here is not known, and is not guessed.

All rows: one card, batch 1, LoRA r=32 on all linear layers, 8-bit AdamW, ``memory_policy="auto"``.
"""

from __future__ import annotations

from dataclasses import dataclass

from unsloth_plugins.core.planner.memory import Setup


@dataclass(frozen=True)
class Measured:
    """One row.

    Attributes:
        source: its file in benchmarks/results.
        attention: by what full attention ran: ``triton``, ``fa4`` with flash-attn-4 installed, ``cudnn``, ``sdpa``.
        cap_gib: what the process might have of the card's memory, GiB.
    """

    source: str
    card: str
    model: str
    dtype: str
    attention: str
    cap_gib: float
    tokens: int
    tokens_per_s: float


_ROWS = """
h200-2026-12-02-step-decoded.json H200 gpt-oss-20b mxfp4 fa4 79 2048 6773.1
h200-2026-12-02-step-fa4.json H200 gpt-oss-20b mxfp4 fa4 79 8192 22187.0
h200-2026-12-02-step-fa4.json H200 gpt-oss-20b mxfp4 fa4 79 32768 16771.7
h200-2026-12-02-step-decoded.json H200 gpt-oss-20b mxfp4 triton 79 2048 7044.6
h200-2026-12-02-step-fa4.json H200 gpt-oss-20b mxfp4 triton 79 8192 21343.5
h200-2026-12-02-step-fa4.json H200 gpt-oss-20b mxfp4 triton 79 32768 14065.7
h200-2026-12-02-memory.json H200 gpt-oss-20b mxfp4 triton 15 8192 15198.5
h200-2026-12-02-memory.json H200 gpt-oss-20b mxfp4 triton 15 16384 15226.8
h200-2026-12-02-step-mistral.json H200 mistral-7b nf4 sdpa 79 8192 13319.5
h200-2026-12-02-step-mistral.json H200 mistral-7b nf4 triton 79 8192 12265.4
h200-2026-12-02-step-mistral.json H200 mistral-7b nf4 sdpa 79 32768 8325.7
h200-2026-12-02-step-mistral.json H200 mistral-7b nf4 triton 79 32768 6747.6
h200-2026-12-03-step-mistral.json H200 mistral-7b nf4 fa4 79 65536 5722.6
h200-2026-12-03-step-mistral.json H200 mistral-7b nf4 triton 79 65536 4214.5
h200-2026-12-03-step.json H200 gpt-oss-20b mxfp4 fa4 79 65536 12143.2
h200-2026-12-03-step.json H200 gpt-oss-20b mxfp4 triton 79 65536 9438.4
"""  # written by `make measured`


def _row(line: str) -> Measured:
    source, card, model, dtype, attention, cap, tokens, speed = line.split()
    return Measured(source, card.replace("_", " "), model, dtype, attention, float(cap), int(tokens), float(speed))


ROWS = tuple(map(_row, _ROWS.split("\n")[1:-1]))


def find_measured(card: str | None, model: str, setup: Setup, tokens: int | None = None) -> list[Measured]:
    """Rows of that card, model and setup; of one length where ``tokens`` is given."""
    asked = (setup.lora_rank, setup.lora_targets, setup.optimizer, setup.config.memory_policy)
    if asked != (32, "all", "adamw_8bit", "auto"):
        return []
    rows = [row for row in ROWS if (row.card, row.model, row.dtype) == (card, model, setup.dtype)]
    return [row for row in rows if tokens in (None, row.tokens)]
