"""What copies between a device and the host: in order in each direction, behind what the device computes.

An engine only moves bytes and tells when. What is moved, when it is awaited and how long memory must live is decided
in ``transfers``, which runs on any engine.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

_UNREAD = 256  # pairs of events after which those that are over are read


class CopyEngine(Protocol):
    """Copies of one device. Tensors are contiguous uint8 of one dimension. A mark stands for the end of one copy."""

    def pin(self, memory_N: torch.Tensor) -> bool:
        """Page-lock host memory; whether that worked."""

    def unpin(self, memory_N: torch.Tensor) -> None:
        """The inverse of ``pin``."""

    def to_host(self, source_N: torch.Tensor, host_N: torch.Tensor, after: Any) -> Any:
        """Copy when all that the current stream was given so far is done, and the copy ``after`` (a mark or None)."""

    def to_device(self, host_N: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """Copy to memory of the current stream when ``after`` is done; the tensor, not to be read yet, and a mark."""

    def wait(self, mark: Any) -> None:
        """Let what the current stream is given from here on run after the copy. The host does not wait."""

    def use(self, tensor_N: torch.Tensor) -> None:
        """Tell that the current stream reads what ``to_device`` gave, perhaps under another one."""

    def mark(self) -> Any:
        """A mark for all that the current stream was given so far, for ``block``."""

    def is_done(self, mark: Any) -> bool:
        """Whether the copy is over."""

    def block(self, mark: Any) -> None:
        """Let the host wait for the copy."""

    def copy_ms(self) -> tuple[float, float]:
        """Milliseconds of all copies so far, and milliseconds that computing waited for copies."""


class Clock:
    """Milliseconds between pairs of events, added up once they are over; events that nobody waits for are used again.

    Args:
        make: makes an event that takes the time.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._free: list[Any] = []
        self._pairs: deque[tuple[Any, Any, bool]] = deque()
        self._ms = 0.0

    def event(self) -> Any:
        """One to record the beginning with, or an end that goes to nobody but ``add``."""
        return self._free.pop() if self._free else self._make()

    def add(self, begin: Any, end: Any, *, shared: bool) -> None:
        """Count the time between two recorded events; somebody else may wait for a ``shared`` end."""
        self._pairs.append((begin, end, shared))
        if len(self._pairs) > _UNREAD:
            self.read_ms()

    def read_ms(self) -> float:
        """All so far; what is not over yet, or was added after such, counts the next time."""
        while self._pairs and self._pairs[0][1].query():
            begin, end, shared = self._pairs.popleft()
            self._ms += begin.elapsed_time(end)
            self._free += [begin] if shared else [begin, end]
        return self._ms


class CudaCopies:
    """One stream a direction, and events; the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._out, self._in = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._ready = torch.cuda.Event()  # a stream waits for what it stood for at that moment: one does for all
        make = functools.partial(torch.cuda.Event, enable_timing=True)
        self._sent, self._fetched, self._waited = Clock(make), Clock(make), Clock(make)

    def pin(self, memory_N: torch.Tensor) -> bool:
        """Register the memory for every context of the driver."""
        portable, mapped = 1, 2  # kernels may read it as well
        with torch.cuda.device(self.device):
            failed = int(torch.cuda.cudart().cudaHostRegister(memory_N.data_ptr(), memory_N.numel(), portable | mapped))
            if failed:  # the driver keeps the error for the next launch of this thread: let that be this one
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.device)
        return not failed

    def unpin(self, memory_N: torch.Tensor) -> None:
        """Take the registration back."""
        torch.cuda.cudart().cudaHostUnregister(memory_N.data_ptr())

    def to_host(self, source_N: torch.Tensor, host_N: torch.Tensor, after: Any) -> Any:
        """See ``CopyEngine``."""
        self._follow(self._out, after)
        return self._copy(self._out, host_N, source_N)

    def to_device(self, host_N: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """See ``CopyEngine``."""
        target_N = torch.empty(host_N.numel(), dtype=torch.uint8, device=self.device)
        self._follow(self._in, after)  # the target's memory may still be read by earlier work
        return target_N, self._copy(self._in, target_N, host_N)

    def wait(self, mark: Any) -> None:
        """See ``CopyEngine``."""
        if mark.query():
            return
        stream = torch.cuda.current_stream(self.device)
        begin = stream.record_event(self._waited.event())
        stream.wait_event(mark)
        self._waited.add(begin, stream.record_event(self._waited.event()), shared=False)

    def use(self, tensor_N: torch.Tensor) -> None:
        """See ``CopyEngine``."""
        tensor_N.record_stream(torch.cuda.current_stream(self.device))

    def mark(self) -> Any:
        """See ``CopyEngine``."""
        return torch.cuda.current_stream(self.device).record_event()

    def is_done(self, mark: Any) -> bool:
        """See ``CopyEngine``."""
        return bool(mark.query())

    def block(self, mark: Any) -> None:
        """See ``CopyEngine``."""
        mark.synchronize()

    def copy_ms(self) -> tuple[float, float]:
        """See ``CopyEngine``; copies that are not over yet count the next time."""
        return self._sent.read_ms() + self._fetched.read_ms(), self._waited.read_ms()

    def _follow(self, stream: torch.cuda.Stream, after: Any) -> None:
        """Let ``stream`` go on behind the current one, and behind ``after``."""
        stream.wait_event(torch.cuda.current_stream(self.device).record_event(self._ready))
        if after is not None:
            stream.wait_event(after)

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Any:
        clock = self._sent if stream is self._out else self._fetched
        begin, end = clock.event(), torch.cuda.Event(enable_timing=True)  # the end is the mark that others keep
        with torch.cuda.stream(stream):
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        clock.add(begin, end, shared=True)
        return end


class PlainCopies:
    """Copies at once, on devices without streams that can be ordered from here; every mark is ``None``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def pin(self, memory_N: torch.Tensor) -> bool:
        """Ordinary memory will do."""
        return True

    def unpin(self, memory_N: torch.Tensor) -> None:
        """Nothing to take back."""

    def to_host(self, source_N: torch.Tensor, host_N: torch.Tensor, after: Any) -> None:
        """See ``CopyEngine``."""
        host_N.copy_(source_N)

    def to_device(self, host_N: torch.Tensor, after: Any) -> tuple[torch.Tensor, None]:
        """See ``CopyEngine``."""
        return torch.empty(host_N.numel(), dtype=torch.uint8, device=self.device).copy_(host_N), None

    def wait(self, mark: Any) -> None:
        """Nothing runs late."""

    def use(self, tensor_N: torch.Tensor) -> None:
        """Nothing runs late."""

    def mark(self) -> None:
        """Nothing runs late."""

    def is_done(self, mark: Any) -> bool:
        """Always."""
        return True

    def block(self, mark: Any) -> None:
        """Nothing runs late."""

    def copy_ms(self) -> tuple[float, float]:
        """Not measured."""
        return 0.0, 0.0


def engine_for(device: torch.device) -> CopyEngine:
    """The engine of a device: streams on CUDA (and ROCm), plain copies elsewhere."""
    return CudaCopies(device) if device.type == "cuda" else PlainCopies(device)
