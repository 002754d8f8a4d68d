"""Which layers are checkpointed, and where the inputs of those wait: a pure function of bytes.

A layer that is not checkpointed keeps what its backward reads and is not run a second time. Where not all can be kept,
the last ones are: backward frees them first, before the recompute of the others needs room. An input that waits on the
host costs next to no time, so inputs move there wherever that lets one more layer be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """What a forward does.

    Attributes:
        first_kept: index of the first layer that is not checkpointed; the number of layers when all are.
        inputs_on_host: whether the inputs of the checkpointed ones leave the device.
        kept_bytes: what the layers not checkpointed hold on the device.
        input_bytes: what the inputs of the checkpointed ones hold on the device.
    """

    first_kept: int
    inputs_on_host: bool
    kept_bytes: int = 0
    input_bytes: int = 0


def choose(free_bytes: int, kept_bytes: Sequence[int], input_bytes: Sequence[int], before: Plan | None = None) -> Plan:
    """The fastest plan that fits.

    Args:
        free_bytes: of the device, beside what a step takes with every layer checkpointed and every input on the host.
        kept_bytes: by layer, what it holds when it is not checkpointed, its input included.
        input_bytes: by layer, what its input takes.
        before: the plan in force; it stays while it fits, unless two layers more could be kept.
    """
    plans = [_most(free_bytes, kept_bytes, input_bytes, on_host) for on_host in (False, True)]
    best = min((plan for plan in plans if plan is not None), key=lambda plan: plan.first_kept)  # the first on a tie
    if before is not None and best.first_kept < before.first_kept <= best.first_kept + 1:
        same = _plan(before.first_kept, before.inputs_on_host, kept_bytes, input_bytes)
        if same.kept_bytes + same.input_bytes <= free_bytes:
            return same
    return best


def _most(free_bytes: int, kept_bytes: Sequence[int], input_bytes: Sequence[int], on_host: bool) -> Plan | None:
    """The plan with the most layers kept; ``None`` where the inputs alone do not fit on the device."""
    found = Plan(len(kept_bytes), True) if on_host else None
    for first in range(len(kept_bytes), -1, -1):
        plan = _plan(first, on_host, kept_bytes, input_bytes)
        if plan.kept_bytes + plan.input_bytes <= free_bytes:
            found = plan
    return found


def _plan(first: int, on_host: bool, kept_bytes: Sequence[int], input_bytes: Sequence[int]) -> Plan:
    on_device = 0 if on_host else sum(input_bytes[:first])
    return Plan(first, on_host and first > 0, sum(kept_bytes[first:]), on_device)
