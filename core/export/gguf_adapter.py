"""LoRA alone as a GGUF file, which llama.cpp puts on a GGUF of the base when it loads (``--lora``).

The format: ``general.type`` "adapter", and for a base tensor NAME the pair NAME.lora_a [r, in] and NAME.lora_b
[out, r]; llama.cpp adds ``adapter.lora.alpha / r * B @ A``. Experts have a leading dimension for the expert. The
embedding's A lies the other way, [vocabulary, r].

Source: llama.cpp, ``src/llama-adapter.cpp`` (what it checks) and ``llm_graph_context::build_lora_mm`` (what it adds).
"""

from __future__ import annotations

from pathlib import Path

import torch

from unsloth_plugins.core.errors import ConfigError, UnsupportedError
from unsloth_plugins.core.export.adapter import Changes, Stored
from unsloth_plugins.core.export.base import Base, open_base, resolve_folder, spans
from unsloth_plugins.core.export.gguf import GgufReport
from unsloth_plugins.core.export.gguf_file import PLAIN, Tensor, check_output, check_package, new_writer, rounded, write
from unsloth_plugins.core.export.gguf_layout import Piece, architecture_of, pieces_of
from unsloth_plugins.core.export.merge import Adapters, open_adapters
from unsloth_plugins.core.export.merged import Merged
from unsloth_plugins.core.export.provenance import check_base
from unsloth_plugins.core.export.tensors import Progress


def export_gguf_adapter(
    base: str | Path,
    adapter: Adapters,
    output: str | Path,
    *,
    quant: str = "f16",
    allow_other_base: bool = False,
    progress: Progress | None = None,
) -> GgufReport:
    """Write the low-rank matrices as a GGUF adapter; of the base only names and shapes are used.

    Args:
        base: folder or hub id of the model that the adapter was trained on.
        adapter: a PEFT folder, several, or folder -> weight; several become one of the sum of their ranks.
        output: the file, which must not exist and ends in ".gguf". It appears when it is complete.
        quant: "f32", "f16" or "bf16".
        allow_other_base: go on although the adapter names another base.
        progress: called with bytes done, bytes in all, and the tensor's name.

    Raises:
        UnsupportedError: the adapter has trained whole tensors or rows, or LoRA on a tied embedding or head, which
            llama.cpp's format can't hold; an architecture that is not exported here; or no ``gguf`` package.
        ExportError: something is missing or doesn't fit, or too little disk.
        ConfigError: another type, or no adapter.
    """
    quant = quant.lower()
    if quant not in PLAIN:
        raise ConfigError(
            expected=f"quant of an adapter to be one of {', '.join(PLAIN)}", got=repr(quant), remedy="Choose one."
        )
    check_package()
    output = Path(output).expanduser()
    check_output(output)
    folder = resolve_folder(base)
    opened = open_base(folder)
    arch = architecture_of(opened.config)
    adapters = open_adapters(adapter)
    if not adapters:
        raise ConfigError(expected="an adapter", got="none", remedy="Give its folder.")
    notes = [check_base(one, base, folder, opened.source, allow_other_base) for one in adapters]
    merged = Merged(opened, adapters)
    for name, change in merged.changes.items():
        _check(merged, name, change)
    alpha = float(adapters[0].config["lora_alpha"]) or 1.0
    tensors: list[Tensor] = []
    for piece in pieces_of(merged):
        if piece.source in merged.changes:
            tensors += _pair(merged.changes[piece.source], piece, alpha, quant)
    writer = new_writer(arch)
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    writer.add_name(output.stem)
    files, needed = write(writer, output, tensors, progress)
    return GgufReport(output, files, {tensor.name: quant for tensor in tensors}, needed, notes)


def _check(merged: Merged, name: str, change: Changes) -> None:
    base = merged.base
    remedy = "Export the merged model: export_gguf(base, ..., adapter=...), or the command without --adapter-only."
    if base.tied and name in (base.embedding, base.head):
        raise UnsupportedError(
            expected="LoRA beside the tied embedding and head, which are one tensor to llama.cpp",
            got=name,
            remedy=remedy,
        )
    resized = change.base is not None and not _same(base, name, change.base)  # PEFT saves embeddings that it left alone
    if resized or change.trained or change.trained_rows:
        raise UnsupportedError(
            expected="LoRA matrices only, which is all that a GGUF adapter can hold",
            got=f"{name} resized, or trained as a whole or in rows",
            remedy=remedy,
        )


def _same(base: Base, name: str, stored: Stored) -> bool:
    info = base.infos.get(name)
    return (
        info is not None
        and info.shape == stored.source.infos[stored.key].shape
        and all(
            torch.equal(base.read(name, begin, end).float(), stored.source.read(stored.key, begin, end).float())
            for begin, end in spans(info)
        )
    )


def _pair(change: Changes, piece: Piece, alpha: float, quant: str) -> list[Tensor]:
    """Both tensors of one GGUF weight; what ``alpha / r`` does not say of the scaling is multiplied into B."""
    factors = [term.factors() for term in change.terms]
    a = torch.cat([one for one, _ in factors], dim=-2)
    rank = a.shape[-2]
    b = torch.cat(
        [
            other if (factor := term.scaling * rank / alpha) == 1 else other * factor
            for term, (_, other) in zip(change.terms, factors, strict=True)
        ],
        dim=-1,
    )
    b = piece.outputs(b)
    if change.terms[0].layout == "embedding":
        a = a.T
    return [_tensor(f"{piece.name}.lora_{part}", numbers, quant) for part, numbers in (("a", a), ("b", b))]


def _tensor(name: str, numbers: torch.Tensor, quant: str) -> Tensor:
    return Tensor(name, tuple(numbers.shape), quant, lambda: iter([rounded(numbers, quant, name)]))
