"""The report of ``apply`` as data: one row a feature, told anew by whoever takes the feature over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from unsloth_plugins.core.errors import UnsupportedError

State = Literal["on", "left alone"]


@dataclass(frozen=True)
class Row:
    """One line of the report: a feature, whether it is on, and what was done or why not."""

    feature: str
    state: State
    detail: str

    def row(self) -> Row:
        """Itself: a row stands for what does not change with the model's device."""
        return self


class Reported(Protocol):
    """What was done to one part of a model."""

    @property
    def feature(self) -> str:
        """The name of its row."""

    def row(self) -> Row:
        """What is true now, on the device that the model is on now."""


def meaning(choice: str, resolve: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """What ``resolve`` gives, an implementation and why; a report raises nothing where a model has been moved to a
    device on which what was asked for can't run: its next forward does."""
    try:
        return resolve()
    except UnsupportedError as error:
        return choice, f"asked for, and can't run here: {error.got}"


def table(title: str, rows: Sequence[Row]) -> str:
    """The rows below ``title``, their columns aligned."""
    width = max(len(row.feature) for row in rows)
    return "\n".join([title, *(f"  {row.feature:<{width}}  {row.state:<10}  {row.detail}" for row in rows)])
