"""The base model as numbers: packed and quantised tensors look like the dense ones that they stand for."""

from __future__ import annotations

import hashlib
import json
import math
import reprlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from unsloth_plugins.core.errors import ConfigError, ExportError, UnsupportedError
from unsloth_plugins.core.export.tensors import Info, MemoryTensors, Source, open_folder, raw_bytes, read_json
from unsloth_plugins.core.mxfp4.codec import BLOCK, decode

PIECE_BYTES = 4 << 20  # of a piece in float32
_SAMPLES, _SAMPLE = 16, 512  # of a tensor for the fingerprint, and numbers in each
_BNB_STATE = ".quant_state.bitsandbytes__"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")


class Base:
    """A model's tensors under the names of its 16-bit checkpoint.

    Args:
        source: the tensors as they are stored.
        config: what ``config.json`` holds.
        device: where dense numbers are computed.

    Attributes:
        infos: name -> dtype and shape as dense tensors. Packed ones count as bfloat16.
        packed: names of those that are stored as MXFP4 ``*_blocks`` and ``*_scales``.

    Raises:
        UnsupportedError: another quantisation than MXFP4 and bitsandbytes' 4 bits.
        ExportError: parts of the config are of wrong types, or packed tensors are damaged.
    """

    def __init__(self, source: Source, config: dict[str, Any], device: str | torch.device = "cpu") -> None:
        self.source, self.config, self.device = source, config, torch.device(device)
        self.packed: set[str] = set()
        self._bnb: dict[str, dict[str, Any]] = {}
        _check_method(config)
        _check_tied(config)
        infos: dict[str, Info] = {}
        for name, info in source.infos.items():
            if name.endswith("_blocks") and (scales := _scales_of(name)) in source.infos:
                n_experts, outputs, rows = _packed_shape(name, info, source.infos[scales])
                dense = name.removesuffix("_blocks")
                self.packed.add(dense)
                infos[dense] = Info(torch.bfloat16, (n_experts, rows * BLOCK, outputs))
            elif name.endswith("_scales") and name.removesuffix("_scales") + "_blocks" in source.infos:
                continue
            elif (weight := self._bnb_weight(name)) is not None:
                if weight != name:
                    continue
                state = self._bnb[name]
                infos[name] = Info(getattr(torch, state["dtype"]), tuple(state["shape"]))
            else:
                infos[name] = info
        self.infos = infos

    def _bnb_weight(self, name: str) -> str | None:
        """The 4-bit weight that ``name`` is or belongs to."""
        whole = name
        for suffix in (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", _BNB_STATE):
            if suffix in name:
                name = name[: name.index(suffix)]
                break
        if name not in self._bnb:
            states = [key for kind in ("nf4", "fp4") if (key := f"{name}{_BNB_STATE}{kind}") in self.source.infos]
            if not states:
                if whole != name:
                    raise _damaged(name)
                return None
            self._bnb[name] = _bnb_state(self.source, name, states[0])
        return name

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Rows of a dense tensor, with the numbers that a forward pass sees.

        Returns:
            float32 for MXFP4, the stored dtype for plain tensors, and bitsandbytes' dtype for its 4 bits.
        """
        if name in self.packed:
            blocks = self.source.read(f"{name}_blocks", begin, end).to(self.device)
            scales = self.source.read(f"{name}_scales", begin, end).to(self.device)
            return decode(blocks, scales).transpose(-1, -2)
        if name in self._bnb:
            return self._read_bnb(name, begin, end)
        return self.source.read(name, begin, end).to(self.device)

    def _read_bnb(self, name: str, begin: int, end: int | None) -> torch.Tensor:
        """Rows of bitsandbytes' 4 bits, decoded in pieces of whole blocks; blocks don't end where rows do."""
        state = self._bnb[name]
        shape, block = state["shape"], state["blocksize"]
        begin, stop, _ = slice(begin, end).indices(shape[0])
        row = math.prod(shape[1:])
        rows = max(stop - begin, 0)
        first, last = begin * row, (begin + rows) * row
        values = torch.empty(last - first, dtype=getattr(torch, state["dtype"]), device=self.device)
        step = block << 14
        for at in range(first - first % block, last, step):
            part = self._bnb_numbers(name, at, min(at + step, -(-last // block) * block))
            low, high = max(at, first), min(at + step, last)
            values[low - first : high - first] = part[low - at : high - at]
        return values.view(rows, *shape[1:])

    def _bnb_numbers(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Numbers of whole blocks in float32: the earlier code in the high nibble, ``absmax`` for each block, itself
        often 8 bits."""
        state, read = self._bnb[name], self.source.read_numbers
        packed_info = self.source.infos[name]
        width = packed_info.dtype.itemsize * 2  # numbers in one of the stored ones
        stored = packed_info.nbytes // packed_info.dtype.itemsize
        packed = read(name, begin // width, min(-(-end // width), stored)).view(torch.uint8).to(self.device)
        first, last = begin // state["blocksize"], -(-end // state["blocksize"])
        absmax = read(f"{name}.absmax", first, last).to(self.device)
        if f"{name}.nested_absmax" in self.source.infos:
            size = state["nested_blocksize"]
            outer = read(f"{name}.nested_absmax", first // size, -(-last // size)).to(self.device)
            codes = self.source.read(f"{name}.nested_quant_map").to(self.device)[absmax.int()]
            inside = torch.arange(first, last, device=self.device) // size - first // size
            absmax = codes * outer[inside] + state["nested_offset"]
        table = self.source.read(f"{name}.quant_map").to(self.device)
        both = torch.stack((packed >> 4, packed & 15), dim=-1).view(-1)[: end - begin]
        return table[both.int()] * absmax.repeat_interleave(state["blocksize"])[: both.numel()]

    @property
    def embedding(self) -> str | None:
        """The name of the input embedding, where it is one of the usual ones."""
        found = [name for name in self.infos if name.endswith(_EMBEDDINGS)]
        return found[0] if len(found) == 1 else None

    @property
    def head(self) -> str:
        """The name of the output head, whether it is stored or not."""
        return "lm_head.weight"

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding: by the config, and where it doesn't say, by what is stored."""
        for part in (self.config, self.config.get("text_config") or {}):
            if (told := part.get("tie_word_embeddings")) is not None:
                return bool(told)
        return self.embedding is not None and self.head not in self.infos

    @property
    def in_four_bits(self) -> set[str]:
        """Names of the tensors that are stored in 4 bits of bitsandbytes."""
        return set(self._bnb)

    def stored(self, name: str) -> list[str]:
        """Names of the stored tensors behind a dense one."""
        found = [key for key in (name, f"{name}_blocks", f"{name}_scales") if key in self.source.infos]
        if name in self._bnb:
            found += [key for key in self.source.infos if key.startswith(f"{name}.")]
        return found


def _check_method(config: dict[str, Any]) -> None:
    for part in (config, object_in(config, "text_config")):
        stored = object_in(part, "quantization_config")
        if not stored:
            continue
        method = stored.get("quant_method")
        four_bit = stored.get("load_in_4bit") or stored.get("_load_in_4bit")
        if method == "mxfp4" or (method == "bitsandbytes" and four_bit):
            continue
        raise UnsupportedError(
            expected="a base in 16 or 32 bits, in MXFP4, or in 4 bits of bitsandbytes",
            got=f"quant_method {method!r}",
            remedy="Merge into the 16-bit model that this one was made from.",
        )


def _check_tied(config: dict[str, Any]) -> None:
    """Any text would count as true, and a head that differs from the embedding be left out."""
    for part in (config, object_in(config, "text_config")):
        told = part.get("tie_word_embeddings")
        if not isinstance(told, (bool, type(None))):
            raise ExportError(
                expected="tie_word_embeddings in the model's config to be true or false",
                got=reprlib.repr(told),
                remedy="config.json is damaged: download or save it again.",
            )


def object_in(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The object under a name in a model's config; empty where there is none.

    Raises:
        ExportError: something else is there.
    """
    found = config.get(name)
    if found is None or isinstance(found, dict):
        return found or {}
    raise ExportError(
        expected=f"{name} in the model's config to be an object",
        got=reprlib.repr(found),
        remedy="config.json is damaged: download or save it again.",
    )


def stop_ids(config: Mapping[str, Any], file: str = "config.json") -> list[int]:
    """``eos_token_id`` of a model's config or generation config: none, one or several.

    Raises:
        ExportError: it is something else. ``file`` is named.
    """
    found = config.get("eos_token_id")
    stops = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(stop, int) and not isinstance(stop, bool) for stop in stops):
        raise ExportError(
            expected=f"eos_token_id in the model's {file} to be a whole number, or a list of them",
            got=reprlib.repr(found),
            remedy=f"{file} is damaged: download or save it again.",
        )
    return stops


def _packed_shape(name: str, blocks: Info, scales: Info) -> tuple[int, int, int]:
    """Experts, outputs and blocks in a row of a pair of MXFP4 tensors."""
    shape = scales.shape
    pair = (*shape, BLOCK // 2) == blocks.shape and blocks.dtype == scales.dtype == torch.uint8
    if len(shape) != 3 or not all(shape) or not pair:
        raise ExportError(
            expected=f"{name} of shape [experts, outputs, blocks, {BLOCK // 2}] in bytes, and a scale for each block",
            got=f"{list(blocks.shape)} of {blocks.dtype} and {list(shape)} of {scales.dtype}",
            remedy="The model is damaged: download or save it again.",
        )
    return shape[0], shape[1], shape[2]


def _bnb_state(source: Source, name: str, key: str) -> dict[str, Any]:
    """What bitsandbytes stores of a 4-bit weight under ``key``. The parts of the weight must be as large as it says."""
    infos = source.infos
    nested = f"{name}.nested_absmax" in infos
    try:
        state: dict[str, Any] = json.loads(bytes(raw_bytes(source.read(key))))
        size = math.prod(state["shape"])
        blocks = -(-size // state["blocksize"])
        counts = {".absmax": blocks, ".quant_map": 16}
        if nested:
            counts |= {".nested_absmax": -(-blocks // state["nested_blocksize"]), ".nested_quant_map": 256}
            float(state["nested_offset"])
        right = getattr(torch, state["dtype"]).is_floating_point and infos[name].nbytes * 2 >= size
        for part, count in counts.items():
            info = infos[name + part]
            right &= len(info.shape) == 1 and info.shape[0] >= count
            right &= (info.dtype == torch.uint8) if nested and part == ".absmax" else info.dtype.is_floating_point
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        right = False
    if not right:
        raise _damaged(name)
    return state


def _damaged(name: str) -> ExportError:
    return ExportError(
        expected=f"a weight {name} in 4 bits of bitsandbytes with all its parts",
        got="parts that are missing, damaged or too small",
        remedy="The model is damaged: download or save it again.",
    )


def _scales_of(blocks: str) -> str:
    return blocks.removesuffix("_blocks") + "_scales"


def spans(info: Info, piece_bytes: int = PIECE_BYTES) -> Iterator[tuple[int, int | None]]:
    """Ranges along the first dimension whose numbers take about ``piece_bytes`` in float32."""
    if not info.shape:
        yield 0, None
        return
    row = max(Info(torch.float32, info.shape[1:]).nbytes, 1)
    step = max(piece_bytes // row, 1)
    for begin in range(0, info.shape[0], step):
        yield begin, min(begin + step, info.shape[0])


def fingerprint(source: Source, apart: Collection[str] = ()) -> str:
    """A quick hash that tells models apart: all names, dtypes and shapes, and samples spread evenly over each tensor.

    It sees every training that moves a tensor as a whole, and may miss a change of a few rows or numbers.

    Args:
        source: the tensors as they are stored.
        apart: names of those that do not count.
    """
    digest = hashlib.sha256()
    for name in sorted(source.infos.keys() - set(apart)):
        info = source.infos[name]
        digest.update(f"{name} {info.dtype} {info.shape}\n".encode())
        count = math.prod(info.shape)
        last = max(count - _SAMPLE, 0)
        for begin in sorted({last * part // (_SAMPLES - 1) for part in range(_SAMPLES)}):
            digest.update(raw_bytes(source.read_numbers(name, begin, min(begin + _SAMPLE, count))))
    return digest.hexdigest()


def resolve_folder(path_or_id: str | Path) -> Path:
    """A local folder as it is; a hub id through the hub's cache, downloaded where it is not there and that is allowed.

    Raises:
        ExportError: neither a folder nor a model that the hub or its cache has.
    """
    folder = Path(path_or_id).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(path_or_id).count("/") > 1 or str(path_or_id).startswith((".", "~")):
        raise ExportError(
            expected="a model folder, or a hub id such as org/name",
            got=f"{path_or_id}, and there is no such folder",
            remedy="Give the folder that holds config.json and the safetensors files.",
        )
    from huggingface_hub import snapshot_download

    try:
        patterns = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.md", "*.py", "LICENSE*", "NOTICE*"]
        return Path(snapshot_download(str(path_or_id), allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:
        raise ExportError(
            expected="a model folder, or a hub id that can be fetched or is in the cache",
            got=f"{path_or_id}: no such folder here, and nothing from the hub ({type(error).__name__})",
            remedy="Give the folder that holds config.json and the safetensors files.",
        ) from error


def check_device(device: str | torch.device) -> None:
    """Refuse a device that is not there.

    Raises:
        ConfigError: it isn't.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(
            expected="a device that torch can use here, such as cpu or cuda",
            got=f"{str(device)!r} ({str(error).splitlines()[0]})",
            remedy="Leave it out for the CPU.",
        ) from error


def open_base(folder: Path, device: str | torch.device = "cpu") -> Base:
    """The base model in a folder.

    Raises:
        ExportError: no config.json, no safetensors, or an incomplete set.
        UnsupportedError: a quantisation that can't be read.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ExportError(
            expected=f"config.json in {folder}", got="none", remedy="Give the folder of a complete model."
        )
    return Base(open_folder(folder), read_json(path), device)


def check_whole(model: torch.nn.Module) -> None:
    """Refuse a model of which this process holds only a part. Every process of a run comes to the same result.

    Raises:
        UnsupportedError: parameters are sharded (FSDP2, tensor parallel).
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed.tensor import DTensor  # takes half a second

    for name, parameter in model.named_parameters():
        if isinstance(parameter.data, DTensor) or isinstance(parameter, DTensor):
            raise UnsupportedError(
                expected="a model that each process holds whole, to merge it",
                got=f"{name}, sharded over processes",
                remedy="Save the adapter whole (accelerate: fsdp_state_dict_type: FULL_STATE_DICT; Lightning: load the "
                "checkpoint under strategy='unsloth'), then `unsloth-plugins merge BASE OUTPUT -a ADAPTER`.",
            )


def base_of_model(model: Any) -> Base:
    """The base tensors of a live model, with or without PEFT around it; tied tensors once.

    Raises:
        UnsupportedError: weights are sharded, quantised in a way that can't be read, or are not on a real device.
    """
    check_whole(model)
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in inner.state_dict().items():
        if ".lora_" in name or ".modules_to_save." in name or ".token_adapter.trainable" in name:
            continue
        if tensor.is_meta:
            raise UnsupportedError(
                expected="a model whose weights are loaded", got=f"{name} on the meta device", remedy="Load it fully."
            )
        plain = name
        for part in (".base_layer", ".original_module", ".token_adapter"):
            plain = plain.replace(part, "")
        where = (tensor.data_ptr(), tuple(tensor.shape))
        if tensor.numel() and where in seen:
            continue
        seen.add(where)
        tensors[plain] = tensor
    return Base(MemoryTensors(tensors), config_of(inner))


def config_of(model: Any) -> dict[str, Any]:
    """The config of a live model as a dict; empty where it has none, as a plain module."""
    config: Any = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    return dict(config) if isinstance(config, Mapping) else {}


def same_numbers(one: Base, other: Base, apart: Collection[str] = ()) -> bool:
    """Whether samples of the tensors that both have are equal in the coarser of their dtypes, whatever their packing.

    Of each tensor its first and middle row, or its first expert; rows that one of them has beyond the other's, as after
    a vocabulary grew, are not looked at, nor are the tensors in ``apart``. Of two dtypes of a size ``one``'s counts.
    """
    for name, info in one.infos.items():
        there = None if name in apart else other.infos.get(name)
        if there is None or info.shape[1:] != there.shape[1:] or not info.shape:
            continue
        rows = min(info.shape[0], there.shape[0])
        for row in {0, rows // 2} if len(info.shape) < 3 else {0}:
            a, b = one.read(name, row, row + 1).cpu(), other.read(name, row, row + 1).cpu()
            coarser = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
            if not torch.equal(a.to(coarser), b.to(coarser)):
                return False
    return True
