"""How many variants of the kernels triton would build for twenty lengths; run as a script, without the interpreter.

Arguments: compute capability. Prints one JSON object a kernel and mode: the number of variants. Triton builds one for
each combination of constants, dtypes, and what it specialises integers on: 1, multiples of 16, and the width.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from compile_kernels import MODES, launches

LENGTHS = range(64, 1000, 47)


def variant(launch: tuple[Any, int, dict[str, Any]]) -> tuple[object, ...]:
    """What triton tells launches of one kernel apart by."""
    kernel, _, arguments = launch
    parameters = {parameter.name: parameter for parameter in kernel.params}

    def of(name: str, value: Any) -> object:
        parameter = parameters.get(name)  # None for options of the launch, such as num_warps
        if parameter is None or parameter.is_constexpr or value is None:
            return value
        if isinstance(value, torch.Tensor):
            return value.dtype
        if isinstance(value, int) and not parameter.do_not_specialize:
            return value == 1, value % 16 == 0, value >= 2**31
        return type(value)

    return tuple((name, of(name, value)) for name, value in arguments.items())


if __name__ == "__main__":
    found: dict[tuple[str, str], set[tuple[object, ...]]] = {}
    for mode in MODES:
        for length in LENGTHS:
            for name, _, launch in launches(torch.bfloat16, 64, mode, int(sys.argv[1]), tokens=length):
                found.setdefault((name, mode), set()).add(variant(launch))
    for (name, mode), variants in found.items():
        print(json.dumps({"kernel": name, "mode": mode, "variants": len(variants)}))
