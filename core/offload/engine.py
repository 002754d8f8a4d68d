"""What copies between a device and the host: in order in each direction, behind what the device computes.

An engine only moves bytes and tells when. What is moved, when it is awaited and how long memory must live is decided
in ``transfers``, which runs on any engine.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

import torch


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

    def is_done(self, mark: Any) -> bool:
        """Whether the copy is over."""

    def block(self, mark: Any) -> None:
        """Let the host wait for the copy."""

    def copy_ms(self) -> tuple[float, float]:
        """Milliseconds of all copies so far, and milliseconds that computing waited for copies."""


class CudaCopies:
    """One stream a direction, and events; the host waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(device.type, torch.cuda.current_device() if device.index is None else device.index)
        self._out, self._in = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
        self._copies: list[tuple[Any, Any]] = []
        self._waits: list[tuple[Any, Any]] = []
        self._ms = [0.0, 0.0]

    def pin(self, memory_N: torch.Tensor) -> bool:
        """Register the memory for every context of the driver."""
        portable = 1
        with torch.cuda.device(self.device):
            failed = int(torch.cuda.cudart().cudaHostRegister(memory_N.data_ptr(), memory_N.numel(), portable))
            if failed:  # the driver keeps the error for the next launch of this thread: let that be this one
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=self.device)
        return not failed

    def unpin(self, memory_N: torch.Tensor) -> None:
        """Take the registration back."""
        torch.cuda.cudart().cudaHostUnregister(memory_N.data_ptr())

    def to_host(self, source_N: torch.Tensor, host_N: torch.Tensor, after: Any) -> Any:
        """See ``CopyEngine``."""
        ready = torch.cuda.current_stream(self.device).record_event()
        self._out.wait_event(ready)
        if after is not None:
            self._out.wait_event(after)
        return self._copy(self._out, host_N, source_N)

    def to_device(self, host_N: torch.Tensor, after: Any) -> tuple[torch.Tensor, Any]:
        """See ``CopyEngine``."""
        target_N = torch.empty(host_N.numel(), dtype=torch.uint8, device=self.device)
        ready = torch.cuda.current_stream(self.device).record_event()  # its memory may still be read by earlier work
        self._in.wait_event(ready)
        if after is not None:
            self._in.wait_event(after)
        return target_N, self._copy(self._in, target_N, host_N)

    def wait(self, mark: Any) -> None:
        """See ``CopyEngine``."""
        if mark.query():
            return
        stream = torch.cuda.current_stream(self.device)
        begin = stream.record_event(torch.cuda.Event(enable_timing=True))
        stream.wait_event(mark)
        self._waits.append((begin, stream.record_event(torch.cuda.Event(enable_timing=True))))

    def use(self, tensor_N: torch.Tensor) -> None:
        """See ``CopyEngine``."""
        tensor_N.record_stream(torch.cuda.current_stream(self.device))

    def is_done(self, mark: Any) -> bool:
        """See ``CopyEngine``."""
        return bool(mark.query())

    def block(self, mark: Any) -> None:
        """See ``CopyEngine``."""
        mark.synchronize()

    def copy_ms(self) -> tuple[float, float]:
        """See ``CopyEngine``; copies that are not over yet count the next time."""
        self._ms[0] += _taken(self._copies)
        self._ms[1] += _taken(self._waits)
        return self._ms[0], self._ms[1]

    def _copy(self, stream: torch.cuda.Stream, target: torch.Tensor, source: torch.Tensor) -> Any:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with torch.cuda.stream(stream):
            begin.record(stream)
            target.copy_(source, non_blocking=True)
            end.record(stream)
        self._copies.append((begin, end))
        if len(self._copies) > 512:
            self.copy_ms()
        return end


def _taken(pairs: list[tuple[Any, Any]]) -> float:
    """Sum the milliseconds of pairs of events that are over, and take them off the list."""
    waiting, taken_ms = [], 0.0
    for begin, end in pairs:
        if end.query():
            taken_ms += begin.elapsed_time(end)
        else:
            waiting.append((begin, end))
    pairs[:] = waiting
    return taken_ms


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
