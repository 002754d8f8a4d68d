"""The keyword arguments of ``UnslothStrategy``: our options, and what goes through to Lightning's and torch's DDP."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from unsloth_plugins.core import UnslothConfig
from unsloth_plugins.core.errors import ConfigError, UnsupportedError


def split(config: UnslothConfig | None, options: dict[str, Any], ddp: type) -> tuple[UnslothConfig, dict[str, Any]]:
    """Our options as a config, and those of ``ddp`` (Lightning's ``DDPStrategy``) or torch's wrapper as they are.

    Raises:
        ConfigError: an option belongs to none of them; the message names the nearest one.
    """
    ours = {field.name for field in dataclasses.fields(UnslothConfig)}
    theirs = {*inspect.signature(ddp).parameters, *inspect.signature(DistributedDataParallel).parameters}
    theirs -= {"kwargs", "module", "device_ids"}
    for name in options:
        if name not in ours | theirs:
            near = get_close_matches(name, sorted(ours | theirs | {"quiet"}), n=1)
            raise ConfigError(
                expected=f"one of the options quiet, {', '.join(sorted(ours))}, or one of Lightning's DDPStrategy",
                got=repr(name),
                remedy=f"Did you mean `{near[0]}`?" if near else "Remove it.",
            )
    given = {name: value for name, value in options.items() if name in ours}
    return UnslothConfig.from_options(config, **given), {k: v for k, v in options.items() if k not in ours}


def check_start_method(options: Mapping[str, Any]) -> None:
    """Each process has to build a module of its own: one made by another hands back only weights that this one has a
    place for, which leaves out adapters on experts, and no sharded ones.

    Args:
        options: keyword arguments of Lightning's ``DDPStrategy``.

    Raises:
        UnsupportedError: ``start_method`` makes processes by Python's multiprocessing.
    """
    if (method := options.get("start_method", "popen")) != "popen":
        raise UnsupportedError(
            expected="start_method='popen', by which each process runs the script itself",
            got=f"start_method={method!r}, after which adapters on experts would be lost",
            remedy="Leave start_method out. In a notebook use Trainer(strategy='ddp_notebook', "
            "callbacks=[UnslothCallback()]).",
        )


def with_options_in_signature(init: Callable[..., None]) -> Callable[..., None]:
    """Spell the options out in the signature of an ``__init__``, for editors, ``help`` and LightningCLI."""
    hints = inspect.get_annotations(UnslothConfig, eval_str=True)
    own = inspect.signature(init).parameters
    fields = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in dataclasses.fields(UnslothConfig)
    ]
    config = own["config"].replace(annotation=UnslothConfig | None)
    quiet = own["quiet"].replace(annotation=bool)
    init.__signature__ = inspect.Signature([own["self"], config, quiet, *fields, own["options"]])  # type: ignore[attr-defined]
    return init
