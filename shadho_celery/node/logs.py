"""Log server: a worker's answers to those who ask for the logs of its trials."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

import redis

from shadho_celery.core.clock import Clock
from shadho_celery.errors import UsageError
from shadho_celery.runner.trial_log import log_path, read_log
from shadho_celery.transport.logs import LogRequest, WorkerLogs

log = logging.getLogger(__name__)

#: seconds between two looks for requests; while somebody follows a log, every beat looks for the next one
LOOK_SECONDS = 2.0


class LogServer:
    """Answers requests for logs below one folder. `beat` is for one thread."""

    def __init__(self, logs: WorkerLogs, folder: Path, clock: Clock) -> None:
        self._logs = logs
        self._folder = folder
        self._clock = clock
        self._looked_at = clock.now()
        self._was_asked = self._has_warned = False
        self._answering: threading.Thread | None = None

    def beat(self) -> None:
        """Answer what was asked; to be called every second or so. Raises redis-py's errors."""
        now = self._clock.now()
        if not self._was_asked and now - self._looked_at < LOOK_SECONDS:
            return
        if self._answering is not None and self._answering.is_alive():
            # The disk is slow.
            return
        self._looked_at = now
        requests = self._logs.requests()
        self._was_asked = bool(requests)
        if requests:
            # Leases are renewed by the caller's thread, which must not wait for a disk.
            self._answering = threading.Thread(target=self._answer, args=[requests], name="shadho-logs", daemon=True)
            self._answering.start()
        if self._logs.refused and not self._has_warned:
            self._has_warned = True
            log.warning("requests for logs are refused: they are not signed with our key, or malformed")

    def _answer(self, requests: Sequence[LogRequest]) -> None:
        try:
            for request in requests:
                text, end = self._read(request) or (None, 0)
                self._logs.answer(request, text, end)
        except redis.RedisError as error:
            log.warning("a request for a log could not be answered: %s", error)

    def _read(self, request: LogRequest) -> tuple[str, int] | None:
        try:
            return read_log(log_path(self._folder, request.study, request.number, request.attempt), request.after)
        except (OSError, UsageError) as error:
            log.warning("the log of trial %s cannot be read: %s", request.number, error)
            return None
