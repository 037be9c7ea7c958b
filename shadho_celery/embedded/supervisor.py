"""Supervisor: the process that starts and ends Redis and the workers of an embedded fleet.

It is started with ``python -m shadho_celery.embedded.supervisor``.

It reads its plan from standard input, a pipe from the scheduler. When the scheduler closes the pipe or dies, the
supervisor removes the socket and stops the workers and Redis. It keeps the state folder for the next start, unless the
fleet was started for a study that has not begun, or the study has ended and cannot be resumed.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from shadho_celery.core.files import CHECKPOINTS, STORAGE_TOKEN
from shadho_celery.core.system import HEARTBEAT_FILE
from shadho_celery.embedded.embedded import (
    CONTROL_KEY,
    DETACH,
    KEEP,
    REDIS_LOG,
    REDIS_SECONDS,
    WORKER_SECONDS,
    Plan,
    open_log,
    remove_socket,
    urls_of,
    worker_log,
)
from shadho_celery.fleet import urls
from shadho_celery.fleet.signing import CONTROL_KEY_FILE
from shadho_celery.runner.process_tree import PR_SET_PDEATHSIG, hide_memory, prctl

#: minimum seconds between two starts of the same worker
RESTART_SECONDS = 5.0

#: minimum seconds between the first starts of two workers
NEXT_SECONDS = 1.0

#: maximum bytes of a log; the last bytes of a longer log are moved to a second file of this size
MAX_LOG = 10_000_000

#: texts in the messages of Redis and Valkey about an append-only file that they cannot read
UNREADABLE = ("Bad file format", "AOF MANIFEST", "Short read", "truncated file is not the last", "Unrecoverable error")


class Supervisor:
    """Starts Redis and the workers, restarts them if they die, and finally stops them."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._was_set_aside = False
        self._log_began = 0
        self._redis = self._start_redis()
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._started_at: dict[str, float] = {}
        self._start_workers()
        self._stopping = False
        #: the latest line from the scheduler; "" if the study of an early fleet has not begun
        self._line = "" if plan.is_early else KEEP
        self._began = time.time()

    def watch(self, pipe: IO[str]) -> None:
        """Keep Redis and the workers running until the pipe closes or SIGTERM arrives; then stop them.

        After DETACH, the pipe is ignored.
        """
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        pipes = [pipe]
        while not self._stopping:
            readable, _, _ = select.select(pipes, [], [], 0.5)
            if readable:
                line = pipe.readline()
                if not line:
                    break
                if line.strip() == DETACH:
                    pipes.clear()
                else:
                    self._line = line.strip()
            self._start_workers()
            self._revive_redis()
            self._cut_logs()
        self.stop()

    def stop(self) -> None:
        """Remove the socket, and stop the workers, then Redis. Trials that still run are lost.

        If the state folder is not kept, remove the folders too.
        """
        # Remove the socket first, so that other commands do not find a fleet that is ending.
        remove_socket(self._plan)
        _end(self._workers.values(), WORKER_SECONDS if self._line else 0.0)
        _end([self._redis], REDIS_SECONDS if self._line else 0.0)
        if self._line != KEEP:
            self._remove_folders()

    def _remove_folders(self) -> None:
        """Remove the state folder, and the empty folders that were created for it."""
        folder = Path(self._plan.directory)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            # The workers may have created the folder of checkpoints, with a token file that is as new as this fleet.
            if [*CHECKPOINTS.iterdir()] == [
                token := CHECKPOINTS / STORAGE_TOKEN
            ] and token.stat().st_mtime >= self._began:
                token.unlink()
                CHECKPOINTS.rmdir()
        for parent in (folder.parent, folder.parent.parent):
            with suppress(OSError):
                parent.rmdir()

    def _stop(self, *_: object) -> None:
        self._stopping = True

    def _start_workers(self) -> None:
        """Start the worker of a class that has none yet, and restart workers that have died; their logs show the
        reason.

        The workers start one after another, because the imports of all of them at once would delay the first trial.
        """
        for name in self._plan.workers:
            worker, latest = self._workers.get(name), max(self._started_at.values(), default=0.0)
            is_dead = worker is not None and worker.poll() is not None
            if is_dead and time.monotonic() - self._started_at[name] <= RESTART_SECONDS:
                continue
            if is_dead or (worker is None and time.monotonic() - latest >= NEXT_SECONDS):
                self._workers[name] = self._start_worker(name)
                self._started_at[name] = time.monotonic()

    def _revive_redis(self) -> None:
        if self._redis.poll() is not None:
            self._set_aside_unreadable()
            self._redis = self._start_redis()

    def _cut_logs(self) -> None:
        for log in Path(self._plan.directory).glob("*.log"):
            # If the log cannot be cut, for example because the disk is full, it continues as it is.
            with suppress(OSError):
                if cut(log) and log.name == REDIS_LOG:
                    self._log_began = 0

    def _set_aside_unreadable(self) -> None:
        """If Redis cannot read its append-only file, rename the file's folder, so that Redis starts empty. Do this only
        once.

        The store has every recorded result. Attempts whose results are only in that file run again.
        """
        folder = Path(self._plan.directory)
        with (folder / REDIS_LOG).open("rb") as log:
            log.seek(self._log_began)
            messages = log.read().decode(errors="replace")
        if not self._was_set_aside and any(words in messages for words in UNREADABLE):
            self._was_set_aside = True
            aside = folder / "appendonlydir.unreadable"
            shutil.rmtree(aside, ignore_errors=True)
            with suppress(OSError):
                (folder / "appendonlydir").rename(aside)
                sys.stderr.write(f"Redis cannot read its append-only file, which is renamed to {aside}\n")

    def _start_redis(self) -> subprocess.Popen[bytes]:
        Path(self._plan.socket).unlink(missing_ok=True)
        own = {"port": "0", "unixsocket": self._plan.socket, "unixsocketperm": "600"}
        settings = {
            **({} if self._plan.config else own),
            "dir": self._plan.directory,
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
            "maxmemory-policy": "noeviction",
        }
        arguments = [self._plan.config] if self._plan.config else []
        arguments += [part for name, value in settings.items() for part in (f"--{name}", value)]
        with suppress(OSError):
            self._log_began = (Path(self._plan.directory) / REDIS_LOG).stat().st_size
        # Redis keeps the lock open too, because it may end a moment later than this process if this process is killed.
        return self._spawn([self._plan.server, *arguments], REDIS_LOG, {}, umask=0o077, pass_fds=[self._plan.lock])

    def _start_worker(self, name: str) -> subprocess.Popen[bytes]:
        environment = {
            **urls_of(self._plan.socket),
            urls.EMBEDDED: "1",
            CONTROL_KEY_FILE: str(Path(self._plan.directory) / CONTROL_KEY),
            "SHADHO_IMPORTS": ",".join(self._plan.imports),
            "SHADHO_CORES": str(self._plan.cores[name]),
            # These settings are for a fleet's worker: several embedded workers cannot share a file or a port.
            HEARTBEAT_FILE: "",
            "SHADHO_METRICS_PORT": "",
        }
        if (gpus := self._plan.gpus.get(name)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        slots = str(self._plan.workers[name])
        command = [sys.executable, "-m", "shadho_celery.worker", "--class", name, "--slots", slots]
        return self._spawn(command, worker_log(Path(self._plan.directory), name).name, environment)

    def _spawn(
        self,
        command: Sequence[str],
        log: str,
        environment: Mapping[str, str],
        umask: int = -1,
        pass_fds: Sequence[int] = (),
    ) -> subprocess.Popen[bytes]:
        with open_log(Path(self._plan.directory) / log) as output:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **environment},
                preexec_fn=partial(prctl, PR_SET_PDEATHSIG, signal.SIGKILL),  # noqa: PLW1509 -- the supervisor has one thread
                umask=umask,
                pass_fds=pass_fds,
            )


def cut(log: Path) -> bool:
    """If a log is longer than MAX_LOG, truncate it. Return whether it was truncated.

    The last MAX_LOG bytes are copied to ``NAME.log.1``. Processes that append to the log need not reopen it (as with
    logrotate's copytruncate). A line that is written at the same time may be lost.
    """
    if log.stat().st_size <= MAX_LOG:
        return False
    with log.open("rb") as full:
        full.seek(-MAX_LOG, os.SEEK_END)
        last = full.read(MAX_LOG)
    before = log.with_name(f"{log.name}.1")
    before.unlink(missing_ok=True)
    with open_log(before) as file:
        file.write(last)
    os.truncate(log, 0)
    return True


def _fork_watcher() -> None:
    """Fork a process that kills this process group when the supervisor dies, for systems without PDEATHSIG."""
    # Redis and the workers do not inherit the ends of this pipe, so it closes when the supervisor dies.
    lifeline, held = os.pipe()
    if os.fork():
        os.close(lifeline)
        return
    os.close(held)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.read(lifeline, 1)
    os.killpg(0, signal.SIGKILL)


def _end(processes: Collection[subprocess.Popen[bytes]], seconds: float) -> None:
    """Send SIGTERM to processes, and kill the processes that are still alive after `seconds`."""
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
    """Read the plan from standard input, and supervise its processes until standard input closes."""
    # This process's environment comes from the scheduler and may contain the password of the store.
    hide_memory()
    if sys.platform != "linux":
        _fork_watcher()
    Supervisor(msgspec.convert(json.loads(sys.stdin.readline()), Plan)).watch(sys.stdin)


if __name__ == "__main__":
    main()
