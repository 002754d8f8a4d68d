"""The same on tokenizers that people use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from assets import gemma3_tokenizer_dir, gpt_oss_tokenizer_dir, mistral_tokenizer_dir, smollm2_gguf, sotu_texts
from transformers import AutoConfig, AutoTokenizer

from unsloth_plugins.core.tokenizer import PROBES, assistant_labels, check_tokenizer, repair_tokenizer

pytestmark = pytest.mark.slow

CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4", "thinking": "easy"},
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "And 5 + 5?"},
    {"role": "assistant", "content": "10", "thinking": "Add them."},
]


def test_case_35_harmony_labels_are_those_counted_by_hand() -> None:
    tokenizer = AutoTokenizer.from_pretrained(gpt_oss_tokenizer_dir())
    report = repair_tokenizer(201088, tokenizer, chat_template="harmony")
    assert [entry.split(":")[0] for entry in report.done] == ["chat-template-missing"] and report.left == []
    assert tokenizer.eos_token == "<|return|>" and check_tokenizer(201088, tokenizer) == []
    out = assistant_labels(tokenizer, CHAT)
    kept = [label for label in out["labels"] if label >= 0]
    assert tokenizer.decode(kept) == (
        "<|channel|>final<|message|>4<|end|>"
        "<|channel|>final<|message|>6<|end|>"
        "<|channel|>analysis<|message|>Add them.<|end|><|start|>assistant<|channel|>final<|message|>10<|return|>"
    )
    assert len(kept) == 5 + 5 + (3 + 3 + 1) + (2 + 3 + 2)
    assert kept[-1] == tokenizer.eos_token_id and kept.count(tokenizer.eos_token_id) == 1


@pytest.mark.parametrize("older", [False, True])
def test_smollm2_as_its_gguf_gives_it_is_found_and_repaired(older: bool) -> None:
    """As the installed transformers reads it, and with what version 5.16 made of it."""
    gguf = smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    wanted = {"generation-markers-missing"}
    if older:
        tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", None
        config.eos_token_id = tokenizer.eos_token_id
        tokenizer.backend_tokenizer.model.byte_fallback = True
        wanted |= {"eos-is-not-end-of-turn", "pad-missing", "byte-fallback"}
    found = {finding.code for finding in check_tokenizer(config, tokenizer)}
    assert wanted <= found and found & {"pad-missing", "pad-is-eos"}
    report = repair_tokenizer(config, tokenizer)
    assert report.left == [] and check_tokenizer(config, tokenizer) == []
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    kept = [label for label in assistant_labels(tokenizer, CHAT)["labels"] if label >= 0]
    assert tokenizer.decode(kept) == "4<|im_end|>6<|im_end|>10<|im_end|>"


def _as_5_16_reads_a_gguf(source: Path, target: Path) -> Path:
    """Gemma 3's tokenizer as transformers 5.16 makes it from a GGUF: Unigram, five added tokens, no BOS."""
    content = json.loads((source / "tokenizer.json").read_text())
    added = {token["content"] for token in content["added_tokens"]}
    rank, pieces = 0, []
    for piece, _ in sorted(content["model"]["vocab"].items(), key=lambda pair: pair[1]):
        byte = piece.startswith("<0x") and len(piece) == 6
        pieces.append(
            ["\t" if piece == "<0x09>" else piece, 0.0 if byte else -1000.0 if piece in added else -float(rank)]
        )
        rank += not (byte or piece in added)
    content["model"] = {"type": "Unigram", "unk_id": 3, "byte_fallback": True, "vocab": pieces}
    content["added_tokens"], content["post_processor"] = content["added_tokens"][:5], None
    (target / "tokenizer.json").write_text(json.dumps(content))
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = special | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    return target


def test_gemma3_as_its_gguf_gave_it_is_found_and_repaired(tmp_path: Path) -> None:
    genuine = AutoTokenizer.from_pretrained(gemma3_tokenizer_dir())
    tokenizer = AutoTokenizer.from_pretrained(_as_5_16_reads_a_gguf(gemma3_tokenizer_dir(), tmp_path))
    assert tokenizer("hello world").input_ids == [3983, 844, 515, 504, 671]  # what 5.16 gave
    config = AutoConfig.for_model("gemma3_text")
    assert {"unigram-of-bpe", "bos-missing"} <= {finding.code for finding in check_tokenizer(config, tokenizer)}
    done = repair_tokenizer(config, tokenizer).done
    assert [entry.split(":")[0] for entry in done][:2] == ["unigram-of-bpe", "bos-missing"]
    texts = [
        *PROBES,
        "<start_of_turn>user\nhi<end_of_turn>\n",
        *(path.read_text()[:3000] for path in sotu_texts()[::25]),
    ]
    for text in texts:
        assert tokenizer(text).input_ids == genuine(text).input_ids, text
    assert repair_tokenizer(config, tokenizer).done == []
    assert not {"unigram-of-bpe", "bos-missing"} & {each.code for each in check_tokenizer(config, genuine)}


def test_chatml_on_a_real_sentencepiece_tokenizer() -> None:
    tokenizer = AutoTokenizer.from_pretrained(mistral_tokenizer_dir())
    tokenizer.chat_template = None
    rows = max(tokenizer.get_vocab().values()) + 1
    probes = {text: tokenizer(text).input_ids for text in PROBES}
    report = repair_tokenizer(rows + 8, tokenizer, chat_template="chatml", add_tokens=True)
    assert any("<|im_start|>, <|im_end|> are new tokens" in entry for entry in report.done)
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token not in (None, "<|im_end|>")
    assert report.left == [] and check_tokenizer(rows + 8, tokenizer) == []
    assert all(tokenizer(text).input_ids == ids for text, ids in probes.items())
    kept = [label for label in assistant_labels(tokenizer, CHAT)["labels"] if label >= 0]
    assert kept.count(tokenizer.eos_token_id) == 3
    assert tokenizer.decode(kept).replace(" ", "") == "4<|im_end|>6<|im_end|>10<|im_end|>"
    assert repair_tokenizer(rows + 8, tokenizer, chat_template="chatml", add_tokens=True).done == []
