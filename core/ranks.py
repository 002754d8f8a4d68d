"""The processes of a distributed run: which one speaks, and what it decided for all."""

from __future__ import annotations

import logging
from datetime import timedelta

import torch.distributed as dist

from unsloth_plugins.core.errors import UnsupportedError

logger = logging.getLogger("unsloth_plugins")

WAIT = timedelta(minutes=5)  # for the first process to come to the same place


def is_first() -> bool:
    """Whether this process is rank 0, or alone."""
    return not is_distributed() or dist.get_rank() == 0


def warn(message: str, *values: object) -> None:
    """Log a warning once for all processes of a run: they do the same things."""
    if is_first():
        logger.warning(message, *values)


def answer_of_first(question: str, answer: str) -> str:
    """What rank 0 answers to ``question``; a process that is alone gets its own ``answer``.

    Goes through the key-value store of the process group, not through a collective: rank 0 never waits, and several
    models, or ranks that ask in another order, don't get into each other's way. Only for answers that depend on the
    question and the machine: rank 0 may give the same one again.

    Raises:
        UnsupportedError: rank 0 was not asked within `WAIT`.
    """
    if not is_distributed():
        return answer
    store, key = dist.distributed_c10d._get_default_store(), f"unsloth_plugins/{question}"
    if dist.get_rank() == 0:
        store.set(key, answer)
        return answer
    try:
        store.wait([key], WAIT)
    except RuntimeError as error:
        raise UnsupportedError(
            expected=f"rank 0 to choose for all ranks: {question}",
            got=f"no answer within {WAIT.total_seconds():.0f} s",
            remedy="Apply to the same model on every rank, or name the backend: attention='triton' asks nobody.",
        ) from error
    return str(store.get(key).decode())


def is_distributed() -> bool:
    """Whether there are other processes in the run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
