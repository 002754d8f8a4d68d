"""A drop-in for ``torch.utils.checkpoint.checkpoint`` whose inputs wait in host memory.

Non-reentrant checkpointing saves exactly the tensor arguments of the region through autograd, so saved-tensor hooks
around the call see those and nothing else; what the region itself saves is dropped and recomputed (Chen et al. 2016,
"Training Deep Nets with Sublinear Memory Cost").
"""

from __future__ import annotations

import contextlib
import functools
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.offload.budget import MemoryBudget
from unsloth_plugins.core.offload.draws import Draws
from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.pairs import Origin, Pairs
from unsloth_plugins.core.offload.survivors import Survivors
from unsloth_plugins.core.offload.tail import holding, telling

_KEYWORDS = ("use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop")


@functools.cache
def _common_store() -> HostStore:
    return HostStore()


def offload_checkpoint(
    function: Callable[..., Any], *args: Any, store: HostStore | None = None, use_reentrant: bool = False, **kwargs: Any
) -> Any:
    """Run ``function(*args, **kwargs)``, keep only its tensor arguments, on the host, and recompute it in backward.

    Args:
        function: the region. RNG state and autocast are replayed.
        store: where the arguments wait and are counted; one ``HostStore()`` for all calls that give none.
        use_reentrant: only ``False`` is served; see the error.
        kwargs: keyword arguments of ``function``, and ``preserve_rng_state``, ``context_fn``, ``determinism_check``,
            ``debug``, ``early_stop`` of ``torch.utils.checkpoint.checkpoint``.

    Raises:
        UnsupportedError: ``use_reentrant=True`` was asked for.
    """
    return _checkpoint_with(store or _common_store(), function, args, kwargs | {"use_reentrant": use_reentrant})


def _checkpoint_with(hooks: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's checkpoint of ``function(*args)``, whose tensor arguments pass through ``hooks``."""
    if kwargs.pop("use_reentrant", False):
        raise UnsupportedError(
            expected="non-reentrant checkpointing",
            got="use_reentrant=True",
            remedy="Set gradient_checkpointing_kwargs={'use_reentrant': False}, or leave it out.",
        )
    if kwargs.get("preserve_rng_state", True) and not _debugs(kwargs) and Draws.serve(args):
        kwargs["preserve_rng_state"] = False
        kwargs["context_fn"] = functools.partial(_contexts, Draws(args), kwargs.get("context_fn"))
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        return checkpoint(_holding_nothing, function, *args, use_reentrant=False, **kwargs)


def _debugs(kwargs: dict[str, Any]) -> bool:
    """Whether torch will trace the region, for which it allows no contexts of others."""
    everywhere = torch.utils.checkpoint._checkpoint_debug_enabled  # set_checkpoint_debug_enabled
    return bool(kwargs.get("debug")) if everywhere is None else everywhere


def _contexts(draws: Draws, more: Callable[[], tuple[Any, Any]] | None) -> tuple[Any, Any]:
    """Contexts of the forward and the recompute: random numbers, and what else was asked for inside of that."""
    outer = draws.contexts()
    return outer if more is None else tuple(map(_Nested, outer, more()))  # type: ignore[return-value]


class _Nested:
    """One context manager inside another, to be entered as often as they can be."""

    def __init__(self, outer: Any, inner: Any) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        try:
            self._inner.__enter__()
        except BaseException:
            self._outer.__exit__(*sys.exc_info())
            raise

    def __exit__(self, *error: Any) -> None:
        try:
            self._inner.__exit__(*error)
        finally:
            self._outer.__exit__(*error)


def _holding_nothing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """In forward and in recompute alike, or they would not save the same."""
    with holding(False):
        return function(*args, **kwargs)


@contextlib.contextmanager
def offload_saved_tensors(store: HostStore | None = None) -> Iterator[HostStore]:
    """Send all that autograd saves inside to the host, and fetch it in backward: memory for no recompute.

    What is a parameter, small, or no plain tensor stays on the device; what several operations save is sent once.
    Backward may run outside.

    Args:
        store: where the tensors wait and are counted; a fresh ``HostStore(True)`` if not given. Give the same one each
            step, so that its host memory is used again.
    """
    store = store or HostStore(True)
    with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
        yield store


class LayerCheckpoint:
    """What stands in for a layer's ``_gradient_checkpointing_func``; keeps the user's checkpointing keywords.

    Args:
        store: where inputs wait.
        keywords: of ``torch.utils.checkpoint.checkpoint``.
        budget: says which layers run without a checkpoint; ``None``: none of them.
        index: of the layer in the model, from the front.
        pairs: of the model, to keep the input of every second layer only; ``None`` keeps all.
    """

    def __init__(
        self,
        store: HostStore,
        keywords: dict[str, Any],
        budget: MemoryBudget | None = None,
        index: int = 0,
        pairs: Pairs | None = None,
    ) -> None:
        self.store, self.keywords, self.budget, self.index, self.pairs = store, keywords, budget, index, pairs

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run ``function(*args, **kwargs)``, checkpointed or not."""
        budget, plan = self.budget, self.budget.plan if self.budget is not None else None
        if self.index == 0 and args and isinstance(args[0], torch.Tensor):
            checkpointed = self.store.layers if plan is None else plan.first_kept
            count = checkpointed if self.pairs is None else -(-checkpointed // 2)
            if budget is not None:
                budget.expect_inputs(_bytes_of(args[:1]) * count)
            self.store.moving = None if budget is None else budget.inputs_on_host
            self.store.reserve(args[0], count)
        self.store.moving = None if budget is None else budget.inputs_on_host
        if budget is None:
            with telling(self.store.tail_is_over):
                return self._checkpointed(function, args, kwargs)
        if budget.keeps(self.index):
            with holding(budget.holds(self.index)):
                out = function(*args, **_without_ours(kwargs))
        else:
            stayed = self.store.stayed_bytes
            out = self._checkpointed(function, args, kwargs)
            budget.stayed(min(self.store.stayed_bytes - stayed, _bytes_of(args)))
        if self.index == budget.layers - 1:
            last = out[0] if isinstance(out, tuple) else out
            if isinstance(last, torch.Tensor) and last.requires_grad:
                last.register_hook(budget.backward_started)
        return out

    def _checkpointed(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        keywords, run = self.keywords | kwargs, function
        second = None if self.pairs is None else self.pairs.hooks(args, self.store)
        budget = self.budget
        measure = budget is not None and budget.wants_measure(self.index)
        survivors = Survivors(budget is not None and budget.lets_survive(self.index) and not measure)
        if "context_fn" not in keywords and (measure or survivors.keep):
            keywords["context_fn"] = survivors.contexts
        if measure:
            run = self._measuring(function, args, survivors, waits=second is None)
        if second is not None:
            return _checkpoint_with(second, run, args, keywords)
        if self.pairs is None or self.index + 1 == self.store.layers:
            return _checkpoint_with(self.store, run, args, keywords)
        random = bool(keywords.get("preserve_rng_state", True))
        again = survivors.again(functools.partial(function, **_without_ours(kwargs)))
        origin = Origin(again, args, self.store, random)
        out = _checkpoint_with(origin, run, args, keywords)
        self.pairs.note(out, origin)
        return out

    def _measuring(
        self, function: Callable[..., Any], args: tuple[Any, ...], survivors: Survivors, waits: bool
    ) -> Callable[..., Any]:
        """``function`` that tells the budget what it leaves on the device when it runs the second time."""
        budget, index = self.budget, self.index
        assert budget is not None
        tokens, input_bytes = budget.tokens, _bytes_of(args)
        device = next((each.device for each in args if isinstance(each, torch.Tensor)), None)
        runs = 0

        def measured(*args: Any, **kwargs: Any) -> Any:
            nonlocal runs
            runs += 1
            if runs != 2 or device is None:
                return function(*args, **kwargs)
            before = budget.memory.allocated(device)
            try:
                return function(*args, **kwargs)
            except Exception as error:
                if type(error).__module__ == checkpoint.__module__:  # the recompute ended early, it is no failure
                    traceback.clear_frames(error.__traceback__)  # they hold what a finished layer does not
                raise
            finally:
                left = max(budget.memory.allocated(device) - before, 0)
                waiting = input_bytes if waits else 0
                budget.measured(index, tokens, left + input_bytes, waiting, survivors.offered_bytes)

        return measured


def _bytes_of(args: tuple[Any, ...]) -> int:
    return sum(each.numel() * each.element_size() for each in args if isinstance(each, torch.Tensor))


def _without_ours(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords that are for the layer and not for the checkpoint."""
    return {name: value for name, value in kwargs.items() if name not in _KEYWORDS}
