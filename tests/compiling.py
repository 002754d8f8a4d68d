"""What triton builds for GPUs that need not be there; used in processes without the interpreter."""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg", "debug", "sanitize_overflow")


def compile_launch(launch: tuple[Any, int, dict[str, Any]], capability: int) -> Any:
    """What triton would build for this launch on a GPU of that capability."""
    kernel, _, arguments = launch
    signature, constants, attributes = {}, {}, {}
    for n, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        free = parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and not free):
            signature[parameter.name], constants[(n,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(n,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and not free:
                attributes[(n,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: arguments[name] for name in OPTIONS if name in arguments}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def assemble(ptx: str) -> tuple[int, list[str]]:
    """Bytes of spill stores, and performance warnings, of triton's own ptxas."""
    target = re.search(r"^\.target (sm_\w+)", ptx, re.MULTILINE)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        tools = triton.knobs.nvidia
        tool = tools.ptxas_blackwell if int(re.sub(r"\D", "", target[1])) >= 100 else tools.ptxas
        command = [tool.path, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spilled = re.search(r"(\d+) bytes spill stores", log)
    assert spilled is not None, log
    return int(spilled[1]), [line for line in log.splitlines() if "Performance Loss" in line]
