"""Dropout whose mask is made from a seed: backward makes it again, and nothing of its size is kept.

Shape suffixes: M rows, I inputs.
"""

from __future__ import annotations

import torch

from unsloth_plugins.core.layers.op import why_reference

_LOWEST, _HIGHEST = 1 << 33, 1 << 62  # wider than 32 bits, so that the kernel gets integers of one size


def draw_seeds(count: int) -> list[int]:
    """Seeds from torch's default generator, the host's: checkpoints bring it back for their recompute."""
    return torch.randint(_LOWEST, _HIGHEST, (count,)).tolist()  # type: ignore[no-any-return]


def dropped(
    x_MI: torch.Tensor, p: float, seed: int, *, first: int = 0, onto_MI: torch.Tensor | None = None
) -> torch.Tensor:
    """``x`` with a random part of its elements zero and the others times 1 / (1 - p), or that added to ``onto``.

    Args:
        x_MI: float [M, I].
        p: probability of zero, in [0, 1].
        seed: from ``draw_seeds``.
        first: number of the first row among those that share the seed. The same rows have to come in the same stretches
            each time.
        onto_MI: [M, I] in the dtype of ``x_MI``, changed in place; ``x`` is left as it is.

    Returns:
        [M, I] in the dtype of ``x_MI``, new or ``onto_MI``. The mask depends on seed, ``first`` and shape alone, for
        one device. Products and sums are float32 or wider, rounded once.
    """
    if why_reference(x_MI.device, x_MI.dtype) is None:
        from unsloth_plugins.core.layers.triton_dropout import dropout_launch  # needs triton: only where it runs

        out_MI = torch.empty_like(x_MI, memory_format=torch.contiguous_format) if onto_MI is None else onto_MI
        x_MI = x_MI if x_MI.stride(1) == 1 else x_MI.contiguous()
        dropout_launch(x_MI, out_MI, p=p, seed=seed + first, add=onto_MI is not None)
        return out_MI
    draw = torch.Generator(x_MI.device).manual_seed(seed + first)
    kept_MI = torch.rand(x_MI.shape, generator=draw, dtype=torch.float32, device=x_MI.device) >= p
    wide_MI = x_MI.to(torch.promote_types(x_MI.dtype, torch.float32)) * (1 / (1 - p) if p < 1 else 0.0)
    if onto_MI is None:
        return wide_MI.where(kept_MI, 0.0).to(x_MI.dtype)
    return onto_MI.copy_(onto_MI + wide_MI.where(kept_MI, 0.0))
