"""Gradient checkpointing of one model: torch's function gives way to ours wherever the trainer has switched it on."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.models.binding import ModelParts, is_layer
from unsloth_plugins.core.models.search import ModuleSearch
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.checkpoint import LayerCheckpoint
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.pairs import Pairs
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.report import Row

_INPUTS = {
    "auto": "inputs of the layers on the device while there is memory, then on the host",
    "min_memory": "inputs of the layers wait in host memory, one at a time on its way",
    "offload_all": "inputs of the layers wait in host memory",
    "on_device": "inputs of the layers stay on the device",
}
# What diffusers' switch brings where it is given no function: torch's, without re-entrance.
_OF_DIFFUSERS = (
    "diffusers.models.modeling_utils",
    "ModelMixin.enable_gradient_checkpointing.<locals>._gradient_checkpointing_func",
)


class Checkpointing:
    """Follows the switch of a model's gradient checkpointing.

    Args:
        parts: of the model.
        config: ``gradient_checkpointing``, ``memory_policy`` and ``checkpoint_pairs`` are read.
        store: where inputs of layers wait.
        budget: chooses the layers that are not checkpointed; ``None`` checkpoints all.

    Attributes:
        on: whether ``sync`` found it on, with functions that are ours now.
    """

    feature: ClassVar[str] = "gradient checkpointing"

    def __init__(self, parts: ModelParts, config: UnslothConfig, store: HostStore, budget: MemoryBudget | None) -> None:
        self.config, self.store, self.budget, self.on = config, store, budget, False
        self._pairs = Pairs() if config.checkpoint_pairs else None
        self._name = type(parts.causal_lm).__name__
        self._modules = ModuleSearch(parts.causal_lm, _can_checkpoint)
        self._foreign: Any = None  # a checkpoint function that is not torch's
        self._patches = PatchSet()

    def switch_on(self) -> None:
        """For ``gradient_checkpointing=True``, whatever the trainer does.

        Raises:
            UnsupportedError: no module of the model supports it.
        """
        modules = self._modules()
        if not modules:
            raise UnsupportedError(
                expected="a model that supports gradient checkpointing, for gradient_checkpointing=True",
                got=self._name,
                remedy="Use gradient_checkpointing='auto', or wrap its blocks with offload_checkpoint yourself.",
            )
        for module in modules:
            self._patches.set(module, "gradient_checkpointing", True)
            if getattr(module, "_gradient_checkpointing_func", None) is None:
                self._patches.set(
                    module, "_gradient_checkpointing_func", functools.partial(checkpoint, use_reentrant=False)
                )

    def sync(self) -> None:
        """Take over what was switched on since the last time.

        Raises:
            UnsupportedError: ``checkpoint_pairs=True`` of layers that FSDP2 shards.
        """
        if self.config.gradient_checkpointing is False:
            return
        ours = layers = 0
        self._foreign = None
        for module in self._modules():
            if module.gradient_checkpointing is not True:
                continue
            current = getattr(module, "_gradient_checkpointing_func", None)
            keywords = _torch_checkpoint_keywords(current)
            if keywords is None and not isinstance(current, LayerCheckpoint):
                self._foreign = current
                continue
            ours += 1
            if self._pairs is not None and _is_sharded(module):
                raise UnsupportedError(
                    expected="whole layers on each device, for checkpoint_pairs=True",
                    got=f"{type(module).__name__}, which FSDP2 shards and gathers for its own passes only",
                    remedy="Leave checkpoint_pairs out.",
                )
            if keywords is not None:
                budget = self.budget if is_layer(module) else None
                pairs = self._pairs if is_layer(module) else None
                stand_in = LayerCheckpoint(self.store, keywords, budget, layers, pairs)
                self._patches.set(module, "_gradient_checkpointing_func", stand_in)
            layers += is_layer(module)
        self.store.layers = layers
        if self.budget is not None:
            self.budget.layers = layers
        self.on = bool(ours) and self._foreign is None

    def undo(self) -> None:
        """Give the functions and the switch back."""
        self._patches.undo()

    def row(self) -> Row:
        """What ``sync`` found, and what has been copied so far."""
        if self.config.gradient_checkpointing is False:
            return Row(self.feature, "left alone", "switched off in the config")
        if self._foreign is not None:
            return Row(self.feature, "left alone", _whose(self._foreign))
        if not self.on:
            detail = "off so far; long context wants it: gradient_checkpointing=True of the trainer or of these options"
            detail += ", or model.gradient_checkpointing_enable()"
            return Row(self.feature, "left alone", detail)
        chosen = f"; {self.budget.describe()}" if self.budget is not None and self.budget.plan is not None else ""
        which = ", of every second layer" if self.config.checkpoint_pairs else ""
        detail = f"non-reentrant; {_INPUTS[self.config.memory_policy]}{which}{chosen}{self._copies()}"
        return Row(self.feature, "on", detail)

    def _copies(self) -> str:
        sent = self.store.sent_bytes
        if not sent:
            return ""
        high = self.store.mapped_bytes / 2**30
        copies_ms, exposed_ms = self.store.copy_ms()
        waited = f", copies took {copies_ms:.0f} ms, waited for {exposed_ms:.0f} ms" if copies_ms else ""
        return f"; {sent / 2**30:.2f} GiB sent to the host so far, {high:.2f} GiB of host memory taken for it{waited}"


def _can_checkpoint(module: nn.Module) -> bool:
    return hasattr(module, "gradient_checkpointing")


def _is_sharded(layer: nn.Module) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # takes a second, and only sharded models need it

    return is_layer(layer) and any(isinstance(module, FSDPModule) for module in layer.modules())


def _torch_checkpoint_keywords(function: Any) -> dict[str, Any] | None:
    """Keywords of a ``partial(torch.utils.checkpoint.checkpoint, ...)``, or those by which diffusers calls it; ``None``
    when it is something else.
    """
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        keywords = {**function.keywords, **keywords}
        function = function.func
    if (getattr(function, "__module__", ""), getattr(function, "__qualname__", "")) == _OF_DIFFUSERS:
        return {"use_reentrant": False, **keywords}
    return keywords if function is checkpoint else None


def _whose(function: Any) -> str:
    """Of a checkpoint function that is not torch's, for the report."""
    while isinstance(function, functools.partial):
        function = function.func
    if getattr(function, "__module__", "") == "transformers.modeling_utils":  # what its offload=True defines there
        return (
            "transformers' offload=True copies inputs to the host, and computing waits for it; without that option "
            "memory_policy does it while computing goes on"
        )
    return "the trainer brought a checkpoint function of its own"
