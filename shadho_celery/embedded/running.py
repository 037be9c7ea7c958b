"""Embedded fleets that run in this folder. Other processes find them by the locks that their supervisors keep."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from shadho_celery.core.folders import EMBEDDED, LOCK, below, is_locked
from shadho_celery.embedded.plan import SOCKET, remove_link, socket_path, urls_of
from shadho_celery.errors import ServiceError, UsageError


def running(root: Path = EMBEDDED) -> list[Path]:
    """Return the folders of the embedded fleets that run, except links to other folders.

    Raises UsageError if `root` cannot be read.
    """
    try:
        names = sorted(each.name for each in root.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"{root} cannot be read: {error.strerror}; run this command as the user who runs the study"
        ) from None
    found = []
    for name in names:
        with suppress(UsageError):
            if is_locked(below(root, name) / LOCK):
                found.append(root / name)
    return found


@contextmanager
def reached(directory: Path) -> Iterator[Mapping[str, str]]:
    """Yield the environment variables with the URLs of a fleet's broker and Redis.

    No path is read from the folder: the socket has a fixed name there, and must not be a link. Raises ServiceError if
    there is no socket.
    """
    try:
        is_there = stat.S_ISSOCK(os.lstat(directory / SOCKET).st_mode)
    except OSError:
        is_there = False
    if not is_there:
        raise ServiceError(f"the study in {directory} is starting or ending; ask again in a few seconds")
    directory = directory.absolute()
    socket = socket_path(directory)
    try:
        yield urls_of(socket)
    finally:
        remove_link(socket, directory)
