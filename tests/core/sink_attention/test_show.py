"""Pictures of masks show what is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from unsloth_plugins.core.errors import ShapeError
from unsloth_plugins.core.sink_attention import sink_attention
from unsloth_plugins.core.sink_attention.show import mask_png, mask_text, visible


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(window=5),
        dict(documents=[5, 0, 7, 4]),
        dict(window=3, documents=[9, 7]),
        dict(left_padding=4, window=5),
        dict(right_padding=3),
    ],
)
def test_a_picture_is_what_attention_gives_weight_to(options: dict) -> None:  # type: ignore[type-arg]
    """With one-hot values the output is the row of weights: positive exactly where the picture shows a key."""
    mask = visible(16, **options)
    q, k, v = torch.randn(1, 16, 1, 16), torch.randn(1, 16, 1, 16), torch.eye(16)[None, :, None]
    keys = torch.ones(1, 16, dtype=torch.bool)
    keys[:, : options.get("left_padding", 0)] = False
    keys[:, 16 - options.get("right_padding", 0) :] = False
    documents = None
    if "documents" in options:
        documents = torch.repeat_interleave(torch.arange(len(options["documents"])), torch.tensor(options["documents"]))
    out = sink_attention(
        q,
        k,
        v,
        torch.zeros(1),
        window=options.get("window"),
        documents_BS=None if documents is None else documents[None],
        key_mask_BS=keys,
    )
    assert torch.equal(out[0, :, 0] > 0, mask)


def test_text_has_a_line_a_query_and_a_column_for_the_sink() -> None:
    text = mask_text(visible(4, window=2))
    assert text.splitlines() == ["◆ │ ■ · · ·", "◆ │ ■ ■ · ·", "◆ │ · ■ ■ ·", "◆ │ · · ■ ■"]
    assert mask_text(visible(2), sink=False).splitlines() == ["■ ·", "■ ■"]


def test_png(tmp_path: Path) -> None:
    mask_png(visible(16, window=5), tmp_path / "mask.png", title="length 16, window 5")
    assert (tmp_path / "mask.png").read_bytes()[:4] == b"\x89PNG"


def test_numbers_that_do_not_fit_are_named() -> None:
    with pytest.raises(ShapeError, match="add up to 5"):
        visible(6, documents=[2, 3])
    with pytest.raises(ShapeError, match="padding 4"):
        visible(6, left_padding=4, right_padding=3)
