"""What the device can do. Nothing is read at import; every function takes the device it is asked about."""

from __future__ import annotations

import contextlib
import sys

import torch


def is_accelerator(device: torch.device) -> bool:
    """Whether ``device`` has memory of its own, so that moving a tensor to the host frees something."""
    return device.type not in ("cpu", "meta")


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Make ``device`` the current one, where triton launches its kernels; nothing to do but on CUDA."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def supports_grouped_mm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``torch._grouped_mm`` has a kernel: bf16 on Hopper and Blackwell; elsewhere it is a loop in it."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not hasattr(torch, "_grouped_mm"):
        return False
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def why_no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why kernels in ``dtype`` don't run natively on ``device``, or ``None``: NVIDIA of compute capability >= 7.5."""
    if device.type != "cuda":
        return f"a tensor on {device.type}"
    if torch.version.hip is not None:
        return "a ROCm build of torch"
    capability = torch.cuda.get_device_capability(device)
    least = (8, 0) if dtype == torch.bfloat16 else (7, 5)
    if capability < least:
        return f"{dtype} on compute capability {capability[0]}.{capability[1]}, below {least[0]}.{least[1]}"
    return None


class DeviceMemory:
    """Bytes of a device, as this process sees them."""

    def is_known(self, device: torch.device) -> bool:
        """Whether the others can be asked: on CUDA."""
        return device.type == "cuda"

    def allowed(self, device: torch.device) -> int:
        """What the process may have: under its cap, and not in use by another."""
        free, total = torch.cuda.mem_get_info(device)
        cap = total * torch.cuda.get_per_process_memory_fraction(device)
        return int(min(cap, free + torch.cuda.memory_reserved(device)))

    def allocated(self, device: torch.device) -> int:
        """In tensors now."""
        return torch.cuda.memory_allocated(device)

    def peak(self, device: torch.device) -> int:
        """The most that was in tensors since the counter was last reset."""
        return torch.cuda.max_memory_allocated(device)


def memory_in_use(device: torch.device) -> float:
    """The part of the CUDA memory this process may have that its tensors take now, 0 to 1."""
    allowed = torch.cuda.get_device_properties(device).total_memory * torch.cuda.get_per_process_memory_fraction(device)
    return torch.cuda.memory_allocated(device) / allowed


def peak_memory_gib(device: torch.device) -> float:
    """High-water mark in GiB: the caching allocator's on CUDA, the process's resident set elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return peak_process_gib()


def peak_process_gib() -> float:
    """High-water mark of the process's resident set, in GiB."""
    if sys.platform == "win32":
        import psutil

        return psutil.Process().memory_info().peak_wset / 2**30
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
