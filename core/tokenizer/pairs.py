"""A slow tokenizer and the fast one made from it: which of them may be used."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)

PROBES: tuple[str, ...] = (
    "",
    " ",
    "  ",
    "   leading",
    "trailing   ",
    "a  b   c    d",
    "\n",
    "\n\n\n",
    " \n \n",
    "line\nline\r\nline\ttab",
    "It's we'll I'D",
    "1234567 3.14 1,000",
    "def f(x):\n    return x ** 2\n",
    "你好，世界",
    "日本語のテキスト",
    "안녕하세요",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈",
    "naïve café Ελληνικά русский עברית العربية",
    "e\u0301 \u00a0 \u200b \ufeff",
    "!!!???...",
    "<a href='x'>&amp;</a>",
)
"""Texts on which tokenizers that should be equal tend to differ: spaces, newlines, scripts, emoji, nothing at all."""


@dataclass(frozen=True)
class Choice:
    """Which tokenizer to use.

    Attributes:
        tokenizer: equal to the slow one on every probe; the slow one itself where no fast one is.
        how: in words.
        failing: probes on which the given fast tokenizer differs.
    """

    tokenizer: Any
    how: str
    failing: tuple[str, ...]


def probes_for(tokenizer: Any, probes: Sequence[str] = PROBES) -> list[str]:
    """The probes, and the tokenizer's special tokens alone, inside words, between spaces and in a row."""
    out = list(probes)
    added = [str(token.content) for token in tokenizer.added_tokens_decoder.values()]
    for token in sorted({*added, *tokenizer.all_special_tokens}):
        out += [token, f"a{token}b", f"a {token} b", f"{token}{token}", f"\n{token}\n", f"  {token}  x"]
    return out


def differing(one: Any, other: Any, probes: Iterable[str]) -> list[str]:
    """Probes for which the ids are not equal, or ``other`` decodes them to another text.

    Slow tokenizers may drop spaces at the ends when they decode; that is no difference. Nor is the BOS, which the
    fast one adds by a step of its own.
    """
    out = []
    for text in probes:
        ids = _ids(one, text)
        if ids != _ids(other, text) or one.decode(ids).strip() != other.decode(ids).strip():
            out.append(text)
    return out


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False).input_ids)


def choose_tokenizer(slow: Any, fast: Any, probes: Sequence[str] = PROBES) -> Choice:
    """The fast tokenizer if it equals the slow one on all probes, if need be with the slow one's token flags.

    Args:
        slow: the one that defines what is right.
        fast: made from it. Left as it is; a repaired one is a copy.
        probes: texts to compare on; special tokens in several surroundings are added.

    Returns:
        The choice.
    """
    texts = probes_for(slow, probes)
    failing = tuple(differing(slow, fast, texts))
    if not failing:
        return Choice(fast, "the fast tokenizer equals the slow one", ())
    attempts: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("the fast tokenizer with the slow one's token flags", lambda: _with_flags(slow, fast)),
        (
            "the fast tokenizer with runs of spaces marked as SentencePiece does",
            lambda: _with_marked_spaces(slow, fast),
        ),
        ("a fast tokenizer converted anew from the slow one", lambda: _converted(slow)),
    )
    for how, attempt in attempts:
        candidate = attempt()
        if candidate is not None and not differing(slow, candidate, texts):
            return Choice(candidate, how, failing)
    return Choice(slow, "the slow tokenizer, because no fast one equals it", failing)


def _with_flags(slow: Any, fast: Any) -> Any | None:
    """A copy of the fast tokenizer whose added tokens are those of the slow one, flags included."""
    if getattr(fast, "backend_tokenizer", None) is None:
        return None
    out = copy.deepcopy(fast)
    set_added_tokens(out, slow.added_tokens_decoder)
    return out


def _with_marked_spaces(slow: Any, fast: Any) -> Any | None:
    """A copy that puts one mark before each stretch of text and marks every space, also where a space leads.

    ``Metaspace`` leaves out the first mark before a leading space; SentencePiece's dummy prefix does not.
    """
    out = _with_flags(slow, fast)
    if out is None:
        return None
    steps = json.loads(out.backend_tokenizer.to_str())
    if (steps.get("pre_tokenizer") or {}).get("type") != "Metaspace" or steps.get("normalizer"):
        return None
    mark = steps["pre_tokenizer"]["replacement"]
    steps["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": mark},
            {"type": "Replace", "pattern": {"String": " "}, "content": mark},
        ],
    }
    steps["pre_tokenizer"] = None
    steps["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": mark}, "content": " "},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    out._tokenizer = type(fast.backend_tokenizer).from_str(json.dumps(steps))
    return out


def set_added_tokens(fast: Any, added: Mapping[int, Any]) -> None:
    """Replace a fast tokenizer's added tokens, in place: by id, with all their flags.

    The tokenizers library keeps the flags of a token that it knows when it is added again.
    """
    content = json.loads(fast.backend_tokenizer.to_str())
    flags = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    content["added_tokens"] = [
        {"id": number} | {flag: getattr(token, flag) for flag in flags} for number, token in sorted(added.items())
    ]
    fast._tokenizer = type(fast.backend_tokenizer).from_str(json.dumps(content))


def _converted(slow: Any) -> Any | None:
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import convert_slow_tokenizer

    try:
        backend = convert_slow_tokenizer(slow)
    except (ValueError, AttributeError, ImportError):
        return None  # transformers has no converter for this class; the caller keeps the slow one and says so
    names = {name: str(token) for name, token in slow.special_tokens_map.items() if isinstance(token, str)}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **names)
