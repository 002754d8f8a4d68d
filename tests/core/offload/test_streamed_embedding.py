"""The embedding in host memory beside streamed experts: the same bits, and everything else finds the table."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, tiny_gpt_oss
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from simulated_copies import SimulatedCopies, stream_through_copies

from unsloth_plugins.core import applied_to, apply
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.models.streaming import _EMBEDDING
from unsloth_plugins.core.mxfp4 import pack_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> SimulatedCopies:
    return stream_through_copies(monkeypatch)


def _frozen(**options: Any) -> Any:
    return pack_experts(tiny_gpt_oss(**options)).requires_grad_(False)


def test_the_table_moves_with_the_experts_and_comes_back(copies: SimulatedCopies) -> None:
    model, ids = _frozen(), batch_of(2, 9)["input_ids"]
    want, order = model(input_ids=ids).logits, [name for name, _ in model.named_parameters()]
    weight = model.model.embed_tokens.weight
    before = weight.detach().clone()
    applied = apply(model, weights="streamed", attention=None, experts=None, layers=None)
    assert weight.data_ptr() in copies.pinned and "; the embedding, 0.00 GiB, there too" in applied.report()
    assert next(iter(model.named_parameters()))[0] != TABLE and model.get_parameter(TABLE) is weight
    assert torch.equal(model.model.embed_tokens(ids), before[ids])
    sent = applied.stream.sent_bytes
    assert sent == ids.numel() * 64 * 4
    assert torch.equal(model(input_ids=ids).logits, want) and applied.stream.sent_bytes > 2 * sent
    applied.undo()
    assert weight.data_ptr() not in copies.pinned and torch.equal(weight, before) and applied.stream.host_bytes == 0
    assert [name for name, _ in model.named_parameters()] == order
    assert not {"forward", "_apply"} & set(vars(model.model.embed_tokens))
    assert torch.equal(model(input_ids=ids).logits, want)


def test_the_table_stays_on_the_host_when_the_model_moves() -> None:
    model = _frozen()
    applied = apply(model, weights="streamed")
    before = model.get_parameter(TABLE).detach().clone()
    model.to(torch.bfloat16).to("meta")
    table = model.get_parameter(TABLE)
    assert table.device.type == "cpu" and torch.equal(table, before.bfloat16())
    assert model.device.type == "meta" and model.lm_head.weight.device.type == "meta"
    assert applied.stream.host_bytes == 0  # nobody copied from it yet


def test_another_dtype_gets_other_memory(copies: SimulatedCopies) -> None:
    model, ids = _frozen(), batch_of(2, 9)["input_ids"]
    apply(model, weights="streamed")
    model(input_ids=ids)
    stream, before = applied_to(model).stream, model.get_parameter(TABLE).detach().clone()
    model.to(torch.bfloat16)
    assert torch.equal(model.model.embed_tokens(ids), before.bfloat16()[ids])
    assert stream._homes[_EMBEDDING].has([model.get_parameter(TABLE)])


def test_files_hold_the_same_table_and_a_loaded_one_is_used(copies: SimulatedCopies, tmp_path: Path) -> None:
    model, other, ids = _frozen(), _frozen(seed=1), batch_of(2, 9)["input_ids"]
    model.save_pretrained(tmp_path / "before")
    apply(model, weights="streamed")
    model(input_ids=ids)
    model.save_pretrained(tmp_path / "after")
    stored = [load_file(tmp_path / when / "model.safetensors") for when in ("before", "after")]
    assert stored[0].keys() == stored[1].keys() and torch.equal(stored[0][TABLE], stored[1][TABLE])
    model.load_state_dict(other.state_dict())
    assert torch.equal(model.model.embed_tokens(ids), other.model.embed_tokens(ids))


def test_a_deep_copy_has_a_table_of_its_own(copies: SimulatedCopies) -> None:
    model, ids = _frozen(), batch_of(2, 9)["input_ids"]
    apply(model, weights="streamed")
    want = model.model.embed_tokens(ids)
    twin = copy.deepcopy(model)
    model.get_parameter(TABLE).zero_()
    assert torch.equal(twin.model.embed_tokens(ids), want) and not model.model.embed_tokens(ids).any()
    applied_to(twin).undo()
    assert torch.equal(twin.model.embed_tokens(ids), want)


def _tied() -> Any:
    return _frozen(tie_word_embeddings=True)


def _training() -> Any:
    model = _frozen()
    model.get_parameter(TABLE).requires_grad_()
    return model


def _replaced() -> Any:
    model = _frozen()
    embedding = model.model.embed_tokens
    embedding.forward = functools.partial(torch.nn.Embedding.forward, embedding)
    return model


def _scaled() -> Any:
    class Scaled(torch.nn.Embedding):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 3

    model = _frozen()
    model.model.embed_tokens = Scaled(160, 64).requires_grad_(False)
    return model


def _adapted(**options: Any) -> Any:
    return get_peft_model(_frozen(), LoraConfig(r=4, **{"target_modules": ["q_proj"], **options}))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (_tied, "it is the head as well"),
        (_training, "it trains"),
        (_replaced, "its forward was replaced"),
        (_scaled, "it is not a plain one"),
        (functools.partial(_adapted, target_modules=["q_proj", "embed_tokens"]), "it is not a plain one"),
        (functools.partial(_adapted, modules_to_save=["embed_tokens"]), "it is not a plain one"),
        (functools.partial(_adapted, trainable_token_indices=[3]), "it is not a plain one"),
    ],
)
def test_what_keeps_the_embedding_with_the_model(copies: SimulatedCopies, make: Any, reason: str) -> None:
    model, batch = make(), batch_of(2, 9)
    with torch.no_grad():
        resident = copy.deepcopy(model)(**batch).loss if make is not _replaced else None  # the copy calls the original
    applied = apply(model, weights="streamed")
    assert f"the embedding stays with the model: {reason}" in applied.report()
    assert _EMBEDDING not in applied.stream._homes
    with torch.no_grad():
        loss = model(**batch).loss
    if resident is not None:
        torch.testing.assert_close(loss, resident)


def test_one_that_trains_since_is_refused(copies: SimulatedCopies) -> None:
    model = _frozen()
    apply(model, weights="streamed")
    model.get_parameter(TABLE).requires_grad_()
    with pytest.raises(UnsupportedError, match="still frozen"):
        model(input_ids=batch_of(2, 9)["input_ids"])


def test_where_memory_cannot_be_locked_the_rows_are_the_same(copies: SimulatedCopies) -> None:
    copies.pinned_bytes = 0
    model, ids = _frozen(), batch_of(2, 9)["input_ids"]
    want = model.model.embed_tokens(ids)
    with pytest.warns(UserWarning, match="Page-locked"):
        apply(model, weights="streamed")
    assert torch.equal(model.model.embed_tokens(ids), want)


def test_memory_is_not_let_go_while_a_lookup_reads_it(copies: SimulatedCopies) -> None:
    model = _frozen()
    applied = apply(model, weights="streamed")
    home, marks = applied.stream._homes[_EMBEDDING], []
    copies.block = marks.append  # type: ignore[method-assign]
    home.note_lookup(copies)
    assert home._looked_up is not None
    mark = home._looked_up[1]
    applied.undo()
    assert mark in marks


# --- the kernel in triton's interpreter


@pytest.mark.skipif(INTERPRETED, reason="is that process")
def test_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "kernel", __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and "9 passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("hidden", [1, 6, 64, 5000])
def test_the_kernel_copies_rows(dtype: torch.dtype, hidden: int) -> None:
    from unsloth_plugins.core.offload.lookup import lookup_triton

    table = torch.randn(11, hidden).to(dtype)
    for ids in (torch.tensor([[0, 10, 3], [3, 3, 7]]), torch.tensor([4], dtype=torch.int32), torch.arange(11)[::2]):
        assert torch.equal(lookup_triton(table, ids), table[ids.long()])
    assert lookup_triton(table, torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, hidden)


@pytest.mark.skipif(not INTERPRETED, reason="runs in the process of test_in_the_interpreter")
def test_the_kernel_reads_nothing_outside_of_the_table() -> None:
    """The interpreter has no assertions of the device."""
    from unsloth_plugins.core.offload.lookup import lookup_triton

    wide = torch.randn(13, 8)
    for wrong in (-1, 11):
        rows = lookup_triton(wide[1:12], torch.tensor([0, wrong]))
        assert torch.equal(rows[0], wide[1]) and not rows[1].any()
