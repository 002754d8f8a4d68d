"""Sends the attention of one model instance through ``core.sink_attention``."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.ranks import answer_of_first, warn
from unsloth_plugins.core.report import Row, meaning
from unsloth_plugins.core.sink_attention.backends import (
    Backend,
    Call,
    faster,
    resolve_backend,
    why_not_triton,
)

NAME = "unsloth_sinks"
_BY_RANK_0 = "chosen by rank 0"
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
        return None if beats_sdpa(parts) else f"no sinks; {current} stays"
    if current not in ("eager", NAME):
        return f"{current} was chosen for this model"
    return None


def needs_less_memory(parts: ModelParts) -> bool:
    """Whether our kernels run in place of torch's ``sdpa``, whose backward holds more of every token.

    It keeps o to the end, sums dq in float32, and makes dk and dv for every query head.
    """
    return why_not(parts, asked=True) is None and _has_sdpa_to_replace(parts)


def beats_sdpa(parts: ModelParts) -> bool:
    """Whether the table knows a backend for the full layers of a model without sinks.

    It may run the kernels that ``sdpa`` runs. But what it computed can survive until a checkpoint's recompute, and
    packed documents and padding need no mask of T x S.
    """
    capped = getattr(parts.layers[0].attention.config, "attn_logit_softcapping", None)  # type: ignore[union-attr]
    return capped is None and _has_sdpa_to_replace(parts) and bool(faster(_call(parts)))


def _has_sdpa_to_replace(parts: ModelParts) -> bool:
    """Whether the model runs ``sdpa`` where our kernels can. Another implementation than transformers' default was
    chosen by somebody, and stays."""
    attention: Any = parts.layers[0].attention
    if attention.config._attn_implementation != "sdpa" or getattr(attention, "is_causal", True) is False:
        return False
    return why_not_triton(_call(parts)) is None


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


@dataclass(frozen=True)
class TakenAttention:
    """The attention of one model, taken over.

    Attributes:
        parts: of the model.
        backend: noted on the instance.
        note: why, where it was not the user who chose; empty where the backend itself can tell.
    """

    parts: ModelParts
    backend: Backend
    note: str = ""
    feature: ClassVar[str] = "attention"

    def row(self) -> Row:
        """By which backend, where the model is now."""
        backend, why = meaning(self.backend, lambda: _resolved(self.parts, self.backend))
        why = self.note if self.note == _BY_RANK_0 else why + self.note
        detail = f"{backend} sink attention ({why}), linear memory, packed documents kept apart"
        return Row(self.feature, "on", detail)


def take_attention(
    parts: ModelParts, config: UnslothConfig, patches: PatchSet, configs: ConfigSwap
) -> TakenAttention | Row:
    """Send the attention of this instance through the op, where ``config`` asks for it and the model lets it.

    Args:
        parts, config: of the model.
        patches, configs: remember what was there before.

    Returns:
        What was done, or a row that says why nothing was.

    Raises:
        UnsupportedError: a backend was asked for, or rank 0 takes one, that this model or device can't have.
    """
    asked = config.attention
    if asked is None:
        return Row(TakenAttention.feature, "left alone", "switched off in the config")
    sparing = asked == "auto" and config.memory_policy == "min_memory" and needs_less_memory(parts)
    choice: Backend = "triton" if sparing else asked
    if (reason := why_not(parts, asked=choice != "auto")) is not None:
        if choice != "auto":
            raise UnsupportedError(
                expected=f"a model whose attention can be taken over, for attention={choice!r}",
                got=f"{type(parts.causal_lm).__name__}: {reason}",
                remedy="Use attention='auto' or None.",
            )
        if parts.has_sinks:
            warn("Attention with sinks is left alone: %s. Packed documents may see each other.", reason)
        return Row(TakenAttention.feature, "left alone", reason)
    backend = _backend_of_all(parts, choice)
    _patch(parts, patches, configs, backend)
    note = ", in place of sdpa, which needs more memory" if sparing else _BY_RANK_0 if backend != choice else ""
    if not (note or parts.has_sinks) and choice == "auto":
        note = ", in place of sdpa, which a checkpoint's recompute would run again"
    return TakenAttention(parts, backend, note)


def _call(parts: ModelParts) -> Call:
    model: Any = parts.causal_lm
    return Call(model.device, model.dtype, getattr(parts.layers[0].attention, "head_dim", 0))


def _resolved(parts: ModelParts, choice: Backend) -> tuple[str, str]:
    """What ``choice`` means for the model as it is now, and why."""
    call = _call(parts)
    backend, why = resolve_backend(choice, call)
    if choice == "auto":
        for row in faster(call):
            what = "padding or packing" if row.backend == "cudnn" else "padding"
            why += f"; {row.backend} on full layers from {row.tokens:,} tokens on, without {what}: measured faster"
    return backend, why


def _backend_of_all(parts: ModelParts, choice: Backend) -> Backend:
    """The backend to note on this instance, the same on every rank.

    ``auto`` stays ``auto``, which chooses by the table at each call, unless rank 0 has other packages or another device
    than this rank; then it is what rank 0 takes.

    Raises:
        UnsupportedError: the backend, asked for or taken by rank 0, can't run here; or rank 0 does not apply.
    """
    call = _call(parts)
    backend, _ = resolve_backend(choice, call)
    if choice != "auto":
        return choice
    device, mine = call.device.type, " and ".join([backend, *(row.backend for row in faster(call))])
    answer = answer_of_first(f"attention backend for heads of {call.head_size}, {call.dtype}", f"{device}: {mine}")
    its_device, _, first = answer.partition(": ")
    if first == mine or its_device != device:  # a model that is still to be moved says nothing about the others
        return choice
    if " and " in first:
        raise UnsupportedError(
            expected=f"the packages of rank 0 on every rank, since it takes {first}",
            got=f"a rank that would take {mine}",
            remedy="Install the same packages everywhere, or choose attention='triton'.",
        )
    taken = cast(Backend, first)
    resolve_backend(taken, call)  # raises where it can't run
    return taken


def _patch(parts: ModelParts, patches: PatchSet, configs: ConfigSwap, backend: Backend) -> None:
    """Register our attention with transformers (once per process) and select it for this instance.

    A backend other than ``auto`` is noted on each attention module, where the registered function looks for it.
    """
    from unsloth_plugins.core.sink_attention import transformers_backend  # pulls in transformers: only when needed

    transformers_backend.register()
    if backend != "auto":
        for attention in filter(None, (layer.attention for layer in parts.layers)):
            patches.set(attention, transformers_backend.CHOICE, backend)
    configs.swap(parts, patches)
