"""Which layers are checkpointed, and where the inputs of those wait: a pure function of bytes.

A layer that is not checkpointed keeps what its backward reads and is not run a second time. Where not all can be kept,
the last ones are: backward frees them first, before the recompute of the others needs room. An input that waits on the
host costs next to no time, so inputs move there wherever that lets one more layer be kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Plan:
    """What a forward does.

    Attributes:
        first_kept: index of the first layer that is not checkpointed; the number of layers when all are.
        inputs_on_host: whether the inputs of the checkpointed ones leave the device.
        kept_bytes: what the layers not checkpointed hold on the device.
        input_bytes: what the inputs of the checkpointed ones hold on the device.
        first_holding: index of the first layer whose experts keep what they would compute again in backward.
        holding_bytes: what those hold.
    """

    first_kept: int
    inputs_on_host: bool
    kept_bytes: int = 0
    input_bytes: int = 0
    first_holding: int = 1 << 30
    holding_bytes: int = 0


def choose(
    free_bytes: int,
    kept_bytes: Sequence[int],
    input_bytes: Sequence[int],
    before: Plan | None = None,
    holding_bytes: Sequence[int] = (),
) -> Plan:
    """The fastest plan that fits.

    Args:
        free_bytes: of the device, beside what a step takes with every layer checkpointed and every input on the host.
        kept_bytes: by layer, what it holds when it is not checkpointed, its input included.
        input_bytes: by layer, what its input takes.
        before: the plan in force; it stays while it fits, unless two layers more could be kept.
        holding_bytes: by layer, what its experts would hold besides, which pays less a byte: only from what is left.
    """
    plan = _choose(free_bytes, kept_bytes, input_bytes, before)
    if not holding_bytes:
        return plan
    left = free_bytes - plan.kept_bytes - plan.input_bytes
    first = len(holding_bytes)
    while first > plan.first_kept and sum(holding_bytes[first - 1 :]) <= left:
        first -= 1
    return replace(plan, first_holding=first, holding_bytes=sum(holding_bytes[first:]))


def _choose(free_bytes: int, kept_bytes: Sequence[int], input_bytes: Sequence[int], before: Plan | None) -> Plan:
    """``choose`` without what experts hold."""
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
