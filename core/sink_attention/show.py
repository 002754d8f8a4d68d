"""Pictures of who sees whom: the mask of a layer as text or PNG.

Shape suffixes: S tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.sink_attention.masks import documents_from_cu_seqlens
from unsloth_plugins.core.sink_attention.reference import allowed_block

SEES, HIDDEN, SINK = "■", "·", "◆"


def visible(
    length: int,
    *,
    window: int | None = None,
    documents: Sequence[int] | None = None,
    left_padding: int = 0,
    right_padding: int = 0,
) -> torch.Tensor:
    """Which keys each token of a row sees, by the rule of the reference implementation.

    Args:
        length: S, padding included.
        window: keys that a token sees, itself included; ``None`` for all before it.
        documents: lengths of packed documents, adding up to ``length``.
        left_padding, right_padding: tokens of padding at either end.

    Returns:
        bool [S, S], queries by keys. Rows of padding are what is computed for them, and thrown away.

    Raises:
        ShapeError: the numbers do not fit together.
    """
    if length < 1 or min(left_padding, right_padding) < 0 or left_padding + right_padding > length:
        raise ShapeError(
            expected="a positive length, and padding that fits into it",
            got=f"length {length}, padding {left_padding} + {right_padding}",
            remedy="Count padding as part of the length.",
        )
    documents_1S = None
    if documents is not None:
        if sum(documents) != length or min(documents, default=0) < 0:
            raise ShapeError(
                expected=f"lengths of documents that add up to {length}",
                got=f"{list(documents)}, which add up to {sum(documents)}",
                remedy="Name every document of the row.",
            )
        boundaries = torch.tensor([0, *documents]).cumsum(0)
        documents_1S = documents_from_cu_seqlens(boundaries, length)
    key_mask_1S = torch.ones(1, length, dtype=torch.bool)
    key_mask_1S[:, :left_padding] = False
    key_mask_1S[:, length - right_padding :] = False
    whole = slice(0, length)
    mask = allowed_block(whole, whole, 0, window, documents_1S, key_mask_1S, torch.device("cpu"))
    return mask.expand(1, 1, 1, length, length)[0, 0, 0]


def mask_text(visible_SS: torch.Tensor, *, sink: bool = True) -> str:
    """One line a query: the sink's column, if there is one, and a sign a key.

    Args:
        visible_SS: from ``visible``.
        sink: the layer has a learned sink, which every query sees.
    """
    lines = []
    for row in visible_SS.tolist():
        signs = [SEES if seen else HIDDEN for seen in row]
        lines.append(" ".join(([SINK, "│"] if sink else []) + signs))
    return "\n".join(lines)


def mask_png(visible_SS: torch.Tensor, path: str | Path, *, sink: bool = True, title: str = "") -> None:
    """The same as a picture; needs matplotlib.

    Args:
        visible_SS: from ``visible``.
        path: of the PNG, which is overwritten.
        sink: draw the sink's column, left of the first key.
        title: over the picture.
    """
    from matplotlib.figure import Figure

    n = visible_SS.shape[0]
    columns = [torch.full((n, 1), 2)] if sink else []
    picture = torch.cat([*columns, visible_SS.to(torch.int64)], dim=1)
    figure = Figure(figsize=(max(3, n / 4), max(3, n / 4)))
    axis = figure.add_subplot()
    axis.imshow(picture, cmap="viridis", vmin=0, vmax=2, extent=(-1.5 if sink else -0.5, n - 0.5, n - 0.5, -0.5))
    axis.set(xlabel="key (left of 0: the sink)" if sink else "key", ylabel="query", title=title)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
