"""Host memory for offloaded activations: exactly as much as is stored, page-locked, kept from step to step.

torch's own page-locked allocator rounds each size up to a power of two. Here every region is an anonymous mapping of
the size that was asked for, registered with the device's driver, and the free parts of regions are used again.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from bisect import insort
from collections import deque
from collections.abc import Callable

import torch

from unsloth_plugins.core.errors import UnsupportedError

ALIGNMENT = 512  # bytes: what slabs are rounded up to


class Region:
    """One mapping, with its free stretches as sorted ``(start, size)``.

    ``last_in`` and ``last_out`` are the latest copies to the device and to the host, of any slab of it. Who writes to a
    slab waits for ``last_in``: whoever had its memory before may still be read.
    """

    __slots__ = ("free", "last_in", "last_out", "memory", "n_bytes", "pinned")

    def __init__(self, memory: torch.Tensor, pinned: bool) -> None:
        self.memory, self.pinned, self.n_bytes = memory, pinned, memory.numel()
        self.free = [(0, self.n_bytes)]
        self.last_in: object = None
        self.last_out: object = None


class Slab:
    """A stretch of a region, in use. ``memory`` is uint8 of the size that was asked for."""

    __slots__ = ("memory", "region", "size", "start")

    def __init__(self, region: Region, start: int, size: int, n_bytes: int) -> None:
        self.region, self.start, self.size = region, start, size
        self.memory = region.memory[start : start + n_bytes]


class Arena:
    """Hands out slabs of host memory, best fit first, and grows by what does not fit.

    Args:
        pin: page-locks a uint8 tensor, and says whether that worked; ``None`` for ordinary memory.
        unpin: its inverse.
        wait: blocks until a copy, as noted in a region, is done.
        limit_bytes: the most to map; ``None`` for no limit.

    Attributes:
        mapped_bytes: mapped now, in use or free.
        used_bytes: in slabs now.
    """

    def __init__(
        self,
        pin: Callable[[torch.Tensor], bool] | None = None,
        unpin: Callable[[torch.Tensor], None] | None = None,
        wait: Callable[[object], None] | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._pin, self._unpin, self._wait, self.limit_bytes = pin, unpin, wait, limit_bytes
        self.mapped_bytes = self.used_bytes = 0
        self._regions: list[Region] = []
        self._changed = threading.Condition(threading.RLock())
        self._reserved: deque[int] = deque()  # sizes that the background thread is to map, the one in work first
        self._owner = os.getpid()

    def take(self, n_bytes: int) -> Slab:
        """A slab of ``n_bytes``; waits for the background thread where it is making one.

        Raises:
            UnsupportedError: the limit would be passed, or the system has no more memory.
        """
        size = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        with self._changed:
            while (found := self._best_fit(size)) is None and any(each >= size for each in self._reserved):
                self._changed.wait()
            if found is None:
                found = self._grow(size), 0
            region, index = found
            start, length = region.free.pop(index)
            if length > size:
                region.free.insert(index, (start + size, length - size))
            self.used_bytes += size
            return Slab(region, start, size, n_bytes)

    def give_back(self, slab: Slab) -> None:
        """Make a slab free. Copies from or to it may still run."""
        with self._changed:
            region, start, end = slab.region, slab.start, slab.start + slab.size
            insort(region.free, (start, end - start))
            merged: list[tuple[int, int]] = []
            for begin, size in region.free:
                if merged and sum(merged[-1]) == begin:
                    merged[-1] = (merged[-1][0], merged[-1][1] + size)
                else:
                    merged.append((begin, size))
            region.free = merged
            self.used_bytes -= slab.size

    def reserve(self, n_bytes: int, count: int) -> None:
        """Let a background thread make room for ``count`` slabs of ``n_bytes``, beside what is free already.

        Raises:
            UnsupportedError: the limit would be passed.
        """
        size = -(-n_bytes // ALIGNMENT) * ALIGNMENT
        with self._changed:
            fit = sum(length // size for region in self._regions for _, length in region.free)
            missing = max(count - fit - sum(each == size for each in self._reserved), 0)
            if not missing:
                return
            useless = sum(each.n_bytes for each in self._regions if _is_free(each) and each.n_bytes < size)
            self._check_limit(self.mapped_bytes - useless + missing * size)
            idle = not self._reserved
            self._reserved.extend([size] * missing)
        if idle:
            threading.Thread(target=self._work, name="unsloth-plugins-arena", daemon=True).start()

    def release(self) -> None:
        """Unmap every region of which nothing is in use."""
        with self._changed:
            self._drop([region for region in self._regions if _is_free(region)])

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._reserved:
                    return
                size = self._reserved[0]
            try:
                self._grow(size)
            except BaseException as error:
                with self._changed:
                    self._reserved.clear()
                    self._changed.notify_all()
                if isinstance(error, UnsupportedError):  # whoever needs the memory meets it in its own thread
                    return
                raise
            with self._changed:
                self._reserved.popleft()
                self._changed.notify_all()

    def _best_fit(self, size: int) -> tuple[Region, int] | None:
        best = None
        for region in self._regions:
            for index, (_, length) in enumerate(region.free):
                if length >= size and (best is None or length < best[0]):
                    best = length, region, index
                    if length == size:
                        return region, index
        return best and best[1:]

    def _grow(self, size: int) -> Region:
        """A new region. Free ones that are smaller would only be in the way, and go."""
        with self._changed:
            self._drop([region for region in self._regions if _is_free(region) and region.n_bytes < size])
            self._check_limit(self.mapped_bytes + size)
            self.mapped_bytes += size  # now, so that two threads can't pass the limit together
        try:
            memory = _map(size)
        except (OSError, ValueError) as error:
            with self._changed:
                self.mapped_bytes -= size
            raise UnsupportedError(
                expected=f"{size / 2**20:.0f} MiB more of host memory for what is offloaded",
                got=f"{error}, with {self.mapped_bytes / 2**30:.2f} GiB held",
                remedy="Use a shorter context, or keep more on the device.",
            ) from error
        pinned = self._pin is not None and self._pin(memory)
        if self._pin is not None and not pinned:
            self._pin = None
            warnings.warn(
                "Page-locked (pinned) host memory ran out; what is offloaded goes through ordinary host memory from "
                "here on, which is slower. On WSL the limit for pinned host memory is separate from the RAM.",
                stacklevel=2,
            )
        region = Region(memory, pinned)
        with self._changed:
            self._regions.append(region)
        return region

    def _check_limit(self, n_bytes: int) -> None:
        if self.limit_bytes is not None and n_bytes > self.limit_bytes:
            raise UnsupportedError(
                expected=f"offloaded activations to fit in {self.limit_bytes / 2**30:.2f} GiB of host memory",
                got=f"{n_bytes / 2**30:.2f} GiB that are needed at once",
                remedy="Raise the limit, use a shorter context, or keep activations on the device.",
            )

    def _drop(self, regions: list[Region]) -> None:
        for region in regions:
            if region.pinned and os.getpid() == self._owner:  # a forked child must not touch the driver
                assert self._unpin is not None
                for copy in (region.last_in, region.last_out):
                    if self._wait is not None and copy is not None:
                        self._wait(copy)
                self._unpin(region.memory)
            self._regions.remove(region)
            self.mapped_bytes -= region.n_bytes

    def __del__(self) -> None:
        self._drop(list(self._regions))


def _is_free(region: Region) -> bool:
    return region.free == [(0, region.n_bytes)]


def _map(size: int) -> torch.Tensor:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for advice in ("MADV_DONTFORK", "MADV_HUGEPAGE"):  # data loaders fork; large pages are locked faster
        if hasattr(mmap, advice):
            try:
                memory.madvise(getattr(mmap, advice))
            except OSError:  # only advice: a kernel without large pages says EINVAL
                continue
    return torch.frombuffer(memory, dtype=torch.uint8)
