"""Chat templates of our own with ``{% generation %}`` markers, and how markers are added to somebody else's."""

from __future__ import annotations

import re
from typing import Any

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Markers cover the answer and its <|im_end|>."""

HARMONY = (
    "{{ '<|start|>system<|message|>' }}"
    "{{ model_identity | default('You are ChatGPT, a large language model trained by OpenAI.') }}"
    "{{ '\\n\\nReasoning: ' + (reasoning_effort | default('medium')) }}"
    "{{ '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}"
    "{% for message in messages %}"
    "{% if message['role'] in ('system', 'developer') %}"
    "{{ '<|start|>developer<|message|># Instructions\\n\\n' + message['content'] + '<|end|>' }}"
    "{% elif message['role'] == 'assistant' %}"
    "{{ '<|start|>assistant' }}"
    "{% generation %}"
    "{% if loop.last and message.get('thinking') %}"
    "{{ '<|channel|>analysis<|message|>' + message['thinking'] + '<|end|><|start|>assistant' }}"
    "{% endif %}"
    "{{ '<|channel|>final<|message|>' + message['content'] + ('<|return|>' if loop.last else '<|end|>') }}"
    "{% endgeneration %}"
    "{% else %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
"""gpt-oss without tools, and without OpenAI's lines on the knowledge cutoff and the current date, so that a text does
not change with the day. The last answer keeps its ``thinking`` in the analysis channel and ends with <|return|>;
earlier ones show what the model sees of them later: the final channel, ended by <|end|>."""

CHATML_END = "<|im_end|>"
KNOWN = {"chatml": (CHATML, ("<|im_start|>", CHATML_END)), "harmony": (HARMONY, ("<|start|>", "<|channel|>"))}
"""Name -> template, and tokens that the vocabulary must have."""

_OUTPUT = re.compile(r"\{\{(-?)(.*?)(-?)\}\}", re.DOTALL)
_CONTENT = re.compile(r"message(\[['\"]content['\"]\]|\.content)\b|message\[['\"]content['\"]\]")
_ROLE = re.compile(r"message(\[['\"]role['\"]\]|\.role\b)")


def has_markers(tokenizer: Any) -> bool:
    """Whether the chat template says which parts the assistant generates."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", str(tokenizer.chat_template)) is not None


def with_markers(template: str) -> str | None:
    """Markers around each output of a message's content and the string right after it, for assistants.

    Only outputs that are a plain sum are understood. The caller must compare what the two templates render.

    Returns:
        The new template, or ``None`` where there is no such output.
    """
    count = 0

    def mark(match: re.Match[str]) -> str:
        nonlocal count
        parts = _summands(match[2])
        places = [number for number, part in enumerate(parts) if _CONTENT.search(part)]
        if len(places) != 1:
            return match[0]
        count += 1
        at = places[0]
        before, inside, after = parts[:at], parts[at : at + 2], parts[at + 2 :]
        body = _output(inside)
        marked = f"{{% generation %}}{body}{{% endgeneration %}}"
        chosen = f"{{% if message['role'] == 'assistant' %}}{marked}{{% else %}}{body}{{% endif %}}"
        left = "{{-" + _output(before)[2:] if match[1] and before else _output(before)
        right = _output(after)[:-2] + "-}}" if match[3] and after else _output(after)
        return left + chosen + right

    out = _OUTPUT.sub(mark, template)
    return out if count and _ROLE.search(template) else None


def _output(parts: list[str]) -> str:
    return "{{ " + " + ".join(parts) + " }}" if parts else ""


def _summands(expression: str) -> list[str]:
    """The parts of ``a + b + c`` outside quotes and brackets."""
    parts, depth, quote, start, skip = [], 0, "", 0, False
    for at, char in enumerate(expression):
        if skip:
            skip = False
        elif quote:
            skip = char == "\\"
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "+" and not depth:
            parts.append(expression[start:at].strip())
            start = at + 1
    return [*parts, expression[start:].strip()]
