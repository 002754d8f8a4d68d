"""A result that appears at once or not at all: written beside its place, renamed when it is complete."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from unsloth_plugins.core.errors import ConfigError, ConflictError, ExportError

_log = logging.getLogger(__name__)
_NOT_THERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL)  # mounts of Lustre, FUSE and cloud drives
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".ot")
_NOT_COPIED = (
    *("config.json", "adapter_config.json", "base_record.json", "export_manifest.json", "trainer_state.json"),
    "Modelfile",
)
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
_TOKENIZER = (
    *_VOCABULARIES,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json"),
)


def check_writable(place: Path) -> None:
    """Refuse a place where no file can be made. Permissions alone don't tell: of the superuser, or under /proc.

    Raises:
        ExportError: with the system's reason.
    """
    try:
        tempfile.TemporaryFile(dir=_nearest(place.parent)).close()
    except OSError as error:
        raise ExportError(
            expected=f"a folder that can be written to, for {place}",
            got=f"one that is not writable ({error.strerror})",
            remedy="Choose another folder, or change its permissions.",
        ) from error


def _nearest(folder: Path) -> Path:
    """The folder itself, or what is there of the path to it."""
    while not folder.exists():
        folder = folder.parent
    return folder


def check_space(place: Path, needed: int) -> None:
    """Refuse before anything is written where the disk can't take ``needed`` bytes.

    Raises:
        ExportError: with both numbers, or see ``check_writable``.
    """
    check_writable(place)
    folder = _nearest(place)
    free = shutil.disk_usage(folder).free + _size(hidden_name(place))  # a leftover is taken over, or removed first
    if free < needed:
        raise ExportError(
            expected=f"{needed:,} bytes free for {place}",
            got=f"{free:,}",
            remedy=f"Free {needed - free:,} bytes, or write to another disk.",
        )


def check_new(target: Path) -> None:
    """Refuse an output that is there already.

    Raises:
        ExportError: it is.
    """
    if os.path.lexists(target):  # a link to nothing too
        raise ExportError(
            expected="an output that does not exist yet", got=str(target), remedy="Remove it, or choose another name."
        )


def check_new_folder(target: Path) -> None:
    """``check_new`` for a folder, which is not called like a file of weights.

    Raises:
        ExportError: it is there already.
        ConfigError: its name is that of a file.
    """
    check_new(target)
    if target.suffix.lower() in _WEIGHTS:
        other = "`unsloth-plugins export` (export_gguf) writes GGUF files. " if target.suffix.lower() == ".gguf" else ""
        raise ConfigError(
            expected="the name of a folder, into which the merged model is written",
            got=f"{target.name}, the name of a file",
            remedy=f"{other}Leave out {target.suffix} for a folder of safetensors.",
        )


def hidden_name(target: Path) -> Path:
    """Where the result is until it is complete."""
    return target.parent / f".{target.name}.incomplete"


def _size(place: Path) -> int:
    files = place.rglob("*") if place.is_dir() else [place]
    return sum(path.stat().st_size for path in files if path.is_file())


@contextlib.contextmanager
def appearing(target: Path, *, resumable: bool = False) -> Iterator[Path]:
    """A hidden sibling of ``target`` to write to; it gets the target's name when the block ends without an error.

    Args:
        target: must not exist.
        resumable: what a killed run left behind under the hidden name is still there, for the block to judge. Otherwise
            it is removed. An interrupt from the keyboard and an error of the operating system, such as a full disk,
            leave it too; any other error removes it.

    Raises:
        ExportError: ``target`` exists.
        ConflictError: another process is writing to it now.
    """
    with _hidden(target, resumable) as hidden:
        hidden.mkdir(exist_ok=resumable)
        yield hidden
        for folder, _, names in os.walk(hidden):
            for name in names:
                _sync(Path(folder) / name)
        _appear(hidden, target)


@contextlib.contextmanager
def appearing_file(target: Path) -> Iterator[Path]:
    """As ``appearing``, for one file, which the block creates."""
    with _hidden(target) as hidden:
        yield hidden
        _appear(hidden, target)


@contextlib.contextmanager
def appearing_files(targets: Sequence[Path]) -> Iterator[Path]:
    """A hidden folder, in which the block writes a file of each target's name. They appear the first one last.

    Raises:
        ExportError: the first target exists. Others without it are leftovers of a killed run, and are replaced.
        ConflictError: another process is writing to it now.
    """
    with _hidden(targets[0]) as hidden:
        hidden.mkdir()
        yield hidden
        for target in reversed(targets):
            _appear(hidden / target.name, target)


@contextlib.contextmanager
def scratch(target: Path) -> Iterator[Path]:
    """A hidden folder beside ``target``, for what is needed while it is made. A killed run's is removed first.

    Raises:
        ConflictError: another process has it now.
    """
    place = target.parent / f".{target.name}.scratch"
    with _locked(target, place.with_name(f"{place.name}.lock")):
        remove(place)
        place.mkdir()
        try:
            yield place
        finally:
            remove(place)


@contextlib.contextmanager
def _hidden(target: Path, resumable: bool = False) -> Iterator[Path]:
    check_new(target)
    hidden = hidden_name(target)
    with _locked(target, target.parent / f".{target.name}.lock"):
        keep = False
        try:
            if not resumable:
                remove(hidden)
            yield hidden
        except (KeyboardInterrupt, SystemExit, OSError):  # a full disk too: what is complete need not be made again
            keep = resumable
            raise
        finally:
            if not keep:
                remove(hidden)


@contextlib.contextmanager
def _locked(target: Path, file: Path) -> Iterator[None]:
    check_writable(target)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as lock:
        try:
            _lock(lock, target)
            if not os.path.samestat(os.fstat(lock.fileno()), os.stat(lock.name)):
                raise BlockingIOError  # the last holder removed this file after it was opened here
        except (BlockingIOError, FileNotFoundError) as error:
            raise ConflictError(
                expected=f"one process that writes {target}",
                got="another one, which has locked it",
                remedy="Wait for it, or choose another name.",
            ) from error
        try:
            yield
        finally:
            file.unlink(missing_ok=True)


def _lock(file: IO[str], target: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        _log.warning("The file system of %s has no locks: let no other process write it now.", target)


def _appear(hidden: Path, target: Path) -> None:
    _sync(hidden)
    hidden.rename(target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in _NOT_THERE or not path.is_dir():
            raise  # some file systems sync no folders: then files may appear a little later than their name
    finally:
        os.close(number)


def remove(place: Path) -> None:
    """A file or a whole folder; nothing there is fine."""
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


def side_files(base: Path | None, adapters: Sequence[Path]) -> list[tuple[Path, str]]:
    """What goes along with the weights, and its name there: tokenizer, chat template, generation config, licence, card.

    The tokenizer is that of the last adapter that has one, as a whole, else the base's.
    """
    found: dict[str, Path] = {}
    if base is not None:
        for path in sorted(base.iterdir()):
            if path.is_file() and _goes_along(path):
                found[path.name] = path
        found |= _templates(base)
    if (folder := tokenizer_folder(adapters)) is not None:
        found = {name: path for name, path in found.items() if name not in _TOKENIZER and "/" not in name}
        found |= {name: folder / name for name in _TOKENIZER if (folder / name).is_file()}
        found |= _templates(folder)
    return [(path, name) for name, path in found.items()]


def _goes_along(path: Path) -> bool:
    """Neither weights nor their config, nor what an export to that folder left: Modelfiles, hidden files."""
    name = path.name
    of_weights = path.suffix in _WEIGHTS or "index.json" in name
    return not (of_weights or name in _NOT_COPIED or path.suffix == ".Modelfile" or name.startswith("."))


def tokenizer_folder(adapters: Sequence[Path]) -> Path | None:
    """The adapter whose tokenizer goes along, if any: the last one that has one with its vocabulary."""
    return next((each for each in reversed(adapters) if _has_tokenizer(each) and _has_vocabulary(each)), None)


def half_tokenizers(adapters: Sequence[Path]) -> list[str]:
    """A note of each adapter that has settings of a tokenizer alone, which are of no use."""
    return [
        f"{each} has a tokenizer_config.json and no vocabulary beside it, so its tokenizer was not taken."
        for each in adapters
        if _has_tokenizer(each) and not _has_vocabulary(each)
    ]


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file()


def _has_vocabulary(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARIES)


def _templates(folder: Path) -> dict[str, Path]:
    below = "additional_chat_templates"
    return {f"{below}/{path.name}": path for path in sorted((folder / below).glob("*.jinja"))}


def copy_files(files: Sequence[tuple[Path, str]], target: Path) -> None:
    """Copy each to its name under ``target``."""
    for source, name in files:
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, place)


def cleaned_config(config: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """``config.json`` without any ``quantization_config``, at every depth, and with the given settings.

    Args:
        config: of the base.
        settings: ``dtype`` is set wherever a dtype was named; the others on top and in ``text_config`` where they were
            named; each on top if it was named nowhere. ``None`` leaves a setting as it is.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    named: set[str] = set()

    def clean(part: Any, of_text: bool) -> Any:
        if isinstance(part, list):
            return [clean(each, False) for each in part]
        if not isinstance(part, dict):
            return part
        out = {}
        for key, value in part.items():
            if key in ("quantization_config", "_pre_quantization_dtype"):
                continue
            wanted = "dtype" if key == "torch_dtype" else key
            if wanted in settings and (of_text or wanted == "dtype"):
                named.add(wanted)
                value = settings[wanted]
            out[key] = clean(value, of_text and key == "text_config")
        return out

    out: dict[str, Any] = clean(config, True)
    out |= {name: value for name, value in settings.items() if name not in named}
    return out
