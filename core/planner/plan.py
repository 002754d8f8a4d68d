"""``plan``: what fits on which card, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import ConfigError
from unsloth_plugins.core.planner.cards import CARDS, CONTEXT_GIB, Card, find_card
from unsloth_plugins.core.planner.measured import ROWS, Measured, find_measured
from unsloth_plugins.core.planner.memory import (
    RESERVED,
    Dtype,
    Optimizer,
    Peak,
    Setup,
    Targets,
    adapter_parameters,
    base_bytes,
    check,
    predict,
)
from unsloth_plugins.core.planner.shape import BUILT_IN, ModelShape, find_shape

GIB = 1 << 30
PROCESS_GIB = 2.1  # host memory of a training process by itself; measured 1.7 to 2.04
STEP = 256  # tokens between the lengths that ``longest`` looks at
_MOST = 1 << 23  # tokens


@dataclass(frozen=True)
class Need:
    """What a step of one length takes.

    Attributes:
        tokens: of all rows of the batch together.
        peak_gib: in tensors on the device at the largest moment.
        reserved_gib: what torch's allocator takes for that; this must fit.
        host_gib: of host memory: the process, inputs of layers, streamed weights.
        inputs_gib: of these, inputs of layers.
        moment: when the peak is.
        terms_gib: what it is made of.
        checkpointed: layers that are computed twice.
        inputs_on_host: whether their inputs wait in host memory.
    """

    tokens: int
    peak_gib: float
    reserved_gib: float
    host_gib: float
    inputs_gib: float
    moment: str
    terms_gib: dict[str, float]
    checkpointed: int
    inputs_on_host: bool

    @classmethod
    def of(cls, tokens: int, peak: Peak) -> Need:
        """From bytes."""
        return cls(
            tokens=tokens,
            peak_gib=peak.device_bytes / GIB,
            reserved_gib=peak.device_bytes * RESERVED / GIB,
            host_gib=PROCESS_GIB + (peak.host_bytes + peak.streamed_bytes) / GIB,
            inputs_gib=peak.host_bytes / GIB,
            moment=peak.moment,
            terms_gib={name: size / GIB for name, size in peak.terms.items()},
            checkpointed=peak.plan.first_kept,
            inputs_on_host=peak.host_bytes > 0,
        )


@dataclass(frozen=True)
class Limit:
    """The longest context of cards of one size: ``tokens`` is 0 where not even the shortest fits."""

    gb: int
    usable_gib: float
    cards: tuple[str, ...]
    tokens: int
    host_gib: float


@dataclass(frozen=True)
class Remedy:
    """A change that makes a wish fit, as one would write it, and what a step takes then."""

    change: str
    peak_gib: float
    host_gib: float


@dataclass(frozen=True)
class PlanReport:
    """The answer of ``plan``.

    Attributes:
        model, parameters, trainable, base_gib: of the model; ``base_gib`` is also what it takes on disk.
        setup: how it is trained.
        card: name as listed, or ``None``.
        usable_gib: device memory for tensors that was planned for, or ``None``.
        longest: the longest context there, with the host memory that was given; ``None`` without a card.
        need: of the wished context; ``None`` without one.
        fits: whether ``need`` fits; ``None`` without a card or a wish.
        remedies: where it does not.
        measured: rows of benchmarks/results for this card, model and setup.
        limits: the longest context by size of card.
        curve: the least that contexts take, by doubling.
        notes: what to know besides.
    """

    model: str
    parameters: int
    trainable: int
    base_gib: float
    setup: Setup
    card: str | None
    usable_gib: float | None
    longest: int | None
    need: Need | None
    fits: bool | None
    remedies: tuple[Remedy, ...]
    measured: tuple[Measured, ...]
    limits: tuple[Limit, ...]
    curve: tuple[Need, ...]
    notes: tuple[str, ...]


def fits(shape: ModelShape, setup: Setup, tokens: int, usable_gib: float, host_ram_gib: float | None) -> bool:
    """Whether a step of that length fits at its least."""
    need = Need.of(tokens, predict(shape, setup, tokens, int(usable_gib * GIB)))
    limit = setup.config.host_memory_gib
    return (
        need.reserved_gib <= usable_gib
        and (host_ram_gib is None or need.host_gib <= host_ram_gib)
        and (limit is None or need.inputs_gib <= limit)
    )


def longest(shape: ModelShape, setup: Setup, usable_gib: float, host_ram_gib: float | None = None) -> int:
    """The longest context that fits, a multiple of 256 tokens; 0 where none does."""
    low, high = 0, _MOST // STEP
    while low < high:
        middle = (low + high + 1) // 2
        if fits(shape, setup, middle * STEP, usable_gib, host_ram_gib):
            low = middle
        else:
            high = middle - 1
    return low * STEP


def changes(shape: ModelShape, setup: Setup) -> list[tuple[str, Setup]]:
    """Single changes that save memory, the cheapest first."""
    found: list[tuple[str, Setup]] = []
    small: Dtype = "mxfp4" if shape.experts else "nf4"
    if setup.config.memory_policy != "min_memory":
        config = replace(setup.config, memory_policy="min_memory")
        found.append(('memory_policy="min_memory"', replace(setup, config=config)))
    if setup.dtype == "mxfp4" and setup.config.weights != "streamed":
        config = replace(setup.config, weights="streamed")
        found.append(('weights="streamed"', replace(setup, config=config)))
    if setup.optimizer == "adamw":
        found.append(("the 8-bit AdamW of bitsandbytes", replace(setup, optimizer="adamw_8bit")))
    if setup.dtype != small:
        found.append((f"the base in {small}", replace(setup, dtype=small)))
    if setup.lora_rank > 8:
        found.append(("lora_rank=8", replace(setup, lora_rank=8)))
    if setup.lora_targets == "all":
        found.append(("adapters on attention only", replace(setup, lora_targets="attention")))
    return found


def remedies_for(
    shape: ModelShape, setup: Setup, tokens: int, usable_gib: float, host_ram_gib: float | None
) -> tuple[Remedy, ...]:
    """Every single change that is enough; where none is, several together; and always a shorter context."""

    def remedy(change: str, changed: Setup, length: int = tokens, gib: float = usable_gib) -> Remedy:
        need = Need.of(length, predict(shape, changed, length, int(gib * GIB)))
        return Remedy(change, need.peak_gib, need.host_gib)

    def is_enough(changed: Setup) -> bool:
        return fits(shape, changed, tokens, usable_gib, host_ram_gib)

    single = changes(shape, setup)
    found = [remedy(name, changed) for name, changed in single if is_enough(changed)]
    if not found:
        names, together = [], setup
        while not is_enough(together) and (left := changes(shape, together)):
            name, together = left[0]
            names.append(name)
        if is_enough(together):
            found.append(remedy(" and ".join(names), together))
    shorter = longest(shape, setup, usable_gib, host_ram_gib)
    if shorter:
        found.append(remedy(f"a context of {shorter:,} tokens", setup, shorter))
    bigger = next((card for card in CARDS if fits(shape, setup, tokens, card.usable_gib, host_ram_gib)), None)
    if bigger is not None:
        found.append(remedy(f"a card of {bigger.gb} GB ({bigger.names[-1]})", setup, gib=bigger.usable_gib))
    return tuple(found)


def _limit(shape: ModelShape, setup: Setup, card: Card, host_ram_gib: float | None) -> Limit:
    tokens = longest(shape, setup, card.usable_gib, host_ram_gib)
    host = Need.of(tokens, predict(shape, setup, tokens, int(card.usable_gib * GIB))).host_gib if tokens else 0.0
    return Limit(card.gb, card.usable_gib, card.names, tokens, host)


def _curve(shape: ModelShape, setup: Setup, most: int) -> tuple[Need, ...]:
    lengths, tokens = [], 1024
    while tokens <= most:
        lengths.append(tokens)
        tokens *= 2
    return tuple(Need.of(length, predict(shape, setup, length)) for length in lengths)


def _notes(shape: ModelShape, setup: Setup, card: str | None, tokens: int | None) -> tuple[str, ...]:
    notes = []
    if tokens is not None and shape.trained_tokens is not None and tokens > shape.trained_tokens:
        notes.append(f"{shape.name} was trained on up to {shape.trained_tokens:,} positions.")
    if card is not None and card.endswith("*"):
        notes.append(f"{card.rstrip('*')} has no bf16: train in fp16.")
    if shape.family not in {BUILT_IN[row.model].family for row in ROWS}:
        notes.append(f"Checked against counted tensors, not yet against a measured peak: {shape.family}.")
    if setup.config.gradient_checkpointing is False:
        notes.append("Planned with gradient checkpointing, which the trainer must switch on.")
    return tuple(notes)


def _positive(name: str, value: Any, whole: bool = False) -> None:
    kinds = (int,) if whole else (int, float)
    if value is not None and (isinstance(value, bool) or not isinstance(value, kinds) or value <= 0):
        kind = "an integer" if whole else "a number"
        raise ConfigError(expected=f"`{name}` to be {kind} > 0", got=repr(value), remedy="Leave it out for none.")


def plan(
    model: str | Mapping[str, Any] | Any,
    *,
    gpu: str | None = None,
    vram_gib: float | None = None,
    host_ram_gib: float | None = None,
    ctx: int | None = None,
    batch: int = 1,
    dtype: Dtype | None = None,
    lora_rank: int = 32,
    lora_targets: Targets = "all",
    optimizer: Optimizer = "adamw_8bit",
    config: UnslothConfig | None = None,
    **options: Any,
) -> PlanReport:
    """Peak memory of a step, longest contexts and what would make a wish fit. Nothing is loaded or downloaded.

    Args:
        model: a folder, a cached hub id, a built-in name, or a config.
        gpu: a card by name.
        vram_gib: or its memory, GiB, of which 1 is left to the driver.
        host_ram_gib: host memory; ``None`` for any amount.
        ctx: tokens of one row.
        batch: rows on the card at once.
        dtype, lora_rank, lora_targets, optimizer: see ``memory.Setup``; by default the base is stored as published.
        config, options: as for ``apply``.

    Raises:
        ConfigError: an option has a wrong value.
        ModelError: no config was found.
        UnsupportedError: the formulas don't describe this model or option.
    """
    if gpu is not None and vram_gib is not None:
        raise ConfigError(expected="a card or its memory", got="both", remedy="Leave one of gpu and vram_gib out.")
    _positive("vram_gib", vram_gib)
    _positive("host_ram_gib", host_ram_gib)
    _positive("ctx", ctx, whole=True)
    _positive("batch", batch, whole=True)
    shape = find_shape(model)
    setup = Setup(
        dtype=dtype or ("mxfp4" if shape.family == "gpt_oss" else "bf16"),
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        optimizer=optimizer,
        config=UnslothConfig.from_options(config, **options),
    )
    check(shape, setup)
    card: Card | None = None
    name: str | None = None
    if gpu is not None:
        card, name = find_card(gpu)
    usable = card.usable_gib if card else None if vram_gib is None else vram_gib - CONTEXT_GIB
    limits = tuple(_limit(shape, setup, each, host_ram_gib) for each in CARDS)
    tokens = None if ctx is None else ctx * batch
    there = need = fit = None
    remedies: tuple[Remedy, ...] = ()
    if usable is not None:
        there = longest(shape, setup, usable, host_ram_gib)
    if tokens is not None:
        fit = None if usable is None else fits(shape, setup, tokens, usable, host_ram_gib)
        device_bytes = None if usable is None else int(usable * GIB)
        need = Need.of(tokens, predict(shape, setup, tokens, device_bytes, spend=fit is True))
        if fit is False and usable is not None:
            remedies = remedies_for(shape, setup, tokens, usable, host_ram_gib)
    return PlanReport(
        model=shape.name,
        parameters=shape.parameters(),
        trainable=shape.layers * adapter_parameters(shape, setup),
        base_gib=base_bytes(shape, setup) / GIB,
        setup=setup,
        card=None if name is None else name.rstrip("*"),
        usable_gib=usable,
        longest=there,
        need=need,
        fits=fit,
        remedies=remedies,
        measured=tuple(find_measured(name, shape.name, setup, tokens)),
        limits=limits,
        curve=_curve(shape, setup, max(limit.tokens for limit in limits)),
        notes=_notes(shape, setup, name, ctx),
    )
