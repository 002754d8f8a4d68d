"""Repairs of a tokenizer: each one is reported, none is made twice, and a dry run makes none."""

from __future__ import annotations

import copy
import json
import logging
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import AddedToken
from tokenizers.processors import TemplateProcessing

from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.tokenizer.checks import (
    Finding,
    check_tokenizer,
    end_of_turn,
    marked_template,
    render,
    rows_of,
    text_tokenizer,
    untrained_ids,
    weights_by_token,
    why_not_rendered,
)
from unsloth_plugins.core.tokenizer.pairs import choose_tokenizer, set_added_tokens
from unsloth_plugins.core.tokenizer.ranked import to_bpe
from unsloth_plugins.core.tokenizer.templates import KNOWN

_log = logging.getLogger(__name__)
_PADS = ("<pad>", "[PAD]", "<|pad|>", "<|padding|>", "<|finetune_right_pad_id|>", "<|vision_pad|>", "<|endoftext|>")
_SPARE = re.compile(r"reserved|unused|<SPECIAL_\d+>|extra_id|dummy|placeholder", re.IGNORECASE)
_NEW_PAD = "<|pad|>"


@dataclass
class RepairReport:
    """What a repair did, or would do.

    Attributes:
        dry_run: whether nothing was changed.
        done: one sentence for each change.
        left: findings that are up to the user.
    """

    dry_run: bool
    done: list[str] = field(default_factory=list)
    left: list[Finding] = field(default_factory=list)


def repair_tokenizer(
    model_or_config: Any,
    tokenizer: Any,
    slow: Any | None = None,
    *,
    chat_template: str | None = None,
    add_tokens: bool = False,
    dry_run: bool = False,
) -> RepairReport:
    """Repair in place what ``check_tokenizer`` finds. A second call changes nothing; the padding side is left alone.

    Args:
        model_or_config: as for ``check_tokenizer``. Its end and padding ids follow the tokenizer's. Only a model can
            have its embedding grown.
        tokenizer: as for ``check_tokenizer``. A processor's own chat template follows, where it was its tokenizer's.
        slow: as for ``check_tokenizer``; it is left as it is.
        chat_template: "chatml", "harmony" (both with generation markers) or a template's text, for a tokenizer
            that has none or a broken one.
        add_tokens: add the tokens of ChatML where the vocabulary lacks them, as Llama 2's and Mistral's do, and the
            chat template that is there or asked for writes them.
        dry_run: work on copies and change nothing. The embedding is not copied: its repairs are only named.

    Returns:
        The report; every change is logged as a warning too.

    Raises:
        ConfigError: the vocabulary lacks the tokens of the chat template that was asked for, or it renders no chat; or
            see ``check_tokenizer``.
        UnsupportedError: the embedding would have to grow, and PEFT has adapters on it or on the head. Nothing is
            changed then.
    """
    processor, tokenizer = tokenizer, text_tokenizer(tokenizer)
    if chat_template is not None and not isinstance(chat_template, str):
        raise ConfigError(
            expected="chat_template to be a text",
            got=type(chat_template).__name__,
            remedy="Give a template, or its name.",
        )
    before = tokenizer.chat_template
    if dry_run or _adapted(model_or_config):  # the latter so that growth is refused before the first change
        report = _repair(_Copied(model_or_config), copy.deepcopy(tokenizer), slow, chat_template, add_tokens)
    if not dry_run:
        report = _repair(model_or_config, tokenizer, slow, chat_template, add_tokens)
        if processor is not tokenizer and getattr(processor, "chat_template", None) == before:
            processor.chat_template = tokenizer.chat_template
    report.dry_run = dry_run
    for entry in report.done:
        _log.warning("%s%s", "Would repair " if dry_run else "Repaired ", entry)
    return report


def _repair(model: Any, tokenizer: Any, slow: Any | None, chat_template: str | None, add_tokens: bool) -> RepairReport:
    report = RepairReport(dry_run=False)
    if slow is not None and (change := _as_slow(slow, tokenizer)):
        report.done.append(f"slow-fast-differ: {change}")  # first: later repairs make tokens that the slow one lacks
    tried: set[tuple[str, str]] = set()
    repaired: set[tuple[str, str]] = set()
    while waiting := [each for each in _order(check_tokenizer(model, tokenizer)) if _key(each) not in tried]:
        finding = waiting[0]  # one at a time: a repair may bring or settle others
        tried.add(_key(finding))
        if change := _change(finding, model, tokenizer, chat_template, add_tokens):
            report.done.append(f"{finding.code}: {change}")
            repaired.add(_key(finding))
    report.left = [each for each in check_tokenizer(model, tokenizer, slow) if _key(each) not in repaired]
    return report


class _Copied:
    """Stands for a model in a dry run: copies of its configs, and one number for each row of embedding and head."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.config = copy.deepcopy(getattr(model, "config", model))
        self.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
        self._rows = {
            part: weight.any(dim=1, keepdim=True).float().cpu() for part, weight in weights_by_token(model).items()
        }
        self._padding = None
        if self._rows:
            self._padding = getattr(model.get_input_embeddings(), "padding_idx", None)
            self.resize_token_embeddings = self._resize
        else:
            self._rows["embedding"] = torch.ones(rows_of(model), 1)

    def get_input_embeddings(self) -> Any:
        """Looks like an embedding of width 1 that is zero where the model's is."""
        return SimpleNamespace(weight=self._rows["embedding"], padding_idx=self._padding)

    def get_output_embeddings(self) -> Any:
        """The same for a head that is a matrix of its own."""
        return SimpleNamespace(weight=self._rows["head"]) if "head" in self._rows else None

    def _resize(self, rows: int) -> None:
        _check_growth(self._model, rows)
        for part, old in self._rows.items():
            self._rows[part] = torch.cat((old, torch.ones(max(rows - len(old), 0), 1)))


def _key(finding: Finding) -> tuple[str, str]:
    return finding.code, finding.message


def _order(findings: list[Finding]) -> list[Finding]:
    """What tokens there are, then the template, since the end token follows from it; padding after the end token."""
    order = [
        "unigram-of-bpe",
        "chat-template-missing",
        "chat-template-broken",
        "end-of-turn-missing",
        "generation-markers-missing",
        "special-token-splits",
        "eos-is-not-end-of-turn",
    ]
    return sorted(findings, key=lambda each: order.index(each.code) if each.code in order else len(order))


def _change(finding: Finding, model: Any, tokenizer: Any, template: str | None, add_tokens: bool) -> str | None:
    """Make one repair; says what it did, or ``None`` where it did nothing."""
    if finding.code == "end-of-turn-missing":
        return _chatml_tokens(tokenizer) if add_tokens and finding.repair else None
    if finding.code == "eos-is-not-end-of-turn":
        before, tokenizer.eos_token = tokenizer.eos_token, end_of_turn(tokenizer)
        _stop_at(model, tokenizer.eos_token_id)
        return f"the end token is {tokenizer.eos_token!r} now, it was {before!r}"
    if finding.code == "model-stops-elsewhere":
        end = end_of_turn(tokenizer)
        number = tokenizer.convert_tokens_to_ids(end) if end else tokenizer.eos_token_id
        return f"the model stops at {number} as well" if _stop_at(model, number) else None
    if finding.code in ("pad-missing", "pad-is-eos"):
        return _new_pad(model, tokenizer)
    if finding.code == "ids-outside-embedding":
        return resize_embeddings(model, tokenizer) if hasattr(model, "resize_token_embeddings") else None
    if finding.code in ("double-bos", "bos-missing"):
        return _one_bos(tokenizer)
    if finding.code == "unigram-of-bpe":
        return _as_bpe(tokenizer)
    if finding.code == "special-token-splits":
        return _as_special(tokenizer, str(finding.token))
    if finding.code == "byte-fallback":
        tokenizer.backend_tokenizer.model.byte_fallback = False
        return "byte_fallback is off"
    if finding.code in ("chat-template-missing", "chat-template-broken"):
        return _new_template(tokenizer, template, add_tokens) if template else None
    if finding.code == "generation-markers-missing":
        return _markers(tokenizer)
    if finding.code in ("zero-embedding", "zero-head"):
        return _mean_rows(model, tokenizer, finding.code.removeprefix("zero-"))
    return None


def _stop_at(model: Any, number: int) -> bool:
    """Let config and generation config stop at ``number`` too; whether there was one to change."""
    holders = [getattr(model, "config", model), getattr(model, "generation_config", None)]
    holders = [holder for holder in holders if holder is not None and not isinstance(holder, int)]
    for holder in holders:
        stops = getattr(holder, "eos_token_id", None)
        several = [stops] if isinstance(stops, int) else list(stops or ())
        if number not in several:
            holder.eos_token_id = [number, *several] if several else number
    return bool(holders)


def _new_pad(model: Any, tokenizer: Any) -> str | None:
    rows, before = rows_of(model), tokenizer.pad_token
    vocabulary = tokenizer.get_vocab()
    text = str(tokenizer.chat_template) + (render(tokenizer) or "")
    taken = {tokenizer.eos_token, tokenizer.bos_token, end_of_turn(tokenizer)}
    special = [token.content for _, token in sorted(tokenizer.added_tokens_decoder.items())]
    candidates = [token for token in _PADS if token in vocabulary]
    candidates += [token for token in special if _SPARE.search(token)]
    spare = [one for one in candidates if one not in taken and one not in text and vocabulary[one] < rows]
    how = "a spare token that was there"
    if not spare:
        full = max(vocabulary.values()) + 1 >= rows
        if full and not hasattr(model, "resize_token_embeddings"):
            return None  # an id without a row would be worse
        spare = [_NEW_PAD]
        tokenizer.add_special_tokens({"pad_token": _NEW_PAD})
        how = f"a new token; {resize_embeddings(model, tokenizer)}" if full else "a new token in an unused row"
    tokenizer.pad_token = spare[0]
    for holder in (getattr(model, "config", model), getattr(model, "generation_config", None)):
        if holder is not None and hasattr(holder, "pad_token_id"):
            holder.pad_token_id = tokenizer.pad_token_id
    return f"padding is {spare[0]!r} (id {tokenizer.pad_token_id}), {how}; it was {before!r}"


def _as_slow(slow: Any, tokenizer: Any) -> str | None:
    choice = choose_tokenizer(slow, tokenizer)
    if choice.tokenizer is slow or not choice.failing:
        return None
    steps = choice.tokenizer.backend_tokenizer
    steps.post_processor = tokenizer.backend_tokenizer.post_processor
    tokenizer._tokenizer = steps
    return f"{choice.how}, which reads {len(choice.failing)} more probe texts like the slow one"


def _as_special(tokenizer: Any, token: str) -> str | None:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        return None
    plain = AddedToken(token, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True)
    set_added_tokens(tokenizer, {**tokenizer.added_tokens_decoder, tokenizer.convert_tokens_to_ids(token): plain})
    return f"{token!r} is special now"


def _one_bos(tokenizer: Any) -> str | None:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    bos, eos = tokenizer.bos_token, tokenizer.eos_token
    ends = tokenizer("a").input_ids[-1] == tokenizer.eos_token_id
    tail = f" {eos}" if ends else ""
    known = [(bos, tokenizer.bos_token_id)] + ([(eos, tokenizer.eos_token_id)] if ends else [])
    backend.post_processor = TemplateProcessing(
        single=f"{bos} $A{tail}", pair=f"{bos} $A{tail} $B:1{tail and tail + ':1'}", special_tokens=known
    )
    return "one BOS is added to a text now"


def _as_bpe(tokenizer: Any) -> str:
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    to_bpe(content)
    tokenizer._tokenizer = type(tokenizer.backend_tokenizer).from_str(json.dumps(content))
    return f"a BPE of {len(content['model']['merges'])} merges, with {len(content['added_tokens'])} added tokens"


def _new_template(tokenizer: Any, template: str, add_tokens: bool) -> str:
    text, needed = KNOWN.get(template, (template, ()))
    missing = [token for token in needed if token not in tokenizer.get_vocab()]
    added = missing if add_tokens and template == "chatml" else []
    missing = [token for token in missing if token not in added]
    if missing or (template not in KNOWN and "{" not in template):
        raise ConfigError(
            expected=f"a chat template whose tokens the vocabulary has: {', '.join(KNOWN)}, or a template's text",
            got=f"{template!r}" + (f", without {', '.join(missing)} in the vocabulary" if missing else ""),
            remedy="Choose the template that the model was made for, as a name or a file (--chat-template), "
            "or add ChatML's tokens (--add-tokens).",
        )
    if (why := why_not_rendered(tokenizer, chat_template=text)) is not None:
        raise ConfigError(
            expected="a chat template that can render a question and its answer",
            got=why,
            remedy="Correct the one that was given (--chat-template), or choose " + " or ".join(KNOWN) + ".",
        )
    tokenizer.add_tokens(added, special_tokens=True)
    tokenizer.chat_template = text
    now = f"the chat template is {template if template in KNOWN else 'the given one'} now"
    return now + (f", and {', '.join(added)} are new tokens" if added else "")


def _chatml_tokens(tokenizer: Any) -> str:
    known = {token.content for token in tokenizer.added_tokens_decoder.values()}
    text = render(tokenizer) or ""
    added = [token for token in KNOWN["chatml"][1] if token in text and token not in known]
    tokenizer.add_tokens(added, special_tokens=True)
    return f"{', '.join(added)} are special tokens now"


def _markers(tokenizer: Any) -> str | None:
    found = marked_template(tokenizer)
    if found is None:
        return None
    tokenizer.chat_template, answer = found
    return f"generation markers added; of the probe chat they cover {answer!r}"


def _mean_rows(model: Any, tokenizer: Any, part: str) -> str:
    ids = untrained_ids(model, tokenizer, part)
    weight = weights_by_token(model)[part]
    with torch.no_grad():
        used = weight.any(dim=1)
        weight[ids] = weight[used].float().mean(0).to(weight.dtype)
    return f"the {part} of ids {ids} starts at the mean of the others"


def _adapted(model: Any) -> str | None:
    """PEFT's wrapper around embedding or head, by name, if there is one: then they can't be resized."""
    for part, name in (("embedding", "get_input_embeddings"), ("head", "get_output_embeddings")):
        module = getattr(model, name, lambda: None)()
        if hasattr(module, "base_layer") or hasattr(module, "original_module"):
            return f"{type(module).__name__} of PEFT around the {part}"
    return None


def _check_growth(model: Any, rows: int) -> None:
    if found := _adapted(model):
        raise UnsupportedError(
            expected=f"an embedding and a head without adapters on them, to grow to {rows} rows",
            got=found,
            remedy="Repair or resize before get_peft_model, with the model that it is given.",
        )


def resize_embeddings(model: Any, tokenizer: Any) -> str | None:
    """Give every token of the tokenizer a row in embedding and head; rows that are there are never cut off.

    Args:
        model: a transformers model.
        tokenizer: with the new tokens in it; of a processor, its tokenizer is meant.

    Returns:
        What was done, or ``None`` where the matrices are large enough.

    Raises:
        ConfigError: see ``check_tokenizer``.
        UnsupportedError: the matrices would have to grow, and PEFT has adapters on one of them.
    """
    needed = max(text_tokenizer(tokenizer).get_vocab().values()) + 1
    rows = rows_of(model)
    if rows >= needed:
        return None
    _check_growth(model, needed)
    model.resize_token_embeddings(needed)
    return f"embedding and head grew from {rows} to {needed} rows"
