"""Check and repair the tokenizer of a model folder."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from unsloth_plugins.core.errors import ExportError
from unsloth_plugins.core.export.base import open_base, resolve_folder, stop_ids
from unsloth_plugins.core.export.folder import appearing
from unsloth_plugins.core.export.gguf_vocab import load_config, load_tokenizer
from unsloth_plugins.core.tokenizer.checks import Finding, check_tokenizer
from unsloth_plugins.core.tokenizer.repair import RepairReport, repair_tokenizer

_log = logging.getLogger(__name__)


def _load(model: str | Path) -> tuple[Any, Any, Any]:
    """What stands for the model, and its tokenizers.

    The last is the slow one of a SentencePiece model beside tokenizer.json, or ``None``.
    """
    from transformers import AutoConfig, GenerationConfig

    folder = resolve_folder(model)
    config = load_config(AutoConfig, folder, "config.json")
    generation = None
    if (folder / "generation_config.json").is_file():
        generation = load_config(GenerationConfig, folder, "generation_config.json")
    for part, name in ((config, "config.json"), (generation, "generation_config.json")):
        if part is not None:
            stop_ids(part.to_dict(), name)
    stand_in = SimpleNamespace(vocab_size=_rows(folder, config), config=config, generation_config=generation)
    tokenizer = load_tokenizer(folder)
    return stand_in, tokenizer, _slow(folder, tokenizer)


def _rows(folder: Path, config: Any) -> int:
    """Rows of the embedding, by the weights' headers where they are there."""
    if any(folder.glob("*.safetensors")):
        base = open_base(folder)
        if base.embedding:
            return base.infos[base.embedding].shape[0]
    rows = getattr(getattr(config, "text_config", None) or config, "vocab_size", None)
    if not isinstance(rows, int):
        raise ExportError(
            expected=f"vocab_size in {folder / 'config.json'}, a whole number, or the weights beside it",
            got=repr(rows),
            remedy="Give the folder of a whole language model.",
        )
    return rows


def _slow(folder: Path, tokenizer: Any) -> Any | None:
    if not all((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model")) or not tokenizer.is_fast:
        return None
    try:
        from unsloth_plugins.core.tokenizer.slow import load_slow
    except ImportError as error:
        _log.warning("tokenizer.model and tokenizer.json are not compared: %s. Install sentencepiece.", error)
        return None
    return load_slow(folder, tokenizer)


def check_folder(model: str | Path) -> list[Finding]:
    """``check_tokenizer`` for a folder or hub id; the weights are not loaded.

    Raises:
        ExportError: no model or no tokenizer there.
    """
    return check_tokenizer(*_load(model))


def repair_folder(
    model: str | Path,
    output: str | Path | None,
    *,
    chat_template: str | None = None,
    add_tokens: bool = False,
    dry_run: bool = False,
) -> RepairReport:
    """``repair_tokenizer`` for a folder or hub id; tokenizer, config and generation config go to a new folder.

    Args:
        model: folder or hub id; left as it is. Its embedding can't be grown here.
        output: must not exist. Not needed for a dry run.
        chat_template, add_tokens, dry_run: see ``repair_tokenizer``.

    Raises:
        ExportError: no model or no tokenizer there, or ``output`` exists or is missing.
        ConfigError: see ``repair_tokenizer``.
    """
    stand_in, tokenizer, slow = _load(model)
    options: dict[str, Any] = dict(chat_template=chat_template, add_tokens=add_tokens)
    if dry_run:
        return repair_tokenizer(stand_in, tokenizer, slow, dry_run=True, **options)
    if output is None:
        raise ExportError(expected="a folder to write to", got="none", remedy="Name one, or make a dry run.")
    with appearing(Path(output)) as place:
        report = repair_tokenizer(stand_in, tokenizer, slow, **options)
        tokenizer.save_pretrained(place)
        stand_in.config.save_pretrained(place)
        if stand_in.generation_config is not None:
            stand_in.generation_config.save_pretrained(place)
    return report
