"""Launch configurations of the Triton kernels: which tile, how many warps and pipeline stages, on which device.

A table instead of autotuning: the choice is the same on every rank and in every run, it costs nothing at run time, and
the interpreter can follow it. ``python -m benchmarks attention --sweep`` times all candidates; the winner is moved to
the front of its row here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Kernel = Literal["forward", "dq", "dkdv"]


@dataclass(frozen=True)
class Tile:
    """One launch configuration.

    Attributes:
        m: queries per block (or rows, where the heads of a group share a block).
        n: keys per block.
        warps: warps of 32 threads per program.
        stages: depth of the software pipeline over the loop's loads.
        registers: most registers a thread may have, so that more programs fit on a multiprocessor; None for no limit.
        split: blocks that need no mask have a loop of their own; None: unless the window is narrow (`is_narrow`).
    """

    m: int
    n: int
    warps: int
    stages: int
    registers: int | None = None
    split: bool | None = None


# (kernel, narrow window) -> padded head size -> candidates, the best first. Shared memory of compute capability 9.0
# and 10.0 (227 KB a program).
_HOPPER: dict[tuple[Kernel, bool], dict[int, tuple[Tile, ...]]] = {
    ("forward", False): {
        64: (
            Tile(128, 64, 8, 3, 128),
            Tile(128, 128, 8, 2),
            Tile(128, 128, 8, 3),
            Tile(128, 64, 4, 3),
            Tile(128, 64, 4, 4),
            Tile(128, 64, 8, 4, 128),
            Tile(128, 64, 8, 2, 128),
            Tile(256, 64, 8, 3),
            Tile(64, 128, 4, 3),
            Tile(64, 64, 4, 3, 128),
        ),
        128: (Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(128, 64, 8, 4), Tile(128, 64, 8, 3), Tile(128, 128, 8, 2)),
        256: (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)),
    },
    ("forward", True): {
        64: (
            Tile(128, 32, 4, 3, 168, split=True),
            Tile(128, 64, 4, 3),
            Tile(128, 32, 4, 3),
            Tile(64, 32, 4, 3, 128, split=True),
            Tile(128, 64, 8, 2, 128),
            Tile(64, 32, 4, 3, 128),
            Tile(64, 64, 4, 3, 128),
        ),
        128: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(64, 32, 4, 3)),
        256: (Tile(64, 32, 4, 2), Tile(64, 64, 8, 2)),
    },
    ("dq", False): {
        64: (
            Tile(64, 64, 4, 3, 168),
            Tile(128, 64, 8, 3),
            Tile(128, 128, 8, 2),
            Tile(64, 64, 4, 2, 168),
            Tile(128, 64, 8, 2),
            Tile(64, 128, 4, 3),
            Tile(64, 64, 4, 4),
        ),
        128: (Tile(128, 64, 8, 3), Tile(64, 64, 4, 2), Tile(128, 128, 8, 2), Tile(64, 32, 4, 3)),
        256: (Tile(64, 32, 4, 2), Tile(128, 32, 8, 2)),
    },
    ("dq", True): {
        64: (
            Tile(64, 32, 4, 3),
            Tile(64, 32, 4, 3, 128),
            Tile(64, 32, 4, 2, 128),
            Tile(128, 32, 8, 3, 128),
            Tile(64, 64, 4, 3, 168),
        ),
        128: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(128, 64, 8, 2)),
        256: (Tile(64, 32, 4, 2),),
    },
    ("dkdv", False): {
        64: (
            Tile(64, 64, 4, 3),  # 1 % behind the next, which spills where there are documents, padding and a cap
            Tile(64, 64, 4, 2, 168),
            Tile(32, 64, 4, 4, 168),
            Tile(64, 64, 4, 3, 168),
            Tile(64, 128, 8, 3),
        ),
        128: (Tile(32, 64, 4, 4), Tile(64, 128, 8, 3), Tile(32, 64, 4, 3), Tile(64, 128, 8, 2), Tile(32, 128, 8, 3)),
        256: (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    },
    ("dkdv", True): {
        64: (
            Tile(64, 64, 4, 2, 168),
            Tile(32, 64, 4, 3, 168),
            Tile(32, 64, 4, 2, 168),
            Tile(64, 32, 4, 2, 168),
            Tile(64, 64, 4, 3, 168),
        ),
        128: (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 3)),
        256: (Tile(32, 64, 8, 2),),
    },
}

# Compute capability 8.0 (163 KB a program).
_AMPERE: dict[Kernel, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        64: (Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),
        128: (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2), Tile(128, 32, 4, 3)),
        256: (Tile(64, 32, 4, 2), Tile(64, 64, 8, 1)),
    },
    "dq": {
        64: (Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
        128: (Tile(64, 64, 8, 2), Tile(64, 32, 4, 2)),
        256: (Tile(64, 32, 8, 1),),
    },
    "dkdv": {
        64: (Tile(64, 64, 4, 2), Tile(64, 128, 8, 2)),
        128: (Tile(32, 64, 4, 2), Tile(64, 64, 8, 1)),
        256: (Tile(32, 32, 4, 1),),
    },
}

# Compute capabilities 8.6, 8.9 and 12.0 (99 KB a program), and what is not known.
_SMALL: dict[Kernel, dict[int, tuple[Tile, ...]]] = {
    "forward": {
        64: (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(128, 64, 8, 2)),
        128: (Tile(64, 64, 4, 2), Tile(128, 32, 4, 2), Tile(64, 32, 4, 2)),
        256: (Tile(32, 32, 4, 1), Tile(64, 32, 8, 1), Tile(32, 16, 4, 2)),
    },
    "dq": {
        64: (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
        128: (Tile(64, 32, 4, 2), Tile(32, 32, 4, 2)),
        256: (Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
    },
    "dkdv": {
        64: (Tile(32, 64, 4, 2), Tile(64, 64, 4, 1)),
        128: (Tile(32, 32, 4, 2), Tile(16, 64, 4, 1)),
        256: (Tile(16, 32, 4, 1), Tile(16, 16, 4, 1)),
    },
}

# float32, and everything on compute capability 7.5 (64 KB a program), where triton has no matrix instructions: small
# tiles that fit into registers, no pipeline to speak of.
_NO_MATRIX_UNIT: dict[Kernel, dict[int, tuple[Tile, ...]]] = {
    "forward": {64: (Tile(32, 32, 4, 1), Tile(64, 32, 8, 1)), 128: (Tile(32, 32, 8, 1),), 256: (Tile(16, 16, 4, 1),)},
    "dq": {64: (Tile(32, 32, 8, 1), Tile(32, 32, 4, 1)), 128: (Tile(16, 32, 8, 1),), 256: (Tile(16, 16, 8, 1),)},
    "dkdv": {64: (Tile(32, 32, 8, 1), Tile(16, 16, 4, 1)), 128: (Tile(16, 32, 8, 1),), 256: (Tile(16, 16, 8, 1),)},
}


def padded_head_size(head_size: int) -> int:
    """The power of two, at least 16, that a tile's rows are padded to."""
    return max(16, 1 << (head_size - 1).bit_length())


def is_narrow(window: int | None) -> bool:
    """Whether the window is a few blocks wide, so that a loop over blocks that need no mask is not worth having."""
    return window is not None and window <= 512


def configs(
    kernel: Kernel, *, head_size: int, dtype: torch.dtype, capability: tuple[int, int], narrow: bool, queries: int
) -> tuple[Tile, ...]:
    """Candidates for one kernel, the one to use first.

    Args:
        kernel: ``forward``, ``dq`` or ``dkdv``.
        head_size: D, 1 to 256.
        dtype: of q, k and v.
        capability: CUDA compute capability.
        narrow: the window is at most 512 keys (`is_narrow`).
        queries: T; blocks of queries are not made larger than needed (decoding).
    """
    size = max(64, padded_head_size(head_size))
    if dtype == torch.float32 or capability < (8, 0):
        found = _NO_MATRIX_UNIT[kernel][size]
    elif capability[0] in (9, 10):
        found = _HOPPER[kernel, narrow][size]
    elif capability == (8, 0):
        found = _AMPERE[kernel][size]
    else:
        found = _SMALL[kernel][size]
    if kernel == "forward" and queries <= 16:
        return (Tile(16, found[0].n, 4, found[0].stages),)
    return found
