"""Norms, rotary embedding and gated MLPs of any model whose modules run the same code as a family known here.

A module is recognised by the bytecode of its forward, so copies of Llama's norm under whatever class name are found and
a subclass that computes something else is not. As everywhere in this room, replacements are functions bound to the
instance that find their state on it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.layers import gated, rms_norm, rope
from unsloth_plugins.core.layers.normed import note_normed
from unsloth_plugins.core.layers.op import Implementation, resolve_implementation, why_reference
from unsloth_plugins.core.layers.reference import Activation, NormRule
from unsloth_plugins.core.layers.tiled_mlp import TILE, tiled_mlp
from unsloth_plugins.core.models.binding import ModelParts
from unsloth_plugins.core.models.lora import linears_of
from unsloth_plugins.core.offload.tail import holds
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.report import Row, meaning

Choice = Literal["auto", "triton", "reference"]
_STATE = "_unsloth_layer"
_ROTATE = "apply_rotary_pos_emb"


def code_identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    """What a function does, apart from the functions that it calls."""
    code = inspect.unwrap(function).__code__
    return code.co_code, code.co_names, tuple(each for each in code.co_consts if not isinstance(each, str))


def _norm_identity(kind: type) -> tuple[Any, ...]:
    helper = getattr(kind, "_norm", None)
    return code_identity(kind.forward), code_identity(helper) if isinstance(helper, FunctionType) else None  # type: ignore[attr-defined]


def _plain(function: object) -> FunctionType | None:
    """The function itself, also out of the module that calls it where the package ``kernels`` is installed."""
    if isinstance(function, nn.Module) and "forward" not in vars(function):
        inside = inspect.getclosurevars(type(function).forward).nonlocals.values()
        function = next((each for each in inside if isinstance(each, FunctionType)), None)
    return function if isinstance(function, FunctionType) else None


def _rotation_identity(function: FunctionType) -> tuple[Any, ...]:
    names = inspect.unwrap(function).__code__.co_names
    helpers = (inspect.unwrap(function).__globals__.get(name) for name in names)  # type: ignore[attr-defined]
    return code_identity(function), tuple(code_identity(each) for each in helpers if isinstance(each, FunctionType))


@dataclass(frozen=True)
class _Known:
    """Code of transformers, by what it computes."""

    norms: dict[tuple[Any, ...], tuple[NormRule, str]]
    mlps: dict[tuple[Any, ...], tuple[str, str]]
    rotations: dict[tuple[Any, ...], bool]
    activations: dict[type, Activation]


@functools.cache
def _known() -> _Known:
    from transformers import activations
    from transformers.models.gemma import modeling_gemma as gemma
    from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
    from transformers.models.llama import modeling_llama as llama
    from transformers.models.phi3 import modeling_phi3 as phi3

    return _Known(
        norms={
            _norm_identity(llama.LlamaRMSNorm): ("cast_first", "variance_epsilon"),
            _norm_identity(gpt_oss.GptOssRMSNorm): ("cast_last", "variance_epsilon"),
            _norm_identity(gemma.GemmaRMSNorm): ("one_plus", "eps"),
        },
        mlps={
            code_identity(llama.LlamaMLP.forward): ("gate_proj", "act_fn"),
            code_identity(phi3.Phi3MLP.forward): ("gate_up_proj", "activation_fn"),
        },
        rotations={
            _rotation_identity(function): per_pair
            for each, per_pair in ((llama, False), (phi3, False), (gpt_oss, True))
            if (function := _plain(getattr(each, _ROTATE))) is not None
        },
        activations={
            nn.SiLU: "silu",
            activations.SiLUActivation: "silu",
            activations.GELUTanh: "gelu_tanh",
            activations.NewGELUActivation: "gelu_tanh",
        },
    )


def activation_name(module: Any) -> Activation | None:
    from transformers.activations import GELUActivation

    if isinstance(module, GELUActivation):
        return "gelu" if module.act is nn.functional.gelu else None
    return _known().activations.get(type(module))


def _own_code(module: nn.Module) -> Callable[..., Any] | None:
    """The class's forward, unless somebody put another one on the instance."""
    return None if "forward" in vars(module) else type(module).forward


def _implementation(choice: Choice, x: torch.Tensor) -> Implementation | None:
    """How to compute; ``None`` for the model's own way."""
    if choice == "auto":
        return "triton" if why_reference(x.device, x.dtype) is None else None
    return resolve_implementation(choice, x.device, x.dtype)[0]


@dataclass(frozen=True)
class _Norm:
    choice: Choice
    rule: NormRule
    eps: float


def _norm_forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    state: _Norm | None = vars(self).get(_STATE)
    implementation = None if state is None else _implementation(state.choice, hidden)
    if state is None or implementation is None:
        return type(self).forward(self, hidden)  # type: ignore[no-any-return]
    rule = functools.partial(rms_norm, eps=state.eps, rule=state.rule, implementation=implementation)
    out: torch.Tensor = rule(hidden, self.weight)
    note_normed(out, hidden, self.weight, rule)
    return out


@dataclass(frozen=True)
class _Mlp:
    choice: Choice
    activation: Activation
    fused: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Of the projections, in order."""
        return ("gate_up_proj", "down_proj") if self.fused else ("gate_proj", "up_proj", "down_proj")


def _tiled(self: Any, state: _Mlp, hidden: torch.Tensor, implementation: Implementation) -> torch.Tensor | None:
    """All of the MLP in one function; ``None`` where it does not pay or a projection has to be called as a module."""
    if not torch.is_grad_enabled() and hidden.shape[:-1].numel() <= TILE:
        return None
    found = linears_of([getattr(self, name) for name in state.names], hidden)
    if found is None:
        return None
    projections, product, result = found
    with torch.autocast(hidden.device.type, enabled=False):
        out = tiled_mlp(
            hidden.to(product),
            projections[:-1],
            projections[-1],
            activation=state.activation,
            hold=holds(otherwise=True),
            implementation=implementation,
        )
    return out.to(result)


def mlp_holding_bytes(decoder: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> int:
    """What ``hold`` of ``tiled_mlp`` takes for one token; 0 where a layer has no MLP that goes through it as it is."""
    x = torch.empty(0, dtype=next(decoder.parameters()).dtype, device=device)
    most = 0
    for layer in layers:
        mlp: Any = getattr(layer, "mlp", None)
        state = None if mlp is None else vars(mlp).get(_STATE)
        if not isinstance(state, _Mlp) or _implementation(state.choice, x) is None:
            return 0
        found = linears_of([getattr(mlp, name) for name in state.names], x)
        if found is None:
            return 0
        most = max(most, sum(each.outputs for each in found[0][:-1]) * found[1].itemsize)
    return most


def _mlp_forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    state: _Mlp | None = vars(self).get(_STATE)
    implementation = None if state is None else _implementation(state.choice, hidden)
    if state is None or implementation is None:
        return type(self).forward(self, hidden)  # type: ignore[no-any-return]
    if (out := _tiled(self, state, hidden, implementation)) is not None:
        return out
    gates = (self.gate_up_proj(hidden),) if state.fused else (self.gate_proj(hidden), self.up_proj(hidden))
    inner = gated(*gates, activation=state.activation, implementation=implementation)
    return self.down_proj(inner)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Attention:
    """The class's forward with our rotation: one that may overwrite its inputs, and one for when hooks look at them."""

    in_place: Callable[..., Any]
    beside: Callable[..., Any]


def _attention_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    state: _Attention | None = vars(self).get(_STATE)
    if state is None:
        return type(self).forward(self, *args, **kwargs)
    watched = any(module._forward_hooks for module in self._modules.values() if module is not None)
    return (state.beside if watched else state.in_place)(self, *args, **kwargs)


def _rotation(own: Callable[..., Any], choice: Choice, per_pair: bool, in_place: bool) -> Callable[..., Any]:
    """A function for the place of transformers' ``apply_rotary_pos_emb``."""

    def rotate(
        q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        implementation = _implementation(choice, q)
        if implementation is None or unsqueeze_dim != 1:
            return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
        return rope(q, k, cos, sin, per_pair=per_pair, in_place=in_place, implementation=implementation)

    return rotate


def _with(function: FunctionType, name: str, value: Any) -> FunctionType:
    """A copy of ``function`` that finds ``value`` under the global ``name``; decorators around it are kept."""
    inner = getattr(function, "__wrapped__", None)
    names, closure = function.__globals__, function.__closure__
    if inner is None:
        names = {**names, name: value}
    else:
        twin = _with(inner, name, value)
        closure = tuple(CellType(twin) if c.cell_contents is inner else c for c in closure or ())
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__, closure)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy if inner is None else functools.wraps(twin)(copy)  # type: ignore[return-value]


def _rotating(forward: FunctionType, choice: Choice) -> _Attention | None:
    """``forward`` with our rotation, where it uses one that is known here."""
    plain = inspect.unwrap(forward)
    own = plain.__globals__.get(_ROTATE)
    function = _plain(own)
    if _ROTATE not in plain.__code__.co_names or function is None:
        return None
    per_pair = _known().rotations.get(_rotation_identity(function))
    if per_pair is None:
        return None
    both = (_with(forward, _ROTATE, _rotation(own, choice, per_pair, in_place)) for in_place in (True, False))
    return _Attention(*both)


@dataclass(frozen=True)
class TakenLayers:
    """Norms, rotary embeddings and gated MLPs of one model, taken over.

    Attributes:
        decoder: of the model.
        choice: of the implementation.
        counts: of each kind.
    """

    decoder: nn.Module
    choice: Choice
    counts: dict[str, int]
    feature: ClassVar[str] = "layers"

    def row(self) -> Row:
        """By which implementation, where the model is now."""
        resolved, why = meaning(self.choice, lambda: _resolved(self.decoder, self.choice))
        found = ", ".join(f"{count} {kind}" for kind, count in self.counts.items())
        own = self.choice == "auto" and resolved == "reference"
        how = "kernels on CUDA only" if own else "Triton kernels" if resolved == "triton" else "plain PyTorch"
        return Row(self.feature, "left alone" if own else "on", f"{found}: {how} ({why})".replace("torch.", ""))


def take_layers(parts: ModelParts, config: UnslothConfig, patches: PatchSet) -> TakenLayers | Row:
    """Replace what is recognised in the whole model, where ``config`` asks for it.

    Returns:
        What was done, or a row that says why nothing was.

    Raises:
        UnsupportedError: an implementation was asked for that does not run here, or of a model with nothing known.
    """
    choice = config.layers
    if choice is None:
        return Row(TakenLayers.feature, "left alone", "switched off in the config")
    _resolved(parts.decoder, choice)  # raises where it can't run
    if counts := _patch(parts.causal_lm, patches, choice):
        return TakenLayers(parts.decoder, choice, counts)
    if choice != "auto":
        raise UnsupportedError(
            expected=f"a model with norms, rotary embedding or MLPs that are known, for layers={choice!r}",
            got=type(parts.causal_lm).__name__,
            remedy="Use layers='auto' or None.",
        )
    return Row(TakenLayers.feature, "left alone", "no norm, rotary embedding or MLP recognised")


def _resolved(decoder: nn.Module, choice: Choice) -> tuple[str, str]:
    parameter = next(iter(decoder.parameters()))
    return resolve_implementation(choice, parameter.device, parameter.dtype)


def _patch(causal_lm: nn.Module, patches: PatchSet, choice: Choice) -> dict[str, int]:
    """Replace what is recognised in the whole model.

    Returns:
        How many of each kind, without those that there are none of.
    """
    counts = {"norms": 0, "rotary embeddings": 0, "gated MLPs": 0}
    known, rotating = _known(), functools.cache(_rotating)  # for this call: what a module's globals hold may change

    def patch(module: nn.Module, kind: str, state: object, forward: Callable[..., Any]) -> None:
        patches.set(module, _STATE, state)
        patches.set(module, "forward", MethodType(forward, module))
        counts[kind] += 1

    for module in causal_lm.modules():
        forward = _own_code(module)
        if not isinstance(forward, FunctionType):
            continue
        if (norm := known.norms.get(_norm_identity(type(module)))) is not None:
            rule, eps = norm
            patch(module, "norms", _Norm(choice, rule, getattr(module, eps)), _norm_forward)
        elif (mlp := known.mlps.get(code_identity(forward))) is not None:
            projection, act = mlp
            if (activation := activation_name(getattr(module, act))) is not None:
                patch(module, "gated MLPs", _Mlp(choice, activation, projection == "gate_up_proj"), _mlp_forward)
        elif (attention := rotating(forward, choice)) is not None:
            patch(module, "rotary embeddings", attention, _attention_forward)
    return {kind: count for kind, count in counts.items() if count}
