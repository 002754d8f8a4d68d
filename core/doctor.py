"""What this machine and environment can use, what is broken, and what is missing and would help.

Ops are run on small inputs and compared with their reference in float64: the error may be that of plain PyTorch in the
same dtype, and a little. Nothing is changed, and no more than some hundred MiB are taken.
"""

from __future__ import annotations

import functools
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from packaging.requirements import Requirement

from unsloth_plugins.core.device import supports_grouped_mm, why_no_triton
from unsloth_plugins.core.experts.gemm import GEMMS
from unsloth_plugins.core.experts.matmul import ExpertLora
from unsloth_plugins.core.experts.op import experts, resolve_implementation
from unsloth_plugins.core.layers import gated, rms_norm, rope
from unsloth_plugins.core.layers.lora_linear import LoraProjection, LoraTerm, lora_linears
from unsloth_plugins.core.loss import linear_cross_entropy
from unsloth_plugins.core.mxfp4.codec import decode, encode
from unsloth_plugins.core.mxfp4.weight import PackedWeight
from unsloth_plugins.core.offload.engine import engine_for
from unsloth_plugins.core.sink_attention import sink_attention
from unsloth_plugins.core.sink_attention.backends import Call, Resolved, why_not

GIB = 1 << 30
SLACK = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Of the largest magnitude: how much further from the truth than plain PyTorch a kernel may be."""
_OPTIONAL = {
    "bitsandbytes": "4-bit bases of dense models (QLoRA) and the 8-bit AdamW",
    "flash-attn-4": "faster full attention on Hopper from 4,096 tokens on",
    "gguf": "export to GGUF",
    "lightning": "the Lightning strategies",
    "trl": "TRL's trainers",
    "matplotlib": "pictures of masks and plans",
}
_PIN_BYTES = 256 << 20
_SLOW_LINK = 14  # GB/s: from here on copies of layer inputs hide behind what the layers compute
_LITTLE_DISK = 20  # GB

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: of what was looked at.
        state: ``ok``; ``missing``, which is no fault; ``broken``: does not work as installed.
        detail: what was found or measured.
        gain: what would be gained by having it, or by repairing it.
    """

    name: str
    state: State
    detail: str
    gain: str = ""


def examine(folder: Path | None = None) -> list[Finding]:
    """Look at everything; takes seconds, on a GPU the time to compile some kernels.

    Args:
        folder: whose disk is looked at; the current one by default.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    dtype = _working_dtype(device)
    parts: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("packages", packages),
        ("GPU", gpus),
        ("attention", lambda: attention(device, dtype)),
        ("grouped GEMM", lambda: grouped_gemm(device, dtype)),
        ("kernels", lambda: kernels(device, dtype)),
        ("ops", lambda: ops(device, dtype)),
        ("bitsandbytes", lambda: four_bits(device)),
        ("host memory", lambda: host_memory(device)),
        ("PCIe", lambda: link(device)),
        ("disk", lambda: [disk(folder or Path.cwd())]),
    ]
    return [finding for name, part in parts for finding in guarded(name, part)]


def guarded(name: str, part: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """The findings of one part; whatever it raises is the finding."""
    try:
        return list(part())
    except Exception as error:
        return [Finding(name, "broken", f"{type(error).__name__}: {error}".splitlines()[0])]


def _working_dtype(device: torch.device) -> torch.dtype:
    """What models are trained in there."""
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def packages() -> list[Finding]:
    """Python, what this project requires, and what it can use."""
    found = [Finding("Python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    try:
        needed = requires("unsloth-plugins") or []
    except PackageNotFoundError:
        needed = []
        gain = "checks of the versions that it needs: pip install -e ."
        found.append(Finding("unsloth-plugins", "missing", "runs from a folder, not installed", gain))
    for each in map(Requirement, needed):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        have = _installed(each.name)
        if have is None:
            found.append(Finding(each.name, "broken", f"not installed, {each} needed", "it is required"))
        elif not each.specifier.contains(have, prereleases=True):
            found.append(Finding(each.name, "broken", f"{have} installed, {each} needed", "it is required"))
        else:
            found.append(Finding(each.name, "ok", have))
    for name, gain in _OPTIONAL.items():
        have = _installed(name)
        found.append(Finding(name, "ok", have) if have else Finding(name, "missing", "not installed", gain))
    return found


def _driver() -> str:
    """What nvidia-smi says; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=30)
    return done.stdout.strip().partition("\n")[0] if done.returncode == 0 else ""


def gpus() -> list[Finding]:
    """Every CUDA device; a driver that torch can't use is a fault."""
    if not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            reason = "this torch was built without CUDA"
        else:
            reason = "torch sees no device"
        if shutil.which("nvidia-smi"):
            return [Finding("GPU", "broken", f"a driver is installed, but {reason}", "training on the GPU")]
        return [Finding("GPU", "missing", reason, "Triton kernels, offloading, 4-bit speed: all of it is for GPUs")]
    found = [Finding("driver", "ok", driver)] if (driver := _driver()) else []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        detail = (
            f"{about.name}, {about.total_memory / GIB:.1f} GiB, compute capability {about.major}.{about.minor}, "
            f"CUDA {torch.version.cuda or torch.version.hip}"
        )
        if (about.major, about.minor) < (7, 5):
            found.append(Finding(f"GPU {index}", "missing", detail, "kernels run from compute capability 7.5 on"))
        else:
            found.append(Finding(f"GPU {index}", "ok", detail))
    return found


def compare(
    op: Callable[..., Any], eager: Callable[..., Any], inputs: dict[str, torch.Tensor], dtype: torch.dtype
) -> str | None:
    """Outputs and gradients of ``op`` against ``eager`` in float64; why they are too far apart, or ``None``.

    Args:
        op, eager: take the inputs by name, return one tensor.
        inputs: float64 leaves, rounded to ``dtype`` for all.
    """

    def run(function: Callable[..., Any], kind: torch.dtype) -> list[torch.Tensor]:
        leaves = {name: x.to(dtype).to(kind).detach().requires_grad_() for name, x in inputs.items()}
        out = function(**leaves)
        weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64, device=out.device).view(out.shape)
        return [out, *torch.autograd.grad(out, list(leaves.values()), weight.to(out.dtype))]

    truths, plain, ours = run(eager, torch.float64), run(eager, dtype), run(op, dtype)
    for name, truth, other, got in zip(("output", *inputs), truths, plain, ours, strict=True):
        error = (got.double() - truth).abs().max().item()
        allowed = (other.double() - truth).abs().max().item() + SLACK[dtype] * truth.abs().max().item()
        if not error <= allowed:
            return f"{name}: error {error:.3g} against float64, {allowed:.3g} allowed"
    return None


def _checked(name: str, wrong: str | None, dtype: torch.dtype) -> Finding:
    if wrong is not None:
        return Finding(name, "broken", wrong, "results would be wrong")
    return Finding(name, "ok", f"agrees with the float64 reference, gradients too ({dtype})".replace("torch.", ""))


def _draw(device: torch.device, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64).to(device) for name, shape in shapes.items()}


def _plain_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sink: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Attention of one row with sinks as one writes it down: q [1, T, H, D], k and v [1, T, K, D], sink [H]."""
    ratio, length = q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = q[0].transpose(0, 1), *(x[0].transpose(0, 1).repeat_interleave(ratio, 0) for x in (k, v))
    back = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    hidden = (back < 0) | (back >= (window or length))
    logits = (q @ k.transpose(1, 2) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    logits = torch.cat([logits, sink[:, None, None].expand(-1, length, 1)], -1)
    wide = torch.promote_types(q.dtype, torch.float32)
    return (logits.softmax(-1, dtype=wide).to(q.dtype)[..., :-1] @ v).transpose(0, 1)[None]


def attention(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """Every backend that runs here, on grouped heads of 64 with sinks, full and with a window."""
    call = Call(device, dtype, 64, 160, 160)
    inputs = _draw(device, q=(1, 160, 4, 64), k=(1, 160, 2, 64), v=(1, 160, 2, 64), sink=(4,))
    found = []
    for backend in get_args(Resolved):
        name = f"attention: {backend}"
        reason = None if backend == "eager" else why_not(backend, call)
        if reason is not None:
            found.append(Finding(name, "missing", reason))
            continue
        wrong = None
        for window in (None,) if backend == "cudnn" else (None, 32):

            def run(q: Any, k: Any, v: Any, sink: Any, backend: Any = backend, window: Any = window) -> Any:
                return sink_attention(q, k, v, sink, window=window, backend=backend)

            wrong = wrong or compare(run, functools.partial(_plain_attention, window=window), inputs, dtype)
        found.append(_checked(name, wrong, dtype))
    return found


_ENDS = (32, 32, 96)  # where the rows of each of three experts end
_EXPERTS_BY = {
    "grouped_mm": "torch's grouped GEMM",
    "triton": "our Triton grouped GEMM",
    "reference": "a loop over experts",
}


def _by_expert(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x times the matrix of its expert, one expert after the other."""
    starts = (0, *_ENDS)
    return torch.cat([x[start:end] @ w[e] for e, (start, end) in enumerate(zip(starts, _ENDS, strict=False))])


def _check_gemm(name: str, kind: Literal["grouped_mm", "triton"], device: torch.device, dtype: torch.dtype) -> Finding:
    ends_E = torch.tensor(_ENDS, dtype=torch.int32, device=device)
    inputs = _draw(device, x=(96, 64), w=(3, 64, 64))
    return _checked(name, compare(lambda x, w: GEMMS[kind].product(x, w, ends_E), _by_expert, inputs, dtype), dtype)


def grouped_gemm(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """``torch._grouped_mm``, which the experts' speed comes from, and who serves where it does not run."""
    if not supports_grouped_mm(device, dtype):
        serves = _EXPERTS_BY[resolve_implementation("auto", device, dtype)[0]]
        gain = f"torch's grouped GEMM for experts; {serves} serves instead"
        return [Finding("grouped GEMM", "missing", f"{dtype} on {device.type}".replace("torch.", ""), gain)]
    return [_check_gemm("grouped GEMM", "grouped_mm", device, dtype)]


def kernels(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """The Triton kernels of norm, gate, rotary embedding and grouped GEMM, and MXFP4 decoding."""
    reason = why_no_triton(device, dtype)
    if reason is not None:
        return [Finding("Triton kernels", "missing", reason, "faster layers; plain PyTorch serves instead")]
    angles = _draw(device, angles=(1, 40, 64))["angles"].float()

    def turned(q: torch.Tensor, k: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.cat(rope(q, k, angles.cos(), angles.sin(), **options), 1)

    found = []
    ops: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
        "norm": (functools.partial(rms_norm, eps=1e-6), {"x": (64, 256), "weight_N": (256,)}),
        "gate": (gated, {"gate": (64, 256), "up": (64, 256)}),
        "rope": (turned, {"q": (1, 4, 40, 64), "k": (1, 2, 40, 64)}),
    }
    for name, (op, shapes) in ops.items():
        wrong = compare(functools.partial(op, implementation="triton"), op, _draw(device, **shapes), dtype)
        found.append(_checked(f"kernels: {name}", wrong, dtype))
    found.append(_check_gemm("kernels: grouped GEMM", "triton", device, dtype))
    blocks, scales = encode(_draw(torch.device("cpu"), w=(2, 64, 128))["w"].float())
    dense = PackedWeight(blocks.to(device), scales.to(device)).dense(dtype).transpose(-1, -2)
    equal = torch.equal(dense.cpu(), decode(blocks, scales, dtype))
    found.append(
        Finding("kernels: MXFP4", "ok", "decodes bit for bit")
        if equal
        else Finding("kernels: MXFP4", "broken", "decodes to other numbers than the reference", "wrong weights")
    )
    return found


def ops(device: torch.device, dtype: torch.dtype) -> list[Finding]:
    """What is made of kernels, as ``apply`` runs it here: a layer of experts, LoRA on a linear layer, the loss."""
    return [_check_experts(device, dtype), _check_lora(device, dtype), _check_loss(device, dtype)]


def _check_experts(device: torch.device, dtype: torch.dtype) -> Finding:
    """Six experts with LoRA, two for each of 96 tokens and one without any."""
    serves, _ = resolve_implementation("auto", device, dtype)
    index_NK = torch.stack([torch.arange(96) % 5, (torch.arange(96) + 2) % 5], 1).to(device)

    def layer(x: Any, weight: Any, gate_up: Any, down: Any, a1: Any, b1: Any, a2: Any, b2: Any, kind: Any) -> Any:
        one, two = [ExpertLora(a1, b1, 0.02)], [ExpertLora(a2, b2, 0.1)]
        given = (x, gate_up, None, down, None, index_NK, weight)
        return experts(*given, implementation=kind, gate_up_lora=one, down_lora=two)

    inputs = _draw(device, x=(96, 64), weight=(96, 2), gate_up=(6, 64, 64), down=(6, 32, 64))
    inputs |= _draw(device, a1=(6, 8, 64), b1=(6, 8, 64), a2=(6, 8, 32), b2=(6, 8, 64))
    inputs["gate_up"] *= 0.1  # with LoRA's scale no gate is near the activation's limit, where gradients turn
    run = functools.partial(layer, kind=serves)
    finding = _checked("experts", compare(run, functools.partial(layer, kind="reference"), inputs, dtype), dtype)
    return replace(finding, detail=f"{_EXPERTS_BY[serves]}: {finding.detail}")


def _check_lora(device: torch.device, dtype: torch.dtype) -> Finding:
    frozen_OI = _draw(device, w=(96, 64))["w"].to(dtype)

    def fused(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        term = LoraTerm(a, b, 0.5)
        return lora_linears(x, [LoraProjection(lambda dtype: frozen_OI.to(dtype), 96, None, [term])])[0]

    def plain(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return x @ frozen_OI.to(x.dtype).T + 0.5 * (x @ a.T @ b.T)

    return _checked("LoRA linear", compare(fused, plain, _draw(device, x=(80, 64), a=(8, 64), b=(96, 8)), dtype), dtype)


def _check_loss(device: torch.device, dtype: torch.dtype) -> Finding:
    """A vocabulary that is no multiple of anything, and a label that does not count."""
    labels_N = torch.arange(80, device=device) * 12
    labels_N[7] = -100

    def plain(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        logits_NV = hidden @ head.T
        return F.cross_entropy(logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32)), labels_N)

    def chunked(hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, head, labels_N)

    return _checked("loss", compare(chunked, plain, _draw(device, hidden=(80, 64), head=(1003, 64)), dtype), dtype)


def four_bits(device: torch.device) -> list[Finding]:
    """bitsandbytes quantises and decodes here."""
    if _installed("bitsandbytes") is None:
        return []  # said among the packages
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = _draw(device, w=(128, 256))["w"].float()
    packed, state = quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    error = float((dequantize_4bit(packed, state) - weight).norm() / weight.norm())
    if not error < 0.15:  # NF4 of normal numbers rounds by 9 %
        return [Finding("bitsandbytes: NF4", "broken", f"decoded weights are {error:.0%} off", "4-bit bases")]
    return [Finding("bitsandbytes: NF4", "ok", f"rounds normal weights by {error:.1%} on {device.type}")]


def host_memory(device: torch.device) -> list[Finding]:
    """What is free, and whether it can be page-locked."""
    import psutil

    memory = psutil.virtual_memory()
    detail = f"{memory.available / GIB:.1f} of {memory.total / GIB:.1f} GiB free"
    found = [Finding("host memory", "ok", detail)]
    if device.type != "cuda":
        return found
    piece = torch.empty(_PIN_BYTES, dtype=torch.uint8)
    engine = engine_for(device)
    started = time.perf_counter()
    pinned = engine.pin(piece)
    seconds = time.perf_counter() - started
    if not pinned:
        gain = "offloading without waiting; pageable memory is used instead (containers: raise the memlock limit)"
        return [*found, Finding("page-locked memory", "broken", f"{_PIN_BYTES >> 20} MiB were refused", gain)]
    engine.unpin(piece)
    return [*found, Finding("page-locked memory", "ok", f"{_PIN_BYTES / GIB / seconds:.1f} GiB a second")]


def link(device: torch.device) -> list[Finding]:
    """Bandwidth between host and device, by the engine that offloading uses."""
    if device.type != "cuda":
        return []
    host, there = torch.zeros(_PIN_BYTES, dtype=torch.uint8), torch.zeros(_PIN_BYTES, dtype=torch.uint8, device=device)
    engine = engine_for(device)
    pinned = engine.pin(host)
    try:
        speeds = []
        for _ in range(3):
            before = engine.copy_ms()[0]
            engine.block(engine.to_host(there, host, None))
            out_ms = engine.copy_ms()[0] - before
            engine.block(engine.to_device(host, None)[1])
            in_ms = engine.copy_ms()[0] - before - out_ms
            speeds.append((_PIN_BYTES / out_ms / 1e6, _PIN_BYTES / in_ms / 1e6))
    finally:
        if pinned:
            engine.unpin(host)
    out, back = (max(each) for each in zip(*speeds, strict=True))
    detail = f"{out:.1f} GB/s to the host, {back:.1f} GB/s back"
    if min(out, back) < _SLOW_LINK:
        gain = f"below {_SLOW_LINK} GB/s offloading may cost time: memory_policy='on_device'"
        return [Finding("PCIe", "ok", detail, gain)]
    return [Finding("PCIe", "ok", detail)]


def disk(folder: Path) -> Finding:
    """Space for checkpoints and merged models."""
    free = shutil.disk_usage(folder).free / 1e9
    gain = "" if free >= _LITTLE_DISK else "a merged model of 7 B parameters takes 15 GB"
    return Finding("disk", "ok", f"{free:.0f} GB free at {folder}", gain)
