"""``apply(model, config) -> Applied``: the only door through which anything is changed."""

from __future__ import annotations

import copy
import functools
import logging
from dataclasses import dataclass
from types import MethodType
from typing import Any, Literal, NoReturn, SupportsIndex

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import ModelError, UnsupportedError
from unsloth_plugins.core.experts.op import resolve_implementation
from unsloth_plugins.core.export.live import peft_models, record_on_save
from unsloth_plugins.core.layers.op import resolve_implementation as resolve_layers
from unsloth_plugins.core.models import recognise
from unsloth_plugins.core.models.adapters import (
    add_missing_adapters,
    check_targets,
    experts_left_out,
    missing_adapters,
)
from unsloth_plugins.core.models.attention import (
    ConfigSwap,
    attention_backend,
    needs_less_memory,
    patch_attention,
    why_not,
)
from unsloth_plugins.core.models.binding import ModelParts, is_layer
from unsloth_plugins.core.models.causal_lm import chunked_losses, patch_loss, unpatch_loss
from unsloth_plugins.core.models.experts import (
    GROUPS_FROM,
    PROJECTIONS,
    PackedExperts,
    decoded_bytes,
    holding_bytes,
    keep_decoded,
    patch_expert_wrappers,
    patch_experts,
)
from unsloth_plugins.core.models.layers import mlp_holding_bytes, patch_layers
from unsloth_plugins.core.models.lora import keep_unpacked, patch_lora
from unsloth_plugins.core.models.search import ModuleSearch
from unsloth_plugins.core.models.streaming import (
    check_streamed,
    choose_weights,
    packed_layers,
    stream_embedding,
    stream_experts,
    unstream_embedding,
    unstream_experts,
    why_embedding_stays,
)
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.checkpoint import LayerCheckpoint
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.pairs import Pairs
from unsloth_plugins.core.offload.weights import WeightStream
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.planner.live import check_possible, forecast, optimizer_named, outgrown
from unsloth_plugins.core.ranks import is_first

logger = logging.getLogger("unsloth_plugins")

_APPLIED = "_unsloth_applied"


@dataclass(frozen=True)
class Row:
    """One line of the report: a feature, whether it is on, and what was done or why not."""

    feature: str
    state: Literal["on", "left alone"]
    detail: str


_INPUTS = {
    "auto": "inputs of the layers on the device while there is memory, then on the host",
    "min_memory": "inputs of the layers wait in host memory, one at a time on its way",
    "offload_all": "inputs of the layers wait in host memory",
    "on_device": "inputs of the layers stay on the device",
}


class Applied:
    """What ``apply`` did to one model, and the way back.

    Attributes:
        model: the model as it was given.
        config: the options in force.
        parts: what was recognised.
        rows: the report as data.
        store: where checkpointed activations wait; has the host byte counts.
        stream: where streamed experts wait; ``None`` while all weights are resident.
        budget: under ``memory_policy="auto"``, what chooses the layers that are not checkpointed.
        tokens_seen: tokens (padding included) that went through the decoder in training mode.
        last_tokens: of the last such forward with gradients.
    """

    def __init__(self, model: nn.Module, config: UnslothConfig, parts: ModelParts) -> None:
        self.model, self.config, self.parts = model, config, parts
        self.rows: list[Row] = []
        self.store = HostStore.for_policy(config.memory_policy, config.offload_min_bytes, config.host_memory_gib)
        self.budget = MemoryBudget() if config.memory_policy == "auto" else None
        self.stream: WeightStream | None = None
        self._pairs = Pairs() if config.checkpoint_pairs else None
        self.tokens_seen = self.last_tokens = 0
        self._checkpointable = ModuleSearch(parts.causal_lm, _can_checkpoint)
        self._layers = ModuleSearch(parts.decoder, is_layer)
        self._patches = PatchSet()
        self._checkpoint_patches = PatchSet()
        self._configs: ConfigSwap | None = None
        self._adapters: tuple[str, ...] = ()
        self._why_weights, self._embedding_note, self._longest = "", "", 0
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Applied:
        memo[id(self)] = twin = object.__new__(Applied)
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UnsupportedError(
            expected="a model without patches, to pickle or torch.save it whole",
            got=f"a {type(self.parts.causal_lm).__name__} that unsloth_plugins.apply has changed",
            remedy="Call applied.undo() before, or save by save_pretrained or a state dict, which are as ever.",
        )

    def report(self) -> str:
        """A table of what was changed, what was left alone, and why."""
        self.sync_checkpointing()
        self._note_stream()
        if self.tokens_seen and chunked_losses(self.parts.causal_lm) == 0:
            self._note("loss", "left alone", "the trainer or the model computes its own, past the chunked one")
        name = type(self.parts.causal_lm).__name__
        width = max(len(row.feature) for row in self.rows)
        lines = [f"unsloth-plugins on {name} (binding: {self.parts.binding})"]
        lines += [f"  {row.feature:<{width}}  {row.state:<10}  {row.detail}" for row in self.rows]
        return "\n".join(lines)

    def expect(self, tokens: int | None = None, optimizer: str = "") -> None:
        """Predict, as a line of the report, what a step takes of a device with memory of its own.

        Args:
            tokens: of the longest batch, padding included; ``None`` where nobody knows.
            optimizer: its name or that of its class; one that the planner does not know counts as AdamW.
        """
        found = forecast(self, tokens, optimizer=optimizer_named(optimizer))
        if found is None:
            return
        self._note("memory", found.state, found.detail)
        if found.fits is False:
            _warn("Batches of that length may run out of device memory: %s", found.detail)

    def undo(self) -> None:
        """Restore the model: logits and gradients are bit-equal to those before ``apply``. May be called twice."""
        if vars(self.parts.causal_lm).get(_APPLIED) is not self:
            return
        if self._configs is not None:
            self._configs.carry_back()
        unpatch_loss(self.parts.causal_lm)
        packed = packed_layers(self.parts)
        for experts in packed:
            unstream_experts(experts)
        if packed:
            unstream_embedding(self.parts, packed[0].gate_up_proj.device)
        self._checkpoint_patches.undo()
        self._patches.undo()
        if self._hook is not None:
            self._hook.remove()
        del vars(self.parts.causal_lm)[_APPLIED]

    def sync_checkpointing(self) -> None:
        """Take over gradient checkpointing wherever the trainer has switched it on since.

        Trainers switch it on at the start of each run, after ``apply``; the decoder calls this before every forward in
        training mode. Layers whose checkpoint function is not torch's own (a trainer's selective checkpointing, say)
        are left to it.
        """
        if self.config.gradient_checkpointing is False:
            self._note("gradient checkpointing", "left alone", "switched off in the config")
            return
        ours = layers = 0
        foreign: Any = None
        for module in self._checkpointable():
            if module.gradient_checkpointing is not True:
                continue
            current = getattr(module, "_gradient_checkpointing_func", None)
            keywords = _torch_checkpoint_keywords(current)
            if keywords is None and not isinstance(current, LayerCheckpoint):
                foreign = current
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
                self._checkpoint_patches.set(module, "_gradient_checkpointing_func", stand_in)
            layers += is_layer(module)
        self.store.layers = layers
        if self.budget is not None:
            self.budget.layers = layers
        if foreign is not None:
            self._note("gradient checkpointing", "left alone", _whose(foreign))
        elif ours:
            chosen = f"; {self.budget.describe()}" if self.budget is not None and self.budget.plan is not None else ""
            which = ", of every second layer" if self.config.checkpoint_pairs else ""
            detail = f"non-reentrant; {_INPUTS[self.config.memory_policy]}{which}{chosen}"
            self._note("gradient checkpointing", "on", detail + self._copies())
        else:
            self._note(
                "gradient checkpointing",
                "left alone",
                "off so far; follows the trainer, where gradient_checkpointing=True buys long context",
            )

    def _copies(self) -> str:
        sent = self.store.sent_bytes
        if not sent:
            return ""
        high = self.store.mapped_bytes / 2**30
        copies_ms, exposed_ms = self.store.copy_ms()
        waited = f", copies took {copies_ms:.0f} ms, waited for {exposed_ms:.0f} ms" if copies_ms else ""
        return f"; {sent / 2**30:.2f} GiB sent to the host so far, {high:.2f} GiB of host memory taken for it{waited}"

    def sync_lora(self) -> None:
        """Take over the LoRA layers that PEFT has made since; the decoder calls this when there is a new adapter."""
        self._adapters = _adapter_names(self.parts.causal_lm)
        self._sync_expert_wrappers()
        if (kept := keep_unpacked(self.parts.causal_lm, self._patches)) is not None:
            self._note("4-bit weights", "on", kept)
        if self.config.lora is None:
            self._note("lora", "left alone", "switched off in the config")
            return
        ours, groups, left = patch_lora(self.parts.causal_lm, self._patches, self.config.lora)
        others = "; ".join(f"{count} stay PEFT's: {reason}" for reason, count in left.items())
        if not ours:
            self._note("lora", "left alone", others or "no adapter on a linear layer so far")
            return
        detail = f"{ours} linear layers, {groups} groups that read their input once"
        fused = self.config.lora == "fused" or next(iter(self.parts.decoder.parameters())).is_cuda
        if not fused:
            detail += ": on CUDA only"
        self._note("lora", "on" if fused else "left alone", f"{detail}; {others}" if others else detail)

    def _sync_expert_wrappers(self) -> None:
        if self.config.experts is not None:
            patch_expert_wrappers(self.parts, self._patches)

    def _note(self, feature: str, state: Literal["on", "left alone"], detail: str) -> None:
        row = Row(feature, state, detail)
        for index, old in enumerate(self.rows):
            if old.feature == feature:
                self.rows[index] = row
                return
        self.rows.append(row)

    def _before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.budget is not None and not (module.training and torch.is_grad_enabled()):
            self.budget.rest()
        if not module.training:
            return
        if _adapter_names(self.parts.causal_lm) != self._adapters:
            self.sync_lora()
        tokens, device = 0, torch.device("cpu")
        ids = kwargs.get("input_ids", args[0] if args else None)
        if ids is not None:
            tokens, device = ids.numel(), ids.device
        elif (embeds := kwargs.get("inputs_embeds")) is not None:
            tokens, device = embeds.shape[:-1].numel(), embeds.device
        self.tokens_seen += tokens
        if torch.is_grad_enabled():
            self.sync_checkpointing()
            self._make_room(tokens)
            if not self.last_tokens and tokens:
                check_possible(self, tokens)
            if self.budget is not None:
                if device.type == "cuda" and not any(layer.experts for layer in self.parts.layers):
                    self.budget.holding_bytes = mlp_holding_bytes(self.parts.decoder, self._layers(), device)
                self.budget.begin(device, tokens)
            self.last_tokens = tokens

    def _apply_attention(self) -> None:
        choice = self.config.attention
        if choice is None:
            self._note("attention", "left alone", "switched off in the config")
            return
        sparing = choice == "auto" and self.config.memory_policy == "min_memory" and needs_less_memory(self.parts)
        if sparing:
            choice = "triton"
        reason = why_not(self.parts, asked=choice != "auto")
        if reason is not None:
            if choice != "auto":
                raise UnsupportedError(
                    expected=f"a model whose attention can be taken over, for attention={choice!r}",
                    got=f"{type(self.parts.causal_lm).__name__}: {reason}",
                    remedy="Use attention='auto' or None.",
                )
            self._note("attention", "left alone", reason)
            if self.parts.has_sinks:
                _warn("Attention with sinks is left alone: %s. Packed documents may see each other.", reason)
            return
        choice, backend, why = attention_backend(self.parts, choice)
        if sparing:
            why = f"{why}, in place of sdpa, which needs more memory"
        self._configs = patch_attention(self.parts, self._patches, choice)
        self._note("attention", "on", f"{backend} sink attention ({why}), linear memory, packed documents kept apart")

    def _apply_experts(self) -> None:
        choice = self.config.experts
        layers = [layer for layer in self.parts.layers if layer.experts is not None]
        if choice is None or not layers:
            if choice not in ("auto", None):
                raise UnsupportedError(
                    expected=f"a model with recognised experts, for experts={choice!r}",
                    got=type(self.parts.causal_lm).__name__,
                    remedy="Use experts='auto' or None.",
                )
            self._note("experts", "left alone", "switched off in the config" if choice is None else "none recognised")
            return
        weight: torch.Tensor = layers[0].experts.gate_up_proj  # type: ignore[union-attr,assignment]
        most = max(decoded_bytes(layer.experts) for layer in layers)  # type: ignore[arg-type]
        by_groups = self.config.memory_policy == "min_memory" and most > GROUPS_FROM
        resolved, why = resolve_implementation(choice, weight.device, weight.dtype, by_groups=by_groups)
        for layer in layers:
            patch_experts(layer, self._patches, choice, by_groups=by_groups)
        routed = all(layer.router is not None for layer in layers)
        fusible = choice != "reference" and routed and len(layers) == len(self.parts.layers)
        if self.budget is not None and fusible:  # it acts on CUDA only, where the model may go after this
            self.budget.holding_bytes = max(
                holding_bytes(layer.experts, layer.router.top_k)  # type: ignore[arg-type,union-attr]
                for layer in layers
            )
        kind = "packed MXFP4" if isinstance(layers[0].experts, PackedExperts) else "dense"
        routing = "routing in float32" if routed else "the model's own routing"
        self._note("experts", "on", f"{kind}, {resolved} ({why}), {routing}, {len(layers)} layers")

    def _apply_weights(self) -> None:
        packed = packed_layers(self.parts)
        if not packed:
            return
        streamed, why = choose_weights(self.parts, self.config.weights, DeviceMemory())
        if streamed:
            self._stream(packed, why)
            return
        self._note("weights", "left alone", f"packed experts stay with the model ({why})")
        if self.budget is not None and self.config.experts is not None:
            self.budget.decoded = keep_decoded(packed, self._patches)

    def _stream(self, packed: list[PackedExperts], why: str) -> None:
        self.stream, self._why_weights = WeightStream(), why
        for index, experts in enumerate(packed):
            stream_experts(experts, self.stream, index, self._patches)
        if (reason := why_embedding_stays(self.parts)) is None:
            table = stream_embedding(self.parts, self.stream, self._patches).weight
            size = table.numel() * table.element_size()
            self._embedding_note = f"; the embedding, {size / 2**30:.2f} GiB, there too"
        else:
            self._embedding_note = f"; the embedding stays with the model: {reason}"
        self._note_stream()

    def _make_room(self, tokens: int) -> None:
        """Before a longer step than any so far: packed experts give way where ``weights="auto"`` and it takes that."""
        packed = packed_layers(self.parts)
        if tokens <= self._longest or self.stream is not None or self.config.weights != "auto" or not packed:
            return
        self._longest = tokens
        if self.budget is not None:
            self.budget.rest()  # decoded weights are no reason to stream: a longer step drops them anyway
        if (why := outgrown(self, tokens, DeviceMemory())) is None:
            return
        if self.budget is not None:
            self.budget.decoded = None
        self._stream(packed, why)
        _warn("Packed experts go to host memory: %s.", why)

    def _note_stream(self) -> None:
        if self.stream is None:
            return
        packed = packed_layers(self.parts)
        size = sum(p.numel() for experts in packed for name in PROJECTIONS for p in experts.bytes_of(name))
        detail = f"packed experts of {len(packed)} layers, {size / 2**30:.2f} GiB, on the host ({self._why_weights})"
        detail += self._embedding_note
        if sent := self.stream.sent_bytes:
            copies_ms, exposed_ms = self.stream.copy_ms()
            waited = f" in {copies_ms:.0f} ms, of which {exposed_ms:.0f} ms waited for" if copies_ms else ""
            detail += f"; {sent / 2**30:.2f} GiB copied to the device so far{waited}"
        self._note("weights", "on", detail)

    def _apply_layers(self) -> None:
        choice = self.config.layers
        if choice is None:
            self._note("layers", "left alone", "switched off in the config")
            return
        parameter = next(iter(self.parts.decoder.parameters()))
        resolved, why = resolve_layers(choice, parameter.device, parameter.dtype)
        counts = patch_layers(self.parts.causal_lm, self._patches, choice)
        if not counts:
            if choice != "auto":
                raise UnsupportedError(
                    expected=f"a model with norms, rotary embedding or MLPs that are known, for layers={choice!r}",
                    got=type(self.parts.causal_lm).__name__,
                    remedy="Use layers='auto' or None.",
                )
            self._note("layers", "left alone", "no norm, rotary embedding or MLP recognised")
            return
        found = ", ".join(f"{count} {kind}" for kind, count in counts.items())
        how = "Triton kernels" if resolved == "triton" else "plain PyTorch"
        if choice == "auto" and resolved == "reference":
            self._note("layers", "left alone", f"{found}: kernels on CUDA only ({why})".replace("torch.", ""))
            return
        self._note("layers", "on", f"{found}: {how} ({why})".replace("torch.", ""))

    def add_adapters(self) -> None:
        """Add the LoRA on experts that adapters in training ask for and PEFT could not create; say so.

        ``apply`` calls it, also when it finds itself done. Adapters added after an optimizer was built are not in it.

        Raises:
            ConfigError: a target matches nothing, or half of a fused projection is named.
            UnsupportedError: a LoRA variant that experts can't have.
        """
        check_targets(self.parts)
        if missing_adapters(self.parts) and self.config.experts is None:
            raise UnsupportedError(
                expected="an implementation of experts for LoRA on experts by target_modules",
                got="experts=None",
                remedy="Leave `experts` out, or name the experts in target_parameters and let PEFT compute them.",
            )
        added = add_missing_adapters(self.parts)
        self._sync_expert_wrappers()
        if added is not None:
            self._note("adapters", "on", added)
            _warn("%s", added)
        elif experts_left_out(self.parts) and not any(row.feature == "adapters" for row in self.rows):
            frozen = "LoRA is on every linear layer and on no expert; name gate_proj, up_proj, down_proj to train those"
            self._note("adapters", "left alone", frozen)
            _warn("%s", frozen)

    def record_bases(self, model: nn.Module) -> None:
        """Let PEFT models write ``base_record.json`` beside the adapters that they save, for merges to check the base.

        ``apply`` calls it with the model that it is given, also when it finds itself done.

        Args:
            model: holds the PEFT models around this causal LM, or is one.
        """
        for peft_model in peft_models(model):
            if peft_model.get_base_model() is self.parts.causal_lm:
                record_on_save(peft_model, self._patches)
                self._note("saved adapters", "on", "save_pretrained also writes base_record.json, which merges check")

    def lacks_adapters(self) -> bool:
        """Whether an adapter asks for LoRA on experts that is not there."""
        return bool(missing_adapters(self.parts))

    def _apply_loss(self) -> None:
        if self.config.loss is None:
            self._note("loss", "left alone", "switched off in the config")
            return
        explicit = self.config.loss == "chunked"
        chunk_mib = self.config.loss_mib
        reason = patch_loss(self.parts.causal_lm, self._patches, chunk_mib, explicit=explicit)
        if reason is None:
            self._note("loss", "on", f"chunked cross entropy, {chunk_mib} MiB of logits at a time")
        elif self.config.loss == "chunked":
            raise UnsupportedError(
                expected="a causal LM with transformers' loss, for loss='chunked'",
                got=f"{type(self.parts.causal_lm).__name__}: {reason}",
                remedy="Use loss='auto' or None.",
            )
        else:
            self._note("loss", "left alone", reason)

    def _apply_checkpointing(self) -> None:
        if self.config.gradient_checkpointing is True:
            modules = self._checkpointable()
            if not modules:
                raise UnsupportedError(
                    expected="a model that supports gradient checkpointing, for gradient_checkpointing=True",
                    got=type(self.parts.causal_lm).__name__,
                    remedy="Use gradient_checkpointing='auto', or wrap its blocks with offload_checkpoint yourself.",
                )
            for module in modules:
                self._patches.set(module, "gradient_checkpointing", True)
                if not hasattr(module, "_gradient_checkpointing_func"):
                    self._patches.set(
                        module, "_gradient_checkpointing_func", functools.partial(checkpoint, use_reentrant=False)
                    )
        self.sync_checkpointing()

    def _run(self) -> None:
        vars(self.parts.causal_lm)[_APPLIED] = self
        try:
            check_targets(self.parts)
            missing_adapters(self.parts)
            if self.config.weights == "streamed":
                check_streamed(self.parts)
            self._apply_attention()
            self._apply_experts()
            self._apply_layers()
            self.sync_lora()
            self._apply_loss()
            self._apply_checkpointing()
            self.add_adapters()
            self._apply_weights()  # what trains is known now
            self.record_bases(self.model)
        except BaseException:
            self.undo()
            raise
        self._hook = self.parts.decoder.register_forward_pre_hook(
            MethodType(Applied._before_decoder, self), with_kwargs=True
        )


def _warn(message: str, *values: object) -> None:
    """Once for all processes of a run: they do the same things."""
    if is_first():
        logger.warning(message, *values)


def _adapter_names(causal_lm: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(causal_lm, "peft_config", ()))


def _can_checkpoint(module: nn.Module) -> bool:
    return hasattr(module, "gradient_checkpointing")


def _is_sharded(layer: nn.Module) -> bool:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    from torch.distributed.fsdp import FSDPModule  # takes a second, and only sharded models need it

    return is_layer(layer) and any(isinstance(module, FSDPModule) for module in layer.modules())


def _torch_checkpoint_keywords(function: Any) -> dict[str, Any] | None:
    """Keywords of a ``partial(torch.utils.checkpoint.checkpoint, ...)``; ``None`` when it is something else."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial) and not function.args:
        keywords = {**function.keywords, **keywords}
        function = function.func
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


def applied_to(model: nn.Module) -> Applied | None:
    """What ``apply`` did to ``model`` (or the causal LM inside it), if it did."""
    return vars(recognise(model).causal_lm).get(_APPLIED)


def apply(model: nn.Module, config: UnslothConfig | None = None, **options: Any) -> Applied:
    """Recognise the parts of ``model``, and replace those that ``config`` asks for on this instance.

    Works before or after PEFT wraps the model; one that is there already also records its base beside each adapter that
    it saves. Applying twice with the same options changes nothing; with other options, the first is undone.

    Args:
        model: a transformers causal LM, or PEFT's or DDP's wrapper of one. Other modules get what can be recognised.
        config: options; ``None`` for the defaults.
        options: single options, on top of ``config``.

    Returns:
        ``Applied``, with ``report()`` and ``undo()``.

    Raises:
        ConfigError: an option does not exist or has a wrong value.
        ModelError: ``model`` is not a module, or was compiled or given Hub kernels.
        UnsupportedError: something was asked for explicitly that this model or device can't do.

    The first training forward raises ``UnsupportedError`` where its batch is far from fitting on the device.
    """
    config = UnslothConfig.from_options(config, **options)
    parts = recognise(model)
    if hasattr(model, "_orig_mod") or hasattr(parts.causal_lm, "_orig_mod"):
        raise ModelError(
            expected="a model that is not compiled yet",
            got="the result of torch.compile",
            remedy="Apply first; torch.compile of a patched model is not supported, so leave torch_compile off.",
        )
    if getattr(parts.causal_lm, "use_kernels", False) is True:
        raise ModelError(
            expected="a model with transformers' own forwards",
            got="use_kernels=True, which replaces them on every train() and eval()",
            remedy="Load the model without use_kernels.",
        )
    before: Applied | None = vars(parts.causal_lm).get(_APPLIED)
    if before is not None:
        if before.config == config:
            before.sync_checkpointing()
            before.add_adapters()
            before.record_bases(model)
            return before
        before.undo()
        parts = recognise(model)
    applied = Applied(model, config, parts)
    applied._run()
    if is_first():
        logger.info("%s", applied.report())
    return applied
