"""Sends the attention of one model instance through ``core.sink_attention``."""

from __future__ import annotations

import copy
from typing import Any, cast

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.ranks import answer_of_first
from unsloth_plugins.core.sink_attention.backends import Backend, Call, prefers_fa4, resolve_backend, why_not_triton

NAME = "unsloth_sinks"
_KEYS = ("_attn_implementation_internal", "_attn_implementation")


def why_not(parts: ModelParts, *, asked: bool) -> str | None:
    """The reason why this model's attention stays as it is, or ``None``."""
    if not parts.layers:
        return "its layers were not recognised"
    attention = parts.layers[0].attention
    config = getattr(attention, "config", None)
    if config is None or not getattr(parts.causal_lm, "_supports_attention_backend", False):
        return "it does not use transformers' attention interface"
    if getattr(attention, "attention_dropout", 0.0):
        return f"attention_dropout={attention.attention_dropout} and the op has no dropout"  # type: ignore[union-attr]
    if asked:
        return None
    current = config._attn_implementation
    if not parts.has_sinks:
        return f"no sinks; {current} stays"
    if current not in ("eager", NAME):
        return f"{current} was chosen for this model"
    return None


def needs_less_memory(parts: ModelParts) -> bool:
    """Whether our kernels run in place of torch's ``sdpa``, whose backward holds more of every token.

    It keeps o to the end, sums dq in float32, and makes dk and dv for every query head. Another implementation than
    ``sdpa``, which is transformers' default, was chosen by somebody, and stays.
    """
    if why_not(parts, asked=True) is not None:
        return False
    attention: Any = parts.layers[0].attention
    model: Any = parts.causal_lm
    if attention.config._attn_implementation != "sdpa" or getattr(attention, "is_causal", True) is False:
        return False
    return why_not_triton(Call(model.device, model.dtype, getattr(attention, "head_dim", 0))) is None


class ConfigSwap:
    """Copies of the configs of one model, so that another model built from the same object is not touched.

    Changes that are made to the copies later (``use_cache``, token ids) are carried back by ``undo``.
    """

    def __init__(self) -> None:
        self._pairs: list[tuple[Any, Any, dict[str, Any]]] = []

    def swap(self, parts: ModelParts, patches: PatchSet) -> None:
        """Give every module of the model the copy in place of the original, and name our attention in it."""
        memo: dict[int, Any] = {}
        own = {id(layer.attention.config): layer.attention.config for layer in parts.layers if layer.attention}
        seen: set[int] = set()
        for module in parts.causal_lm.modules():
            config = vars(module).get("config")
            if config is None or not hasattr(config, "_attn_implementation"):
                continue
            twin = copy.deepcopy(config, memo)
            patches.set(module, "config", twin)
            if id(config) in seen:
                continue
            seen.add(id(config))
            if id(config) in own:
                twin._attn_implementation = NAME
            self._pairs.append((config, twin, dict(vars(twin))))

    def carry_back(self) -> None:
        """Write what changed in the copies since ``swap`` to the originals."""
        for config, twin, snapshot in self._pairs:
            for key, value in vars(twin).items():
                if key in _KEYS or (key in snapshot and snapshot[key] is value) or snapshot.get(key, self) == value:
                    continue
                vars(config)[key] = value
        self._pairs.clear()


def attention_backend(parts: ModelParts, choice: Backend) -> tuple[Backend, str, str]:
    """The backend for this instance, the same on every rank.

    ``auto`` stays ``auto``, which chooses by the table at each call, unless rank 0 has other packages or another device
    than this rank; then it is what rank 0 takes.

    Returns:
        The backend to note on the instance, what that means for this model as it is now, and why.

    Raises:
        UnsupportedError: the backend, asked for or taken by rank 0, can't run here; or rank 0 does not apply.
    """
    model: Any = parts.causal_lm
    size = getattr(parts.layers[0].attention, "head_dim", 0)
    call = Call(model.device, model.dtype, size)
    backend, why = resolve_backend(choice, call)
    if choice != "auto":
        return choice, backend, why
    fa4 = prefers_fa4(Call(model.device, model.dtype, size, 1 << 20, 1 << 20))
    device, mine = model.device.type, f"{backend} and fa4" if fa4 else backend
    answer = answer_of_first(f"attention backend for heads of {size}, {model.dtype}", f"{device}: {mine}")
    its_device, _, first = answer.partition(": ")
    if first == mine or its_device != device:  # a model that is still to be moved says nothing about the others
        return choice, backend, f"{why}; fa4 on long full layers, measured faster" if fa4 else why
    if first.endswith(" and fa4"):
        raise UnsupportedError(
            expected="flash-attn-4 on every rank, since rank 0 takes it",
            got=f"a rank that would take {mine}",
            remedy="Install the same packages everywhere, or choose attention='triton'.",
        )
    taken = cast(Backend, first)
    return taken, resolve_backend(taken, call)[0], "chosen by rank 0"


def patch_attention(parts: ModelParts, patches: PatchSet, choice: Backend = "auto") -> ConfigSwap:
    """Register our attention with transformers (once per process) and select it for this instance.

    A choice other than ``auto`` is noted on each attention module, where the registered function looks for it.
    """
    from unsloth_plugins.core.sink_attention import transformers_backend  # pulls in transformers: only when needed

    transformers_backend.register()
    if choice != "auto":
        for attention in filter(None, (layer.attention for layer in parts.layers)):
            patches.set(attention, transformers_backend.CHOICE, choice)
    swap = ConfigSwap()
    swap.swap(parts, patches)
    return swap
