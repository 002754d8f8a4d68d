"""Saved tensors moved to host memory and back, with an account of the bytes."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from unsloth_plugins.core.device import is_accelerator, memory_in_use
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload.arena import Arena
from unsloth_plugins.core.offload.engine import CopyEngine, engine_for
from unsloth_plugins.core.offload.transfers import Parked, Transfers, version_of

PLENTY = 0.5  # of the device's memory: below it copies cost time and save nothing that is needed
_GAPS = 2  # a view is copied with its gaps up to this many times its own bytes


class HostStore:
    """Counts what is held on the host, and moves tensors there without letting the host or the device wait for it.

    Args:
        offload: ``"auto"`` moves tensors of accelerators, on CUDA only while half of its memory is in use, and counts
            those of the CPU where they are; ``True`` moves all, and copies CPU tensors too (for tests of the path);
            ``False`` moves nothing.
        min_bytes: smaller tensors stay on their device.
        limit_bytes: of host memory, for each device; ``None`` for no limit.
        hold: how many of the largest tensors may be on the device while their copies to the host run.
        engine: makes the copy engine of a device.

    Attributes:
        layers: how many inputs of layers one forward brings, for ``reserve``; 0 when nobody knows.
        moving: under ``"auto"`` on CUDA, whether to move, where somebody knows; ``None`` to look at the memory in use.
        peak_bytes: high-water mark of ``held_bytes`` since construction or ``reset_peak``.
        total_bytes: ever taken in.
        stayed_bytes: ever left on a device with room, under ``"auto"``.
    """

    def __init__(
        self,
        offload: Literal["auto"] | bool = "auto",
        min_bytes: int = 1 << 20,
        *,
        limit_bytes: int | None = None,
        hold: int = 2,
        engine: Callable[[torch.device], CopyEngine] = engine_for,
    ) -> None:
        self.offload, self.min_bytes, self.limit_bytes, self.hold = offload, min_bytes, limit_bytes, hold
        self.moving: bool | None = None
        self.layers = 0
        self.peak_bytes = self.total_bytes = self.stayed_bytes = 0
        self._engine = engine
        self._transfers: dict[torch.device, Transfers] = {}
        self._pieces: weakref.WeakValueDictionary[tuple[int, ...], Parked] = weakref.WeakValueDictionary()
        self._left_bytes, self._freed = 0, deque[int]()
        self._lock = threading.RLock()

    @classmethod
    def for_policy(cls, policy: str, min_bytes: int, limit_gib: float | None = None) -> HostStore:
        """The store of one of ``UnslothConfig.memory_policy``."""
        offload: Literal["auto"] | bool = "auto" if policy == "auto" else policy != "on_device"
        limit_bytes = None if limit_gib is None else int(limit_gib * 2**30)
        return cls(offload, min_bytes, limit_bytes=limit_bytes, hold=1 if policy == "min_memory" else 2)

    def __deepcopy__(self, memo: dict[int, Any]) -> HostStore:
        """An empty store with the same options: a copy of a model holds no activations of the first."""
        options: dict[str, Any] = {"limit_bytes": self.limit_bytes, "hold": self.hold, "engine": self._engine}
        return HostStore(self.offload, self.min_bytes, **options)

    @property
    def held_bytes(self) -> int:
        """Held now."""
        with self._lock:
            while self._freed:
                self._left_bytes -= self._freed.popleft()
            return self._left_bytes + sum(each.stored_bytes for each in self._transfers.values())

    @property
    def mapped_bytes(self) -> int:
        """Host memory that is kept for tensors, in use or not."""
        return sum(each.arena.mapped_bytes for each in self._transfers.values())

    @property
    def sent_bytes(self) -> int:
        """Copied to the host since construction."""
        return sum(each.sent_bytes for each in self._transfers.values())

    def copy_ms(self) -> tuple[float, float]:
        """Milliseconds of all copies so far, and milliseconds that computing waited for them; the rest was hidden."""
        each = [transfers.engine.copy_ms() for transfers in self._transfers.values()]
        return sum(copies for copies, _ in each), sum(exposed for _, exposed in each)

    def reset_peak(self) -> None:
        """Start a new high-water mark at what is held now."""
        self.peak_bytes = self.held_bytes

    def release(self) -> None:
        """Give host memory that is not in use back to the system."""
        held = self.held_bytes  # notes what has become free
        assert held >= 0
        for transfers in self._transfers.values():
            transfers.arena.release()

    def transfers(self, device: torch.device) -> Transfers:
        """The queue of a device, made on first use."""
        with self._lock:
            if device not in self._transfers:
                engine = self._engine(device)
                arena = Arena(engine.pin, engine.unpin, engine.block, self.limit_bytes)
                self._transfers[device] = Transfers(engine, arena, self.hold)
            return self._transfers[device]

    def tail_is_over(self) -> None:
        """See ``Transfers.tail_is_over``."""
        for transfers in self._transfers.values():
            transfers.tail_is_over()

    def reserve(self, tensor: torch.Tensor, count: int) -> None:
        """Let host memory for ``count`` tensors like ``tensor`` be made in the background, if they are to move.

        Raises:
            UnsupportedError: they would not fit in the limit.
        """
        n_bytes = tensor.numel() * tensor.element_size()
        large = n_bytes >= max(self.min_bytes, 1) and tensor.device.type != "meta"
        if count and large and self._moves(tensor.device):
            transfers = self.transfers(tensor.device)
            assert transfers.stored_bytes >= 0  # notes what has become free
            transfers.arena.reserve(n_bytes, count)

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook for saved tensors. Parameters, small tensors and tensors on no accelerator are kept as they are."""
        if self.offload is False or isinstance(tensor, torch.nn.Parameter):
            return tensor
        n_bytes = tensor.numel() * tensor.element_size()
        if tensor.layout != torch.strided or n_bytes < max(self.min_bytes, 1) or tensor.device.type == "meta":
            return tensor
        if not self._moves(tensor.device):
            if not is_accelerator(tensor.device):
                return self._account(Left(self, tensor, n_bytes), n_bytes)
            self.stayed_bytes += n_bytes
            return Left(self, tensor, 0)
        if type(tensor) not in (torch.Tensor, torch.nn.Buffer) or tensor.is_conj() or tensor.is_neg():
            return tensor  # what is more than its bytes
        return self._park(tensor.detach(), n_bytes)

    def _moves(self, device: torch.device) -> bool:
        """Whether large tensors of ``device`` go to the host now."""
        if self.offload != "auto" or device.type != "cuda":
            return self.offload is True or (self.offload == "auto" and is_accelerator(device))
        return memory_in_use(device) >= PLENTY if self.moving is None else self.moving

    @staticmethod
    def unpack(packed: Any) -> torch.Tensor:
        """The inverse of ``pack``: same values, dtype, device and, but for views with wide gaps, strides."""
        return packed.restore() if isinstance(packed, Left | HostView) else packed

    def _park(self, tensor: torch.Tensor, n_bytes: int) -> HostView:
        span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if span > _GAPS * tensor.numel():
            tensor = tensor.contiguous()
            span = tensor.numel()
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.data_ptr(), span * tensor.element_size(), version_of(tensor))
        with self._lock:
            parked = self._pieces.get(key)
            if parked is None:
                flat_N = tensor.as_strided((span,), (1,), tensor.storage_offset()).view(torch.uint8)
                parked = self.transfers(tensor.device).send(flat_N)
                parked.storage = StorageWeakRef(storage)  # keeps the key from meaning another storage
                self._pieces[key] = parked
                self._account(parked, parked.n_bytes)
            else:
                self.transfers(tensor.device).share(parked)
        return HostView(parked, tensor.dtype, tensor.shape, tensor.stride())

    def _account(self, packed: Any, n_bytes: int) -> Any:
        self.total_bytes += n_bytes
        if isinstance(packed, Left):
            self._left_bytes += n_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return packed


class HostView:
    """One saved tensor, as a view of a piece on the host."""

    __slots__ = ("_dtype", "_parked", "_shape", "_stride")

    def __init__(self, parked: Parked, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...]) -> None:
        self._parked, self._dtype, self._shape, self._stride = parked, dtype, shape, stride

    def restore(self) -> torch.Tensor:
        """The tensor on its own device again, not to be written to. Raises as ``Parked.fetch``."""
        flat_N = self._parked.fetch().view(self._dtype)
        return flat_N.as_strided(self._shape, self._stride, flat_N.storage_offset())


class Left:
    """One saved tensor that stays where it is; gives its bytes back to the account when it is freed."""

    __slots__ = ("_n_bytes", "_store", "_tensor", "_version")

    def __init__(self, store: HostStore, tensor: torch.Tensor, n_bytes: int) -> None:
        self._store, self._n_bytes = store, n_bytes
        self._tensor = tensor.detach()  # an output of its own node must not hold that
        self._version = version_of(tensor)

    def restore(self) -> torch.Tensor:
        """The tensor.

        Raises:
            UnsupportedError: it was changed in place since.
        """
        if version_of(self._tensor) != self._version:
            raise UnsupportedError(
                expected="the inputs of a checkpointed region to stay as they were until backward",
                got="one that was changed by an in-place operation",
                remedy="Clone it before the operation, or make the operation out of place.",
            )
        return self._tensor

    def __del__(self) -> None:
        if self._n_bytes:
            self._store._freed.append(self._n_bytes)
