"""Which layers are checkpointed, and where the inputs of those wait: a pure function of bytes.

A layer that is not checkpointed keeps what its backward reads and is not run a second time. Where not all can be kept,
the last ones are: backward frees them first, before the recompute of the others needs room. An input that waits on the
host costs next to no time, so inputs move there wherever that lets one more layer be kept, and the host takes them.

The output of full attention and its normalisers are kept before whole layers. For gpt-oss, attention over S tokens is
8,192 S operations for 8,448 bytes a token, and the rest of what a recompute runs is 53 million for the other bytes of a
layer, seven times as many: S operations a byte against about 900.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
        first_surviving: index of the first checkpointed layer whose full attention is not computed again.
        surviving_bytes: what those hold for it.
        decoded: number of layers, the last ones, whose experts stay decoded from pass to pass.
        decoded_bytes: what those take, which is no activation.
    """

    first_kept: int
    inputs_on_host: bool
    kept_bytes: int = 0
    input_bytes: int = 0
    first_holding: int = 1 << 30
    holding_bytes: int = 0
    first_surviving: int = 1 << 30
    surviving_bytes: int = 0
    decoded: int = 0
    decoded_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """All activations that it holds on the device."""
        return self.kept_bytes + self.input_bytes + self.holding_bytes + self.surviving_bytes


def choose(
    free_bytes: int,
    kept_bytes: Sequence[int],
    input_bytes: Sequence[int],
    before: Plan | None = None,
    holding_bytes: Sequence[int] = (),
    surviving_bytes: Sequence[int] = (),
    decoded_bytes: int = 0,
    host_bytes: int | None = None,
) -> Plan:
    """The fastest plan that fits: first what saves most time a byte, which are the outputs of full attention, then
    layers, then what experts can hold, then experts that stay decoded.

    Args:
        free_bytes: of the device, beside what a step takes with every layer checkpointed and every input on the host.
        kept_bytes: by layer, what it holds when it is not checkpointed, its input included.
        input_bytes: by layer, what its input takes.
        before: the plan in force; it stays while it fits, unless two layers more could be kept.
        holding_bytes: by layer, what its experts would hold besides, which pays less a byte: only from what is left.
        surviving_bytes: by layer, the results of full attention, which a layer that is not checkpointed holds anyway.
        decoded_bytes: of the experts of one layer, decoded; 0 where there are none that could stay so.
        host_bytes: that the inputs of checkpointed layers can take on the host; ``None`` for no limit.

    Returns:
        The plan; where none fits, the one that holds least on the device of those that the host takes.
    """
    surviving_bytes = surviving_bytes or [0] * len(kept_bytes)
    plan = _choose(free_bytes, kept_bytes, input_bytes, surviving_bytes, before, host_bytes)
    if holding_bytes:
        left = free_bytes - plan.device_bytes
        first = len(holding_bytes)
        while first > plan.first_kept and sum(holding_bytes[first - 1 :]) <= left:
            first -= 1
        plan = replace(plan, first_holding=first, holding_bytes=sum(holding_bytes[first:]))
    if decoded_bytes:
        count = min(max(free_bytes - plan.device_bytes, 0) // decoded_bytes, len(kept_bytes))
        plan = replace(plan, decoded=count, decoded_bytes=count * decoded_bytes)
    return plan


def _choose(
    free_bytes: int,
    kept_bytes: Sequence[int],
    input_bytes: Sequence[int],
    surviving_bytes: Sequence[int],
    before: Plan | None,
    host_bytes: int | None,
) -> Plan:
    """``choose`` without what experts hold."""
    layers = len(kept_bytes)

    def plan(first_kept: int, first_surviving: int, on_host: bool) -> Plan:
        surviving = sum(surviving_bytes[first_surviving:first_kept])
        return Plan(
            first_kept,
            on_host and first_kept > 0,
            sum(kept_bytes[first_kept:]),
            0 if on_host else sum(input_bytes[:first_kept]),
            first_surviving=first_surviving if surviving else 1 << 30,
            surviving_bytes=surviving,
        )

    def is_taken(plan: Plan) -> bool:
        """By the host."""
        return host_bytes is None or not plan.inputs_on_host or sum(input_bytes[: plan.first_kept]) <= host_bytes

    def least(plans: Iterable[Plan], otherwise: Plan) -> Plan:
        return next((each for each in plans if each.device_bytes <= free_bytes and is_taken(each)), otherwise)

    plain = (plan(n, layers, on_host) for n in reversed(range(layers + 1)) for on_host in (True, False))
    nothing = min(filter(is_taken, plain), key=lambda each: each.device_bytes)

    def surviving_from(n: int) -> Plan:
        return plan(nothing.first_kept, n, nothing.inputs_on_host)

    first = next((n for n in range(layers) if surviving_from(n).device_bytes <= free_bytes), layers)
    best = least((plan(n, first, on_host) for n in range(layers + 1) for on_host in (False, True)), nothing)
    if before is not None and best.first_kept < before.first_kept <= best.first_kept + 1:
        return least([plan(before.first_kept, first, before.inputs_on_host)], best)
    return best
