"""The backend ``unsloth_sinks`` inside a tiny random gpt-oss, against transformers' own eager attention."""

from __future__ import annotations

import copy
import os
import subprocess
import sys

import pytest
import torch
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.cache_utils import DynamicCache

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention.transformers_backend import (
    BACKEND_NAME,
    attention_forward,
    padding_mask,
    register,
)

VOCABULARY = 160


def tiny_config() -> GptOssConfig:
    return GptOssConfig(
        num_hidden_layers=4,
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=VOCABULARY,
        layer_types=["sliding_attention", "full_attention"] * 2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )


@pytest.fixture
def models() -> tuple[GptOssForCausalLM, GptOssForCausalLM]:
    """(stock with eager attention, ours), equal weights."""
    torch.manual_seed(0)
    stock = GptOssForCausalLM(tiny_config())
    with torch.no_grad():
        for name, parameter in stock.named_parameters():
            # Larger than the default 0.02, so that attention and experts matter; the biases too.
            if name.endswith("sinks"):
                parameter.normal_(0.0, 2.0)
            elif "norm" not in name:
                parameter.normal_(0.0, 0.1)
    register()
    ours = GptOssForCausalLM(copy.deepcopy(stock.config))
    ours.load_state_dict(stock.state_dict())
    ours.config._attn_implementation = BACKEND_NAME
    assert ours.model.layers[0].self_attn.config is ours.config
    assert stock.config._attn_implementation == "eager"
    return stock.eval(), ours.eval()


def tokens(batch: int, length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_register_twice_changes_nothing():
    from transformers import AttentionInterface, AttentionMaskInterface

    register()
    register()
    assert AttentionInterface()[BACKEND_NAME] is attention_forward
    assert AttentionMaskInterface()[BACKEND_NAME] is padding_mask


def test_logits_and_all_gradients_equal_eager(models):
    stock, ours = models
    input_ids = tokens(2, 37)
    a, b = stock(input_ids, labels=input_ids), ours(input_ids, labels=input_ids)
    torch.testing.assert_close(b.logits, a.logits, atol=1e-5, rtol=1e-5)
    a.loss.backward()
    b.loss.backward()
    named = dict(ours.named_parameters())
    for name, parameter in stock.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        torch.testing.assert_close(named[name].grad, parameter.grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("side", ["left", "right"])
def test_case_26_padded_rows_equal_single_rows(models, side):
    stock, ours = models
    rows = [tokens(1, length, seed=length) for length in (5, 13, 20)]
    input_ids = torch.zeros(3, 20, dtype=torch.long)
    mask = torch.zeros(3, 20, dtype=torch.long)
    parts = []
    for n, row in enumerate(rows):
        part = slice(20 - row.shape[1], 20) if side == "left" else slice(0, row.shape[1])
        input_ids[n, part], mask[n, part] = row[0], 1
        parts.append(part)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    logits = ours(input_ids, attention_mask=mask, position_ids=positions).logits
    without_positions = ours(input_ids, attention_mask=mask).logits
    eager = stock(input_ids, attention_mask=mask).logits
    assert logits.isfinite().all() and without_positions.isfinite().all()
    for n, (row, part) in enumerate(zip(rows, parts, strict=True)):
        torch.testing.assert_close(logits[n, part], ours(row).logits[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(logits[n, part], stock(row).logits[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(without_positions[n, part], eager[n, part], atol=1e-5, rtol=1e-5)


def test_case_10_packed_documents_do_not_leak(models):
    _, ours = models
    lengths = [(5, 7), (3, 9)]
    input_ids = tokens(2, 12)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    logits = ours(input_ids, position_ids=positions).logits

    # Every expert sees every token, so that routing can't change the shapes of other tokens' matrix products.
    dense = copy.deepcopy(ours)
    for layer in dense.model.layers:
        layer.mlp.router.top_k = 4
    before = dense(input_ids, position_ids=positions).logits
    changed = input_ids.clone()
    for n, (first, _) in enumerate(lengths):
        changed[n, :first] = changed[n, :first] % (VOCABULARY - 1) + 1
    after = dense(changed, position_ids=positions).logits
    sparse_after = ours(changed, position_ids=positions).logits
    for n, (first, _) in enumerate(lengths):
        assert torch.equal(after[n, first:], before[n, first:])
        assert not torch.allclose(after[n, :first], before[n, :first])
        torch.testing.assert_close(sparse_after[n, first:], logits[n, first:], atol=1e-5, rtol=1e-5)

    labels = input_ids.clone()
    for n, (first, _) in enumerate(lengths):
        labels[n, 0] = labels[n, first] = -100
    packed_loss = ours(input_ids, position_ids=positions, labels=labels).loss
    total, count = 0.0, 0
    for n, (first, second) in enumerate(lengths):
        for part in (input_ids[n : n + 1, :first], input_ids[n : n + 1, first : first + second]):
            total = total + ours(part, labels=part).loss * (part.shape[1] - 1)
            count += part.shape[1] - 1
    torch.testing.assert_close(packed_loss, total / count, atol=1e-5, rtol=1e-5)


def test_cu_seqlens_and_position_ids_pack_alike(models):
    _, ours = models
    input_ids = tokens(1, 12)
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    boundaries = torch.tensor([0, 5, 12], dtype=torch.int32)
    by_positions = ours(input_ids, position_ids=positions).logits
    by_boundaries = ours(input_ids, position_ids=positions, cu_seq_lens_q=boundaries).logits
    assert torch.equal(by_positions, by_boundaries)


@pytest.mark.parametrize("padded", [False, True])
def test_case_26_greedy_generation_past_the_window_equals_stock(models, padded):
    stock, ours = models
    input_ids = tokens(3, 10)
    mask = torch.ones_like(input_ids)
    if padded:
        for n, padding in enumerate((0, 4, 7)):
            input_ids[n, :padding], mask[n, :padding] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    a, b = stock.generate(input_ids, **options), ours.generate(input_ids, **options)
    assert a.sequences.shape == (3, 30)
    assert torch.equal(a.sequences, b.sequences)
    torch.testing.assert_close(torch.stack(b.logits), torch.stack(a.logits), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [(5, 7, 3, 1, 4), (8, 8, 4), (7, 1, 12)], ids=str)
def test_a_dynamic_cache_filled_in_chunks_equals_one_forward(models, chunks):
    _, ours = models
    input_ids = tokens(2, 20)
    mask = torch.ones_like(input_ids)
    mask[1, :6] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    whole = ours(input_ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
    cache, begin, parts = DynamicCache(config=ours.config), 0, []
    for size in chunks:
        end = begin + size
        # The argument was renamed from past_key_values to cache; positionally both are fourth.
        out = ours(input_ids[:, begin:end], mask[:, :end], positions[:, begin:end], cache, use_cache=True)
        parts.append(out.logits)
        begin = end
    got = torch.cat(parts, dim=1)
    torch.testing.assert_close(got[mask.bool()], whole[mask.bool()], atol=1e-5, rtol=1e-5)


def test_padding_mask_is_cut_to_the_last_keys():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1]])
    assert padding_mask(1, 6, 6) is None
    got = padding_mask(1, 1, 3, q_offset=5, kv_offset=3, attention_mask=mask, allow_is_causal_skip=True)
    assert got.dtype == torch.bool and got.tolist() == [[True, True, True]]


def test_a_mask_that_masks_nothing_is_none():
    """Collators give one for every batch."""
    mask = torch.ones(2, 6, dtype=torch.int64)
    assert padding_mask(2, 6, 6, attention_mask=mask) is None
    assert padding_mask(2, 4, 6, q_offset=2, attention_mask=mask) is None
    assert padding_mask(2, 1, 6, q_offset=5, attention_mask=mask) is not None, "a new token waited for the device"
    mask[1, 0] = 0
    got = padding_mask(2, 6, 6, attention_mask=mask)
    assert got is not None and got.tolist() == mask.bool().tolist()
    assert padding_mask(2, 6, 6, attention_mask=mask.to("meta")) is not None


def test_static_caches_and_custom_masks_are_refused(models):
    _, ours = models
    with pytest.raises(UnsupportedError, match="dynamic cache"):
        padding_mask(1, 4, 32, q_offset=0, kv_offset=0)
    with pytest.raises(UnsupportedError, match="dynamic cache"):
        padding_mask(1, 4, 4, q_offset=torch.tensor(0))
    with pytest.raises(UnsupportedError, match="custom mask"):
        padding_mask(1, 4, 4, use_vmap=True)
    with pytest.raises(UnsupportedError, match="dynamic cache"):
        ours.generate(tokens(1, 4), max_new_tokens=3, cache_implementation="static", pad_token_id=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"output_attentions": True}, "output_attentions"),
        ({"is_causal": False}, "causal"),
        ({"attention_mask": torch.ones(1, 1, 4, 4)}, "2-D padding mask"),
    ],
)
def test_unsupported_requests_raise(options, message):
    q, k = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 4, 8)
    options = {"attention_mask": None} | options
    with pytest.raises(UnsupportedError, match=message):
        attention_forward(torch.nn.Module(), q, k, k, **options)
    module = torch.nn.Module()
    module.is_causal = False
    with pytest.raises(UnsupportedError, match="causal"):
        attention_forward(module, q, k, k, None)


def test_a_four_dimensional_mask_reaches_the_error(models):
    _, ours = models
    with pytest.raises(UnsupportedError, match="2-D padding mask"):
        ours(tokens(1, 6), attention_mask=torch.zeros(1, 1, 6, 6))


def test_autocast_mixes_no_dtypes(models):
    _, ours = models
    input_ids = tokens(2, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ours(input_ids, labels=input_ids).loss
    loss.backward()
    assert all(p.grad.isfinite().all() for p in ours.parameters())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_kernels_in_the_interpreter_serve_the_model_too() -> None:
    """Tests of this file again, where `auto` takes the kernels: gradients, packing, left padding, a cache, a window."""
    pytest.importorskip("triton")
    code = """
import sys
import pytest
from unsloth_plugins.core.sink_attention import triton_op

launched = set()

def noted(name, function):
    return lambda *args, **options: (launched.add(name), function(*args, **options))[1]

for name in ("forward_launch", "row_sums_launch", "dq_launch", "dkdv_launch", "decode"):
    setattr(triton_op, name, noted(name, getattr(triton_op, name)))
chosen = "gradients or case_10 or padded_rows_equal_single_rows[left or stock[True"
failed = pytest.main(["-q", "-p", "no:cacheprovider", sys.argv[1], "-k", chosen])
print("launched", len(launched))
sys.exit(failed)
"""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code, __file__], capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "4 passed" in done.stdout and "launched 5" in done.stdout, done.stdout[-3000:]
