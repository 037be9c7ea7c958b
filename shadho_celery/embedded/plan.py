"""Plan of an embedded fleet: the record that its supervisor gets, the address of its Redis, and how to find running
fleets.

A running fleet is recognised by the lock on its state folder, which its supervisor keeps.
"""

from __future__ import annotations

import os
import re
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from msgspec import Struct

from shadho_celery.core.files import EMBEDDED, LOCK, below, is_locked
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls

#: seconds that the workers have to end before they are killed, and then seconds that Redis has
WORKER_SECONDS = 1.5
REDIS_SECONDS = 1.5

REDIS_LOG = "redis.log"

#: lines from the scheduler to the supervisor. KEEP: keep the state folder, because the study of an early fleet has
#: begun. REMOVE: remove the state folder, because the study has ended and cannot be resumed. DETACH: continue after the
#: end of the process that has started the supervisor, until SIGTERM
KEEP, REMOVE, DETACH = "keep", "remove", "detach"

#: name of Redis's socket in the state folder
SOCKET = "redis.sock"

#: name of the file in the state folder with the key that signs control requests; each run has a new key
CONTROL_KEY = "control.key"

#: maximum length of a unix socket's path, minus a margin
MAX_SOCKET_PATH = 90

#: paths without characters that must be escaped in a URL
_PLAIN = re.compile(r"[A-Za-z0-9_./-]*")


class Plan(Struct, frozen=True, kw_only=True):
    """Description of the processes that a supervisor starts: a Redis server, and one worker for each class."""

    #: path of the Redis or Valkey server
    server: str
    #: state folder
    directory: str
    #: path of Redis's socket, which may contain a symbolic link; with a configuration file there is no socket
    socket: str
    #: number of slots by class
    workers: Mapping[str, int]
    #: modules whose objectives the workers run
    imports: Sequence[str]
    #: number of cores by class
    cores: Mapping[str, int]
    #: value of ``CUDA_VISIBLE_DEVICES``, by class, for classes that do not use all GPUs
    gpus: Mapping[str, str] = {}
    #: descriptor of the lock on the folder, which supervisor and Redis keep open
    lock: int
    #: True if the fleet is started before its study; unless the supervisor gets KEEP, it removes the folder at its end
    is_early: bool = False
    #: path of a configuration file with address and password of Redis; "" if it listens only on its socket
    config: str = ""


def urls_of(socket: str) -> dict[str, str]:
    """Return the environment variables with the URLs of broker and Redis, which are the same server.

    The variables also make processes ignore a celeryconfig.py in the working directory, because that file is for a
    fleet or for another project.
    """
    broker = f"redis+socket://{socket}"
    return {urls.BROKER: broker, urls.OWN_BROKER: broker, urls.REDIS: f"unix://{socket}", urls.IGNORE: "1"}


def socket_path(directory: Path) -> str:
    """Return a path of the socket in a folder that is short enough and needs no escapes in a URL.

    If the folder's own path is too long or has special characters, the returned path uses a link to the folder in a
    temporary folder. The socket itself is in the folder, where other processes find it. `remove_link` removes the link.
    """
    path = directory / SOCKET
    if len(str(path)) <= MAX_SOCKET_PATH and _PLAIN.fullmatch(str(path)):
        return str(path)
    link = Path(tempfile.mkdtemp(prefix="shadho-")) / "s"
    link.symlink_to(directory)
    return str(link / SOCKET)


def remove_link(socket: str, directory: Path) -> None:
    """Remove the symbolic link in the path of a folder's socket, if there is one."""
    link = Path(socket).parent
    if link != directory:
        with suppress(OSError):
            link.unlink()
            link.parent.rmdir()


def worker_log(directory: Path, name: str) -> Path:
    """Return the path of the log of a class's worker."""
    return directory / f"worker-{name.replace('/', '_')}.log"


def open_log(path: Path) -> IO[bytes]:
    """Open a log for appending. Only the owner can read the file, because objectives may print secrets."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")


def remove_socket(plan: Plan) -> None:
    """Remove Redis's socket, and the link to its folder if there is one."""
    directory = Path(plan.directory)
    (directory / SOCKET).unlink(missing_ok=True)
    remove_link(plan.socket, directory)


def running(root: Path = EMBEDDED) -> list[Path]:
    """Return the state folders in `root` whose embedded fleets run. Symbolic links to folders outside `root` are left
    out.

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

    The socket has a fixed name in `directory` and must not be a link, so files in the folder cannot lead to another
    server. Raises ServiceError if there is no socket.
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
