"""What can be wrong with a tokenizer, found without changing it.

A model is asked only for the number of rows of its embedding and for the ids at which it stops.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jinja2 import TemplateError, TemplateSyntaxError

from unsloth_plugins.core.errors import ConfigError
from unsloth_plugins.core.tokenizer.labels import assistant_labels
from unsloth_plugins.core.tokenizer.pairs import choose_tokenizer
from unsloth_plugins.core.tokenizer.ranked import is_ranked
from unsloth_plugins.core.tokenizer.templates import CHATML_END, has_markers, with_markers

_QUESTION, _ANSWER = "a question", "an answer"
_PAD_REPAIR = "use a spare token, else a new one where the embedding has a row for it or the model can grow"
_FAILURES = (TemplateError, TypeError, ValueError)  # the last: several templates and no default among them
CHAT = ({"role": "user", "content": _QUESTION}, {"role": "assistant", "content": _ANSWER})
_CHATS = (
    CHAT,
    (*CHAT, *CHAT),
    ({"role": "system", "content": "be brief"}, *CHAT, {"role": "user", "content": "  more? "}),
)


@dataclass(frozen=True)
class Finding:
    """One fault, or a caution.

    Attributes:
        code: a short fixed name, such as "pad-is-eos".
        message: what was found and what it does to training or use.
        repair: what ``repair_tokenizer`` does about it, or ``None`` where that is up to the user.
        token: the one that it is about, where it is about one.
        caution: nothing is wrong with the tokenizer, but there is a way of using it that is.
    """

    code: str
    message: str
    repair: str | None = None
    token: str | None = None
    caution: bool = False


def rows_of(model_or_config: Any) -> int:
    """Rows of the input embedding: of a model, by its config, or the number itself.

    Raises:
        ConfigError: none of these.
    """
    if isinstance(model_or_config, int):
        return model_or_config
    if hasattr(model_or_config, "get_input_embeddings"):
        return int(model_or_config.get_input_embeddings().weight.shape[0])
    config = getattr(model_or_config, "text_config", None) or model_or_config
    if isinstance(getattr(config, "vocab_size", None), int) and not hasattr(config, "get_vocab"):
        return int(config.vocab_size)
    raise ConfigError(
        expected="a model, its config, or the number of rows of its embedding",
        got=type(model_or_config).__name__,
        remedy="Pass what from_pretrained returned.",
    )


def text_tokenizer(tokenizer: Any) -> Any:
    """The tokenizer itself; of a processor, its tokenizer.

    Raises:
        ConfigError: neither.
    """
    for found in (tokenizer, getattr(tokenizer, "tokenizer", None)):
        if hasattr(found, "get_vocab") and hasattr(found, "added_tokens_decoder"):
            return found
    is_model = hasattr(tokenizer, "get_input_embeddings")
    raise ConfigError(
        expected="a tokenizer of transformers, or a processor that has one",
        got=type(tokenizer).__name__,
        remedy="The model comes first, then its tokenizer." if is_model else "Pass what from_pretrained returned.",
    )


def _ids(value: Any) -> set[int]:
    return set() if value is None else {value} if isinstance(value, int) else set(value)


def stops_of(model_or_config: Any) -> set[int]:
    """The ids at which the model stops, by its generation config or else its config; empty if nobody says."""
    generation = getattr(model_or_config, "generation_config", None)
    config = getattr(model_or_config, "config", model_or_config)
    return _ids(getattr(generation, "eos_token_id", None)) or _ids(getattr(config, "eos_token_id", None))


def render(tokenizer: Any, chat: Sequence[Any] = CHAT, **options: Any) -> str | None:
    """The chat as text, or ``None`` without a template or where the template fails or refuses the chat."""
    if not tokenizer.chat_template:
        return None
    try:
        return _rendered(tokenizer, chat, **options)
    except _FAILURES:
        return None


def why_not_rendered(tokenizer: Any, chat: Sequence[Any] = CHAT, **options: Any) -> str | None:
    """What the template engine says against the chat, with the line where it can't read the template; else ``None``."""
    try:
        _rendered(tokenizer, chat, **options)
    except _FAILURES as error:
        line = f" (line {error.lineno} of the template)" if isinstance(error, TemplateSyntaxError) else ""
        return f"{type(error).__name__}: {error}{line}"
    return None


def _rendered(tokenizer: Any, chat: Sequence[Any], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **options))


def after_answer(tokenizer: Any) -> str | None:
    """What the chat template writes after the last answer, or ``None`` where the answer is not in what it writes."""
    text = render(tokenizer)
    return text[text.rindex(_ANSWER) + len(_ANSWER) :].lstrip() if text is not None and _ANSWER in text else None


def end_of_turn(tokenizer: Any) -> str | None:
    """The token that the chat template writes right after an assistant's answer."""
    rest = after_answer(tokenizer)
    if rest is None:
        return None
    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    fitting = [token for token in added if rest.startswith(token)]
    return max(fitting, key=len) if fitting else None


def marked_template(tokenizer: Any) -> tuple[str, str] | None:
    """The chat template with markers, if it renders every probe chat as before and marks the answer and its end.

    Returns:
        The template and what it marks of the probe chat, or ``None`` where there is no such template.
    """
    marked = with_markers(tokenizer.chat_template)
    if marked is None:
        return None
    for chat in _CHATS:
        for prompt in (False, True):
            wanted = render(tokenizer, chat, add_generation_prompt=prompt)
            if render(tokenizer, chat, add_generation_prompt=prompt, chat_template=marked) != wanted:
                return None
    try:
        labels = assistant_labels(tokenizer, CHAT, chat_template=marked)["labels"]
    except ConfigError:
        return None  # the markers are in a part that this chat does not reach
    answer = tokenizer.decode([label for label in labels if label >= 0])
    return (marked, answer) if answer.startswith(_ANSWER + (end_of_turn(tokenizer) or "")) else None


def check_tokenizer(model_or_config: Any, tokenizer: Any, slow: Any | None = None) -> list[Finding]:
    """All faults of a tokenizer for this model; nothing is changed.

    Args:
        model_or_config: the model, its config, or the number of rows of its embedding.
        tokenizer: of transformers; of a processor, its tokenizer is meant.
        slow: the one that it was made from, where there is one: both must read the probe texts alike.

    Returns:
        Findings, the most harmful kinds first. Empty when all is well.

    Raises:
        ConfigError: no tokenizer, or nothing that tells the number of rows.
    """
    tokenizer = text_tokenizer(tokenizer)
    rows = rows_of(model_or_config)
    slow = None if slow is None else text_tokenizer(slow)
    findings = [*_outside(rows, tokenizer), *_end(model_or_config, tokenizer), *_pad(tokenizer)]
    findings += [*_bos(model_or_config, tokenizer), *_splitting(tokenizer), *_template(tokenizer)]
    findings += _pair(slow, tokenizer) if slow is not None else []
    return [*findings, *_untrained(model_or_config, tokenizer)]


def _pair(slow: Any, fast: Any) -> list[Finding]:
    choice = choose_tokenizer(slow, fast)
    if not choice.failing:
        return []
    message = f"the slow tokenizer reads {len(choice.failing)} probe texts otherwise, such as {choice.failing[0]!r}"
    if choice.tokenizer is not slow:
        return [Finding("slow-fast-differ", message, f"take {choice.how}")]
    message += "; no fast one equals it: train and serve with the same of the two"
    return [Finding("slow-fast-differ", message, caution=True)]


def _outside(rows: int, tokenizer: Any) -> list[Finding]:
    outside = sorted((number, token) for token, number in tokenizer.get_vocab().items() if number >= rows)
    if not outside:
        return []
    shown = ", ".join(f"{token!r} = {number}" for number, token in outside[:3])
    message = f"{len(outside)} tokens have ids beyond the {rows} rows of the embedding: {shown}"
    return [Finding("ids-outside-embedding", message, "grow the embedding (needs the model)")]


def _end(model_or_config: Any, tokenizer: Any) -> list[Finding]:
    found = []
    end, eos = end_of_turn(tokenizer), tokenizer.eos_token
    stops = stops_of(model_or_config)
    number = tokenizer.convert_tokens_to_ids(end) if end else None
    rest = after_answer(tokenizer)
    if rest is not None and end is None:
        what = f"with {rest[:40]!r}, which begins with no special token" if rest else "with nothing"
        repair = "add ChatML's tokens if you say so (--add-tokens)" if rest.startswith(CHATML_END) else None
        found.append(
            Finding("end-of-turn-missing", f"the chat template ends an answer {what}: answers never stop", repair)
        )
    if end and end != eos and number not in stops:
        message = f"the chat template ends an answer with {end!r}, but the end token is {eos!r}: answers never stop"
        found.append(Finding("eos-is-not-end-of-turn", message, f"make {end!r} the end token"))
    elif eos is None:
        found.append(Finding("eos-missing", "there is no end token: answers never stop"))
    expected = number if number is not None else tokenizer.eos_token_id
    if stops and expected is not None and expected not in stops:
        message = f"the model stops at {sorted(stops)}, not at the end token's id {expected}"
        found.append(Finding("model-stops-elsewhere", message, f"let the model stop at {expected} as well"))
    return found


def _pad(tokenizer: Any) -> list[Finding]:
    if tokenizer.pad_token_id is None:
        return [Finding("pad-missing", "there is no padding token", _PAD_REPAIR)]
    if tokenizer.pad_token_id == tokenizer.eos_token_id or tokenizer.pad_token == end_of_turn(tokenizer):
        message = f"padding and end are both {tokenizer.pad_token!r}: collators hide the end from training"
        return [Finding("pad-is-eos", message, _PAD_REPAIR)]
    return []


def _bos(model_or_config: Any, tokenizer: Any) -> list[Finding]:
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    kind = getattr(getattr(model_or_config, "config", model_or_config), "model_type", "") or type(tokenizer).__name__
    if kind.lower().startswith("gemma") and bos not in tokenizer("a").input_ids:
        message = "no BOS is added to a text, and a Gemma without one talks nonsense"
        return [Finding("bos-missing", message, "add one")]
    if tokenizer("a").input_ids[:2] == [bos, bos]:
        return [Finding("double-bos", "every text starts with two BOS tokens", "add one only")]
    text = render(tokenizer)
    if text is not None and tokenizer(text).input_ids[:2] == [bos, bos]:
        message = (
            "the chat template writes BOS and the tokenizer adds another: encode rendered chats with "
            "add_special_tokens=False, or let apply_chat_template encode them"
        )
        return [Finding("double-bos-in-chats", message, caution=True)]
    return []


def _splitting(tokenizer: Any) -> list[Finding]:
    found = []
    named = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, end_of_turn(tokenizer)} - {None}
    for token in sorted(named):
        number = tokenizer.convert_tokens_to_ids(token)
        got = tokenizer(f"a{token}b", add_special_tokens=False).input_ids
        if number not in got:
            message = f"{token!r} inside a text is not read as one token (id {number}): its flags are wrong"
            found.append(Finding("special-token-splits", message, f"mark {token!r} as special", token))
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        content = json.loads(backend.to_str())
        if is_ranked(content["model"]):
            message = "the scores of a BPE are used as Unigram's: words are split into other pieces than in training"
            found.append(Finding("unigram-of-bpe", message, "make it BPE again"))
        if content["model"].get("byte_fallback") and "ByteLevel" in json.dumps(content["pre_tokenizer"]):
            message = "byte_fallback is on in a byte-level tokenizer: converters take it for SentencePiece"
            found.append(Finding("byte-fallback", message, "switch it off"))
    return found


def _template(tokenizer: Any) -> list[Finding]:
    if not tokenizer.chat_template:
        return [
            Finding("chat-template-missing", "there is no chat template", "set the one that you name (--chat-template)")
        ]
    if (why := why_not_rendered(tokenizer)) is not None:
        message = f"the chat template cannot render a question and its answer: {why}"
        return [Finding("chat-template-broken", message, "put the one that you name (--chat-template) in its place")]
    if not isinstance(tokenizer.chat_template, str):
        return []
    if has_markers(tokenizer):
        return []
    message = "the chat template has no {% generation %} markers: the mask of assistant tokens is empty"
    if marked_template(tokenizer) is None:
        message += "; they cannot be added to this one: for a loss on answers alone, mark a template by hand"
        return [Finding("generation-markers-missing", message, caution=True)]
    return [Finding("generation-markers-missing", message, "add them; the rendered text stays equal")]


def weights_by_token(model_or_config: Any) -> dict[str, Any]:
    """The model's embedding, and its head where that is a matrix of its own; nothing without a model."""
    if not hasattr(model_or_config, "get_input_embeddings"):
        return {}
    found = {"embedding": model_or_config.get_input_embeddings().weight}
    head = getattr(model_or_config, "get_output_embeddings", lambda: None)()
    weight = getattr(head, "weight", None)
    if weight is not None and weight is not found["embedding"]:
        found["head"] = weight
    return found


def untrained_ids(model_or_config: Any, tokenizer: Any, part: str = "embedding") -> list[int]:
    """Ids of added tokens whose row in the embedding, or in the head, is zero."""
    weight = weights_by_token(model_or_config).get(part)
    if weight is None:
        return []
    padding = getattr(model_or_config.get_input_embeddings(), "padding_idx", None)
    skipped = (padding, tokenizer.pad_token_id)
    added = [number for number in tokenizer.added_tokens_decoder if number < len(weight) and number not in skipped]
    is_zero = ~weight[added].any(dim=1)
    return torch.tensor(added)[is_zero.cpu()].tolist()


def _untrained(model_or_config: Any, tokenizer: Any) -> list[Finding]:
    found = []
    for part in weights_by_token(model_or_config):
        if ids := untrained_ids(model_or_config, tokenizer, part):
            message = f"the {part} of {len(ids)} added tokens is zero: {ids[:5]}"
            found.append(Finding(f"zero-{part}", message, "start them at the mean of the others"))
    return found
