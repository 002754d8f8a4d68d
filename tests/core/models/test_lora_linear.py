"""LoRA on linear layers: our function against PEFT's own forward, on real bases and real models."""

from __future__ import annotations

import copy
from typing import Any

import bitsandbytes
import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.functional import linear

import unsloth_plugins
from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.layers import lora_linear, tiled_mlp
from unsloth_plugins.core.layers.dropout import draw_seeds, dropped
from unsloth_plugins.core.layers.lora_linear import LoraProjection, LoraTerm, lora_linears
from unsloth_plugins.core.models import lora as binding

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ATTENTION = ALL[:4]
OFF: dict[str, Any] = dict(attention=None, experts=None, layers=None, loss=None)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]


def quantised(model: nn.Module, device: str, **options: Any) -> nn.Module:
    """Every linear layer but the head in 4 bits."""
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            twin = bitsandbytes.nn.Linear4bit(
                module.in_features, module.out_features, module.bias is not None, torch.float32, **options
            )
            twin.load_state_dict(module.state_dict())
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, twin)
    model.is_loaded_in_4bit = True  # PEFT asks
    return model.to(device)


def adapted(model: nn.Module, **options: Any) -> Any:
    torch.manual_seed(3)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ALL, "init_lora_weights": False} | options
    return get_peft_model(model, LoraConfig(**options))


def calls_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of projections of the calls of our function."""
    calls: list[int] = []
    real = binding.lora_linears
    monkeypatch.setattr(binding, "lora_linears", lambda x, p: (calls.append(len(p)), real(x, p))[1])
    return calls


def same(stock: Any, ours: Any, rtol: float = 1e-5, **batch: Any) -> None:
    for train in (True, False):
        want, got = (loss_and_grads(model, train=train, **batch) for model in (stock, ours))
        torch.testing.assert_close(got, want, rtol=rtol, atol=1e-5)


def test_against_autograd_in_float64() -> None:
    """Two projections, with two adapters and one, with and without a bias; every combination of gradients."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    x, bias = random(2, 5, 6), random(7)
    bases = [random(7, 6), random(3, 6)]
    factors = [random(2, 6), random(7, 2), random(4, 6), random(7, 4), random(1, 6), random(3, 1)]
    inputs = [x, bias, *factors]
    for frozen in (*range(len(inputs)), None):
        x, bias, a1, b1, a2, b2, a3, b3 = (
            each.clone().requires_grad_(number != frozen) for number, each in enumerate(inputs)
        )
        wanted = [each for each in (x, bias, a1, b1, a2, b2, a3, b3) if each.requires_grad]
        want = (
            linear(x, bases[0], bias) + 0.5 * x @ a1.T @ b1.T - 2 * x @ a2.T @ b2.T,
            linear(x, bases[1]) + 3 * x @ a3.T @ b3.T,
        )
        first = LoraProjection(lambda _: bases[0], 7, bias, [LoraTerm(a1, b1, 0.5), LoraTerm(a2, b2, -2.0)])
        got = lora_linears(x, [first, LoraProjection(lambda _: bases[1], 3, None, [LoraTerm(a3, b3, 3.0)])])
        torch.testing.assert_close(got, want)
        for used in ((0, 1), (0,), (1,)):
            mine, theirs = (
                torch.autograd.grad(
                    sum(y[n].square().sum() for n in used), wanted, retain_graph=True, materialize_grads=True
                )
                for y in (got, want)
            )
            torch.testing.assert_close(mine, theirs)
    with pytest.raises(ShapeError, match=r"expected A \[r, 6\] and B \[7, r\]; got \[2, 6\] and \[7, 4\]"):
        lora_linears(x, [LoraProjection(lambda _: bases[0], 7, None, [LoraTerm(a1, b2, 1.0)])])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"use_rslora": True}, {"r": 3}, {"target_modules": ["q_proj", "v_proj", "up_proj"]}]
)
def test_dense_bases(device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stock = adapted(tiny_llama(attention_bias=True).to(device), **options)
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, lora="fused", **OFF)
    calls = calls_of(monkeypatch)
    same(stock, ours, **{k: v.to(device) for k, v in batch_of(2, 9).items()})
    layer = [3, 1, 2, 1] if "target_modules" not in options else [2, 1]
    assert calls == layer * 2 * 2  # layers, train and eval: q, k, v and gate, up were one call each


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{"quant_type": "nf4"}, {"quant_type": "fp4"}, {"quant_type": "nf4", "compress_statistics": False}]
)
def test_four_bit_bases(device: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stock = adapted(quantised(tiny_llama(), device, **options))
    for module in stock.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
    ours = copy.deepcopy(stock)
    applied = unsloth_plugins.apply(ours, lora="fused", **OFF)
    assert "14 linear layers, 4 groups" in applied.report()
    calls = calls_of(monkeypatch)
    same(stock, ours, rtol=1e-4, **{k: v.to(device) for k, v in batch_of(2, 9).items()})
    assert calls == [3, 1, 2, 1] * 4


def test_attention_of_gpt_oss_with_biases(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = adapted(tiny_gpt_oss(), target_modules=ATTENTION, bias="all")
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, lora="fused", **OFF)
    calls = calls_of(monkeypatch)
    _, _, grads = loss_and_grads(ours, **batch_of(2, 9))
    assert any(name.endswith("q_proj.base_layer.bias") for name in grads)
    same(stock, ours, **batch_of(2, 9))
    assert calls[:2] == [3, 1]


def test_several_adapters_and_switching(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = adapted(tiny_llama())
    stock.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, lora="fused", **OFF)
    batch = batch_of(2, 9)
    calls = calls_of(monkeypatch)
    for names in (["default", "second"], ["second"], ["default"]):
        for model in (stock, ours):
            model.base_model.set_adapter(names)
        same(stock, ours, **batch)
    assert calls
    with stock.disable_adapter(), ours.disable_adapter():
        assert torch.equal(stock(**batch).logits + 0, ours(**batch).logits + 0)
    for model in (stock, ours):
        model.merge_adapter()
    torch.testing.assert_close(ours(**batch).logits + 0, stock(**batch).logits + 0)


def test_what_stays_pefts_and_is_in_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    ours = adapted(tiny_llama(), target_modules=ATTENTION)
    for layer in ours.base_model.model.model.layers:
        layer.self_attn.q_proj.lora_dropout["default"] = nn.AlphaDropout(0.5)
    assert "2 stay PEFT's: another dropout than torch's" in unsloth_plugins.apply(ours, lora="fused", **OFF).report()
    ours.train()(**batch_of(1, 5))
    assert calls == [2, 1] * 2
    dora = adapted(tiny_llama(), use_dora=True)
    assert "14 stay PEFT's: a variant of LoRA" in unsloth_plugins.apply(dora, lora="fused", **OFF).report()
    before = len(calls)
    same(copy.deepcopy(dora), dora, **batch_of(1, 5))
    assert len(calls) == before


class SameMasks(nn.Dropout):
    """PEFT's dropout with the masks that ours had, in the order of the layers' calls."""

    def __init__(self, p: float, seeds: list[int]) -> None:
        super().__init__(p)
        self.seeds = seeds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return dropped(x.flatten(0, 1), self.p, self.seeds.pop(0)).view_as(x) if self.training else x


def masks_of(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that ours draws."""
    seeds: list[int] = []
    real = lora_linear.draw_seeds
    monkeypatch.setattr(lora_linear, "draw_seeds", lambda count: (seeds.extend(drawn := real(count)), drawn)[1])
    return seeds


@pytest.mark.parametrize("layers", [None, "reference"], ids=["layers", "MLP in tiles"])
@pytest.mark.parametrize("several", [False, True])
def test_dropout_is_pefts_with_the_same_masks(several: bool, layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, training and evaluating; one stretch of tokens, since each has a mask of its own."""
    ours = adapted(tiny_llama(), lora_dropout=0.3).double()
    if several:
        options = dict(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.5)
        ours.add_adapter("second", LoraConfig(**options))
        ours.double().base_model.set_adapter(["default", "second"])
    stock = copy.deepcopy(ours)
    seeds = masks_of(monkeypatch)
    calls = calls_of(monkeypatch)
    report = unsloth_plugins.apply(ours, lora="fused", **(OFF | {"layers": layers})).report()
    assert "14 linear layers, 4 groups" in report and "stay PEFT's" not in report
    got = loss_and_grads(ours, **batch_of(2, 9))
    assert calls == ([3, 1, 2, 1] if layers is None else [3, 1]) * 2 and len(seeds) == (18 if several else 14)
    for module in stock.modules():
        if isinstance(module, nn.ModuleDict):
            for name, each in module.items():
                if type(each) is nn.Dropout:
                    module[name] = SameMasks(each.p, seeds)
    unsloth_plugins.apply(stock, lora=None, **(OFF | {"layers": layers}))  # stock's norms are float32 whatever comes
    want = loss_and_grads(stock, **batch_of(2, 9))
    assert not seeds
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)
    got, want = (loss_and_grads(model, train=False, **batch_of(2, 9)) for model in (ours, stock))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layers", [None, "reference"], ids=["layers", "MLP in tiles"])
def test_dropout_under_checkpoints_is_that_without_them(
    layers: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where tokens come in several stretches and tiles, the last one short."""
    monkeypatch.setattr(lora_linear, "ROWS", 3)
    monkeypatch.setattr(tiled_mlp, "TILE", 4)
    results = []
    for checkpointed in (False, True):
        ours = adapted(tiny_llama().to(device), lora_dropout=0.3)
        if checkpointed:
            ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        unsloth_plugins.apply(ours, lora="fused", **(OFF | {"layers": layers}))
        torch.manual_seed(7)
        results.append(loss_and_grads(ours, **{k: v.to(device) for k, v in batch_of(2, 9).items()}))
    torch.testing.assert_close(*results, rtol=0, atol=0 if device == "cpu" else 1e-6)
    plain = loss_and_grads(adapted(tiny_llama().to(device)), **{k: v.to(device) for k, v in batch_of(2, 9).items()})
    assert not torch.equal(results[0][1], plain[1])


def test_gradients_of_dropout_in_several_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    """By finite differences: the masks of forward and backward are the same ones."""
    monkeypatch.setattr(lora_linear, "ROWS", 2)
    monkeypatch.setattr(lora_linear, "draw_seeds", lambda count: [3, 400, 5000][:count])
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(s, generator=draw, dtype=torch.float64) for s in ((5, 6), (2, 6), (7, 2), (3, 6), (7, 3))]
    base = torch.randn(7, 6, generator=draw, dtype=torch.float64)

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        terms = [LoraTerm(a, b, 0.5, 0.4), LoraTerm(c, d, 2.0)]
        both = [LoraProjection(lambda _: base, 7, None, terms), LoraProjection(lambda _: base, 7, None, terms[:1])]
        return sum(lora_linears(x, both))  # type: ignore[return-value]

    assert torch.autograd.gradcheck(run, [each.requires_grad_() for each in inputs], check_undefined_grad=False)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dropout_on_cuda_is_no_further_from_the_truth_than_autograd(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several stretches, the last one short."""
    monkeypatch.setattr(lora_linear, "ROWS", 128)
    (seed,) = draw_seeds(1)
    monkeypatch.setattr(lora_linear, "draw_seeds", lambda count: [seed] * count)
    draw = torch.Generator().manual_seed(0)
    sizes = ((300, 256), (16, 256), (192, 16), (192, 256))
    given = [(torch.randn(s, generator=draw) / s[1] ** 0.5).to("cuda", dtype) for s in sizes]
    ones = torch.ones(300, 256, device="cuda")
    mask = torch.cat([dropped(ones[n : n + 128], 0.3, seed, first=n) for n in (0, 128, 256)])
    results = []
    for kind in (torch.float64, dtype, "ours"):
        x, a, b, base = (each.to(dtype if kind == "ours" else kind) for each in given)
        leaves = [each.requires_grad_() for each in (x, a, b)]
        if kind == "ours":
            term = LoraTerm(a, b, 2.0, 0.3)
            (y,) = lora_linears(x, [LoraProjection(lambda _, base=base: base, 192, None, [term])])
        else:
            y = x @ base.T + 2 * (x * mask.to(kind)) @ a.T @ b.T
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), leaves)])
    for truth, eager, got in zip(*results, strict=True):
        room = (eager.double() - truth).norm()
        assert (got.double() - truth).norm() <= 1.25 * room + 1e-2 * truth.norm()


def test_dropout_keeps_nothing_more_and_without_it_nothing_is_drawn() -> None:
    sizes = []
    for p in (0.0, 0.3):
        ours = adapted(tiny_llama(), lora_dropout=p)
        unsloth_plugins.apply(ours, lora="fused", **(OFF | {"layers": "reference"}))
        kept: dict[int, int] = {}
        alive: list[torch.Tensor] = []

        def pack(t: torch.Tensor, kept: dict[int, int] = kept, alive: list[torch.Tensor] = alive) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            alive.append(t)
            return t

        before = torch.get_rng_state()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            ours.train()(**batch_of(2, 9))
        assert torch.equal(torch.get_rng_state(), before) == (p == 0)
        sizes.append(sum(kept.values()))
    assert sizes[0] == sizes[1]


def test_eight_bit_bases_stay_pefts_and_the_report_says_why() -> None:
    """On CUDA bitsandbytes' product is not that with the decoded weight, so ours would be another model."""
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.up_proj = bitsandbytes.nn.Linear8bitLt(64, 96, bias=False, has_fp16_weights=False).to("cpu")
    model.is_loaded_in_8bit = True  # PEFT asks
    ours = adapted(model, target_modules=["up_proj", "down_proj"])
    stock = copy.deepcopy(ours)
    report = unsloth_plugins.apply(ours, lora="fused", **(OFF | {"layers": "reference"})).report()
    assert "2 stay PEFT's: an 8-bit base, which rounds its inputs to 8 bits too" in report
    same(stock, ours, **batch_of(1, 5))


def test_adapters_that_come_after_apply_and_undo() -> None:
    base = tiny_llama()
    applied = unsloth_plugins.apply(base, lora="fused", **OFF)
    assert "no adapter on a linear layer so far" in applied.report()
    ours = adapted(base)
    stock = adapted(tiny_llama())
    same(stock, ours, **batch_of(2, 9))
    assert "14 linear layers" in applied.report()
    applied.undo()
    assert not any("_unsloth_lora" in vars(module) or "forward" in vars(module) for module in ours.modules())
    want, got = (loss_and_grads(model, **batch_of(2, 9)) for model in (stock, ours))
    assert torch.equal(want[1], got[1]) and all(torch.equal(want[2][key], got[2][key]) for key in want[2])


def test_auto_leaves_the_cpu_to_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(monkeypatch)
    ours = adapted(tiny_llama())
    unsloth_plugins.apply(ours)
    ours(**batch_of(1, 5))
    assert calls == []


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_under_autocast_dtypes_are_pefts(kind: torch.dtype) -> None:
    stock = adapted(tiny_llama())
    ours = copy.deepcopy(stock)
    unsloth_plugins.apply(ours, lora="fused", **OFF)
    seen: dict[str, list[torch.dtype]] = {"stock": [], "ours": []}
    for name, model in (("stock", stock), ("ours", ours)):
        layer = model.base_model.model.model.layers[0]
        for module in (layer.self_attn.q_proj, layer.mlp.down_proj):
            module.register_forward_hook(lambda m, i, y, name=name: seen[name].append(y.dtype))
        with torch.autocast("cpu", dtype=kind):
            model(**batch_of(2, 9)).loss.backward()
    assert seen["ours"] == seen["stock"] == [kind] * 2
    for (name, want), got in zip(stock.named_parameters(), ours.parameters(), strict=True):
        if want.grad is not None:
            assert got.grad is not None and got.grad.dtype == want.grad.dtype
            assert (got.grad - want.grad).norm() <= 0.05 * want.grad.norm() + 1e-6, name


def test_checkpointing_and_a_failed_forward_leave_nothing_behind() -> None:
    stock = adapted(tiny_llama())
    ours = copy.deepcopy(stock)
    for model in (stock, ours):
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    unsloth_plugins.apply(ours, lora="fused", **OFF)
    layer = ours.base_model.model.model.layers[0].self_attn
    hook = layer.k_proj.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(ValueError("stop")))
    with pytest.raises(ValueError, match="stop"):
        ours(**batch_of(2, 9))
    hook.remove()
    same(stock, ours, **batch_of(2, 9))
    group = vars(layer.q_proj)["_unsloth_lora"].group
    assert group.source is None and not group.waiting


@pytest.mark.parametrize("evaluated_before", [False, True])
def test_four_bit_weights_are_not_repacked_for_inference(evaluated_before: bool) -> None:
    """Evaluate, then train: gradients are those of a model that was never evaluated.

    What was repacked before ``apply`` has lost its scales' lower bits to bfloat16 and comes back near.
    """
    sizes = dict(hidden_size=64, intermediate_size=128)  # rows of whole blocks: others it can't repack
    stock, ours = (adapted(quantised(tiny_llama(**sizes), "cpu", quant_type="nf4")) for _ in range(2))
    for model in (stock, ours):
        for module in model.modules():
            if isinstance(module, bitsandbytes.nn.Linear4bit):
                module.support_avx512bf16_for_cpu = model is ours  # as on a CPU that has it
    with torch.no_grad():
        if evaluated_before:
            ours.eval()(**batch_of(2, 9))
        applied = unsloth_plugins.apply(ours, **OFF)
        ours.eval()(**batch_of(2, 9))
    assert "may not repack 14 layers" in applied.report()
    assert ("14 had been" in applied.report()) == evaluated_before
    if evaluated_before:
        want, got = (loss_and_grads(model, **batch_of(2, 9))[2] for model in (stock, ours))
        for name in want:
            assert (got[name] - want[name]).norm() <= 0.03 * want[name].norm(), name
    else:
        same(stock, ours, **batch_of(2, 9))
    applied.undo()
    assert all(m.support_avx512bf16_for_cpu for m in ours.modules() if isinstance(m, bitsandbytes.nn.Linear4bit))
