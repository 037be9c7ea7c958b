"""The embedded fleets of a folder are found by their locks, and reached by nothing that leads out of it."""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shadho_celery.core.files import LOCK
from shadho_celery.embedded.embedded import SOCKET, reached, running
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls


@contextmanager
def supervised(folder: Path) -> Iterator[None]:
    """Keep a folder's lock, as its supervisor does."""
    folder.mkdir(parents=True)
    with (folder / LOCK).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def test_those_run_whose_folder_is_locked_and_is_no_link(tmp_path: Path) -> None:
    root, other = tmp_path / "embedded", tmp_path / "other"
    assert running(root) == []
    with ExitStack() as stack:
        for folder in (root / "b", root / "a", other):
            stack.enter_context(supervised(folder))
        (root / "linked").symlink_to(other)
        (root / "ended").mkdir()
        (root / "ended" / LOCK).touch()
        os.mkfifo(root / "pipe")
        assert running(root) == [root / "a", root / "b"]
    assert running(root) == []


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "embedded").touch()
    with pytest.raises(UsageError, match="run this command as the user who runs the study"):
        running(tmp_path / "embedded")


def test_a_link_in_place_of_the_socket_is_not_followed(tmp_path: Path) -> None:
    """Another server of this machine would be asked."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short, socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{short}/{SOCKET}")
        (tmp_path / SOCKET).symlink_to(f"{short}/{SOCKET}")
        for folder in (tmp_path, tmp_path / "none"):
            with pytest.raises(ServiceError, match="starting or ending; ask again"), reached(folder):
                pass


def test_a_socket_is_reached_whose_path_is_too_long_for_one_or_odd(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a#b?c%25;d" / ("x" * 200)
    folder.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        monkeypatch.chdir(folder)
        server.bind(SOCKET)
        server.listen()
        with reached(folder) as named:
            paths = {urlsplit(named[name]).path for name in (urls.BROKER, urls.OWN_BROKER, urls.REDIS)}
            assert paths == {urlsplit(named[urls.REDIS]).path}
            client.connect(path := urlsplit(named[urls.REDIS]).path)
        assert not Path(path).parent.parent.exists(), "its temporary folder is removed"
        assert (folder / SOCKET).is_socket()
