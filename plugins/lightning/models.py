"""The models inside a LightningModule, and what is done to them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from unsloth_plugins.core import Applied, UnslothConfig, apply, lacks_adapters
from unsloth_plugins.core.errors import ConflictError, ModelError, UnsupportedError

_AVERAGING = {"WeightAveraging", "StochasticWeightAveraging"}
_PRECISIONS = ("32-true", "64-true", "bf16-true", "bf16-mixed", "16-mixed")


def models_of(module: nn.Module) -> list[nn.Module]:
    """What ``apply`` is called with, each once: the causal LMs below ``module``.

    Where there are none, the other transformers models; where there are none either, the children with parameters.
    """
    return (
        causal_lms(module)
        or _outermost(module, lambda each: isinstance(each, PreTrainedModel))
        or [child for child in module.children() if next(child.parameters(), None) is not None]
    )


def causal_lms(module: nn.Module) -> list[nn.Module]:
    """The transformers models with a language head below ``module``, each once; PEFT's wrappers are looked through."""
    return _outermost(
        module, lambda each: isinstance(each, PreTrainedModel) and each.get_output_embeddings() is not None
    )


def _outermost(module: nn.Module, wanted: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules that are ``wanted`` and not below another such.

    One below ``torch.compile``'s wrapper is returned as the wrapper, for ``apply`` to refuse.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()

    def visit(current: nn.Module) -> None:
        if id(current) in seen:
            return
        seen.add(id(current))
        if wanted(current):
            found.append(current)
            return
        before = len(found)
        for child in current.children():
            visit(child)
        if len(found) > before and "_orig_mod" in vars(current)["_modules"]:
            found[before:] = [current]

    visit(module)
    return found


def apply_to_module(module: nn.Module, config: UnslothConfig) -> tuple[Applied, ...]:
    """Apply to each model of a LightningModule, by ``models_of``.

    Raises:
        ModelError: there is none.
        ConflictError: the LightningModule was compiled.
    """
    if getattr(module, "_compiler_ctx", None) is not None:
        raise ConflictError(
            expected="a LightningModule that is not compiled",
            got=f"torch.compile({type(module).__name__})",
            remedy="Remove torch.compile; patched forwards and offloaded checkpointing break its graph.",
        )
    models = models_of(module)
    if not models:
        raise ModelError(
            expected="a model among the attributes of the LightningModule",
            got=f"{type(module).__name__} without a submodule that has parameters",
            remedy="Build it in __init__ or configure_model and keep it on self, or use another strategy.",
        )
    applied = tuple(apply(model, config) for model in models)
    for each in applied:
        each.record_bases(module)
    return applied


def check_averaging(callbacks: Sequence[Any], module: nn.Module) -> None:
    """Refuse Lightning's averages of weights where they would lack adapters on experts: they copied the module already.

    Raises:
        ConflictError: naming the callback.
    """
    for callback in callbacks:
        names = {each.__name__ for each in type(callback).__mro__}
        if names & _AVERAGING and any(lacks_adapters(model) for model in causal_lms(module)):
            raise ConflictError(
                expected="adapters on experts to exist before weights are averaged",
                got=f"{type(callback).__name__}, whose copy of the module lacks them",
                remedy="Call unsloth_plugins.apply(self.model) at the end of the LightningModule's __init__.",
            )


def report_of(applied: tuple[Applied, ...]) -> str:
    """The reports of all models, as one text. Models to which the same was done share a table."""
    titles: dict[str, Counter[str]] = {}
    for each in applied:
        title, rows = each.report().split("\n", 1)
        titles.setdefault(rows, Counter())[title] += 1
    lines = [
        line
        for rows, counts in titles.items()
        for line in (*(title if n == 1 else f"{title}, {n} times" for title, n in counts.items()), rows)
    ]
    return "\n".join(lines)


def check_precision(plugin: Any) -> None:
    """Refuse precisions that are wrong, or that replace modules under us.

    Raises:
        UnsupportedError: naming the argument to change.
    """
    if type(plugin).__name__ == "BitsandbytesPrecision":
        raise UnsupportedError(
            expected="a precision that leaves modules in place",
            got="BitsandbytesPrecision, which swaps every linear layer",
            remedy="Load the model with transformers' quantization_config=BitsAndBytesConfig(...) instead.",
        )
    precision = str(plugin.precision)
    if precision not in _PRECISIONS:
        why = ": float16 weights overflow in gpt-oss's experts and can't be unscaled" if precision == "16-true" else ""
        raise UnsupportedError(
            expected=f"precision to be one of {', '.join(_PRECISIONS)}",
            got=f"precision={precision!r}{why}",
            remedy="Use precision='bf16-mixed', or 'bf16-true' for a base in 16 bits.",
        )


def check_sharded_precision(plugin: Any) -> None:
    """As ``check_precision``, for FSDP2.

    Raises:
        UnsupportedError: naming the argument to change.
    """
    check_precision(plugin)
    if str(plugin.precision) == "16-mixed":
        raise UnsupportedError(
            expected="a precision without a gradient scaler under strategy='unsloth_fsdp'",
            got="precision='16-mixed', whose scaler has not been tried on sharded gradients",
            remedy="Use precision='bf16-mixed', or strategy='unsloth_ddp'.",
        )
