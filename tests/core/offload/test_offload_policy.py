"""Which layers are checkpointed: the choice as a table, and what a model does with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import batch_of, loss_and_grads, tiny_gpt_oss, tiny_llama, twin
from live_bytes import LiveBytes
from simulated_copies import SimulatedCopies
from torch import nn

from unsloth_plugins.core import apply
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload import HostStore
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.policy import Plan, choose


@pytest.mark.parametrize(
    ("free", "first_kept", "on_host"),
    [
        (-100, 4, True),  # nothing is left: all that can move moves
        (7, 4, True),
        (8, 4, False),  # the inputs fit on the device
        (19, 4, False),
        (20, 3, True),  # one layer fits if the inputs move
        (26, 3, False),  # ... and if they don't
        (40, 2, True),
        (61, 1, True),
        (79, 1, False),
        (80, 0, False),
        (10**12, 0, False),
    ],
)
def test_the_fastest_plan_that_fits(free: int, first_kept: int, on_host: bool) -> None:
    plan = choose(free, [20] * 4, [2] * 4)
    assert (plan.first_kept, plan.inputs_on_host) == (first_kept, on_host)
    assert free < 0 or plan.kept_bytes + plan.input_bytes <= free


@pytest.mark.parametrize(
    ("free", "host", "first_kept", "on_host"),
    [
        (7, 8, 4, True),  # the host takes all
        (7, 7, 4, False),  # nothing fits: least on the device, of what the host takes
        (8, 0, 4, False),
        (20, 5, 4, False),  # one layer would fit if three inputs could move
        (20, 6, 3, True),
        (26, 5, 3, False),
        (40, 3, 3, False),
        (40, 4, 2, True),
        (80, 0, 0, False),
    ],
)
def test_plans_with_more_inputs_than_the_host_takes_are_dropped(
    free: int, host: int, first_kept: int, on_host: bool
) -> None:
    plan = choose(free, [20] * 4, [2] * 4, host_bytes=host)
    assert (plan.first_kept, plan.inputs_on_host) == (first_kept, on_host)
    assert not on_host or 2 * first_kept <= host


def test_attention_is_not_kept_in_the_room_of_inputs_that_the_host_does_not_take() -> None:
    options: Any = {"kept_bytes": [20] * 4, "input_bytes": [2] * 4, "surviving_bytes": [0, 5, 0, 5], "host_bytes": 7}
    for free, surviving in ((12, 0), (13, 5), (18, 10)):
        plan = choose(free, **options)
        assert (plan.first_kept, plan.inputs_on_host, plan.surviving_bytes) == (4, False, surviving)
    before = choose(20, [20] * 4, [2] * 4)
    assert before.inputs_on_host and not choose(20, **options, before=before).inputs_on_host


def test_layers_of_different_size() -> None:
    assert choose(35, [5, 30, 5, 30], [0] * 4) == Plan(2, False, 35, 0)
    assert choose(34, [5, 30, 5, 30], [0] * 4).first_kept == 3


@pytest.mark.parametrize(
    ("free", "before", "first_kept"), [(60, 2, 2), (60, 3, 1), (60, 1, 1), (59, 1, 2), (39, 2, 3), (100, 4, 0)]
)
def test_a_plan_that_fits_stays_until_two_more_layers_would(free: int, before: int, first_kept: int) -> None:
    assert choose(free, [20] * 4, [0] * 4, Plan(before, False)).first_kept == first_kept


@pytest.mark.parametrize(("free", "first_kept", "first_holding"), [(79, 1, 3), (80, 0, 4), (93, 0, 3), (120, 0, 0)])
def test_experts_hold_what_is_left_from_the_last_layer_on(free: int, first_kept: int, first_holding: int) -> None:
    plan = choose(free, [20] * 4, [0] * 4, None, [10] * 4)
    assert (plan.first_kept, plan.first_holding) == (first_kept, first_holding)
    assert plan.kept_bytes + plan.holding_bytes <= free and plan.holding_bytes == 10 * (4 - first_holding)


@pytest.mark.parametrize(("free", "decoded"), [(0, 0), (80, 0), (126, 0), (127, 1), (134, 2), (10**6, 4)])
def test_experts_stay_decoded_when_nothing_else_can_be_kept(free: int, decoded: int) -> None:
    plan = choose(free, [20] * 4, [0] * 4, None, [10] * 4, (), 7)
    assert (plan.decoded, plan.decoded_bytes) == (decoded, 7 * decoded)
    assert plan.device_bytes + plan.decoded_bytes <= max(free, 0)


class FakeMemory:
    """A device with ``room`` bytes beside what a step needs, 500, and whose every step moves the peak."""

    def __init__(self, room: int) -> None:
        self.room, self.now, self.asked = room, 1000, 0

    def is_known(self, device: torch.device) -> bool:
        return True

    def allowed(self, device: torch.device) -> int:
        return int((1000 + 500 + self.room) / 0.94) + 1

    def allocated(self, device: torch.device) -> int:
        return self.now

    def peak(self, device: torch.device) -> int:
        self.asked += 1
        return 1498 + self.asked


def measured(room: int, layers: int = 4, tokens: int = 8) -> MemoryBudget:
    budget = MemoryBudget(FakeMemory(room))
    budget.layers = layers
    budget.begin(torch.device("cuda"), tokens)
    assert budget.plan is None and budget.wants_measure(0)
    budget.backward_ended()
    for index in reversed(range(layers)):
        budget.measured(index, tokens, 20, 2)
    return budget


def test_layers_are_kept_from_the_second_step_on_and_fewer_of_longer_ones() -> None:
    budget = measured(45)
    for tokens, kept in ((8, 2), (8, 2), (4, 4), (8, 2)):
        budget.begin(torch.device("cuda"), tokens)
        budget.backward_ended()
        assert budget.plan is not None and budget.layers - budget.plan.first_kept == kept, tokens
    budget.begin(torch.device("cuda"), 9)  # longer than any before: measured first
    assert budget.plan is None and not budget.keeps(3) and budget.wants_measure(3)
    budget.backward_ended()
    for index in range(4):
        budget.measured(index, 9, 23, 2)
    budget.begin(torch.device("cuda"), 9)
    assert budget.plan is not None and budget.layers - budget.plan.first_kept == 1


class Working(FakeMemory):
    """A device on which a step takes 500 bytes and what the plan, or the lack of one, holds."""

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.held = 0

    def peak(self, device: torch.device) -> int:
        return 1500 + self.held


@pytest.mark.parametrize("stays", [False, True])
def test_inputs_that_waited_on_the_device_at_first_are_no_part_of_what_a_step_needs(stays: bool) -> None:
    memory = Working(100)
    budget = MemoryBudget(memory)
    budget.layers = 4
    for _ in range(3):
        budget.begin(torch.device("cuda"), 8)
        memory.held = 40 * stays if budget.plan is None else budget.plan.device_bytes
        for index in reversed(range(4)) if budget.plan is None else ():
            budget.stayed(10 * stays)
            budget.measured(index, 8, 30, 10)
        budget.backward_ended()
    assert budget.plan is not None and (budget.plan.first_kept, budget.plan.kept_bytes) == (1, 90)


def test_the_budget_hears_of_the_inputs_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def stay(store: HostStore, tensor: torch.Tensor) -> torch.Tensor:
        store.stayed_bytes += tensor.numel() * tensor.element_size()
        return tensor

    model, heard = tiny_llama(num_hidden_layers=4), []
    applied = apply(model, attention="eager", gradient_checkpointing=True, offload_min_bytes=0)
    monkeypatch.setattr(HostStore, "pack", stay)
    monkeypatch.setattr(applied.budget, "stayed", heard.append)
    loss_and_grads(model, **batch_of(2, 16))
    hidden = 2 * 16 * model.config.hidden_size * 4
    assert heard == [hidden] * 4  # and not the angles and the mask, which all layers share


class FakeDecoded:
    """Layers of 5 bytes on the device of ``memory``."""

    layer_bytes = 5

    def __init__(self, memory: FakeMemory) -> None:
        self.memory, self.held_bytes = memory, 0

    def keep(self, count: int) -> None:
        self.memory.now += self.layer_bytes * count - self.held_bytes
        self.held_bytes = self.layer_bytes * count


def test_decoded_experts_give_way_to_longer_steps_and_to_forwards_without_gradients() -> None:
    budget = measured(95)
    decoded = budget.decoded = FakeDecoded(budget.memory)  # type: ignore[arg-type]
    for tokens, count in ((8, 3), (8, 3), (4, 4), (9, 0)):
        budget.begin(torch.device("cuda"), tokens)
        assert decoded.held_bytes == 5 * count, tokens
        budget.backward_ended()
    budget.begin(torch.device("cuda"), 8)
    assert budget.plan is not None and budget.plan.first_kept == 0 and decoded.held_bytes > 0
    assert f"experts of {decoded.held_bytes // 5} stay decoded" in budget.describe()
    budget.rest()
    assert decoded.held_bytes == 0


def test_steps_without_checkpoints_do_not_count_as_forwards_that_share_a_backward() -> None:
    budget = MemoryBudget(FakeMemory(80))
    for _ in range(5):
        budget.begin(torch.device("cuda"), 8)  # no layer asks
    budget.layers = 4
    budget.begin(torch.device("cuda"), 8)
    budget.backward_ended()
    for index in range(4):
        budget.measured(index, 8, 20, 2)
    budget.begin(torch.device("cuda"), 8)
    assert budget.plan is not None and budget.plan.first_kept == 0


def test_forwards_that_share_one_backward_share_the_memory() -> None:
    budget = measured(80)
    for _ in range(2):  # two forwards, one backward: what is kept of the first is in use at the second
        budget.memory.now = 1000
        budget.begin(torch.device("cuda"), 8)
        budget.memory.now += 0 if budget.plan is None else budget.plan.kept_bytes + budget.plan.input_bytes
        budget.begin(torch.device("cuda"), 8)
        second = budget.plan
        budget.backward_ended()
    assert second is not None and second.kept_bytes <= 40
    budget.memory.now = 1000
    budget.begin(torch.device("cuda"), 8)
    assert budget.plan is not None and budget.plan.kept_bytes <= 40


class OldPeak(FakeMemory):
    """A device whose peak counter starts high; ``step`` moves it where a step of that many bytes would."""

    def __init__(self, room: int, high: int) -> None:
        super().__init__(room)
        self.high = high

    def peak(self, device: torch.device) -> int:
        return self.high

    def step(self, budget: MemoryBudget, tokens: int, need: int = 500) -> int:
        """One step; how many layers were kept."""
        budget.begin(torch.device("cuda"), tokens)
        plan = budget.plan
        self.high = max(self.high, self.now + need + (0 if plan is None else plan.kept_bytes + plan.input_bytes))
        for index in range(4):
            if budget.wants_measure(index):
                budget.measured(index, tokens, 20, 2)
        budget.backward_ended()
        return 0 if plan is None else budget.layers - plan.first_kept


def test_the_peak_of_loading_is_not_taken_for_what_a_step_needs() -> None:
    memory = OldPeak(room=85, high=1560)  # 60 more than the first step reaches
    budget = MemoryBudget(memory)
    budget.layers = 4
    kept = [memory.step(budget, 8) for _ in range(5)]
    assert kept == [0, 1, 2, 3, 4] and budget._need == 500 and budget._at_most is None
    assert memory.high == 1580


def test_shorter_steps_under_the_peak_of_a_longer_one_need_no_more_for_it() -> None:
    memory = OldPeak(room=45, high=0)
    budget = MemoryBudget(memory)
    budget.layers = 4
    kept = [memory.step(budget, tokens, need) for tokens, need in ((8, 500), (8, 500), (2, 100), (2, 100), (8, 500))]
    assert kept == [0, 2, 4, 4, 2] and budget._need == 500


class Counted:
    """Counts how often each layer runs."""

    def __init__(self, model: nn.Module) -> None:
        self.runs: dict[int, int] = {}
        for index, layer in enumerate(model.model.layers):  # type: ignore[arg-type, union-attr]
            layer.input_layernorm.register_forward_pre_hook(lambda module, args, index=index: self.add(index))

    def add(self, index: int) -> None:
        self.runs[index] = self.runs.get(index, 0) + 1

    def take(self) -> list[int]:
        runs, self.runs = self.runs, {}
        return [runs[index] for index in sorted(runs)]


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_kept_layers_run_once_and_gradients_stay_the_same(make) -> None:  # type: ignore[no-untyped-def]
    ref = make(num_hidden_layers=4, attention_dropout=0.0)
    ours = twin(ref)
    batch = batch_of(2, 16)
    applied = apply(ours, attention="eager", gradient_checkpointing=True, offload_min_bytes=0)
    plain = apply(ref, attention="eager", gradient_checkpointing=True, memory_policy="on_device")
    assert applied.budget is not None and plain.budget is None
    applied.budget.memory = FakeMemory(10**6)
    counted = Counted(ours)
    want = loss_and_grads(ref, **batch)
    for runs in ([2] * 4, [1] * 4, [1] * 4):
        got = loss_and_grads(ours, **batch)
        assert counted.take() == runs
        assert torch.equal(got[0], want[0]) and all(torch.equal(got[2][name], want[2][name]) for name in want[2])
    assert "4 of 4 layers not checkpointed" in applied.report()
    applied.budget.memory = FakeMemory(-100)
    loss_and_grads(ours, **batch)
    assert counted.take() == [2] * 4
    ours.eval()
    with torch.no_grad():
        ours(**batch)
    assert counted.take() == [1] * 4


class Live(FakeMemory):
    """Has room for everything, and knows what the test's tensors take."""

    def __init__(self, alive: LiveBytes) -> None:
        super().__init__(10**9)
        self.alive = alive

    def allocated(self, device: torch.device) -> int:
        return self.alive.now()


@pytest.mark.parametrize("make", [tiny_gpt_oss, tiny_llama])
def test_what_a_recompute_leaves_is_what_a_layer_keeps(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what the frames of a recompute that ended early still hold."""
    model = make(num_hidden_layers=4).bfloat16()
    budget = apply(model, attention="eager", gradient_checkpointing=True).budget
    assert budget is not None
    batch = batch_of(1, 64)
    with LiveBytes(*model.parameters()) as alive:
        budget.memory = Live(alive)
        loss_and_grads(model, **batch)
        model.zero_grad()
        estimates = [budget._seen[index].kept_bytes for index in range(4)]
        before: list[int] = []
        keeps = budget.keeps
        monkeypatch.setattr(budget, "keeps", lambda index: before.append(alive.now()) or keeps(index))
        loss_and_grads(model, **batch)
    assert budget.plan is not None and budget.plan.first_kept == 0
    taken = [after - begun for begun, after in zip(before, before[1:], strict=False)]
    excess = [estimate - each for estimate, each in zip(estimates, taken, strict=False)][1:]  # the first also has masks
    allowed = budget._seen[0].input_bytes  # which the plain norms here do not keep: they have a float32 copy
    assert all(0 <= each <= allowed for each in excess)


def test_policies_reach_the_store_and_the_loss() -> None:
    batch = batch_of(2, 16)
    for policy, sent in (("offload_all", True), ("min_memory", True), ("on_device", False), ("auto", False)):
        applied = apply(tiny_llama(), gradient_checkpointing=True, memory_policy=policy, offload_min_bytes=0)
        loss_and_grads(applied.model, **batch)
        assert (applied.store.sent_bytes > 0) == sent and applied.store.held_bytes == 0
        assert ("64 MiB" in applied.report()) == (policy == "min_memory")
        assert ("sent to the host" in applied.report()) == sent


def test_a_trainer_that_switches_checkpointing_on_again_changes_no_index() -> None:
    model = tiny_llama()
    applied = apply(model, gradient_checkpointing=True)
    for _ in range(2):
        model.train()
        model.gradient_checkpointing_enable()
        model(**batch_of(2, 8))
        layers = [layer._gradient_checkpointing_func for layer in model.model.layers]
        assert [layer.index for layer in layers] == [0, 1] and applied.budget is not None
        assert applied.budget.layers == 2


def test_a_host_budget_that_cannot_hold_the_inputs_is_an_error_before_the_first_layer_runs() -> None:
    model, counted_bytes = tiny_llama(num_hidden_layers=4), 4 * 2 * 16 * 64 * 4
    options = {"gradient_checkpointing": True, "memory_policy": "offload_all", "offload_min_bytes": 0}
    counted = Counted(model)
    applied = apply(model, host_memory_gib=0.99 * counted_bytes / 2**30, **options)
    with pytest.raises(UnsupportedError, match="Raise the limit"):
        loss_and_grads(model, **batch_of(2, 16))
    assert counted.runs == {}
    applied.undo()
    applied = apply(model, host_memory_gib=1.01 * counted_bytes / 2**30, **options)
    loss_and_grads(model, **batch_of(2, 16))
    assert applied.store.mapped_bytes == applied.store.peak_bytes == counted_bytes


@pytest.mark.parametrize(
    ("host", "room", "forwards", "on_host"),
    [
        (None, 10**6, 1, None),  # whoever stores the inputs looks for itself
        (3048, 0, 1, None),  # the host takes 1000
        (3047, 500, 1, False),
        (3047, 499, 1, True),  # for the host, which refuses
        (6096, 500, 2, None),
        (6095, 500, 2, False),
    ],
)
def test_inputs_of_a_step_without_a_plan(host: int | None, room: int, forwards: int, on_host: bool | None) -> None:
    budget = MemoryBudget(FakeMemory(room), host)
    budget.layers = 4  # whose slabs are rounded up by 512 bytes at the most
    for _ in range(forwards):
        budget.begin(torch.device("cuda"), 8)
    budget.expect_inputs(1000)
    assert budget.plan is None and budget.inputs_on_host is on_host
    budget.backward_ended()
    budget.begin(torch.device("cuda"), 9)
    assert budget.inputs_on_host is None


INPUTS = 4 * 2 * 16 * 64 * 4  # bytes: layers, rows, tokens, hidden size, float32


def under_auto(monkeypatch: pytest.MonkeyPatch, host_bytes: int, room: int) -> tuple[Any, Counted]:
    """A model whose store takes the CPU for a device that is half full."""
    monkeypatch.setattr(HostStore, "_moves", lambda store, device: store.moving is not False)
    model = tiny_llama(num_hidden_layers=4)
    options = {"gradient_checkpointing": True, "offload_min_bytes": INPUTS // 4}
    applied = apply(model, host_memory_gib=host_bytes / 2**30, **options)
    copies = SimulatedCopies(eager=0.3)
    applied.store._engine = lambda device: copies
    applied.budget.memory = FakeMemory(room)  # type: ignore[union-attr]
    return applied, Counted(model)


@pytest.mark.parametrize("host_bytes", [INPUTS // 2, 2 * INPUTS])
def test_auto_keeps_inputs_on_the_device_where_the_host_does_not_take_them(
    host_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = apply(tiny_llama(num_hidden_layers=4), gradient_checkpointing=True, memory_policy="on_device")
    want = loss_and_grads(plain.model, **batch_of(2, 16))
    applied, _ = under_auto(monkeypatch, host_bytes, 2 * INPUTS)
    for step in range(3):
        got = loss_and_grads(applied.model, **batch_of(2, 16))
        assert all(torch.equal(got[2][name], want[2][name]) for name in want[2])
        assert (applied.store.sent_bytes > 0) == (host_bytes > INPUTS) or step > 0
        assert applied.store.mapped_bytes <= host_bytes


def test_auto_refuses_inputs_that_neither_host_nor_device_take_before_the_first_layer_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    applied, counted = under_auto(monkeypatch, INPUTS // 2, INPUTS // 2)
    with pytest.raises(UnsupportedError, match="Raise the limit"):
        loss_and_grads(applied.model, **batch_of(2, 16))
    assert counted.runs == {}
