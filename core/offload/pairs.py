"""Nested checkpoints of two layers: the input of the second is not kept, but computed again from the first's.

Backward asks for the second layer's input, which runs the first layer once more and saves nothing of it; the first
layer's own recompute follows as usual. So of each pair the first layer runs three times and the second twice, and half
as many inputs wait. This is a way to pack one saved tensor, not a region around two layers: hidden states in between
are real, and whoever hooks, reads or replaces them needs to know nothing. A tensor that is not the first layer's very
output is kept as usual.

Source: recursive checkpointing, Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", section 4.3.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import get_device_states, set_device_states

from unsloth_plugins.core.offload.host import HostStore
from unsloth_plugins.core.offload.transfers import version_of

_ORIGIN = "_unsloth_origin"
Key = tuple[Any, ...]


class Surroundings:
    """Random states and autocast of a run, for the same function to be run again.

    Args:
        args: of the function; tell the devices whose random states count.
        random: whether to keep random states at all.
    """

    def __init__(self, args: tuple[Any, ...], random: bool) -> None:
        self._random = random
        tensor = next((each for each in args if isinstance(each, torch.Tensor)), None)
        self._type = "cpu" if tensor is None else tensor.device.type
        self._casts = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", self._type}
            if torch.amp.is_autocast_available(kind)
        ]
        if random:
            self._cpu_state = torch.get_rng_state()
            self._devices, self._states = get_device_states(*args)

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Inside, the states are those of the first run; afterwards what they were before."""
        with contextlib.ExitStack() as stack:
            if self._random:
                kind = self._type if self._devices else "cuda"
                stack.enter_context(torch.random.fork_rng(self._devices, device_type=kind))
                torch.set_rng_state(self._cpu_state)
                set_device_states(self._devices, self._states, device_type=kind)
            for kind, enabled, dtype, cached in self._casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cached))
            yield


class _Input:
    """A saved argument of the first layer, wanted twice in backward and fetched once."""

    __slots__ = ("_here", "_packed", "_store", "requires_grad")

    def __init__(self, store: HostStore, tensor: torch.Tensor) -> None:
        self._store, self._packed, self.requires_grad = store, store.pack(tensor), tensor.requires_grad
        self._here: torch.Tensor | None = None

    def first(self) -> torch.Tensor:
        """For the run that computes the output again; stays on the device until ``second``."""
        self._here = self._store.unpack(self._packed)
        return self._here.detach().requires_grad_(self.requires_grad)

    def second(self) -> torch.Tensor:
        """For the layer's own recompute."""
        here, self._here = self._here, None
        return self._store.unpack(self._packed) if here is None else here


class Origin:
    """A layer's output as the run that gives it.

    Args:
        function: the layer.
        args: its arguments; the tensors among them pass through ``pack``, in order. torch before 2.13 saves an empty
            tensor of its own besides.
        store: where they wait.
        random: whether the run's random states are to be kept.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], store: HostStore, random: bool) -> None:
        self._function, self._store = function, store
        self._args = tuple(None if isinstance(each, torch.Tensor) else each for each in args)
        self._places = [place for place, each in enumerate(args) if isinstance(each, torch.Tensor)]
        self._keys = [_key(args[place]) for place in self._places]
        self._inputs: list[_Input] = []
        self._surroundings = Surroundings(args, random)
        self.storage: object = None  # of the output, weakly

    def pack(self, tensor: torch.Tensor) -> Any:
        """The hook for the layer's arguments; what is none of them goes to the store."""
        here = len(self._inputs)
        if here == len(self._keys) or _key(tensor) != self._keys[here]:
            return self._store.pack(tensor)
        self._inputs.append(_Input(self._store, tensor))
        return self._inputs[-1]

    def unpack(self, packed: Any) -> torch.Tensor:
        """The inverse of ``pack``."""
        return packed.second() if isinstance(packed, _Input) else self._store.unpack(packed)

    def compute(self) -> torch.Tensor:
        """The output, from another run that saves nothing."""
        assert len(self._inputs) == len(self._places), "the checkpoint did not save all of its arguments"
        args = list(self._args)
        for place, each in zip(self._places, self._inputs, strict=True):
            args[place] = each.first()
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _nobody_asks)
        with self._surroundings.again(), torch.enable_grad(), hooks:  # with gradients: the same code as the first time
            hidden = _hidden(self._function(*args))
        assert hidden is not None
        return hidden.detach()


class FromOrigin:
    """Hooks for the arguments of a second layer: what the first gave is not kept.

    Args:
        origin: of the argument with ``key``.
        store: where the others wait.
    """

    def __init__(self, origin: Origin, key: Key, store: HostStore) -> None:
        self._origin, self._key, self._store = origin, key, store

    def pack(self, tensor: torch.Tensor) -> Any:
        """The origin, or what the store makes of a tensor that is not its output."""
        return self._origin if _key(tensor) == self._key else self._store.pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        """The inverse of ``pack``."""
        return packed.compute() if isinstance(packed, Origin) else self._store.unpack(packed)


class Pairs:
    """Outputs of first layers that no second layer has taken yet, for the layers of one model.

    An output is known by its memory, since what lies between may hand on another tensor over it. It holds its origin
    itself, and the origin a weak reference that keeps the key from meaning another storage, even where it outlives it.
    """

    def __init__(self) -> None:
        self._origins: weakref.WeakValueDictionary[Key, Origin] = weakref.WeakValueDictionary()

    def note(self, out: Any, origin: Origin) -> None:
        """Remember where a layer's output comes from, as long as it lives."""
        hidden = _hidden(out)
        if hidden is not None and hidden.requires_grad:
            vars(hidden)[_ORIGIN] = origin
            origin.storage = StorageWeakRef(hidden.untyped_storage())
            self._origins[_key(hidden)] = origin

    def hooks(self, args: tuple[Any, ...], store: HostStore) -> FromOrigin | None:
        """Hooks for a layer whose first argument is such an output, unchanged; only the first who asks gets them."""
        if not args or not isinstance(args[0], torch.Tensor):
            return None
        key = _key(args[0])
        origin = self._origins.pop(key, None)
        vars(args[0]).pop(_ORIGIN, None)
        return None if origin is None else FromOrigin(origin, key, store)


def _hidden(out: Any) -> torch.Tensor | None:
    hidden = out[0] if isinstance(out, tuple) and out else out
    return hidden if isinstance(hidden, torch.Tensor) else None


def _key(tensor: torch.Tensor) -> Key:
    storage = tensor.untyped_storage()._cdata
    return storage, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), version_of(tensor)


def _nobody_asks(packed: None) -> torch.Tensor:
    raise AssertionError("a run without a backward was asked for its saved tensors")
