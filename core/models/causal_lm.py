"""How the parts of a transformers causal LM are replaced on one instance.

Replacements are functions of this module bound to the instance (``types.MethodType``) that find their state on the
instance, so a deep copy of a patched model is a patched model of its own, and a function that outlives ``undo``
(because a trainer wrapped it) falls through to the class's method.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from unsloth_plugins.core.config import UnslothConfig
from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.loss import LazyLogits, linear_cross_entropy
from unsloth_plugins.core.loss.lazy import Chunks
from unsloth_plugins.core.loss.op import head_cross_entropy
from unsloth_plugins.core.patches import PatchSet
from unsloth_plugins.core.ranks import is_distributed
from unsloth_plugins.core.report import Row

_HEAD, _LOSS = "_unsloth_head", "_unsloth_loss"


@dataclass(eq=False)
class HeadState:
    """On the output embedding. ``active`` while its logits stay lazy, ``running`` inside ``previous``.

    ``chunks``: for who computes a loss from logits without labels; ``None`` while there are labels.
    """

    active: bool = False
    chunks: Chunks | None = None
    previous: Callable[..., Any] | None = None
    running: bool = False


@dataclass(eq=False)
class LossState:
    """On the causal LM: the size of the loss's chunks, the head that is patched, and the forward that was there.

    With ``explicit`` a labelled forward without a chunked loss is an error; with ``unlabelled`` logits stay lazy
    without labels too.
    """

    chunks: Chunks
    head: nn.Module
    head_patches: PatchSet
    previous_loss: Callable[..., torch.Tensor]
    previous_forward: Callable[..., Any] | None
    explicit: bool
    unlabelled: bool = False
    running: bool = False


def _through(state: HeadState | LossState, previous: Callable[..., Any] | None, module: nn.Module, *args, **kwargs):  # type: ignore[no-untyped-def]
    """What was there before: ``previous``, or the class's forward.

    ``previous`` may be a trainer's wrapper around a replacement of ours that ``undo`` had to leave to its owner. That
    one finds ``running`` set when it is reached again, and goes to the class.
    """
    if previous is None or state.running:
        return type(module).forward(module, *args, **kwargs)
    state.running = True
    try:
        return previous(*args, **kwargs)
    finally:
        state.running = False


def _plain_head(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """The head's own forward, past our replacement."""
    state = vars(head).get(_HEAD)
    if state is None:
        state = HeadState()
    return _through(state, state.previous, head, hidden)  # type: ignore[no-any-return]


def _captured_head(
    head: nn.Module, versions: dict[nn.Parameter, int], autocast: bool, dtype: torch.dtype, hidden: torch.Tensor
) -> torch.Tensor:
    """The head under the autocast state in which the model called it, with the weights that it had then.

    Raises:
        UnsupportedError: an optimizer has changed them since.
    """
    if any(parameter._version != version for parameter, version in versions.items()):
        raise UnsupportedError(
            expected="logits to be read before the weights of the head that gives them change",
            got="logits of a forward before the optimizer's step, which nobody has computed so far",
            remedy="Read them before the step, with outputs.logits.detach() if they are for later, or set loss=None.",
        )
    with torch.autocast(hidden.device.type, dtype=dtype if autocast else None, enabled=autocast):
        return _plain_head(head, hidden)


def _head_forward(self: nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    state: HeadState | None = vars(self).get(_HEAD)
    if state is None:
        return type(self).forward(self, hidden, *args, **kwargs)
    if not state.active or args or kwargs:
        return _through(state, state.previous, self, hidden, *args, **kwargs)  # type: ignore[no-any-return]
    device = hidden.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else hidden.dtype
    n_vocab: int = getattr(self, "out_features", None) or self.weight.shape[0]  # type: ignore
    parameters = self.parameters() if self._modules else self._parameters.values()  # most heads need no walk
    versions = {each: each._version for each in parameters if each is not None and each.requires_grad}
    head = functools.partial(_captured_head, self, versions, autocast, dtype)
    return LazyLogits(hidden, head, n_vocab, dtype, chunks=state.chunks)


def _linear_of(head: nn.Module) -> nn.Linear | None:
    """The plain linear layer that computes the logits, or ``None`` when more than that happens (LoRA, 4-bit)."""
    copies = getattr(head, "modules_to_save", None)
    if isinstance(copies, nn.ModuleDict):
        names = [name for name in getattr(head, "active_adapters", ()) if name in copies]
        head = copies[names[0]] if names and not head.disable_adapters else head.original_module  # type: ignore
    plain = type(head).forward is nn.Linear.forward and not head._forward_hooks and not head._forward_pre_hooks
    state = vars(head).get(_HEAD)
    own = vars(head).get("forward")
    if not plain or (own is not None and (state is None or state.previous is not None)):
        return None
    return head  # type: ignore[return-value]


def _loss(
    self: nn.Module,
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int | None = None,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    **kwargs: Any,
) -> torch.Tensor:
    """Same contract as transformers' ``ForCausalLMLoss``; logits that nobody computed yet stay uncomputed.

    ``label_smoothing`` is torch's, and given to the model's forward; transformers' loss takes it and does nothing.
    """
    state: LossState = vars(self)[_LOSS]
    if not isinstance(logits, LazyLogits) and not label_smoothing:
        return state.previous_loss(
            logits=logits,
            labels=labels,
            vocab_size=vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=shift_labels,
            **kwargs,
        )
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    labels_N = shift_labels.reshape(-1).to(logits.device)
    options: dict[str, Any] = dict(
        num_items=num_items_in_batch,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        chunk_mib=state.chunks.mib,
    )
    n_vocab = logits.shape[-1]
    if not isinstance(logits, LazyLogits):  # somebody read them
        logits_NV = logits.reshape(-1, n_vocab)
        return head_cross_entropy(logits_NV, lambda logits_CV: logits_CV, n_vocab, labels_N, **options)
    state.chunks.losses += 1
    options["transform"] = logits.transform if logits.steps else None
    hidden_NH = logits.hidden.reshape(-1, logits.hidden.shape[-1])
    linear = _linear_of(state.head)
    if linear is None:
        return head_cross_entropy(hidden_NH, logits.head, n_vocab, labels_N, **options)
    return linear_cross_entropy(hidden_NH, linear.weight, labels_N, bias_V=linear.bias, **options)


@functools.cache
def _forward_with_lazy_head(class_forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the same signature under which the head is lazy with labels, and without where asked for."""
    signature = inspect.signature(class_forward)

    @functools.wraps(class_forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        state: LossState | None = vars(self).get(_LOSS)
        if state is None or state.running:
            return type(self).forward(self, *args, **kwargs)
        run = functools.partial(_through, state, state.previous_forward, self)
        labels = kwargs.get("labels")
        if labels is None and args:
            labels = signature.bind_partial(self, *args).arguments.get("labels")
        if labels is None and not state.unlabelled:
            return run(*args, **kwargs)
        _follow_head(self, state)
        head_state: HeadState = vars(state.head)[_HEAD]
        head_state.active, losses = True, state.chunks.losses
        head_state.chunks = state.chunks if labels is None else None
        try:
            output = run(*args, **kwargs)
        finally:
            head_state.active, head_state.chunks = False, None
        if state.explicit and labels is not None and state.chunks.losses == losses:
            raise UnsupportedError(
                expected="a model that computes its loss by transformers' loss_function, for loss='chunked'",
                got=f"{type(self).__name__}, which computes one of its own",
                remedy="Use loss='auto' or None.",
            )
        return output

    return forward


def _patch_head(head: nn.Module, patches: PatchSet) -> None:
    patches.set(head, _HEAD, HeadState(previous=vars(head).get("forward")))
    patches.set(head, "forward", MethodType(_head_forward, head))


def _follow_head(causal_lm: nn.Module, state: LossState) -> None:
    """PEFT may have wrapped the head since: move our replacement to the module that is the head now."""
    head = causal_lm.get_output_embeddings()  # type: ignore[operator]
    if head is not state.head:
        state.head_patches.undo()
        state.head = head
        _patch_head(head, state.head_patches)


def take_loss(causal_lm: nn.Module, config: UnslothConfig, patches: PatchSet) -> Row:
    """Chunk the loss, where ``config`` asks for it and the model lets it, and say so.

    Raises:
        UnsupportedError: it was asked for, and the model computes another loss than transformers'.
    """
    if config.loss is None:
        return Row("loss", "left alone", "switched off in the config")
    reason = _patch_loss(causal_lm, patches, config.loss_mib, explicit=config.loss == "chunked")
    if reason is None:
        return Row("loss", "on", f"chunked cross entropy, at most {config.loss_mib} MiB of logits at a time")
    if config.loss == "chunked":
        raise UnsupportedError(
            expected="a causal LM with transformers' loss, for loss='chunked'",
            got=f"{type(causal_lm).__name__}: {reason}",
            remedy="Use loss='auto' or None.",
        )
    return Row("loss", "left alone", reason)


def _patch_loss(causal_lm: nn.Module, patches: PatchSet, chunk_mib: int, *, explicit: bool) -> str | None:
    """Chunk the loss of a causal LM. ``explicit``: a forward with labels whose loss is not chunked is an error.

    Returns:
        ``None`` when done, or the reason why this model's loss can't be taken over.
    """
    from transformers.loss.loss_utils import ForCausalLMLoss

    head_of = getattr(causal_lm, "get_output_embeddings", None)
    head = head_of() if callable(head_of) else None
    if head is None:
        return "it has no output embedding"
    if getattr(causal_lm, "loss_function", None) is not ForCausalLMLoss:
        return "it computes a loss of its own, not transformers' causal LM loss"
    if hasattr(head, "_hf_hook"):
        return "its head is moved between devices by accelerate"
    state = LossState(Chunks(chunk_mib), head, PatchSet(), ForCausalLMLoss, vars(causal_lm).get("forward"), explicit)
    _patch_head(head, state.head_patches)
    patches.set(causal_lm, _LOSS, state)
    patches.set(causal_lm, "_loss_function", MethodType(_loss, causal_lm))
    patches.set(causal_lm, "forward", MethodType(_forward_with_lazy_head(type(causal_lm).forward), causal_lm))
    return None


def unpatch_loss(causal_lm: nn.Module) -> None:
    """Free the head; the rest is in the patch set given to ``take_loss``."""
    state: LossState | None = vars(causal_lm).get(_LOSS)
    if state is not None:
        state.head_patches.undo()
    for module in causal_lm.modules():  # PEFT's copies of a patched head
        if vars(module).pop(_HEAD, None) is not None:
            vars(module).pop("forward", None)


def chunk_unlabelled(causal_lm: nn.Module, wanted: bool) -> str | None:
    """Let logits that were asked for without labels stay lazy up to the log-probabilities of labels, or no longer.

    Returns:
        ``None`` when done, or the reason why logits are computed for all tokens.
    """
    state: LossState | None = vars(causal_lm).get(_LOSS)
    if state is None:
        return "the loss is not chunked"
    several = wanted and is_distributed()
    state.unlabelled = wanted and not several
    return "DDP and FSDP look in the model's output for what takes part in backward" if several else None


def chunked_losses(causal_lm: nn.Module) -> int | None:
    """How many losses were computed in chunks so far; ``None`` where the loss is not patched."""
    state: LossState | None = vars(causal_lm).get(_LOSS)
    return None if state is None else state.chunks.losses
