"""The order of copies, on an engine that completes them late and in any allowed order."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from simulated_copies import SimulatedCopies

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload import HostStore, offload_checkpoint
from unsloth_plugins.core.offload.arena import Arena
from unsloth_plugins.core.offload.engine import Clock

LATE = [0.0, 0.3, 0.7]  # how readily copies run by themselves


def simulated(eager: float = 0.0, seed: int = 0, **options: object) -> HostStore:
    copies = SimulatedCopies(seed, eager)
    return HostStore(True, min_bytes=0, engine=lambda device: copies, **options)  # type: ignore[arg-type]


def queue(store: HostStore):  # type: ignore[no-untyped-def]
    return store.transfers(torch.device("cpu"))


class Block(torch.nn.Module):
    """Saves x, its transpose, an offset slice and shifted labels."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.inner, self.drop = torch.nn.Linear(width, width), torch.nn.Dropout(0.2)

    def forward(self, x, x_T, part, labels):  # type: ignore[no-untyped-def]
        mixed = x + self.drop(self.inner(x)) + (x_T @ x)[: x.shape[0]].sum() * 0.01
        return torch.tanh(mixed + torch.nn.functional.pad(part, (0, 0, 1, 0)) * labels[:, None])


def step(blocks: list[Block], x: torch.Tensor, labels: torch.Tensor, store: HostStore | None) -> list[torch.Tensor]:
    torch.manual_seed(3)
    leaf = y = x.clone().requires_grad_()
    for block in blocks:
        arguments = (y, y.T, y[1:], torch.cat([labels[1:], labels[:1]]))
        y = block(*arguments) if store is None else offload_checkpoint(block, *arguments, store=store)
        y = y * 1.01
    return list(torch.autograd.grad(y.square().sum(), [leaf, *(p for b in blocks for p in b.parameters())]))


@pytest.mark.parametrize("eager", LATE)
def test_case_21_50_steps_of_mixed_lengths_are_bit_equal_to_no_checkpointing(eager: float) -> None:
    """In an arena of what the longest step needs, and not a byte more."""
    blocks, draw, width = [Block(64, seed) for seed in range(5)], random.Random(1), 64
    longest, labels, unlimited = torch.randn(13, width), torch.arange(13), simulated(eager)
    step(blocks, longest, labels, unlimited)
    need = unlimited.mapped_bytes
    with pytest.raises(UnsupportedError, match="Raise the limit"):
        step(blocks, longest, labels, simulated(eager, limit_bytes=need - 1))
    store = simulated(eager, limit_bytes=need)
    for n in range(50):
        rows = draw.choice([3, 8, 13])
        x, labels = torch.randn(rows, width), torch.arange(rows)
        want, got = step(blocks, x, labels, None), step(blocks, x, labels, store)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True)), n
        assert store.held_bytes == 0
    assert store.total_bytes > 0 and queue(store).kept_bytes > 0 and store.mapped_bytes == need


def test_a_wait_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine of these tests can fail them."""
    for name in ("wait", "block"):
        monkeypatch.setattr(SimulatedCopies, name, lambda self, mark: None)
    store, blocks = simulated(), [Block(8, seed) for seed in range(5)]
    try:
        got = step(blocks, torch.randn(8, 8), torch.arange(8), store)
        assert not all(torch.isfinite(each).all() for each in got)
    except UnsupportedError:
        pass


def test_device_memory_that_goes_before_its_copy_is_noticed() -> None:
    copies = SimulatedCopies()
    mark = copies.to_host(torch.ones(8, dtype=torch.uint8), torch.empty(8, dtype=torch.uint8), None)
    with pytest.raises(AssertionError, match="let go"):
        copies.block(mark)


@pytest.mark.parametrize("eager", LATE)
def test_about_two_pieces_are_on_the_device(eager: float) -> None:
    store = simulated(eager)
    pieces = [store.pack(torch.full((1000,), float(n))) for n in range(20)]
    held = [f for f in queue(store)._flights if f.source_N is not None]
    assert len(held) == 2
    for n in reversed(range(20)):
        assert torch.equal(store.unpack(pieces[n]), torch.full((1000,), float(n)))
        pieces.pop()
        coming = [ref() for ref in queue(store)._alive.values() if ref().coming is not None]  # type: ignore[union-attr]
        assert len(coming) <= 1
    assert queue(store).kept_bytes == 2 * 4000 and store.held_bytes == 0


def test_the_piece_sent_before_is_already_on_its_way() -> None:
    store = simulated()
    copies = queue(store).engine
    pieces = [store.pack(torch.full((1000,), float(n))) for n in range(6)]
    for packed in (pieces[5], pieces[4], pieces[3]):
        store.unpack(packed)
    started = copies.last["in"]  # type: ignore[attr-defined]
    started.run()
    waits = copies.waits  # type: ignore[attr-defined]
    assert torch.equal(store.unpack(pieces[2]), torch.full((1000,), 2.0))
    assert copies.waits == waits and copies.last["in"] is not started  # type: ignore[attr-defined]


@pytest.mark.parametrize("hold", [1, 2])
def test_where_memory_is_dearest_the_next_piece_comes_when_the_tail_is_over(hold: int) -> None:
    """Only for who has told it before; who stops telling is looked ahead for as ever."""
    store = simulated(hold=hold)
    pieces = [store.pack(torch.full((1000,), float(n))) for n in range(8)]

    def coming() -> list[bool]:
        return [piece._parked.coming is not None for piece in pieces]

    store.unpack(pieces[6])
    assert coming().index(True) == 5
    store.tail_is_over()
    store.unpack(pieces[5])
    assert any(coming()) == (hold == 2)
    store.tail_is_over()
    assert coming().index(True) == 4
    store.unpack(pieces[4])
    store.unpack(pieces[3])
    assert coming().index(True) == 2
    for n in (2, 1, 0):
        assert torch.equal(store.unpack(pieces[n]), torch.full((1000,), float(n)))


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
@pytest.mark.parametrize("eager", LATE)
def test_several_forwards_before_their_backwards_in_any_order(order: list[int], eager: float) -> None:
    store, blocks = simulated(eager), [Block(8, seed) for seed in range(4)]
    xs = [torch.randn(8, 8) for _ in order]
    results = []
    for ours in (False, True):
        torch.manual_seed(0)
        outs, leaves = [], [x.clone().requires_grad_() for x in xs]
        for y in leaves:
            for block in blocks:
                arguments = (y, y.T, y[1:], torch.arange(8))
                y = offload_checkpoint(block, *arguments, store=store) if ours else block(*arguments)
            outs.append(y)
        for which in order:
            outs[which].square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    del outs, y
    assert store.held_bytes == 0


@pytest.mark.parametrize("eager", LATE)
def test_case_33_an_unused_output_and_an_exception_leave_nothing_behind(eager: float) -> None:
    store, blocks = simulated(eager), [Block(8, seed) for seed in range(6)]
    x, labels = torch.randn(8, 8), torch.arange(8)
    want = step(blocks, x, labels, None)

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("interrupted")

    torch.manual_seed(3)
    y = x.clone().requires_grad_()
    for n, block in enumerate(blocks):
        y = offload_checkpoint(block, y, y.T, y[1:], labels, store=store)
        if n == 1:
            y.register_hook(fail)
    offload_checkpoint(blocks[0], y, y.T, y[1:], labels, store=store)  # nobody asks for its gradient
    with pytest.raises(KeyError):
        y.sum().backward()
    del y
    assert store.held_bytes == 0 and queue(store)._order == []
    got = step(blocks, x, labels, store)
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert store.held_bytes == 0


class OwnMarks(SimulatedCopies):
    """One device of several: a mark of another one would stand for a copy that this one knows nothing of."""

    def to_host(self, source_N, host_N, after):  # type: ignore[no-untyped-def]
        assert after is None or after.engine is self
        return self._own(super().to_host(source_N, host_N, after))

    def to_device(self, host_N, after):  # type: ignore[no-untyped-def]
        assert after is None or after.engine is self
        target_N, mark = super().to_device(host_N, after)
        return target_N, self._own(mark)

    def wait(self, mark):  # type: ignore[no-untyped-def]
        assert mark.engine is self
        super().wait(mark)

    def is_done(self, mark):  # type: ignore[no-untyped-def]
        assert mark.engine is self
        return super().is_done(mark)

    def _own(self, mark):  # type: ignore[no-untyped-def]
        mark.engine = self
        return mark


class TwoDevices(HostStore):
    """Tensors in float64 count as those of a second device."""

    def _park(self, tensor, n_bytes):  # type: ignore[no-untyped-def]
        self.place = torch.device("cuda", int(tensor.dtype == torch.float64))
        return super()._park(tensor, n_bytes)

    def transfers(self, device):  # type: ignore[no-untyped-def]
        return super().transfers(self.place if device.type == "cpu" else device)


@pytest.mark.parametrize("hold", [1, 2])
@pytest.mark.parametrize("eager", LATE)
def test_layers_on_two_devices_have_queues_and_memory_of_their_own(eager: float, hold: int) -> None:
    engines: dict[torch.device, OwnMarks] = {}

    def engine(device: torch.device) -> OwnMarks:
        return engines.setdefault(device, OwnMarks(device.index, eager))

    store = TwoDevices(True, min_bytes=0, engine=engine, hold=hold)
    blocks = [Block(8, seed).to((torch.float32, torch.float64)[seed % 2]) for seed in range(6)]
    x, labels = torch.randn(8, 8), torch.arange(8)
    for n in range(4):
        results = []
        for ours in (False, True):
            torch.manual_seed(n)
            leaf = y = x.clone().requires_grad_()
            for block in blocks:
                y = y.to(block.inner.weight.dtype)
                arguments = (y, y.T, y[1:], labels)
                y = offload_checkpoint(block, *arguments, store=store) if ours else block(*arguments)
                if y.requires_grad and ours:
                    y.register_hook(lambda grad: store.tail_is_over())
            results.append(torch.autograd.grad(y.sum(), [leaf, *(p for b in blocks for p in b.parameters())]))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), n
        del y
        assert store.held_bytes == 0
    assert [device.index for device in engines] == [0, 1]
    assert all(each.pinned for each in engines.values())
    bytes_sent = [store.transfers(device).sent_bytes for device in engines]
    assert bytes_sent[1] > bytes_sent[0] / 2 and sum(bytes_sent) == store.sent_bytes
    store.release()
    assert store.mapped_bytes == 0 and not any(each.pinned for each in engines.values())


def test_backward_twice_and_without_gradient_in_between() -> None:
    store, blocks = simulated(0.3), [Block(8, seed) for seed in range(3)]
    x = torch.randn(8, 8, requires_grad=True)
    y = x
    for block in blocks:
        y = offload_checkpoint(block.eval(), y, y.T, y[1:], torch.arange(8), store=store)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            before = store.total_bytes
            offload_checkpoint(blocks[0], x, x.T, x[1:], torch.arange(8), store=store)
            assert store.total_bytes == before
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], first)


def test_nested_checkpoints() -> None:
    store, blocks = simulated(0.3), [Block(8, seed) for seed in range(6)]
    results = []
    for ours in (False, True):
        torch.manual_seed(3)
        leaf = y = torch.linspace(-1, 1, 64).view(8, 8).requires_grad_()

        def one(block: Block, y: torch.Tensor, ours: bool = ours) -> torch.Tensor:
            arguments = (y, y.T, y[1:], torch.arange(8))
            return offload_checkpoint(block, *arguments, store=store) if ours else block(*arguments)

        for pair in (blocks[:2], blocks[2:4], blocks[4:]):

            def both(y: torch.Tensor, pair: list[Block] = pair) -> torch.Tensor:
                return one(pair[1], one(pair[0], y))

            y = offload_checkpoint(both, y, store=store) if ours else both(y)
        results.append(torch.autograd.grad(y.sum(), [leaf, *(p for b in blocks for p in b.parameters())]))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    del y
    assert store.held_bytes == 0


def test_a_tensor_saved_by_several_is_sent_once_and_its_views_keep_their_layout() -> None:
    store, x = simulated(), torch.randn(6, 8)
    views = [x, x.T, x[1:], x[:, 2:], x.detach(), x.expand(3, 6, 8), x[:, :1], torch.randn(4, 6)[::3, ::3]]
    packed = [store.pack(each) for each in views]
    for _ in range(3):
        store.pack(torch.randn(300))  # x leaves the device
    copies = [store.unpack(each) for each in packed]
    assert all(torch.equal(a, b) for a, b in zip(copies, views, strict=True))
    assert [each.stride() for each in copies[:6]] == [each.stride() for each in views[:6]]
    assert packed[0]._parked is packed[1]._parked is packed[4]._parked is packed[5]._parked
    storage = x.untyped_storage()
    del packed, copies, views
    x.add_(1)
    assert torch.equal(store.unpack(store.pack(x)), x) and storage.nbytes()


def test_memory_given_to_another_tensor_is_not_taken_for_the_first() -> None:
    store = simulated()
    for n in range(20):  # the allocator hands the same address out again and again
        x = torch.full((64,), float(n))
        packed = store.pack(x)
        kept = store.pack(torch.full((256,), 9.0))
        del x
        assert torch.equal(store.unpack(packed), torch.full((64,), float(n)))
        assert kept is not None


def test_changes_in_place_while_the_copy_runs_are_noticed_and_later_ones_do_no_harm() -> None:
    store, x = simulated(), torch.ones(64)
    packed = store.pack(x)
    x.add_(1)
    with pytest.raises(UnsupportedError, match="in-place"):
        store.unpack(packed)
    x = torch.ones(64)
    packed = store.pack(x)
    for _ in range(3):
        store.pack(torch.randn(64))
    x.add_(1)
    assert torch.equal(store.unpack(packed), torch.ones(64))


class Moment:
    """An event of a device whose time the test decides."""

    def __init__(self) -> None:
        self.at_ms: float | None = None

    def query(self) -> bool:
        return self.at_ms is not None

    def elapsed_time(self, end: Moment) -> float:
        assert self.at_ms is not None and end.at_ms is not None
        return end.at_ms - self.at_ms


def test_events_are_used_again_once_they_are_read_but_for_those_that_others_wait_for() -> None:
    clock, pairs = Clock(Moment), []
    for shared in (True, False, False):
        pairs.append((clock.event(), clock.event()))
        clock.add(*pairs[-1], shared=shared)
    for n, (begin, end) in enumerate(pairs[:2]):
        begin.at_ms, end.at_ms = 10.0 * n, 10.0 * n + 2 + n
    assert clock.read_ms() == clock.read_ms() == 2 + 3
    again = [clock.event() for _ in range(4)]
    known = [each for each in again if any(each in pair for pair in pairs)]
    assert sorted(map(id, known)) == sorted(map(id, (pairs[0][0], *pairs[1])))  # not the shared end, nor what is open
    pairs[2][0].at_ms, pairs[2][1].at_ms = 0.0, 7.0
    assert clock.read_ms() == 12


def test_the_clock_reads_by_itself() -> None:
    clock, made = Clock(Moment), []
    for _ in range(2000):
        begin, end = clock.event(), clock.event()
        made += [begin, end]
        begin.at_ms, end.at_ms = 0.0, 0.5
        clock.add(begin, end, shared=False)
    assert len({id(each) for each in made}) < 1200 and clock.read_ms() == 1000


def test_arena_holds_what_is_stored_and_is_used_again() -> None:
    arena = Arena()
    for sizes in ([4096] * 5, [4096 * 3] * 5, [512, 8192, 4096, 700, 12288]):
        slabs = [arena.take(size) for size in sizes]
        for n, slab in enumerate(slabs):
            slab.memory.fill_(n)
        assert all((slab.memory == n).all() and slab.memory.numel() == sizes[n] for n, slab in enumerate(slabs))
        for slab in random.Random(0).sample(slabs, len(slabs)):
            arena.give_back(slab)
        assert arena.used_bytes == 0
    assert arena.mapped_bytes == 5 * 4096 * 3
    arena.release()
    assert arena.mapped_bytes == 0


def test_arena_grows_in_the_background_and_keeps_to_its_limit() -> None:
    arena = Arena(limit_bytes=10 * 4096)
    arena.reserve(4096, 8)
    slabs = [arena.take(4096) for _ in range(8)]
    assert arena.mapped_bytes == 8 * 4096
    with pytest.raises(UnsupportedError, match="Raise the limit"):
        arena.reserve(4096, 3)
    with pytest.raises(UnsupportedError, match="Raise the limit"):
        arena.take(3 * 4096)
    arena.give_back(slabs.pop())
    arena.reserve(4096, 1)
    assert arena.mapped_bytes == 8 * 4096


def test_regions_are_unpinned_once_their_copies_are_over() -> None:
    copies = SimulatedCopies()
    store = HostStore(True, min_bytes=0, engine=lambda device: copies)
    packed = [store.pack(torch.randn(1024)) for _ in range(4)]
    for each in reversed(packed):
        store.unpack(each)
    assert len(copies.pinned) == 4
    del packed, each
    store.release()
    assert copies.pinned == {} and store.mapped_bytes == 0


def test_case_13_pinning_fails_with_one_warning_and_goes_on() -> None:
    copies = SimulatedCopies(eager=0.3, pinned_bytes=1000)
    store, blocks = HostStore(True, min_bytes=0, engine=lambda d: copies), [Block(8, seed) for seed in range(5)]
    x, labels = torch.randn(8, 8), torch.arange(8)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        got = step(blocks, x, labels, store)
    assert all(torch.equal(a, b) for a, b in zip(got, step(blocks, x, labels, None), strict=True))
    assert len(seen) == 1 and "pinned" in str(seen[0].message) and "WSL" in str(seen[0].message)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_background_thread_that_dies_leaves_nobody_waiting() -> None:
    def pin(memory: torch.Tensor) -> bool:
        raise RuntimeError("a sticky error of the driver")

    arena = Arena(pin)
    arena.reserve(4096, 3)
    with pytest.raises(RuntimeError, match="sticky"):
        arena.take(4096)  # waits for the thread, then meets the same error itself
    assert not arena._reserved
