"""Tensors read from and written to safetensors folders piece by piece, so that no file is ever held whole.

The format: 8 bytes (little-endian) with the length of a JSON header, the header {name: {dtype, shape, data_offsets}},
then the data. Files are read and not mapped, because mapped pages count as memory of the process.

Source: https://github.com/huggingface/safetensors (README, "Format").
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import reprlib
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Info:
    """Dtype and shape of a tensor that is not in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all its numbers."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class Source(Protocol):
    """Named tensors that can be read by rows."""

    infos: Mapping[str, Info]

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows ``begin`` to ``end`` along the first dimension, on the CPU; all of them by default."""
        ...

    def read_numbers(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Numbers ``begin`` to ``end`` of the tensor laid out flat, on the CPU. [end - begin]"""
        ...


class MemoryTensors:
    """Tensors that somebody else holds, on any device.

    Args:
        tensors: by name. Quantised ones must have been unpacked by the caller.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.infos: Mapping[str, Info] = {name: Info(t.dtype, tuple(t.shape)) for name, t in tensors.items()}

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """See ``Source``."""
        tensor = self._tensors[name].detach()
        return (tensor[begin:end] if tensor.ndim else tensor).cpu()

    def read_numbers(self, name: str, begin: int, end: int) -> torch.Tensor:
        """See ``Source``."""
        return self._tensors[name].detach().reshape(-1)[begin:end].cpu()


class InFloat32:
    """The same tensors with those of 16 bits in float32, as training often holds what is not quantised."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.infos: Mapping[str, Info] = {
            name: Info(torch.float32, info.shape) if info.dtype in (torch.bfloat16, torch.float16) else info
            for name, info in source.infos.items()
        }

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """See ``Source``."""
        return self._source.read(name, begin, end).to(self.infos[name].dtype)

    def read_numbers(self, name: str, begin: int, end: int) -> torch.Tensor:
        """See ``Source``."""
        return self._source.read_numbers(name, begin, end).to(self.infos[name].dtype)


class FileTensors:
    """The tensors of some safetensors files.

    Args:
        files: each name must occur once among them.

    Raises:
        ExportError: two files hold a tensor of the same name, a file is cut off, or a dtype is unknown.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        infos: dict[str, Info] = {}
        self._places: dict[str, tuple[Path, int]] = {}
        self.files = list(files)
        for file in self.files:
            for name, info, offset in _entries(file):
                if name in infos:
                    raise ExportError(
                        expected="each tensor in one file",
                        got=f"{name} in {self._places[name][0].name} and in {file.name}",
                        remedy="Remove the files that don't belong to this checkpoint, or add its index file.",
                    )
                infos[name], self._places[name] = info, (file, offset)
        self.infos: Mapping[str, Info] = infos

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """See ``Source``."""
        shape = self.infos[name].shape
        if not shape:
            return self.read_numbers(name, 0, 1).view(())
        begin, end, _ = slice(begin, end).indices(shape[0])
        shape = (max(end - begin, 0), *shape[1:])
        row = math.prod(shape[1:])
        return self.read_numbers(name, begin * row, (begin + shape[0]) * row).view(shape)

    def read_numbers(self, name: str, begin: int, end: int) -> torch.Tensor:
        """See ``Source``."""
        dtype, (file, offset) = self.infos[name].dtype, self._places[name]
        offset, size = offset + begin * dtype.itemsize, (end - begin) * dtype.itemsize
        if not size:
            return torch.empty(0, dtype=dtype)
        data = bytearray(size)
        with file.open("rb", buffering=0) as stream:
            stream.seek(offset)
            view, done = memoryview(data), 0
            while done < size and (count := stream.readinto(view[done:])):
                done += count
        if done < size:
            raise _cut_off(file)
        return torch.frombuffer(data, dtype=dtype)


def _cut_off(file: Path) -> ExportError:
    return ExportError(
        expected="a complete safetensors file",
        got=f"{file.name}, which is cut off",
        remedy="Download or save it again.",
    )


def _entries(file: Path) -> Iterator[tuple[str, Info, int]]:
    with file.open("rb") as stream:
        first = stream.read(8)
        if len(first) < 8:
            raise _cut_off(file)
        (length,) = struct.unpack("<Q", first)
        if length > file.stat().st_size - 8:
            raise _cut_off(file)
        header = parse_json(stream.read(length), file)
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if not _is_entry(entry):
            raise ExportError(
                expected=f"dtype, shape and data_offsets of {name} in {file}",
                got=reprlib.repr(entry),
                remedy="The file is damaged: download or save it again.",
            )
        if entry["dtype"] not in DTYPES:
            raise UnsupportedError(
                expected=f"tensors of dtype {', '.join(DTYPES)}",
                got=f"{name} of dtype {entry['dtype']} in {file.name}",
                remedy="Convert the checkpoint to 16 bits first.",
            )
        info = Info(DTYPES[entry["dtype"]], tuple(entry["shape"]))
        begin, end = entry["data_offsets"]
        if end - begin != info.nbytes or 8 + length + end > file.stat().st_size:
            raise _cut_off(file)
        yield name, info, 8 + length + begin


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    numbers = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and [*shape, *offsets]
    return isinstance(numbers, list) and all(isinstance(number, int) and number >= 0 for number in numbers)


def parse_json(text: bytes | str, file: Path, *keys: str) -> dict[str, Any]:
    """The object that ``text`` of ``file`` is.

    Raises:
        ExportError: it is none, or one of ``keys`` is missing.
    """
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ExportError(
            expected=f"JSON in {file}", got=str(error), remedy="The file is damaged: copy or save it again."
        ) from error
    missing = [key for key in keys if key not in found] if isinstance(found, dict) else []
    if missing or not isinstance(found, dict):
        raise ExportError(
            expected=f"{missing[0]} in {file}" if missing else f"an object in {file}",
            got="none" if missing else reprlib.repr(found),
            remedy="The file is damaged: copy or save it again.",
        )
    return found


def read_json(file: Path, *keys: str) -> dict[str, Any]:
    """``parse_json`` of a file."""
    return parse_json(file.read_bytes(), file, *keys)


def _weight_map(index: Path) -> dict[str, str]:
    found = read_json(index, "weight_map")["weight_map"]
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found.values()):
        raise ExportError(
            expected=f"weight_map in {index} to be files by tensor",
            got=reprlib.repr(found),
            remedy="The file is damaged: download or save it again.",
        )
    return found


def open_folder(folder: Path) -> FileTensors:
    """The tensors of a model folder: by its index, or its only file.

    Raises:
        ExportError: no safetensors there, or a shard that the index names is missing.
    """
    index = folder / INDEX
    if index.is_file():
        files = [folder / name for name in sorted(set(_weight_map(index).values()))]
    elif (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    else:
        files = [file for file in sorted(folder.glob("*.safetensors")) if not file.name.startswith("adapter_")]
    missing = [file.name for file in files if not file.is_file()]
    if missing or not files:
        raise ExportError(
            expected=f"a model in safetensors in {folder}",
            got=f"no {missing[0]}" if missing else "no *.safetensors file",
            remedy="Download it completely, or save the model with save_pretrained.",
        )
    return FileTensors(files)


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on any device, without a copy where it is contiguous on the CPU already."""
    flat = tensor.contiguous().view(-1).cpu()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@dataclass(frozen=True)
class Output:
    """One tensor to be written: what it will be, and its pieces in order along the first dimension."""

    name: str
    info: Info
    pieces: Callable[[], Iterator[torch.Tensor]]


Progress = Callable[[int, int, str], None]
"""Called with bytes done, bytes in all, and the name of the tensor, or of what is hashed: both are in the bytes."""
Report = Callable[[int, str], None]
"""Called with the bytes done by one part of the work, and the name."""


def shards_of(outputs: Sequence[Output], max_bytes: int) -> list[list[Output]]:
    """Cut the list where a shard would pass ``max_bytes``; a tensor is never split.

    Raises:
        ConfigError: ``max_bytes`` is not positive.
    """
    if max_bytes <= 0:
        raise ConfigError(expected="a positive shard size", got=str(max_bytes), remedy="Leave it out for the default.")
    shards: list[list[Output]] = []
    size = max_bytes + 1
    for output in outputs:
        if size + output.info.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(output)
        size += output.info.nbytes
    return shards


class Finished(Protocol):
    """Remembers which files are complete."""

    def take(self, name: str, report: Report) -> str | None:
        """The sha256 of a file that is there already, and reads as it was written."""
        ...

    def add(self, path: Path, sha256: str) -> None:
        """A file is complete and on the disk."""
        ...


def write_shards(
    folder: Path, outputs: Sequence[Output], *, max_bytes: int, finished: Finished, report: Report
) -> dict[str, str]:
    """Write ``model.safetensors``, or numbered shards and their index; one piece is in memory at a time.

    Args:
        folder: to write to.
        outputs: the tensors in order.
        max_bytes: of one file; a larger tensor gets a file of its own.
        finished: files that it has are left as they are.
        report: called with bytes done; a file that is left counts as it is read.

    Returns:
        The files' names, and the sha256 of each.

    Raises:
        ExportError: a tensor's pieces don't add up to its size.
    """
    shards = shards_of(outputs, max_bytes)
    total = sum(output.info.nbytes for output in outputs)
    done = 0
    weight_map = {}
    hashes = {}
    for number, shard in enumerate(shards, start=1):
        several = len(shards) > 1
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if several else "model.safetensors"
        weight_map.update({output.name: file for output in shard})
        size = sum(output.info.nbytes for output in shard)

        def inside(part: int, name: str, before: int = done, size: int = size) -> None:
            report(before + min(part, size), name)  # of a file that is there its header is read as well

        there = finished.take(file, inside)
        if there is None:
            there = _write_shard(folder / file, shard, inside)
            finished.add(folder / file, there)
        hashes[file] = there
        done += size
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return hashes


def _write_shard(path: Path, shard: Sequence[Output], report: Report) -> str:
    digest = hashlib.sha256()
    done = 0
    with path.open("wb") as stream:
        header = _header(shard)
        stream.write(header)
        digest.update(header)
        for output in shard:
            begin = done
            for piece in output.pieces():
                assert piece.dtype == output.info.dtype, (output.name, piece.dtype)
                data = raw_bytes(piece)
                stream.write(data)
                digest.update(data)
                done += data.nbytes
                report(done, output.name)
            if done - begin != output.info.nbytes:
                raise ExportError(
                    expected=f"{output.info.nbytes} bytes of {output.name}",
                    got=str(done - begin),
                    remedy="This is a defect of the export; please report it.",
                )
        stream.flush()
        os.fsync(stream.fileno())
    return digest.hexdigest()


def _header(shard: Sequence[Output]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for output in shard:
        end = offset + output.info.nbytes
        header[output.name] = {
            "dtype": NAMES[output.info.dtype],
            "shape": list(output.info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
