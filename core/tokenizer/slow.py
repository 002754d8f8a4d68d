"""The slow tokenizer of a folder's SentencePiece model, which transformers 5 no longer loads by itself."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

_log = logging.getLogger(__name__)
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_SPACE = "\u2581"


class SlowTokenizer(SentencePieceBackend):
    """Pieces by the sentencepiece library; without ``legacy``, no space is put before what follows a special token.

    Args:
        legacy: as tokenizer_config.json says. False needs protobuf.
        options: those of the base class.
    """

    def __init__(self, legacy: bool = True, **options: Any) -> None:
        first = SentencePieceProcessor(model_file=options["vocab_file"]).encode("a", out_type=str)[0]
        self._puts_space = not legacy and first.startswith(_SPACE)  # which the base class then switches off
        super().__init__(legacy=legacy, **options)

    def tokenize(self, text: str, **options: Any) -> list[str]:  # type: ignore[override]  # as the Python ones have it
        """The text's pieces and special tokens."""
        if not text or not self._puts_space:
            return list(super().tokenize(text, **options))
        tokens = list(super().tokenize(_SPACE + text.replace(_SPACE, " "), **options))
        alone = len(tokens) > 1 and tokens[0] == _SPACE and tokens[1] in self.added_tokens_encoder
        return tokens[1:] if alone else tokens

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        """The text, with pieces that stand for bytes as those bytes."""
        parts = (bytes.fromhex(one[3:5]) if _BYTE.fullmatch(one) else one.encode() for one in tokens)
        return b"".join(parts).decode("utf-8", errors="replace").replace(_SPACE, " ")

    def take_added(self, fast: Any) -> None:
        """Know the tokens that only tokenizer.json has, by the same ids and with the same flags."""
        for number, token in fast.added_tokens_decoder.items():
            if token.content not in self._added_tokens_encoder:
                self._added_tokens_decoder[number] = token
                self._added_tokens_encoder[token.content] = number
        self._update_trie()


def load_slow(folder: Path, fast: Any) -> SlowTokenizer | None:
    """The slow tokenizer of ``tokenizer.model``, or ``None``, with a warning, where that can't be read.

    Args:
        folder: holds tokenizer.model.
        fast: that of the folder's tokenizer.json.
    """
    try:
        slow = SlowTokenizer.from_pretrained(folder)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        _log.warning("tokenizer.model and tokenizer.json are not compared: %s", str(error).strip().split("\n")[0])
        return None
    slow.take_added(fast)
    return slow
