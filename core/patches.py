"""Attributes set on the instances of one model, remembered so that they can be taken back."""

from __future__ import annotations

import copy
from typing import Any

_ABSENT = object()


class PatchSet:
    """A list of instance attributes with what they were before. Class attributes are never touched."""

    def __init__(self) -> None:
        self._records: list[tuple[Any, str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._records)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` in the instance's own dictionary and remember what was there."""
        self._records.append((owner, name, vars(owner).get(name, _ABSENT), value))
        vars(owner)[name] = value

    def undo(self) -> None:
        """Take everything back, last first. What somebody else has set since then is theirs and stays."""
        while self._records:
            owner, name, before, after = self._records.pop()
            if vars(owner).get(name, _ABSENT) is not after:
                continue
            if before is _ABSENT:
                del vars(owner)[name]
            else:
                vars(owner)[name] = before

    def __deepcopy__(self, memo: dict[int, Any]) -> PatchSet:
        twin = PatchSet()
        memo[id(self)] = twin
        for owner, name, before, after in self._records:
            kept = _ABSENT if before is _ABSENT else copy.deepcopy(before, memo)
            twin._records.append((copy.deepcopy(owner, memo), name, kept, copy.deepcopy(after, memo)))
        return twin
