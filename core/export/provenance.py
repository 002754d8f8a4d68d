"""What was merged into what: the base's record beside an adapter, its check, and the manifest beside a result."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import platform
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from unsloth_plugins.core.errors import ExportError, UnsupportedError
from unsloth_plugins.core.export.adapter import Adapter, biases_in
from unsloth_plugins.core.export.base import Base, fingerprint, open_base, spans
from unsloth_plugins.core.export.journal import file_hash
from unsloth_plugins.core.export.packed import Requantised
from unsloth_plugins.core.export.tensors import (
    FileTensors,
    InFloat32,
    Output,
    Report,
    Source,
    raw_bytes,
    read_json,
)

_log = logging.getLogger(__name__)
MANIFEST = "export_manifest.json"
BASE_RECORD = "base_record.json"


@dataclass(frozen=True)
class _Record:
    """What ``base_record.json`` says."""

    base_fingerprints: list[str]
    quantised_when_loaded: str | None = None
    quantised_from: str | None = None


def record_base(
    adapter_folder: str | Path,
    *bases: str | Path | Source,
    quantised: str | None = None,
    quantised_from: Source | None = None,
) -> None:
    """Write into an adapter folder which weights it was trained on, so that a merge can check it by content.

    Biases that the adapter's file holds do not count, here or in the check: PEFT trains them in the base itself, and a
    merge takes them from the file. So the record says of every tensor that a merge takes from the base which it was.

    Args:
        adapter_folder: that ``save_pretrained`` wrote.
        bases: the base model's folder, or its tensors; several forms of the same weights.
        quantised: in what, as "4-bit bitsandbytes", if the weights were quantised when they were loaded.
        quantised_from: the tensors that they were quantised from, where they are to be had.

    Raises:
        ExportError: a folder lacks its weights, or they are damaged.
    """
    sources = [open_base(Path(base)).source if isinstance(base, (str, Path)) else base for base in bases]
    biases = biases_in(Path(adapter_folder))
    origin = None if quantised_from is None else fingerprint(quantised_from, biases)
    record = asdict(_Record([fingerprint(source, biases) for source in sources], quantised, origin))
    told = {name: value for name, value in record.items() if value is not None}
    (Path(adapter_folder) / BASE_RECORD).write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def check_base(adapter: Adapter, given: str | Path, folder: Path, source: Source, allow_other: bool) -> str:
    """Compare the base with what the adapter says of its own.

    Returns:
        How it was checked.

    Raises:
        ExportError: it is another one, and that was not allowed; or the record is damaged.
    """
    file = adapter.folder / BASE_RECORD
    named = str(adapter.config.get("base_model_name_or_path") or "")
    if file.is_file():
        record = _read_record(file)
        biases = biases_in(adapter.folder)
        found = fingerprint(source, biases)
        same = found in record.base_fingerprints
        if not same and record.quantised_when_loaded:
            same = fingerprint(InFloat32(source), biases) in record.base_fingerprints
            by_name = record.quantised_from is None and bool(named) and _same_name(named, str(given), folder, source)
            if not same and (by_name or found == record.quantised_from):
                return _before_quantising(adapter, given, record.quantised_when_loaded, allow_other)
        how = "by the fingerprint of its tensors"
    elif not named:
        note = f"{adapter.folder} does not name its base: not checked."
        _log.warning(note)
        return note
    else:
        same = _same_name(named, str(given), folder, source)
        how = f"by the name {named!r}, without a record of its weights"
    if same:
        return f"Base of {adapter.folder} checked {how}."
    if allow_other:
        note = f"{adapter.folder} was trained on another base ({how}); merged because that was allowed."
        _log.warning(note)
        return note
    if file.is_file() and named and _same_place(named, str(given), folder):
        raise _changed_under(adapter, given)
    missing = lost = ""
    if not file.is_file() and not Path(named).expanduser().is_dir():
        missing = f", and there is no folder {named!r} here to compare with"
        lost = "If that is a path relative to where it was trained, run this there. "
    raise ExportError(
        expected=f"the base that {adapter.folder} was trained on ({named or 'recorded by its tensors'})",
        got=f"{given}, which differs {how}{missing}",
        remedy=f"Give the right base. {lost}If this one has the same weights under another name, allow another base "
        "(allow_other_base=True, --allow-other-base).",
    )


def _changed_under(adapter: Adapter, given: str | Path) -> ExportError:
    """The base is where the adapter says, and its weights were others in training."""
    return ExportError(
        expected=f"the weights that {adapter.folder} was trained on",
        got=f"{given}, the base that it names, which differs by the fingerprint of its tensors",
        remedy="If the files there were replaced since, give those of then. If the model in memory was changed beyond "
        "what the adapter's file holds (norms unfrozen by hand, an earlier adapter merged into it), merge the live "
        "model (merge_model, save_merged), and name what is trained in modules_to_save next time. --allow-other-base "
        "(allow_other_base=True) merges into the files' weights, without those changes.",
    )


def _before_quantising(adapter: Adapter, given: str | Path, quantised: str, allow_other: bool) -> str:
    """The base's own weights, but training saw them rounded."""
    if allow_other:
        note = (
            f"{adapter.folder} was trained on {given} in {quantised}: merged into the weights before that rounding, "
            "because that was allowed."
        )
        _log.warning(note)
        return note
    into_it = (
        "Merge into the quantised model: load it as for training, save it with save_pretrained, and give that folder; "
        "or merge at the end of training (merge_model, save_merged). "
    )
    raise ExportError(
        expected=f"the weights that {adapter.folder} was trained on, which were quantised to {quantised} when loaded",
        got=f"{given}, the weights before that",
        remedy=("" if quantised.startswith("8-bit") else into_it)
        + "--allow-other-base (allow_other_base=True) merges into these, which differ from those by the rounding.",
    )


def _read_record(file: Path) -> _Record:
    told = read_json(file, "base_fingerprints")
    for name, value in told.items():
        several = name == "base_fingerprints"
        texts = value if several and isinstance(value, list) else [value]
        is_right = isinstance(value, list) or not several
        if name in _Record.__dataclass_fields__ and not (is_right and all(isinstance(one, str) for one in texts)):
            raise ExportError(
                expected=f"{name} in {file} to be a {'list of texts' if several else 'text'}",
                got=reprlib.repr(value),
                remedy="The file is damaged: copy it again, or write it anew with "
                "unsloth_plugins.core.export.record_base.",
            )
    return _Record(**{name: told[name] for name in _Record.__dataclass_fields__ if name in told})


def _same_place(named: str, given: str, folder: Path) -> bool:
    """The same path or id. A folder's own name says nothing: any folder may have it."""
    there = Path(named).expanduser()
    if there.is_dir():
        return there.resolve() == folder.resolve()
    path = folder.resolve().as_posix()
    in_cache = "/models--" + named.replace("/", "--") + "/snapshots/" in path + "/"
    return given == named or in_cache


def _same_name(named: str, given: str, folder: Path, source: Source) -> bool:
    """The same path or id, or the weights that are under it."""
    if _same_place(named, given, folder):
        return True
    there = Path(named).expanduser()
    if not there.is_dir():
        return False
    try:
        return fingerprint(open_base(there).source) == fingerprint(source)
    except (ExportError, UnsupportedError):
        return False


def plan_of(
    source: Source,
    adapters: Sequence[Adapter],
    adapter_hashes: Sequence[Mapping[str, str]],
    outputs: Sequence[Output],
    where: Mapping[str, str],
    **options: Any,
) -> dict[str, Any]:
    """Everything that the bytes of the weight files depend on; two merges of equal plans write equal files.

    Args:
        source: the base's tensors.
        adapters: in the order in which they are added.
        adapter_hashes: of each, from ``hashes_of``.
        outputs: the tensors that will be written.
        where: what the manifest says of the base.
        options: of the merge.
    """
    files = source.files if isinstance(source, FileTensors) else []
    layout = [[one.name, str(one.info.dtype), list(one.info.shape)] for one in outputs]
    return {
        "base": [where["base_fingerprint"], *([p.name, p.stat().st_size, p.stat().st_mtime_ns] for p in files)],
        "adapters": [[*hashes.values(), one.weight] for one, hashes in zip(adapters, adapter_hashes, strict=True)],
        "options": options,
        "tensors": hashlib.sha256(json.dumps(layout).encode()).hexdigest(),
        "versions": _versions("unsloth-plugins", "torch", "bitsandbytes"),
    }


def hashes_of(adapter: Adapter) -> dict[str, str]:
    """sha256 of an adapter's two files."""
    config = adapter.folder / "adapter_config.json"
    return {"sha256": file_hash(adapter.file), "config_sha256": file_hash(config)}


def stored_behind(base: Base, names: Sequence[str]) -> list[str]:
    """The stored tensors behind those of ``names`` that the base has."""
    return [key for name in names if name in base.infos for key in base.stored(name)]


def base_hashes(source: Source, names: Sequence[str], report: Report) -> dict[str, str]:
    """sha256 of stored tensors, read in pieces."""
    hashes, done = {}, 0
    for name in names:
        digest = hashlib.sha256()
        for begin, end in spans(source.infos[name]):
            data = raw_bytes(source.read(name, begin, end))
            digest.update(data)
            done += data.nbytes
            report(done, f"hash of {name}")
        hashes[name] = digest.hexdigest()
    return hashes


def manifest_of(
    adapters: Sequence[Adapter],
    dtype: str,
    where: Mapping[str, str],
    *,
    changed: Sequence[str],
    adapter_hashes: Sequence[Mapping[str, str]],
    base_sha256: Mapping[str, str],
    requantised: Mapping[str, Requantised],
    notes: Sequence[str],
    files: Mapping[str, str],
) -> dict[str, Any]:
    """The content of ``export_manifest.json``: base, adapters, merged tensors and files, each with hashes.

    Args:
        adapters, dtype: what was written.
        where: where the base came from, and its fingerprint.
        changed: names of the tensors that differ from the base's.
        adapter_hashes: of each adapter, from ``hashes_of``.
        base_sha256: of the stored tensors behind those, from ``base_hashes``.
        requantised, notes: of the report.
        files: names of the weight files -> sha256.
    """
    return {
        **where,
        "dtype": dtype,
        "adapters": [
            {
                "folder": str(adapter.folder),
                "weight": adapter.weight,
                "file": adapter.file.name,
                **hashes,
                "named_base": adapter.config.get("base_model_name_or_path"),
            }
            for adapter, hashes in zip(adapters, adapter_hashes, strict=True)
        ],
        "merged": list(changed),
        "base_sha256": dict(base_sha256),
        "requantised": {name: vars(error) for name, error in requantised.items()},
        "notes": list(notes),
        "files": dict(files),
        "versions": {"python": platform.python_version()} | _versions("unsloth-plugins", "torch", "peft"),
    }


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
