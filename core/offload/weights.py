"""Frozen weights that live in host memory and are on the device only while somebody reads them.

Layers read their weights in the same order step after step: forward, and backwards through the layers. So whatever
followed the last three reads before is expected to follow them again, and its copy starts while the device computes;
three, because a layer's own order is the same in both directions. Nobody has to say which pass runs, and a wrong guess
costs one copy. At most two pieces are on their way or waiting on the device beside the one that is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn import functional

from unsloth_plugins.core.device import is_accelerator, why_no_triton
from unsloth_plugins.core.offload.arena import Arena, Slab
from unsloth_plugins.core.offload.engine import CopyEngine, engine_for
from unsloth_plugins.core.offload.transfers import version_of

_AHEAD = 2  # pieces expected next: the two projections of a layer
_HISTORY = 3  # reads that an expectation is based on

Result = TypeVar("Result")


class _Home:
    """Host memory of one piece: the parameters that lie in it, and their slabs."""

    def __init__(self, parameters: Sequence[nn.Parameter], slabs: list[Slab]) -> None:
        self.parameters, self.slabs = tuple(parameters), slabs
        self._looked_up: tuple[CopyEngine, Any] | None = None

    def note_lookup(self, engine: CopyEngine) -> None:
        """What the device was given so far reads the memory."""
        self._looked_up = engine, engine.mark()

    def block(self) -> None:
        """The host waits until no lookup reads the memory."""
        if self._looked_up is not None:
            engine, mark = self._looked_up
            engine.block(mark)

    def has(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Whether these still lie here."""
        return all(
            ours is theirs and theirs.data_ptr() == slab.memory.data_ptr()
            for ours, theirs, slab in zip(self.parameters, parameters, self.slabs, strict=True)
        )

    def versions(self) -> tuple[int, ...]:
        """Change when somebody writes to the parameters."""
        return tuple(version_of(parameter) for parameter in self.parameters)


@dataclass(eq=False)
class _Coming:
    """A piece on its way to a device, or there."""

    home: _Home
    versions: tuple[int, ...]
    device: torch.device
    tensors_N: list[torch.Tensor]
    mark: Any


class WeightStream:
    """Weights of one model on the host, and their way to the device.

    Args:
        engine: makes the copy engine of a device.
        everywhere: copy for the CPU too, for tests of the path.

    Attributes:
        sent_bytes: copied to devices since construction.
    """

    def __init__(self, *, engine: Callable[[torch.device], CopyEngine] = engine_for, everywhere: bool = False) -> None:
        self.everywhere, self.sent_bytes = everywhere, 0
        self._make_engine = engine
        self._engines: dict[torch.device, CopyEngine] = {}
        self._arena: Arena | None = None
        self._homes: dict[Hashable, _Home] = {}
        self._coming: dict[Hashable, _Coming] = {}
        self._next: dict[tuple[Hashable, ...], Hashable] = {}
        self._last: tuple[Hashable, ...] = ()
        self._lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> WeightStream:
        """An empty one: the weights of a copied model are in ordinary memory until they are read."""
        return WeightStream(engine=self._make_engine, everywhere=self.everywhere)

    def __del__(self) -> None:
        self._settle_copies()
        for home in self._homes.values():
            home.block()

    def serves(self, device: torch.device) -> bool:
        """Whether weights are copied to be read on ``device``: the CPU reads them where they are."""
        return self.everywhere or is_accelerator(device)

    @property
    def host_bytes(self) -> int:
        """Of host memory that devices copy from."""
        return 0 if self._arena is None else self._arena.used_bytes

    def copy_ms(self) -> tuple[float, float]:
        """Milliseconds of all copies so far, and milliseconds that computing waited for them; the rest was hidden."""
        each = [engine.copy_ms() for engine in self._engines.values()]
        return sum(copies for copies, _ in each), sum(exposed for _, exposed in each)

    def settle(self, key: Hashable, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Move the parameters of one piece to host memory that ``device`` copies from, page-locked where it can be.

        Args:
            key: of the piece, the same each time.
            parameters: frozen, wherever they are now. They keep their identity.

        Raises:
            UnsupportedError: no host memory is left.
        """
        with self._lock:
            self._settled(key, parameters, device)

    def leave(self, key: Hashable, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
        """Give the parameters of one piece ordinary memory on ``device``."""
        with self._lock:
            self._settle_copies()
            home = self._homes.pop(key, None)
            for parameter in parameters:
                parameter.data = parameter.data.to(device, copy=home is not None)
            if home is not None:
                self._let_go(home)

    def read(
        self,
        key: Hashable,
        parameters: Sequence[nn.Parameter],
        device: torch.device,
        use: Callable[..., Result],
    ) -> Result:
        """``use(*tensors)`` with the parameters of one piece on ``device``; they are gone when it returns."""
        with self._lock:
            home = self._settled(key, parameters, device)
            coming = self._coming.pop(key, None)
            if coming is not None and (coming.home, coming.versions, coming.device) != (home, home.versions(), device):
                self._drop(coming)
                coming = None
            coming = coming or self._call(home, device)
            self._drop(coming)
            result = use(*_shaped(coming.tensors_N, home.parameters))
            coming = None  # its memory is what the next piece gets
            self._note(key)
            self._look_ahead(device)
            return result

    def rows(
        self, key: Hashable, parameters: Sequence[nn.Parameter], device: torch.device, numbers: Sequence[int]
    ) -> tuple[torch.Tensor, ...]:
        """Some rows of each parameter of a piece on ``device``, copied for this one use."""
        with self._lock:
            home, engine = self._settled(key, parameters, device), self._engine(device)
            out = []
            for parameter, slab in zip(home.parameters, home.slabs, strict=True):
                rows_RN = slab.memory.view(parameter.shape[0], -1)
                copies = [engine.to_device(rows_RN[number], None) for number in numbers]
                slab.region.last_in = copies[-1][1]
                engine.wait(copies[-1][1])
                for tensor_N, _ in copies:
                    engine.use(tensor_N)
                    self.sent_bytes += tensor_N.numel()
                some = torch.stack([tensor_N for tensor_N, _ in copies])
                out.append(some.view(parameter.dtype).view(len(numbers), *parameter.shape[1:]))
            return tuple(out)

    def look_up(self, key: Hashable, table_VH: nn.Parameter, ids: torch.Tensor) -> torch.Tensor:
        """Rows of a table on the device of ``ids``, which reads them in host memory by a kernel.

        Where the memory could not be page-locked, or no kernel runs on that device, the host waits for the ids, looks
        them up and sends the rows.

        Args:
            table_VH: [V, H].
            ids: integer of any shape, in [0, V); outside of it, torch's IndexError or a device-side assertion.

        Returns:
            [*ids, H].
        """
        device = ids.device
        with self._lock:
            home, engine = self._settled(key, [table_VH], device), self._engine(device)
            if home.slabs[0].region.pinned and why_no_triton(device, torch.uint8) is None:
                from unsloth_plugins.core.offload.lookup import lookup_triton  # needs triton: only where it runs

                rows = lookup_triton(table_VH.detach(), ids)
                home.note_lookup(engine)
            else:
                rows = functional.embedding(ids.cpu(), table_VH.detach()).to(device)
            self.sent_bytes += rows.numel() * rows.element_size()
            return rows

    def _engine(self, device: torch.device) -> CopyEngine:
        if device not in self._engines:
            self._engines[device] = self._make_engine(device)
        return self._engines[device]

    def _settled(self, key: Hashable, parameters: Sequence[nn.Parameter], device: torch.device) -> _Home:
        home = self._homes.get(key)
        if home is not None and home.has(parameters):
            return home
        engine = self._engine(device)
        if self._arena is None:
            self._arena = Arena(engine.pin, engine.unpin, engine.block)
        if home is not None:
            self._let_go(home)
        slabs = []
        with torch.inference_mode(False):  # the parameters outlive it
            for parameter in parameters:
                slab = self._arena.take(parameter.numel() * parameter.element_size())
                if slab.region.last_in is not None:
                    engine.block(slab.region.last_in)
                (memory,) = _shaped([slab.memory], [parameter])
                memory.copy_(parameter.data)
                parameter.data = memory
                slabs.append(slab)
        self._homes[key] = _Home(parameters, slabs)
        return self._homes[key]

    def _let_go(self, home: _Home) -> None:
        assert self._arena is not None
        home.block()
        for slab in home.slabs:
            self._arena.give_back(slab)

    def _call(self, home: _Home, device: torch.device) -> _Coming:
        """Start the copies of a piece. They run in order, so the end of the last one stands for all."""
        engine = self._engine(device)
        copies = [engine.to_device(slab.memory, None) for slab in home.slabs]
        for slab, (tensor_N, mark) in zip(home.slabs, copies, strict=True):
            slab.region.last_in = mark
            self.sent_bytes += tensor_N.numel()
        return _Coming(home, home.versions(), device, [tensor_N for tensor_N, _ in copies], copies[-1][1])

    def _drop(self, coming: _Coming) -> None:
        """What the current stream is given from here on runs after the copies: it may read, or have the memory."""
        engine = self._engine(coming.device)
        engine.wait(coming.mark)
        for tensor_N in coming.tensors_N:
            engine.use(tensor_N)

    def _note(self, key: Hashable) -> None:
        if len(self._last) == _HISTORY:
            self._next[self._last] = key
        self._last = (*self._last, key)[-_HISTORY:]

    def _look_ahead(self, device: torch.device) -> None:
        expected: list[Hashable] = []
        last = self._last
        while len(expected) < _AHEAD and (key := self._next.get(last)) is not None:
            expected.append(key)
            last = (*last[1:], key)
        for key in [key for key in self._coming if key not in expected]:
            self._drop(self._coming.pop(key))
        for key in expected:
            home = self._homes.get(key)
            if key not in self._coming and home is not None and home.has(home.parameters):
                self._coming[key] = self._call(home, device)

    def _settle_copies(self) -> None:
        """The host waits for what is on its way: its memory is somebody else's afterwards."""
        for coming in self._coming.values():
            self._engine(coming.device).block(coming.mark)
        self._coming.clear()


@dataclass(frozen=True, eq=False)
class StreamedPiece:
    """One piece of a stream, for use on one device."""

    stream: WeightStream
    key: Hashable
    parameters: tuple[nn.Parameter, ...]
    device: torch.device

    def read(self, use: Callable[..., Result]) -> Result:
        """See ``WeightStream.read``."""
        return self.stream.read(self.key, self.parameters, self.device, use)

    def rows(self, numbers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """See ``WeightStream.rows``."""
        return self.stream.rows(self.key, self.parameters, self.device, numbers)


def _shaped(memory: Sequence[torch.Tensor], like: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Stretches of bytes as tensors of the shapes and dtypes of ``like``."""
    pairs = zip(memory, like, strict=True)
    return [memory_N.view(parameter.dtype).view(parameter.shape) for memory_N, parameter in pairs]
