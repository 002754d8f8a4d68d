"""An Ollama Modelfile whose Go template writes what the tokenizer's own chat template writes.

The pieces between messages are read off chats that the tokenizer renders, whatever the template's family (ChatML,
Llama 3, Mistral, Gemma, harmony, ...). The result counts only if it gives the same text on longer chats.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unsloth_plugins.core.errors import ExportError, UnsupportedError
from unsloth_plugins.core.export.folder import appearing_file

_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p")} | {
    "repetition_penalty": "repeat_penalty"
}
_SYSTEM, _USER, _ANSWER, _NEXT = "SYSTEM.TEXT", "FIRST.QUESTION", "FIRST.ANSWER", "SECOND.QUESTION"


@dataclass(frozen=True)
class Turns:
    """The fixed text of a chat template.

    Attributes:
        start: before the first question of a chat without a system message.
        system_start, system_end: around the system message, up to the question that it stands before.
        system_place: "first" or "last": the question that the system message stands before.
        to_answer: from a question to its answer.
        to_question: from an answer to the next question.
        open: from the last question to where the model goes on.
        note: what differs from the tokenizer's template, if anything.
    """

    start: str
    system_start: str
    system_end: str
    system_place: str
    to_answer: str
    to_question: str
    open: str
    note: str | None = None

    def render(self, messages: Sequence[dict[str, str]]) -> str:
        """What the Go template writes for a chat that ends with a question."""
        system = next((each["content"] for each in messages if each["role"] == "system"), None)
        rest = [each for each in messages if each["role"] != "system"]
        out = self.start if system is None or self.system_place == "last" else ""
        questions = [number for number, each in enumerate(rest) if each["role"] == "user"]
        for number, each in enumerate(rest):
            if system is not None and number == questions[0 if self.system_place == "first" else -1]:
                out += self.system_start + system + self.system_end
            out += each["content"]
            last = number == len(rest) - 1
            out += self.open if last else self.to_answer if each["role"] == "user" else self.to_question
        return out

    def go_template(self) -> str:
        """In the language of Go's text/template, over Ollama's ``.System`` and ``.Messages``."""
        system = f"{_text(self.system_start)}{{{{ $.System }}}}{_text(self.system_end)}"
        if self.system_place == "first":
            head, before = f"{{{{ if .System }}}}{system}{{{{ else }}}}{_text(self.start)}{{{{ end }}}}", ""
        else:
            head, before = _text(self.start), f"{{{{ if and $last $.System }}}}{system}{{{{ end }}}}"
        return (
            f"{head}{{{{ range $i, $m := .Messages }}}}{{{{ $last := eq (len (slice $.Messages $i)) 1 }}}}"
            f'{{{{ if eq $m.Role "user" }}}}{before}{{{{ $m.Content }}}}'
            f"{{{{ if $last }}}}{_text(self.open)}{{{{ else }}}}{_text(self.to_answer)}{{{{ end }}}}"
            f'{{{{ else if eq $m.Role "assistant" }}}}{{{{ $m.Content }}}}'
            f"{{{{ if not $last }}}}{_text(self.to_question)}{{{{ end }}}}{{{{ end }}}}{{{{ end }}}}"
        )


def _text(text: str) -> str:
    """As it is, or quoted where Go or the Modelfile would take it for something else."""
    special = "{{" in text or text.endswith("{") or '"' in text
    return "{{ " + json.dumps(text, ensure_ascii=False) + " }}" if special else text


def _render(tokenizer: Any, messages: Sequence[dict[str, str]]) -> str | None:
    from unsloth_plugins.core.tokenizer.checks import render  # needs jinja2

    text = render(tokenizer, messages, add_generation_prompt=True)
    if text is None:
        return None  # the template refuses such a chat, as Gemma's does with a system message
    bos = tokenizer.bos_token
    adds_bos = bos is not None and tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id]
    return text.removeprefix(bos) if adds_bos else text  # llama.cpp adds it by itself then


def _cut(text: str | None, *marks: str) -> list[str] | None:
    """The text before, between and after the marks, which must occur once each and in this order."""
    parts: list[str] = []
    for mark in marks:
        if text is None or text.count(mark) != 1:
            return None
        before, _, text = text.partition(mark)
        parts.append(before)
    return None if text is None else [*parts, text]


def turns_of(tokenizer: Any) -> Turns:
    """Read the fixed text off the tokenizer's chat template.

    Raises:
        UnsupportedError: no chat template, or one that is not made of turns.
    """
    if not tokenizer.chat_template:
        raise UnsupportedError(
            expected="a tokenizer with a chat template",
            got="none",
            remedy="Give it one with `unsloth-plugins tokenizer`, or write the Modelfile by hand; "
            "the GGUF is complete.",
        )
    chat = _chat(_USER, _ANSWER, _NEXT)
    text = _render(tokenizer, chat)
    if text is None:
        from unsloth_plugins.core.tokenizer.checks import why_not_rendered

        why = why_not_rendered(tokenizer, chat, add_generation_prompt=True)
        raise _not_turns(f"one that cannot render a question and its answer: {why}")
    parts = _cut(text, _USER, _ANSWER, _NEXT)
    if parts is None:
        raise _not_turns("one that leaves out or repeats messages")
    start, to_answer, to_question, opened = parts
    text, note = _render(tokenizer, [{"role": "system", "content": _SYSTEM}, *chat]), None
    first, last = _cut(text, _SYSTEM, _USER, _ANSWER, _NEXT), _cut(text, _USER, _ANSWER, _SYSTEM, _NEXT)
    if first is not None:
        system, place = (first[0], first[1]), "first"
    elif last is not None and last[2].startswith(to_question):
        system, place = (last[2].removeprefix(to_question), last[3]), "last"
    elif text is None:
        system, place = (start, "\n\n"), "first"
        note = "The chat template refuses system messages: the Modelfile puts them before the first question."
    else:
        raise _not_turns("one that leaves out the system message")
    if "strftime_now" in str(tokenizer.chat_template):
        today = "The chat template writes the date of the day: the Modelfile keeps that of the export."
        note = today if note is None else f"{note} {today}"
    turns = Turns(start, *system, place, to_answer, to_question, opened, note)
    for questions in (("a",), ("a", "b", "c"), ("a", "b", "c\nd", "e", "f")):
        for lead in ([], [{"role": "system", "content": "Be brief."}]):
            messages = [*lead, *_chat(*questions)]
            wanted = _render(tokenizer, messages)
            if wanted is not None and turns.render(messages) != wanted:
                raise _not_turns(f"one that writes {wanted[-200:]!r}")
    return turns


def _chat(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]


def _not_turns(got: str) -> UnsupportedError:
    return UnsupportedError(
        expected="a chat template made of turns with fixed text between them",
        got=got,
        remedy="Write the Modelfile by hand; the GGUF is complete.",
    )


def stop_tokens(tokenizer: Any, stop_ids: Sequence[int] = ()) -> list[str]:
    """Every token that ends an answer: the end token, what the template writes after an answer, the model's stops."""
    text = str(tokenizer.apply_chat_template(_chat("a", _ANSWER), tokenize=False))
    rest = text[text.rindex(_ANSWER) + len(_ANSWER) :].lstrip() if _ANSWER in text else ""
    added = [str(token.content) for token in tokenizer.added_tokens_decoder.values()]
    after = sorted((token for token in added if rest.startswith(token)), key=len)[-1:]
    by_model = tokenizer.convert_ids_to_tokens([number for number in stop_ids if 0 <= number < len(tokenizer)])
    return list(dict.fromkeys(token for token in [tokenizer.eos_token, *after, *by_model] if token))


def sampling_of(generation: Mapping[str, Any]) -> dict[str, float]:
    """What a generation config says of sampling, by Ollama's names; nothing where it switches sampling off.

    Raises:
        ExportError: something that is no finite number.
    """
    if generation.get("do_sample") is False:
        return {}
    found = {}
    for name, ours in _SAMPLING.items():
        value = generation.get(name)
        if value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise ExportError(
                expected=f"{name} in the model's generation_config.json to be a number",
                got=reprlib.repr(value),
                remedy="generation_config.json is damaged: download or save it again.",
            )
        found[ours] = value
    return found


def modelfile(
    gguf_name: str,
    tokenizer: Any,
    *,
    stop_ids: Sequence[int] = (),
    context: int | None = None,
    sampling: Mapping[str, float] | None = None,
) -> str:
    """The text of a Modelfile.

    Args:
        gguf_name: path of the GGUF, relative to the Modelfile.
        tokenizer: with a chat template.
        stop_ids: at which the model stops, by its generation config.
        context: tokens of context that Ollama shall reserve; its own default otherwise.
        sampling: further parameters, by Ollama's names.

    Raises:
        UnsupportedError: see ``turns_of``.
    """
    turns = turns_of(tokenizer)
    lines = [f"FROM ./{gguf_name}", f'TEMPLATE """{turns.go_template()}"""']
    lines += [f"PARAMETER stop {json.dumps(token, ensure_ascii=False)}" for token in stop_tokens(tokenizer, stop_ids)]
    lines += [f"PARAMETER {name} {value}" for name, value in (sampling or {}).items()]
    if context:
        lines.append(f"PARAMETER num_ctx {context}")
    head = [f"# {turns.note}"] if turns.note else []
    return "\n".join([*head, *lines]) + "\n"


def modelfile_place(gguf: Path) -> Path:
    """``Modelfile`` beside a GGUF, or ``NAME.Modelfile`` where another file has that name.

    Raises:
        ExportError: both are there.
    """
    first, second = gguf.parent / "Modelfile", gguf.with_suffix(".Modelfile")
    if not first.exists():
        return first
    if second.exists():
        raise ExportError(
            expected=f"no {second.name} in {gguf.parent} yet, beside a Modelfile",
            got="one",
            remedy="Remove it, or choose another name.",
        )
    return second


def write_modelfile(target: Path, text: str) -> Path:
    """Write what ``modelfile`` gave to a file that must not exist, and return that.

    Raises:
        ExportError: it does.
    """
    with appearing_file(target) as hidden:
        hidden.write_text(text, encoding="utf-8")
    return target
