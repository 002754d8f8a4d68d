"""A GGUF file written tensor by tensor, in one piece or in several; it appears when it is complete."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export.folder import appearing_files, check_new, check_space, remove
from unsloth_plugins.core.export.tensors import Info, Progress, raw_bytes

PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_MARGIN = 64 << 20  # for the vocabulary


@dataclass(frozen=True)
class Tensor:
    """One tensor of the file.

    Attributes:
        name: in the file.
        shape: outermost dimension first.
        type: name of the GGML type, in small letters.
        data: iterates over its bytes.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    data: Callable[[], Iterator[memoryview]]

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        import gguf

        block, width = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type.upper()]]
        return Info(torch.uint8, self.shape).nbytes // block * width


def check_package() -> None:
    """Refuse before any work where the ``gguf`` package is missing.

    Raises:
        UnsupportedError: it is.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(
            expected="the package gguf", got="none", remedy="Install it: pip install 'unsloth-plugins[export]'."
        )


def check_output(target: Path, *, sharded: bool = False) -> None:
    """Refuse a file that is there already, also as a set of shards of any number, or that is not called GGUF.

    Raises:
        ExportError: it is there.
        ConfigError: the name.
    """
    check_new(target)
    if target.suffix.lower() != ".gguf":
        raise ConfigError(
            expected="the name of a file that ends in .gguf, by which llama.cpp and Ollama know it",
            got=target.name,
            remedy=f"Call it {target.stem or 'model'}.gguf. `unsloth-plugins merge` writes folders of safetensors.",
        )
    for shard in _shards_of(target) if sharded else ():
        if "-00001-of-" in shard.name:  # it appears last: without it the others are a killed run's
            check_new(shard)


def _shards_of(target: Path) -> list[Path]:
    """Files beside ``target`` with names of its shards, whatever their number."""
    shard = re.compile(re.escape(target.stem) + r"-\d{5}-of-\d{5}\.gguf")
    places = target.parent.iterdir() if target.parent.is_dir() else ()
    return sorted(path for path in places if shard.fullmatch(path.name))


def rounded(rows: torch.Tensor, kind: str, name: str) -> memoryview:
    """The bytes of numbers in a plain type.

    Raises:
        ExportError: a number is beyond float16's range.
    """
    out = rows.to(PLAIN[kind])
    if kind == "f16" and bool((out.isinf() & ~rows.isinf()).any()):
        raise ExportError(
            expected=f"numbers within float16's range in {name}",
            got=f"{rows.abs().max():g}",
            remedy="Export to bf16.",
        )
    return raw_bytes(out)


def new_writer(arch: str, max_shard_bytes: int | None = None) -> Any:
    """A ``gguf.GGUFWriter`` without a file yet.

    Raises:
        ConfigError: ``max_shard_bytes`` is not positive.
    """
    import gguf

    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ConfigError(
            expected="a positive shard size", got=str(max_shard_bytes), remedy="Leave it out for one file."
        )
    return gguf.GGUFWriter(None, arch, split_max_size=max_shard_bytes or 0)


def write(writer: Any, target: Path, tensors: Sequence[Tensor], progress: Progress | None) -> tuple[list[Path], int]:
    """Write what the writer has been told, and the tensors.

    Args:
        writer: from ``new_writer``, with all metadata in it.
        target: the file. Several are called ``NAME-00001-of-00003.gguf`` and so on, as llama.cpp wants it; those that a
            killed run left of another number are removed.
        tensors: in order.
        progress: called with bytes done, bytes in all, and the tensor's name.

    Returns:
        The files, and the bytes that were checked to be free on the disk.

    Raises:
        ExportError: the file is there already, too little disk, or a tensor's bytes don't add up.
    """
    import gguf
    import numpy as np

    for tensor in tensors:
        kind = gguf.GGMLQuantizationType[tensor.type.upper()]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes, raw_dtype=kind)
    total = sum(tensor.nbytes for tensor in tensors)
    files = writer.format_shard_names(target)
    check_space(files[0], total + _MARGIN)
    by_name = {tensor.name: tensor for tensor in tensors}
    done = 0
    with appearing_files(files) as hidden:
        writer.write_header_to_file(hidden / target.name)
        try:
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            assert writer.fout is not None
            for stream, names in zip(writer.fout, writer.tensors, strict=True):
                writer.write_padding(stream, stream.tell())
                for name in names:
                    begin = done
                    for data in by_name[name].data():
                        stream.write(data)
                        done += data.nbytes
                        if progress:
                            progress(done, total, name)
                    if done - begin != by_name[name].nbytes:
                        raise ExportError(
                            expected=f"{by_name[name].nbytes} bytes of {name}",
                            got=str(done - begin),
                            remedy="This is a defect of the export; please report it.",
                        )
                    writer.write_padding(stream, done - begin)
        finally:
            writer.close()
    for left_behind in _shards_of(target) if files != [target] else ():
        if left_behind not in files:
            remove(left_behind)
    return files, total + _MARGIN
