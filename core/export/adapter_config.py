"""What ``adapter_config.json`` may hold: LoRA that can be merged, in values of the right types.

Source: PEFT 0.20 to 0.21, ``peft.tuners.lora.config``.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from unsloth_plugins.core.errors import ExportError, UnsupportedError
from unsloth_plugins.core.export.tensors import read_json

_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
_OTHER_MATHS = (
    *("use_dora", "use_qalora", "use_bdlora", "layer_replication", "alora_invocation_tokens"),
    *("lora_bias", "arrow_config", "kasa_config", "monteclora_config", "megatron_config", "velora_config"),
)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return _is_number(value) and isinstance(value, int) and value >= 0


def _is_list(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(of, value))


def _is_names(value: Any) -> bool:
    return _is_list(value, of=lambda one: isinstance(one, str))


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and re.compile(value) is not None
    except re.error:
        return False


def _is_by_pattern(value: Any, of: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and all(map(_is_pattern, value)) and all(map(of, value.values()))


def _is_rows(value: Any) -> bool:
    by_module = isinstance(value, dict) and all(_is_list(rows, of=_is_count) for rows in value.values())
    return by_module or _is_list(value, of=_is_count)


_NAMES = ("a list of names", _is_names)
_NAMES_OR_PATTERN = ("a list of names or a regular expression", lambda value: _is_names(value) or _is_pattern(value))
_LAYERS = ("a layer's number or a list of them", lambda value: _is_count(value) or _is_list(value, of=_is_count))
_PATTERNS = ("a regular expression or a list of them", lambda v: _is_pattern(v) or _is_list(v, of=_is_pattern))
_SWITCH = ("true or false", lambda value: isinstance(value, bool))
_FIELDS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "base_model_name_or_path": ("a name or a path", lambda value: isinstance(value, str)),
    "r": ("a whole number above 0", lambda value: _is_count(value) and value > 0),
    "lora_alpha": ("a finite number", _is_number),
    "rank_pattern": ("whole numbers by regular expressions", lambda value: _is_by_pattern(value, of=_is_count)),
    "alpha_pattern": ("finite numbers by regular expressions", lambda value: _is_by_pattern(value, of=_is_number)),
    "use_rslora": _SWITCH,
    "fan_in_fan_out": _SWITCH,
    "target_modules": _NAMES_OR_PATTERN,
    "exclude_modules": _NAMES_OR_PATTERN,
    "target_parameters": _NAMES,
    "modules_to_save": _NAMES,
    "layers_to_transform": _LAYERS,
    "layers_pattern": _PATTERNS,
    "trainable_token_indices": ("a list of row numbers, or such lists by module", _is_rows),
}  # null is fine everywhere but for lora_alpha


def read_adapter_config(file: Path) -> dict[str, Any]:
    """The content of an ``adapter_config.json``.

    Raises:
        ExportError: it is no JSON object, lacks ``lora_alpha``, or a value has a wrong type. It is named.
        UnsupportedError: see ``check_kind``.
    """
    config = read_json(file)
    check_kind(config, file.parent.name)
    read_json(file, "lora_alpha")
    for name, (expected, is_right) in _FIELDS.items():
        value = config.get(name)
        if not is_right(value) and (value is not None or name == "lora_alpha"):
            raise ExportError(
                expected=f"{name} in {file} to be {expected}",
                got=reprlib.repr(value),
                remedy="The file is damaged: copy or save it again.",
            )
    return config


def check_kind(config: Mapping[str, Any], name: str) -> None:
    """Refuse what can't be merged as ``scaling * B @ A``.

    Args:
        config: what adapter_config.json holds.
        name: for the message.

    Raises:
        UnsupportedError: not LoRA, or a variant with other maths.
    """
    wrong = {key: config[key] for key in _OTHER_MATHS if config.get(key)}
    if config.get("peft_type") != "LORA":
        wrong = {"peft_type": config.get("peft_type")}
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        wrong["init_lora_weights"] = start  # the base was changed when the adapter was made
    if wrong:
        key, value = next(iter(wrong.items()))
        raise UnsupportedError(
            expected="an adapter of plain or rank-stabilised LoRA over an unchanged base",
            got=f"{key}={value!r} in {name}",
            remedy="Merge it with PEFT's own merge_and_unload, or convert it to plain LoRA first.",
        )
