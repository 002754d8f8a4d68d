"""Logits that are computed only when someone reads them.

While a model is called with labels, its head returns ``LazyLogits``: a tensor of the right shape, dtype and device
that holds the hidden states. The loss reads those; anything else that touches the logits (``compute_metrics``, a
custom loss) gets ordinary ones, computed at that moment with the gradient attached.

Where a trainer computes its loss from logits that it asked for without labels, as transformers' label smoothing does,
they may stay lazy up to the log-probabilities: those of the labels and their sums are computed chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from unsloth_plugins.core.loss.op import token_log_probs
from unsloth_plugins.core.loss.reference import Transform

_Head = Callable[[torch.Tensor], torch.Tensor]


@dataclass(eq=False)
class Chunks:
    """MiB of logits alive at once in a chunked loss, and how many losses were computed so."""

    mib: int
    losses: int = 0


class _Lazy(torch.Tensor):
    """A tensor of known shape, dtype and device that is computed when somebody reads it."""

    _real: torch.Tensor | None

    @staticmethod
    def _of(cls: type, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        self = make(cls, shape, dtype=dtype, device=device, requires_grad=False)
        self._real = None
        return self

    def materialize(self) -> torch.Tensor:
        """The tensor itself, computed once; once more where it was first read without gradients."""
        raise NotImplementedError

    def _stays_lazy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``func`` gives without reading the tensor, or ``None``. ``args`` are without the tensor itself."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, _Lazy) and first._real is None:
            if func in _GRAPH:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)  # DDP and FSDP2 look at every output: that must not compute it
            if (out := first._stays_lazy(func, getattr(func, "__name__", ""), args[1:], kwargs)) is not None:
                return out
        real = torch.utils._pytree.tree_map_only(_Lazy, lambda lazy: lazy.materialize(), (args, kwargs))
        return func(*real[0], **real[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        real = torch.utils._pytree.tree_map_only(_Lazy, lambda lazy: lazy.materialize(), (args, kwargs or {}))
        return func(*real[0], **real[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)


class LazyLogits(_Lazy):
    """Logits [..., V] of ``hidden`` [..., H], not computed yet.

    Until then they are in no graph: ``requires_grad`` is ``False`` and ``grad_fn`` is ``None``.

    Elementwise steps that models put after the head (scaling by a number, tanh, a change of dtype) are remembered
    instead of forcing the computation, so softcapped and scaled logits stay lazy. With ``chunks`` so do a choice of
    tokens and the log-probabilities.
    """

    hidden: torch.Tensor
    head: _Head
    steps: tuple[Transform, ...]
    chunks: Chunks | None

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        head: _Head,
        n_vocab: int,
        dtype: torch.dtype,
        steps: tuple[Transform, ...] = (),
        chunks: Chunks | None = None,
    ) -> LazyLogits:
        self: LazyLogits = _Lazy._of(cls, (*hidden.shape[:-1], n_vocab), dtype, hidden.device)
        self.hidden, self.head, self.steps, self.chunks = hidden, head, steps, chunks
        return self

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """The remembered elementwise steps, applied to computed logits."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def materialize(self) -> torch.Tensor:
        real = self._real
        if real is None or (torch.is_grad_enabled() and self.hidden.requires_grad and not real.requires_grad):
            self._real = real = self.transform(self.head(self.hidden)).to(self.dtype)
        return real

    def _twin(
        self, hidden: torch.Tensor | None = None, dtype: torch.dtype | None = None, *steps: Transform
    ) -> LazyLogits:
        hidden = self.hidden if hidden is None else hidden
        return LazyLogits(hidden, self.head, self.shape[-1], dtype or self.dtype, (*self.steps, *steps), self.chunks)

    def _stays_lazy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "clone":  # DDP's, where it looks for unused parameters
            return self._twin()
        if self.chunks is not None:
            if name == "__getitem__" and _chooses_tokens(args[0], self.ndim):
                return self._twin(self.hidden[args[0]])
            if name == "contiguous" and not args and not kwargs:
                return self
            if name == "log_softmax" and _is_last(kwargs.get("dim", *args[:1]), self.ndim):
                return None if kwargs.get("dtype") is not None or len(args) > 1 else LazyLogProbs(self)
        if name in ("float", "tanh") and not args and not kwargs:
            return self._twin(None, torch.float32 if name == "float" else None, func)
        if name == "to" and len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            return self._twin(None, args[0], lambda logits: logits.to(args[0]))
        if name in _SCALAR_STEPS and len(args) == 1 and isinstance(args[0], int | float) and not kwargs:
            return self._twin(None, None, lambda logits: func(logits, args[0]))
        return None


class LazyLogProbs(_Lazy):
    """``factor * log_softmax(logits)`` over the vocabulary, float32 or wider.

    Those of labels and the sums over the vocabulary are computed together, at the first of the two readings.
    """

    logits: LazyLogits
    factor: int
    _sums: torch.Tensor | None

    @staticmethod
    def __new__(cls, logits: LazyLogits, factor: int = 1) -> LazyLogProbs:
        dtype = torch.promote_types(logits.dtype, torch.float32)
        self: LazyLogProbs = _Lazy._of(cls, tuple(logits.shape), dtype, logits.device)
        self.logits, self.factor, self._sums = logits, factor, None
        return self

    def materialize(self) -> torch.Tensor:
        logits = self.logits.materialize()
        real = self._real
        if real is None or (logits.requires_grad and torch.is_grad_enabled() and not real.requires_grad):
            self._real = real = self.factor * logits.to(self.dtype).log_softmax(-1)
        return real

    def _stays_lazy(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name in ("neg", "__neg__"):
            return LazyLogProbs(self.logits, -self.factor)
        if name == "gather" and not args and kwargs.keys() == {"dim", "index"} and _is_last(kwargs["dim"], self.ndim):
            index = kwargs["index"]
            if index.shape == (*self.shape[:-1], 1):
                return self._read(index)
        if name == "sum" and not args and kwargs.keys() <= _OF_SUM and _is_last(kwargs.get("dim"), self.ndim):
            sums = self._sums
            if sums is None or (torch.is_grad_enabled() and self.logits.hidden.requires_grad > sums.requires_grad):
                self._read(torch.zeros((*self.shape[:-1], 1), dtype=torch.int64, device=self.device))
                sums = self._sums
            assert sums is not None
            sums = sums if kwargs.get("keepdim") else sums.squeeze(-1)
            return sums.to(kwargs.get("dtype") or self.dtype)
        return None

    def _read(self, index: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [..., 1] of ``index``; the sums, of the same shape, are left in ``_sums``."""
        lazy = self.logits
        assert lazy.chunks is not None
        lazy.chunks.losses += 1
        picked_N, total_N = token_log_probs(
            lazy.hidden.reshape(-1, lazy.hidden.shape[-1]),
            lazy.head,
            lazy.shape[-1],
            index.reshape(-1),
            transform=lazy.transform if lazy.steps else None,
            chunk_mib=lazy.chunks.mib,
        )
        self._sums = self.factor * total_N.view(index.shape)
        return self.factor * picked_N.view(index.shape)


def _is_last(dim: Any, ndim: int) -> bool:
    return isinstance(dim, int) and dim in (-1, ndim - 1)


def _chooses_tokens(index: Any, ndim: int) -> bool:
    """Whether an index of slices leaves the last dimension, the vocabulary, as it is."""
    if not isinstance(index, tuple) or not all(each is Ellipsis or isinstance(each, slice) for each in index):
        return False
    return len(index) > 1 and index[-1] == slice(None) and (Ellipsis in index or len(index) == ndim)


_GRAPH = {
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
}
_OF_SUM = {"dim", "keepdim", "dtype"}
_SCALAR_STEPS = {"mul", "div", "true_divide", "__mul__", "__rmul__", "__truediv__"}
_METADATA = {
    torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
    torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
    torch.Tensor.device.__get__,  # type: ignore[attr-defined]
    torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
    torch.Tensor.layout.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_sparse.__get__,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
}
