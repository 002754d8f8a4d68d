"""A GGUF file for llama.cpp, from a model folder or from a base and adapters, in one streamed pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export.base import open_base, resolve_folder, spans, stop_ids
from unsloth_plugins.core.export.folder import half_tokenizers, tokenizer_folder
from unsloth_plugins.core.export.gguf_file import PLAIN, Tensor, check_output, check_package, new_writer, rounded, write
from unsloth_plugins.core.export.gguf_layout import Piece, add_metadata, architecture_of, pieces_of
from unsloth_plugins.core.export.gguf_vocab import add_vocabulary, check_template, load_tokenizer
from unsloth_plugins.core.export.merge import Adapters, open_adapters
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.ollama import modelfile, modelfile_place, sampling_of, write_modelfile
from unsloth_plugins.core.export.provenance import check_base
from unsloth_plugins.core.export.tensors import Progress, raw_bytes, read_json
from unsloth_plugins.core.mxfp4.codec import BLOCK, encode

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "mxfp4")
_FILE_TYPE = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
_WITH_LLAMA_QUANTIZE = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq", "tq")


@dataclass
class GgufReport:
    """What an export did.

    Attributes:
        output: the file for llama.cpp; the first one, if there are several.
        files: all that were written.
        tensors: GGUF name -> type.
        bytes_needed: that were checked to be free on the disk.
        notes: what llama.cpp will do otherwise, and what could not be checked.
        modelfile: that was written for Ollama, if one was asked for and could be.
    """

    output: Path
    files: list[Path]
    tensors: dict[str, str]
    bytes_needed: int
    notes: list[str] = field(default_factory=list)
    modelfile: Path | None = None


def check_type(quant: str) -> str:
    """The type's name in lower case; refuses an unknown one before any work.

    Raises:
        UnsupportedError: one that llama.cpp has and this export can't make; the tool is named.
        ConfigError: one that nobody knows.
    """
    if quant.lower() in TYPES:
        return quant.lower()
    if quant.lower().startswith(_WITH_LLAMA_QUANTIZE):
        raise UnsupportedError(
            expected=f"one of {', '.join(TYPES)}",
            got=quant,
            remedy=f"Export to bf16, then run llama.cpp's own `llama-quantize model.gguf out.gguf {quant.upper()}`.",
        )
    raise ConfigError(expected=f"quant to be one of {', '.join(TYPES)}", got=repr(quant), remedy="Choose one.")


def export_gguf(
    model: str | Path,
    output: str | Path,
    *,
    adapter: Adapters = (),
    quant: str = "bf16",
    max_shard_bytes: int | None = None,
    ollama: bool = False,
    allow_other_base: bool = False,
    progress: Progress | None = None,
) -> GgufReport:
    """Write a GGUF file, or several that belong together.

    Args:
        model: folder or hub id: a merged model, or the base of the adapters.
        output: the file, which must not exist and ends in ".gguf". It appears when it is complete.
        adapter: a PEFT folder, several, or folder -> weight; merged in float32, rounded once to ``quant``.
        quant: "f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1"; or "mxfp4" for gpt-oss: experts that no
            adapter changed keep their codes exactly, the other tensors are bf16. Norms, biases, sinks and routers are
            always float32. In any case of letters.
        max_shard_bytes: cut into files of at most so many bytes of tensors, called ``NAME-00001-of-00003.gguf`` and so
            on, of which none may exist in any number; a larger tensor gets a file of its own. ``None`` is one file.
        ollama: write a ``Modelfile`` beside it (``NAME.Modelfile`` where there is one already), with the sampling of
            the generation config; if the chat template can't be taken over, a note says so. Goes without
            ``max_shard_bytes``.
        allow_other_base: merge although the adapter names another base.
        progress: called with bytes done, bytes in all, and the tensor's name.

    Raises:
        UnsupportedError: the type needs another tool, the architecture, rope or tokenizer is not exported here, or the
            ``gguf`` package is missing. Before any work.
        ExportError: something is missing or doesn't fit, or too little disk.
        ConfigError: an option that can't be.
    """
    quant = check_type(quant)
    check_package()
    if ollama and max_shard_bytes is not None:
        raise ConfigError(
            expected="one GGUF file for ollama, which imports no split ones",
            got="a Modelfile and a largest size together",
            remedy="Leave out --max-shard-gb (max_shard_bytes), or --ollama.",
        )
    output = Path(output).expanduser()
    check_output(output, sharded=max_shard_bytes is not None)
    folder = resolve_folder(model)
    base = open_base(folder)
    arch = architecture_of(base.config)
    if quant == "mxfp4" and arch != "gpt-oss":
        raise UnsupportedError(
            expected="a gpt_oss for mxfp4, which is for experts", got=arch, remedy="Choose q8_0, q4_0 or bf16."
        )
    adapters = open_adapters(adapter)
    notes = [check_base(one, model, folder, base.source, allow_other_base) for one in adapters]
    merged = Merged(base, adapters)
    folders = [one.folder for one in adapters]
    notes += half_tokenizers(folders)
    tokenizer = load_tokenizer(tokenizer_folder(folders) or folder)
    check_template(tokenizer)
    text = _modelfile(output.name, folder, base.config, tokenizer, notes) if ollama else None
    target = modelfile_place(output) if text is not None else None
    report = _write(merged, new_writer(arch, max_shard_bytes), output, tokenizer, quant, notes, progress)
    if text is not None and target is not None:
        report.modelfile = write_modelfile(target, text)
    return report


def _modelfile(name: str, folder: Path, config: dict[str, Any], tokenizer: Any, notes: list[str]) -> str | None:
    """The text of a Modelfile; ``None`` and a note where the chat template can't be taken over."""
    file = "generation_config.json"
    generation = read_json(folder / file) if (folder / file).is_file() else {}
    stops = stop_ids(generation, file) if "eos_token_id" in generation else stop_ids(config)
    sampling = sampling_of(generation)
    try:
        return modelfile(name, tokenizer, stop_ids=stops, sampling=sampling)
    except UnsupportedError as error:
        notes.append(f"No Modelfile: {error}")
        return None


def _write(
    merged: Merged, writer: Any, output: Path, tokenizer: Any, quant: str, notes: list[str], progress: Progress | None
) -> GgufReport:
    import gguf

    tensors = []
    for piece in pieces_of(merged):
        kind = _type_of(piece, quant, notes)
        tensors.append(Tensor(piece.name, piece.shape, kind, partial(_encoded, merged, piece, kind)))
    writer.add_type("model")
    writer.add_name(str(merged.base.config.get("_name_or_path") or output.stem))
    writer.add_file_type(gguf.LlamaFileType[_FILE_TYPE.get(quant, f"MOSTLY_{quant.upper()}")])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add_metadata(writer, merged, notes)
    if merged.vocab_size is None:
        raise ExportError(
            expected="a model with an embedding",
            got=f"none among {len(merged.base.infos)} tensors",
            remedy="Give the folder of a whole model.",
        )
    add_vocabulary(writer, tokenizer, merged.vocab_size, notes)
    files, needed = write(writer, output, tensors, progress)
    return GgufReport(files[0], files, {tensor.name: tensor.type for tensor in tensors}, needed, notes)


def _type_of(piece: Piece, quant: str, notes: list[str]) -> str:
    if piece.always_f32:
        return "f32"
    if quant == "mxfp4":
        quant = "mxfp4" if piece.expert else "bf16"
    if quant not in PLAIN and piece.shape[-1] % BLOCK:
        notes.append(f"{piece.name} stays in f16: its rows of {piece.shape[-1]} are no multiple of {BLOCK}.")
        return "f16"
    return quant


def _encoded(merged: Merged, piece: Piece, kind: str) -> Iterator[memoryview]:
    if kind == "mxfp4" and piece.source in merged.base.packed and not merged.changed(piece.source):
        yield from _repacked(merged, piece)
        return
    for rows in piece.rows():
        if kind in PLAIN:
            yield rounded(rows, kind, piece.source)
        elif kind == "mxfp4":
            yield raw_bytes(ggml_mxfp4(*encode(rows)))
        else:
            import gguf

            packed = gguf.quants.quantize(rows.contiguous().numpy(), gguf.GGMLQuantizationType[kind.upper()])
            yield packed.reshape(-1).data


def _repacked(merged: Merged, piece: Piece) -> Iterator[memoryview]:
    """The checkpoint's own codes and scales, in GGUF's order."""
    source = merged.base.source
    offset = {"gate": 0, "up": 1, "down": None}[piece.expert or "down"]
    for begin, end in spans(merged.base.infos[piece.source]):
        blocks = source.read(f"{piece.source}_blocks", begin, end)
        scales = source.read(f"{piece.source}_scales", begin, end)
        if offset is not None:
            blocks, scales = blocks[:, offset::2], scales[:, offset::2]
        yield raw_bytes(ggml_mxfp4(blocks, scales))


def ggml_mxfp4(blocks_RB: torch.Tensor, scales_R: torch.Tensor) -> torch.Tensor:
    """The same numbers in GGUF's order: the scale first, then byte j holds numbers j (low nibble) and j + 16.

    Args:
        blocks_RB: uint8 [..., R, 16], byte j holding numbers 2j and 2j + 1.
        scales_R: uint8 [..., R].

    Returns:
        uint8 [..., R, 17].
    """
    codes = torch.stack((blocks_RB & 15, blocks_RB >> 4), dim=-1).flatten(-2)
    half = BLOCK // 2
    together = codes[..., :half] | (codes[..., half:] << 4)
    return torch.cat((scales_R[..., None], together), dim=-1)
