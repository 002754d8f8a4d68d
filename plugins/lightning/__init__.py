"""Lightning: ``Trainer(strategy="unsloth")``, for ``lightning.pytorch`` and for ``pytorch_lightning``.

Importing this registers the strategies ``unsloth``, ``unsloth_ddp`` and ``unsloth_fsdp`` in each of the two that is
loaded, now or later. It loads neither of them, nor torch. The classes are those of the root that the program has
imported, where both are installed and neither is imported yet those of ``lightning.pytorch``;
``unsloth_plugins.lightning.for_lightning`` and ``unsloth_plugins.lightning.for_pytorch_lightning`` hold both sets by
name.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unsloth_plugins.lightning.registration import install_finder, preferred_module

if TYPE_CHECKING:
    from unsloth_plugins.lightning.for_lightning import (
        UnslothCallback,
        UnslothDDPStrategy,
        UnslothFSDPStrategy,
        UnslothStrategy,
    )

__all__ = ["UnslothCallback", "UnslothDDPStrategy", "UnslothFSDPStrategy", "UnslothStrategy"]

install_finder()


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(importlib.import_module(preferred_module()), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
