"""The mixture-of-experts layers of a model: dense or packed, with or without LoRA, through ``core.experts``.

gpt-oss's whole MLP is replaced. Elsewhere the block around the experts stays the model's own: only the experts module,
a router whose code is known, and PEFT's outermost wrapper are.

As everywhere in this room, replacements are functions bound to the instance that find their state on it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.experts import ExpertLora, experts, top_k_routing
from unsloth_plugins.core.experts.op import Choice, resolve_implementation
from unsloth_plugins.core.experts.projection import DecodedExperts
from unsloth_plugins.core.layers import GPT_OSS, Swiglu
from unsloth_plugins.core.models.adapters import expert_adapters, linear_names_for_peft
from unsloth_plugins.core.models.binding import LayerParts, ModelParts
from unsloth_plugins.core.models.layers import activation_name, code_identity
from unsloth_plugins.core.mxfp4.codec import BLOCK, BYTES
from unsloth_plugins.core.mxfp4.weight import HostWeight, LogicalParameter, PackedWeight
from unsloth_plugins.core.offload.tail import holds
from unsloth_plugins.core.offload.weights import StreamedPiece
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.report import Row, meaning

_CHOICE = "_unsloth_experts"
DECODED = "_unsloth_decoded"  # where the decoded weights of the layer may stay
_BY_GROUPS = "_unsloth_by_groups"  # whether the experts are to be decoded a few at a time
STREAM = "_unsloth_stream"  # (stream, number of the layer) where the packed bytes stay on the host
_A_LINEAR_LAYER = nn.utils.skip_init(nn.Linear, 1, 1)  # stands for any; only its class is looked at
PROJECTIONS = ("gate_up_proj", "down_proj")
GROUP_BYTES = 512 << 20
"""The most bytes of experts decoded at once, where they are by groups."""
GROUPS_FROM = 2 << 30
"""Layers whose experts take more bytes are decoded by groups; others once a pass instead of once a tile."""


def _activation_of(module: Any) -> Swiglu:
    """gpt-oss's rule where there are its constants, plain SwiGLU elsewhere."""
    return replace(GPT_OSS, alpha=module.alpha, limit=module.limit) if hasattr(module, "alpha") else Swiglu()


def _by_inputs(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """[E, in, out] of a dense parameter, a view where it is stored by outputs."""
    return weight if getattr(module, "is_transposed", False) else weight.transpose(1, 2)


def run_experts(
    module: nn.Module,
    hidden: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    weights: tuple[torch.Tensor | PackedWeight, torch.Tensor | PackedWeight],
    gate_up_lora: Sequence[ExpertLora],
    down_lora: Sequence[ExpertLora],
) -> torch.Tensor:
    """``core.experts`` with the biases and the activation of an experts module; hidden [..., H] in and out."""
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    dtype = flat_NH.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    gate_up, down = (w if isinstance(w, PackedWeight) else _by_inputs(module, w) for w in weights)
    by_groups = vars(module).get(_BY_GROUPS, False)
    choice = vars(module).get(_CHOICE, "auto")
    implementation, _ = resolve_implementation(choice, hidden.device, dtype, by_groups=by_groups)
    with torch.autocast(hidden.device.type, enabled=False):
        out_NH = experts(
            flat_NH.to(dtype),
            gate_up,
            getattr(module, "gate_up_proj_bias", None),
            down,
            getattr(module, "down_proj_bias", None),
            router_indices,
            routing_weights,
            activation=_activation_of(module),
            gate_up_lora=gate_up_lora,
            down_lora=down_lora,
            implementation=implementation,
            hold=holds(),
            decoded=vars(module).get(DECODED),
            weights_limit=GROUP_BYTES if by_groups and implementation == "triton" else None,
        )
    return out_NH.to(hidden.dtype).view_as(hidden)


def _experts_forward(
    self: nn.Module,
    hidden: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    gate_up_lora: Sequence[ExpertLora] = (),
    down_lora: Sequence[ExpertLora] = (),
) -> torch.Tensor:
    weights: Any = (self.gate_up_proj, self.down_proj)
    return run_experts(self, hidden, router_indices, routing_weights, weights, gate_up_lora, down_lora)


def _named_modules(
    self: nn.Module, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """For dense experts what ``PackedExperts.named_modules`` is for packed ones."""
    yield from type(self).named_modules(self, memo, prefix, remove_duplicate)
    yield from ((name, _A_LINEAR_LAYER) for name in linear_names_for_peft(prefix))


def _router_forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights that are normalised over the chosen, unless the router knows an option for that and it is off."""
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    normalise = getattr(self, "norm_topk_prob", True)
    return top_k_routing(flat_NH, self.weight, getattr(self, "bias", None), self.top_k, normalise=normalise)


def _wrapper_forward(
    self: nn.Module, hidden: torch.Tensor, router_indices: torch.Tensor, routing_weights: torch.Tensor
) -> torch.Tensor:
    """In place of PEFT's, which would build the sum of base and adapter for every expert."""
    base, lora = expert_adapters(self)
    terms = {"gate_up_lora": lora["gate_up_proj"], "down_lora": lora["down_proj"]}
    return base(hidden, router_indices, routing_weights, **terms)  # type: ignore[no-any-return]


@functools.cache
def _known() -> tuple[tuple[Any, ...], frozenset[tuple[Any, ...]]]:
    """The code of the experts that many families share, and of routers that ``_router_forward`` stands for."""
    from transformers.models.mixtral import modeling_mixtral as mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe

    routers = (mixtral.MixtralTopKRouter, qwen3_moe.Qwen3MoeTopKRouter)
    experts_code = code_identity(mixtral.MixtralExperts.forward)
    return experts_code, frozenset(code_identity(router.forward) for router in routers)


def _code_of(module: nn.Module) -> tuple[Any, ...] | None:
    """The code of its class, unless somebody else put another forward on the instance."""
    own = getattr(vars(module).get("forward"), "__func__", None)
    if "forward" in vars(module) and own not in (_experts_forward, _router_forward):
        return None
    return code_identity(type(module).forward)


def are_plain_experts(module: nn.Module) -> bool:
    """Whether ``module`` runs the experts of Mixtral, Qwen-MoE and their likes: SwiGLU, no biases, all on this rank."""
    if isinstance(module, PackedExperts):
        return not _is_gpt_oss(module)
    return (
        _code_of(module) == _known()[0]
        and activation_name(getattr(module, "act_fn", None)) == "silu"
        and not getattr(module, "_is_expert_parallel", False)
    )


def is_plain_router(module: nn.Module) -> bool:
    """Whether ``module`` is a softmax router with a top k and no more, without a bias."""
    return _code_of(module) in _known()[1]


def _mlp_forward(self: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Past PEFT's wrappers, which would build the sum of base and adapter for every expert."""
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    _, weight_NK, index_NK = self.router(flat_NH)  # type: ignore[operator]
    base, lora = expert_adapters(self.experts)  # type: ignore[arg-type]
    if any(lora.values()):
        terms = {"gate_up_lora": lora["gate_up_proj"], "down_lora": lora["down_proj"]}
        out_NH = base(flat_NH, index_NK, weight_NK, **terms)
    else:
        out_NH = base(flat_NH, index_NK, weight_NK)
    return out_NH.view_as(hidden), weight_NK


def holding_bytes(layer_experts: nn.Module, top_k: int) -> int:
    """What ``hold`` of ``core.experts`` takes for one token: two bytes a number in bf16, four in float16."""
    weight: torch.Tensor = layer_experts.gate_up_proj  # type: ignore[assignment]
    width = 2 if weight.dtype == torch.bfloat16 else 4
    return width * top_k * weight.shape[2 if getattr(layer_experts, "is_transposed", False) else 1]


def decoded_bytes(layer_experts: nn.Module) -> int:
    """What the weights of one layer take in 16 bits."""
    return 2 * sum(getattr(layer_experts, name).numel() for name in PROJECTIONS)


def keep_decoded(layers: Sequence[PackedExperts], patches: PatchSet) -> DecodedExperts:
    """Give each layer a place for its decoded weights, none of which is wanted yet."""
    layer_bytes = max(map(decoded_bytes, layers))
    decoded = DecodedExperts(layer_bytes, len(layers))
    for layer, place in zip(layers, decoded.layers, strict=True):
        patches.set(layer, DECODED, place)
    return decoded


class PackedExperts(nn.Module):
    """Experts with packed weights, frozen: gpt-oss's with the checkpoint's tensors under the checkpoint's names, and
    those with Mixtral's code, which have no biases, under the same names.

    Shape suffixes: E experts, H hidden size, I expert size, J = 2 I, R blocks of a row, B = 16 bytes of a block.

    Args:
        n_experts, hidden_size, intermediate_size: E, H, I.
        alpha, limit: of gpt-oss's clamped SwiGLU; without ``alpha`` it is the plain one.
        biases: whether there are any.
        is_transposed: whether the dense parameters are stored [expert, in, out], as gpt-oss's, or [expert, out, in].

    Attributes:
        gate_up_proj_blocks, gate_up_proj_scales: uint8 [E, J, R, B] and [E, J, R], over the inputs H.
        down_proj_blocks, down_proj_scales: uint8 [E, H, R, B] and [E, H, R], over the inputs I.
        gate_up_proj_bias, down_proj_bias: [E, J] and [E, H], floating, where there are biases.
        gate_up_proj, down_proj: shape, dtype and device of the dense parameters, [E, H, J] and [E, I, H], or those
            transposed.
    """

    def __init__(
        self,
        n_experts: int,
        hidden_size: int,
        intermediate_size: int,
        alpha: float | None = None,
        limit: float | None = None,
        *,
        biases: bool = True,
        is_transposed: bool = True,
    ) -> None:
        super().__init__()
        self.num_experts, self.is_transposed = n_experts, is_transposed  # PEFT asks for the second
        if alpha is not None:
            self.alpha, self.limit = alpha, limit
        self.register_buffer("dense_like", torch.empty(0), persistent=False)  # dtype and device of what is not packed
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * intermediate_size, hidden_size),
            ("down_proj", hidden_size, intermediate_size),
        ):
            shape = (n_experts, outputs, inputs // BLOCK)
            for suffix, size in (("_blocks", (*shape, BYTES)), ("_scales", shape)):
                packed = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
                self.register_parameter(name + suffix, packed)
            if biases:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(n_experts, outputs)))

    def packed(self, name: str, device: torch.device | None = None) -> PackedWeight:
        """The packed bytes of ``"gate_up_proj"`` or ``"down_proj"``.

        Args:
            device: where they will be used; matters to streamed ones.
        """
        blocks, scales = self.bytes_of(name)
        stream, index = vars(self).get(STREAM, (None, None))
        if stream is None or device is None or not stream.serves(device):
            return PackedWeight(blocks, scales)
        return HostWeight(blocks, scales, StreamedPiece(stream, (index, name), (blocks, scales), device))

    def bytes_of(self, name: str) -> tuple[nn.Parameter, nn.Parameter]:
        """Blocks and scales of one projection."""
        return getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales")

    def _apply(self, fn: Any, recurse: bool = True) -> PackedExperts:
        """``to``, ``cuda`` and the like leave streamed bytes where they are."""
        if STREAM not in vars(self):
            return super()._apply(fn, recurse)
        parameters: dict[str, Any] = vars(self)["_parameters"]
        held = {name: each for name, each in parameters.items() if name.endswith(("_blocks", "_scales"))}
        parameters.update(dict.fromkeys(held))  # in their places: the order is that of the checkpoint
        try:
            return super()._apply(fn, recurse)
        finally:
            parameters.update(held)

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """See the class."""
        return self._logical("gate_up_proj")

    @property
    def down_proj(self) -> torch.Tensor:
        """See the class."""
        return self._logical("down_proj")

    def _logical(self, name: str) -> LogicalParameter:
        like: torch.Tensor = self.dense_like  # type: ignore[assignment]
        experts_, outputs, rows = getattr(self, f"{name}_scales").shape
        sizes = (rows * BLOCK, outputs) if self.is_transposed else (outputs, rows * BLOCK)
        return LogicalParameter.of(torch.Size((experts_, *sizes)), like.dtype, like.device)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As usual; PEFT, when it looks for ``target_parameters``, sees the dense parameters as well.

        Nobody else may: FSDP would shard them and accelerate would move them.
        """
        found = super().named_parameters(prefix, recurse, remove_duplicate)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if recurse or not caller.startswith("peft."):
            return found
        dot = f"{prefix}." if prefix else ""
        logical: Any = [(dot + name, self._logical(name)) for name in PROJECTIONS]
        return iter([*logical, *found])

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As usual; while PEFT expands ``"all-linear"``, the projections are among the linear layers."""
        yield from super().named_modules(memo, prefix, remove_duplicate)
        yield from ((name, _A_LINEAR_LAYER) for name in linear_names_for_peft(prefix))

    def forward(
        self,
        hidden: torch.Tensor,
        router_indices: torch.Tensor,
        routing_weights: torch.Tensor,
        gate_up_lora: Sequence[ExpertLora] = (),
        down_lora: Sequence[ExpertLora] = (),
    ) -> torch.Tensor:
        """hidden [..., H], indices and weights [N, K] -> [..., H]."""
        weights = (self.packed("gate_up_proj", hidden.device), self.packed("down_proj", hidden.device))
        return run_experts(self, hidden, router_indices, routing_weights, weights, gate_up_lora, down_lora)


def patch_mlp(mlp: nn.Module, patches: PatchSet) -> None:
    """Compute one layer's experts and their adapters together, past PEFT's wrappers."""
    patches.set(mlp, "forward", MethodType(_mlp_forward, mlp))


@dataclass(frozen=True)
class TakenExperts:
    """The experts of one model, taken over.

    Attributes:
        layers: those with experts.
        choice: of the implementation.
        by_groups: whether a few are decoded at a time.
        holding_bytes: a token, that each layer's can hold for backward; 0 where some can't.
    """

    layers: tuple[LayerParts, ...]
    choice: Choice
    by_groups: bool
    holding_bytes: int
    feature: ClassVar[str] = "experts"

    def row(self) -> Row:
        """By which implementation, where the model is now."""
        experts_0: Any = self.layers[0].experts
        weight: torch.Tensor = experts_0.gate_up_proj
        resolve = functools.partial(resolve_implementation, self.choice, weight.device, weight.dtype)
        resolved, why = meaning(self.choice, functools.partial(resolve, by_groups=self.by_groups))
        kind = "packed MXFP4" if isinstance(experts_0, PackedExperts) else "dense"
        routing = "routing in float32" if _all_routed(self.layers) else "the model's own routing"
        return Row(self.feature, "on", f"{kind}, {resolved} ({why}), {routing}, {len(self.layers)} layers")


def take_experts(parts: ModelParts, config: UnslothConfig, patches: PatchSet) -> TakenExperts | Row:
    """Run the experts of this instance through the op, where ``config`` asks for it and there are any.

    Returns:
        What was done, or a row that says why nothing was.

    Raises:
        UnsupportedError: an implementation was asked for that does not run here, or of a model without experts.
    """
    choice = config.experts
    layers = tuple(layer for layer in parts.layers if layer.experts is not None)
    if choice is None:
        return Row(TakenExperts.feature, "left alone", "switched off in the config")
    if not layers:
        if choice != "auto":
            raise UnsupportedError(
                expected=f"a model with recognised experts, for experts={choice!r}",
                got=type(parts.causal_lm).__name__,
                remedy="Use experts='auto' or None.",
            )
        return Row(TakenExperts.feature, "left alone", "none recognised")
    each: list[Any] = [layer.experts for layer in layers]
    by_groups = config.memory_policy == "min_memory" and max(map(decoded_bytes, each)) > GROUPS_FROM
    weight: torch.Tensor = each[0].gate_up_proj
    resolve_implementation(choice, weight.device, weight.dtype, by_groups=by_groups)  # raises where it can't run
    for layer in layers:
        _patch_layer(layer, patches, choice, by_groups=by_groups)
    holding = 0
    if choice != "reference" and _all_routed(layers) and len(layers) == len(parts.layers):
        holding = max(holding_bytes(layer.experts, layer.router.top_k) for layer in layers)  # type: ignore[arg-type,union-attr]
    return TakenExperts(layers, choice, by_groups, holding)


def _all_routed(layers: Sequence[LayerParts]) -> bool:
    """Whether the routing of all is ours, in float32."""
    return all(layer.router is not None for layer in layers)


def _patch_layer(layer: LayerParts, patches: PatchSet, choice: Choice, *, by_groups: bool) -> None:
    """Route in float32 where the router is known, and run one layer's experts through ``core.experts``."""
    assert layer.mlp is not None and layer.experts is not None
    if layer.router is not None:
        patches.set(layer.router, "forward", MethodType(_router_forward, layer.router))
    patches.set(layer.experts, _CHOICE, choice)
    patches.set(layer.experts, _BY_GROUPS, by_groups)
    if not isinstance(layer.experts, PackedExperts):
        patches.set(layer.experts, "forward", MethodType(_experts_forward, layer.experts))
    if _is_gpt_oss(layer.experts):
        patch_mlp(layer.mlp, patches)
        if not isinstance(layer.experts, PackedExperts):
            patches.set(layer.experts, "named_modules", MethodType(_named_modules, layer.experts))


def patch_expert_wrappers(parts: ModelParts, patches: PatchSet) -> None:
    """Compute experts and their adapters together where the MLP is the model's own: PEFT's outermost wrapper is ours.

    A wrapper that PEFT adds later computes the same in its own way until this is called again.
    """
    for layer in parts.layers:
        if layer.experts is None or _is_gpt_oss(layer.experts):
            continue
        outermost: nn.Module = layer.mlp.experts  # type: ignore[union-attr,assignment]
        if outermost is not layer.experts and "forward" not in vars(outermost):
            patches.set(outermost, "forward", MethodType(_wrapper_forward, outermost))


def _is_gpt_oss(layer_experts: nn.Module) -> bool:
    return hasattr(layer_experts, "gate_up_proj_bias")
