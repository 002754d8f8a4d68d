"""A plan as text for a terminal (rich) and as a picture (matplotlib)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from unsloth_plugins.core.planner.cards import CARDS
from unsloth_plugins.core.planner.plan import Limit, Need, PlanReport

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_BAR = 40  # characters of the longest


def plan_text(report: PlanReport) -> Group:
    """The whole plan, to print on a rich console."""
    from rich.console import Group

    parts: list[object] = [_head(report)]
    if report.need is not None:
        parts += [_answer(report), _terms(report.need)]
    parts += [_limits(report.limits), _curve(report.curve)]
    parts += [f"note: {note}" for note in report.notes]
    return Group(*parts)  # type: ignore[arg-type]


def _head(report: PlanReport) -> str:
    setup = report.setup
    targets = "all linear layers" if setup.lora_targets == "all" else "attention"
    return (
        f"{report.model}: {report.parameters / 1e9:.2f} B parameters in {setup.dtype}, {report.base_gib:.2f} GiB; "
        f"LoRA r={setup.lora_rank} on {targets}, {report.trainable:,} trainable; {setup.optimizer}, "
        f"memory_policy={setup.config.memory_policy}"
    )


def _answer(report: PlanReport) -> str:
    need = report.need
    assert need is not None
    lines = [
        f"{need.tokens:,} tokens: {need.peak_gib:.2f} GiB at the peak ({need.moment}), {need.reserved_gib:.2f} GiB "
        f"with what the allocator rounds up; {need.host_gib:.1f} GiB of host memory; "
        f"{need.checkpointed} layers checkpointed"
    ]
    if report.usable_gib is not None:
        verdict = "fits" if report.fits else "does not fit"
        lines.append(
            f"{verdict} in {report.usable_gib:.1f} GiB; the longest context there is {report.longest:,} tokens"
        )
    for remedy in report.remedies:
        lines.append(f"  would fit: {remedy.change} ({remedy.peak_gib:.2f} GiB, host {remedy.host_gib:.1f} GiB)")
    speeds = [
        f"{row.tokens_per_s:,.0f} tokens/s with {row.attention} under a cap of {row.cap_gib:g} GiB ({row.source})"
        for row in report.measured
    ]
    lines.append("speed: " + ("; ".join(speeds) or "not measured for this card, model, setup and length"))
    return "\n".join(lines)


def _terms(need: Need) -> Table:
    from rich.table import Table

    table = Table("at the peak", "GiB")
    for name, size in need.terms_gib.items():
        table.add_row(name, f"{size:.2f}")
    return table


def _limits(limits: tuple[Limit, ...]) -> Table:
    from rich.table import Table

    table = Table("card", "GiB for tensors", "longest context", "host GiB", "such as")
    for limit in limits:
        tokens = f"{limit.tokens:,}" if limit.tokens else "does not fit"
        host = f"{limit.host_gib:.1f}" if limit.tokens else ""
        names = ", ".join(name.rstrip("*") for name in limit.cards)
        table.add_row(f"{limit.gb} GB", f"{limit.usable_gib:.0f}", tokens, host, names)
    return table


def _curve(curve: tuple[Need, ...]) -> Table:
    from rich.table import Table

    table = Table("tokens", "least GiB", "")
    most = max((need.peak_gib for need in curve), default=1.0)
    for need in curve:
        table.add_row(f"{need.tokens:,}", f"{need.peak_gib:.1f}", "█" * max(round(_BAR * need.peak_gib / most), 1))
    return table


def plan_png(report: PlanReport, path: str | Path) -> None:
    """Least device memory against context, with the cards' sizes, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([need.tokens for need in report.curve], [need.reserved_gib for need in report.curve], marker="o")
    top = max((need.reserved_gib for need in report.curve), default=1.0)
    for card in CARDS:
        if card.usable_gib <= 1.1 * top:
            axes.axhline(card.usable_gib, color="grey", linewidth=0.6, linestyle=":")
            axes.annotate(f"{card.gb} GB", (1, card.usable_gib), xycoords=("axes fraction", "data"), fontsize=7)
    axes.set_xscale("log", base=2)
    axes.set_ylim(0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("device memory at the least, GiB")
    setup = report.setup
    axes.set_title(f"{report.model}, {setup.dtype}, LoRA r={setup.lora_rank}, {setup.config.memory_policy}")
    figure.savefig(path, dpi=150)
