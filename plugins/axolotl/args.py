"""The nested key ``unsloth:``, with the names of ``UnslothConfig``."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, create_model, model_serializer, model_validator

from unsloth_plugins.axolotl.conflicts import check_config
from unsloth_plugins.core import UnslothConfig
from unsloth_plugins.core.errors import ConfigError
from unsloth_plugins.core.export import DTYPES

_FIELDS = {field.name: field for field in dataclasses.fields(UnslothConfig)}
_CAN_BE_OFF = ("attention", "experts", "layers", "lora", "loss", "host_memory_gib")
_OFF = "off"
_OWN = {"quiet": (bool, False), "save_merged": (str | None, None), "merged_dtype": (Literal[DTYPES], "bf16")}
"""Options of this adapter: type and default."""


def uses_plugin(data: Mapping[str, Any]) -> bool:
    """Whether a config names our plugin; Axolotl keeps plugins of former configs of the process."""
    return any(str(name).startswith("unsloth_plugins.axolotl.") for name in data.get("plugins") or ())


def config_of(data: Mapping[str, Any] | None) -> UnslothConfig:
    """The options of ``unsloth:`` as ``apply`` takes them. ``null``, ``off`` and ``false`` mean off.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
    """
    if data is not None and not isinstance(data, Mapping):
        raise ConfigError(
            expected="`unsloth:` to hold options, one a line",
            got=repr(data),
            remedy="Remove it for the defaults.",
        )
    options = {name: value for name, value in (data or {}).items() if name not in _OWN}
    for name in options:
        if name not in _FIELDS:
            near = get_close_matches(str(name), [*_FIELDS, *_OWN], n=1)
            raise ConfigError(
                expected=f"under `unsloth:` only {', '.join([*_FIELDS, *_OWN])}",
                got=f"`{name}`",
                remedy=f"Did you mean `{near[0]}`?" if near else "Remove that line.",
            )
    for name in _CAN_BE_OFF:
        if name in options and options[name] in (_OFF, False):
            options[name] = None
    return UnslothConfig.from_options(None, **options)


class _Options(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        config = config_of(data)
        options = {name: getattr(config, name) if name in _FIELDS else data[name] for name in data}
        if options.get("save_merged") in (_OFF, False):
            options["save_merged"] = None
        return options

    @model_serializer(mode="plain")
    def _keep_off(self) -> dict[str, Any]:
        """Only what was set; Axolotl drops ``None`` from a validated config, and to us it means something."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        off = {name: _OFF for name, value in given.items() if value is None and name in _CAN_BE_OFF}
        return {name: value for name, value in given.items() if value is not None} | off


if TYPE_CHECKING:
    UnslothOptions = _Options
else:
    _hints = inspect.get_annotations(UnslothConfig, eval_str=True)
    UnslothOptions = create_model(
        "UnslothOptions",
        __base__=_Options,
        __module__=__name__,
        **_OWN,
        **{name: (_hints[name], field.default) for name, field in _FIELDS.items()},
    )


def _check_place(unknown: Collection[str]) -> None:
    """Axolotl drops keys that neither it nor a plugin knows. Those that are meant for us are errors.

    Args:
        unknown: such keys.

    Raises:
        ConfigError: one is ``unsloth`` misspelt, or an option that belongs under it.
    """
    for name in unknown:
        if get_close_matches(name, ("unsloth", "unsloth_plugins"), n=1, cutoff=0.8):
            raise ConfigError(
                expected="options of UnslothPlugin under the key `unsloth:`",
                got=f"`{name}:`, which Axolotl would drop",
                remedy="Did you mean `unsloth`?",
            )
        if name in (*_FIELDS, *_OWN):
            raise ConfigError(
                expected=f"`{name}:` under the key `unsloth:`",
                got="it at the top of the config, where Axolotl would drop it",
                remedy="Move it there, with spaces before it.",
            )


class UnslothArgs(BaseModel):
    """Mixed into Axolotl's config by its plugin manager."""

    unsloth: UnslothOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_conflicts(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and uses_plugin(data):
            _check_place({str(name) for name in data} - cls.model_fields.keys())
            check_config(data, config_of(data.get("unsloth")))
        return data
