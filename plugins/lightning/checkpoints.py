"""What checkpoints leave out: the frozen weights of a base, which are loaded anew from where they came.

Everything else is in them, frozen or not. A teacher that is averaged by hand, a random projection or a body that was
trained earlier can't be had again, so a weight is left out only if it is part of a model that ``from_pretrained`` or an
adapter stands on, never trained, and has the numbers that it had when training began. A sum of those goes into the
checkpoint, and tells another base from this one when training is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from unsloth_plugins.core.errors import ModelError

BASE_SUMS = "unsloth_base"
"""The key of a checkpoint with a ``Sum`` of every weight that it does without, by name."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_HISTORIES: WeakKeyDictionary[nn.Module, ModuleWeights] = WeakKeyDictionary()

Sum = tuple[str, str, int]
"""A weight's dtype, the type of the device that holds it, and the sum of its bits."""


class ModuleWeights:
    """Which weights of one LightningModule its checkpoints hold, over all its runs and trainers."""

    def __init__(self) -> None:
        self._stored: set[str] = set()  # what trained, changed, or came from a checkpoint
        self._begin: dict[str, Sum] | None = None
        self._expected: Mapping[str, Sum] = {}

    @staticmethod
    def of(module: nn.Module) -> ModuleWeights:
        """Those of ``module``, which are forgotten with it."""
        return _HISTORIES.setdefault(module, ModuleWeights())

    def begin(self, module: nn.Module) -> None:
        """Before the first step of a run, when the weights have their dtype and place.

        Raises:
            ModelError: the checkpoint that was restored belongs to another base.
        """
        self._note_trained(module)
        if self._begin is None:
            self._begin = sums(module, reloadable(module))
        self.compare(module)

    def compare(self, module: nn.Module) -> None:
        """Compare the base with that of the checkpoint that was restored, if one was; once.

        Raises:
            ModelError: it has other numbers.
        """
        expected, self._expected = self._expected, {}
        if not expected:
            return
        here = sums(module, reloadable(module) & expected.keys())
        # Quantised elsewhere, or converted to another dtype since, the same base may have other bits.
        other = [n for n, now in here.items() if now[:2] == tuple(expected[n][:2]) and now[2] != expected[n][2]]
        if other:
            raise ModelError(
                expected="the frozen weights that this checkpoint was trained on, which it does not hold",
                got=f"other numbers in {other[0]}" + (f" and {len(other) - 1} more" if len(other) > 1 else ""),
                remedy="Build the module from the same base, and load what an earlier run trained before it is frozen; "
                "or set strict_loading = False on the LightningModule to go on with these.",
            )

    def left_out(self, module: nn.Module) -> dict[str, Sum]:
        """What a checkpoint that is written now does without. All processes have to call it."""
        self._note_trained(module)
        now = sums(module, reloadable(module) - self._stored)
        if (begin := self._begin) is not None:
            self._stored.update(n for n, (dtype, _, total) in now.items() if begin.get(n, ())[::2] != (dtype, total))
        return {name: total for name, total in now.items() if name not in self._stored}

    def restored(self, module: nn.Module, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Remember what was restored, and with ``strict`` what base it wants."""
        self._stored.update(checkpoint["state_dict"].keys() & {name for name, _ in named_parameters(module)})
        here = checkpoint.get(BASE_SUMS, {}) if strict else {}
        self._expected = {name: total for name, total in here.items() if name not in checkpoint["state_dict"]}

    def _note_trained(self, module: nn.Module) -> None:
        self._stored.update(name for name, parameter in named_parameters(module) if parameter.requires_grad)


def reloadable(module: nn.Module) -> set[str]:
    """Names of the frozen parameters that whoever builds ``module`` again loads again: those of a base.

    That is a model that ``from_pretrained`` gave, or one that PEFT wraps. Adapters and PEFT's copies of modules are not
    of the base, frozen or not.
    """
    inside: set[str] = set()
    outside: set[str] = set()
    for prefix, each in module.named_modules(remove_duplicate=False):
        if isinstance(each, PeftModel) or (isinstance(each, PreTrainedModel) and each.name_or_path):
            inside.update(_names(prefix, each))
        elif isinstance(each, BaseTunerLayer):
            outside.update(name for name in _names(prefix, each) if not name.startswith(f"{prefix}.base_layer."))
        elif isinstance(each, AuxiliaryTrainingWrapper):
            base = (f"{prefix}.original_module.", f"{prefix}.token_adapter.")  # the latter is a layer of its own
            outside.update(name for name in _names(prefix, each) if not name.startswith(base))
    frozen = {name for name, parameter in named_parameters(module) if not parameter.requires_grad}
    return (inside - outside) & frozen


def sums(module: nn.Module, names: set[str]) -> dict[str, Sum]:
    """Of the parameters ``names`` of ``module``: their bits as integers, added up modulo 2^64 in one pass over memory.

    Of sharded parameters every process adds up its part, and all get the sum of the whole.
    """
    kinds: dict[str, tuple[str, str]] = {}
    locally: dict[str, torch.Tensor] = {}
    sharded: list[str] = []
    for name, parameter in named_parameters(module):
        if name not in names or parameter.is_meta:
            continue
        data = parameter.detach()
        if isinstance(data, DTensor):
            sharded.append(name)
            data = data.to_local()
        data = data.contiguous() if data.storage_offset() * data.element_size() % 8 == 0 else data.clone()
        rows_of_words = data.ndim > 1 and data.shape[-1] * data.element_size() % 8 == 0
        words = torch.int64 if rows_of_words else _WORDS.get(data.element_size(), torch.int64)
        kinds[name] = (str(data.dtype).removeprefix("torch."), data.device.type)
        locally[name] = data.contiguous().view(words).sum(dtype=torch.int64)
    if sharded:
        stacked = torch.stack([locally[name] for name in sharded])
        torch.distributed.all_reduce(stacked)
        locally.update(zip(sharded, stacked, strict=True))
    totals: dict[str, int] = {}
    for device in {total.device for total in locally.values()}:
        there = [name for name, total in locally.items() if total.device == device]
        totals.update(zip(there, torch.stack([locally[name] for name in there]).tolist(), strict=True))
    return {name: (*kind, totals[name]) for name, kind in kinds.items()}


def named_parameters(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Of tied parameters all names, as in a state dict."""
    return list(module.named_parameters(remove_duplicate=False))


def _names(prefix: str, module: Any) -> list[str]:
    return [name for name, _ in module.named_parameters(prefix, remove_duplicate=False)]
