"""What is sent to the host, when it comes back, and how long each piece of memory must live meanwhile.

Sent: the device's memory is held until its copy is over; at most about two of the largest pieces at once, beyond which
the device (not the host) waits. The newest pieces thus never left when backward asks for them first.
Back: backward wants the pieces in the reverse order of sending, so each fetch starts the copy of the one sent before,
or where memory is dearest the end of the tail's backward that follows it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any

import torch

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload.arena import Arena, Slab
from unsloth_plugins.core.offload.engine import CopyEngine

_AHEAD = 2  # pieces on their way back at most, one expected next and one of another graph that was guessed wrongly


def version_of(tensor: torch.Tensor) -> int:
    """Grows with each change in place; tensors of inference mode have none."""
    return -1 if tensor.is_inference() else tensor._version


class _Flight:
    """A copy to the host and the device memory it reads, until it is over."""

    __slots__ = ("mark", "source_N", "torn", "version")

    def __init__(self, source_N: torch.Tensor, version: int, mark: Any) -> None:
        self.source_N: torch.Tensor | None = source_N
        self.version, self.mark, self.torn = version, mark, False

    def end(self) -> None:
        """Let the device memory go; what was written to it while the copy ran may have got into the copy."""
        if self.source_N is not None:
            self.torn = version_of(self.source_N) != self.version
            self.source_N = None


class Parked:
    """A piece of device memory that waits on the host."""

    __slots__ = ("__weakref__", "_flight", "_serial", "_transfers", "coming", "n_bytes", "shared", "slab", "storage")

    def __init__(self, transfers: Transfers, slab: Slab, flight: _Flight, serial: int) -> None:
        self._transfers, self.slab, self._flight, self._serial = transfers, slab, flight, serial
        self.n_bytes = slab.memory.numel()
        self.coming: tuple[torch.Tensor, Any] | None = None
        self.storage: object = None  # kept by the store, to know the piece by
        self.shared = False  # several saved tensors want it

    def fetch(self) -> torch.Tensor:
        """The piece on its device, uint8, to be read only.

        Raises:
            UnsupportedError: it was changed in place while it was on its way to the host.
        """
        return self._transfers.fetch(self)

    def __del__(self) -> None:
        if hasattr(self, "n_bytes"):
            self._transfers._dead.append((self._serial, self.slab, self._flight, self.coming))


class Transfers:
    """The pieces of one device.

    Args:
        engine: what copies.
        arena: where the pieces wait.
        hold: how many of the largest pieces may wait on the device for their copy to be over.

    Attributes:
        sent_bytes: sent to the host since construction.
        kept_bytes: of these, asked for again before they had left the device.
    """

    def __init__(self, engine: CopyEngine, arena: Arena, hold: int = 2) -> None:
        self.engine, self.arena, self.hold = engine, arena, hold
        self.sent_bytes = self.kept_bytes = 0
        self._stored_bytes = 0
        self._flights: deque[_Flight] = deque()
        self._order: list[int] = []  # serial numbers of pieces that no backward has asked for, ascending
        self._alive: dict[int, weakref.ref[Parked]] = {}
        self._serial = 0
        self._ahead: deque[weakref.ref[Parked]] = deque()
        self._recent: deque[tuple[weakref.ref[Parked], torch.Tensor]] = deque(maxlen=2)  # shared pieces fetched last
        self._stray: list[tuple[torch.Tensor, Any]] = []  # on their way to somebody who is gone
        self._dead: deque[tuple[int, Slab, _Flight, tuple[torch.Tensor, Any] | None]] = deque()
        self._waits = False
        self._put_off: int | None = None  # the piece whose predecessor is not on its way yet
        self._lock = threading.RLock()

    @property
    def stored_bytes(self) -> int:
        """Of pieces that somebody still holds."""
        with self._lock:
            self._reap()
            return self._stored_bytes

    def send(self, source_N: torch.Tensor) -> Parked:
        """Start the copy of a contiguous uint8 tensor to the host.

        Raises:
            UnsupportedError: no host memory is left.
        """
        with self._lock:
            self._reap()
            slab = self.arena.take(source_N.numel())
            try:
                mark = self.engine.to_host(source_N, slab.memory, slab.region.last_in)
            except BaseException:
                self.arena.give_back(slab)
                raise
            slab.region.last_out = mark
            flight = _Flight(source_N, version_of(source_N), mark)
            self._flights.append(flight)
            self._end_flights()
            self._serial += 1
            parked = Parked(self, slab, flight, self._serial)
            self._order.append(self._serial)
            self._alive[self._serial] = weakref.ref(parked)
            self._stored_bytes += parked.n_bytes
            self.sent_bytes += parked.n_bytes
            return parked

    def share(self, parked: Parked) -> None:
        """One more saved tensor lies in the piece; backward meets it earlier now."""
        with self._lock:
            parked.shared = True
            self._forget(parked._serial)
            self._serial += 1
            parked._serial = self._serial
            self._order.append(self._serial)
            self._alive[self._serial] = weakref.ref(parked)

    def fetch(self, parked: Parked) -> torch.Tensor:
        """See ``Parked.fetch``."""
        with self._lock:
            self._reap()
            flight = parked._flight
            source_N = flight.source_N
            if flight.torn or (source_N is not None and version_of(source_N) != flight.version):
                raise UnsupportedError(
                    expected="saved tensors to stay as they were until backward",
                    got="one that was changed by an in-place operation while it was copied to the host",
                    remedy="Clone it before the operation, or make the operation out of place.",
                )
            if source_N is not None:
                piece_N = source_N
                self.kept_bytes += parked.n_bytes
            else:
                here = [piece for owner, piece in self._recent if owner() is parked]
                piece_N = here[0] if here else self._land(parked)
            self._forget(parked._serial)
            if self._waits and self._put_off is None:
                self._put_off = parked._serial
            else:
                self._waits, self._put_off = False, None
                self._look_ahead(parked._serial)
            return piece_N

    def tail_is_over(self) -> None:
        """Under ``hold=1``: the backward of a layer's tail, where its memory peaks, is over. Copies may come again.

        Who tells so once is waited for from then on, and no longer when a piece is asked for before the next time.
        """
        with self._lock:
            self._waits = self.hold == 1
            if self._put_off is not None:
                serial, self._put_off = self._put_off, None
                self._look_ahead(serial)

    def __del__(self) -> None:
        coming = [each[3] for each in self._dead if each[3] is not None]
        for _, mark in self._stray + coming:  # a copy must not run into memory that is somebody else's by then
            self.engine.block(mark)

    def _land(self, parked: Parked) -> torch.Tensor:
        piece_N, mark = parked.coming or self._call(parked)
        parked.coming = None
        self.engine.wait(mark)
        self.engine.use(piece_N)
        if parked.shared:
            self._recent.append((weakref.ref(parked), piece_N))
        return piece_N

    def _call(self, parked: Parked) -> tuple[torch.Tensor, Any]:
        piece_N, mark = self.engine.to_device(parked.slab.memory, parked._flight.mark)
        parked.slab.region.last_in = mark
        return piece_N, mark

    def _look_ahead(self, serial: int) -> None:
        """Start the way back of the piece sent before ``serial``."""
        index = bisect_left(self._order, serial) - 1
        following = self._alive[self._order[index]]() if index >= 0 else None
        if following is None or following.coming is not None or following._flight.source_N is not None:
            return
        self._ahead = deque(ref for ref in self._ahead if (each := ref()) is not None and each.coming is not None)
        while len(self._ahead) >= _AHEAD:
            wrong = self._ahead.popleft()()
            if wrong is not None and wrong.coming is not None:
                self._stray.append(wrong.coming)
                wrong.coming = None
        following.coming = self._call(following)
        self._ahead.append(weakref.ref(following))

    def _end_flights(self) -> None:
        """Hold no more than there is room for: the device waits for the oldest copies, and their memory goes."""
        while self._flights[0].source_N is None:
            self._flights.popleft()
        sizes = [flight.source_N.numel() for flight in self._flights if flight.source_N is not None]
        room = self.hold * max(sizes)
        while sum(sizes) > room:
            flight = self._flights.popleft()
            if flight.source_N is not None:
                sizes.pop(0)
                self.engine.wait(flight.mark)
                flight.end()

    def _forget(self, serial: int) -> None:
        if self._alive.pop(serial, None) is not None:
            del self._order[bisect_left(self._order, serial)]

    def _reap(self) -> None:
        """Take back what belonged to pieces that are gone. They end in any thread, so they only leave a note."""
        while self._dead:
            serial, slab, flight, coming = self._dead.popleft()
            self._forget(serial)
            self._stored_bytes -= slab.memory.numel()
            self.arena.give_back(slab)
            if coming is not None:
                self._stray.append(coming)
            if flight.source_N is not None and self.engine.is_done(flight.mark):
                flight.end()
            self._recent = deque((each for each in self._recent if each[0]() is not None), maxlen=2)
        if self._stray:
            self._stray = [each for each in self._stray if not self.engine.is_done(each[1])]
