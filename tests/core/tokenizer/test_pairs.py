"""Slow and fast tokenizers that should be equal."""

from __future__ import annotations

import json
from typing import Any

from merge_cases import small_tokenizer
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from unsloth_plugins.core.tokenizer import PROBES, choose_tokenizer
from unsloth_plugins.core.tokenizer.pairs import differing, probes_for


def _edited(tokenizer: PreTrainedTokenizerFast, **flags: Any) -> PreTrainedTokenizerFast:
    """A copy whose added tokens have other flags."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    content["added_tokens"] = [token | flags for token in content["added_tokens"]]
    names = {name: token for name, token in tokenizer.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(content)), **names)


def _probes() -> list[str]:
    parts = [*PROBES, "<pad>", "</s>", "<extra>", "x<extra>y", " <s> "]
    return [left + right for left in parts for right in parts][:500]


def test_case_20_wrong_flags_are_repaired_from_the_slow_one() -> None:
    slow = small_tokenizer()
    for flags in (dict(single_word=True), dict(lstrip=True), dict(rstrip=True)):
        fast = _edited(slow, **flags)
        choice = choose_tokenizer(slow, fast, _probes())
        assert choice.failing and choice.tokenizer is not fast and choice.tokenizer is not slow
        assert "flags" in choice.how and not differing(slow, choice.tokenizer, probes_for(slow, _probes()))
        assert differing(slow, fast, choice.failing) == list(choice.failing)  # the given one is left as it is


def test_case_20_equal_ones_are_left_alone() -> None:
    slow = small_tokenizer()
    fast = _edited(slow)
    assert choose_tokenizer(slow, fast, _probes()).tokenizer is fast


def test_case_20_the_slow_one_is_kept_where_no_fast_one_is_equal(caplog: Any) -> None:
    slow, fast = small_tokenizer(), small_tokenizer()
    fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    choice = choose_tokenizer(slow, fast, ["the fox", "", "over"])
    assert choice.tokenizer is slow and {"the fox", "over"} <= set(choice.failing) and "Keep the slow" in caplog.text
