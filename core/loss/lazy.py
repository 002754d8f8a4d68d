"""Logits that are computed only when someone reads them.

While a model is called with labels, its head returns ``LazyLogits``: a tensor of the right shape, dtype and device
that holds the hidden states. The loss reads those; anything else that touches the logits (``compute_metrics``, a
custom loss) gets ordinary ones, computed at that moment with the gradient attached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unsloth_plugins.core.loss.reference import Transform

_Head = Callable[[torch.Tensor], torch.Tensor]


class LazyLogits(torch.Tensor):
    """Logits [..., V] of ``hidden`` [..., H], not computed yet.

    Until then they are in no graph: ``requires_grad`` is ``False`` and ``grad_fn`` is ``None``.

    Elementwise steps that models put after the head (scaling by a number, tanh, a change of dtype) are remembered
    instead of forcing the computation, so softcapped and scaled logits stay lazy.
    """

    hidden: torch.Tensor
    head: _Head
    steps: tuple[Transform, ...]
    _real: torch.Tensor | None

    @staticmethod
    def __new__(
        cls,
        hidden: torch.Tensor,
        head: _Head,
        n_vocab: int,
        dtype: torch.dtype,
        steps: tuple[Transform, ...] = (),
    ) -> LazyLogits:
        self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, (*hidden.shape[:-1], n_vocab), dtype=dtype, device=hidden.device, requires_grad=False
        )
        self.hidden, self.head, self.steps, self._real = hidden, head, steps, None
        return self

    def transform(self, logits: torch.Tensor) -> torch.Tensor:
        """The remembered elementwise steps, applied to computed logits."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def materialize(self) -> torch.Tensor:
        """The logits themselves, computed once; once more where they were first read without gradients."""
        real = self._real
        if real is None or (torch.is_grad_enabled() and self.hidden.requires_grad and not real.requires_grad):
            self._real = real = self.transform(self.head(self.hidden)).to(self.dtype)
        return real

    def _then(self, step: Transform, dtype: torch.dtype | None = None) -> LazyLogits:
        return LazyLogits(self.hidden, self.head, self.shape[-1], dtype or self.dtype, (*self.steps, step))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if func in _GRAPH and isinstance(first, LazyLogits) and first._real is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)  # DDP and FSDP2 look at every output: that must not compute it
        if isinstance(first, LazyLogits) and first._real is None:
            if name in ("float", "tanh") and len(args) == 1 and not kwargs:
                return first._then(func, torch.float32 if name == "float" else None)
            if name == "to" and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
                return first._then(lambda logits: logits.to(args[1]), args[1])
            if name == "clone":  # DDP's, where it looks for unused parameters
                return LazyLogits(first.hidden, first.head, first.shape[-1], first.dtype, first.steps)
            if name in _SCALAR_STEPS and len(args) == 2 and isinstance(args[1], int | float) and not kwargs:
                return first._then(lambda logits: func(logits, args[1]))
        real = torch.utils._pytree.tree_map_only(LazyLogits, LazyLogits.materialize, (args, kwargs))
        return func(*real[0], **real[1])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        real = torch.utils._pytree.tree_map_only(LazyLogits, LazyLogits.materialize, (args, kwargs or {}))
        return func(*real[0], **real[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LazyLogits(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.materialize().__reduce_ex__(protocol)


_GRAPH = {
    torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__,  # type: ignore[union-attr]
}
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
