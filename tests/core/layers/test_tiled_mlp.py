"""The MLP in tiles against autograd, and what a layer keeps while it is trained with it."""

from __future__ import annotations

import copy
import gc
from typing import Any

import bitsandbytes
import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gemma, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import unsloth_plugins
from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.layers import normed, reference, tiled_mlp
from unsloth_plugins.core.layers.lora_linear import LoraProjection, LoraTerm
from unsloth_plugins.core.offload import offload_checkpoint

MLP = ["gate_proj", "up_proj", "down_proj"]
OFF: dict[str, Any] = dict(attention=None, loss=None, layers="reference", lora="fused")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, the last one short."""
    monkeypatch.setattr(tiled_mlp, "TILE", 4)


def tensors(
    fused: bool, ranks: tuple[int, ...], bias: bool, dtype: torch.dtype, device: str, size: int = 6, inner: int = 8
) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(device, dtype)

    shapes = {"first": (2 * inner, size)} if fused else {"gate": (inner, size), "up": (inner, size)}
    out: dict[str, Any] = {"x": random(2, 5, size), "norm": random(size)}
    for name, (outputs, inputs) in {**shapes, "down": (size, inner)}.items():
        out[f"{name}.weight"] = random(outputs, inputs)
        if bias:
            out[f"{name}.bias"] = random(outputs)
        for number, rank in enumerate(ranks):
            out[f"{name}.{number}.a"], out[f"{name}.{number}.b"] = random(rank, inputs), random(outputs, rank)
    return out


def by_autograd(x: torch.Tensor, given: dict[str, Any], fused: bool, activation: Any) -> torch.Tensor:
    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.linear(x, given[f"{name}.weight"], given.get(f"{name}.bias"))
        for number in range(2):
            if f"{name}.{number}.a" in given:
                y = y + (number + 0.5) * x @ given[f"{name}.{number}.a"].T @ given[f"{name}.{number}.b"].T
        return y

    gates = linear("first", x).chunk(2, -1) if fused else (linear("gate", x), linear("up", x))
    return linear("down", reference.gated(*gates, activation=activation))


def projection(name: str, given: dict[str, Any]) -> LoraProjection:
    weight = given[f"{name}.weight"]
    terms = [
        LoraTerm(given[f"{name}.{number}.a"], given[f"{name}.{number}.b"], number + 0.5)
        for number in range(2)
        if f"{name}.{number}.a" in given
    ]
    return LoraProjection(lambda dtype: weight.to(dtype), weight.shape[0], given.get(f"{name}.bias"), terms)


def ours(x: torch.Tensor, given: dict[str, Any], fused: bool, activation: Any, **options: Any) -> torch.Tensor:
    first = ["first"] if fused else ["gate", "up"]
    return tiled_mlp.tiled_mlp(
        x, [projection(name, given) for name in first], projection("down", given), activation=activation, **options
    )


@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("past_a_norm", [False, True])
@pytest.mark.parametrize(("fused", "ranks", "bias"), [(False, (2,), False), (True, (3, 2), True), (False, (), False)])
def test_against_autograd_in_float64(
    fused: bool, ranks: tuple[int, ...], bias: bool, past_a_norm: bool, hold: bool
) -> None:
    """Gradients of everything, and with each input frozen in turn."""
    given = tensors(fused, ranks, bias, torch.float64, "cpu")
    names = [name for name in given if not name.endswith("weight") and name != "norm"]
    for frozen in (*names, None):
        leaves = {n: t.clone().requires_grad_(n in names and n != frozen) for n, t in given.items()}
        wanted = [leaves[name] for name in names if name != frozen]
        results = []
        for run in (by_autograd, ours):
            x = leaves["x"]
            if past_a_norm:
                x = reference.rms_norm(x, leaves["norm"], eps=1e-6, rule="one_plus")
                if run is ours:
                    rule = lambda x, w: reference.rms_norm(x, w, eps=1e-6, rule="one_plus")  # noqa: E731
                    normed.note_normed(x, leaves["x"], leaves["norm"], rule)
            options = {"hold": hold} if run is ours else {}
            y = run(x, leaves, fused, "gelu_tanh", **options)
            if not wanted:
                assert not y.requires_grad
                continue
            results.append((y.detach(), torch.autograd.grad(y.square().sum(), wanted)))
        if wanted:
            torch.testing.assert_close(results[1], results[0])


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("hold", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_kernels_are_no_further_from_the_truth_than_autograd(fused: bool, hold: bool, activation: str) -> None:
    given = tensors(fused, (8,), True, torch.bfloat16, "cuda", 64, 96)
    given = {name: t / 8 if name.endswith(("weight", "a", "b")) else t for name, t in given.items()}
    results = []
    for dtype, run, options in (
        (torch.float64, by_autograd, {}),
        (torch.bfloat16, by_autograd, {}),
        (torch.bfloat16, ours, {"hold": hold, "implementation": "triton"}),
    ):
        leaves = {n: t.to(dtype).requires_grad_(not n.endswith("weight")) for n, t in given.items()}
        wanted = [t for n, t in leaves.items() if t.requires_grad and n != "norm"]
        y = run(leaves["x"], leaves, fused, activation, **options)  # type: ignore[operator]
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), wanted)])
    for truth, eager, got in zip(*results, strict=True):
        room = (eager.double() - truth).norm()
        assert (got.double() - truth).norm() <= 1.25 * room + 1e-2 * truth.norm()


def test_a_gradient_that_somebody_waits_for_still_goes_through_the_norm() -> None:
    given = tensors(False, (2,), False, torch.float64, "cpu")
    x = given["x"].clone().requires_grad_()
    y = reference.rms_norm(x, given["norm"], eps=1e-6, rule="one_plus")
    normed.note_normed(y, x, given["norm"], lambda *_: pytest.fail("went past the norm"))
    seen: list[torch.Tensor] = []
    y.register_hook(seen.append)
    ours(y, given, False, "silu").sum().backward()
    assert len(seen) == 1 and x.grad is not None


def test_a_changed_input_is_not_made_again() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.ones(4)
    hidden = x * 1
    y = hidden * weight
    normed.note_normed(y, hidden, weight, torch.mul)
    assert normed.normed_of(y) is not None
    hidden += 1
    assert normed.normed_of(y) is None


def test_a_note_keeps_nothing_alive() -> None:
    x, weight = torch.randn(3, 4, requires_grad=True), torch.ones(4)
    hidden = x * 1
    y = (hidden * weight).detach()
    normed.note_normed(y, hidden, weight, torch.mul)
    assert normed.normed_of(y) is not None
    del hidden
    assert normed.normed_of(y) is None


def test_projections_that_do_not_fit() -> None:
    given = tensors(False, (), False, torch.float64, "cpu")
    with pytest.raises(ShapeError, match=r"outputs \[8, 6\]"):
        tiled_mlp.tiled_mlp(
            given["x"], [projection("gate", given), projection("down", given)], projection("down", given),
            activation="silu",
        )  # fmt: skip


def adapted(model: nn.Module, targets: list[str], **options: Any) -> Any:
    torch.manual_seed(3)
    return get_peft_model(
        model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False, **options)
    )


def quantised(model: nn.Module, device: str) -> nn.Module:
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            twin = bitsandbytes.nn.Linear4bit(module.in_features, module.out_features, False, torch.float32)
            twin.load_state_dict(module.state_dict())
            twin.support_avx512bf16_for_cpu = False
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, twin)
    model.is_loaded_in_4bit = True  # PEFT asks
    return model.to(device)


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of the tiled MLP was to hold."""
    from unsloth_plugins.core.models import layers

    calls: list[bool] = []
    real = layers.tiled_mlp
    monkeypatch.setattr(layers, "tiled_mlp", lambda *a, **o: (calls.append(o["hold"]), real(*a, **o))[1])
    return calls


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("targets", [MLP, ["q_proj", "up_proj"], ["q_proj"]])
@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma, "in 4 bits"])
def test_models_give_stocks_numbers(
    build: Any, targets: list[str], checkpointed: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = quantised(tiny_llama(), device) if build == "in 4 bits" else build().to(device)
    stock = adapted(base, targets)
    ours = copy.deepcopy(stock)
    if checkpointed:
        for model in (stock, ours):
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    unsloth_plugins.apply(ours, **OFF)
    calls = calls_of(monkeypatch)
    batch = {key: value.to(device) for key, value in batch_of(2, 9).items()}
    want, got = (loss_and_grads(model, **batch) for model in (stock, ours))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert calls == [not checkpointed] * (4 if checkpointed else 2)


def test_what_needs_its_module_is_called_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    batch = batch_of(2, 9)
    hooked = adapted(tiny_llama(), MLP)
    seen: list[int] = []
    for layer in hooked.base_model.model.model.layers:
        layer.mlp.up_proj.register_forward_hook(lambda *_: seen.append(1))
    trained = tiny_llama()
    for model in (hooked, trained):
        unsloth_plugins.apply(model, **OFF)
        loss_and_grads(model, **batch)
    assert calls == [] and len(seen) == 2


def test_evaluation_goes_in_tiles_only_when_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    from unsloth_plugins.core.models import layers

    stock = adapted(tiny_llama(), MLP)
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, **OFF)
    calls = calls_of(monkeypatch)
    for tile, expected in ((100, 0), (4, 2)):
        monkeypatch.setattr(layers, "TILE", tile)
        with torch.no_grad():
            torch.testing.assert_close(ours(**batch_of(2, 9)).logits + 0, stock(**batch_of(2, 9)).logits)
        assert len(calls) == expected


class Kept:
    """Bytes of what autograd saves inside, every stretch of memory once; parameters do not count."""

    def __init__(self, model: nn.Module) -> None:
        self.known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.sizes: dict[int, int] = {}
        self.alive: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in self.known:
            self.sizes[where] = tensor.untyped_storage().nbytes()
            self.alive.append(tensor)
        return tensor

    def per_token(self, tokens: int) -> float:
        """In units of one float32."""
        return sum(self.sizes.values()) / 4 / tokens


@pytest.mark.parametrize("targets", [MLP, [*MLP, "q_proj", "k_proj", "v_proj", "o_proj"]])
def test_a_layer_keeps_a_bounded_number_of_hidden_states(targets: list[str]) -> None:
    """Of its MLP only the input, past the norm: no gate, up, product or normalised copy, whatever the inner size."""
    tokens = 64
    kept = []
    for inner in (96, 960):
        model = adapted(tiny_llama(num_hidden_layers=1, intermediate_size=inner), targets)
        unsloth_plugins.apply(model, **OFF)
        layer = model.base_model.model.model.layers[0]
        hidden = torch.randn(1, tokens, 64, requires_grad=True)
        angles = model.base_model.model.model.rotary_emb(hidden, torch.arange(tokens)[None])
        seen = Kept(model)

        def pack_in_region(layer: Any = layer, hidden: Any = hidden, angles: Any = angles, seen: Kept = seen) -> Any:
            from unsloth_plugins.core.offload.tail import holding

            with holding(False), torch.autograd.graph.saved_tensors_hooks(seen.pack, lambda each: each):
                return layer(hidden, position_embeddings=angles)

        pack_in_region()
        kept.append(seen.per_token(tokens))
    assert kept[0] == kept[1]


@pytest.mark.parametrize("early_stop", [True, False])
def test_the_recompute_stops_at_the_mlp(early_stop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted(tiny_llama(num_hidden_layers=1), MLP)
    unsloth_plugins.apply(model, **OFF)
    mlp = model.base_model.model.model.layers[0].mlp
    runs: list[int] = []
    real = tiled_mlp._forward
    monkeypatch.setattr(tiled_mlp, "_forward", lambda *a: (runs.append(1), real(*a))[1])
    x = torch.randn(1, 9, 64, requires_grad=True)
    want = torch.autograd.grad(mlp(x).sum(), [x, *[p for p in mlp.parameters() if p.requires_grad]])
    runs.clear()
    wanted = [x, *[p for p in mlp.parameters() if p.requires_grad]]
    got = torch.autograd.grad(offload_checkpoint(mlp, x, early_stop=early_stop).sum(), wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert len(runs) == (1 if early_stop else 2)


def test_the_next_layers_input_comes_when_the_mlp_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under ``min_memory``, and when the gradient that the MLP gave was added to the residual's and is freed."""
    stock = adapted(tiny_llama(num_hidden_layers=3), MLP)
    ours = copy.deepcopy(stock)
    for model in (stock, ours):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    applied = unsloth_plugins.apply(ours, **OFF, memory_policy="min_memory", offload_min_bytes=1)
    events: list[str] = []
    given: list[StorageWeakRef] = []

    def told() -> None:
        events.append("freed" if given and given.pop().expired() else "alive")

    real_backward, real_unpack = tiled_mlp._backward, applied.store.unpack

    def backward(*args: Any) -> Any:
        dx_NI, grads = real_backward(*args)
        assert dx_NI is not None
        given.append(StorageWeakRef(dx_NI.untyped_storage()))
        return dx_NI, grads

    monkeypatch.setattr(tiled_mlp, "_backward", backward)
    monkeypatch.setattr(applied.store, "unpack", lambda packed: (events.append("unpack"), real_unpack(packed))[1])
    monkeypatch.setattr(applied.store, "tail_is_over", told)
    want, got = (loss_and_grads(model, **batch_of(2, 9)) for model in (stock, ours))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert events == ["unpack", "freed"] * 3


@pytest.mark.parametrize("early_stop", [True, False])
def test_inside_somebody_elses_checkpoint_and_through_a_graph_that_is_kept(early_stop: bool) -> None:
    """torch's own checkpoint knows nothing of holding: what is held there is recomputed like anything else."""
    model = adapted(tiny_llama(num_hidden_layers=1), MLP)
    unsloth_plugins.apply(model, **OFF)
    mlp = model.base_model.model.model.layers[0].mlp
    x = torch.randn(1, 9, 64, requires_grad=True)
    wanted = [x, *[p for p in mlp.parameters() if p.requires_grad]]
    y = mlp(x).square().sum()
    want = torch.autograd.grad(y, wanted, retain_graph=True)
    again = torch.autograd.grad(y, wanted)
    y = checkpoint(mlp, x, use_reentrant=False, early_stop=early_stop).square().sum()
    got = torch.autograd.grad(y, wanted)
    for a, b, c in zip(want, again, got, strict=True):
        assert torch.equal(a, b) and torch.equal(a, c)


def test_case_47_nothing_piles_up() -> None:
    """A layer that ends in the tiled MLP, checkpointed: no tensor of a step outlives it, and no note of a norm."""
    model = adapted(tiny_llama(), MLP)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    unsloth_plugins.apply(model, **OFF)

    def alive() -> int:
        return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())

    counts = []
    for _ in range(6):
        loss_and_grads(model, **batch_of(2, 9))
        counts.append((alive(), len(normed._NOTES)))
    # no more: what other tests left may be collected meanwhile
    assert counts[-1][0] <= counts[2][0] and counts[-1][1] == 0
