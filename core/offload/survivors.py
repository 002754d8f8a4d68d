"""Results that survive from the forward of a checkpointed region to its recompute, which then need not compute them.

An op offers such a result from inside its autograd function, where it would have to compute it. The checkpoint decides
whether to keep it. What is kept lives in the pair of contexts that torch's checkpoint holds for one run of one region:
it goes with the graph, also after an exception, and each of several forwards has its own.

Source: ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from unsloth_plugins.core.offload.transfers import version_of

_REGION: ContextVar[Callable[[Callable[[], Any]], Any] | None] = ContextVar("region", default=None)

Tensors = tuple[torch.Tensor, ...]


def survive(compute: Callable[[], Tensors]) -> Tensors:
    """What ``compute()`` gives, from the forward where the region runs again and has kept it.

    Args:
        compute: makes fresh tensors outside of autograd: call this in the forward of an autograd function.
    """
    run = _REGION.get()
    return compute() if run is None else run(compute)  # type: ignore[no-any-return]


class Survivors:
    """The results of one run of one region, in the order in which its ops offer them.

    Args:
        keep: whether to keep them.

    Attributes:
        keep: as given.
        offered_bytes: of the results that the forward offered, kept or not.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self._kept: list[list[tuple[torch.Tensor, int]]] = []
        self.offered_bytes = 0

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """For ``context_fn``."""
        return _inside(self._forward), _Recompute(self)

    def again(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` that finds what was kept, and leaves it there for the recompute."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with _inside(self._player(release=False)):
                return function(*args, **kwargs)

        return run

    def _forward(self, compute: Callable[[], Tensors]) -> Tensors:
        results = compute()
        self.offered_bytes += sum(each.numel() * each.element_size() for each in results)
        if self.keep:
            self._kept.append([(each.detach(), version_of(each)) for each in results])
        return results

    def _player(self, release: bool) -> Callable[[Callable[[], Tensors]], Tensors]:
        index = -1

        def play(compute: Callable[[], Tensors]) -> Tensors:
            nonlocal index
            index += 1
            kept = self._kept[index] if index < len(self._kept) else []
            if not kept or any(version_of(each) != version for each, version in kept):  # gone, or changed in place
                return compute()
            if release:  # the recompute's graph holds it from here on
                self._kept[index] = []
            return tuple(each.detach() for each, _ in kept)

        return play


class _Recompute(contextlib.AbstractContextManager[None]):
    """May be entered again, for a second backward of the same graph."""

    def __init__(self, survivors: Survivors) -> None:
        self._survivors = survivors
        self._open: list[contextlib.AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._open.append(_inside(self._survivors._player(release=True)))
        self._open[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


@contextlib.contextmanager
def _inside(run: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    before = _REGION.set(run)
    try:
        yield
    finally:
        _REGION.reset(before)
