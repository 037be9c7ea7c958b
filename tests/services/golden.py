"""Golden texts: files with what a command has to print. ``GOLDEN=write pytest ...`` writes them: read the diff."""

from __future__ import annotations

import os
import re
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "golden"


def check(name: str, text: str) -> None:
    """Assert that a text is that of a file, apart from versions of software and spaces at ends of lines."""
    lines = [re.sub(r"^versions: .*", "versions: ...", line.rstrip()) for line in text.splitlines()]
    path, found = FOLDER / f"{name}.txt", "\n".join([*lines, ""])
    if os.environ.get("GOLDEN") == "write":
        path.write_text(found, encoding="utf-8")
    assert found == path.read_text(encoding="utf-8")
