"""Long-context, low-memory fine-tuning inside the trainer that you already use.

Importing this package loads no torch; the names below are resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unsloth_plugins.core import Applied, UnslothConfig, apply

__version__ = "0.1.0"
__all__ = ["Applied", "UnslothConfig", "__version__", "apply"]


def __getattr__(name: str) -> Any:
    if name in ("Applied", "UnslothConfig", "apply"):
        from unsloth_plugins import core

        return getattr(core, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
