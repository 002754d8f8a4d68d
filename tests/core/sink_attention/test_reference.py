"""Sink attention against finite differences, a dense second formulation, and its own promises."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from attention_cases import run_compiled
from torch.utils._python_dispatch import TorchDispatchMode

from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.sink_attention import (
    documents_from_cu_seqlens,
    documents_from_position_ids,
    sink_attention,
)


def make(batch, queries, keys, heads, kv_heads, size, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    return (
        rand(batch, queries, heads, size),
        rand(batch, keys, kv_heads, size),
        rand(batch, keys, kv_heads, size),
        rand(heads),
    )


def dense(q, k, v, sink, *, window=None, documents_BS=None, key_mask_BS=None, softcap=None):
    """Softmax over the keys and one sink column, the column then dropped; a T x S matrix and repeated keys."""
    groups = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    queries, keys = q.shape[1], k.shape[1]
    i = torch.arange(keys - queries, keys)[:, None]
    j = torch.arange(keys)[None, :]
    allowed = (j <= i)[None]
    if window is not None:
        allowed = allowed & (j > i - window)
    if documents_BS is not None:
        allowed = allowed & (documents_BS[:, keys - queries :, None] == documents_BS[:, None, :])
    if key_mask_BS is not None:
        allowed = allowed & key_mask_BS[:, None, :]
    logits = logits.masked_fill(~allowed[:, None], float("-inf"))
    column = sink[None, :, None, None].expand(q.shape[0], -1, queries, 1)
    logits = torch.cat([logits, column], dim=-1)
    weights = torch.softmax(logits, dim=-1)[..., :-1]
    return torch.einsum("bhts,bshd->bthd", weights, v), torch.logsumexp(logits, dim=-1)


PADDING = torch.tensor([[True] * 7, [False, False, True, True, True, True, False]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 2, 2]])
VARIANTS = {
    "full": {},
    "window": {"window": 3},
    "documents": {"documents_BS": DOCUMENTS},
    "padding": {"key_mask_BS": PADDING},
    "softcap": {"softcap": 0.7},
    "everything": {"window": 4, "documents_BS": DOCUMENTS, "key_mask_BS": PADDING, "softcap": 1.3},
}


@pytest.mark.parametrize(("name", "queries"), [*((name, 7) for name in VARIANTS), ("everything", 3)])
def test_gradients_match_finite_differences_with_and_without_lse(name, queries):
    inputs = make(2, queries, 7, 4, 2, 2, torch.float64)
    options = dict(VARIANTS[name], block_size=3)
    check = torch.autograd.gradcheck
    # The full Jacobian of both outputs, then random projections for the paths where one gradient is absent.
    assert check(lambda *x: sink_attention(*x, return_lse=True, **options), inputs)
    assert check(lambda *x: sink_attention(*x, **options), inputs, fast_mode=True)
    assert check(lambda *x: sink_attention(*x, return_lse=True, **options)[1], inputs, fast_mode=True)


def test_gradients_match_finite_differences_without_a_sink():
    q, k, v, _ = make(2, 7, 7, 4, 2, 2, torch.float64)
    assert torch.autograd.gradcheck(lambda *x: sink_attention(*x, return_lse=True, block_size=3), (q, k, v))


@pytest.mark.parametrize("length", [1, 7, 127, 128, 129, 1025])
@pytest.mark.parametrize("options", [{}, {"window": 8}, {"window": 128}, {"softcap": 5.0}], ids=str)
def test_case_29_any_length_agrees_with_the_dense_formulation(length, options):
    inputs = make(2, length, length, 4, 2, 16)
    o, lse = sink_attention(*inputs, block_size=64, return_lse=True, **options)
    expected_o, expected_lse = dense(*inputs, **options)
    torch.testing.assert_close(o, expected_o, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(lse, expected_lse, atol=2e-6, rtol=1e-5)
    weight_o, weight_lse = torch.randn_like(o), torch.randn_like(lse)
    got = torch.autograd.grad((o * weight_o).sum() + (lse * weight_lse).sum(), inputs)
    want = torch.autograd.grad((expected_o * weight_o).sum() + (expected_lse * weight_lse).sum(), inputs)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo's, about caches that it does not see
def test_case_29_torch_compile_changes_nothing():
    run_compiled("cpu", "eager", dynamic=False, lengths=(1, 7, 33))


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("height", [-30.0, 0.0, 30.0])
def test_case_18_sinks_of_any_height_and_their_gradients(height, window):
    q, k, v, _ = make(2, 21, 21, 4, 2, 16)
    inputs = (q, k, v, torch.full((4,), height, requires_grad=True))
    o = sink_attention(*inputs, window=window, block_size=8)
    expected, _ = dense(*inputs, window=window)
    torch.testing.assert_close(o, expected, atol=1e-5, rtol=1e-5)
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    got, want = (torch.autograd.grad((each * weight).sum(), inputs) for each in (o, expected))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert got[3].abs().max() > 0


@pytest.mark.parametrize("options", [{}, {"window": 5}], ids=str)
def test_block_size_changes_nothing_but_rounding(options):
    inputs = make(2, 37, 37, 4, 2, 8, torch.float64)
    results = []
    for block_size in (1, 5, 37, 256):
        o = sink_attention(*inputs, block_size=block_size, **options)
        results.append((o, *torch.autograd.grad(o.square().sum(), inputs)))
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("with_sink", [True, False])
def test_fully_masked_rows_give_zero_and_no_nan(with_sink):
    q, k, v, sink = make(2, 6, 6, 4, 2, 8)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :3] = False
    mask[1] = False
    o, lse = sink_attention(q, k, v, sink if with_sink else None, key_mask_BS=mask, return_lse=True, block_size=4)
    empty = torch.zeros(2, 6, dtype=torch.bool)
    empty[0, :3] = True
    empty[1] = True
    assert (o[empty] == 0).all() and o.isfinite().all()
    expected = sink.detach() if with_sink else torch.full((4,), float("-inf"))
    assert (lse.transpose(1, 2)[empty] == expected).all()
    wanted = (q, k, v, sink) if with_sink else (q, k, v)
    loss = o.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
    grads = torch.autograd.grad(loss, wanted)
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][empty] == 0).all()
    assert (grads[1][~mask] == 0).all() and (grads[2][~mask] == 0).all()


def test_a_sink_of_minus_infinity_is_no_sink():
    q, k, v, _ = make(1, 9, 9, 4, 2, 8, torch.float64)
    sink = torch.full((4,), float("-inf"), dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, :2] = False
    o = sink_attention(q, k, v, sink, key_mask_BS=mask)
    torch.testing.assert_close(o, sink_attention(q, k, v, key_mask_BS=mask), atol=0, rtol=0)
    (gradient,) = torch.autograd.grad(o.sum(), sink)
    assert (gradient == 0).all()


@pytest.mark.parametrize("options", [{}, {"window": 4}], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_fewer_queries_than_keys_are_the_last_rows(queries, options):
    q, k, v, sink = make(2, 20, 20, 4, 2, 8, torch.float64)
    whole = sink_attention(q, k, v, sink, **options)
    tail = sink_attention(q[:, -queries:], k, v, sink, **options)
    torch.testing.assert_close(tail, whole[:, -queries:], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("window", [None, 3])
def test_packed_documents_equal_the_documents_alone(window):
    q, k, v, sink = make(1, 12, 12, 4, 2, 8, torch.float64)
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 5, 6]])
    packed = sink_attention(q, k, v, sink, window=window, documents_BS=documents_from_position_ids(positions))
    for part in (slice(0, 5), slice(5, 12)):
        alone = sink_attention(q[:, part], k[:, part], v[:, part], sink, window=window)
        torch.testing.assert_close(packed[:, part], alone, atol=1e-13, rtol=1e-13)


def test_window_counts_the_current_token():
    q, k, v, sink = make(1, 20, 20, 1, 1, 8, torch.float64)
    o = sink_attention(q, k, v, sink, window=8, block_size=6)
    for i in range(20):
        (gradient,) = torch.autograd.grad(o[0, i].sum(), v, retain_graph=True)
        seen = gradient[0].abs().sum(dim=(1, 2)).nonzero().flatten().tolist()
        assert seen == list(range(max(0, i - 7), i + 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_to_the_truth_and_keeps_lse_in_float32(dtype):
    inputs = make(2, 65, 65, 4, 2, 16, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    o, lse = sink_attention(*inputs, window=9, block_size=32, return_lse=True)
    true_o, true_lse = sink_attention(*exact, window=9, return_lse=True)
    assert o.dtype == dtype and lse.dtype == torch.float32
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(o.double(), true_o, atol=step, rtol=step)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-5, rtol=1e-5)
    weight = torch.randn_like(o)
    grads = torch.autograd.grad((o * weight).sum(), inputs)
    true_grads = torch.autograd.grad((true_o * weight.double()).sum(), exact)
    for a, b in zip(grads, true_grads, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, atol=4 * step, rtol=4 * step)


def test_autocast_does_not_lower_the_precision():
    inputs = make(1, 33, 33, 4, 2, 16)
    plain = sink_attention(*inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = sink_attention(*inputs)
        grads = torch.autograd.grad(inside.square().sum(), inputs)
    assert torch.equal(plain, inside)
    for a, b in zip(grads, torch.autograd.grad(plain.square().sum(), inputs), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 2), (1, 3)], ids=str)
def test_only_the_requested_gradients_are_computed(wanted):
    inputs = make(1, 11, 11, 4, 2, 8)
    full = torch.autograd.grad(sink_attention(*inputs, block_size=4).square().sum(), inputs)
    some = [x.detach().requires_grad_(n in wanted) for n, x in enumerate(inputs)]
    sink_attention(*some, block_size=4).square().sum().backward()
    for n, x in enumerate(some):
        assert torch.equal(x.grad, full[n]) if n in wanted else x.grad is None


def test_a_second_derivative_raises_instead_of_being_wrong():
    q, k, v, sink = make(1, 4, 4, 2, 1, 4)
    (gradient,) = torch.autograd.grad(sink_attention(q, k, v, sink).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


class LargestResult(TorchDispatchMode):
    """Record the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.numel())
        return result


def largest_result(function, length, trained=True, **options):
    inputs = make(1, length, length, 2, 1, 8)
    with LargestResult() as largest, torch.set_grad_enabled(trained):
        out = function(*inputs, **options).sum()
        if trained:
            out.backward()
    return largest.numel


@pytest.mark.parametrize("trained", [True, False])
def test_memory_is_linear_in_the_length(trained):
    def last_dense(*inputs):
        return dense(*inputs)[0]

    for function, least, most in ((sink_attention, 0, 2.3), (last_dense, 3.5, 9)):  # the second: this test can fail
        assert least < largest_result(function, 2048, trained) / largest_result(function, 1024, trained) < most


def test_a_window_visits_only_its_band():
    small = largest_result(sink_attention, 1024, window=16, block_size=64)
    assert small <= max(2 * 64 * (64 + 16), 1024 * 2 * 8)
    assert largest_result(sink_attention, 2048, window=16, block_size=64) <= 2 * small


def test_documents_from_position_ids():
    got = documents_from_position_ids(torch.tensor([[0, 1, 2, 0, 1], [0, 0, 0, 1, 2], [3, 4, 5, 6, 7]]))
    assert got.tolist() == [[0, 0, 0, 1, 1], [0, 1, 2, 2, 2], [0, 0, 0, 0, 0]]


def test_documents_from_cu_seqlens_with_an_empty_document_and_a_tail():
    got = documents_from_cu_seqlens(torch.tensor([0, 2, 2, 5], dtype=torch.int32), 7)
    assert got.tolist() == [[0, 0, 2, 2, 2, 3, 3]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, s: ((q[0], k, v, s), {}), "4 dimensions"),
        (lambda q, k, v, s: ((q, k, v[:, :-1], s), {}), "k and v of one shape"),
        (lambda q, k, v, s: ((q[..., :-1], k, v, s), {}), "one head size"),
        (lambda q, k, v, s: ((q[:, :, :3], k, v, s), {}), "divides"),
        (lambda q, k, v, s: ((q, k[:, :-1], v[:, :-1], s), {}), "no more queries than keys"),
        (lambda q, k, v, s: ((q, k, v.double(), s), {}), "one floating dtype"),
        (lambda q, k, v, s: ((q, k, v, s[:2]), {}), r"sink_H of shape \[4\]"),
        (lambda q, k, v, s: ((q, k, v, s), {"window": 0}), "window"),
        (lambda q, k, v, s: ((q, k, v, s), {"window": True}), "window"),
        (lambda q, k, v, s: ((q, k, v, s), {"softcap": 0.0}), "softcap"),
        (lambda q, k, v, s: ((q, k, v, s), {"block_size": 0}), "block_size"),
        (lambda q, k, v, s: ((q, k, v, s), {"documents_BS": torch.zeros(1, 6)}), "documents_BS"),
        (lambda q, k, v, s: ((q, k, v, s), {"key_mask_BS": torch.ones(2, 5)}), "key_mask_BS"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    arguments, options = change(*make(2, 6, 6, 4, 2, 8))
    with pytest.raises(ShapeError, match=message):
        sink_attention(*arguments, **options)


def test_masks_reject_wrong_ranks():
    with pytest.raises(ShapeError, match="position_ids"):
        documents_from_position_ids(torch.arange(3))
    with pytest.raises(ShapeError, match="cu_seqlens"):
        documents_from_cu_seqlens(torch.zeros(1, 2), 3)


def test_import_leaves_transformers_alone():
    code = (
        "import sys, unsloth_plugins.core.sink_attention, unsloth_plugins.core.sink_attention.transformers_backend;"
        "sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
