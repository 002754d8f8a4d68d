"""Graphics cards by the memory that a process gets of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from unsloth_plugins.core.errors import ConfigError

CONTEXT_GIB = 1.0  # of a card for the driver, the CUDA context and code: an "80 GB card" is tested as a cap of 79 GiB


@dataclass(frozen=True)
class Card:
    """Cards of one size.

    Attributes:
        gb: as the makers say it.
        memory_gib: as the driver reports it, GiB.
        names: what has so much; those before Ampere, which lack bf16, end with ``*``.
    """

    gb: int
    memory_gib: float
    names: tuple[str, ...]

    @property
    def usable_gib(self) -> float:
        """What tensors can take."""
        return self.memory_gib - CONTEXT_GIB


CARDS = (
    Card(8, 8, ("RTX 2080*", "RTX 3070", "RTX 4060", "RTX 5060")),
    Card(12, 12, ("RTX 3060", "RTX 4070", "RTX 5070")),
    Card(16, 16, ("T4*", "V100*", "RTX 4080", "RTX 5080", "RTX A4000")),
    Card(24, 24, ("RTX 3090", "RTX 4090", "A10", "A10G", "L4", "RTX A5000")),
    Card(32, 32, ("RTX 5090",)),
    Card(40, 40, ("A100 40GB",)),
    Card(48, 48, ("RTX A6000", "RTX 6000 Ada", "A40", "L40", "L40S")),
    Card(80, 80, ("A100", "A100 80GB", "H100", "H800")),
    Card(96, 95, ("RTX PRO 6000", "H100 NVL", "GH200")),
    Card(141, 140, ("H200",)),
    Card(192, 179, ("B200",)),
)


def _plain(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|rtx|[^a-z0-9]", "", name.lower())


def find_card(name: str) -> tuple[Card, str]:
    """The size of a card, and its name as listed.

    Raises:
        ConfigError: it is not listed; the message names near ones.
    """
    known = {_plain(each): (card, each) for card in CARDS for each in card.names}
    if _plain(name) in known:
        return known[_plain(name)]
    near = get_close_matches(_plain(name), known, n=3)
    listed = [known[each][1].rstrip("*") for each in near] or [each.rstrip("*") for _, each in known.values()]
    raise ConfigError(
        expected="a card that is listed",
        got=repr(name),
        remedy=f"Did you mean {' or '.join(listed)}? Or give its memory: --vram 24.",
    )
