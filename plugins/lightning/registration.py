"""Adds our names to Lightning's registries of strategies, whenever a root of Lightning is imported.

There are two roots, ``lightning.pytorch`` and ``pytorch_lightning``, with separate copies of all base classes and
registries, and often both are installed. Nothing here imports torch or Lightning.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

ROOTS = {
    "lightning.pytorch": "unsloth_plugins.lightning.for_lightning",
    "pytorch_lightning": "unsloth_plugins.lightning.for_pytorch_lightning",
}
STRATEGIES = {
    "unsloth": "UnslothStrategy",
    "unsloth_ddp": "UnslothDDPStrategy",
    "unsloth_fsdp": "UnslothFSDPStrategy",
}
_SUFFIX = ".strategies"

logger = logging.getLogger("unsloth_plugins")


def _create(module: str, name: str) -> Any:
    """Called by Lightning's registry without arguments, when a Trainer asks for the name."""
    return getattr(importlib.import_module(module), name)()


def register(root: str) -> None:
    """Add our names to the registry of ``root``, whose ``strategies`` are imported. A second time changes nothing."""
    registry = sys.modules[root + _SUFFIX].StrategyRegistry
    for name, of in STRATEGIES.items():
        if name not in registry:
            factory = functools.partial(_create, ROOTS[root], of)
            registry.register(name, factory, description="unsloth-plugins: long context, low memory")


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder of that name in the working directory has none


def preferred_module() -> str:
    """Our module for the root that the program has imported, or that it can import."""
    loaded = [root for root in ROOTS if root in sys.modules]
    if not loaded:
        loaded = [root for root in ROOTS if _is_installed(root.partition(".")[0])]
    if not loaded:
        raise ImportError("unsloth_plugins.lightning needs Lightning: pip install 'unsloth-plugins[lightning]'")
    return ROOTS[loaded[0]]


class _Registering(Loader):
    """Stands in for the loader of ``<root>.strategies`` until it has run, then registers and is gone."""

    def __init__(self, loader: Any, root: str) -> None:
        self.loader, self.root = loader, root

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self.loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        try:
            register(self.root)
        except Exception as error:  # Lightning's import must not fail because of us
            logger.warning("strategy='unsloth' could not be registered with %s: %r", self.root, error)


class _Finder(MetaPathFinder):
    """Lets the other finders find ``<root>.strategies`` and wraps the loader; knows no other module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        root = fullname.removesuffix(_SUFFIX)
        if root == fullname or root not in ROOTS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec: ModuleSpec | None = finder.find_spec(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Registering(spec.loader, root)
                return spec
        return None


def install_finder() -> None:
    """Register with the roots that are loaded, and wait for the others. A second time changes nothing."""
    waiting = False
    for root in ROOTS:
        if hasattr(sys.modules.get(root + _SUFFIX), "StrategyRegistry"):
            register(root)
        else:
            waiting = True
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
