"""Slow and fast tokenizers that should be equal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from merge_cases import small_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

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


def _sentencepiece_pair(folder: Path) -> tuple[Any, PreTrainedTokenizerFast]:
    """A slow tokenizer of a tiny SentencePiece model, and a fast one that loses a space in front of a text."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="needs sentencepiece")
    text = (
        "the quick brown fox jumps over the lazy dog and the emoji 😀 while 你好 世界 1 2 3 4 5 6 7 8 9 0 ! ? . , ( )"
    )
    (folder / "text").write_text(f"{text}\n" * 20, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tiny"),
        vocab_size=100,
        hard_vocab_limit=False,
        pad_id=3,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    names = dict(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    slow = SentencePieceBackend(vocab_file=str(folder / "tiny.model"), **names)
    pieces = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tiny.model"))
    scores = [(pieces.id_to_piece(number), pieces.get_score(number)) for number in range(len(pieces))]
    backend = Tokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    return slow, PreTrainedTokenizerFast(tokenizer_object=backend, **names)


def test_case_20_sentencepiece_pair_gives_equal_ids_on_500_probes(tmp_path: Path) -> None:
    slow, fast = _sentencepiece_pair(tmp_path)
    assert not slow.is_fast
    probes = [text for text in _probes() if "<extra>" not in text]
    probes += [f"{left}{right}" for left in ("the", "  ", "<s>", "\n", "世界") for right in PROBES]
    probes = (probes * 2)[:500]
    choice = choose_tokenizer(slow, fast, probes)
    assert "  " in choice.failing and "SentencePiece" in choice.how and choice.tokenizer.is_fast
    for text in probes_for(slow, probes):
        ids = slow(text).input_ids
        assert choice.tokenizer(text).input_ids == ids
        assert choice.tokenizer.decode(ids).strip() == slow.decode(ids).strip()
    assert choose_tokenizer(slow, choice.tokenizer, probes).tokenizer is choice.tokenizer


def test_case_20_equal_ones_are_left_alone() -> None:
    slow = small_tokenizer()
    fast = _edited(slow)
    assert choose_tokenizer(slow, fast, _probes()).tokenizer is fast


def test_case_20_the_slow_one_is_kept_where_no_fast_one_is_equal(caplog: Any) -> None:
    slow, fast = small_tokenizer(), small_tokenizer()
    fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    choice = choose_tokenizer(slow, fast, ["the fox", "", "over"])
    assert choice.tokenizer is slow and {"the fox", "over"} <= set(choice.failing) and "Keep the slow" in caplog.text
