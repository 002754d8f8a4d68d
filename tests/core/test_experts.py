"""Routing, clamped SwiGLU and the experts against transformers' own."""

from __future__ import annotations

import pytest
import torch
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts, GptOssTopKRouter

from unsloth_plugins.core.errors import ShapeError, UnsupportedError
from unsloth_plugins.core.experts import ExpertLora, experts, op, top_k_routing
from unsloth_plugins.core.experts.few import experts_few
from unsloth_plugins.core.experts.grouped import experts_grouped
from unsloth_plugins.core.experts.op import _WideProduct, resolve_implementation
from unsloth_plugins.core.layers import GPT_OSS
from unsloth_plugins.core.mxfp4 import PackedWeight, encode


def _stock(scale: float = 1.0) -> tuple[GptOssExperts, GptOssTopKRouter]:
    config = GptOssConfig(hidden_size=24, intermediate_size=40, num_local_experts=5, num_experts_per_tok=2)
    torch.manual_seed(0)
    layer, router = GptOssExperts(config), GptOssTopKRouter(config)
    for parameter in (*layer.parameters(), *router.parameters()):
        torch.nn.init.normal_(parameter, std=scale)
    return layer, router


def _ours(layer: GptOssExperts, router: GptOssTopKRouter, x: torch.Tensor, run=experts) -> torch.Tensor:  # type: ignore[no-untyped-def]
    _, weight, index = top_k_routing(x, router.weight, router.bias, router.top_k)
    return run(
        x,
        layer.gate_up_proj,
        layer.gate_up_proj_bias,
        layer.down_proj,
        layer.down_proj_bias,
        index,
        weight,
        activation=GPT_OSS,
    )


@pytest.mark.parametrize("run", [experts, experts_grouped])
@pytest.mark.parametrize("scale", [0.3, 2.0])  # the second pushes gate and up past 7 on both sides
def test_case_36_equals_stock_with_active_clamps(run, scale: float) -> None:  # type: ignore[no-untyped-def]
    layer, router = _stock(scale)
    x = torch.randn(33, 24, requires_grad=True)
    if scale > 1:
        gate_up = x @ layer.gate_up_proj[0]
        assert all((gate_up[:, side::2].abs() > 7).any() for side in (0, 1))
    leaves = [x, *layer.parameters(), *router.parameters()]
    _, weight, index = router(x)
    truth, got = GptOssExperts.forward(layer, x, index, weight), _ours(layer, router, x, run)
    torch.testing.assert_close(got, truth, rtol=1e-4, atol=1e-4)
    for want, ours in zip(
        torch.autograd.grad(truth.sum(), leaves), torch.autograd.grad(got.sum(), leaves), strict=True
    ):
        torch.testing.assert_close(ours, want, rtol=1e-4, atol=1e-3 if scale > 1 else 1e-4)


def test_gate_is_clamped_above_only_and_up_on_both_sides() -> None:
    gate_up = torch.tensor([[9.0, 0.5], [-9.0, 0.5], [1.0, 9.0], [1.0, -9.0]], requires_grad=True)
    GPT_OSS(gate_up).sum().backward()
    moved = gate_up.grad != 0
    assert moved.tolist() == [[False, True], [True, True], [True, False], [True, False]]


def test_bf16_within_eagers_own_error() -> None:
    layer, router = _stock()
    x = torch.randn(65, 24)
    truth = _ours(layer.double(), router.double(), x.double())
    layer, router, x = layer.bfloat16(), router.bfloat16(), x.bfloat16()
    _, weight, index = top_k_routing(x, router.weight, router.bias, router.top_k)
    eager = GptOssExperts.forward(layer, x, index, weight.bfloat16()).double()
    ours = _ours(layer, router, x).double()
    assert (ours - truth).norm() <= 1.05 * (eager - truth).norm()


def test_routing_is_float32_in_bf16() -> None:
    _, router = _stock()
    logits, weight, index = top_k_routing(torch.randn(9, 24).bfloat16(), router.weight.bfloat16(), None, 2)
    assert logits.dtype == weight.dtype == torch.float32 and index.dtype == torch.int64
    torch.testing.assert_close(weight.sum(-1), torch.ones(9))


def test_experts_without_tokens_and_one_token() -> None:
    layer, _ = _stock()
    weights = (layer.gate_up_proj, layer.gate_up_proj_bias, layer.down_proj, layer.down_proj_bias)
    x, index, weight = torch.randn(1, 24), torch.tensor([[3, 1]]), torch.tensor([[0.25, 0.75]])
    one, grouped = (
        experts(x, *weights, index, weight),
        experts_grouped(x, *weights, index, weight, activation=GPT_OSS),
    )
    torch.testing.assert_close(one, grouped)
    (grad,) = torch.autograd.grad(one.sum(), layer.gate_up_proj)
    assert [bool(g.any()) for g in grad] == [False, True, False, True, False]


@pytest.mark.parametrize("packed", [False, True])
def test_few_tokens_with_the_matrices_of_their_own_experts(packed: bool) -> None:
    torch.manual_seed(0)
    gate_up, down = torch.randn(5, 64, 64), torch.randn(5, 32, 64)
    weights = [PackedWeight(*encode(w.transpose(1, 2))) for w in (gate_up, down)] if packed else [gate_up, down]
    arguments = (weights[0], torch.randn(5, 64), weights[1], torch.randn(5, 64))
    index, weight = torch.tensor([[3, 1], [1, 0]]), torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    lora = (ExpertLora(torch.randn(5, 4, 64), torch.randn(5, 4, 64), 0.5),)
    down_lora = (ExpertLora(torch.randn(5, 4, 32), torch.randn(5, 4, 64), 2.0),)
    x = torch.randn(2, 64)
    options = dict(activation=GPT_OSS, gate_up_lora=lora, down_lora=down_lora)
    want = experts(x, *arguments, index, weight, **options)
    torch.testing.assert_close(experts_few(x, *arguments, index, weight, **options), want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("p", [0.0, 0.4])
def test_what_is_not_fused_goes_in_checkpointed_tiles(p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to the same stretches of tokens without checkpoints, masks too, and with less memory."""
    monkeypatch.setattr(op, "TILE", 8)
    torch.manual_seed(0)
    n_experts, hidden, size, tokens = 5, 16, 64, 29
    base = [torch.randn(s) for s in ((n_experts, hidden, 2 * size), (n_experts, 2 * size), (n_experts, size, hidden))]
    base.append(torch.randn(n_experts, hidden))
    shapes = ((tokens, hidden), (tokens, 2), (5, 8, hidden), (5, 8, 2 * size), (5, 8, size), (5, 8, hidden))
    leaves = [torch.randn(s).requires_grad_() for s in shapes]
    index = torch.randint(n_experts, (tokens, 2))
    x, weight, a1, b1, a2, b2 = leaves
    loras = dict(gate_up_lora=[ExpertLora(a1, b1, 0.5, p)], down_lora=[ExpertLora(a2, b2, 0.25, p)])

    def by_hand() -> torch.Tensor:
        rows = zip(*(t.split(8) for t in (x, index, weight)), strict=True)
        parts = [experts_grouped(x_, *base, i_, w_, activation=GPT_OSS, **loras) for x_, i_, w_ in rows]
        return torch.cat(parts)

    results, saved = [], []
    for run in (by_hand, lambda: experts(x, *base, index, weight, implementation="grouped_mm", **loras)):
        torch.manual_seed(3)
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: (kept.append(t), t)[1], lambda t: t):
            y = run()
        results.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in kept}
        saved.append(sum(sizes.values()))
    torch.testing.assert_close(*results)
    assert saved[1] <= 4 * sum(each.numel() for each in (*base, *leaves)) + 8 * index.numel() < saved[0] / 2


def test_errors_say_what_to_do() -> None:
    layer, _ = _stock()
    weights = (layer.gate_up_proj, layer.gate_up_proj_bias, layer.down_proj, layer.down_proj_bias)
    with pytest.raises(ShapeError, match="Flatten"):
        experts(torch.randn(2, 3, 24), *weights, torch.zeros(6, 2).long(), torch.ones(6, 2))
    with pytest.raises(UnsupportedError, match="auto"):
        resolve_implementation("grouped_mm", torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (True, True)])
def test_backward_of_the_wide_product_has_what_it_saved(
    monkeypatch: pytest.MonkeyPatch, wanted: tuple[bool, bool]
) -> None:
    """The product itself runs on CUDA alone; which tensors it keeps depends on what has a gradient."""
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    draw = torch.Generator().manual_seed(0)
    x_NH, weight_EH = (
        torch.randn(n, 8, generator=draw).bfloat16().requires_grad_(on) for n, on in zip((5, 3), wanted, strict=True)
    )
    dy_NE = torch.randn(5, 3, generator=draw)
    leaves = [each for each in (x_NH, weight_EH) if each.requires_grad]
    got = torch.autograd.grad(_WideProduct.apply(x_NH, weight_EH), leaves, dy_NE)
    want = torch.autograd.grad(x_NH.float() @ weight_EH.float().T, leaves, dy_NE)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == torch.bfloat16
        torch.testing.assert_close(one, other)
