"""Grouped GEMMs over rows sorted by expert, by torch's kernel or by ours.

Shape suffixes: M rows, E experts, G consecutive ones of them, I inputs, O outputs.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch
from torch.autograd.function import once_differentiable


class GroupedGemm(Protocol):
    """What the experts need of a grouped GEMM; ``ends_E`` is int32, where the rows of each expert end."""

    def product(self, x_MI: torch.Tensor, w_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """x[m] times the matrix of its expert, [M, O]. In float16 the result is float32: the outputs of single experts
        pass 65,504 in gpt-oss, though their weighted sum does not."""

    def reduce(
        self, x_MI: torch.Tensor, y_MO: torch.Tensor, ends_E: torch.Tensor, total_EIO: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x^T y over the rows of each expert [E, I, O], added to what came before in float32."""


class TorchGemm:
    """``torch._grouped_mm``: strides of whole 16 bytes; bf16 on Hopper and Blackwell, a loop elsewhere."""

    def product(self, x_MI: torch.Tensor, w_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """See ``GroupedGemm``; differentiable."""
        return torch._grouped_mm(x_MI, w_EIO, offs=ends_E)

    def reduce(
        self, x_MI: torch.Tensor, y_MO: torch.Tensor, ends_E: torch.Tensor, total_EIO: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``GroupedGemm``; one part comes in the dtype of ``x_MI``."""
        part_EIO = torch._grouped_mm(x_MI.T, y_MO, offs=ends_E)
        return part_EIO if total_EIO is None else total_EIO.float().add_(part_EIO)


class TritonGemm:
    """Our kernels: bf16 from compute capability 8.0 on, fp16 and fp32 from 7.5 on, any strides."""

    def product(self, x_MI: torch.Tensor, w_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """See ``GroupedGemm``; differentiable."""
        if torch.is_grad_enabled() and (x_MI.requires_grad or w_EIO.requires_grad):
            return _TritonProduct.apply(x_MI, w_EIO, ends_E)  # type: ignore[no-any-return]
        return _product(x_MI, w_EIO, ends_E)

    def product_of_group(
        self,
        x_MI: torch.Tensor,
        w_GIO: torch.Tensor,
        ends_E: torch.Tensor,
        first: int,
        out_MO: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``product`` for the rows of experts ``first`` to ``first + G`` only, written into ``out_MO``, which is made
        where there is none. Not differentiable. ``torch._grouped_mm`` has no counterpart: it begins at row 0."""
        return _product(x_MI, w_GIO, ends_E, first, out_MO)

    def reduce(
        self, x_MI: torch.Tensor, y_MO: torch.Tensor, ends_E: torch.Tensor, total_EIO: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See ``GroupedGemm``; float32."""
        from unsloth_plugins.core.experts.triton_gemm import grouped_reduce  # needs triton: only where it runs

        return grouped_reduce(x_MI, y_MO, ends_E, total_EIO)


def _product(
    x_MI: torch.Tensor, w_GIO: torch.Tensor, ends_E: torch.Tensor, first: int = 0, out_MO: torch.Tensor | None = None
) -> torch.Tensor:
    from unsloth_plugins.core.experts.triton_gemm import grouped_product

    out_dtype = torch.float32 if x_MI.dtype == torch.float16 else x_MI.dtype
    return grouped_product(x_MI, w_GIO, ends_E, out_dtype, first=first, out_MO=out_MO)


class _TritonProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MI: torch.Tensor, w_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x_MI, w_EIO, ends_E)
        return _product(x_MI, w_EIO, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x_MI, w_EIO, ends_E = ctx.saved_tensors
        dy_MO = grads[0].to(x_MI.dtype).contiguous()
        dx_MI = dw_EIO = None
        if ctx.needs_input_grad[0]:
            dx_MI = _product(dy_MO, w_EIO.transpose(1, 2), ends_E).to(x_MI.dtype)
        if ctx.needs_input_grad[1]:
            dw_EIO = TritonGemm().reduce(x_MI, dy_MO, ends_E).to(w_EIO.dtype)
        return dx_MI, dw_EIO, None


GEMMS: dict[Literal["grouped_mm", "triton"], GroupedGemm] = {"grouped_mm": TorchGemm(), "triton": TritonGemm()}
