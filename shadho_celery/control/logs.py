"""Logs of trials, read from this folder or from the workers of a fleet."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from shadho_celery.control.reach import requester
from shadho_celery.core.folders import CHECKPOINTS, EMBEDDED, below
from shadho_celery.errors import UsageError
from shadho_celery.executors.inline import HOST as IN_PROCESS
from shadho_celery.runner.output import log_path, read_log, replica_logs
from shadho_celery.transport import urls
from shadho_celery.transport.control import Client, of_worker
from shadho_celery.transport.logs import LOGS, ReadLog
from shadho_celery.transport.redis import Redis, connect, refusals
from shadho_celery.transport.registry import Registry, Worker
from shadho_celery.transport.signing import UNSIGNED, Signer

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

    def __init__(self, *, is_fleet: bool = False, seconds: float = ANSWER_SECONDS) -> None:
        """With `is_fleet`, use the fleet's Redis and signing key that the environment names now.

        Redis is used once a log is not in this folder. Wait at most `seconds` for workers' answers.
        """
        self._url, self._seconds = urls.url(urls.REDIS) if is_fleet else "", seconds
        self._signer = Signer.configured() if is_fleet else UNSIGNED
        self._redis: Redis | None = None
        #: held while the connection is made
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
        if self._url:
            return self._from_workers(ReadLog(study=study, number=number, attempt=attempt, after=after), host, source)
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

    def _from_workers(self, deed: ReadLog, host: str | None, source: str | None) -> LogPart | NoLog:
        """Return a part of a log, or why no worker has it. Other arguments and errors are those of `read`."""
        with refusals():
            with self._lock:
                self._redis = self._redis or connect(self._url)
            registry = Registry(self._redis, Worker, self._signer)
            announced = registry.living()
            living = {name: worker for name, worker in announced.items() if worker.key == self._signer.fingerprint}
            strangers = registry.refused + len(announced) - len(living)
            on_host = [name for name, worker in living.items() if worker.machine.host == host]
            # Any worker may have the log, because a disk may be shared.
            asked = [source] if source in living and source else on_host or [*living]
            client = Client(self._redis, self._signer, LOGS)
            first = client.request("", requester(), deed)
            requests = {replace(first, to=of_worker(name)): name for name in asked}
            for request in requests:
                client.send(request)
            has_answered = False
            for request, answer in client.answers([*requests], self._seconds):
                has_answered = True
                if answer.text is not None:
                    return LogPart(answer.text, answer.end, requests[request])
        if strangers and not has_answered:
            return NoLog(
                f"{strangers} workers sign with another key than this command, or only one side signs; give the "
                "fleet's --signing-key-file",
                is_error=True,
            )
        if not on_host:
            return NoLog(
                f"no worker is live on {host}, where the log of trial {deed.number} is; start one there in the same "
                "folder",
                is_error=True,
            )
        if not has_answered:
            return NoLog(
                f"no worker on {host} has answered within {self._seconds:.0f} s; check that it runs, and try again",
                is_error=True,
            )
        return NoLog(
            f"trial {deed.number} has printed nothing, or its worker on {host} ran in another folder than the current "
            "ones"
        )

    def close(self) -> None:
        """Close the connection to the fleet."""
        if self._redis is not None:
            self._redis.close()
