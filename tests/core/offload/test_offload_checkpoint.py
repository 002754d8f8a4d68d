"""Checkpointing with host offload: same numbers, and an account of the bytes that comes back to zero."""

from __future__ import annotations

import contextlib

import pytest
import torch

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload import HostStore, offload_checkpoint


def _block(seed: int = 0, p: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Dropout(p), torch.nn.Linear(64, 32))


def _run(block: torch.nn.Module, x: torch.Tensor, checkpointed: bool, store: HostStore | None = None):  # type: ignore[no-untyped-def]
    torch.manual_seed(7)
    x = x.detach().requires_grad_()
    y = offload_checkpoint(block, x, store=store) if checkpointed else block(x)
    return y, torch.autograd.grad(y.square().sum(), [x, *block.parameters()]), torch.get_rng_state()


@pytest.mark.parametrize("offload", ["auto", True, False])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_bit_equal_to_no_checkpointing(offload: str | bool, p: float) -> None:
    block, x = _block(p=p), torch.randn(5, 32)
    plain = _run(block, x, False)
    ours = _run(block, x, True, HostStore(offload, min_bytes=0))  # type: ignore[arg-type]
    assert torch.equal(plain[0], ours[0]) and torch.equal(plain[2], ours[2])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], ours[1], strict=True))


def test_strided_and_integer_inputs_come_back_as_they_were() -> None:
    store, base = HostStore(True, min_bytes=0), torch.arange(24.0).view(4, 6)
    for tensor in (base, base.T, base[1:, ::2], torch.arange(5), torch.tensor(True)):
        back = store.unpack(store.pack(tensor))
        assert torch.equal(back, tensor) and back.dtype == tensor.dtype
    assert store.unpack(store.pack(base.T)).stride() == base.T.stride()


def test_parameters_are_not_copied() -> None:
    store, weight = HostStore(True, min_bytes=0), torch.nn.Parameter(torch.ones(4))
    assert store.pack(weight) is weight and store.held_bytes == 0


def test_only_the_input_is_held_and_it_is_given_back() -> None:
    store, block, x = HostStore(min_bytes=0), _block(), torch.randn(5, 32, requires_grad=True)
    y = offload_checkpoint(block, x, store=store)
    assert store.held_bytes == x.numel() * 4
    y.sum().backward()
    del y
    assert store.held_bytes == 0 and store.peak_bytes == x.numel() * 4


def test_several_forwards_before_backward_and_an_exception_in_between() -> None:
    store, block = HostStore(True, min_bytes=0), _block()
    outs = [offload_checkpoint(block, torch.randn(5, 32, requires_grad=True), store=store) for _ in range(3)]
    with pytest.raises(ZeroDivisionError):
        outs[0].register_hook(lambda g: 1 / 0)
        outs[0].sum().backward()
    for out in outs[1:]:
        out.sum().backward()
    del outs, out
    assert store.held_bytes == 0


def test_without_gradient_nothing_is_kept() -> None:
    store = HostStore(True, min_bytes=0)
    with torch.no_grad():
        offload_checkpoint(_block(), torch.randn(5, 32), store=store)
    assert store.total_bytes == 0


def test_inputs_changed_in_place_are_noticed() -> None:
    x = torch.randn(8, 8)
    y = offload_checkpoint(torch.nn.Linear(8, 8), x, store=HostStore(min_bytes=0))
    x.add_(1)
    with pytest.raises(UnsupportedError, match="in-place"):
        y.sum().backward()


def test_reentrant_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="use_reentrant"):
        offload_checkpoint(_block(), torch.randn(5, 32), use_reentrant=True)


def _draws_later(device: str, backwards: int = 2, **kwargs: object) -> None:
    """Two regions, dropout in the first; gradients so often, with draws in between, as without a checkpoint."""
    torch.manual_seed(3)
    first = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5)).to(device)
    second, x = torch.nn.Linear(16, 16).to(device), torch.randn(4, 16, device=device, requires_grad=True)
    found = []
    for run in (lambda function, x: function(x), lambda function, x: offload_checkpoint(function, x, **kwargs)):
        torch.manual_seed(7)
        y = run(second, run(first, x)).square().sum()
        grads = []
        for _ in range(backwards):
            torch.rand(3), torch.rand(3, device=device)
            grads += torch.autograd.grad(y, [x, *first.parameters(), *second.parameters()], retain_graph=True)
        found.append([*grads, torch.rand(3), torch.rand(3, device=device)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_random_numbers_are_the_same_in_every_recompute_and_afterwards(device: str) -> None:
    _draws_later(device)
    entered = []

    class Noting(contextlib.AbstractContextManager[None]):
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            entered.append(self.name)

        def __exit__(self, *error: object) -> None:
            entered.append(f"{self.name} over")

    _draws_later(device, context_fn=lambda: (Noting("forward"), Noting("recompute")))
    names = ["forward", "forward over"] * 2 + ["recompute", "recompute over"] * 4
    assert entered == names


def test_torchs_debugging_of_checkpoints_still_works() -> None:
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        _draws_later("cpu", backwards=1)  # torch's own can't be run again then
    _draws_later("cpu", backwards=1, debug=True)
