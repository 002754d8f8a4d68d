"""A Hugging Face byte-level BPE tokenizer as GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from unsloth_plugins.core.errors import ExportError, UnsupportedError

_GPT4_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _WORD + r"\p{N}{1,3}" + _GPT4_TAIL: "llama-bpe",
    _WORD + r"\p{N}" + _GPT4_TAIL: "qwen2",
    _CASED % (_SUFFIX, _SUFFIX) + r"\p{N}{1,3}" + _CASED_TAIL: "gpt-4o",
    _CASED % ("", "") + r"\p{N}" + _CASED_TAIL: "tekken",
}
"""The expression that splits text before BPE -> llama.cpp's name for it."""
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "<|end_of_turn|>")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.

    Raises:
        ExportError: none there.
    """
    from transformers import AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ExportError(
            expected=f"a tokenizer in {folder}", got="none", remedy="Save it there with tokenizer.save_pretrained."
        )
    return AutoTokenizer.from_pretrained(folder)


def splitter_name(backend: dict[str, Any]) -> str:
    """llama.cpp's name of the way in which this tokenizer splits text.

    Args:
        backend: what tokenizer.json holds.

    Raises:
        UnsupportedError: not byte-level BPE, or a way that llama.cpp has no known name for.
    """
    steps = backend.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps]) if steps else []
    kinds = [step["type"] for step in steps]
    normalizer = (backend.get("normalizer") or {}).get("type")
    if backend["model"]["type"] != "BPE" or "ByteLevel" not in kinds or normalizer not in (None, "NFC"):
        raise UnsupportedError(
            expected="a byte-level BPE tokenizer",
            got=f"{backend['model']['type']} after {kinds or 'no splitting'}, normalised by {normalizer}",
            remedy="Merge to safetensors, and convert that with llama.cpp's own converter.",
        )
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        name = _SPLITS.get(steps[0]["pattern"].get("Regex", ""))
        if name:
            return name
    raise UnsupportedError(
        expected="a tokenizer that splits text like GPT-2, SmolLM, Llama 3, Qwen 2, Tekken or o200k",
        got=json.dumps(steps)[:300],
        remedy="Merge to safetensors, and convert that with llama.cpp's own converter.",
    )


def add_vocabulary(writer: Any, tokenizer: Any, rows: int) -> None:
    """Tokens, types, merges, special ids and chat templates into the writer.

    Args:
        writer: a ``gguf.GGUFWriter``.
        tokenizer: a fast tokenizer of transformers.
        rows: of the embedding; ids that the tokenizer does not use are filled.

    Raises:
        UnsupportedError: see ``splitter_name``; or a slow tokenizer.
        ExportError: the tokenizer has ids beyond the embedding.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedError(
            expected="a fast tokenizer",
            got=type(tokenizer).__name__,
            remedy="Convert it, and check that with `unsloth-plugins tokenizer`.",
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    name = splitter_name(backend)
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    if max(by_id) >= rows:
        raise ExportError(
            expected=f"ids below {rows}, the rows of the embedding",
            got=f"{by_id[max(by_id)]!r} with id {max(by_id)}",
            remedy="Repair it with `unsloth-plugins tokenizer`, or resize the model's embedding before training.",
        )
    types = {number: _NORMAL for number in by_id}
    for added in backend["added_tokens"]:
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types([types.get(number, _UNUSED) for number in range(rows)])
    merges = backend["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    _add_special(writer, tokenizer, set(by_id.values()))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": key, "template": value} for key, value in template.items()]
    if template:
        writer.add_chat_template(template)


def _add_special(writer: Any, tokenizer: Any, known: set[str]) -> None:
    for kind in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{kind}_token_id")
        if number is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    ends = [token for token in _END_OF_TURN if token in known and token in str(tokenizer.chat_template)]
    if ends:
        writer.add_eot_token_id(tokenizer.convert_tokens_to_ids(ends[0]))
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
