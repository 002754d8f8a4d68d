"""Chunked linear cross entropy against torch's own, and lazy logits."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from transformers.trainer_pt_utils import LabelSmoother

from unsloth_plugins.core.errors import ConfigError, ShapeError
from unsloth_plugins.core.loss import LazyLogits, linear_cross_entropy
from unsloth_plugins.core.loss.lazy import Chunks
from unsloth_plugins.core.loss.op import head_cross_entropy
from unsloth_plugins.core.loss.reference import chunk_tokens

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, on_cuda])]
N, H, V = 37, 16, 5000  # 1 MiB holds 17 tokens of logits: three chunks, the last one short


def _inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    labels = torch.randint(0, V, (N,))
    labels[::5] = -100
    return (
        torch.randn(N, H, dtype=dtype, requires_grad=True),
        torch.randn(V, H, dtype=dtype, requires_grad=True),
        torch.randn(V, dtype=dtype, requires_grad=True),
        labels,
    )


def test_several_chunks_are_exercised() -> None:
    assert 1 < chunk_tokens(V, 1) < N


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num_items", [None, 50])
def test_equals_torch(smoothing: float, softcap: float | None, num_items: int | None) -> None:
    hidden, weight, bias, labels = _inputs()

    def cap(z: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(z / softcap)

    transform = None if softcap is None else cap
    ours = linear_cross_entropy(
        hidden,
        weight,
        labels,
        bias_V=bias,
        num_items=num_items,
        transform=transform,
        label_smoothing=smoothing,
        chunk_mib=1,
    )
    logits = F.linear(hidden, weight, bias)
    logits = logits if transform is None else transform(logits)
    truth = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    truth = truth / (num_items or (labels != -100).sum())
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(3 * ours, (hidden, weight, bias)),
        torch.autograd.grad(3 * truth, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


def test_gradcheck() -> None:
    torch.manual_seed(1)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 6, -100, 2, 3])
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels), (hidden, weight))


@pytest.mark.parametrize("wanted", [(True, False), (False, True), (False, False)])
def test_only_wanted_gradients(wanted: tuple[bool, bool]) -> None:
    hidden, weight, _, labels = _inputs(torch.float32)
    hidden, weight = (t.detach().requires_grad_(w) for t, w in zip((hidden, weight), wanted, strict=True))
    loss = linear_cross_entropy(hidden, weight, labels, chunk_mib=1)
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
    assert (hidden.grad is not None, weight.grad is not None) == wanted


def test_nothing_to_learn_is_zero_not_nan() -> None:
    hidden, weight, _, labels = _inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    loss.backward()
    assert loss.item() == 0 and not hidden.grad.any() and not weight.grad.any()


def test_bf16_loss_is_float32_and_gradients_are_bf16() -> None:
    hidden, weight, _, labels = _inputs(torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, labels, chunk_mib=1)
    loss.backward()
    assert loss.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    truth = F.cross_entropy(F.linear(hidden, weight).float(), labels)
    torch.testing.assert_close(loss, truth)


@pytest.mark.parametrize("loss_scale", [1024.0, 65536.0])
def test_fp16_gradients_survive_the_scaler_and_a_large_token_count(loss_scale: float) -> None:
    """1 / tokens underflows and the scaler's 65,536 overflows in float16: neither may be applied there alone."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(600, 64), torch.randn(300, 64) * 0.3
    labels = torch.randint(0, 300, (600,))
    results = []
    for dtype in (torch.float32, torch.float16):
        h, w = hidden.clone().to(dtype).requires_grad_(), weight.clone().to(dtype).requires_grad_()
        loss = linear_cross_entropy(h, w, labels, num_items=131_072, chunk_mib=1)
        results.append([g.float() for g in torch.autograd.grad(loss * loss_scale, (h, w))])
    for want, got in zip(*results, strict=True):
        assert got.isfinite().all() and (got - want).norm() < 5e-3 * want.norm()


def test_label_out_of_range_names_the_label() -> None:
    hidden, weight, _, labels = _inputs()
    labels[3] = V
    with pytest.raises(ShapeError, match=str(V)):
        linear_cross_entropy(hidden, weight, labels)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("num_items", [None, 50])
def test_any_head_equals_torch(smoothing: float, softcap: float | None, num_items: int | None) -> None:
    hidden, weight, bias, labels = _inputs()

    def cap(z: torch.Tensor) -> torch.Tensor:
        return z if softcap is None else softcap * torch.tanh(z / softcap)

    options: dict[str, Any] = dict(num_items=num_items, transform=cap, label_smoothing=smoothing, chunk_mib=1)
    ours = head_cross_entropy(hidden, lambda x: F.linear(x, weight, bias), V, labels, **options)
    logits = cap(F.linear(hidden, weight, bias))
    truth = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction="sum")
    truth = truth / (num_items or (labels != -100).sum())
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    for got, want in zip(
        torch.autograd.grad(3 * ours, (hidden, weight, bias)),
        torch.autograd.grad(3 * truth, (hidden, weight, bias)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("label", [V, -1])
def test_any_head_names_a_label_out_of_range_and_learns_nothing_from_none(label: int) -> None:
    hidden, weight, _, labels = _inputs(torch.float32)
    nothing = head_cross_entropy(hidden, lambda x: F.linear(x, weight), V, torch.full_like(labels, -100), chunk_mib=1)
    nothing.backward()
    assert nothing.item() == 0 and not hidden.grad.any() and not weight.grad.any()
    labels[3] = label
    with pytest.raises(ShapeError, match=rf"labels in \[0, {V}\).*got {label}\."):
        head_cross_entropy(hidden, lambda x: F.linear(x, weight), V, labels)


def test_a_smoothing_out_of_range_is_refused() -> None:
    hidden, weight, _, labels = _inputs()
    for run in (
        lambda: linear_cross_entropy(hidden, weight, labels, label_smoothing=1.0),
        lambda: head_cross_entropy(hidden, lambda x: F.linear(x, weight), V, labels, label_smoothing=-0.1),
    ):
        with pytest.raises(ConfigError, match=r"label_smoothing in \[0, 1\)"):
            run()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["linear", "any head"])
def test_case_30_all_that_is_alive_of_the_logits_fits_in_what_was_allowed(kind: str, dtype: torch.dtype) -> None:
    """Not only the logits: their float32 copy and their gradient too, whatever the number of tokens."""
    vocab, mib = 20_000, 2
    for tokens in (64, 256):
        torch.manual_seed(0)
        hidden, weight = torch.randn(tokens, H).to(dtype).requires_grad_(), torch.randn(vocab, H).to(dtype)
        labels = torch.randint(0, vocab, (tokens,))
        with LiveBytes(hidden, weight, labels) as seen:
            if kind == "linear":
                loss = linear_cross_entropy(hidden, weight, labels, chunk_mib=mib)
            else:
                loss = head_cross_entropy(
                    hidden, functools.partial(F.linear, weight=weight), vocab, labels, chunk_mib=mib
                )
            loss.backward()
        gradients = 3 * hidden.untyped_storage().nbytes()
        assert seen.peak <= 1.1 * mib * 2**20 + gradients < 12 * tokens * vocab


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_backward_multiplies_in_place_unless_the_graph_is_kept(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H).to(dtype).requires_grad_(), torch.randn(V, H).to(dtype)
    loss = linear_cross_entropy(hidden, weight, torch.randint(0, V, (N,)), chunk_mib=1)
    saved = loss.grad_fn.saved_tensors[0].data_ptr()  # type: ignore[union-attr]
    grads = [torch.autograd.grad(loss, hidden, torch.tensor(3.0), retain_graph=keep)[0] for keep in (True, True, False)]
    assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2]) and grads[0].any()
    assert [each.data_ptr() == saved for each in grads] == [False, False, True]


class TestLazyLogits:
    def _lazy(self) -> tuple[LazyLogits, torch.Tensor, torch.nn.Linear, list[int]]:
        torch.manual_seed(0)
        head, hidden, calls = torch.nn.Linear(4, 9), torch.randn(2, 3, 4, requires_grad=True), []

        def run(x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return head(x)

        return LazyLogits(hidden, run, 9, torch.float32), head(hidden), head, calls

    def test_metadata_computes_nothing(self) -> None:
        lazy, real, _, calls = self._lazy()
        assert isinstance(lazy, torch.Tensor)
        assert (lazy.shape, lazy.dtype, lazy.device, lazy.ndim) == (real.shape, real.dtype, real.device, 3)
        assert lazy.size(-1) == 9 and len(lazy) == 2 and not calls

    def test_reading_computes_once_with_gradient(self) -> None:
        lazy, real, head, calls = self._lazy()
        assert torch.equal(lazy.argmax(-1), real.argmax(-1))
        assert torch.equal(lazy[..., :-1, :], real[..., :-1, :])
        assert len(calls) == 1
        lazy.sum().backward()
        assert head.weight.grad is not None

    @pytest.mark.parametrize(
        "read",
        [
            lambda z: z.detach().numpy(),
            lambda z: torch.cat([z, z]),
            lambda z: torch.softmax(z, -1),
            lambda z: (z + 1).tolist(),
            lambda z: z.cpu().double(),
            lambda z: copy.deepcopy(z.detach()),
        ],
    )
    def test_every_way_of_reading(self, read) -> None:  # type: ignore[no-untyped-def]
        lazy, real, _, _ = self._lazy()
        got, want = read(lazy), read(real)
        assert type(got) is type(want)
        assert (got == want).all() if hasattr(got, "shape") else got == want

    def test_can_be_saved(self) -> None:
        lazy, real, _, _ = self._lazy()
        file = io.BytesIO()
        torch.save(lazy.detach(), file)
        file.seek(0)
        assert torch.equal(torch.load(file), real)

    def test_softcap_and_scale_stay_lazy(self) -> None:
        lazy, real, _, calls = self._lazy()
        capped = torch.tanh((lazy * 2.0).float() / 5.0) * 5.0
        assert isinstance(capped, LazyLogits) and not calls
        torch.testing.assert_close(capped + 0, torch.tanh(real * 2 / 5) * 5)


class TestLazyLogProbs:
    """transformers' smoother on lazy logits: two rows, chunks that end in the middle of the first."""

    def _both(self, dtype: torch.dtype, tokens: int = N, vocab: int = V, device: str = "cpu") -> tuple[Any, ...]:
        torch.manual_seed(0)
        hidden = torch.randn(2, tokens, H).to(device, dtype).requires_grad_()
        weight = torch.randn(vocab, H).to(device, dtype).requires_grad_()
        labels = torch.randint(0, vocab, (2, tokens)).to(device)
        labels[0, ::3] = -100
        lazy = LazyLogits(hidden, lambda x: F.linear(x, weight), vocab, dtype, chunks=Chunks(1))
        return hidden, weight, labels, lazy * 0.5, lambda: F.linear(hidden, weight) * 0.5

    @pytest.mark.parametrize("device", DEVICES)
    @pytest.mark.parametrize("num_items", [None, 50, torch.tensor(50)])
    @pytest.mark.parametrize("shift", [True, False])
    def test_transformers_label_smoother_reads_them_in_chunks(self, shift: bool, num_items: Any, device: str) -> None:
        hidden, weight, labels, lazy, real = self._both(torch.float64, device=device)
        results = []
        for logits in (lazy, real()):
            loss = LabelSmoother(0.1)({"logits": logits}, labels, shift_labels=shift, num_items_in_batch=num_items)
            results.append((loss, *torch.autograd.grad(3 * loss, (hidden, weight))))
        (loss, *grads), (want, *wanted) = results
        torch.testing.assert_close(loss, want, rtol=2e-7, atol=0)  # the smoother rounds its sums to float32
        torch.testing.assert_close(grads, wanted, rtol=1e-11, atol=1e-12)
        assert lazy._real is None and lazy.chunks.losses == 1

    def test_sums_alone_without_gradients_and_after_them(self) -> None:
        _, _, labels, lazy, real = self._both(torch.float64)
        want = real().log_softmax(-1)
        probs = torch.log_softmax(lazy, dim=-1)
        with torch.no_grad():
            assert not probs.sum(dim=-1).requires_grad
        torch.testing.assert_close(probs.sum(dim=-1), want.sum(-1), rtol=1e-11, atol=1e-12)
        assert probs.sum(dim=2, keepdim=True, dtype=torch.float32).dtype == torch.float32
        torch.testing.assert_close(probs.exp(), want.exp())  # read in another way, they are real
        lone = labels[:, :1].clamp(min=0)[..., None]
        torch.testing.assert_close(probs.gather(-1, lone), want.gather(-1, lone))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
    def test_case_30_for_label_smoothing(self, dtype: torch.dtype) -> None:
        """As above: not only the logits fit in what was allowed."""
        tokens, vocab = 128, 20_000
        hidden, weight, labels, lazy, _ = self._both(dtype, tokens, vocab)
        with LiveBytes(hidden, weight, labels) as seen:
            LabelSmoother(0.1)({"logits": lazy}, labels, shift_labels=True).backward()
        gradients = 2 * weight.untyped_storage().nbytes() + 3 * hidden.untyped_storage().nbytes() + 200 * labels.numel()
        assert seen.peak <= 1.4 * 2**20 + gradients < 2 * tokens * vocab * dtype.itemsize
