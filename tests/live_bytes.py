"""What is alive of the tensors that a test makes, on any device."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """The most bytes at once of tensors made inside, ``known`` ones and their views apart."""

    def __init__(self, *known: torch.Tensor) -> None:
        super().__init__()
        self.known = {each.untyped_storage()._cdata for each in known}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage._cdata in self.known:
                    continue
                self.alive[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes that are alive."""
        self.alive = {key: value for key, value in self.alive.items() if not value[0].expired()}
        return sum(n_bytes for _, n_bytes in self.alive.values())
