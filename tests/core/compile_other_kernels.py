"""Compile all kernels but those over blocks of attention; run as a script, in a process without the interpreter.

Arguments: compute capability and dtype. Prints one JSON object a kernel: shared memory of a program and spilled bytes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import triton
from compiling import assemble, compile_launch

from unsloth_plugins.core.experts import kernels, triton_gemm
from unsloth_plugins.core.experts.triton_gemm import grouped_product, grouped_reduce
from unsloth_plugins.core.layers import GPT_OSS, Swiglu
from unsloth_plugins.core.layers.triton_dropout import dropout_launch
from unsloth_plugins.core.layers.triton_glu import gated_backward, gated_forward
from unsloth_plugins.core.layers.triton_norm import rms_norm_backward, rms_norm_forward
from unsloth_plugins.core.layers.triton_rope import rope_launch
from unsloth_plugins.core.loss.kernel import chunk_loss_in_place
from unsloth_plugins.core.mxfp4.kernel import decode_triton
from unsloth_plugins.core.offload.lookup import lookup_triton
from unsloth_plugins.core.sink_attention.triton_decode import decode

launched: list[tuple[Any, int, dict[str, Any]]] = []


def note(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """Stands in for a launch."""
    names = [parameter.name for parameter in self.params]
    launched.append((self, grid[0], dict(zip(names, args, strict=False)) | kwargs))


def launch_all(dtype: torch.dtype) -> None:
    """Every kernel at gpt-oss-20b's sizes, with and without what is optional."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    lookup_triton(empty(201088, 2880), empty(8192, of=torch.int64))

    tokens, choices, experts, hidden, rank = 8192, 4, 32, 2880, 32
    rows = tokens * choices
    index = empty(rows, of=torch.int64)
    wide, gate_up = empty(rows, hidden + rank), empty(rows, 2 * hidden)
    place, weight = empty(tokens, choices, of=torch.int64), empty(tokens, choices, of=torch.float32)
    kernels.gather_rows(empty(tokens, hidden), index, wide[:, :hidden])
    for activation, bias in ((GPT_OSS, empty(experts, 2 * hidden)), (Swiglu(), None)):
        options: dict[str, Any] = dict(activation=activation)
        kernels.swiglu(gate_up, bias, index, wide[:, :hidden], **options)
        for more in (True, False):
            flat, part = empty(rows, of=torch.float32), empty(rows, hidden)
            kernels.swiglu_backward(gate_up, bias, index, flat, wide[:, :hidden], part, has_more=more, **options)
    out = empty(tokens, hidden)
    kernels.combine(wide[:, :hidden], place, out, more_MH=empty(rows, hidden))
    kernels.combine(empty(rows, hidden), place, out, index_NK=place, weight_NK=weight, bias_EH=empty(experts, hidden))
    kernels.combine(empty(rows, hidden), place, out, weight_NK=weight)
    blocks, scales = empty(experts, hidden, 90, 16, of=torch.uint8), empty(experts, hidden, 90, of=torch.uint8)
    for used in (None, empty(experts, of=torch.bool)):
        decode_triton(blocks, scales, empty(experts, hidden, hidden + rank)[..., :hidden], used)
    query, cache, heads = empty(1, 1, 64, 64), empty(1, tokens, 8, 64), empty(64, of=torch.float32)
    first, seen = empty(1, tokens, of=torch.int32), empty(1, tokens, of=torch.uint8)
    for row, softcap in (((None, None, None), None), ((heads, first, seen), 30.0)):
        decode(query, cache, cache, *row, window=None, scale=0.125, softcap=softcap)
    logits, labels = empty(512, 201_088), empty(512, of=torch.int64)
    for factor in (None, empty(of=torch.float32)):
        for grad in (True, False):
            rule: dict[str, Any] = dict(ignore_index=-100, label_smoothing=0.1, want_grad=grad)
            chunk_loss_in_place(logits, labels, factor, **rule)
    launch_grouped(dtype)
    launch_layers(dtype)


def launch_grouped(dtype: torch.dtype) -> None:
    """Grouped GEMMs of gpt-oss-20b with LoRA and of Qwen3-30B-A3B, many rows and few, in 16 bits and in float32."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    for of in (dtype, torch.float32):
        for experts, inputs, outputs in ((32, 2912, 5760), (128, 2048, 1536), (32, 32, 2880), (32, 2880, 32)):
            ends, weight = empty(experts, of=torch.int32), empty(experts, inputs, outputs, of=of)
            for rows in (32768, 40):
                x, y = empty(rows, inputs, of=of), empty(rows, outputs, of=of)
                grouped_product(x, weight, ends, torch.float32 if of == torch.float16 else of)
                grouped_product(y, weight.transpose(1, 2), ends, torch.float32 if of == torch.float16 else of)
                grouped_reduce(x, y, ends, grouped_reduce(x, y, ends, None))


def launch_layers(dtype: torch.dtype) -> None:
    """Norms from a head's size to a large model's width, and the rest at the sizes of Mistral-7B and Gemma."""

    def empty(*shape: int, of: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=of, device="meta")

    for size in (64, 128, 2880, 4096, 8192, 16384):
        x, weight, rstd = empty(1024, size), empty(size), empty(1024, of=torch.float32)
        for residual in (None, x):
            rms_norm_forward(x, weight, residual, eps=1e-5, cast_first=True, one_plus=False)
            for want in (True, False) if size <= 8192 else (False,):
                rms_norm_backward(x, residual, x, weight, rstd, one_plus=True, want_weight=want)
    for heads, kv_heads, size, angles in ((32, 8, 128, 128), (64, 8, 64, 32), (8, 4, 256, 256), (32, 32, 96, 48)):
        q, k = empty(1, 1024, heads, size).transpose(1, 2), empty(1, 1024, kv_heads, size).transpose(1, 2)
        cos = empty(1, 1024, angles)
        for back in (True, False):
            rope_launch(q, k, q, k, cos, cos, half=angles if 2 * angles == size else angles // 2, back=back)
    gate = empty(1024, 14336)
    for activation in ("silu", "gelu_tanh", "gelu"):
        gated_forward(gate, gate, gate, activation=activation)
        for out in (None, gate):
            gated_backward(gate, gate, gate, gate, gate, activation=activation, out_MI=out)
    for size in (2880, 4096):
        for add in (True, False):
            dropout_launch(empty(1024, size), empty(1024, size), p=0.05, seed=(1 << 40) + 3, add=add)


if __name__ == "__main__":
    triton.runtime.JITFunction.run = note
    triton_gemm.uses_tensor_cores = lambda x: int(sys.argv[1]) >= 80 and x.dtype != torch.float32
    launch_all(getattr(torch, sys.argv[2]))
    for launch in launched:
        built = compile_launch(launch, int(sys.argv[1]))
        spilled, _ = assemble(built.asm["ptx"])
        row = {"kernel": launch[0].__name__, "shared": built.metadata.shared, "spilled": spilled}
        print(json.dumps(row), flush=True)
