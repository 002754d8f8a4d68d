"""A vocabulary of SentencePiece's BPE that was read as one of Unigram, and back.

Its scores are places of merges; Unigram adds them up as log probabilities, and cuts words into other pieces. So
transformers 5.16 reads a GGUF of Gemma 3; 5.24 no longer does.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any


def is_ranked(model: dict[str, Any]) -> bool:
    """Whether most scores of a Unigram model go down by exactly one from piece to piece.

    Args:
        model: of tokenizer.json.
    """
    if model["type"] != "Unigram":
        return False
    scores = [score for _, score in model["vocab"]]
    return 2 * sum(one - other == 1 for one, other in pairwise(scores)) > len(scores)


def to_bpe(content: dict[str, Any]) -> None:
    """Make the model of a ranked vocabulary BPE, in place, and pieces without a rank added tokens.

    Args:
        content: of tokenizer.json, with a model that `is_ranked`.
    """
    model = content["model"]
    pieces, scores = zip(*model["vocab"], strict=True)
    last = {piece: number for number, piece in enumerate(pieces)}
    # A piece that is there twice is a byte's token first, named by the character.
    names = [p if last[p] == number else f"<0x{ord(p):02X}>" for number, p in enumerate(pieces)]
    ids = {name: number for number, name in enumerate(names)}
    is_byte = [len(name) == 6 and name.startswith("<0x") for name in names]
    steps = [False, *(one - other == 1 for one, other in pairwise(scores)), False]
    ranked = [before or after for before, after in pairwise(steps)]
    merges = []
    for number, name in enumerate(names):
        if not is_byte[number]:
            place = (1.0, -scores[number]) if ranked[number] else (0.0, float(number))  # runs of spaces come first
            cuts = ((name[:cut], name[cut:]) for cut in range(1, len(name)))
            merges += [(*place, ids[a], ids[b], a, b) for a, b in cuts if a in ids and b in ids]
    known = {token["id"] for token in content["added_tokens"]}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"] += [
        {"id": number, "content": name, **flags}
        for number, name in enumerate(names)
        if not (ranked[number] or is_byte[number] or number in known)
    ]
    content["added_tokens"].sort(key=lambda token: token["id"])
    content["model"] = {
        "type": "BPE",
        "unk_token": names[model["unk_id"]],
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": ids,
        "merges": [list(merge[-2:]) for merge in sorted(merges)],
    }
