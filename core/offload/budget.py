"""Watches what a model's steps take on the device, and turns the memory that is left into layers not checkpointed.

The first step of a length checkpoints every layer, unless a longer one was seen. Its recomputes show what each layer
would keep, and its peak what a step needs besides. What layers keep is scaled to shorter lengths; what a step needs is
not, and nothing is guessed for longer ones: there may be more than what grows with the number of tokens.

The device's peak counter is the user's and is never reset here. A step that moves it shows what it needs. One that
stays below an older peak, of loading the model or of a longer step, needs at most what reaches up to that one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.offload.arena import ALIGNMENT
from unsloth_plugins.core.offload.policy import Plan, choose

logger = logging.getLogger("unsloth_plugins")

MARGIN = 0.06  # of the device's memory: stays free for fragmentation and what was not seen yet


@dataclass
class _Layer:
    """Measured at ``tokens``: bytes kept when it is not checkpointed; when it is, those that wait and can survive."""

    tokens: int
    kept_bytes: int
    input_bytes: int
    surviving_bytes: int


class Decoded(Protocol):
    """Decoded weights that can be made again, see ``core.experts.projection.DecodedExperts``."""

    @property
    def held_bytes(self) -> int:
        """On the device now."""

    @property
    def layer_bytes(self) -> int:
        """What one layer takes."""

    def keep(self, count: int) -> None:
        """Of the last ``count`` layers; others are freed now."""


class MemoryBudget:
    """Chooses, for each forward of one model, which of its layers are checkpointed.

    Args:
        memory: tells what the device has and holds.
        host_bytes: that inputs can take on the host; ``None`` for no limit.

    Attributes:
        plan: in force; ``None`` until a step was measured.
        inputs_on_host: where inputs wait in this forward; ``None`` while whoever stores them looks for itself.
        layers: number of layers that ask.
        holding_bytes: a token, that each layer's experts or MLP can hold for backward.
        decoded: what of the model's weights can stay decoded.
    """

    def __init__(self, memory: DeviceMemory | None = None, host_bytes: int | None = None) -> None:
        self.memory, self.host_bytes = memory or DeviceMemory(), host_bytes
        self.plan: Plan | None = None
        self.inputs_on_host: bool | None = None
        self.layers = self.holding_bytes = 0
        self.decoded: Decoded | None = None
        self._device = torch.device("cpu")
        self._tokens = self._longest = 0
        self._seen: dict[int, _Layer] = {}
        self._before = self._extra = self._peak = 0  # bytes, when the first forward of a step began
        self._need = 0  # bytes, of the steps that moved the peak
        self._at_most: int | None = None  # bytes, of steps of the longest length, while none has moved the peak
        self._learning = False  # the last step still ran under such a bound: a better plan need not wait
        self._forwards, self._together = 0, 1  # since the last backward, and the most of them so far

    def begin(self, device: torch.device, tokens: int) -> None:
        """A forward with gradients starts."""
        self._device, self.inputs_on_host = device, None
        if not tokens or not self.layers or not self.memory.is_known(device):
            self.plan = None
            return
        now = self.memory.allocated(device) - (self.decoded.held_bytes if self.decoded is not None else 0)
        if self._forwards == 0:
            self._before, self._extra, self._peak = now, 0, self.memory.peak(device)
        self._forwards += 1
        self._tokens = tokens
        self.plan = self._choose(now)
        if self.plan is not None:
            self._extra += self.plan.device_bytes
            self.inputs_on_host = self.plan.inputs_on_host
        if self.decoded is not None:
            self.decoded.keep(0 if self.plan is None else self.plan.decoded)

    def expect_inputs(self, n_bytes: int) -> None:
        """The inputs of a forward without a plan will take ``n_bytes``: where the host does not take them, they wait on
        the device if that has so much free. If it has not either, they are for the host, which refuses them.
        """
        share = self._host_share()
        if self.plan is None and share is not None and n_bytes > share and self.memory.is_known(self._device):
            free = self.memory.allowed(self._device) * (1 - MARGIN) - self.memory.allocated(self._device)
            self.inputs_on_host = n_bytes > free

    def rest(self) -> None:
        """A forward without gradients starts: it gets the memory of what only saves time."""
        if self.decoded is not None:
            self.decoded.keep(0)

    def keeps(self, index: int) -> bool:
        """Whether a layer runs without a checkpoint in this forward."""
        return self.plan is not None and index >= self.plan.first_kept

    def holds(self, index: int) -> bool:
        """Whether a layer's experts or MLP keep in this forward what they would compute again in backward."""
        return self.plan is not None and index >= self.plan.first_holding

    def lets_survive(self, index: int) -> bool:
        """Whether a checkpointed layer keeps in this forward what its full attention gave."""
        return self.plan is not None and index >= self.plan.first_surviving

    def wants_measure(self, index: int) -> bool:
        """Whether a recompute of the layer is to be measured."""
        seen = self._seen.get(index)
        return self.memory.is_known(self._device) and (seen is None or seen.tokens < self._tokens)

    def measured(self, index: int, tokens: int, kept_bytes: int, input_bytes: int, surviving_bytes: int = 0) -> None:
        """What the layer holds when it is not checkpointed, its input included; when it is, what waits, and what can
        survive of its attention.
        """
        self._seen[index] = _Layer(tokens, kept_bytes, input_bytes, surviving_bytes)

    def stayed(self, n_bytes: int) -> None:
        """An input of a layer waits on the device in a forward without a plan: no part of what a step needs."""
        if self.plan is None:
            self._extra += n_bytes

    def backward_started(self, grad: Any = None) -> None:
        """The backward of the last layer starts."""
        self._together, self._forwards = max(self._together, self._forwards), 0
        if self.memory.is_known(self._device):
            torch.autograd.Variable._execution_engine.queue_callback(self.backward_ended)

    def backward_ended(self) -> None:
        """Note the peak now: whoever measures may start a new one between two steps."""
        self._together, self._forwards = max(self._together, self._forwards), 0
        peak = self.memory.peak(self._device)
        decoded = 0 if self.plan is None else self.plan.decoded_bytes
        need, moved = peak - self._before - self._extra - decoded, peak != self._peak  # lower: somebody has reset it
        self._learning = self._at_most is not None
        if moved:
            self._need = max(self._need, need)
        if self._tokens > self._longest:
            self._at_most = None if moved else need
            self._longest = self._tokens
        elif self._tokens == self._longest and self._at_most is not None:
            self._at_most = None if moved else min(self._at_most, need)

    @property
    def tokens(self) -> int:
        """Of the forward that runs."""
        return self._tokens

    def describe(self) -> str:
        """One clause for the report."""
        if self.plan is None:
            return "all layers checkpointed until a step was measured"
        where = "on the host" if self.plan.inputs_on_host else "on the device"
        kept = self.layers - self.plan.first_kept
        text = f"{kept} of {self.layers} layers not checkpointed at {self._tokens} tokens, other inputs {where}"
        surviving = range(self.plan.first_surviving, self.plan.first_kept)
        if attending := sum(self._seen[index].surviving_bytes > 0 for index in surviving):
            text += f", full attention of {attending} more not computed again"
        held = max(self.layers - self.plan.first_holding, 0)
        text += f", {held} keep what their experts or MLP projected first" if held else ""
        return text + (f", experts of {self.plan.decoded} stay decoded" if self.plan.decoded else "")

    def _choose(self, now: int) -> Plan | None:
        if self._tokens > self._longest or len(self._seen) < self.layers:
            return None
        free = self.memory.allowed(self._device) * (1 - MARGIN) - now - max(self._need, self._at_most or 0)
        left = max(self._together - self._forwards + 1, 1)  # forwards that share what is free
        layers = [self._seen[index] for index in sorted(self._seen)]
        kept, inputs, surviving = (
            [_scaled(n_bytes, self._tokens, each.tokens) for each, n_bytes in zip(layers, of, strict=True)]
            for of in (
                [each.kept_bytes for each in layers],
                [each.input_bytes for each in layers],
                [each.surviving_bytes for each in layers],
            )
        )
        holding = [self.holding_bytes * self._tokens] * len(layers) if self.holding_bytes else []
        before = None if self._learning else self.plan
        plan = choose(
            int(free / left),
            kept,
            inputs,
            before,
            holding,
            surviving,
            self.decoded.layer_bytes if self.decoded else 0,
            self._host_share(),
        )
        if self.plan is None or plan.first_kept != self.plan.first_kept:
            logger.debug("%d of %d layers not checkpointed", self.layers - plan.first_kept, self.layers)
        return plan

    def _host_share(self) -> int | None:
        """Of the host's bytes, for one of the forwards that share a backward; without what slabs are rounded up by."""
        if self.host_bytes is None:
            return None
        return self.host_bytes // max(self._together, self._forwards) - self.layers * ALIGNMENT


def _scaled(n_bytes: int, tokens: int, at: int) -> int:
    return -(-n_bytes * tokens // at)
