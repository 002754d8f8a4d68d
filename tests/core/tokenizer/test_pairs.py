"""Slow and fast tokenizers that should be equal."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from merge_cases import save_llama, small_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from unsloth_plugins.core.tokenizer import PROBES, check_tokenizer, choose_tokenizer, repair_tokenizer
from unsloth_plugins.core.tokenizer.folder import check_folder, repair_folder
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


def test_case_20_the_slow_one_is_kept_where_no_fast_one_is_equal() -> None:
    slow, fast = small_tokenizer(), small_tokenizer()
    fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    choice = choose_tokenizer(slow, fast, ["the fox", "", "over"])
    assert choice.tokenizer is slow and {"the fox", "over"} <= set(choice.failing) and "no fast one" in choice.how


def _differences(findings: list[Any]) -> list[Any]:
    return [finding for finding in findings if finding.code == "slow-fast-differ"]


def test_case_20_a_folder_with_both_is_found_and_repaired(tmp_path: Path) -> None:
    slow, fast = _sentencepiece_pair(tmp_path)
    base = save_llama(tmp_path / "base", eos_token_id=2)
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>", "<|reserved_0|>"]})
    fast.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    fast.save_pretrained(base)
    assert not _differences(check_folder(base))
    shutil.copy(tmp_path / "tiny.model", base / "tokenizer.model")
    (found,) = _differences(check_folder(base))
    assert "' '" in found.message and "SentencePiece" in str(found.repair) and not found.caution
    plan = repair_folder(base, None, chat_template="chatml", dry_run=True)
    done = repair_folder(base, tmp_path / "out", chat_template="chatml")
    assert plan.done == done.done and done.done[0].startswith("slow-fast-differ") and not done.left
    repaired = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in probes_for(slow, _probes()):
        if "<extra>" not in text:
            assert repaired(text).input_ids == [1, *slow(text).input_ids], text
    shutil.copy(tmp_path / "tiny.model", tmp_path / "out" / "tokenizer.model")
    assert check_folder(tmp_path / "out") == [] and repair_folder(tmp_path / "out", tmp_path / "again").done == []


def test_case_20_a_model_that_is_not_sentencepiece_is_said(tmp_path: Path, caplog: Any) -> None:
    base = save_llama(tmp_path / "base", eos_token_id=1)
    small_tokenizer().save_pretrained(base)
    (base / "tokenizer.model").write_text("IQ== 0\n")
    assert not _differences(check_folder(base)) and "are not compared" in caplog.text


def test_case_20_a_pair_that_the_caller_gives() -> None:
    slow = small_tokenizer()
    fast = _edited(slow, rstrip=True)
    assert len(_differences(check_tokenizer(160, fast, slow))) == 1 and not _differences(check_tokenizer(160, fast))
    plan = repair_tokenizer(160, fast, slow, dry_run=True)
    assert differing(slow, fast, probes_for(slow))
    assert repair_tokenizer(160, fast, slow).done == plan.done and "flags" in plan.done[0]
    assert not differing(slow, fast, probes_for(slow)) and not repair_tokenizer(160, fast, slow).done
    fast.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    (left,) = _differences(repair_tokenizer(160, fast, slow).left)
    assert left.caution and left.repair is None
