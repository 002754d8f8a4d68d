"""The documentation: every page is in the site, builds without a warning, and quotes messages that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = "\n".join(path.read_text() for top in ("core", "plugins") for path in (ROOT / top).rglob("*.py"))


def quoted_messages() -> list[str]:
    table = (ROOT / "docs" / "troubleshooting.md").read_text()
    return re.findall(r"^\| expected (.+?)(?:\.\.\.)? \|", table, re.M)


def test_quoted_messages_exist() -> None:
    found = quoted_messages()
    assert len(found) > 10
    assert [message for message in found if message not in SOURCES] == []


def test_every_page_is_in_the_navigation() -> None:
    named = re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(named) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "planning" / "index.html").exists()
