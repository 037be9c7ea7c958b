"""Plan of an embedded fleet, and what scheduler and supervisor must agree on."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

from msgspec import Struct

#: seconds that workers, and then Redis, are given to end by themselves
WORKER_SECONDS = 1.5


REDIS_SECONDS = 1.5


class Plan(Struct, frozen=True, kw_only=True):
    """What the supervisor starts."""

    server: str
    directory: str
    socket: str
    #: slots by class
    workers: Mapping[str, int]
    imports: Sequence[str]
    #: cores by class
    cores: Mapping[str, int]
    #: descriptor of the lock on the folder, which is held while anything that writes there lives
    lock: int


def open_log(path: Path) -> IO[bytes]:
    """A log that is appended to, for its owner's eyes: objectives may print into it."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def remove_socket(plan: Plan) -> None:
    """Remove Redis's socket, and the folder that was made for it."""
    socket = Path(plan.socket)
    socket.unlink(missing_ok=True)
    if socket.parent != Path(plan.directory):
        with suppress(OSError):
            socket.parent.rmdir()
