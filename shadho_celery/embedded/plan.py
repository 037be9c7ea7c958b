"""Plan of an embedded fleet: the record that the scheduler's end sends, and the address of its Redis."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from msgspec import Struct

from shadho_celery.transport import urls

#: seconds for workers, and then Redis, to end before they are killed
WORKER_SECONDS = 1.5
REDIS_SECONDS = 1.5

REDIS_LOG = "redis.log"

#: Redis's socket in the study's folder
SOCKET = "redis.sock"

#: longest path of a unix socket, with a margin
MAX_SOCKET_PATH = 90

#: paths without a character that an URL escapes, or that ends it
_PLAIN = re.compile(r"[A-Za-z0-9_./-]*")


class Plan(Struct, frozen=True, kw_only=True):
    """Servers and workers for the supervisor to start."""

    server: str
    directory: str
    socket: str
    #: slots by class
    workers: Mapping[str, int]
    imports: Sequence[str]
    #: cores by class
    cores: Mapping[str, int]
    #: descriptor of the lock on the folder, which every process that writes there keeps open
    lock: int

    @property
    def urls(self) -> dict[str, str]:
        """Environment variables with the URLs of broker and Redis, which are the same server."""
        return urls_of(self.socket)


def urls_of(socket: str) -> dict[str, str]:
    """Return the environment variables with the URLs of broker and Redis, which are the same server."""
    return {urls.BROKER: f"redis+socket://{socket}", urls.REDIS: f"unix://{socket}"}


def socket_path(directory: Path) -> str:
    """Return a path of a folder's socket that a socket can have, and that means the same in the URLs of every library.

    Where the folder's own path is too long for it, or odd, it leads through a link in a temporary folder: the socket
    lies in the study's folder, where others find it. `remove_link` removes that.
    """
    path = directory / SOCKET
    if len(str(path)) <= MAX_SOCKET_PATH and _PLAIN.fullmatch(str(path)):
        return str(path)
    link = Path(tempfile.mkdtemp(prefix="shadho-")) / "s"
    link.symlink_to(directory)
    return str(link / SOCKET)


def remove_link(socket: str, directory: Path) -> None:
    """Remove the link through which the path of a folder's socket leads, if it does."""
    link = Path(socket).parent
    if link != directory:
        with suppress(OSError):
            link.unlink()
            link.parent.rmdir()


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to, readable only by its owner: objectives may print into it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def remove_socket(plan: Plan) -> None:
    """Remove Redis's socket, and the link to it if there is one."""
    directory = Path(plan.directory)
    (directory / SOCKET).unlink(missing_ok=True)
    remove_link(plan.socket, directory)
