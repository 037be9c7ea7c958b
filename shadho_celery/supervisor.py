"""The process that embedded mode hangs on: ``python -m shadho_celery.supervisor``, see `embedded`.

It reads its plan from standard input and then waits there: when the scheduler closes its end, or dies in whatever way,
the supervisor stops Redis and the workers and removes the socket. The state folder stays for the next start.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from shadho_celery import urls

#: seconds that workers, and then Redis, are given to end by themselves
WORKER_SECONDS = 1.5
REDIS_SECONDS = 1.5

#: seconds in which a worker that died too often is not started again
RESTART_SECONDS = 5.0

#: what Redis and Valkey say of an append-only file that they cannot read
UNREADABLE = ("Bad file format", "AOF MANIFEST", "Short read", "truncated file is not the last", "Unrecoverable error")

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What the supervisor is to start."""

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


class Supervisor:
    """Owns Redis and the workers, and outlives nothing."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._mended = False
        self._log_began = 0
        self._redis = self._start_redis()
        self._workers = {name: self._start_worker(name) for name in plan.workers}
        self._started_at = dict.fromkeys(plan.workers, time.monotonic())
        self._stopping = False

    def watch(self, pipe: IO[str]) -> None:
        """Keep everything alive until the pipe ends or this process is told to stop; then stop everything."""
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        while not self._stopping:
            readable, _, _ = select.select([pipe], [], [], 0.5)
            if readable and not pipe.readline():
                break
            self._revive()
        self.stop()

    def stop(self) -> None:
        """Stop the workers, then Redis, with what they started, and remove the socket."""
        _end([*self._workers.values()], WORKER_SECONDS)
        _end([self._redis], REDIS_SECONDS)
        remove_socket(self._plan)

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _revive(self) -> None:
        """Start again what has died; a worker that dies at once has a reason, which its log tells."""
        if self._redis.poll() is not None:
            self._mend()
            self._redis = self._start_redis()
        for name, worker in self._workers.items():
            if worker.poll() is not None and time.monotonic() - self._started_at[name] > RESTART_SECONDS:
                self._workers[name] = self._start_worker(name)
                self._started_at[name] = time.monotonic()

    def _mend(self) -> None:
        """Set an append-only file that cannot be read aside, once.

        The store has every finished trial; what only that file had is run again.
        """
        folder = Path(self._plan.directory)
        with (folder / "redis.log").open("rb") as log:
            log.seek(self._log_began)
            said = log.read().decode(errors="replace")
        if not self._mended and any(words in said for words in UNREADABLE):
            self._mended = True
            aside = folder / "appendonlydir.unreadable"
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(OSError):
                (folder / "appendonlydir").rename(aside)
                sys.stderr.write(f"Redis cannot read its append-only file, which is set aside as {aside}\n")

    def _start_redis(self) -> subprocess.Popen[bytes]:
        Path(self._plan.socket).unlink(missing_ok=True)
        settings = {
            "port": "0",
            "unixsocket": self._plan.socket,
            "unixsocketperm": "600",
            "dir": self._plan.directory,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        arguments = [part for name, value in settings.items() for part in (f"--{name}", value)]
        with suppress(OSError):
            self._log_began = (Path(self._plan.directory) / "redis.log").stat().st_size
        # It holds the lock too: killed, this process is gone a moment before Redis is.
        return self._spawn([self._plan.server, *arguments], "redis.log", {}, umask=0o077, pass_fds=[self._plan.lock])

    def _start_worker(self, name: str) -> subprocess.Popen[bytes]:
        environment = {
            urls.BROKER: f"redis+socket://{self._plan.socket}",
            urls.REDIS: f"unix://{self._plan.socket}",
            "SHADHO_IMPORTS": ",".join(self._plan.imports),
            "SHADHO_CORES": str(self._plan.cores[name]),
        }
        slots = str(self._plan.workers[name])
        arguments = ["-Q", name, "-c", slots, "-l", "INFO", "--without-gossip", "--without-mingle"]
        command = [sys.executable, "-m", "celery", "-A", "shadho_celery", "worker", *arguments]
        return self._spawn(command, f"worker-{name}.log", environment)

    def _spawn(
        self, command: Sequence[str], log: str, environment: Mapping[str, str], **options: Any
    ) -> subprocess.Popen[bytes]:
        # Any name makes a class, but not every one a file.
        with open_log(Path(self._plan.directory) / log.replace("/", "_")) as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                preexec_fn=_die_with_parent,  # noqa: PLW1509 -- the supervisor has one thread
                **options,
            )


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


def _die_with_parent() -> None:
    """Linux ends this process when the supervisor dies, even by SIGKILL."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """End processes, by force those that are still there after `seconds`."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + seconds
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Read the plan from standard input and supervise until it ends."""
    plan = Plan(**json.loads(sys.stdin.readline()))
    Supervisor(plan).watch(sys.stdin)


if __name__ == "__main__":
    main()
