"""Merge adapters into their base: one pass from files to files, dequantise -> float32 sum -> one rounding."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unsloth_plugins.core.errors import ConfigError, ExportError
from unsloth_plugins.core.export import four_bit
from unsloth_plugins.core.export.adapter import Adapter
from unsloth_plugins.core.export.base import Base, check_device, fingerprint, open_base, resolve_folder, spans, stop_ids
from unsloth_plugins.core.export.folder import (
    appearing,
    check_new_folder,
    check_space,
    cleaned_config,
    copy_files,
    half_tokenizers,
    side_files,
    tokenizer_folder,
)
from unsloth_plugins.core.export.journal import Journal
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.packed import Requantised, packed_outputs, quantization_of
from unsloth_plugins.core.export.provenance import (
    MANIFEST,
    base_hashes,
    check_base,
    hashes_of,
    manifest_of,
    plan_of,
    stored_behind,
)
from unsloth_plugins.core.export.tensors import FileTensors, Info, Output, Progress, parse_json, read_json, write_shards

_log = logging.getLogger(__name__)
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
DTYPES = (*_DTYPES, "mxfp4", "nf4")
SHARD_BYTES = 4 << 30
_MARGIN = 1 << 20  # for headers, index, manifest
Adapters = str | Path | Sequence[str | Path] | Mapping[str, float]


@dataclass
class MergeReport:
    """What a merge did.

    Attributes:
        output: the folder.
        files: names of the weight files.
        bytes_needed: that were checked to be free on the disk.
        merged: names of the tensors that differ from the base's.
        requantised: for MXFP4 and 4 bits of bitsandbytes, the error of each tensor that was quantised.
        notes: what could not be checked, and what was decided.
        resumed: the weight files that a run which was stopped had finished already.
    """

    output: Path
    files: list[str]
    bytes_needed: int
    merged: list[str]
    requantised: dict[str, Requantised] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)


def merge(
    base: str | Path,
    adapter: Adapters,
    output: str | Path,
    *,
    dtype: str = "bf16",
    max_shard_bytes: int = SHARD_BYTES,
    allow_other_base: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> MergeReport:
    """Write the merged model of a base folder and adapter folders.

    Args:
        base: folder or hub id of the model that the adapter was trained on: 16 or 32 bits, MXFP4, or 4 bits of
            bitsandbytes, which are dequantised as they were in training.
        adapter: a PEFT folder, several, or folder -> weight.
        output: must not exist. It appears when it is complete. If a run to it was killed, the same call goes on after
            the weight files that it had finished, checked by their hashes; a call with anything else starts over.
        dtype: "bf16", "fp16", "fp32": the layout that transformers loads; "mxfp4": gpt-oss with packed experts, of
            which only the merged ones are quantised again, and everything else keeps its dtype; "nf4": linear layers in
            4 bits of bitsandbytes (its settings, where the base is in such), the rest in bf16, one layer in memory.
        max_shard_bytes: of one weight file; a larger tensor gets a file of its own.
        allow_other_base: merge although the adapter names another base.
        device: where the sums are computed, piece by piece: "cpu", "cuda".
        progress: called with bytes done, bytes in all (written, and read again for hashes), and a name.

    Raises:
        ExportError: something is missing or doesn't fit, another base, or too little disk. Before anything is written.
        ConfigError: an option that can't be.
        UnsupportedError: an adapter or a quantisation that can't be merged.
    """
    check_dtype(dtype)
    target = Path(output).expanduser()
    check_new_folder(target)
    check_device(device)
    folder = resolve_folder(base)
    opened = open_base(folder, device)
    adapters = open_adapters(adapter)
    notes = [check_base(one, base, folder, opened.source, allow_other_base) for one in adapters]
    where = {"base": str(base), "base_fingerprint": fingerprint(opened.source)}
    return write_merged(opened, folder, adapters, target, dtype, max_shard_bytes, progress, where, notes)


def open_adapters(adapter: Adapters) -> list[Adapter]:
    """The adapters in the folders given.

    Raises:
        ConfigError: a weight is not finite, or a folder is there twice.
        ExportError, UnsupportedError: see ``Adapter``.
    """
    if isinstance(adapter, (str, Path)):
        adapter = [adapter]
    weighted = adapter.items() if isinstance(adapter, Mapping) else [(one, 1.0) for one in adapter]
    found = [(Path(folder).expanduser(), float(weight)) for folder, weight in weighted]
    for folder, weight in found:
        if not math.isfinite(weight):
            raise ConfigError(expected="a finite weight", got=f"{weight} for {folder}", remedy="Give a number.")
        if sum(other.resolve() == folder.resolve() for other, _ in found) > 1:
            raise ConfigError(expected="each adapter once", got=f"{folder} twice", remedy="Give it a weight instead.")
    return [Adapter(folder, weight) for folder, weight in found]


def check_dtype(dtype: str) -> None:
    """Refuse a format before any work.

    Raises:
        ConfigError: nobody knows it.
        UnsupportedError: it needs a package that is missing.
    """
    if dtype not in DTYPES:
        raise ConfigError(expected=f"dtype to be one of {', '.join(DTYPES)}", got=repr(dtype), remedy="Choose one.")
    if dtype == "nf4":
        four_bit.check_package()


def write_merged(
    base: Base,
    folder: Path | None,
    adapters: Sequence[Adapter],
    output: Path,
    dtype: str,
    max_shard_bytes: int,
    progress: Progress | None,
    where: dict[str, str],
    notes: list[str],
    extra_files: Mapping[str, str] | None = None,
) -> MergeReport:
    """What ``merge`` and ``merge_model`` have in common; see there.

    Args:
        base, adapters: opened and checked.
        folder: the base's, for the files that go along, if it has one.
        where: for the manifest: where the base came from, and its fingerprint.
        notes: of the report, so far.
        extra_files: name -> text, to be written beside the weights.
    """
    check_dtype(dtype)
    merged = Merged(base, adapters)
    report = MergeReport(output, [], 0, [name for name in merged.infos if merged.changed(name)], notes=notes)
    outputs, quantization = outputs_of(merged, dtype, report.requantised)
    if dtype == "nf4" and (experts := sum(len(info.shape) == 3 for info in merged.infos.values())):
        notes.append(f"{experts} tensors of experts are in bf16: bitsandbytes has linear layers only. See mxfp4.")
    folders = [adapter.folder for adapter in adapters]
    files = side_files(folder, folders)
    report.bytes_needed = sum(one.info.nbytes for one in outputs) + sum(path.stat().st_size for path, _ in files)
    report.bytes_needed += _MARGIN
    check_space(output, report.bytes_needed)
    _log.info("%s needs %s bytes", output, f"{report.bytes_needed:,}")
    if base.tied and not merged.tied:
        notes.append("The head is no longer the embedding: it was written as a tensor of its own.")
    notes += half_tokenizers(folders)
    special = _special_ids(merged, tokenizer_folder(folders), notes)
    config = _with_ids(_config(merged, dtype, quantization), special, "config.json")
    texts = _texts(folder, extra_files or {}, special) | {"config.json": _text(config)}
    options = dict(dtype=dtype, max_shard_bytes=max_shard_bytes, device=str(base.device))
    adapter_hashes = [hashes_of(one) for one in adapters]
    plan = plan_of(base.source, adapters, adapter_hashes, outputs, where, **options)
    hashed = stored_behind(base, report.merged)
    written = sum(one.info.nbytes for one in outputs)
    total = written + sum(base.source.infos[key].nbytes for key in hashed)

    def show(done: int, name: str) -> None:
        if progress:
            progress(done, total, name)

    with appearing(output, resumable=isinstance(base.source, FileTensors)) as place:
        journal = Journal(place, plan, report.requantised)
        hashes = write_shards(place, outputs, max_bytes=max_shard_bytes, finished=journal, report=show)
        report.files, report.resumed = list(hashes), journal.resumed
        if journal.note:
            notes.append(journal.note)
        notes += _of_rounding(report.requantised)
        copy_files(files, place)
        manifest = manifest_of(
            adapters,
            dtype,
            where,
            changed=report.merged,
            adapter_hashes=adapter_hashes,
            base_sha256=base_hashes(base.source, hashed, lambda done, name: show(written + done, name)),
            requantised=report.requantised,
            notes=notes,
            files=hashes,
        )
        for name, text in (texts | {MANIFEST: json.dumps(manifest, indent=2) + "\n"}).items():
            (place / name).write_text(text, encoding="utf-8")
        journal.close()
    return report


def outputs_of(
    merged: Merged, dtype: str, requantised: dict[str, Requantised]
) -> tuple[list[Output], dict[str, Any] | None]:
    """The tensors of the result, and the ``quantization_config`` that goes with them.

    Args:
        merged: checked; nothing of it is read here.
        dtype: see ``merge``.
        requantised: filled, tensor by tensor, when the outputs are written.

    Raises:
        UnsupportedError: this model can't be stored in that dtype.
    """
    if dtype == "nf4":
        settings = four_bit.quantization_of(merged)
        return four_bit.four_bit_outputs(merged, settings, requantised), settings
    if dtype == "mxfp4":
        return packed_outputs(merged, requantised), quantization_of(merged.base)
    return plain_outputs(merged, _DTYPES[dtype]), None


def _of_rounding(requantised: Mapping[str, Requantised]) -> list[str]:
    lost = sum((error.error_over_change or 0) > 1 for error in requantised.values())
    if not lost:
        return []
    return [
        f"In {lost} of {len(requantised)} tensors rounding to 4 bits is larger than what training changed, so little "
        "of that is left. Merge into bf16, or serve the adapter beside the base."
    ]


def _special_ids(merged: Merged, folder: Path | None, notes: list[str]) -> dict[str, int]:
    """``eos_token_id`` and ``pad_token_id`` of the tokenizer in ``folder``, with which the adapter was trained."""
    if folder is None:
        return {}
    try:
        from tokenizers import Tokenizer  # without transformers, which takes more memory than a merge

        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        told = read_json(folder / "tokenizer_config.json")
    except Exception as error:  # tokenizers has no class of its own for what it can't read
        notes.append(f"The adapter's tokenizer is copied unread, so where the model stops stays the base's: {error}")
        return {}
    last, rows = max(tokenizer.get_vocab().values(), default=0), merged.vocab_size or math.inf
    if last >= rows:
        notes.append(
            f"The tokenizer in {folder} has ids up to {last}, the embedding {rows} rows: text with the last ones "
            "fails. Call model.resize_token_embeddings before training, or leave those tokens out."
        )
    found = {}
    for name in ("eos_token", "pad_token"):
        token = told.get(name)
        token = token.get("content") if isinstance(token, dict) else token  # as older transformers wrote it
        number = tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is not None and number < rows:
            found[f"{name}_id"] = number
    return found


def _texts(folder: Path | None, extra_files: Mapping[str, str], special: Mapping[str, int]) -> dict[str, str]:
    """``extra_files``, and the generation config, if there is one, with the tokenizer's ids."""
    name = "generation_config.json"
    if not special:
        return dict(extra_files)
    if name in extra_files:
        told = parse_json(extra_files[name], Path(name))
    elif folder is not None and (folder / name).is_file():
        told = read_json(folder / name)
    else:
        return dict(extra_files)
    return {**extra_files, name: _text(_with_ids(told, special, name))}


def _text(config: Mapping[str, Any]) -> str:
    return json.dumps(config, indent=2, sort_keys=True) + "\n"


def _with_ids(config: dict[str, Any], special: Mapping[str, int], file: str) -> dict[str, Any]:
    """A config that stops at the tokenizer's end too, beside where it stops already, and pads as the tokenizer does."""
    told = dict(config)
    if (eos := special.get("eos_token_id")) is not None and eos not in (stops := stop_ids(config, file)):
        told["eos_token_id"] = [*stops, eos] if stops else eos
    if config.get("pad_token_id") is None and "pad_token_id" in special:
        told["pad_token_id"] = special["pad_token_id"]
    return told


def plain_outputs(merged: Merged, dtype: torch.dtype) -> list[Output]:
    """Every tensor in one floating dtype; integers stay."""
    return [_plain(merged, name, info, dtype) for name, info in merged.infos.items()]


def _plain(merged: Merged, name: str, info: Info, dtype: torch.dtype) -> Output:
    target = dtype if info.dtype.is_floating_point else info.dtype

    def pieces() -> Iterator[torch.Tensor]:
        for begin, end in spans(info):
            rows = merged.read(name, begin, end)
            rounded = rows.to(target)
            if target == torch.float16 and bool((rounded.isinf() & ~rows.isinf()).any()):
                raise ExportError(
                    expected=f"numbers within float16's range in {name}",
                    got=f"{rows.abs().max():g}",
                    remedy="Export to bf16.",
                )
            yield rounded.contiguous()

    return Output(name, Info(target, info.shape), pieces)


def _config(merged: Merged, dtype: str, quantization: dict[str, Any] | None) -> dict[str, Any]:
    base = merged.base
    embedding = base.embedding
    resized = embedding is not None and merged.vocab_size != base.infos[embedding].shape[0]
    settings: dict[str, Any] = {"vocab_size": merged.vocab_size if resized else None}
    if base.tied and not merged.tied:
        settings["tie_word_embeddings"] = False
    named = {"mxfp4": None, "nf4": "bfloat16"}.get(dtype, str(_DTYPES.get(dtype)).removeprefix("torch."))
    return cleaned_config(base.config, dtype=named, quantization_config=quantization, **settings)
