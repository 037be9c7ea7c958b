"""Logs of trials, read from this folder or from the workers of a fleet."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from shadho_celery.core.folders import CHECKPOINTS, EMBEDDED, below
from shadho_celery.errors import UsageError
from shadho_celery.executors.inline import HOST as IN_PROCESS
from shadho_celery.runner.output import log_path, read_log, replica_logs
from shadho_celery.transport import urls
from shadho_celery.transport.logs import LogClient
from shadho_celery.transport.redis import Redis, connect, refusals
from shadho_celery.transport.registry import Registry, Worker
from shadho_celery.transport.signing import Signer

#: seconds to wait for workers' answers
ANSWER_SECONDS = 10.0


class LogPart(NamedTuple):
    """A part of the log of an attempt."""

    text: str
    #: position of the log's end, from which the next part begins
    end: int
    #: worker on whose disk the log is; None if it is in this folder
    source: str | None = None


class NoLog(NamedTuple):
    """The reason why there is no log of an attempt."""

    reason: str
    #: True if the log may exist, but could not be reached
    is_error: bool = False


class TrialLogs:
    """Reads the logs of trials: those in this folder, and otherwise those on the disks of a fleet's workers."""

    def __init__(self, fleet: Callable[[], FleetLogs] | None = None) -> None:
        """`fleet` is called when the first log is not in this folder; None without a fleet."""
        self._make_fleet = fleet
        self._fleet: FleetLogs | None = None
        self._lock = threading.Lock()

    def read(
        self, study: str, number: int, attempt: int, host: str | None, *, after: int = 0, source: str | None = None
    ) -> LogPart | NoLog:
        """Return the part of a log from the position `after`, or why there is no log. Safe for several threads.

        `study` is the study's key, `host` the machine of the attempt if it is known, and `source` that of the part
        before. Raises UsageError for a file that cannot be read, and ServiceError if the fleet's Redis fails.
        """
        path = log_path(CHECKPOINTS, study, number, attempt)
        try:
            found = read_log(path, after)
        except OSError as error:
            raise UsageError(f"the log {path} cannot be read: {error.strerror}") from None
        if found is not None:
            return LogPart(*found)
        if host == IN_PROCESS:
            return NoLog(f"trial {number} ran in the process of its search, whose output is not kept")
        if self._make_fleet is not None:
            with self._lock:
                self._fleet = self._fleet or self._make_fleet()
            return self._fleet.read(study, number, attempt, host, after=after, source=source)
        if host in {None, socket.gethostname()}:
            # An embedded study keeps its state in the folder in which all of its trials run.
            is_here = below(EMBEDDED, study).is_dir()
            return NoLog(f"trial {number} has printed nothing{'' if is_here else ', or ran in another folder'}")
        return NoLog(
            f"the log of trial {number} is on {host}; give --redis to ask the workers there, or run this command there "
            "in the workers' folder",
            is_error=True,
        )

    def of_replicas(self, study: str, number: int, attempt: int) -> list[Path]:
        """Return the files in this folder that have the output of an attempt's other replicas or ranks."""
        return replica_logs(CHECKPOINTS, study, number, attempt)

    def close(self) -> None:
        """Close the connection to the fleet."""
        if self._fleet is not None:
            self._fleet.close()


def open_logs(*, is_fleet: bool, seconds: float = ANSWER_SECONDS) -> TrialLogs:
    """Return a reader of the logs in this folder and, if there is a fleet, of those of its workers.

    The fleet's Redis and signing key are those that the environment names now.
    """
    if not is_fleet:
        return TrialLogs()
    url, signer = urls.url(urls.REDIS), Signer.configured()
    return TrialLogs(lambda: FleetLogs(connect(url), signer, seconds))


class FleetLogs:
    """Reads the logs of trials on the disks of a fleet's workers."""

    def __init__(self, client: Redis, signer: Signer, seconds: float = ANSWER_SECONDS) -> None:
        """Wait at most `seconds` for workers' answers."""
        self._redis, self._seconds = client, seconds
        self._fingerprint = signer.fingerprint
        self._registry = Registry(client, Worker, signer)
        self._client = LogClient(client, signer)
        #: held while the live workers are read
        self._lock = threading.Lock()

    def read(
        self, study: str, number: int, attempt: int, host: str | None, *, after: int, source: str | None
    ) -> LogPart | NoLog:
        """Return a part of a log, or why no worker has it. Arguments and errors are those of `TrialLogs.read`."""
        with refusals():
            living, strangers = self._living()
            on_host = [name for name, worker in living.items() if worker.machine.host == host]
            # Any worker may have the log, because a disk may be shared.
            asked: Collection[str] = [source] if source in living and source else on_host or [*living]
            has_answered = False
            for answer in self._client.ask(asked, study, number, attempt, after=after, seconds=self._seconds):
                has_answered = True
                if answer.text is not None:
                    return LogPart(answer.text, answer.end, answer.worker)
        if strangers and not has_answered:
            return NoLog(
                f"{strangers} workers sign with another key than this command, or only one side signs; give the "
                "fleet's --signing-key-file",
                is_error=True,
            )
        if not on_host:
            return NoLog(
                f"no worker is live on {host}, where the log of trial {number} is; start one there in the same folder",
                is_error=True,
            )
        if not has_answered:
            return NoLog(
                f"no worker on {host} has answered within {self._seconds:.0f} s; check that it runs, and try again",
                is_error=True,
            )
        return NoLog(
            f"trial {number} has printed nothing, or its worker on {host} ran in another folder than the current ones"
        )

    def close(self) -> None:
        """Close the connection."""
        self._redis.close()

    def _living(self) -> tuple[Mapping[str, Worker], int]:
        """Return the live workers with our signing key, and the number of the others."""
        with self._lock:
            announced = self._registry.living()
            living = {name: worker for name, worker in announced.items() if worker.key == self._fingerprint}
            return living, self._registry.refused + len(announced) - len(living)
