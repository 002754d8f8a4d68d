"""Random numbers of a checkpointed region: the recompute draws the same, and one that draws none costs nothing.

torch's checkpoint copies the states of all generators in forward and sets and restores them around the recompute,
whether the region draws or not. Here generators are asked where they stand, before and after; the recompute touches
them only where that differs, which without dropout it does not.

Source: ``preserve_rng_state`` and ``context_fn`` of ``torch.utils.checkpoint.checkpoint``.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_Position = tuple[torch.Generator, int, int]  # of a CUDA generator: the seed and the offset are its whole state


class Draws:
    """What one run of a region draws, from the generator of the CPU and those of its arguments' CUDA devices.

    Args:
        args: of the region.
    """

    def __init__(self, args: tuple[Any, ...]) -> None:
        found = {each.device for each in args if isinstance(each, torch.Tensor) and each.is_cuda}
        self._devices = sorted(device.index for device in found)
        self._cpu_state: torch.Tensor | None = None
        self._positions: list[_Position] = []

    @staticmethod
    def serve(args: tuple[Any, ...]) -> bool:
        """Whether all tensors among the arguments are on the CPU or a CUDA device."""
        return all(each.device.type in ("cpu", "cuda") for each in args if isinstance(each, torch.Tensor))

    def contexts(self) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        """For ``context_fn``: around the forward, and around each recompute."""
        return _Forward(self), _Recompute(self)

    def _here(self) -> list[_Position]:
        generators = (torch.cuda.default_generators[index] for index in self._devices)
        return [(each, each.initial_seed(), each.get_offset()) for each in generators]


class _Forward(contextlib.AbstractContextManager[None]):
    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __enter__(self) -> None:
        self._draws._cpu_state, self._draws._positions = torch.get_rng_state(), self._draws._here()

    def __exit__(self, *error: Any) -> None:
        draws = self._draws
        assert draws._cpu_state is not None
        if torch.equal(draws._cpu_state, torch.get_rng_state()):
            draws._cpu_state = None
        pairs = zip(draws._positions, draws._here(), strict=True)
        draws._positions = [before for before, after in pairs if before != after]


class _Recompute(contextlib.AbstractContextManager[None]):
    """May be entered again, for a second backward of the same graph."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._before: list[tuple[torch.Tensor | None, list[_Position]]] = []

    def __enter__(self) -> None:
        draws = self._draws
        cpu_state = None if draws._cpu_state is None else torch.get_rng_state()
        here = [(each, each.initial_seed(), each.get_offset()) for each, _, _ in draws._positions]
        self._before.append((cpu_state, here))
        _set(draws._cpu_state, draws._positions)

    def __exit__(self, *error: Any) -> None:
        _set(*self._before.pop())


def _set(cpu_state: torch.Tensor | None, positions: list[_Position]) -> None:
    if cpu_state is not None:
        torch.set_rng_state(cpu_state)
    for generator, seed, offset in positions:
        generator.manual_seed(seed)
        generator.set_offset(offset)
