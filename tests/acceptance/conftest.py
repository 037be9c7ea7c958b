"""What the acceptance tests share: a folder to type commands in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance.commands import Desk, desk


@pytest.fixture(name="desk")
def _desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """An empty folder; all that was started in it ends with the test."""
    with desk(tmp_path) as made:
        yield made
