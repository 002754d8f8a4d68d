"""A Hugging Face tokenizer as GGUF metadata: byte-level BPE, or BPE as SentencePiece makes it.

llama.cpp's ``llama`` tokenizer merges the neighbours with the best score first, as SentencePiece does; Hugging Face
keeps merges in that order instead, so a token's score is the place of its first merge.
"""

from __future__ import annotations

import json
import reprlib
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
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_SPACE = "\u2581"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer.

    Raises:
        ExportError: none there, or a damaged one; or transformers, which reads it too, can't load config.json.
    """
    from transformers import AutoConfig, AutoTokenizer

    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise ExportError(
            expected=f"a tokenizer in {folder}", got="none", remedy="Save it there with tokenizer.save_pretrained."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer("a")  # some damage shows only then
        return tokenizer
    except Exception as error:  # of json, tokenizers and transformers, each with its own
        if (folder / "config.json").is_file():
            load_config(AutoConfig, folder, "config.json")
        raise ExportError(
            expected=f"a tokenizer that transformers loads from {folder}",
            got=one_line(error),
            remedy="Give the folder of a whole model, or save its tokenizer there again.",
        ) from error


def load_config(kind: Any, folder: Path, name: str) -> Any:
    """A config of transformers from a file in the folder.

    Raises:
        ExportError: not there, damaged, or of a kind of model that this version of transformers does not know.
    """
    try:
        return kind.from_pretrained(folder)
    except Exception as error:  # of json, huggingface_hub and transformers, each with its own
        missing = not (folder / name).is_file()
        raise ExportError(
            expected=f"a {name} in {folder} that transformers loads",
            got="none" if missing else one_line(error),
            remedy="Give the folder of a whole model: an adapter's has none."
            if missing
            else f"Correct {name} or download it again; a new kind of model may need a newer transformers.",
        ) from error


def check_template(tokenizer: Any) -> None:
    """Refuse what can't go into a GGUF as a chat template.

    Raises:
        ExportError: it is no text, nor several with names.
    """
    found = tokenizer.chat_template
    texts = list(found.values()) if isinstance(found, dict) else [] if found is None else [found]
    if not all(isinstance(text, str) for text in texts):
        raise ExportError(
            expected="chat_template in tokenizer_config.json to be a text, or several with names",
            got=reprlib.repr(found),
            remedy="Set one with `unsloth-plugins tokenizer FOLDER --repair NEW --chat-template ...`, or take it out.",
        )


def one_line(error: Exception) -> str:
    """The kind of an error and the beginning of its text."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


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
    rule = backend.get("normalizer") or {}
    rules = rule.get("normalizers", [rule] if rule else [])  # a sequence, which may be empty
    normalizers = [each["type"] for each in rules]
    if backend["model"]["type"] != "BPE" or "ByteLevel" not in kinds or normalizers not in ([], ["NFC"]):
        raise UnsupportedError(
            expected="a tokenizer of byte-level BPE, or of SentencePiece's BPE",
            got=f"{backend['model']['type']} after {kinds or 'no splitting'}, normalised by {normalizers or None}",
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


def space_prefix(backend: dict[str, Any]) -> bool | None:
    """Whether a SentencePiece-like tokenizer puts a space before a text; ``None`` for every other kind.

    Args:
        backend: what tokenizer.json holds.
    """
    model = backend["model"]
    vocab = model["vocab"]
    if model["type"] != "BPE" or not model.get("byte_fallback"):
        return None
    if any(name not in vocab and chr(byte) not in vocab for byte, name in enumerate(_BYTES)):
        return None  # Gemma's has a tab in the place of its byte
    prefix = replaced = False
    for step in _steps(backend.get("normalizer"), "normalizers") + _steps(
        backend.get("pre_tokenizer"), "pretokenizers"
    ):
        kind, pattern = step["type"], (step.get("pattern") or {}).get("String")
        if kind == "Prepend" and step["prepend"] == _SPACE:
            prefix = True
        elif kind == "Replace" and (pattern, step["content"]) == (" ", _SPACE):
            replaced = True
        elif kind == "Metaspace" and step["replacement"] == _SPACE and not step["split"]:
            prefix, replaced = prefix or step["prepend_scheme"] != "never", True
        elif not (kind == "Split" and pattern == " " and replaced):  # such a split finds no space any more
            return None
    return prefix if replaced else None


def _steps(part: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    return [] if part is None else list(part.get(several, [part]))


def _scores(model: dict[str, Any]) -> dict[str, float]:
    """Token -> minus the place of the first merge that makes it."""
    found: dict[str, float] = {}
    for place, pair in enumerate(model["merges"]):
        left, right = pair if isinstance(pair, list) else pair.split(" ")
        found.setdefault(left + right, -float(place))
    return found


def add_vocabulary(writer: Any, tokenizer: Any, rows: int, notes: list[str]) -> None:
    """Tokens, types, merges, special ids and chat templates into the writer.

    Args:
        writer: a ``gguf.GGUFWriter``.
        tokenizer: a fast tokenizer of transformers.
        rows: of the embedding; ids that the tokenizer does not use are filled.
        notes: what llama.cpp will split otherwise is added, and added tokens that are left out because the embedding
            has no rows for them.

    Raises:
        UnsupportedError: see ``splitter_name``; or a slow tokenizer.
        ExportError: the tokenizer needs ids beyond the embedding: for its own vocabulary, its begin or end, or in the
            chat template.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise UnsupportedError(
            expected="a fast tokenizer",
            got=type(tokenizer).__name__,
            remedy="Convert it, and check that with `unsloth-plugins tokenizer`.",
        )
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    prefix = space_prefix(backend)
    name = splitter_name(backend) if prefix is None else "default"
    by_id = {number: token for token, number in tokenizer.get_vocab().items()}
    _leave_out_beyond(by_id, rows, tokenizer, backend, notes)
    types = {number: _BYTE if prefix is not None and token in _BYTES else _NORMAL for number, token in by_id.items()}
    for added in backend["added_tokens"]:
        types[added["id"]] = _CONTROL if added["special"] else _USER_DEFINED
    if prefix is not None and tokenizer.unk_token_id is not None:
        types[tokenizer.unk_token_id] = _UNKNOWN
    writer.add_tokenizer_model("gpt2" if prefix is None else "llama")
    writer.add_tokenizer_pre(name)
    writer.add_token_list([by_id.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types([types.get(number, _UNUSED) for number in range(rows)])
    if prefix is None:
        merges = backend["model"]["merges"]
        writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    else:
        scores = _scores(backend["model"])
        lowest = -float(len(backend["model"]["merges"]))
        writer.add_token_scores([scores.get(by_id.get(number, ""), lowest) for number in range(rows)])
        writer.add_add_space_prefix(prefix)
        if prefix:
            notes.append("llama.cpp puts a space before a text even if it begins with one; this tokenizer does not.")
    _add_special(writer, tokenizer, set(by_id.values()))
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = [{"name": key, "template": value} for key, value in template.items()]
    if template:
        writer.add_chat_template(template)


def _leave_out_beyond(
    by_id: dict[int, str], rows: int, tokenizer: Any, backend: dict[str, Any], notes: list[str]
) -> None:
    """Take added tokens without a row out of ``by_id``, where nothing needs them."""
    beyond = sorted(number for number in by_id if number >= rows)
    if not beyond:
        return
    added = {entry["id"] for entry in backend["added_tokens"]}
    named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token)
    template = str(tokenizer.chat_template or "")
    for number in beyond:
        if number not in added or by_id[number] in named or by_id[number] in template:
            raise ExportError(
                expected=f"ids below {rows}, the rows of the embedding, for what the tokenizer needs",
                got=f"{by_id[number]!r} with id {number}",
                remedy="Give the tokenizer that the model was trained with, or call model.resize_token_embeddings "
                "before training.",
            )
    notes.append(
        f"{len(beyond)} added tokens, such as {by_id[beyond[0]]!r} with id {beyond[0]}, are left out: the embedding "
        f"has {rows} rows."
    )
    for number in beyond:
        del by_id[number]


def _add_special(writer: Any, tokenizer: Any, known: set[str]) -> None:
    for kind in ("bos", "eos", "unk", "pad"):
        number = getattr(tokenizer, f"{kind}_token_id")
        if number is not None and tokenizer.convert_ids_to_tokens(number) in known:
            getattr(writer, f"add_{kind}_token_id")(number)
    ends = [token for token in _END_OF_TURN if token in known and token in str(tokenizer.chat_template)]
    if ends:
        writer.add_eot_token_id(tokenizer.convert_tokens_to_ids(ends[0]))
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
