"""Kernels from the Hub, which transformers puts in place of forwards: from 5.25 on without being asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from unsloth_plugins.core.errors import ModelError
from unsloth_plugins.core.report import Row

_OURS = ("RMSNorm", "RMSNormZeroCentered", "SoftmaxTopKRouter", "rotary_pos_emb")  # names of layers in ``kernels``


class HubKernels:
    """Transformers' kernels of one model, as long as ``apply`` is in force.

    Each ``train()`` and ``eval()`` of a model that has them would set the forwards of its norms anew, over ours. So
    those are off, and what nothing of ours replaces, such as a Mamba's scan, stays as it is for training.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._switched: list[Any] = []

    def switch_off(self) -> Row | None:
        """Let forwards that ``apply`` takes be the modules' own; says so if they were not.

        Raises:
            ModelError: this version of transformers can't take its kernels back.
        """
        owners: list[Any] = [each for each in self._model.modules() if getattr(each, "use_kernels", False) is True]
        if not all(hasattr(each, "reset_kernels") for each in owners):
            raise ModelError(
                expected="a model with transformers' own forwards",
                got="use_kernels=True, which this version of transformers can't switch off again",
                remedy="Load the model without use_kernels.",
            )
        stay = 0
        for each in owners:
            from kernels import Mode  # there is no owner without it

            each.kernels_mode = Mode.TRAINING
            others = [layer for layer in _layers(each) if type(layer).kernel_layer_name not in _OURS]
            forwards = [_forward(layer) for layer in others]
            each.reset_kernels()
            self._switched.append(each)
            for layer, (name, forward) in zip(others, forwards, strict=True):
                if getattr(forward, "__func__", forward) is not type(layer).forward:
                    vars(layer)[name] = forward
                    stay += 1
        if not owners:
            return None
        kept = f"; {stay} of what apply does not replace stay" if stay else ""
        detail = f"transformers' own of norms and rotary embeddings are off until undo(){kept}"
        return Row("Hub kernels", "left alone", detail)

    def switch_on(self) -> None:
        """As it was before ``switch_off``, for the mode that the model is in now."""
        while self._switched:
            self._switched.pop().use_kernels = True


def _layers(model: nn.Module) -> Iterator[Any]:
    """What kernels can be set on: modules, and functions that modules keep for themselves."""
    for module in model.modules():
        if hasattr(type(module), "kernel_layer_name"):
            yield module
        yield from vars(module).get("_kernel_funcs", {}).values()


def _forward(layer: Any) -> tuple[str, Any]:
    """The attribute that holds the forward, which accelerate's hooks move, and what is in it."""
    name = "_old_forward" if "_old_forward" in vars(layer) else "forward"
    return name, getattr(layer, name)
