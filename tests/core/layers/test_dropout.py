"""Dropout from a seed: the plain form on the CPU, the kernel in triton's interpreter and on CUDA.

The interpreter is chosen by the environment when triton is imported, so there this file runs itself in a process.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from unsloth_plugins.core.layers import dropout

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
on_cuda = pytest.mark.skipif(INTERPRETED or not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]  # "cpu": the kernel where it is interpreted


@pytest.fixture(autouse=True)
def kernel_where_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    if INTERPRETED:
        monkeypatch.setattr(dropout, "why_reference", lambda device, dtype: None)


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "10 passed" in done.stdout, done.stdout[-3000:]


def mask(device: str, seed: int, shape: tuple[int, int] = (9, 1030), p: float = 0.3, first: int = 0) -> torch.Tensor:
    """Whether each element is kept; kept ones have the right value."""
    x = torch.ones(shape, device=device)
    got = dropout.dropped(x, p, seed, first=first)
    kept = got != 0
    torch.testing.assert_close(got[kept], torch.full_like(got[kept], 1 / (1 - p)))
    return kept


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [0.05, 0.3, 0.75])
def test_a_mask_has_its_share_of_zeros_everywhere_and_no_pattern(device: str, p: float) -> None:
    """Within some standard deviations: of all, of columns and rows, of pairs at distances of the kernel's layout."""
    torch.manual_seed(0)
    seeds = dropout.draw_seeds(2)
    one, two = (mask(device, seed, (100, 1100), p).double().cpu() for seed in seeds)
    room = (p * (1 - p)) ** 0.5
    assert abs(one.mean() - (1 - p)) < 5 * room / one.numel() ** 0.5
    for dim in (0, 1):
        assert ((one.mean(dim) - (1 - p)).abs() < 7 * room / one.shape[dim] ** 0.5).all()
    pairs = [(one, two), (one[1:], one[:-1]), *((one[:, d:], one[:, :-d]) for d in (1, 4, 256, 512, 1024))]
    for a, b in pairs:
        both = ((a - 1 + p) * (b - 1 + p)).mean() / room**2
        assert abs(both) < 5 / a.numel() ** 0.5


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_seed_gives_the_same_mask_and_others_do_not(device: str) -> None:
    (seed,) = dropout.draw_seeds(1)
    assert torch.equal(mask(device, seed), mask(device, seed))
    assert not torch.equal(mask(device, seed), mask(device, seed + 1))
    assert torch.equal(mask(device, seed, first=7), mask(device, seed + 7))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1030)])
def test_rows_with_a_stride_and_a_sum_that_is_rounded_once(
    device: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    draw = torch.Generator().manual_seed(0)
    wide = torch.randn((shape[0], 2 * shape[1]), generator=draw).to(device, dtype)
    x, (seed,) = wide[:, : shape[1]], dropout.draw_seeds(1)
    kept = mask(device, seed, shape)
    want = (x.float() / 0.7).where(kept, 0.0)
    assert torch.equal(dropout.dropped(x, 0.3, seed) != 0, kept & (x != 0))
    torch.testing.assert_close(dropout.dropped(x, 0.3, seed), want.to(dtype))
    before = wide[:, shape[1] :].clone()
    onto = wide[:, shape[1] :]
    assert dropout.dropped(x, 0.3, seed, onto_MI=onto) is onto
    torch.testing.assert_close(onto, (before.float() + want).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_all_dropped_and_nothing_there(device: str) -> None:
    (seed,) = dropout.draw_seeds(1)
    assert not dropout.dropped(torch.ones(5, 33, device=device), 1.0, seed).any()
    assert dropout.dropped(torch.ones(0, 33, device=device), 0.5, seed).shape == (0, 33)


@pytest.mark.gpu
@on_cuda
def test_bfloat16_on_cuda_takes_the_mask_of_float32() -> None:
    x, (seed,) = torch.randn(300, 4096, device="cuda"), dropout.draw_seeds(1)
    want = dropout.dropped(x, 0.05, seed)
    torch.testing.assert_close(dropout.dropped(x.bfloat16(), 0.05, seed).float(), want, rtol=2e-2, atol=2e-2)


def test_seeds_are_torchs_so_that_checkpoints_bring_them_back() -> None:
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = dropout.draw_seeds(3)
    torch.set_rng_state(state)
    assert dropout.draw_seeds(3) == first and len({*first}) == 3
    assert all(1 << 32 < seed < 1 << 62 for seed in first)
