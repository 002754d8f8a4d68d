"""A PEFT adapter folder as changes of named base tensors; every key of the file is used, or is an error.

Source: PEFT 0.20 to 0.21, ``peft.tuners.lora`` (what ``get_delta_weight`` of each layer computes) and
``peft.utils.save_and_load`` (the names in the file). Experts as in ``core.models.adapters``.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export.adapter_config import read_adapter_config
from unsloth_plugins.core.export.base import Base, spans
from unsloth_plugins.core.export.tensors import FileTensors, Info, MemoryTensors, Source

_PREFIX = "base_model.model."
_LORA = re.compile(r"^(?P<stem>.*)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?P<weight>\.weight)?$")
_TRAINED_ROWS = ".token_adapter.trainable_tokens_delta"
_EXPERT_ORDER = ("gate_up_proj", "down_proj")  # as experts modules declare them: PEFT wraps the first one innermost
_TRANSPOSED = ("gpt_oss", "llama4", "llama4_text")  # experts stored [E, in, out]; elsewhere [E, out, in]


@dataclass(frozen=True)
class Term:
    """Something added to a base tensor: ``scaling * B @ A`` in one of four layouts.

    Attributes:
        layout: "linear" [out, in]; "transposed" [in, out]; "embedding" [vocabulary, features];
            "experts" [E, out, in]; "experts_transposed" [E, in, out].
        source, a, b: where the two factors are, and their names there.
        scaling: with the adapter's weight in it.
    """

    layout: str
    source: Source
    a: str
    b: str
    scaling: float
    n_experts: int = 1

    def rows(self, factors: Sequence[torch.Tensor], begin: int, end: int | None) -> torch.Tensor:
        """Rows of what is added, in float32, on the device of ``factors``, which are those of this term."""
        a, b = factors
        if self.layout == "linear":
            return (b[begin:end] @ a) * self.scaling
        if self.layout in ("transposed", "embedding"):
            return (a.T[begin:end] @ b.T) * self.scaling
        delta = torch.bmm(b[begin:end], a[begin:end]) * self.scaling
        return delta.transpose(-1, -2) if self.layout == "experts_transposed" else delta

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, in] and B [out, r] in float32; for experts [E, r, in] and [E, out, r]."""
        a, b = (self.source.read(name).float() for name in (self.a, self.b))
        if not self.layout.startswith("experts"):
            return a, b
        b_EOr = b.view(b.shape[0], -1, self.n_experts).permute(2, 0, 1)
        return a.view(self.n_experts, -1, a.shape[-1]), b_EOr

    def shape(self) -> tuple[int, ...]:
        """Of the tensor that this is added to."""
        a, b = self.source.infos[self.a].shape, self.source.infos[self.b].shape
        if self.layout == "linear":
            return b[0], a[1]
        if self.layout in ("transposed", "embedding"):
            return a[1], b[0]
        pair = (a[1], b[0]) if self.layout == "experts_transposed" else (b[0], a[1])
        return self.n_experts, *pair


def second_half(term: Term, magnitudes: bool = False) -> Term:
    """What the later half of the ranks adds, or the product of its factors' ``magnitudes``; not of experts."""
    a, b = (factor.abs() if magnitudes else factor for factor in term.factors())
    rank = a.shape[0] // 2
    return Term(term.layout, MemoryTensors({"a": a[rank:], "b": b[:, rank:]}), "a", "b", term.scaling)


@dataclass(frozen=True)
class Stored:
    """A tensor of an adapter's file that takes the place of a base tensor, or of some of its rows."""

    source: Source
    key: str
    rows: tuple[int, ...] | None = None


@dataclass
class Changes:
    """What happens to one base tensor, in this order.

    Attributes:
        base: the base tensor itself is another one, as after resizing the embedding.
        trained: takes the tensor's place (``modules_to_save``, biases).
        trained_rows: takes the place of some rows.
        terms: added in float32.
    """

    base: Stored | None = None
    trained: Stored | None = None
    trained_rows: list[Stored] = field(default_factory=list)
    terms: list[Term] = field(default_factory=list)


class Adapter:
    """One adapter folder with the weight that it is merged with.

    Args:
        folder: with ``adapter_config.json`` and ``adapter_model.safetensors`` (or ``.bin``).
        weight: factor of its low-rank terms.

    Raises:
        ExportError: files are missing or damaged, or the config holds what it can't hold.
        UnsupportedError: not LoRA, or a variant with other maths.
    """

    def __init__(self, folder: Path, weight: float = 1.0) -> None:
        self.folder, self.weight = folder, weight
        path = folder / "adapter_config.json"
        if not path.is_file():
            raise _no_adapter(folder, f"no {path.name}")
        self.file = _weights_file(folder)
        self.config: dict[str, Any] = read_adapter_config(path)
        self.source: Source = _open_weights(self.file)

    def scaling(self, place: str, rank: int) -> float:
        """alpha / r (or its root) of the module or parameter at ``place``, times this adapter's weight."""
        alpha = self.config["lora_alpha"]
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", place):
                alpha = value
                break
        return self.weight * alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def collect(self, base: Base, changes: dict[str, Changes]) -> None:
        """Enter everything that the file holds into ``changes``, by the base tensor's name.

        Raises:
            ExportError: a key that belongs to nothing, half a pair, a shape that doesn't fit, or a module that
                ``target_modules`` names and the file lacks. It is named.
            ConfigError: two adapters, or one with a weight other than 1, want to replace a tensor.
        """
        pairs: dict[str, dict[str, str]] = {}
        adapted, whole = set[str](), set[str]()
        for key, name in self._names(base).items():
            match = _LORA.match(name)
            if match:
                pairs.setdefault(match["stem"], {})[match["part"]] = key
            elif name.endswith(_TRAINED_ROWS):
                adapted.add(self._rows(base, key, name.removesuffix(_TRAINED_ROWS), changes))
            else:
                whole.add(self._stored(base, key, name, changes))
        depths: dict[str, list[int]] = {}
        for stem in pairs:
            depths.setdefault(stem.replace(".base_layer", ""), []).append(stem.count(".base_layer"))
        for stem, parts in pairs.items():
            module = stem.replace(".base_layer", "")
            adapted.add(module)
            self._pair(base, module, stem.count(".base_layer"), sorted(depths[module], reverse=True), parts, changes)
        self._check_complete(base, adapted, whole)

    def _names(self, base: Base) -> dict[str, str]:
        """Each key with its name in the base model, without what PEFT saves twice of an embedding that has grown.

        ``X.weight`` and ``X.modules_to_save.weight`` are the trained one, ``X.original_module.weight`` is the one
        before, which nothing needs then. A tied head has the trained rows of the embedding once more.

        Raises:
            ExportError: two that should be equal are not.
        """
        names = {key: key.removeprefix(_PREFIX) for key in self.source.infos}
        keys = {name: key for key, name in names.items()}
        head, embedding = (
            f"{(one or '').removesuffix('.weight')}.token_adapter." for one in (base.head, base.embedding)
        )
        for name, key in keys.items():
            if ".original_module." in name:
                kept = (name.replace(".original_module.", part) for part in (".", ".modules_to_save."))
                if any(one in keys for one in kept):
                    del names[key]
            elif ".modules_to_save." in name:
                plain = name.replace(".modules_to_save.", ".")
                names[key] = plain
                if plain in keys:
                    del names[key]
                    self._check_equal(keys[plain], key)
            elif base.tied and name.startswith(head) and (same := name.replace(head, embedding)) in keys:
                del names[key]
                self._check_equal(keys[same], key)
        return names

    def _check_equal(self, one: str, other: str) -> None:
        read, info = self.source.read, self.source.infos[one]
        pieces = spans(info) if info == self.source.infos[other] else ()
        if not pieces or not all(torch.equal(read(one, *piece), read(other, *piece)) for piece in pieces):
            raise ExportError(
                expected=f"{one} and {other} to be equal in {self.file.name}",
                got="different numbers",
                remedy="The adapter is damaged: save it again.",
            )

    def _pair(
        self,
        base: Base,
        module: str,
        depth: int,
        depths: Sequence[int],
        parts: Mapping[str, str],
        changes: dict[str, Changes],
    ) -> None:
        embedding = any("embedding" in part for part in parts)
        needed = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A", "lora_B")
        if set(parts) != set(needed):
            raise ExportError(
                expected=f"{' and '.join(needed)} of {module} in {self.file.name}",
                got=f"only {', '.join(parts)}",
                remedy="The adapter is damaged: save it again.",
            )
        a, b = (parts[part] for part in needed)
        weight = f"{module}.weight"
        n_experts, place = 1, module
        if weight in base.infos or (weight == base.head and base.tied and base.embedding):
            layout = "embedding" if embedding else "transposed" if self.config.get("fan_in_fan_out") else "linear"
            target = weight
        else:
            target, place, n_experts = self._expert_parameter(base, module, depth, depths, a)
            layout = self._expert_layout(base, target, a)
        a_info, b_info = self.source.infos[a], self.source.infos[b]
        if len(a_info.shape) != 2 or len(b_info.shape) != 2:
            raise UnsupportedError(
                expected="LoRA on linear layers, embeddings and experts",
                got=f"{a} of shape {list(a_info.shape)}",
                remedy="Merge convolutions with PEFT's own merge_and_unload.",
            )
        rank = a_info.shape[0] // n_experts
        if a_info.shape[0] != b_info.shape[1] or rank * n_experts != a_info.shape[0]:
            raise ExportError(
                expected=f"{a} and {b} of one rank",
                got=f"{list(a_info.shape)} and {list(b_info.shape)} for {n_experts} experts",
                remedy="The adapter is damaged or belongs to another base: give the right one.",
            )
        term = Term(layout, self.source, a, b, self.scaling(place, rank), n_experts)
        changes.setdefault(target, Changes()).terms.append(term)

    def _expert_parameter(
        self, base: Base, module: str, depth: int, depths: Sequence[int], key: str
    ) -> tuple[str, str, int]:
        """The parameter of an experts module that the pair at this nesting depth belongs to."""
        wanted = self.config.get("target_parameters") or ()
        found = [
            name
            for name, info in base.infos.items()
            if name.rpartition(".")[0] == module
            and len(info.shape) == 3
            and any(name == one or name.endswith(f".{one}") for one in wanted)
        ]
        known = [f"{module}.{name}" for name in _EXPERT_ORDER if f"{module}.{name}" in found]
        ordered = known if len(known) == len(found) else found
        if not ordered or len(ordered) != len(depths) or (len(ordered) > 1 and ordered is not known):
            self._unknown(base, key, "Give the base that it was trained on, or an adapter in PEFT's current format.")
        target = ordered[list(depths).index(depth)]
        return target, target, base.infos[target].shape[0]

    def _expert_layout(self, base: Base, target: str, a: str) -> str:
        _, first, second = base.infos[target].shape
        inputs = self.source.infos[a].shape[-1]
        if first != second:
            return "experts_transposed" if inputs == first else "experts"
        kinds = {str(part.get("model_type")) for part in (base.config, base.config.get("text_config") or {})}
        return "experts_transposed" if kinds & set(_TRANSPOSED) else "experts"

    def _rows(self, base: Base, key: str, module: str, changes: dict[str, Changes]) -> str:
        weight = f"{module}.weight"
        chosen = self.config.get("trainable_token_indices")
        if isinstance(chosen, Mapping):
            chosen = next((rows for name, rows in chosen.items() if f".{module}".endswith(f".{name}")), None)
        if weight not in base.infos or chosen is None:
            self._unknown(base, key, "Give the base that it was trained on.")
        self._check_replaces(key, None)
        rows = Stored(self.source, key, tuple(chosen or ()))
        width = base.infos[weight].shape[1:]
        self._check_shape(key, self.source.infos[key], (len(rows.rows or ()), *width))
        changes.setdefault(weight, Changes()).trained_rows.append(rows)
        return module

    def _stored(self, base: Base, key: str, name: str, changes: dict[str, Changes]) -> str:
        """A whole tensor: trained, or the base's own because it was resized. Returns its name in the base."""
        plain = name.replace(".base_layer", "").replace(".token_adapter", "")
        head = plain == base.head and base.tied
        reference = plain if plain in base.infos else (base.embedding if head else None)
        if reference is None:
            self._unknown(base, key, "Give the base that it was trained on.")
        assert reference is not None
        expected, info = base.infos[reference].shape, self.source.infos[key]
        grows = reference in (base.embedding, base.head)
        self._check_shape(key, info, (info.shape[0], *expected[1:]) if grows and info.shape else expected)
        change = changes.setdefault(plain, Changes())
        module = plain.rpartition(".")[0]
        saved = self.config.get("modules_to_save") or ()
        if ".base_layer." in name or (grows and not any(f".{module}".endswith(f".{one}") for one in saved)):
            if plain.endswith(".bias"):
                self._check_replaces(key, change.trained)
                change.trained = Stored(self.source, key)
            else:
                change.base = Stored(self.source, key)
        else:
            self._check_replaces(key, change.trained)
            change.trained = Stored(self.source, key)
        return plain

    def _check_replaces(self, key: str, already: Stored | None) -> None:
        if already is not None or self.weight != 1:
            raise ConfigError(
                expected="tensors that are trained as a whole to come from one adapter of weight 1",
                got=f"{key} " + ("from two adapters" if already else f"with weight {self.weight}"),
                remedy="Merge this adapter alone and with weight 1, the others after it.",
            )

    def _check_shape(self, key: str, got: Info, expected: tuple[int, ...]) -> None:
        if got.shape != tuple(expected):
            raise ExportError(
                expected=f"{key} of shape {list(expected)}, as in the base",
                got=str(list(got.shape)),
                remedy="Give the base that the adapter was trained on.",
            )

    def _unknown(self, base: Base, key: str, remedy: str) -> None:
        raise ExportError(
            expected="every tensor of the adapter to belong to a tensor of the base",
            got=f"{key} in {self.file.name}, which belongs to none of {len(base.infos)}",
            remedy=remedy,
        )

    def _check_complete(self, base: Base, adapted: Collection[str], whole: Collection[str]) -> None:
        """What the config says was trained must be in the file, or a part of the training would be lost."""
        config = self.config
        names = [*base.infos, *([base.head] if base.head and base.head not in base.infos else [])]
        for name in names:
            if _is_saved(config.get("modules_to_save"), name.rpartition(".")[0]) and name not in whole:
                self._lacks(name, "modules_to_save")
        for name, info in base.infos.items():
            wanted = len(info.shape) == 3 and _names(config.get("target_parameters"), name)
            if wanted and name.rpartition(".")[0] not in adapted:
                self._lacks(name, "target_parameters")
        targets = config.get("target_modules")
        for name, info in base.infos.items():
            module = name.removesuffix(".weight")
            if module == name or len(info.shape) != 2 or re.search(r"\.experts\.\d+\.", name) or module in adapted:
                continue
            wanted = _names(targets, module) and not _names(config.get("exclude_modules"), module)
            if wanted and _in_layers(config, module):
                self._lacks(module, "target_modules")

    def _lacks(self, name: str, option: str) -> None:
        raise ExportError(
            expected=f"training of {name}, which {option} of the adapter names",
            got=f"none in {self.file.name}",
            remedy="The adapter is incomplete: save it again.",
        )


def biases_in(adapter_folder: Path) -> frozenset[str]:
    """The base's names of the biases that an adapter's file holds (``bias="all"`` and ``"lora_only"``).

    PEFT trains them in place, so in memory the base no longer has its own, and a merge takes them from the file.

    Raises:
        ExportError: no such file, or a damaged one.
    """
    keys = _open_weights(_weights_file(adapter_folder)).infos
    names = (key.removeprefix(_PREFIX).replace(".base_layer", "") for key in keys if ".lora_" not in key)
    return frozenset(name for name in names if name.endswith("bias"))


def _weights_file(folder: Path) -> Path:
    names = ("adapter_model.safetensors", "adapter_model.bin")
    present = [folder / name for name in names if (folder / name).is_file()]
    if not present:
        raise _no_adapter(folder, f"no {names[0]}")
    return present[0]


def _open_weights(file: Path) -> Source:
    return FileTensors([file]) if file.suffix == ".safetensors" else MemoryTensors(_load_pickled(file))


def _no_adapter(folder: Path, lacks: str) -> ExportError:
    remedy = "Give the folder that PEFT's save_pretrained or the trainer wrote."
    if not folder.is_dir():
        lacks = "no such folder"
        remedy += " An adapter on the hub is not fetched: `hf download ID --local-dir FOLDER` first."
    elif below := sorted(str(one.parent) for one in folder.glob("*/adapter_config.json")):
        remedy = f"Give the one that you want of {', '.join(below)}."
    return ExportError(
        expected=f"adapter_config.json and adapter_model.safetensors in {folder}", got=lacks, remedy=remedy
    )


def _load_pickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        state = str(error).splitlines()[0]
    if isinstance(state, dict) and all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        return state
    raise ExportError(
        expected=f"tensors by name in {file}, as torch.save writes them",
        got=state if isinstance(state, str) else type(state).__name__,
        remedy="The file is damaged: copy it again, or save the adapter as safetensors.",
    )


def _is_saved(saved: Any, module: str) -> bool:
    """Whether a module or one that it lies in is named, as PEFT compares them: by how a path ends."""
    parts = module.split(".")
    paths = [".".join(parts[: n + 1]) for n in range(len(parts))]
    return any(path.endswith(one) for path in paths for one in saved or ())


def _in_layers(config: Mapping[str, Any], module: str) -> bool:
    """Whether the layer that a module lies in was trained, as PEFT reads its number off the path."""
    layers, names = config.get("layers_to_transform"), config.get("layers_pattern") or r"[^.]*"
    if layers is None:
        return True
    for name in [names] if isinstance(names, str) else names:
        if found := re.match(rf".*\.{name}\.(\d+)\.", module):
            return int(found[1]) in ([layers] if isinstance(layers, int) else layers)
    return False


def _names(targets: Any, module: str) -> bool:
    if isinstance(targets, str):
        return re.fullmatch(targets, module) is not None
    return any(module == target or module.endswith(f".{target}") for target in targets or ())
