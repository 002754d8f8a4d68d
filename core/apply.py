"""``apply(model, config) -> Applied``: the only door through which anything is changed."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from types import MethodType
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import nn

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.device import DeviceMemory
from unsloth_plugins.core.errors import ConflictError, ModelError, UnsupportedError
from unsloth_plugins.core.export.live import peft_models, record_on_save
from unsloth_plugins.core.models import recognise
from unsloth_plugins.core.models.adapters import check_targets, complete_adapters, missing_adapters
from unsloth_plugins.core.models.attention import ConfigSwap, take_attention
from unsloth_plugins.core.models.binding import ModelParts, is_layer
from unsloth_plugins.core.models.causal_lm import chunk_unlabelled, chunked_losses, take_loss, unpatch_loss
from unsloth_plugins.core.models.checkpointing import Checkpointing
from unsloth_plugins.core.models.experts import TakenExperts, keep_decoded, patch_expert_wrappers, take_experts
from unsloth_plugins.core.models.hub_kernels import HubKernels
from unsloth_plugins.core.models.layers import mlp_holding_bytes, take_layers
from unsloth_plugins.core.models.lora import keep_unpacked, take_lora
from unsloth_plugins.core.models.search import ModuleSearch
from unsloth_plugins.core.models.streaming import PackedWeights, check_streamed, choose_weights, packed_layers
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.weights import WeightStream
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.planner.live import check_possible, forecast, optimizer_named, outgrown
from unsloth_plugins.core.ranks import is_first, warn
from unsloth_plugins.core.report import Reported, Row, table

logger = logging.getLogger("unsloth_plugins")

_APPLIED = "_unsloth_applied"
_SMOOTHING, _EVAL = "label smoothing", "eval mode"


class Applied:
    """What ``apply`` did to one model, and the way back.

    Attributes:
        model: the model as it was given.
        config: the options in force.
        parts: what was recognised.
        store: where checkpointed activations wait; has the host byte counts.
        budget: under ``memory_policy="auto"``, what chooses the layers that are not checkpointed.
        checkpointing: whether layers are checkpointed.
        tokens_seen: tokens (padding included) that went through the decoder in training mode or with gradients.
        last_tokens: of the last such forward with gradients.
    """

    def __init__(self, model: nn.Module, config: UnslothConfig, parts: ModelParts) -> None:
        self.model, self.config, self.parts = model, config, parts
        self.store = HostStore.for_policy(config.memory_policy, config.offload_min_bytes, config.host_memory_gib)
        self.budget: MemoryBudget | None = None
        if config.memory_policy == "auto":
            self.budget = MemoryBudget(host_bytes=self.store.limit_bytes)
        self.checkpointing = Checkpointing(parts, config, self.store, self.budget)
        self.tokens_seen = self.last_tokens = self._longest = 0
        self._reported: dict[str, Reported] = {}
        self._layers = ModuleSearch(parts.decoder, is_layer)
        self._patches, self._configs = PatchSet(), ConfigSwap()
        self._hub_kernels = HubKernels(model)
        self._weights: PackedWeights | None = None
        self._adapters: tuple[str, ...] = ()
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

    @property
    def rows(self) -> list[Row]:
        """The report as data, each row as it is now, on the device that the model is on now."""
        return [each.row() for each in self._reported.values()]

    @property
    def stream(self) -> WeightStream | None:
        """Where streamed experts wait; ``None`` while all weights are resident."""
        return None if self._weights is None else self._weights.stream

    def report(self) -> str:
        """A table of what was changed, what was left alone, and why, by ``rows``."""
        self.sync_checkpointing()
        if self.tokens_seen and chunked_losses(self.parts.causal_lm) == 0:
            self._note(Row("loss", "left alone", "the trainer or the model computes its own, past the chunked one"))
        name = type(self.parts.causal_lm).__name__
        return table(f"unsloth-plugins on {name} (binding: {self.parts.binding})", self.rows)

    def expect(self, tokens: int | None = None, optimizer: str = "") -> None:
        """Predict, as a line of the report, what a step takes of the device that the model is on now.

        Says nothing where that has no memory of its own. The line stays as it is until the next call.

        Args:
            tokens: of the longest batch, padding included; ``None`` where nobody knows.
            optimizer: its name or that of its class; one that the planner does not know counts as AdamW.
        """
        found = forecast(self, tokens, optimizer=optimizer_named(optimizer))
        if found is None:
            return
        self._note(Row("memory", found.state, found.detail))
        if found.fits is False:
            warn("Batches of that length may run out of device memory: %s", found.detail)

    def expect_label_smoothing(self, on: bool) -> None:
        """Whether a trainer smooths labels: it computes that loss itself, from logits that it asks for without labels.

        They then stay lazy and the loss is computed in chunks of them. Where that can't be, a warning and a row of the
        report say so.
        """
        if not on and _SMOOTHING not in self._reported:
            return
        reason = chunk_unlabelled(self.parts.causal_lm, on)
        if not on:
            del self._reported[_SMOOTHING]
        elif reason is None:
            self._note(Row(_SMOOTHING, "on", "the trainer's, on chunks of the logits"))
        elif _SMOOTHING not in self._reported:
            self._note(Row(_SMOOTHING, "left alone", f"it takes the logits of all tokens: {reason}"))
            warn("The trainer's label smoothing takes the logits of all tokens at once: %s.", reason)

    def undo(self) -> None:
        """Restore the model: logits and gradients are bit-equal to those before ``apply``. May be called twice."""
        if vars(self.parts.causal_lm).get(_APPLIED) is not self:
            return
        self._configs.carry_back()
        unpatch_loss(self.parts.causal_lm)
        if self._weights is not None:
            self._weights.bring_back()
        self.checkpointing.undo()
        self._patches.undo()
        self._hub_kernels.switch_on()
        if self._hook is not None:
            self._hook.remove()
        del vars(self.parts.causal_lm)[_APPLIED]

    def sync_checkpointing(self) -> None:
        """Take over gradient checkpointing wherever the trainer has switched it on since.

        Trainers switch it on at the start of each run, after ``apply``; the decoder calls this before every forward in
        training mode. Layers whose checkpoint function is not torch's own (a trainer's selective checkpointing, say)
        are left to it.
        """
        self.checkpointing.sync()

    def sync_lora(self) -> None:
        """Take over the LoRA layers that PEFT has made since; the decoder calls this when there is a new adapter."""
        self._adapters = _adapter_names(self.parts.causal_lm)
        self._sync_expert_wrappers()
        if (kept := keep_unpacked(self.parts.causal_lm, self._patches)) is not None:
            self._note(kept)
        self._note(take_lora(self.parts, self.config.lora, self._patches))

    def add_adapters(self) -> None:
        """Add the LoRA on experts that adapters in training ask for and PEFT could not create; say so.

        ``apply`` calls it, also when it finds itself done. Adapters added after an optimizer was built are not in it.

        Raises:
            ConfigError: a target matches nothing, or half of a fused projection is named.
            UnsupportedError: a LoRA variant that experts can't have.
        """
        row = complete_adapters(self.parts, self.config)
        self._sync_expert_wrappers()
        if row is None or (row.state == "left alone" and row.feature in self._reported):
            return
        self._note(row)
        warn("%s", row.detail)

    def record_bases(self, model: nn.Module) -> None:
        """Let PEFT models write ``base_record.json`` beside the adapters that they save, for merges to check the base.

        ``apply`` calls it with the model that it is given, also when it finds itself done.

        Args:
            model: holds the PEFT models around this causal LM, or is one.
        """
        for peft_model in peft_models(model):
            if peft_model.get_base_model() is self.parts.causal_lm:
                record_on_save(peft_model, self._patches)
                detail = "save_pretrained also writes base_record.json, which merges check"
                self._note(Row("saved adapters", "on", detail))

    def _run(self) -> None:
        vars(self.parts.causal_lm)[_APPLIED] = self
        try:
            if (switched := self._hub_kernels.switch_off()) is not None:
                self._note(switched)
            check_targets(self.parts)
            missing_adapters(self.parts)
            if self.config.weights == "streamed":
                check_streamed(self.parts)
            self._note(take_attention(self.parts, self.config, self._patches, self._configs))
            self._take_experts()
            self._note(take_layers(self.parts, self.config, self._patches))
            self.sync_lora()
            self._note(take_loss(self.parts.causal_lm, self.config, self._patches))
            self._note(self.checkpointing)
            if self.config.gradient_checkpointing is True:
                self.checkpointing.switch_on()
            self.checkpointing.sync()
            self.add_adapters()
            self._place_weights()  # what trains is known now
            self.record_bases(self.model)
        except BaseException:
            self.undo()
            raise
        self._hook = self.parts.decoder.register_forward_pre_hook(
            MethodType(Applied._before_decoder, self), with_kwargs=True
        )

    def _note(self, part: Reported) -> None:
        self._reported[part.feature] = part

    def _take_experts(self) -> None:
        taken = take_experts(self.parts, self.config, self._patches)
        self._note(taken)
        if self.budget is not None and isinstance(taken, TakenExperts):
            self.budget.holding_bytes = taken.holding_bytes  # acts on CUDA only, where the model may go after this

    def _sync_expert_wrappers(self) -> None:
        if self.config.experts is not None:
            patch_expert_wrappers(self.parts, self._patches)

    def _place_weights(self) -> None:
        if not packed_layers(self.parts):
            return
        streamed, why = choose_weights(self.parts, self.config.weights, DeviceMemory())
        self._weights = PackedWeights(self.parts, why)
        self._note(self._weights)
        if streamed:
            self._weights.send(why, self._patches)
        elif self.budget is not None and self.config.experts is not None:
            self.budget.decoded = keep_decoded(self._weights.layers, self._patches)

    def _make_room(self, tokens: int) -> None:
        """Before a longer step than any so far: packed experts give way where ``weights="auto"`` and it takes that."""
        weights = self._weights
        if tokens <= self._longest or weights is None or weights.stream is not None or self.config.weights != "auto":
            return
        self._longest = tokens
        if self.budget is not None:
            self.budget.rest()  # decoded weights are no reason to stream: a longer step drops them anyway
        if (why := outgrown(self, tokens, DeviceMemory())) is None:
            return
        if self.budget is not None:
            self.budget.decoded = None
        weights.send(why, self._patches)
        warn("Packed experts go to host memory: %s.", why)

    def _before_decoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        grads = torch.is_grad_enabled()
        if self.budget is not None and not (module.training and grads):
            self.budget.rest()
        if not module.training and not (grads and any(p.requires_grad for p in module.parameters())):
            return
        if _adapter_names(self.parts.causal_lm) != self._adapters:
            self.sync_lora()
        tokens, device = _tokens_of(args, kwargs)
        self.tokens_seen += tokens
        if not grads:
            return
        self.sync_checkpointing()
        if not module.training:
            self._warn_of_eval_mode()
            return  # nothing is checkpointed, so nothing is to be planned
        self._make_room(tokens)
        if not self.last_tokens and tokens:
            check_possible(self, tokens)
        if self.budget is not None:
            if device.type == "cuda" and not any(layer.experts for layer in self.parts.layers):
                self.budget.holding_bytes = mlp_holding_bytes(self.parts.decoder, self._layers(), device)
            self.budget.begin(device, tokens)
        self.last_tokens = tokens

    def _warn_of_eval_mode(self) -> None:
        if not self.checkpointing.on or _EVAL in self._reported:
            return
        self._note(Row(_EVAL, "on", "layers skip gradient checkpointing in it: call train() of the model"))
        warn(
            "%s trains in eval mode, in which its layers skip gradient checkpointing and dropout. from_pretrained "
            "gives a model in eval mode: call train() of it.",
            type(self.parts.causal_lm).__name__,
        )


def _adapter_names(causal_lm: nn.Module) -> tuple[str, ...]:
    return tuple(getattr(causal_lm, "peft_config", ()))


def _tokens_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, torch.device]:
    """How many tokens a call of the decoder has, padding included, and where; 0 where it is called in another way."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    if ids is not None:
        return ids.numel(), ids.device
    if (embeds := kwargs.get("inputs_embeds")) is not None:
        return embeds.shape[:-1].numel(), embeds.device
    return 0, torch.device("cpu")


def applied_to(model: nn.Module) -> Applied | None:
    """What ``apply`` did to ``model`` (or the causal LM inside it), if it did."""
    return vars(recognise(model).causal_lm).get(_APPLIED)


def lacks_adapters(model: nn.Module) -> bool:
    """Whether an adapter of ``model``, patched or not, asks for LoRA on experts that ``apply`` would have to add."""
    return bool(missing_adapters(recognise(model)))


def check_optimizers(optimizers: Sequence[Any], applied: tuple[Applied, ...], remedy: str) -> None:
    """Refuse optimizers that train a model without the adapters on its experts.

    ``apply`` adds those: an optimizer that was made before it does not know them. A model of which nothing is
    optimized, such as a reference, passes.

    Args:
        optimizers: all of the run.
        applied: by model.
        remedy: what the error says to do.

    Raises:
        ConflictError: naming such an adapter.
    """
    optimized = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    for each in applied:
        trainable = {name: p for name, p in each.model.named_parameters() if p.requires_grad}
        lost = [name for name, p in trainable.items() if id(p) not in optimized]
        added = [name for name in lost if ".experts." in name and ".lora_" in name]
        if added and len(lost) < len(trainable):
            raise ConflictError(
                expected="adapters on experts to exist before the optimizer",
                got=f"{len(added)} that it lacks, such as {added[0]}",
                remedy=remedy,
            )


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
        ModelError: ``model`` is not a module, or was compiled, or has Hub kernels that transformers can't take back.
        UnsupportedError: something was asked for explicitly that this model or device can't do.

    The first training forward raises ``UnsupportedError`` where its batch is far from fitting on the device.
    """
    config = UnslothConfig.from_options(config, **options)
    parts = recognise(model)
    if hasattr(model, "_orig_mod") or hasattr(parts.causal_lm, "_orig_mod"):
        raise ModelError(
            expected="a model that is not compiled",
            got="the result of torch.compile",
            remedy="Remove torch.compile; patched forwards and offloaded checkpointing break its graph.",
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
