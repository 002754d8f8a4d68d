"""Which backend serves a call, on devices and with packages that need not be there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from conftest import tiny_gpt_oss, tiny_llama
from packaging.version import Version

from unsloth_plugins.core import apply
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.sink_attention import backends, sink_attention
from unsloth_plugins.core.sink_attention.backends import Call, resolve_backend

LONG = Call(torch.device("cuda"), torch.bfloat16, 64, queries=8192, keys=8192, elements=8192 * 64 * 64)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A Hopper GPU and flash-attn-4, as far as the choice of a backend can see."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(backends, "why_no_triton", lambda *_: None)
    monkeypatch.setattr(backends, "fa4_version", lambda: Version("4.0.0b36"))
    monkeypatch.setattr(backends, "cudnn_version", lambda: None)
    resolve_backend.cache_clear()
    yield monkeypatch
    resolve_backend.cache_clear()


def test_the_table_gives_long_full_attention_to_flash_attn_4_and_nothing_else(hopper: pytest.MonkeyPatch) -> None:
    assert resolve_backend("auto", LONG)[0] == "fa4"
    for other in (
        replace(LONG, queries=2048, keys=2048),
        replace(LONG, queries=1),
        replace(LONG, window=128),
        replace(LONG, window=4096),
        replace(LONG, head_size=256),
        replace(LONG, dtype=torch.float32),
        replace(LONG, softcap=True),
    ):
        assert resolve_backend("auto", other)[0] == "triton", other
    resolve_backend.cache_clear()
    hopper.setattr(backends, "fa4_version", lambda: Version("4.0.0b35"))
    assert resolve_backend("auto", LONG)[0] == "triton"  # older than what was measured


def test_the_table_gives_whole_rows_to_cudnn_where_nothing_faster_is_installed(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(backends, "cudnn_version", lambda: backends.FASTER[9, 128][-1].version)
    wide = replace(LONG, head_size=128)
    short = replace(wide, queries=2048, keys=2048)
    assert [resolve_backend("auto", call)[0] for call in (LONG, wide, short)] == ["fa4", "fa4", "cudnn"]
    hopper.setattr(backends, "fa4_version", lambda: None)
    resolve_backend.cache_clear()
    assert [resolve_backend("auto", call)[0] for call in (LONG, wide)] == ["cudnn", "cudnn"]
    for other in (
        {"queries": 1},
        {"window": 128},
        {"dtype": torch.float32},
        {"softcap": True},
        {"padded": True},
        {"packed": True},
        {"lse": True},
        {"deterministic": True},
        {"elements": 1 << 31},
    ):
        assert resolve_backend("auto", replace(wide, **other))[0] == "triton", other  # type: ignore[arg-type]
    hopper.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: False)
    resolve_backend.cache_clear()
    assert resolve_backend("auto", LONG)[0] == "triton"
    with pytest.raises(UnsupportedError, match=r"enable_cudnn_sdp\(False\)"):
        resolve_backend("cudnn", LONG)


def test_a_dense_model_leaves_sdpa_where_the_table_knows_better(hopper: pytest.MonkeyPatch) -> None:
    hopper.setattr(backends, "fa4_version", lambda: None)
    hopper.setattr(backends, "cudnn_version", lambda: backends.FASTER[9, 128][-1].version)
    model = tiny_llama(head_dim=128).to(torch.bfloat16)
    hopper.setattr(type(model), "device", torch.device("cuda"))
    applied = apply(model)
    assert "cudnn on full layers from" in applied.report() and "in place of sdpa" in applied.report()
    applied.undo()
    model.config._attn_implementation = "eager"  # somebody's choice
    assert "eager stays" in apply(model).report()
    hopper.setattr(backends, "cudnn_version", lambda: None)
    model = tiny_llama(head_dim=128).to(torch.bfloat16)
    assert "sdpa stays" in apply(model).report()


def test_what_flash_attn_4_was_not_tested_with_is_left_to_triton_or_refused(hopper: pytest.MonkeyPatch) -> None:
    below, above = replace(LONG, elements=(1 << 31) - 1), replace(LONG, elements=1 << 31)
    assert [resolve_backend("auto", call)[0] for call in (below, above)] == ["fa4", "triton"]
    assert resolve_backend("fa4", below)[0] == "fa4"
    with pytest.raises(UnsupportedError, match="2,147,483,648 elements of q"):
        resolve_backend("fa4", above)


def test_the_op_counts_the_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        "unsloth_plugins.core.sink_attention.op.resolve_backend",
        lambda choice, call: (asked.append(call), ("eager", ""))[1],
    )
    sink_attention(*(torch.randn(2, 3, 4, 8) for _ in "qkv"))
    assert asked[0].elements == 2 * 3 * 4 * 8


def test_the_report_says_from_which_length_flash_attn_4_serves(hopper: pytest.MonkeyPatch) -> None:
    model = tiny_gpt_oss(head_dim=64).to(torch.bfloat16)
    applied = apply(model)
    hopper.setattr(type(model), "device", torch.device("cuda"))
    assert "fa4 on full layers from 4,096 tokens on, without padding: measured faster" in applied.report()
    hopper.setattr(backends, "fa4_version", lambda: None)
    assert "triton" in applied.report() and "fa4" not in applied.report()
