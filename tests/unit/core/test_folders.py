"""A path that is made from data lies below its folder, whatever names and links it has."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shadho_celery.core.files import below, is_locked
from shadho_celery.errors import UsageError


@pytest.mark.parametrize(
    "parts", [("..",), ("../x",), ("/etc",), ("a", "../../x"), ("",), (".",), ("a/..",), ("a\0b",), ("\ud800",)]
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


def test_only_a_file_itself_is_locked_and_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    lock, link, pipe = (tmp_path / name for name in ("lock", "link", "pipe"))
    link.symlink_to(lock)
    os.mkfifo(pipe)
    with lock.open("w") as file:
        assert not is_locked(lock)
        fcntl.flock(file, fcntl.LOCK_EX)
        assert [is_locked(path) for path in (lock, link, pipe, tmp_path / "none")] == [True, False, False, False]


@pytest.mark.parametrize("unknown", [False, True])
def test_where_locks_cannot_be_checked_the_caller_decides(
    tmp_path: Path, unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    (tmp_path / "lock").touch()
    assert not is_locked(tmp_path / "lock", unknown=unknown)
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert is_locked(tmp_path / "lock", unknown=unknown) is unknown
