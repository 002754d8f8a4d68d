"""Saved tensors moved to host memory and back, with an account of the bytes."""

from __future__ import annotations

import warnings
from typing import Literal

import torch

from unsloth_plugins.core.device import is_accelerator, memory_in_use
from unsloth_plugins.core.errors import UnsupportedError

_PLENTY = 0.5  # of the device's memory: below it copies cost time and save nothing that is needed


class HostStore:
    """Counts what is held on the host, and moves tensors there.

    Args:
        offload: ``"auto"`` moves tensors of accelerators, on CUDA only while half of its memory is in use, and counts
            those of the CPU where they are; ``True`` moves all, and copies CPU tensors too (for tests of the path);
            ``False`` moves nothing.
        min_bytes: smaller tensors stay on their device.

    Attributes:
        held_bytes: held now.
        peak_bytes: high-water mark of ``held_bytes`` since construction or ``reset_peak``.
        total_bytes: ever taken in.
    """

    def __init__(self, offload: Literal["auto"] | bool = "auto", min_bytes: int = 1 << 20) -> None:
        self.offload, self.min_bytes = offload, min_bytes
        self.held_bytes = self.peak_bytes = self.total_bytes = 0
        self._pinning_failed = False

    def reset_peak(self) -> None:
        """Start a new high-water mark at what is held now."""
        self.peak_bytes = self.held_bytes

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | HostCopy:
        """The hook for saved tensors. Parameters, small tensors and tensors on no accelerator are kept as they are."""
        if self.offload is False or isinstance(tensor, torch.nn.Parameter):
            return tensor
        if tensor.layout != torch.strided or tensor.numel() * tensor.element_size() < max(self.min_bytes, 1):
            return tensor
        if self.offload == "auto" and tensor.is_cuda and memory_in_use(tensor.device) < _PLENTY:
            return HostCopy(self, tensor, copy=False, counted=False)
        on_accelerator = is_accelerator(tensor.device)
        if not on_accelerator and (tensor.device.type == "meta"):
            return tensor
        return HostCopy(self, tensor, copy=on_accelerator or self.offload is True)

    @staticmethod
    def unpack(packed: torch.Tensor | HostCopy) -> torch.Tensor:
        """The inverse of ``pack``: same values, dtype, strides of a dense tensor and device."""
        return packed.restore() if isinstance(packed, HostCopy) else packed

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        pin = tensor.device.type == "cuda" and not self._pinning_failed
        host = None
        if pin:
            try:
                host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
            except RuntimeError as error:
                self._pinning_failed = True
                warnings.warn(
                    f"Page-locked host memory ran out ({error}); offloaded activations go through ordinary host memory "
                    "from here on, which is slower. On WSL the limit for pinned memory is separate from the RAM.",
                    stacklevel=2,
                )
        if host is None:
            host = torch.empty_like(tensor, device="cpu", requires_grad=False)
        return host.copy_(tensor.detach())

    def _add(self, n_bytes: int) -> None:
        self.held_bytes += n_bytes
        self.total_bytes += max(n_bytes, 0)
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class HostCopy:
    """One saved tensor, in host memory where it was copied; gives its bytes back to the account when it is freed."""

    __slots__ = ("_device", "_host", "_n_bytes", "_store", "_version")

    def __init__(self, store: HostStore, tensor: torch.Tensor, *, copy: bool, counted: bool = True) -> None:
        self._n_bytes = 0  # __del__ must work when the copy below fails
        self._store, self._device = store, tensor.device
        self._host = store._to_host(tensor) if copy else tensor
        self._version = None if copy or tensor.is_inference() else tensor._version
        self._n_bytes = tensor.numel() * tensor.element_size() if counted else 0
        store._add(self._n_bytes)

    def restore(self) -> torch.Tensor:
        """The tensor on its own device again.

        Raises:
            UnsupportedError: it was left where it was, and changed in place since.
        """
        if self._version is not None and self._host._version != self._version:
            raise UnsupportedError(
                expected="the inputs of a checkpointed region to stay as they were until backward",
                got="one that was changed by an in-place operation",
                remedy="Clone it before the operation, or make the operation out of place.",
            )
        return self._host.to(self._device) if self._host.device != self._device else self._host

    def __del__(self) -> None:
        if self._n_bytes:
            self._store._add(-self._n_bytes)
