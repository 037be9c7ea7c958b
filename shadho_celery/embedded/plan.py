"""Plan of an embedded fleet: the record that the scheduler's end sends, and what both ends need for it."""

from __future__ import annotations

import os
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
        return {urls.BROKER: f"redis+socket://{self.socket}", urls.REDIS: f"unix://{self.socket}"}


def open_log(path: Path) -> IO[bytes]:
    """Open a log to append to, readable only by its owner: objectives may print into it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def remove_socket(plan: Plan) -> None:
    """Remove Redis's socket, and its temporary folder if it has one."""
    socket = Path(plan.socket)
    socket.unlink(missing_ok=True)
    if socket.parent != Path(plan.directory):
        with suppress(OSError):
            socket.parent.rmdir()
