"""Kernels from the Hub, which transformers puts in place of forwards: from 5.25 on without being asked."""

from __future__ import annotations

from typing import Any

from torch import nn

from unsloth_plugins.core.errors import ModelError
from unsloth_plugins.core.report import Row


class HubKernels:
    """Transformers' kernels of one model while they are off, for the forwards to have one owner.

    ``train()`` and ``eval()`` of a model that has them set the forwards of its norms and activations anew.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._switched: list[Any] = []

    def switch_off(self) -> Row | None:
        """Give every module its own forward; says so if one had another owner.

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
        for each in owners:
            each.reset_kernels()
            self._switched.append(each)
        if not owners:
            return None
        return Row("Hub kernels", "left alone", "transformers' own are off; undo() switches them on again")

    def switch_on(self) -> None:
        """As it was before ``switch_off``, for the mode that the model is in now."""
        while self._switched:
            self._switched.pop().use_kernels = True
