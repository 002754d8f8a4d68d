"""One hierarchy of errors. Every message says what was expected, what came, and what to do about it."""

from __future__ import annotations


class UnslothPluginsError(Exception):
    """Base of every error raised on purpose by this package.

    Args:
        expected: the invariant that was broken.
        got: what was found instead.
        remedy: what the user can change, in one sentence.
    """

    def __init__(self, *, expected: str, got: str, remedy: str) -> None:
        self.expected, self.got, self.remedy = expected, got, remedy
        super().__init__(f"expected {expected}; got {got}. {remedy}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.expected, self.got, self.remedy)


def _rebuild(kind: type[UnslothPluginsError], expected: str, got: str, remedy: str) -> UnslothPluginsError:
    return kind(expected=expected, got=got, remedy=remedy)


class ConfigError(UnslothPluginsError, ValueError):
    """An option has a value that it cannot have."""


class ConflictError(UnslothPluginsError, ValueError):
    """Two settings, one of them the trainer's, cannot both hold."""


class ShapeError(UnslothPluginsError, ValueError):
    """A tensor does not have the shape, dtype or range that an op needs."""


class UnsupportedError(UnslothPluginsError, RuntimeError):
    """The request is understood, and this implementation cannot serve it."""


class ModelError(UnslothPluginsError, ValueError):
    """The model given to ``apply`` cannot be patched."""


class ExportError(UnslothPluginsError, ValueError):
    """A merge or an export cannot give what was asked for; nothing that looks complete was written."""
