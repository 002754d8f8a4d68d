"""The keyword arguments of ``UnslothStrategy``: our options, and what goes through to Lightning's and torch's DDP."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, get_type_hints

from torch.nn.parallel import DistributedDataParallel

from unsloth_plugins.core import UnslothConfig
from unsloth_plugins.core.errors import ConfigError, UnsupportedError


def split(config: UnslothConfig | None, options: dict[str, Any], ddp: type) -> tuple[UnslothConfig, dict[str, Any]]:
    """Our options as a config, and those of ``ddp`` (Lightning's ``DDPStrategy``) or torch's wrapper as they are.

    Raises:
        ConfigError: an option belongs to none of them; the message names the nearest one.
    """
    ours = {field.name for field in dataclasses.fields(UnslothConfig)}
    theirs = {*_passed_on(ddp), *_passed_on(DistributedDataParallel)}
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


def check_no_wrapper(options: Mapping[str, Any]) -> None:
    """Under FSDP2 there is no DDP wrapper that could heed its options; LightningCLI passes the defaults of all.

    Raises:
        UnsupportedError: naming one with another value than its default.
    """
    defaults = {name: each.default for name, each in _passed_on(DistributedDataParallel).items()}
    defaults |= dict.fromkeys(("ddp_comm_state", "ddp_comm_hook", "ddp_comm_wrapper", "model_averaging_period"))
    for name, default in defaults.items():
        if options.get(name, default) != default:
            raise UnsupportedError(
                expected="no options of DistributedDataParallel under strategy='unsloth_fsdp', which lacks it",
                got=f"{name}={options[name]!r}",
                remedy="Remove it, or use strategy='unsloth_ddp'.",
            )


def with_options_in_signature(init: Callable[..., None], ddp: type | None = None) -> Callable[..., None]:
    """``init`` with the options spelt out in its signature, for editors, ``help`` and LightningCLI.

    ``config`` is not among them: LightningCLI passes every default of the signature, which would overrule it.

    Args:
        init: takes ``self``, ``config``, ``quiet`` and ``**options``.
        ddp: Lightning's ``DDPStrategy``, if its options and those of torch's wrapper go through.
    """
    own = inspect.signature(init).parameters
    shown = {"quiet": own["quiet"].replace(annotation=bool)}
    for kind in (UnslothConfig, *((ddp, DistributedDataParallel) if ddp is not None else ())):
        hints = get_type_hints(kind.__init__)
        for name, each in _passed_on(kind).items():
            annotation = hints.get(name, each.annotation)
            shown.setdefault(name, each.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=annotation))

    @functools.wraps(init)
    def spelt(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)

    spelt.__signature__ = inspect.Signature([own["self"], *shown.values(), own["options"]])  # type: ignore[attr-defined]
    return spelt


def _passed_on(kind: type) -> dict[str, inspect.Parameter]:
    """The options of a class by name, without those that nobody but Lightning gives."""
    return {k: v for k, v in inspect.signature(kind).parameters.items() if k not in ("kwargs", "module", "device_ids")}
