"""Packed expert weights as ops see them, and what stands in for the dense parameter that they replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from unsloth_plugins.core.errors import UnsupportedError
from unsloth_plugins.core.mxfp4.codec import BLOCK, check_packed, decode

Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """One projection of all experts of a layer, in the checkpoint's layout.

    Shape suffixes: E experts, O outputs, I inputs, R = I / 32 blocks of a row, B = 16 bytes of a block.

    Attributes:
        blocks_EORB: uint8 [E, O, R, 16].
        scales_EOR: uint8 [E, O, R].
    """

    blocks_EORB: torch.Tensor
    scales_EOR: torch.Tensor

    def __post_init__(self) -> None:
        check_packed(self.blocks_EORB, self.scales_EOR)

    @property
    def shape(self) -> torch.Size:
        """[E, I, O], that of the dense parameter."""
        experts, outputs, rows = self.scales_EOR.shape
        return torch.Size((experts, rows * BLOCK, outputs))

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.blocks_EORB.device

    def chosen(self, expert_M: torch.Tensor) -> PackedWeight:
        """The bytes of some experts, [M, ...], on ``device``."""
        return PackedWeight(self.blocks_EORB[expert_M], self.scales_EOR[expert_M])

    def part(self, first: int, last: int) -> PackedWeight:
        """Experts ``first`` to ``last - 1``: views."""
        return PackedWeight(self.blocks_EORB[first:last], self.scales_EOR[first:last])

    def here(self) -> PackedWeight:
        """All bytes on ``device``, for as long as the result is held."""
        return self

    def dense(self, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
        """Decoded weights [E, I, O], or [I, O] of one expert: a transposed view of new memory."""
        whole = self if expert is None else PackedWeight(self.blocks_EORB[expert], self.scales_EOR[expert])
        scales = whole.scales_EOR
        out = torch.empty((*scales.shape[:-1], scales.shape[-1] * BLOCK), dtype=dtype, device=scales.device)
        return whole.decode_into(out).transpose(-1, -2)

    def decode_into(self, out_EOI: torch.Tensor, used_E: torch.Tensor | None = None) -> torch.Tensor:
        """Decode into given memory, by outputs; its rows may be part of wider ones. Returns it.

        ``used_E``: bool, which experts are decoded; others stay as the memory has them.
        """
        if out_EOI.is_cuda and out_EOI.dtype in (torch.bfloat16, torch.float16, torch.float32):
            from unsloth_plugins.core.mxfp4.kernel import decode_triton  # needs triton: only where it runs

            return decode_triton(self.blocks_EORB.contiguous(), self.scales_EOR.contiguous(), out_EOI, used_E)
        if used_E is None:
            return out_EOI.copy_(decode(self.blocks_EORB, self.scales_EOR, out_EOI.dtype))
        out_EOI[used_E] = decode(self.blocks_EORB[used_E], self.scales_EOR[used_E], out_EOI.dtype)
        return out_EOI


class Piece(Protocol):
    """Blocks and scales of one projection in host memory, and their way to ``device``."""

    @property
    def device(self) -> torch.device:
        """Where they are used."""

    def read(self, use: Callable[..., Result]) -> Result:
        """``use(blocks, scales)`` on the device."""

    def rows(self, numbers: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Blocks and scales of some experts, on the device."""


@dataclass(frozen=True, eq=False)
class HostWeight(PackedWeight):
    """Bytes in host memory that are on the device only while they are decoded there.

    Attributes:
        piece: brings them.
    """

    piece: Piece

    @property
    def device(self) -> torch.device:
        """Where the weight is used."""
        return self.piece.device

    def chosen(self, expert_M: torch.Tensor) -> PackedWeight:
        """As of ``PackedWeight``; each expert is copied once. The host waits for ``expert_M``."""
        used_U, place_M = expert_M.unique(return_inverse=True)
        return PackedWeight(*self.piece.rows(used_U.tolist())).chosen(place_M)

    def here(self) -> PackedWeight:
        """As of ``PackedWeight``: one copy, from which parts can be decoded."""
        return self.piece.read(PackedWeight)

    def dense(self, dtype: torch.dtype, expert: int | None = None) -> torch.Tensor:
        """As of ``PackedWeight``; of one expert, only its bytes are copied."""
        if expert is not None:
            return PackedWeight(*self.piece.rows([expert])).dense(dtype, 0)
        return self.piece.read(lambda blocks, scales: PackedWeight(blocks, scales).dense(dtype))

    def decode_into(self, out_EOI: torch.Tensor, used_E: torch.Tensor | None = None) -> torch.Tensor:
        """As of ``PackedWeight``."""
        return self.piece.read(lambda blocks, scales: PackedWeight(blocks, scales).decode_into(out_EOI, used_E))


class LogicalParameter(torch.Tensor):
    """Has the shape, dtype and device of the dense parameter that packed bytes stand for, and no memory.

    PEFT reads these to size its adapters. Anything that would read or write numbers raises ``UnsupportedError``.
    """

    _READ_ONLY = frozenset(
        {"size", "dim", "ndimension", "numel", "element_size", "is_floating_point", "is_complex", "requires_grad_"}
        | {"__repr__", "__format__", "__hash__", "__len__", "get_device", "is_contiguous", "stride", "data_ptr"}
    )

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> LogicalParameter:
        """A stand-in; one number is allocated."""
        return torch.zeros((), dtype=dtype, device=device).expand(shape).as_subclass(cls)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__") or name in cls._READ_ONLY:
            return super().__torch_function__(func, types, args, kwargs or {})
        raise UnsupportedError(
            expected="an operation that needs only the shape, dtype or device of packed MXFP4 experts",
            got=f"`{name}` on their numbers",
            remedy="Adapters can't be merged into packed weights in place: keep them as adapters, "
            "or load the base model in 16 bits and merge there.",
        )
