"""Compile the Triton kernels for GPUs that need not be there; run as a script, in a process without the interpreter.

Arguments: compute capability (90, say), dtype, head sizes, ``first`` or ``all`` candidates, and modes (all by default),
with commas between. Prints one JSON object a kernel: the shared memory of a program in bytes, bytes spilled from
registers, and ptxas's warnings.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from compiling import assemble, compile_launch

from unsloth_plugins.core.sink_attention.triton_bwd import dq_launch, row_sums_launch
from unsloth_plugins.core.sink_attention.triton_dkdv import dkdv_launch
from unsloth_plugins.core.sink_attention.triton_fwd import forward_launch
from unsloth_plugins.core.sink_attention.triton_tiles import configs, is_narrow

# window, documents, padding, softcap
MODES: dict[str, tuple[int | None, bool, bool, float | None]] = {
    "causal": (None, False, False, None),
    "window": (128, False, False, None),
    "packed": (None, True, False, None),
    "packed in a window": (128, True, False, None),
    "padded in a window": (128, False, True, None),
    "everything": (4096, True, True, 30.0),
}


def launches(
    dtype: torch.dtype, head_size: int, mode: str, capability: int, every: bool = False, tokens: int = 8192
) -> Any:
    """(name, tile, launch) of each kernel at gpt-oss's heads; ``every`` candidate for a tile, or the first."""
    window, documents, padding, softcap = MODES[mode]

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    q, kv, row = empty(1, tokens, 64, head_size), empty(1, tokens, 8, head_size), empty(1, 64, tokens, of=torch.float32)
    sink = empty(64, of=torch.float32)
    bound = empty(1, tokens, of=torch.int32) if documents or padding else None
    mask = empty(1, tokens, of=torch.uint8) if padding else None
    narrow = is_narrow(window)
    shared = {"window": window, "scale": 0.125, "softcap": softcap, "narrow": narrow}

    def tiles(kernel: Any) -> Any:
        found = configs(
            kernel,
            head_size=head_size,
            dtype=dtype,
            capability=divmod(capability, 10),
            narrow=narrow,
            queries=tokens,
        )
        return found if every else found[:1]

    for tile in tiles("forward"):
        yield "forward", tile, forward_launch(q, kv, kv, sink, bound, mask, q, row, tile=tile, **shared)
    for tile in tiles("dq"):
        yield "dq", tile, dq_launch(q, kv, kv, q, row, row, bound, mask, q, tile=tile, **shared)
    for tile in tiles("dkdv"):
        yield "dkdv", tile, dkdv_launch(q, kv, kv, q, row, row, bound, mask, kv, kv, tile=tile, **shared)
    if mode == "causal":
        sums = empty(1, 64, triton.cdiv(tokens, 128), of=torch.float32)
        yield "row_sums", None, row_sums_launch(q, q, row, row, sink, row, sums)


if __name__ == "__main__":
    for_capability, for_dtype = int(sys.argv[1]), getattr(torch, sys.argv[2])
    modes = sys.argv[5].split(",") if len(sys.argv) > 5 else list(MODES)
    for size in map(int, sys.argv[3].split(",")):
        for name_of_mode in modes:
            for kernel_name, tile, launch in launches(
                for_dtype, size, name_of_mode, for_capability, sys.argv[4] == "all"
            ):
                built = compile_launch(launch, for_capability)
                spilled, warnings = assemble(built.asm["ptx"])
                row = {"kernel": kernel_name, "mode": name_of_mode, "head_size": size, "tile": str(tile)}
                row |= {"shared": built.metadata.shared, "spilled": spilled, "warnings": warnings}
                print(json.dumps(row), flush=True)
