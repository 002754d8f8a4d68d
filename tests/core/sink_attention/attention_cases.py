"""Inputs on which the Triton kernels are compared with the float64 reference, on any device.

Run as a script, it runs the named cases (all by default) in the interpreter and prints a line for each that passed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tolerances import assert_no_worse_than_eager  # noqa: E402

from unsloth_plugins.core.sink_attention import sink_attention  # noqa: E402


@dataclass(frozen=True)
class Case:
    """B, T, S, H, K, D, then what is special. Documents are lengths per row, padding is (left, right, hole)."""

    shape: tuple[int, int, int, int, int, int]
    sink: bool = True
    first_sink: float | None = None
    every_sink: float | None = None
    documents: tuple[tuple[int, ...], ...] | None = None
    padding: tuple[tuple[int, int, int | None], ...] | None = None
    head_groups: int = 1
    layout: str = "bthd"
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "one token": Case((1, 1, 1, 2, 1, 16)),
    "length 7": Case((2, 7, 7, 2, 2, 16)),
    "length 127": Case((1, 127, 127, 2, 1, 16)),
    "length 128": Case((1, 128, 128, 2, 1, 32)),
    "length 129": Case((1, 129, 129, 2, 1, 16)),
    "no sink": Case((1, 129, 129, 2, 1, 16), sink=False),
    "head size 24": Case((1, 70, 70, 2, 1, 24)),
    "head size 80": Case((1, 40, 40, 2, 1, 80)),
    "head size 256": Case((1, 40, 40, 1, 1, 256)),
    "groups of 3": Case((2, 33, 33, 6, 2, 16)),
    "heads that fill no round of the schedule": Case((1, 40, 40, 10, 5, 16)),
    "heads first": Case((2, 33, 33, 4, 2, 16), layout="bhtd"),
    "window 1": Case((1, 40, 40, 2, 1, 16), options={"window": 1}),
    "window 8": Case((1, 129, 129, 2, 1, 16), options={"window": 8}),
    "window 128": Case((1, 300, 300, 2, 1, 16), options={"window": 128}),
    "window 520": Case((1, 600, 600, 1, 1, 16), options={"window": 520}),
    "window beyond the row": Case((1, 60, 60, 2, 1, 16), options={"window": 1000}),
    "softcap": Case((1, 100, 100, 2, 1, 16), options={"softcap": 0.7}),
    "documents": Case((2, 210, 210, 2, 1, 16), documents=((20, 3, 160, 27), (64, 64, 65, 17))),
    "documents of one token": Case((1, 40, 40, 2, 1, 16), documents=((1,) * 40,)),
    "documents in a window": Case((1, 130, 130, 2, 1, 16), documents=((50, 1, 79),), options={"window": 20}),
    "left padding": Case((2, 70, 70, 2, 1, 16), padding=((0, 0, None), (41, 0, None))),
    "right padding and a hole": Case((2, 70, 70, 2, 1, 16), padding=((0, 33, 12), (3, 0, 40))),
    "no key at all": Case((2, 40, 40, 2, 1, 16), padding=((40, 0, None), (0, 0, None))),
    "empty rows without a sink": Case((2, 70, 70, 2, 1, 16), sink=False, padding=((41, 3, None), (70, 0, None))),
    "a sink of minus infinity": Case(
        (2, 40, 40, 2, 1, 16), first_sink=float("-inf"), padding=((11, 0, 20), (40, 0, None))
    ),
    "sinks of -30": Case((2, 70, 70, 4, 2, 16), every_sink=-30.0),
    "sinks of 30": Case((2, 70, 70, 4, 2, 16), every_sink=30.0),
    "sinks of -30 in a window": Case((2, 70, 70, 4, 2, 16), every_sink=-30.0, options={"window": 8}),
    "sinks of 30 in a window": Case((2, 70, 70, 4, 2, 16), every_sink=30.0, options={"window": 8}),
    "decode": Case((2, 1, 130, 4, 2, 16), padding=((0, 0, None), (9, 0, None))),
    "decode past the window": Case((2, 1, 130, 4, 2, 16), options={"window": 17}),
    "decode over several parts": Case((2, 1, 300, 6, 2, 24), padding=((0, 0, 200), (150, 0, None))),
    "decode one row without a sink": Case((1, 1, 530, 2, 1, 16), sink=False, options={"softcap": 0.7}),
    "decode where no key is seen": Case((2, 1, 40, 2, 1, 16), sink=False, padding=((40, 0, None), (0, 0, None))),
    "chunk after a cache": Case((2, 50, 130, 4, 2, 16), padding=((0, 0, None), (100, 0, None))),
    "chunk from the last but one key of a block": Case((1, 40, 166, 2, 1, 16)),
    "chunk from the last key of a block": Case((1, 40, 167, 2, 1, 16)),
    "chunk in a window": Case((1, 50, 130, 4, 2, 16), options={"window": 40}),
    "everything": Case(
        (2, 130, 130, 4, 2, 24),
        documents=((20, 3, 70, 37), (64, 64, 2)),
        padding=((5, 0, 40), (0, 30, None)),
        head_groups=2,
        options={"window": 20, "softcap": 1.3},
    ),
    "negative scale": Case((1, 30, 30, 2, 1, 16), options={"scale": -0.3}),
    "zero scale": Case((1, 30, 30, 2, 1, 16), options={"scale": 0.0}),
}
HALF = ("length 129", "window 128", "documents", "everything", "sinks of 30")  # also in float16 in the interpreter


def document_ids(lengths: tuple[tuple[int, ...], ...], device: str) -> torch.Tensor:
    """[B, S] ids from the lengths of each row's documents; not consecutive, to show that only changes count."""
    rows = [[7 * n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    return torch.tensor(rows, device=device)


def key_mask(padding: tuple[tuple[int, int, int | None], ...], keys: int, device: str) -> torch.Tensor:
    """[B, S] bool from (left, right, hole) of each row."""
    mask = torch.ones(len(padding), keys, dtype=torch.bool)
    for row, (left, right, hole) in enumerate(padding):
        mask[row, :left] = False
        mask[row, keys - right :] = False
        if hole is not None:
            mask[row, hole] = False
    return mask.to(device)


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sink: torch.Tensor | None,
    *,
    window: int | None = None,
    documents_BS: torch.Tensor | None = None,
    key_mask_BS: torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over the keys and one sink column that is then dropped, every step rounded to the inputs' dtype."""
    groups, (queries, keys) = q.shape[2] // k.shape[2], (q.shape[1], k.shape[1])
    k, v = k.repeat_interleave(groups, dim=2), v.repeat_interleave(groups, dim=2)
    logits = torch.einsum("bthd,bshd->bhts", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    i = torch.arange(keys - queries, keys, device=q.device)[:, None]
    j = torch.arange(keys, device=q.device)[None, :]
    allowed = (j <= i)[None]
    if window is not None:
        allowed = allowed & (j > i - window)
    if documents_BS is not None:
        allowed = allowed & (documents_BS[:, keys - queries :, None] == documents_BS[:, None, :])
    if key_mask_BS is not None:
        allowed = allowed & key_mask_BS[:, None, :]
    allowed = allowed[:, None].expand(q.shape[0], q.shape[2], -1, -1)
    logits = logits.masked_fill(~allowed, float("-inf"))
    empty = ~allowed.any(dim=-1, keepdim=True)
    column = q.new_full((q.shape[2],), float("-inf")) if sink is None else sink.to(q.dtype)
    column = column[None, :, None, None].expand(*logits.shape[:3], 1)
    # Nothing at all in a row: any finite number in the column gives 0 instead of NaN.
    nothing = empty & (column == float("-inf"))
    logits = torch.cat([logits, column.masked_fill(nothing, 0.0)], dim=-1)
    lse = torch.logsumexp(logits.double(), dim=-1).masked_fill(nothing.squeeze(-1), float("-inf"))
    return torch.einsum("bhts,bshd->bthd", torch.softmax(logits, dim=-1)[..., :-1], v), lse


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Inside, memory that an operation leaves uninitialised is NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


def run_case(case: Case, dtype: torch.dtype, device: str, backend: str = "triton") -> None:
    """Assert that outputs and gradients of ``backend`` are no further from the truth than eager's."""
    batch, queries, keys, heads, kv_heads, size = case.shape
    generator = torch.Generator().manual_seed(1)

    def rand(tokens: int, count: int) -> torch.Tensor:
        x = torch.randn(batch, tokens, count, size, generator=generator, dtype=torch.float64).to(device, dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if case.layout == "bhtd" else x

    inputs = [rand(queries, heads), rand(keys, kv_heads), rand(keys, kv_heads)]
    if case.sink:
        inputs.append(torch.randn(heads, generator=generator).to(device, dtype))
    if case.every_sink is not None:
        inputs[3].fill_(case.every_sink)
    if case.first_sink is not None:
        inputs[3][0] = case.first_sink
    options = dict(case.options)
    if case.documents is not None:
        options["documents_BS"] = document_ids(case.documents, device)
    if case.padding is not None:
        options["key_mask_BS"] = key_mask(case.padding, keys, device)
    weight_o = rand(queries, heads)
    weight_lse = torch.randn(batch, heads, queries, generator=generator).to(device)

    def outputs(function: Any, compute: torch.dtype, **more: Any) -> list[torch.Tensor]:
        leaves = [x.detach().to(compute).requires_grad_() for x in inputs]
        found = function(*leaves, *([] if case.sink else [None]), **options, **more)
        o, lse = found if isinstance(found, tuple) else (found, None)
        loss = (o * weight_o.to(compute)).sum()
        if not weighs_lse:
            return [o, *torch.autograd.grad(loss, leaves)]
        loss = loss + (torch.where(lse.isfinite(), lse, 0.0) * weight_lse).sum()
        return [o, lse, *torch.autograd.grad(loss, leaves)]

    weighs_lse = backend != "cudnn"  # which does not give it
    truth = outputs(sink_attention, torch.float64, backend="eager", return_lse=True)
    plain = outputs(eager, dtype)
    chosen: dict[str, Any] = {"backend": backend, "head_groups": case.head_groups, "return_lse": weighs_lse}
    if backend == "cudnn":
        chosen["deterministic"] = False  # whatever `poisoned` asks of torch
    with poisoned():
        ours = outputs(sink_attention, dtype, **chosen)
    assert ours[0].dtype == dtype and not (weighs_lse and ours[1].dtype != torch.float32)
    if queries == 1 and weighs_lse:  # without gradients other kernels serve
        with poisoned(), torch.no_grad():
            alone = sink_attention(*inputs, *([] if case.sink else [None]), **options, backend=backend, return_lse=True)
        for name, got, low, exact in zip(("o", "lse"), alone, plain, truth, strict=False):
            assert_no_worse_than_eager(f"{name} without gradients", got, low, exact, dtype)
    names = ("o", *(("lse",) if weighs_lse else ()), "dq", "dk", "dv", "dsink")
    for name, got, low, exact in zip(names, ours, plain, truth, strict=False):
        assert_no_worse_than_eager(name, got, low, exact, dtype)


def run_compiled(device: str, backend: str, dynamic: bool, lengths: tuple[int, ...]) -> None:
    """Assert that `torch.compile` changes no bit, in a function that does more, also without gradients."""
    for options in ({}, {"window": 5}, {"documents_BS": True}):
        torch.compiler.reset()

        def attend(q: torch.Tensor, *others: torch.Tensor, **masks: Any) -> torch.Tensor:
            return sink_attention(q * 1.5, *others, **masks, backend=backend).sin()  # type: ignore[arg-type]

        compiled = torch.compile(attend, backend="aot_eager", dynamic=dynamic)
        for length in lengths:
            generator = torch.Generator().manual_seed(length)
            shapes = ((2, length, 4, 16), (2, length, 2, 16), (2, length, 2, 16), (4,))
            inputs = [torch.randn(shape, generator=generator).to(device).requires_grad_() for shape in shapes]
            masks: dict[str, Any] = dict(options)
            if "documents_BS" in masks:
                masks["documents_BS"] = document_ids(((length,), (length // 2, length - length // 2)), device)
            plain, ours = attend(*inputs, **masks), compiled(*inputs, **masks)
            assert plain.isfinite().all() and torch.equal(plain, ours), (options, length)
            for want, got in zip(*(torch.autograd.grad(o.sum(), inputs) for o in (plain, ours)), strict=True):
                assert want.isfinite().all() and torch.equal(want, got), (options, length)
            with torch.no_grad():
                assert torch.equal(attend(*inputs, **masks), compiled(*inputs, **masks)), (options, length)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        for working in (torch.float32, torch.float16) if chosen in HALF else (torch.float32,):
            run_case(CASES[chosen], working, "cpu")
            print(f"passed: {chosen} {working}", flush=True)
