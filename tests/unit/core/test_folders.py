"""A path that is made from data lies below its folder, whatever names and links it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadho_celery.core.folders import below
from shadho_celery.errors import UsageError


@pytest.mark.parametrize(
    "parts", [("..",), ("../x",), ("/etc",), ("a", "../../x"), ("",), (".",), ("a/..",), ("a\0b",)]
)
def test_names_lead_out_of_no_folder(tmp_path: Path, parts: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="leads out of"):
        below(tmp_path / "root", *parts)


def test_links_lead_out_of_no_folder(tmp_path: Path) -> None:
    """Neither one in the middle nor at the end; the folder itself may be a link, to a larger disk."""
    disk, other = tmp_path / "disk", tmp_path / "other"
    for folder in (disk / "study", other / "logs"):
        folder.mkdir(parents=True)
    root = tmp_path / "root"
    root.symlink_to(disk)
    (disk / "linked").symlink_to(other)
    (disk / "within").symlink_to(disk / "study")
    (disk / "circle").symlink_to(disk / "circle")
    assert below(root, "study", "logs") == root / "study" / "logs"
    assert below(root, "within") == root / "within"
    for parts in (("linked",), ("linked", "logs"), ("study", "..", "..", "other")):
        with pytest.raises(UsageError, match="leads out of"):
            below(root, *parts)
