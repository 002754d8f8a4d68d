"""Which weight files of an unfinished merge are complete, so that the next call goes on after them.

One JSON file in the hidden folder: what is being merged, and size and sha256 of each finished file. It goes away just
before the folder gets its name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from unsloth_plugins.core.export.folder import remove
from unsloth_plugins.core.export.packed import Requantised
from unsloth_plugins.core.export.tensors import Report

_log = logging.getLogger(__name__)
NAME = "unfinished.json"
_PIECE_BYTES = 4 << 20


def file_hash(path: Path, report: Report | None = None) -> str:
    """sha256 of a file."""
    digest, done = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as stream:
        while data := stream.read(_PIECE_BYTES):
            digest.update(data)
            done += len(data)
            if report:
                report(done, f"hash of {path.name}")
    return digest.hexdigest()


class Journal:
    """Kept while a merge writes; reads what an interrupted one left.

    Args:
        place: the hidden folder. Whatever is there is removed unless it belongs to the same ``plan``.
        plan: identifies the merge: inputs, options, tensors. JSON values.
        errors: of requantised tensors; those of finished files are entered.

    Attributes:
        resumed: names of the files that were taken over, each when its hash was found right.
        note: why nothing could be taken over, if something was there.
    """

    def __init__(self, place: Path, plan: dict[str, Any], errors: dict[str, Requantised]) -> None:
        self._path, self._plan, self._errors = place / NAME, plan, errors
        self.resumed: list[str] = []
        self.note: str | None = None
        found = self._read()
        if found is None and any(place.iterdir()):
            self.note = "Started over: the unfinished run there left no record of what was complete."
        elif found is not None and found["plan"] != plan:
            other = [key for key in plan if found["plan"].get(key) != plan[key]]
            self.note = f"Started over: the unfinished run there had other {', '.join(other) or 'inputs'}."
        self._files: dict[str, dict[str, Any]] = {} if self.note or found is None else found["files"]
        for path in place.iterdir():
            if path.name not in (NAME, *self._files):
                remove(path)
        if self._files and found is not None:
            errors.update({name: Requantised(**error) for name, error in found["errors"].items()})
        if self.note:
            _log.warning(self.note)
        self._save()

    def take(self, name: str, report: Report) -> str | None:
        """The sha256 of a file that is complete already; ``None`` if it must be written."""
        entry, path = self._files.get(name), self._path.parent / name
        if entry is None:
            return None
        if path.is_file() and path.stat().st_size == entry["size"] and file_hash(path, report) == entry["sha256"]:
            self.resumed.append(name)
            return str(entry["sha256"])
        path.unlink(missing_ok=True)
        del self._files[name]
        return None

    def add(self, path: Path, sha256: str) -> None:
        """Enter a file that is complete and on the disk."""
        self._files[path.name] = {"size": path.stat().st_size, "sha256": sha256}
        self._save()

    def close(self) -> None:
        """Everything is written: the folder needs no journal any more."""
        self._path.unlink()

    def _read(self) -> dict[str, Any] | None:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) and {"plan", "files", "errors"} <= found.keys() else None

    def _save(self) -> None:
        content = {
            "plan": self._plan,
            "files": self._files,
            "errors": {name: vars(error) for name, error in self._errors.items()},
        }
        beside = self._path.with_suffix(".new")
        with beside.open("w", encoding="utf-8") as stream:
            json.dump(content, stream)
            stream.flush()
            os.fsync(stream.fileno())
        beside.rename(self._path)
