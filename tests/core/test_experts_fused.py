"""The experts in tiles against the loop over experts: in triton's interpreter on the CPU, and on CUDA.

The interpreter is chosen by the environment when triton is imported, so there this file runs itself in a process.
"""

from __future__ import annotations

import functools
import gc
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from tolerances import SLACK
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.experts import ExpertLora, fused
from unsloth_plugins.core.experts.few import experts_few
from unsloth_plugins.core.experts.gemm import GEMMS, TritonGemm
from unsloth_plugins.core.experts.grouped import experts_grouped
from unsloth_plugins.core.experts.projection import DecodedExperts, Projection
from unsloth_plugins.core.experts.reference import experts_loop
from unsloth_plugins.core.layers import GPT_OSS, Swiglu
from unsloth_plugins.core.layers.normed import note_normed
from unsloth_plugins.core.layers.reference import rms_norm
from unsloth_plugins.core.mxfp4 import PackedWeight, decode, encode
from unsloth_plugins.core.mxfp4.weight import HostWeight
from unsloth_plugins.core.offload.weights import StreamedPiece, WeightStream

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = [
    pytest.param("cpu", marks=needs_interpreter),
    pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda]),
]
OPTIONS = dict(activation=GPT_OSS)


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "34 passed" in done.stdout, done.stdout[-3000:]


def _case(device: str, dtype: torch.dtype, tokens: int, rank: int = 8):  # type: ignore[no-untyped-def]
    """Packed weights, biases, routing with one expert without tokens, and leaves: x, routing weights, A and B twice."""
    torch.manual_seed(0)
    experts, hidden, size = 5, 64, 32
    gate_up, down = torch.randn(experts, 2 * size, hidden), torch.randn(experts, hidden, size)
    packed = [PackedWeight(*(part.to(device) for part in encode(w))) for w in (gate_up, down)]
    biases = [torch.randn(experts, 2 * size) * 6, torch.randn(experts, hidden)]
    index = torch.rand(tokens, experts).topk(2, 1).indices
    index[index == 4] = 0
    leaves = [
        torch.randn(tokens, hidden),
        torch.rand(tokens, 2).softmax(-1),
        torch.randn(experts, rank, hidden) * 0.3,
        torch.randn(rank, experts, 2 * size).transpose(0, 1) * 0.3,
        torch.randn(experts, rank, size) * 0.3,
        torch.randn(experts, rank, hidden) * 0.3,
    ]
    kinds = [dtype, torch.float32, *[torch.float32] * 4]
    leaves = [leaf.to(device, kind) for leaf, kind in zip(leaves, kinds, strict=True)]
    return packed, [b.to(device, dtype) for b in biases], index.to(device), leaves


def _run(kind, case, which=(True, True), dtype=None):  # type: ignore[no-untyped-def]
    """Output and the gradient of every leaf that takes part."""
    weights, biases, index, leaves = case
    if dtype is not None:
        leaves = [leaf.to(dtype) for leaf in leaves]
        biases = [bias if bias is None else bias.to(dtype) for bias in biases]
        weights = [w.to(dtype) if isinstance(w, torch.Tensor) else w.dense(dtype) for w in weights]
    x, weight, a1, b1, a2, b2 = leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    loras = [(ExpertLora(a1, b1, 0.5),) if which[0] else (), (ExpertLora(a2, b2, 0.25),) if which[1] else ()]
    y = kind(
        x,
        weights[0],
        biases[0],
        weights[1],
        biases[1],
        index,
        weight,
        gate_up_lora=loras[0],
        down_lora=loras[1],
        **OPTIONS,
    )
    used = [x, weight, *([a1, b1] if which[0] else []), *([a2, b2] if which[1] else [])]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, used, dy)]


def _compare(case, which=(True, True), **options) -> None:  # type: ignore[no-untyped-def]
    """Tiles and loop against the truth: an error at most twice the loop's, which in float16 rounds nothing."""
    slack = SLACK[torch.float16] / 2 if case[3][0].dtype == torch.float16 else 1e-6
    truth = _run(experts_loop, case, which, torch.float64)
    eager = _run(experts_loop, case, which)
    got = _run(functools.partial(fused.experts_fused, **options), case, which)
    assert len(got) == len(truth)
    for number, (want, loop, ours) in enumerate(zip(truth, eager, got, strict=True)):
        error, room = ((each.double() - want).norm() / want.norm() for each in (ours, loop))
        assert error <= 2 * room + slack, f"{number}: {error:.1e} against {room:.1e}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dense", "rank", "which"),
    [
        (False, 8, (True, True)),
        (False, 3, (True, True)),
        (False, 8, (False, True)),
        (True, 8, (True, True)),
        (True, 8, (True, False)),
        (True, 8, (False, False)),
    ],
)
def test_output_and_every_gradient(device: str, dense: bool, rank: int, which: tuple[bool, bool], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """On the CPU in float32 almost exactly; on CUDA in bf16 with at most twice the error of the loop over experts."""
    monkeypatch.setattr(fused, "TILE", 16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights, biases, index, leaves = _case(device, dtype, 37, rank)
    if dense:
        weights = [w.dense(dtype).contiguous() for w in weights]
    case = (weights, biases, index, leaves)
    _compare(case, which)


@pytest.mark.parametrize("device", DEVICES)
def test_several_adapters_are_one_of_the_sum_of_their_ranks(device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fused, "TILE", 16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights, biases, index, (x, weight, *adapters) = _case(device, dtype, 37, 8)
    results = []
    for kind, of in ((experts_loop, torch.float64), (experts_loop, dtype), (fused.experts_fused, dtype)):
        bases = [w.dense(of) for w in weights] if of == torch.float64 else weights
        leaves = [t.to(of if t is x or of == torch.float64 else t.dtype) for t in (x, weight, *adapters)]
        x_NH, weight_NK, a1, b1, a2, b2 = leaves = [t.detach().requires_grad_() for t in leaves]
        loras = [
            [ExpertLora(a, b, 0.5), ExpertLora(a[:, :3] ** 2, b[:, :3] ** 2, -1.5)] for a, b in ((a1, b1), (a2, b2))
        ]
        biases_of = [b.to(of) for b in biases]
        terms = dict(gate_up_lora=loras[0], down_lora=loras[1])
        y = kind(x_NH, bases[0], biases_of[0], bases[1], biases_of[1], index, weight_NK, **terms, **OPTIONS)
        dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
        results.append([y, *torch.autograd.grad(y, leaves, dy)])
    for number, (want, loop, ours) in enumerate(zip(*results, strict=True)):
        error, room = ((each.double() - want).norm() / want.norm() for each in (ours, loop))
        assert error <= 2 * room + 1e-6, f"{number}: {error:.1e} against {room:.1e}"


def _with_base(kind, case, trained, dtype=None):  # type: ignore[no-untyped-def]
    """Output and the gradients of x, of the routing weights and of what is trained of the base."""
    base, index, (x, weight) = case
    leaves = [x, weight, *base] if dtype is None else [leaf.to(dtype) for leaf in (x, weight, *base)]
    x, weight, *base = (leaf.detach() for leaf in leaves)
    used = [x, weight, *(part for part, wanted in zip(base, trained, strict=True) if wanted)]
    for leaf in used:
        leaf.requires_grad_()
    w1, b1, w2, b2 = base
    y = kind(x, w1.transpose(1, 2), b1, w2, b2, index, weight, **OPTIONS)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, used, dy)]


@pytest.mark.parametrize(
    ("device", "gemm"), [pytest.param(*d.values, g, marks=d.marks) for d in DEVICES for g in GEMMS]
)
@pytest.mark.parametrize("trained", [(True,) * 4, (False, True, True, False)])
def test_gradients_of_the_base(device: str, gemm: str, trained: tuple[bool, ...], monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """One weight is stored by outputs, the other by inputs; one expert has no tokens."""
    monkeypatch.setattr(fused, "TILE", 16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    packed, biases, index, (x, weight, *_) = _case(device, dtype, 37)
    w1, w2 = (w.dense(dtype) for w in packed)
    case = ([w1.transpose(1, 2), biases[0], w2.contiguous(), biases[1]], index, (x, weight))
    truth, eager = _with_base(experts_loop, case, trained, torch.float64), _with_base(experts_loop, case, trained)
    got = _with_base(functools.partial(fused.experts_fused, gemm=GEMMS[gemm]), case, trained)
    for number, (want, loop, ours) in enumerate(zip(truth, eager, got, strict=True)):
        assert ours.dtype == loop.dtype and ours.shape == loop.shape
        error, room = ((each.double() - want).norm() / want.norm() for each in (ours, loop))
        assert error <= 2 * room + 1e-6, f"{number}: {error:.1e} against {room:.1e}"


@pytest.mark.parametrize("device", DEVICES)
def test_float32_weights_and_float16_tokens_as_under_autocast(device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The weights' gradients are float32 sums, never rounded to 16 bits; one is stored by outputs."""
    monkeypatch.setattr(fused, "TILE", 16)
    packed, biases, index, (x, weight, *_) = _case(device, torch.float32, 37)
    w1, w2 = (w.dense(torch.float32) for w in packed)
    case = ([w1.transpose(1, 2), biases[0], w2.contiguous(), biases[1]], index, (x.half(), weight))
    truth = _with_base(experts_loop, case, (True,) * 4, torch.float64)
    got = _with_base(functools.partial(fused.experts_fused, gemm=GEMMS["triton"]), case, (True,) * 4)
    assert [each.dtype for each in got] == [torch.float16, torch.float16, *[torch.float32] * 5]
    for number, (want, ours) in enumerate(zip(truth, got, strict=True)):
        assert (ours.double() - want).norm() <= SLACK[torch.float16] * want.norm(), number


@pytest.mark.parametrize("device", DEVICES)
def test_the_base_alone_can_be_trained(device: str) -> None:
    """Nothing that comes from before needs a gradient."""
    packed, biases, index, (x, weight, *_) = _case(device, torch.float32, 9)
    w1, w2 = packed[0].dense(torch.float32).contiguous().requires_grad_(), packed[1]
    gradients = []
    for kind in (experts_loop, fused.experts_fused):
        y = kind(x, w1, biases[0], w2, biases[1], index, weight, **OPTIONS)
        gradients.append(torch.autograd.grad(y.square().sum(), w1)[0])
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        pytest.param(*device.values, kind, marks=device.marks)
        for device in DEVICES
        for kind in ("float16", "bfloat16", "float32")
        if (*device.values, kind) != ("cpu", "bfloat16")  # triton's interpreter has none
    ],
)
def test_with_our_own_gemm(device: str, kind: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fused, "TILE", 16)
    _compare(_case(device, getattr(torch, kind), 37, rank=3), gemm=GEMMS["triton"])


@pytest.mark.parametrize("device", DEVICES)
def test_case_1_single_experts_pass_the_range_of_float16_and_their_sum_does_not(device: str) -> None:
    """Two experts whose outputs cancel: 90,000 and -90,000, weighted a half each, and what is left of them."""
    packed, _, index, (x, weight, *_) = _case(device, torch.float16, 9)
    base = [w.dense(torch.float16) for w in packed]
    index[:] = torch.tensor([0, 1], device=index.device)
    weight[:] = 0.5
    base[0][1], base[1][1] = base[0][0], -base[1][0]
    y = experts_loop(x, base[0], None, base[1], None, index[:, :1], weight[:, :1].clone().fill_(1), **OPTIONS)
    factor = 9e4 / y.float().abs().max()
    base[1] *= factor
    base[1][1] *= 0.9
    single = experts_loop(
        x.float(), base[0].float(), None, base[1].float(), None, index[:, :1], weight[:, :1] * 2, **OPTIONS
    )
    assert single.abs().max() > 65_504
    biases = [torch.zeros(5, each.shape[-1], device=x.device, dtype=x.dtype) for each in base]
    case = ([base[0].transpose(1, 2), biases[0], base[1], biases[1]], index, (x, weight))
    want = _with_base(experts_loop, case, (False,) * 4, torch.float64)
    got = _with_base(functools.partial(fused.experts_fused, gemm=GEMMS["triton"]), case, (False,) * 4)
    for ours, truth in zip(got, want, strict=True):
        assert (ours.double() - truth).norm() <= 5e-3 * truth.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_cases_9_and_36_every_path_agrees_to_1e4_past_and_at_the_clamps(device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Float32, packed and decoded, with gradients and without. Two tokens lie exactly at the clamps, which let their
    gradients pass: x is zero there, and the bias is the limit."""
    monkeypatch.setattr(fused, "TILE", 16)
    packed, biases, index, leaves = _case(device, torch.float32, 37)
    biases[0].mul_(2)
    biases[0][0, :8] = torch.tensor([7.0, 7.0, 7.0, -7.0, 1.0, 7.0, 1.0, -7.0], device=device)
    leaves[0][:2], index[:2] = 0, torch.tensor([0, 1], device=device)
    gate_up = torch.einsum("nh,ehj->nej", leaves[0], packed[0].dense(torch.float32)) + biases[0]
    for side in (gate_up[..., ::2], gate_up[..., 1::2]):
        assert (side > 7).any() and (side < -7).any() and (side == 7).any()
    before = [each.clone() for weight in packed for each in (weight.blocks_EORB, weight.scales_EOR)]
    truth = _run(experts_loop, (packed, biases, index, leaves), dtype=torch.float64)
    dense = [weight.dense(torch.float32) for weight in packed]
    tiled = functools.partial(fused.experts_fused, gemm=GEMMS["triton"])
    grouped = functools.partial(experts_grouped, gemm=GEMMS["triton"])

    def close(got: torch.Tensor, want: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4 * want.abs().max().item())

    x, weight_NK, a1, b1, a2, b2 = leaves
    loras = dict(gate_up_lora=(ExpertLora(a1, b1, 0.5),), down_lora=(ExpertLora(a2, b2, 0.25),))
    for weights in (packed, dense):
        for kind in (tiled, grouped):
            for got, want in zip(_run(kind, (weights, biases, index, leaves)), truth, strict=True):
                close(got, want)
        for kind in (tiled, experts_few):
            with torch.no_grad():
                y = kind(x, weights[0], biases[0], weights[1], biases[1], index, weight_NK, **loras, **OPTIONS)
            close(y, truth[0])
    after = [each for weight in packed for each in (weight.blocks_EORB, weight.scales_EOR)]
    assert all(map(torch.equal, before, after))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lora", [True, False])
def test_plain_swiglu_without_biases_on_weights_stored_by_outputs(device: str, lora: bool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(OPTIONS, "activation", Swiglu())
    monkeypatch.setattr(fused, "TILE", 16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    packed, _, index, leaves = _case(device, dtype, 37)
    weights = [w.dense(dtype) for w in packed]
    assert all(w.stride(1) == 1 for w in weights)
    _compare((weights, (None, None), index, leaves), (lora, lora))


@pytest.mark.parametrize("device", DEVICES)
def test_holding_the_first_projection_changes_no_bit_and_lasts_for_two_backwards(device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fused, "TILE", 16)
    case = _case(device, torch.float32 if device == "cpu" else torch.bfloat16, 37)
    products = []
    product = Projection.__call__
    monkeypatch.setattr(Projection, "__call__", lambda self, *a: products.append(1) or product(self, *a))
    plain = _run(fused.experts_fused, case)
    plain_count = len(products)
    held = _run(functools.partial(fused.experts_fused, hold=True), case)
    assert plain_count == 9 and len(products) - plain_count == 6  # three tiles: one product less in backward
    assert all(map(torch.equal, plain, held))
    packed, biases, index, (x, weight, *_) = case
    x = x.detach().requires_grad_()
    y = fused.experts_fused(x, packed[0], biases[0], packed[1], biases[1], index, weight, hold=True, **OPTIONS)
    once, twice = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(once, twice)


def _streamed(stream: WeightStream, number: int, weight: PackedWeight) -> HostWeight:
    parts = [nn.Parameter(each, requires_grad=False) for each in (weight.blocks_EORB, weight.scales_EOR)]
    return HostWeight(*parts, StreamedPiece(stream, number, tuple(parts), weight.device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "path"), [("packed", "tiles"), ("streamed", "tiles"), ("dense", "tiles"), ("packed", "unfused")]
)
def test_experts_by_groups_change_no_bit(device: str, kind: str, path: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Never more decoded at once than the limit: two experts of the first projection, three of the second."""
    monkeypatch.setattr(fused, "TILE", 16)
    packed, biases, index, leaves = _case(device, torch.float16, 20, rank=3)
    weights = [w.dense(torch.float16).contiguous() for w in packed] if kind == "dense" else packed
    case = (weights, biases, index, leaves)
    reads = []
    if kind == "streamed":
        stream = WeightStream(everywhere=True)
        read = stream.read
        monkeypatch.setattr(stream, "read", lambda key, *rest: reads.append(key) or read(key, *rest))
        weights = [_streamed(stream, number, w) for number, w in enumerate(packed)]
    case = (weights, biases, index, leaves)
    run = functools.partial(experts_grouped if path == "unfused" else fused.experts_fused, gemm=GEMMS["triton"])
    want = _run(run, case)
    sizes: list[int] = []
    product = TritonGemm.product_of_group
    monkeypatch.setattr(
        TritonGemm, "product_of_group", lambda self, x, w, *more: sizes.append(len(w)) or product(self, x, w, *more)
    )
    limit = 2 * (64 + 8) * 64 * 2
    reads.clear()
    got = _run(functools.partial(run, weights_limit=limit), case)
    assert all(map(torch.equal, want, got))
    assert set(sizes) == {1, 2, 3}
    assert reads == ([0, 1, 0, 1] if kind == "streamed" else [])  # once a pass, not once a tile or group


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_stay_decoded_change_no_bit(device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(fused, "TILE", 16)
    packed, biases, index, leaves = case = _case(device, torch.float16, 17)
    decodes = []
    into = PackedWeight.decode_into
    monkeypatch.setattr(PackedWeight, "decode_into", lambda self, *where: decodes.append(1) or into(self, *where))
    experts = DecodedExperts(0, 2)
    experts.keep(1)
    assert [layer.wanted for layer in experts.layers] == [False, True]
    place = experts.layers[1]
    plain = functools.partial(fused.experts_fused, gemm=GEMMS["triton"])
    staying = functools.partial(plain, decoded=place)

    def same() -> int:
        """Number of weights decoded in two steps, whose results are those of a run that keeps nothing."""
        want = _run(plain, case)
        before = len(decodes)
        assert all(all(map(torch.equal, want, _run(staying, case))) for _ in range(2))
        return len(decodes) - before

    assert same() == 2 and experts.held_bytes == experts.layer_bytes == place.held_bytes > 0
    for leaf in leaves[2:]:
        leaf.data.mul_(1.5)  # as optimizers do, past the version counter
    assert same() == 0
    packed[0].scales_EOR.sub_(1)  # halves the weights
    assert same() == 2

    def forward(factor: float):  # type: ignore[no-untyped-def]
        x, weight, a1, b1, a2, b2 = (leaf.detach().clone().requires_grad_() for leaf in leaves)
        loras = (ExpertLora(a1, b1, factor),), (ExpertLora(a2, b2, factor),)
        kinds = {"gate_up_lora": loras[0], "down_lora": loras[1], **OPTIONS}
        y = staying(x, packed[0], biases[0], packed[1], biases[1], index, weight, **kinds)
        return lambda: torch.autograd.grad(y.float().sum(), [x, a1, b1, a2, b2])

    alone = forward(0.5)()
    between = forward(0.5)
    forward(2.0)
    assert all(map(torch.equal, alone, between()))  # another adapter was written in between
    experts.keep(0)
    assert experts.held_bytes == 0 and same() == 8


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [True, False])
def test_normalised_tokens_are_not_saved(device: str, frozen: bool, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """The norm's input, which it saves anyway, stands in for them, unless the norm is trained."""
    monkeypatch.setattr(fused, "TILE", 16)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = _case(device, dtype, 36)
    weight_H = torch.rand(64, device=device, dtype=dtype).requires_grad_(not frozen)
    rule = functools.partial(rms_norm, eps=1e-6, rule="cast_first")
    saved: dict[int, int] = {}

    def region(x, *rest, noted: bool, **options):  # type: ignore[no-untyped-def]
        hidden = x.view(2, 18, 64)
        y = rule(hidden, weight_H)
        if noted:
            note_normed(y, hidden, weight_H, rule)
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            return fused.experts_fused(y.view(-1, 64), *rest, **options)

    def pack(each: torch.Tensor) -> torch.Tensor:
        saved[each.untyped_storage().data_ptr()] = each.untyped_storage().nbytes()
        return each

    want = _run(functools.partial(region, noted=False), case)
    before, places = sum(saved.values()), set(saved)
    got = _run(functools.partial(region, noted=True), case)
    x_place = case[3][0].untyped_storage().data_ptr()
    assert x_place not in places and sum(saved.values()) == before + frozen * weight_H.untyped_storage().nbytes()
    assert (x_place in saved) == frozen
    for number, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        assert (ours - theirs).norm() <= (1e-6 if device == "cpu" else 1e-2) * theirs.norm(), number


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limit", [None, 20_000])
def test_without_gradients_a_few_tokens_decode_only_their_experts(device: str, limit, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Expert 4 has no rows: its weights stay what the memory held, and the numbers are those of all decoded."""
    packed, biases, index, (x, weight, a1, b1, a2, b2) = _case(device, torch.float16, 6)
    loras = dict(gate_up_lora=(ExpertLora(a1, b1, 0.5),), down_lora=(ExpertLora(a2, b2, 0.25),))
    masks = []
    decode_into = PackedWeight.decode_into

    def noted(self, out, used=None):  # type: ignore[no-untyped-def]
        masks.append(used)
        return decode_into(self, out.fill_(float("nan")), used)

    monkeypatch.setattr(PackedWeight, "decode_into", noted)

    def run(x, index, weight):  # type: ignore[no-untyped-def]
        masks.clear()
        arguments = (packed[0], biases[0], packed[1], biases[1], index, weight)
        with torch.no_grad():
            return fused.experts_fused(x, *arguments, gemm=GEMMS["triton"], weights_limit=limit, **loras, **OPTIONS)

    few = run(x, index, weight)
    used = torch.cat(masks).view(2, 5).tolist()  # the groups of each projection in turn
    assert used == [[True] * 4 + [False]] * 2
    many = run(x.repeat(4, 1), index.repeat(4, 1), weight.repeat(4, 1))
    assert all(mask is None for mask in masks)
    assert few.isfinite().all() and torch.equal(few, many[:6])


@pytest.mark.parametrize("device", DEVICES)
def test_the_kernel_decodes_the_experts_that_are_used(device: str) -> None:
    """Programs lie across the border between experts; what is not used is not written, what is, bit by bit."""
    from unsloth_plugins.core.mxfp4.kernel import decode_triton

    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (5, 300, 2, 16), dtype=torch.uint8).to(device)
    scales = torch.randint(100, 140, (5, 300, 2), dtype=torch.uint8).to(device)
    used = torch.tensor([True, False, True, True, False], device=device)
    out = torch.full((5, 300, 72), 7.0, device=device)
    decode_triton(blocks, scales, out[..., :64], used)
    want = decode(blocks, scales, torch.float32)
    assert torch.equal(out[used][..., :64], want[used])
    assert (out[~used] == 7).all() and (out[..., 64:] == 7).all()


@pytest.mark.parametrize("device", DEVICES)
def test_one_token_and_no_clamp(device: str, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setitem(OPTIONS, "activation", replace(GPT_OSS, limit=None))
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = _case(device, dtype, 1)
    _compare(case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_that_ends_here_runs_the_experts_twice_not_three_times(device, early_stop, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    """Forward once, and in backward by themselves; the checkpoint's recompute stops at the door unless told not to."""
    from torch.utils.checkpoint import set_checkpoint_early_stop

    case = _case(device, torch.float32 if device == "cpu" else torch.bfloat16, 20)
    runs = []
    forward = fused._forward
    monkeypatch.setattr(fused, "_forward", lambda *a: runs.append(1) or forward(*a))

    def region(x, *rest, **options):  # type: ignore[no-untyped-def]
        return x + fused.experts_fused(x.tanh(), *rest, **options)

    def checkpointed(*args, **options):  # type: ignore[no-untyped-def]
        with set_checkpoint_early_stop(early_stop):
            return checkpoint(region, *args, use_reentrant=False, **options)

    want = _run(region, case)
    runs.clear()
    got = _run(checkpointed, case)
    assert len(runs) == (1 if early_stop else 2)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_case_47_nothing_is_left_behind(device: str) -> None:
    """A checkpoint whose last op is this one: no tensor more after 20 steps than after 3."""
    case = _case(device, torch.float32 if device == "cpu" else torch.bfloat16, 8)

    def checkpointed(*args, **options):  # type: ignore[no-untyped-def]
        return checkpoint(fused.experts_fused, *args, use_reentrant=False, **options)

    counts = []
    gc.collect()
    gc.disable()  # a cycle would be hidden by the collector
    try:
        for _ in range(20):
            _run(checkpointed, case)
            counts.append(sum(isinstance(each, torch.Tensor) for each in gc.get_objects()))
    finally:
        gc.enable()
    assert counts[-1] <= counts[3], counts


@pytest.mark.gpu
@on_cuda
def test_only_the_input_is_kept_and_tiles_bound_the_rest() -> None:
    """At twice the length, the memory alive after forward and the peak of backward grow by the input's size alone."""
    experts, hidden, size, rank = 8, 1024, 1024, 16
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [
        PackedWeight(
            torch.randint(0, 256, (experts, out, hidden // 32, 16), dtype=torch.uint8, device="cuda", generator=draw),
            torch.full((experts, out, hidden // 32), 120, dtype=torch.uint8, device="cuda"),
        )
        for out in (2 * size, hidden)
    ]
    biases = [torch.randn(experts, out, device="cuda").bfloat16() for out in (2 * size, hidden)]
    shapes = [(experts, rank, hidden), (experts, rank, 2 * size), (experts, rank, size), (experts, rank, hidden)]
    a1, b1, a2, b2 = (torch.randn(s, device="cuda", requires_grad=True) for s in shapes)
    alive, peaks = [], []
    for tokens in (16384, 32768):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        index = torch.rand(tokens, experts, device="cuda").topk(4, 1).indices
        weight = torch.rand(tokens, 4, device="cuda").softmax(-1).requires_grad_()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = fused.experts_fused(
            x,
            weights[0],
            biases[0],
            weights[1],
            biases[1],
            index,
            weight,
            gate_up_lora=(ExpertLora(a1, b1, 1.0),),
            down_lora=(ExpertLora(a2, b2, 1.0),),
            **OPTIONS,
        )
        alive.append(torch.cuda.memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
        torch.autograd.grad(y, (x, weight, a1, b1, a2, b2), torch.ones_like(y))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del y
    token = hidden * 2
    assert alive[0] <= 1.1 * 16384 * token  # the output; x itself was there before
    assert peaks[1] - peaks[0] <= 16384 * (3 * token + 200)  # output, its gradient, dx, and the routing


@pytest.mark.gpu
@on_cuda
def test_more_than_two_to_the_31_elements() -> None:
    """Kernels that see all tokens or rows at once: what they give here is what they give a stretch at a time."""
    if torch.cuda.mem_get_info()[0] < 30 * 2**30:
        pytest.skip("needs 30 GiB of device memory")
    from unsloth_plugins.core import layers
    from unsloth_plugins.core.experts import kernels

    tokens, hidden, step = 750_000, 2880, 50_000
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16, generator=draw)
    assert x.numel() >= 2**31
    stretches = [slice(start, start + step) for start in range(0, tokens, step)]

    order = torch.cat([torch.randperm(tokens, device="cuda", generator=draw) for _ in range(2)])
    rows = torch.empty(2 * tokens, hidden, device="cuda", dtype=torch.bfloat16)
    kernels.gather_rows(x, order, rows)
    assert all(torch.equal(rows[part], x[order[part]]) for part in stretches)
    assert torch.equal(rows[-step:], x[order[-step:]])
    place = torch.stack([order[:tokens].argsort(), order[tokens:].argsort() + tokens], 1)
    weight = torch.tensor([0.25, 0.75], device="cuda").repeat(tokens, 1)
    out = torch.empty_like(x)
    kernels.combine(rows, place, out, weight_NK=weight)
    assert torch.equal(out, x)  # a quarter and three quarters of 8 bits are exact in float32
    del rows, out

    scale = torch.rand(hidden, device="cuda", generator=draw).bfloat16()

    def norm(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        y = layers.rms_norm(x, scale, eps=1e-5, implementation="triton")
        return y.detach(), torch.autograd.grad(y, x, dy)[0]

    y, dx = norm(x, x.flip(1))
    for part in stretches:
        want_y, want_dx = norm(x[part], x[part].flip(1))
        assert torch.equal(y[part], want_y) and torch.equal(dx[part], want_dx)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("skew", [False, True])
def test_true_width_agrees_with_the_unfused_path(skew: bool) -> None:
    experts, hidden, rank, tokens = 32, 2880, 32, 9000
    draw = torch.Generator("cuda").manual_seed(0)
    weights = [
        PackedWeight(
            torch.randint(0, 256, (experts, out, hidden // 32, 16), dtype=torch.uint8, device="cuda", generator=draw),
            torch.full((experts, out, hidden // 32), 120, dtype=torch.uint8, device="cuda"),
        )
        for out in (2 * hidden, hidden)
    ]
    biases = [torch.randn(experts, out, device="cuda").bfloat16() for out in (2 * hidden, hidden)]
    score = torch.rand(tokens, experts, device="cuda") + (torch.linspace(2, 0, experts, device="cuda") if skew else 0)
    shapes = [(experts, rank, hidden), (experts, rank, 2 * hidden), (experts, rank, hidden), (experts, rank, hidden)]
    leaves = [
        torch.randn(tokens, hidden, device="cuda").bfloat16(),
        torch.rand(tokens, 4, device="cuda").softmax(-1),
        *(torch.randn(s, device="cuda") * 0.02 for s in shapes),
    ]
    case = (weights, biases, score.topk(4, 1).indices, leaves)
    for name, want, got in zip(
        ("y", "dx", "dw", "da1", "db1", "da2", "db2"),
        _run(experts_grouped, case),
        _run(fused.experts_fused, case),
        strict=True,
    ):
        assert (got.float() - want.float()).norm() <= 0.02 * want.float().norm(), name
