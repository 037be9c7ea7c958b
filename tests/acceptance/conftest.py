"""What the acceptance tests share: a folder to type commands in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from acceptance.commands import Desk, desk
from services.browser import chromium


@pytest.fixture(name="desk")
def _desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """An empty folder; all that was started in it ends with the test."""
    with desk(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def shared_desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A folder in which all tests of a file look at what was started or recorded there once."""
    with services.nothing_left_behind(), desk(tmp_path_factory.mktemp("shared")) as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def shots(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for screenshots. Its name is printed, so that a developer can look at them."""
    name = Path(request.path).stem.removeprefix("test_")
    folder = tmp_path_factory.mktemp(name)
    print(f"screenshots of the {name}: {folder}")
    return folder
