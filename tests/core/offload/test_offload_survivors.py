"""What attention gave in the forward is not computed again: equal bits, one run fewer, freed in time."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama, twin
from test_offload_pairs import equal
from test_offload_policy import FakeMemory
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core import apply
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.policy import Plan, choose
from unsloth_plugins.core.offload.survivors import Survivors, survive
from unsloth_plugins.core.sink_attention import reference


class Doubled(torch.autograd.Function):
    """2 x, whose computing is counted."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        def compute() -> tuple[torch.Tensor]:
            Doubled.runs += 1
            return (2 * x,)

        (out,) = survive(compute)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        x, out = ctx.saved_tensors
        assert torch.equal(out, 2 * x)
        return 2 * grad


def region(x: torch.Tensor) -> torch.Tensor:
    return Doubled.apply(torch.sin(Doubled.apply(x.cos()))).exp()  # type: ignore[no-any-return]


@pytest.mark.parametrize("keep", [True, False])
def test_a_kept_result_is_computed_once_and_again_only_for_a_second_backward(keep: bool) -> None:
    x = torch.linspace(-1, 1, 6).requires_grad_()
    want = torch.autograd.grad(region(x).sum(), x)[0]
    survivors, Doubled.runs = Survivors(keep), 0
    y = checkpoint(region, x, use_reentrant=False, context_fn=survivors.contexts)
    assert Doubled.runs == 2 and survivors.offered_bytes == 2 * 6 * 4
    runs = []
    for last in (False, True):
        grad = torch.autograd.grad(y.sum(), x, retain_graph=not last)[0]
        assert torch.equal(grad, want)
        runs.append(Doubled.runs)
    assert runs == ([2, 4] if keep else [4, 6])


def test_what_is_kept_goes_with_the_graph_and_each_run_has_its_own() -> None:
    x, kept = torch.linspace(-1, 1, 6).requires_grad_(), []
    outs = []
    for factor in (1.0, 2.0, 3.0):
        survivors = Survivors(True)
        outs.append(checkpoint(region, factor * x, use_reentrant=False, context_fn=survivors.contexts))
        kept.append(weakref.ref(survivors._kept[0][0][0]))
        del survivors
    for factor, out in ((2.0, outs.pop(1)), (1.0, outs.pop(0))):
        want = torch.autograd.grad(region(factor * x).sum(), x)[0]
        assert torch.equal(torch.autograd.grad(out.sum(), x)[0], want)
    outs[0].register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        outs[0].sum().backward()
    del outs, out
    gc.collect()
    assert all(each() is None for each in kept)


class Halved(torch.autograd.Function):
    """x / 2; saves nothing, so that its output may be changed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return survive(lambda: (x / 2,))[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad / 2


def test_a_result_that_was_changed_in_place_is_computed_again() -> None:
    def changed(x: torch.Tensor) -> torch.Tensor:
        return Halved.apply(x.cos()).mul_(3).sin()  # type: ignore[no-any-return]

    x = torch.linspace(-1, 1, 6).requires_grad_()
    want = torch.autograd.grad(changed(x).sum(), x)[0]
    y = checkpoint(changed, x, use_reentrant=False, context_fn=Survivors(True).contexts)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], want)


@pytest.mark.parametrize(
    ("free", "surviving_bytes", "first_kept", "on_host"),
    [
        (-100, 0, 4, True),
        (4, 0, 4, True),
        (5, 5, 4, True),  # attention of the last full layer
        (10, 10, 4, True),  # ... and of the other one
        (18, 10, 4, False),
        (25, 5, 3, True),  # a layer holds its own
        (85, 0, 0, False),
    ],
)
def test_attention_is_kept_before_layers(free: int, surviving_bytes: int, first_kept: int, on_host: bool) -> None:
    plan = choose(free, [20, 20, 20, 20], [2] * 4, surviving_bytes=[0, 5, 0, 5])
    assert (plan.first_kept, plan.inputs_on_host) == (first_kept, on_host)
    assert plan.surviving_bytes == surviving_bytes == sum([0, 5, 0, 5][plan.first_surviving : plan.first_kept])
    assert free < 0 or plan.device_bytes <= free


def test_a_plan_with_attention_stays_until_two_more_layers_would_fit() -> None:
    options: dict[str, Any] = {"kept_bytes": [20] * 4, "input_bytes": [0] * 4, "surviving_bytes": [0, 5, 0, 5]}
    assert choose(45, before=Plan(3, False), **options).first_kept == 3
    assert choose(45, before=Plan(4, False), **options).first_kept == 2


class CountedAttention:
    """Counts the queries' blocks that the reference goes through, over full layers and windows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full = self.narrow = 0
        blocks = reference._query_blocks

        def counted(queries: int, keys: int, window: int | None, block_size: int) -> Any:
            self.full += window is None
            self.narrow += window is not None
            return blocks(queries, keys, window, block_size)

        monkeypatch.setattr(reference, "_query_blocks", counted)

    def take(self) -> tuple[int, int]:
        taken, self.full, self.narrow = (self.full, self.narrow), 0, 0
        return taken


@pytest.mark.parametrize("pairs", [False, True])
def test_full_layers_of_gpt_oss_attend_once_less(pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    ref = tiny_gpt_oss()
    ours, batch = twin(ref), batch_of(2, 16)
    apply(ref, gradient_checkpointing=True, memory_policy="on_device", attention="eager")
    options: dict[str, Any] = {"gradient_checkpointing": True, "offload_min_bytes": 0, "checkpoint_pairs": pairs}
    applied = apply(ours, attention="eager", **options)
    assert applied.budget is not None
    one = 2 * 16 * (4 * 16 * 4 + 4 * 4)  # output and normaliser of a layer, float32
    applied.budget.memory = FakeMemory(2 * one)
    want, counted = loss_and_grads(ref, **batch), CountedAttention(monkeypatch)
    runs = []
    for _ in range(3):
        assert equal(loss_and_grads(ours, **batch), want)
        runs.append(counted.take())
    first, later = (8, 7) if pairs else (6, 6)  # windows come first in their pairs; the last layer is kept later
    assert runs == [(6, first), (4, later), (4, later)]  # forward, recompute and backward of two layers
    assert [each.surviving_bytes for _, each in sorted(applied.budget._seen.items())] == [0, one, 0, one]
    assert "full attention of 1 more not computed again" in applied.report()
    applied.budget.memory = FakeMemory(one)
    loss_and_grads(ours, **batch)
    assert counted.take()[0] == 5


def test_models_whose_attention_is_not_ours_offer_nothing() -> None:
    model = tiny_llama(num_hidden_layers=3)
    applied = apply(model, gradient_checkpointing=True, offload_min_bytes=0)
    assert isinstance(applied.budget, MemoryBudget)
    applied.budget.memory = FakeMemory(0)
    for _ in range(2):
        loss_and_grads(model, **batch_of(2, 16))
    assert applied.budget.plan is not None and applied.budget.plan.surviving_bytes == 0
    assert isinstance(model, nn.Module) and "attention from" not in applied.report()
