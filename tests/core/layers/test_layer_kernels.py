"""Norms, rotary embedding and gated activations: the kernels against eager and float64.

In triton's interpreter on the CPU, and on CUDA. The interpreter is chosen by the environment when triton is imported,
so there this file runs itself in a process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tolerances import assert_no_worse_than_eager  # noqa: E402

from unsloth_plugins.core.errors import ShapeError  # noqa: E402
from unsloth_plugins.core.layers import gated, rms_norm, rope  # noqa: E402
from unsloth_plugins.core.layers.op import gated_backward  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [pytest.param("cpu", marks=needs_interpreter), pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]
DTYPES = [torch.float32, torch.float16]  # the interpreter can't compute in bf16
if not INTERPRETED:
    DTYPES.append(torch.bfloat16)
Op = Callable[..., tuple[torch.Tensor, ...]]


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout and "no tests ran" not in done.stdout, done.stdout[-3000:]


def compare(op: Op, inputs: dict[str, torch.Tensor], dtype: torch.dtype, device: str, trained: set[str]) -> None:
    """Outputs and gradients of ``op(implementation, **inputs)``: the kernel's error against eager's."""
    results: dict[str, dict[str, torch.Tensor]] = {}
    runs = (("truth", "reference", torch.float64), ("eager", "reference", dtype), ("ours", "triton", dtype))
    for name, implementation, kind in runs:
        where = device if name == "ours" else "cpu"
        leaves = {
            key: x.to(dtype).to(where, kind, copy=True).requires_grad_(key in trained) for key, x in inputs.items()
        }
        outputs = op(implementation, **leaves)
        draw = torch.Generator().manual_seed(5)
        weights = [torch.randn(x.shape, generator=draw).to(dtype).to(where, x.dtype) for x in outputs]
        wanted = [leaves[key] for key in sorted(trained)]
        grads = torch.autograd.grad(outputs, wanted, weights) if wanted else ()
        results[name] = {f"output {n}": x.detach() for n, x in enumerate(outputs)}
        results[name] |= {f"gradient of {key}": g for key, g in zip(sorted(trained), grads, strict=True)}
    for key, got in results["ours"].items():
        assert got.dtype == results["eager"][key].dtype, key
        assert_no_worse_than_eager(key, got, results["eager"][key], results["truth"][key], dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", ["cast_first", "cast_last", "one_plus"])
@pytest.mark.parametrize("shape", [(1, 3), (2, 3, 129), (130, 16)])  # of one column the gradient of x is only rounding
def test_rms_norm(device: str, dtype: torch.dtype, rule: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(1)
    inputs = {"x": torch.randn(shape, generator=draw) * 3, "weight": torch.randn(shape[-1], generator=draw)}
    for trained in ({"x", "weight"}, {"x"}, {"weight"}):

        def op(implementation: str, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return (rms_norm(x, weight, eps=1e-5, rule=rule, implementation=implementation),)  # type: ignore[arg-type]

        compare(op, inputs, dtype, device, trained)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("used", [(0, 1), (0,), (1,)])
def test_rms_norm_of_a_sum(device: str, dtype: torch.dtype, used: tuple[int, ...]) -> None:
    """With the sum used, the norm used, or both."""
    draw = torch.Generator().manual_seed(2)
    inputs = {name: torch.randn(5, 40, generator=draw) for name in ("x", "residual")}
    inputs["weight"] = torch.randn(40, generator=draw)

    def op(implementation: str, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor):  # type: ignore[no-untyped-def]
        both = rms_norm(x, weight, eps=1e-5, residual=residual, implementation=implementation)  # type: ignore[arg-type]
        return tuple(both[n] for n in used)

    compare(op, inputs, dtype, device, {"x", "residual", "weight"} if 0 in used else {"x", "residual"})


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_of_float32_weights_and_rows_with_a_stride(device: str) -> None:
    x = torch.randn(6, 2, 32, device=device).half()[:, 0]
    weight = torch.randn(32, device=device)
    assert not x.is_contiguous()
    want = rms_norm(x, weight, eps=1e-5)
    got = rms_norm(x, weight, eps=1e-5, implementation="triton")
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_the_weight_gradient_is_the_same_every_time(device: str) -> None:
    x = torch.randn(1000, 24, device=device)
    weight = torch.randn(24, device=device, requires_grad=True)
    one, two = (
        torch.autograd.grad(rms_norm(x, weight, eps=1e-6, implementation="triton").sum(), weight)[0] for _ in range(2)
    )
    assert torch.equal(one, two)


def angles(batch: int, tokens: int, size: int, *, whole: bool) -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.rand(batch, tokens, size // 2, generator=torch.Generator().manual_seed(3)) * 7
    if whole:
        angle = torch.cat((angle, angle), -1)
    return 1.3 * angle.cos(), 1.3 * angle.sin()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("size, rotated, whole", [(16, 16, False), (24, 24, True), (20, 10, True)])
@pytest.mark.parametrize("heads", [(6, 2)])
def test_rope(device: str, dtype: torch.dtype, in_place: bool, size: int, rotated: int, whole: bool, heads) -> None:  # type: ignore[no-untyped-def]
    draw = torch.Generator().manual_seed(4)
    # projections as models have them: tokens before heads
    inputs = {name: torch.randn(2, 3, n, size, generator=draw) for name, n in zip("qk", heads, strict=True)}
    cos, sin = angles(2, 3, rotated, whole=whole)
    for rows, trained in ((2, "qk"), (1, "q"), (1, "k")):

        def op(implementation: str, q: torch.Tensor, k: torch.Tensor, rows: int = rows) -> tuple[torch.Tensor, ...]:
            q, k = ((1 * x).transpose(1, 2) for x in (q, k))
            both = (x[:rows].to(dtype).to(q.device, q.dtype) for x in (cos, sin))
            return rope(q, k, *both, per_pair=not whole, in_place=in_place, implementation=implementation)  # type: ignore[arg-type]

        def one(
            implementation: str, trained: str = trained, op: Op = op, **x: torch.Tensor
        ) -> tuple[torch.Tensor, ...]:
            out = dict(zip("qk", op(implementation, **x), strict=True))
            return tuple(out[name] for name in trained)

        compare(one, inputs, dtype, device, set(trained))


@pytest.mark.parametrize("device", DEVICES)
def test_rope_in_place_overwrites_and_autograd_notices_who_needed_it(device: str) -> None:
    cos, sin = (x.to(device) for x in angles(1, 5, 16, whole=True))
    leaf = torch.randn(1, 2, 5, 16, device=device, requires_grad=True)
    q, k = leaf * 1, leaf * 1
    other = (q * q).sum()  # needs q as it was
    new_q, _ = rope(q, k, cos, sin, in_place=True, implementation="triton")
    assert new_q.data_ptr() == q.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (other + new_q.sum()).backward()
    before = leaf.detach().clone()
    rope(leaf, leaf, cos, sin, in_place=True, implementation="triton")
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("device", DEVICES)
def test_rope_of_half_precision_with_float32_angles_is_float32(device: str) -> None:
    cos, sin = (x.to(device) for x in angles(1, 5, 16, whole=True))
    q = torch.randn(1, 2, 5, 16, device=device).half()
    want, got = (rope(q, q, cos, sin, in_place=True, implementation=kind)[0] for kind in ("reference", "triton"))  # type: ignore[arg-type]
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5, 130)])
def test_gated(device: str, dtype: torch.dtype, activation: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(6)
    inputs = {name: torch.randn(shape, generator=draw) * 3 for name in ("gate", "up")}

    def apart(implementation: str, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (gated(gate, up, activation=activation, implementation=implementation),)  # type: ignore[arg-type]

    def together(implementation: str, both: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (gated(both, activation=activation, implementation=implementation),)  # type: ignore[arg-type]

    for trained in ({"gate", "up"}, {"gate"}, {"up"}):
        compare(apart, inputs, dtype, device, trained)
    compare(together, {"both": torch.cat((inputs["gate"], inputs["up"]), -1)}, dtype, device, {"both"})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("together", [False, True])
def test_backward_gives_the_output_again(device: str, together: bool, overwrite: bool) -> None:
    gate, up, d_out = (torch.randn(5, 130, device=device) for _ in range(3))
    given = [torch.cat((gate, up), -1)] if together else [gate, up]
    want = gated_backward(d_out, *given, activation="gelu_tanh")
    copies = [each.clone() for each in given]
    out, grads = gated_backward(d_out, *copies, activation="gelu_tanh", overwrite=overwrite, implementation="triton")
    torch.testing.assert_close((out, grads), want)
    same = [torch.equal(a, b) for a, b in zip(copies, given, strict=True)]
    assert same == [not overwrite] * len(given)
    torch.testing.assert_close(out, gated(gate, up, activation="gelu_tanh"))


@pytest.mark.parametrize("device", DEVICES)
def test_outputs_may_be_changed_in_place(device: str) -> None:
    """As models do: Mixtral multiplies jitter into what its norm gave."""
    x, weight = torch.randn(2, 3, 16, device=device, requires_grad=True), torch.ones(16, device=device)
    q, k = (torch.randn(1, 2, 3, 16, device=device, requires_grad=True) for _ in range(2))
    angles = torch.randn(1, 3, 16, device=device)
    outputs = [rms_norm(x, weight, eps=1e-6, implementation="triton")]
    outputs += rms_norm(x, weight, eps=1e-6, residual=x, implementation="triton")[:1]
    outputs += rope(q, k, angles.cos(), angles.sin(), implementation="triton")
    for y, leaf in zip(outputs, (x, x, q, k), strict=True):
        (once,) = torch.autograd.grad(y.sin().sum(), leaf, retain_graph=True)
        before = y.detach().clone()
        y *= 2
        (twice,) = torch.autograd.grad((y / 2).sin().sum(), leaf, retain_graph=True)
        torch.testing.assert_close(twice, once)
        assert torch.equal(y, 2 * before)


@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_a_norm_are_added_in_place(device: str) -> None:
    """That of a residual behind it, as of a model's last layer: a view of other memory would need a third tensor."""
    places, views = [], []

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, factor):  # type: ignore[no-untyped-def]
            ctx.factor = factor
            return x * factor

        @staticmethod
        def backward(ctx, grad):  # type: ignore[no-untyped-def]
            views.append(grad._base is not None)
            places.append(grad.data_ptr())
            return grad * ctx.factor, None

    hidden = Scaled.apply(torch.randn(2, 3, 64, device=device, requires_grad=True), 3.0)
    out = rms_norm(hidden + Scaled.apply(hidden, 3.0), torch.ones(64, device=device), eps=1e-6, implementation="triton")
    out.square().sum().backward()
    assert views == [False, False]
    assert places[0] == places[1] or device == "cpu"  # the interpreter holds what its kernels were given


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_in_nothing_out(device: str) -> None:
    empty = torch.empty(0, 16, device=device, requires_grad=True)
    rms_norm(empty, torch.ones(16, device=device), eps=1e-5, implementation="triton").sum().backward()
    gated(empty, empty, implementation="triton").sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 16)


def test_what_does_not_fit_is_named() -> None:
    x = torch.zeros(2, 8)
    with pytest.raises(ShapeError, match=r"expected weight \[8\]; got \[4\]"):
        rms_norm(x, torch.ones(4), eps=1e-5)
    with pytest.raises(ShapeError, match="gate and up of one shape"):
        gated(x, x[:1])
    with pytest.raises(ShapeError, match="even size"):
        gated(x[:, :7])
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ShapeError, match="R <= D"):
        rope(q, q, torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
