"""Weights on the host: what is read, when copies start, and how long memory lives, with copies that run late."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from simulated_copies import SimulatedCopies
from torch import nn

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload.arena import Arena
from unsloth_plugins.core.offload.weights import StreamedPiece, WeightStream

LATE = [0.0, 0.3, 0.7]  # how readily copies run by themselves
LAYERS = 4
CPU = torch.device("cpu")
FORWARD = [(layer, name) for layer in range(LAYERS) for name in ("up", "down")]
BACKWARD = [(layer, name) for layer in reversed(range(LAYERS)) for name in ("up", "down")]
RECOMPUTED = [
    (layer, name) for layer in reversed(range(LAYERS)) for name in ("up", "down", "down", "up")
]  # each layer once more before its backward, which meets its products last first


class Weights:
    """Pieces of two tensors each, a stream of them, and a log of what happens."""

    def __init__(self, eager: float = 0.0, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.copies = SimulatedCopies(seed, eager)
        self.stream = WeightStream(engine=lambda device: self.copies, everywhere=True)
        self.pieces, self.truth = {}, {}
        for key in FORWARD:
            shapes = [(5, 7, 16), (5, 7)]
            numbers = [torch.randint(0, 255, shape, dtype=torch.uint8, generator=draw) for shape in shapes]
            parameters = tuple(nn.Parameter(number.clone(), requires_grad=False) for number in numbers)
            self.pieces[key], self.truth[key] = StreamedPiece(self.stream, key, parameters, CPU), numbers
        self.started = 0
        to_device = self.copies.to_device

        def counted(*args: Any) -> Any:
            self.started += 1
            return to_device(*args)

        self.copies.to_device = counted  # type: ignore[method-assign]

    def read(self, key: Any) -> bool:
        """Read a piece, check its numbers, and tell whether its copy had been started before it was asked for."""
        before, seen = self.started, []

        def use(*tensors: torch.Tensor) -> torch.Tensor:
            assert all(torch.equal(a, b) for a, b in zip(tensors, self.truth[key], strict=True)), key
            seen.append(self.started)
            return tensors[0] + 0

        self.pieces[key].read(use)
        return seen[0] == before


@pytest.mark.parametrize("eager", LATE)
@pytest.mark.parametrize("backward", [BACKWARD, FORWARD[::-1], RECOMPUTED])
def test_from_the_second_step_on_every_copy_starts_before_it_is_asked_for(eager: float, backward: list[Any]) -> None:
    weights, order = Weights(eager), FORWARD + backward
    assert not any(weights.read(key) for key in order)
    for key in order:
        weights.read(key)
    started = weights.started
    for _ in range(3):
        assert all(weights.read(key) for key in order)
    assert weights.started - started == 3 * 2 * len(order)  # and none in vain


def test_evaluations_between_steps_and_broken_passes_only_cost_copies() -> None:
    weights = Weights(0.3)
    for n in range(12):
        order = (FORWARD + BACKWARD, FORWARD, FORWARD + FORWARD + BACKWARD + BACKWARD, FORWARD[:3])[n % 4]
        for key in order:
            weights.read(key)


def test_two_pieces_are_on_the_device_at_most_beside_the_one_that_is_read() -> None:
    weights, most = Weights(1.0), 0
    size = sum(number.numel() for number in weights.truth[FORWARD[0]])
    alive: list[Any] = []
    to_device = weights.copies.to_device

    def noted(*args: Any) -> Any:
        tensor_N, mark = to_device(*args)
        alive.append(torch.multiprocessing.reductions.StorageWeakRef(tensor_N.untyped_storage()))
        sizes[id(alive[-1])] = tensor_N.numel()
        return tensor_N, mark

    sizes: dict[int, int] = {}
    weights.copies.to_device = noted  # type: ignore[method-assign]
    for key in (FORWARD + BACKWARD) * 4:
        weights.read(key)
        most = max(most, sum(sizes[id(each)] for each in alive if not each.expired()))
    assert most == 2 * size


def test_a_wait_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedCopies, "wait", lambda self, mark: None)
    weights = Weights()
    with pytest.raises(AssertionError):
        weights.read(FORWARD[0])
    for each in weights.copies.waiting:
        each.done = True  # the memory is gone


@pytest.mark.parametrize("eager", LATE)
def test_what_is_written_to_a_parameter_after_its_copy_started_is_read(eager: float) -> None:
    weights = Weights(eager)
    for n in range(3 * len(FORWARD + BACKWARD)):
        key = (FORWARD + BACKWARD)[n % (2 * len(FORWARD))]
        if n % 5 == 4:
            parameters = weights.pieces[key].parameters
            weights.truth[key] = [(parameter + 1).detach() for parameter in parameters]
            for parameter, number in zip(parameters, weights.truth[key], strict=True):
                if n % 2:
                    parameter.copy_(number)
                else:
                    parameter.data = number.clone()
        weights.read(key)


def test_some_rows() -> None:
    weights = Weights()
    key = FORWARD[3]
    for numbers in ([4, 0], [2]):
        got = weights.pieces[key].rows(numbers)
        assert all(torch.equal(a, b[numbers]) for a, b in zip(got, weights.truth[key], strict=True))


def test_leaving_gives_ordinary_memory_and_all_pinned_memory_goes() -> None:
    weights = Weights()
    for key in (FORWARD + BACKWARD) * 2:
        weights.read(key)
    arena = weights.stream._arena
    assert arena is not None and weights.stream.host_bytes >= 8 * 5 * 7 * 17
    assert len(weights.copies.pinned) == 2 * len(FORWARD)
    for key, piece in weights.pieces.items():
        before = [parameter.data_ptr() for parameter in piece.parameters]
        weights.stream.leave(key, piece.parameters, CPU)
        assert all(map(torch.equal, piece.parameters, weights.truth[key]))
        assert all(parameter.data_ptr() != at for parameter, at in zip(piece.parameters, before, strict=True))
    assert arena.used_bytes == 0
    del arena, piece
    weights.pieces.clear()
    weights.stream = None  # type: ignore[assignment]
    gc.collect()
    assert not weights.copies.pinned


def test_a_copied_stream_is_an_empty_one() -> None:
    weights = Weights()
    weights.read(FORWARD[0])
    other = copy.deepcopy(weights.stream)
    assert other is not weights.stream and other.host_bytes == 0 and other.everywhere


def test_pageable_memory_serves_where_pinning_fails() -> None:
    weights = Weights()
    weights.copies.pinned_bytes = 3 * 5 * 7 * 17
    with pytest.warns(UserWarning, match="Page-locked"):
        for key in FORWARD + BACKWARD:
            weights.read(key)


def test_no_memory_left_is_an_error_that_leaves_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Weights()

    def refuse(self: Arena, n_bytes: int) -> Any:
        raise UnsupportedError(expected="memory", got="none", remedy="Buy some.")

    monkeypatch.setattr(Arena, "take", refuse)
    with pytest.raises(UnsupportedError):
        weights.read(FORWARD[0])
    assert all(map(torch.equal, weights.pieces[FORWARD[0]].parameters, weights.truth[FORWARD[0]]))
