"""Which implementation serves a call: what was asked for, what can run here, and what was measured to be fastest.

``auto`` follows a committed table instead of timing at run time, so that every rank, and a resumed run, chooses alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal, get_args

import torch
from packaging.version import Version

from unsloth_plugins.core.device import why_no_triton
from unsloth_plugins.core.errors import UnsupportedError

Backend = Literal["auto", "triton", "fa4", "cudnn", "flex", "eager"]
Resolved = Literal["triton", "fa4", "cudnn", "flex", "eager"]
MAX_HEAD_SIZE = 256
FA4_LEAST = Version("4.0.0b26")  # the first with the sink's gradient on Hopper
FOREIGN_ELEMENTS = 1 << 31  # of q: nobody has tested the offsets of others from here on


@dataclass(frozen=True)
class Measured:
    """Where another backend beat the Triton kernels on full attention, forward and backward together.

    Attributes:
        backend: its name.
        tokens: from this length on.
        version: of flash-attn-4 or cuDNN when it was measured; older ones are not taken by ``auto``.
    """

    backend: Literal["fa4", "cudnn"]
    tokens: int
    version: Version


# (major compute capability, padded head size) -> what `auto` takes for attention without a window, the best first. What
# is not here, and every window, is Triton's. Sources: benchmarks/results/h200-2026-12-03-attention.json; the steps
# of h200-2026-12-02-step.json, where flash-attn-4 lost at 2,048 tokens and won at 8,192 and 32,768.
FASTER: dict[tuple[int, int], tuple[Measured, ...]] = {
    (9, 64): (Measured("fa4", 4096, Version("4.0.0b36")), Measured("cudnn", 1024, Version("9.10"))),
    (9, 128): (Measured("fa4", 4096, Version("4.0.0b36")), Measured("cudnn", 1024, Version("9.10"))),
}


@dataclass(frozen=True)
class Call:
    """What the choice depends on.

    Attributes:
        device, dtype: of q, k and v.
        head_size: D.
        queries, keys: T and S; ``None`` where they are not known yet.
        window: keys that a query sees, or ``None``.
        softcap: whether the logits are capped, or their scale is not positive.
        elements: of q, B * T * H * D; ``None`` where they are not known yet.
        padded: whether keys are masked.
        packed: whether a row holds several documents.
        lse: whether the normaliser is asked for.
        deterministic: whether equal inputs have to give equal bits.
    """

    device: torch.device
    dtype: torch.dtype
    head_size: int
    queries: int | None = None
    keys: int | None = None
    window: int | None = None
    softcap: bool = False
    elements: int | None = None
    padded: bool = False
    packed: bool = False
    lse: bool = False
    deterministic: bool = False


@lru_cache(1024)
def resolve_backend(choice: Backend, call: Call) -> tuple[Resolved, str]:
    """What ``choice`` means for ``call``, and why.

    Raises:
        UnsupportedError: a backend was asked for that does not exist or can't run here.
    """
    if choice not in get_args(Backend):
        raise UnsupportedError(
            expected=f"backend to be one of {', '.join(map(repr, get_args(Backend)))}",
            got=repr(choice),
            remedy="Leave it out for the default.",
        )
    if choice == "eager":
        return "eager", "asked for"
    if choice != "auto":
        reason = why_not(choice, call)
        if reason is not None:
            raise UnsupportedError(
                expected=f"inputs, a device and packages with which attention backend {choice!r} runs",
                got=reason,
                remedy="Choose 'auto'.",
            )
        return choice, _kernels(call) if choice == "triton" else "asked for"
    if (row := preferred(call)) is not None:
        return row.backend, f"{row.backend} {_version(row.backend)}, measured faster for heads of {call.head_size}"
    reason = why_not_triton(call)
    if reason is not None:
        return "eager", f"no kernel: {reason}"
    return "triton", _kernels(call)


def _kernels(call: Call) -> str:
    return f"{call.dtype} on CUDA".replace("torch.", "") if call.device.type == "cuda" else "interpreted"


def why_not(backend: str, call: Call) -> str | None:
    """Why ``backend``, any but ``eager``, can't serve the call, or ``None``."""
    reasons = {"triton": why_not_triton, "fa4": why_not_fa4, "cudnn": why_not_cudnn, "flex": why_not_flex}
    return reasons[backend](call)


def why_not_triton(call: Call) -> str | None:
    """Why the Triton kernels can't serve, or ``None``: D <= 256, fp16, bf16 or fp32, on CUDA or in the interpreter."""
    if call.head_size > MAX_HEAD_SIZE:
        return f"head size {call.head_size}, above {MAX_HEAD_SIZE}"
    if call.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return str(call.dtype)
    if find_spec("triton") is None:
        return "triton is not installed"
    if call.device.type == "cpu":
        from unsloth_plugins.core.sink_attention import triton_op

        return None if triton_op.INTERPRETED else "a tensor on cpu"
    reason = why_no_triton(call.device, call.dtype)
    wide = call.head_size > 128 and call.dtype == torch.float32
    if reason is None and wide and torch.cuda.get_device_capability(call.device) < (8, 0):
        reason = f"float32 heads of {call.head_size}, too large for the shared memory of compute capability 7.5"
    return reason


@cache
def fa4_version() -> Version | None:
    """The installed version of flash-attn-4, or ``None``."""
    try:
        return Version(version("flash-attn-4")) if find_spec("flash_attn") is not None else None
    except PackageNotFoundError:
        return None


def why_not_fa4(call: Call) -> str | None:
    """Why flash-attn-4 can't serve, or ``None``: Hopper or Blackwell, fp16 or bf16, as many queries as keys."""
    found = fa4_version()
    if found is None or found < FA4_LEAST:
        return f"flash-attn-4 {found or 'not installed'}, {FA4_LEAST} or newer needed"
    if call.device.type != "cuda" or torch.cuda.get_device_capability(call.device)[0] not in (9, 10, 11):
        return f"a device that it has no sink gradient for: {call.device}"
    return _why_not_foreign(call)


def _why_not_foreign(call: Call) -> str | None:
    """What neither flash-attn-4 nor cuDNN can serve, or was not tested with."""
    if call.dtype not in (torch.float16, torch.bfloat16):
        return str(call.dtype)
    if call.head_size > 128 or call.head_size % 8:
        return f"head size {call.head_size}: a multiple of 8 up to 128 needed"
    if call.queries is not None and call.queries != call.keys:
        return f"{call.queries} queries for {call.keys} keys"
    if call.softcap:
        return "a softcap of the logits, or a scale that is not positive"
    if call.elements is not None and call.elements >= FOREIGN_ELEMENTS:
        return f"{call.elements:,} elements of q, and it is not tested from 2^31 on"
    return "a key mask with zeros" if call.padded else None


@cache
def cudnn_version() -> Version | None:
    """The version of the cuDNN that torch found, or ``None``."""
    found = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return None if found is None else Version(f"{found // 10000}.{found // 100 % 100}.{found % 100}")


def _why_no_cudnn(device: torch.device) -> str | None:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return f"a device that it has no flash attention for: {device}"
    found = cudnn_version()
    if found is None or found.major < 9:
        return f"cuDNN {found or 'not found'}, 9 or newer needed"
    return None if torch.backends.cuda.cudnn_sdp_enabled() else "torch.backends.cuda.enable_cudnn_sdp(False)"


def why_not_cudnn(call: Call) -> str | None:
    """Why cuDNN can't serve, or ``None``: full attention in fp16 or bf16 of whole rows, as many queries as keys."""
    reason = _why_no_cudnn(call.device) or _why_not_foreign(call)
    if reason is not None:
        return reason
    for given, what in (
        (call.queries == 1, "a single token"),
        (call.window is not None and (call.keys is None or call.window < call.keys), "a window"),
        (call.packed, "packed documents"),
        (call.lse, "return_lse=True"),
        (call.deterministic, "deterministic=True, and its sums are in no fixed order"),
    ):
        if given:
            return what
    return None


def faster(call: Call) -> tuple[Measured, ...]:
    """The rows of the table that hold for calls like this one, without a window, at whatever length."""
    if call.device.type != "cuda":
        return ()
    size = max(64, 1 << (call.head_size - 1).bit_length())
    rows = FASTER.get((torch.cuda.get_device_capability(call.device)[0], size), ())
    return tuple(row for row in rows if _is_new_enough(row) and why_not(row.backend, call) is None)


def _version(backend: str) -> Version | None:
    return fa4_version() if backend == "fa4" else cudnn_version()


def _is_new_enough(row: Measured) -> bool:
    found = _version(row.backend)
    return found is not None and found >= row.version


def preferred(call: Call) -> Measured | None:
    """The first row of the table that gives the call to another backend than Triton, which can run it."""
    if call.queries is None or call.window is not None:
        return None
    return next((row for row in faster(call) if call.queries >= row.tokens), None)


def why_not_flex(call: Call) -> str | None:
    """Why torch's flex attention can't serve, or ``None``: CUDA, and a head size that is a power of two from 16 on."""
    if call.device.type != "cuda":
        return f"a tensor on {call.device.type}"
    if call.head_size < 16 or call.head_size & (call.head_size - 1):
        return f"head size {call.head_size}: a power of two from 16 on needed"
    return None
