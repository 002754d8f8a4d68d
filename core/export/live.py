"""A live PEFT model, as a trainer holds it: merged without a detour over the user's files, saved with its record."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export.adapter import Adapter, Changes, biases_in, second_half
from unsloth_plugins.core.export.adapter_config import check_kind
from unsloth_plugins.core.export.base import Base, base_of_model, config_of, fingerprint, open_base, same_numbers
from unsloth_plugins.core.export.folder import check_new, check_new_folder, check_space, scratch
from unsloth_plugins.core.export.merge import SHARD_BYTES, MergeReport, check_dtype, outputs_of, write_merged
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.provenance import BASE_RECORD, record_base
from unsloth_plugins.core.export.tensors import Progress
from unsloth_plugins.core.patches import PatchSet

_log = logging.getLogger(__name__)
_SAVING = "_unsloth_saving"
_NOISE = 1e-5  # of a product in float32, relative to the largest number of a row


@contextlib.contextmanager
def merge_bar(*, quiet: bool = False) -> Iterator[Progress | None]:
    """What trainers give ``merge_model`` as ``progress``: a bar on standard error, once it takes over five seconds."""
    if quiet:
        yield None
        return
    with tqdm(desc="Merging", unit="B", unit_scale=True, delay=5, leave=False) as bar:

        def update(done: int, total: int, name: str) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


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
    target = Path(output).expanduser()
    check_new_folder(target)
    model, active = _peft_model(model)
    opened = base_of_model(model)
    folder = _folder(model)
    with contextlib.ExitStack() as stack:
        saved = Path(adapter_output).expanduser() if adapter_output else stack.enter_context(scratch(target))
        model.save_pretrained(saved, selected_adapters=[active])
        saved = saved if active == "default" else saved / active
        if tokenizer is not None:
            tokenizer.save_pretrained(saved)
        _record_weights(model, saved)
        notes = [] if folder else ["The base has no local folder: no licence, card or tokenizer of it was copied."]
        where = {"base": _name(model), "base_fingerprint": fingerprint(opened.source)}
        generation = getattr(model, "generation_config", None)
        extra = {"generation_config.json": generation.to_json_string()} if generation is not None else {}
        return write_merged(
            opened, folder, [Adapter(saved)], target, dtype, max_shard_bytes, progress, where, notes, extra
        )


def record_on_save(model: Any, patches: PatchSet) -> None:
    """Let ``save_pretrained`` of a PEFT model write ``base_record.json`` beside each LoRA adapter that it saves.

    That is how trainers save checkpoints and final folders, and users adapters. A second time changes nothing.

    Args:
        model: a ``PeftModel``; changed on this instance.
        patches: where the changes are noted.
    """
    if _SAVING in vars(model):
        return
    patches.set(model, _SAVING, (vars(model).get("save_pretrained"),))
    patches.set(model, "save_pretrained", MethodType(_recording(type(model).save_pretrained), model))


def _recording(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        (before,) = vars(self).get(_SAVING, (None,))
        result = (before or MethodType(original, self))(*args, **kwargs)
        if _SAVING not in vars(self):
            return result
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        chosen, folder = given.arguments["selected_adapters"], Path(given.arguments["save_directory"])
        if given.arguments["is_main_process"]:
            for name in self.peft_config if chosen is None else chosen:
                converted = given.arguments.get("path_initial_model_for_weight_conversion") is not None
                _record(self, name, folder if name == "default" else folder / name, converted)
        return result

    return save_pretrained


def _record(model: Any, adapter: str, folder: Path, converted: bool) -> None:
    """Of an adapter that was just saved. A run must not end for want of a record: whatever happens is a warning."""
    try:
        (folder / BASE_RECORD).unlink(missing_ok=True)  # of an adapter that was there before
        if model.peft_config[adapter].peft_type == "LORA":  # others are not merged
            _record_weights(model, folder, converted)
    except Exception as error:
        _log.warning("No %s beside %s, so merges can't check its base by content: %r", BASE_RECORD, folder, error)


def _record_weights(model: Any, folder: Path, converted: bool = False) -> None:
    """Record the base's weights in memory and on disk, where another dtype or packing gives another fingerprint.

    In memory they are not to be had where adapters are merged into them, where this process holds a part of them, or
    where they are quantised in a way that can't be read; the folder is taken at its word then. Else it counts if its
    numbers are those in memory. Compared is what no training of this adapter can have changed: all but the biases that
    its file holds, which PEFT trains in place and a merge takes from the file. So weights that an earlier adapter was
    merged into are told from the folder's. Those that were quantised when they were loaded, or since, are not those of
    the folder; the first are recorded as such. Nothing is written where nothing is known.

    Where PEFT ``converted`` PiSSA or its kind to LoRA, memory holds the base without the adapter's start, which no
    folder has. The start is in the file: added again, it gives the base up to its rounding.
    """
    here = there = None
    if not _merged_in(model):
        with contextlib.suppress(UnsupportedError):
            here = base_of_model(model)
    with contextlib.suppress(ExportError, UnsupportedError):
        place = _folder(model)
        there = None if place is None else open_base(place)
    quantised = _quantised_when_loaded(model)
    origin = there.source if quantised and there is not None else None
    if there is not None and _is_quantised(config_of(model.get_base_model())) and not _is_quantised(there.config):
        there = None
    if here is not None and there is not None:
        same = _same_before_start(here, there, folder) if converted else same_numbers(here, there, biases_in(folder))
        here, there = (None if converted and same else here), (there if same else None)
    forms = [form.source for form in (here, there) if form is not None]
    if forms or quantised:
        record_base(folder, *forms, quantised=quantised, quantised_from=origin)


def _same_before_start(here: Base, there: Base, folder: Path) -> bool:
    """``same_numbers`` of the base as it was before ``W - scaling * B0 @ A0`` took an adapter's start out of it.

    Source: PEFT 0.20 to 0.21, ``LoraModel.subtract_mutated_init``: the file holds ``[A; A0]`` and ``[B, -B0]``. Of each
    adapted tensor two rows are compared. PEFT rounds ``W`` without the start, and each factor, to their dtype; a
    merged adapter that changed any number of those rows by more than that is seen.
    """
    changes: dict[str, Changes] = {}
    Adapter(folder).collect(there, changes)
    if not same_numbers(here, there, changes.keys()):
        return False
    for name, change in changes.items():
        info = here.infos[name]
        for row in (0, info.shape[0] // 2):
            left = here.read(name, row, row + 1).cpu()
            before = left.float()
            rounding = before.abs() / 2
            for term in change.terms:  # not in place: these are live weights
                start, largest = second_half(term), second_half(term, magnitudes=True)
                before = before - start.rows(start.factors(), row, row + 1)
                rounding = rounding + largest.rows(largest.factors(), row, row + 1)
            want = there.read(name, row, row + 1).cpu().to(left.dtype).float()
            rounding = rounding * torch.finfo(left.dtype).eps
            if ((before - want).abs() > rounding + _NOISE * want.abs().max()).any():
                return False
    return True


def _quantised_when_loaded(model: Any) -> str | None:
    """In what transformers quantised the base as it loaded it, if it did."""
    inner = model.get_base_model()
    if getattr(getattr(inner, "hf_quantizer", None), "pre_quantized", True):
        return None
    settings = config_of(inner).get("quantization_config") or {}
    method = settings.get("quant_method")
    method = str(getattr(method, "value", method))
    bits = next((bits for bits in (4, 8) if settings.get(f"load_in_{bits}bit")), None)
    return f"{bits}-bit {method}" if bits else method


def _is_quantised(config: dict[str, Any]) -> bool:
    return any(part.get("quantization_config") for part in (config, config.get("text_config") or {}))


def _merged_in(model: nn.Module) -> bool:
    return any(getattr(each, "merged", False) for each in model.modules())


def check_model(
    model: Any, output: str | Path, *, dtype: str = "bf16", adapter_output: str | Path | None = None
) -> None:
    """Before a run that ends with ``merge_model``: refuse now what would be refused then.

    Raises:
        ConfigError, UnsupportedError, ExportError: as ``merge_model``, the disk space for the weights included.
    """
    check_dtype(dtype)
    target = Path(output).expanduser()
    check_new_folder(target)
    if adapter_output is not None:
        check_new(Path(adapter_output).expanduser())
    model, active = _peft_model(model)
    check_kind(model.peft_config[active].to_dict(), f"the adapter {active!r}")
    outputs, _ = outputs_of(Merged(base_of_model(model)), dtype, {})
    check_space(target, sum(one.info.nbytes for one in outputs))


def peft_models(module: nn.Module) -> list[Any]:
    """The PEFT models below ``module``, itself included."""
    return [one for one in module.modules() if hasattr(one, "get_base_model") and hasattr(one, "peft_config")]


def _peft_model(module: nn.Module) -> tuple[Any, str]:
    found = peft_models(module)
    if len(found) != 1:
        raise ConfigError(
            expected="one PEFT model to merge",
            got=f"{len(found)} in {type(module).__name__}",
            remedy="Merge each one with merge_model." if found else "Save a fully trained model with save_pretrained.",
        )
    model = found[0]
    active = list(model.active_adapters)
    merged_in = _merged_in(model)
    if len(active) != 1 or merged_in:
        raise ConfigError(
            expected="one active adapter that is not merged into the weights",
            got=f"{active or 'no adapter'}" + (", merged" if merged_in else ""),
            remedy="Call set_adapter or unmerge_adapter first; merge several adapters from their folders.",
        )
    return model, active[0]


def _name(model: Any) -> str:
    return str(getattr(getattr(model, "config", None), "name_or_path", "") or "")


def _folder(model: Any) -> Path | None:
    """Where the base's files are, if they are on this machine."""
    name = _name(model)
    if not name or Path(name).is_dir():
        return Path(name) if name else None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    revision = getattr(model.config, "_commit_hash", None)
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None
