"""Tables of options in plugins/*/README.md and docs/options.md, from docstrings in core/config.py: `make options`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import types
import typing
from pathlib import Path
from typing import Any

import unsloth_plugins
from unsloth_plugins.core import config

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- written by `make options` from core/config.py -->", "<!-- end of options -->"
QUIET = "Of callbacks, strategies and Axolotl alone: no report at the start, no summary at the end."


def meanings() -> dict[str, str]:
    """The docstring below each field."""
    (options,) = (
        node
        for node in ast.parse(inspect.getsource(config)).body
        if isinstance(node, ast.ClassDef) and node.name == "UnslothConfig"
    )
    found = {}
    for field, below in zip(options.body, options.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[field.target.id] = " ".join(str(below.value.value).split()).replace("``", "`")  # type: ignore[union-attr]
    return found


def values(hint: Any) -> list[Any]:
    """The values that a type allows; ``int`` for any number."""
    origin = typing.get_origin(hint)
    if origin is typing.Literal:
        return list(typing.get_args(hint))
    if origin in (typing.Union, types.UnionType):
        return [value for each in typing.get_args(hint) for value in values(each)]
    return {bool: [True, False], type(None): [None]}.get(hint, [hint])


def spelt(value: Any, yaml: bool) -> str:
    """A value as one writes it."""
    if isinstance(value, type):
        return value.__name__
    if yaml:
        return "off" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return repr(value).replace("'", '"')


def table(yaml: bool) -> str:
    """All options, as keyword arguments or as keys of a YAML file."""
    told, hints = meanings(), typing.get_type_hints(unsloth_plugins.UnslothConfig)
    lines = ["| Option | Default | Values | Meaning |", "|---|---|---|---|"]
    rows = [(f.name, f.default, values(hints[f.name]), told[f.name]) for f in dataclasses.fields(config.UnslothConfig)]
    for name, default, allowed, meaning in [*rows, ("quiet", False, [True, False], QUIET)]:
        shown = ", ".join(f"`{spelt(value, yaml)}`" for value in allowed)
        if yaml:
            for value in (None, True, False):
                meaning = meaning.replace(f"`{value}`", f"`{spelt(value, yaml)}`")
        lines.append(f"| `{name}` | `{spelt(default, yaml)}` | {shown} | {meaning} |")
    return "\n".join(lines)


def rewritten(readme: Path) -> str:
    """The README's text with the table as it is now.

    Raises:
        ValueError: it has no place for one.
    """
    text = readme.read_text()
    new = f"{BEGIN}\n{table(readme.parent.name == 'axolotl')}\n{END}"
    out, count = re.subn(re.escape(BEGIN) + r".*?" + re.escape(END), lambda _: new, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"expected one pair of marks around the options in {readme}; got {count}")
    return out


def readmes() -> list[Path]:
    """Of all adapters, and the page of the documentation."""
    adapters = [ROOT / "plugins" / name / "README.md" for name in ("hf_trainer", "lightning", "axolotl")]
    return [*adapters, ROOT / "docs" / "options.md"]


if __name__ == "__main__":
    for path in readmes():
        path.write_text(rewritten(path))
