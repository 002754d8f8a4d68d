"""The mixture-of-experts layers of one gpt-oss: dense or packed, with or without LoRA, through ``core.experts``.

As everywhere in this room, replacements are functions bound to the instance that find their state on it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from unsloth_plugins.core.experts import ExpertLora, experts, top_k_routing
from unsloth_plugins.core.experts.op import resolve_implementation
from unsloth_plugins.core.models.adapters import expert_adapters, linear_names_for_peft
from unsloth_plugins.core.mxfp4.codec import BLOCK, BYTES
from unsloth_plugins.core.mxfp4.weight import LogicalParameter, PackedWeight
from unsloth_plugins.core.offload.tail import holds
from unsloth_plugins.core.patches import PatchSet

_CHOICE = "_unsloth_experts"
_A_LINEAR_LAYER = nn.utils.skip_init(nn.Linear, 1, 1)  # stands for any; only its class is looked at
PROJECTIONS = ("gate_up_proj", "down_proj")


def run_experts(
    module: nn.Module,
    hidden: torch.Tensor,
    router_indices: torch.Tensor,
    routing_weights: torch.Tensor,
    weights: tuple[torch.Tensor | PackedWeight, torch.Tensor | PackedWeight],
    gate_up_lora: Sequence[ExpertLora],
    down_lora: Sequence[ExpertLora],
) -> torch.Tensor:
    """``core.experts`` with the biases and constants of an experts module; hidden [..., H] in and out."""
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    dtype = flat_NH.dtype
    if torch.is_autocast_enabled(hidden.device.type) and dtype == torch.float32:
        dtype = torch.get_autocast_dtype(hidden.device.type)
    gate_up, down = (w if isinstance(w, PackedWeight) else w.to(dtype) for w in weights)
    implementation, _ = resolve_implementation(vars(module).get(_CHOICE, "auto"), hidden.device, dtype)
    with torch.autocast(hidden.device.type, enabled=False):
        out_NH = experts(
            flat_NH.to(dtype),
            gate_up,
            module.gate_up_proj_bias,  # type: ignore[arg-type]
            down,
            module.down_proj_bias,  # type: ignore[arg-type]
            router_indices,
            routing_weights,
            alpha=module.alpha,  # type: ignore[arg-type]
            limit=module.limit,  # type: ignore[arg-type]
            gate_up_lora=gate_up_lora,
            down_lora=down_lora,
            implementation=implementation,
            hold=holds(),
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


def _router_forward(self: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    flat_NH = hidden.reshape(-1, hidden.shape[-1])
    return top_k_routing(flat_NH, self.weight, self.bias, self.top_k)  # type: ignore[arg-type]


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
    """What ``hold`` of ``core.experts`` takes for one token, in 16 bits."""
    bias: torch.Tensor = layer_experts.gate_up_proj_bias  # type: ignore[assignment]
    return 2 * top_k * bias.shape[1]


class PackedExperts(nn.Module):
    """gpt-oss's experts with packed weights: the checkpoint's tensors under the checkpoint's names, frozen.

    Shape suffixes: E experts, H hidden size, I expert size, J = 2 I, R blocks of a row, B = 16 bytes of a block.

    Args:
        n_experts, hidden_size, intermediate_size: E, H, I.
        alpha, limit: of the clamped SwiGLU.

    Attributes:
        gate_up_proj_blocks, gate_up_proj_scales: uint8 [E, J, R, B] and [E, J, R], over the inputs H.
        down_proj_blocks, down_proj_scales: uint8 [E, H, R, B] and [E, H, R], over the inputs I.
        gate_up_proj_bias, down_proj_bias: [E, J] and [E, H], floating.
        gate_up_proj, down_proj: shape, dtype and device of the dense parameters, [E, H, J] and [E, I, H].
    """

    is_transposed = True  # stored [expert, in, out]: what PEFT asks of an experts module

    def __init__(
        self, n_experts: int, hidden_size: int, intermediate_size: int, alpha: float, limit: float | None
    ) -> None:
        super().__init__()
        self.num_experts, self.alpha, self.limit = n_experts, alpha, limit
        for name, outputs, inputs in (
            ("gate_up_proj", 2 * intermediate_size, hidden_size),
            ("down_proj", hidden_size, intermediate_size),
        ):
            shape = (n_experts, outputs, inputs // BLOCK)
            for suffix, size in (("_blocks", (*shape, BYTES)), ("_scales", shape)):
                packed = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
                self.register_parameter(name + suffix, packed)
            self.register_parameter(f"{name}_bias", nn.Parameter(torch.empty(n_experts, outputs)))

    def packed(self, name: str) -> PackedWeight:
        """The packed bytes of ``"gate_up_proj"`` or ``"down_proj"``."""
        return PackedWeight(getattr(self, f"{name}_blocks"), getattr(self, f"{name}_scales"))

    @property
    def gate_up_proj(self) -> torch.Tensor:
        """See the class."""
        return self._logical("gate_up_proj")

    @property
    def down_proj(self) -> torch.Tensor:
        """See the class."""
        return self._logical("down_proj")

    def _logical(self, name: str) -> LogicalParameter:
        bias: torch.Tensor = getattr(self, f"{name}_bias")
        experts_, outputs, rows = getattr(self, f"{name}_scales").shape
        return LogicalParameter.of(torch.Size((experts_, rows * BLOCK, outputs)), bias.dtype, bias.device)

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
        weights = (self.packed("gate_up_proj"), self.packed("down_proj"))
        return run_experts(self, hidden, router_indices, routing_weights, weights, gate_up_lora, down_lora)


def patch_mlp(mlp: nn.Module, patches: PatchSet) -> None:
    """Compute one layer's experts and their adapters together, past PEFT's wrappers."""
    patches.set(mlp, "forward", MethodType(_mlp_forward, mlp))


def patch_experts(mlp: nn.Module, router: nn.Module, layer_experts: nn.Module, patches: PatchSet, choice: str) -> None:
    """Route in float32 and run one layer's experts through ``core.experts``."""
    patch_mlp(mlp, patches)
    patches.set(router, "forward", MethodType(_router_forward, router))
    patches.set(layer_experts, _CHOICE, choice)
    if not isinstance(layer_experts, PackedExperts):
        patches.set(layer_experts, "forward", MethodType(_experts_forward, layer_experts))
        patches.set(layer_experts, "named_modules", MethodType(_named_modules, layer_experts))
