"""Labels on what the assistant says, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unsloth_plugins.core.errors import ConfigError
from unsloth_plugins.core.tokenizer.templates import has_markers

IGNORED = -100


def assistant_labels(tokenizer: Any, messages: Sequence[dict[str, Any]], **options: Any) -> dict[str, list[int]]:
    """Ids of a chat, with labels on the assistant's spans and the tokens that end them.

    Args:
        tokenizer: fast, with ``{% generation %}`` markers in its chat template.
        messages: of one conversation.
        options: further ones of ``apply_chat_template``.

    Returns:
        ``input_ids``, ``attention_mask`` and ``labels``, -100 outside the spans.

    Raises:
        ConfigError: no token would be trained, which would give a loss of NaN.
    """
    out = tokenizer.apply_chat_template(
        list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
    )
    mask = out["assistant_masks"]
    if not any(mask):
        raise ConfigError(
            expected="at least one token of an assistant to train on",
            got="none: "
            + ("no assistant spoke" if has_markers(tokenizer) else "the chat template has no generation markers"),
            remedy="Add markers with repair_tokenizer, or leave such conversations out.",
        )
    labels = [number if chosen else IGNORED for number, chosen in zip(out["input_ids"], mask, strict=True)]
    return {"input_ids": list(out["input_ids"]), "attention_mask": list(out["attention_mask"]), "labels": labels}
