"""Merge a live PEFT model, as a trainer holds it, without a detour over the user's files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import nn

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export.adapter import Adapter, check_kind
from unsloth_plugins.core.export.base import Base, base_of_model, fingerprint, open_base
from unsloth_plugins.core.export.folder import check_new, check_space, scratch
from unsloth_plugins.core.export.merge import SHARD_BYTES, MergeReport, check_dtype, write_merged
from unsloth_plugins.core.export.provenance import record_base
from unsloth_plugins.core.export.tensors import Progress, Source


def merge_model(
    model: Any,
    output: str | Path,
    *,
    dtype: str = "bf16",
    tokenizer: Any = None,
    adapter_output: str | Path | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> MergeReport:
    """Write the merged model of a live PEFT model; its own base tensors are read, and it is left as it is.

    Args:
        model: a ``PeftModel`` with one active adapter, or a module that holds exactly one. Saved to disk first.
        output, dtype, max_shard_bytes, progress: see ``merge``. A killed run is not resumed: live weights change.
        tokenizer: goes along, instead of the base's.
        adapter_output: keep the saved adapter here. By default it lives only while the merge runs.

    Raises:
        ConfigError: not a PEFT model, several active adapters, or merged already; else see ``merge``.
    """
    model, active = _peft_model(model)
    opened = base_of_model(model)
    name_or_path = str(getattr(model.config, "name_or_path", "") or "")
    folder = _folder(name_or_path, getattr(model.config, "_commit_hash", None))
    with contextlib.ExitStack() as stack:
        saved = Path(adapter_output or stack.enter_context(scratch(Path(output))))
        model.save_pretrained(saved, selected_adapters=[active])
        saved = saved if active == "default" else saved / active
        if tokenizer is not None:
            tokenizer.save_pretrained(saved)
        record_base(saved, *_forms(opened, folder))
        notes = [] if folder else ["The base has no local folder: no licence, card or tokenizer of it was copied."]
        where = {"base": name_or_path, "base_fingerprint": fingerprint(opened.source)}
        generation = getattr(model, "generation_config", None)
        extra = {"generation_config.json": generation.to_json_string()} if generation is not None else {}
        return write_merged(
            opened, folder, [Adapter(saved)], Path(output), dtype, max_shard_bytes, progress, where, notes, extra
        )


def record_live_base(model: Any, adapter_folder: str | Path) -> None:
    """``record_base`` of a live PEFT model: its weights as they are, and as the folder has them that it came from.

    Raises:
        ConfigError: see ``merge_model``.
        UnsupportedError: see ``core.export.base.base_of_model``.
    """
    model, _ = _peft_model(model)
    opened = base_of_model(model)
    name_or_path = str(getattr(model.config, "name_or_path", "") or "")
    record_base(adapter_folder, *_forms(opened, _folder(name_or_path, getattr(model.config, "_commit_hash", None))))


def _forms(live: Base, folder: Path | None) -> list[Source]:
    """The same weights in memory and on disk, where another dtype or packing gives them another fingerprint. Weights
    that were quantised when they were loaded are not those of the folder."""
    found: list[Source] = [live.source]
    with contextlib.suppress(ExportError, UnsupportedError):
        there = None if folder is None else open_base(folder)
        if there is not None and (not _is_bnb(live.config) or _is_bnb(there.config)):
            found.append(there.source)
    return found


def _is_bnb(config: dict[str, Any]) -> bool:
    stored = config.get("quantization_config") or {}
    return "bitsandbytes" in str(stored.get("quant_method", "")) if isinstance(stored, dict) else False


def check_model(
    model: Any, output: str | Path, *, dtype: str = "bf16", adapter_output: str | Path | None = None
) -> None:
    """Before a run that ends with ``merge_model``: refuse now what would be refused then.

    Raises:
        ConfigError, UnsupportedError, ExportError: as ``merge_model``; for 16 and 32 bits with the disk space.
    """
    check_dtype(dtype)
    check_new(Path(output))
    if adapter_output is not None:
        check_new(Path(adapter_output))
    model, active = _peft_model(model)
    check_kind(model.peft_config[active].to_dict(), f"the adapter {active!r}")
    base = base_of_model(model)
    if (width := {"bf16": 2, "fp16": 2, "fp32": 4}.get(dtype)) is not None:
        check_space(Path(output), sum(info.nbytes // info.dtype.itemsize * width for info in base.infos.values()))


def _peft_model(module: nn.Module) -> tuple[Any, str]:
    found = [one for one in module.modules() if hasattr(one, "get_base_model") and hasattr(one, "peft_config")]
    if len(found) != 1:
        raise ConfigError(
            expected="one PEFT model to merge",
            got=f"{len(found)} in {type(module).__name__}",
            remedy="Merge each one with merge_model." if found else "Save a fully trained model with save_pretrained.",
        )
    model: Any = found[0]
    active = list(model.active_adapters)
    merged_in = any(getattr(each, "merged", False) for each in model.modules())
    if len(active) != 1 or merged_in:
        raise ConfigError(
            expected="one active adapter that is not merged into the weights",
            got=f"{active or 'no adapter'}" + (", merged" if merged_in else ""),
            remedy="Call set_adapter or unmerge_adapter first; merge several adapters from their folders.",
        )
    return model, active[0]


def _folder(name_or_path: str, revision: str | None) -> Path | None:
    """Where the base's files are, if they are on this machine."""
    if not name_or_path or Path(name_or_path).is_dir():
        return Path(name_or_path) if name_or_path else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
