"""A worker's answers to requests for logs and folders of its trials, and the lines in its own log.

The worker's log has a line about each ended attempt. Lines about the worker itself (`tell`) are written at any log
level, because people wait for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from itertools import islice
from pathlib import Path

import redis

from shadho_celery.core.checks import one_line
from shadho_celery.core.failures import headline
from shadho_celery.core.files import MAX_FILES, MAX_PIECE, below, files_in, read_part, sweep
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock, NoThread, start_thread
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.fleet import control
from shadho_celery.fleet.control import Asked, Sweep, WorkerAnswer, WorkerDeed, WorkerRequests
from shadho_celery.fleet.registry import Worker
from shadho_celery.runner.output import log_path, read_log

log = logging.getLogger(__name__)

#: seconds between two checks for requests; after a check that has found requests, the next beat checks at once
LOOK_SECONDS = 2.0

#: seconds after an answer in which further requests are awaited, and seconds between two checks in that time
LINGER_SECONDS, LINGER_LOOK_SECONDS = 0.3, 0.02

#: maximum number of lines about ended attempts between two beats (about a second); further ones are only counted
MOST_LINES = 100

#: returns the numbers of the trials of a study whose folders are in use
InUse = Callable[[str], Collection[int]]


class AnswerServer:
    """Answers requests about the files below one folder of checkpoints. One thread calls `beat`."""

    def __init__(
        self,
        requests: WorkerRequests,
        folder: Path,
        in_use: InUse | None,
        clock: Clock,
        refusal: Callable[[Asked[WorkerDeed]], str | None] | None = None,
    ) -> None:
        """Requests to delete folders are refused if `in_use` is None, or if `refusal` returns a reason."""
        self._refusal = refusal or (lambda request: None)
        self._requests, self._folder, self._in_use, self._clock = requests, folder, in_use, clock
        self._looked_at = clock.now()
        self._was_asked = self._has_warned = False
        self._answering: threading.Thread | None = None

    def beat(self) -> None:
        """Answer the requests. Call this about every second. Raises redis-py's errors."""
        now = self._clock.now()
        if not self._was_asked and now - self._looked_at < LOOK_SECONDS:
            return
        if self._answering is not None and self._answering.is_alive():
            # The last requests are still being answered, because the disk is slow, or because the client of the last
            # answer may soon request another part of a folder.
            return
        self._looked_at = now
        now_ms, requests = self._requests.take()
        self._was_asked = bool(requests)
        if requests:
            # The caller's thread also renews the leases, so it must not wait for a disk.
            self._answering = threading.Thread(target=self._answer, args=[now_ms, requests], daemon=True)
            try:
                start_thread(self._answering)
            except NoThread as error:
                log.warning("requests for logs and folders are not answered: %s", error)
        if self._requests.forged and not self._has_warned:
            self._has_warned = True
            log.warning("requests for logs and folders are refused: unsigned, signed with another key, or malformed")

    def _answer(self, now_ms: int, requests: Sequence[Asked[WorkerDeed]]) -> None:
        asked_at = self._clock.now()
        try:
            while requests or self._clock.now() - asked_at < LINGER_SECONDS:
                # Answer deletions last, because they may take long.
                for request in sorted(requests, key=lambda each: isinstance(each.deed, Sweep)):
                    # Nobody waits any more for the answer to an expired request.
                    if request.expires >= now_ms:
                        is_sweep = isinstance(request.deed, Sweep) and request.deed.is_sure
                        reason = self._refusal(request) if is_sweep else None
                        answer = WorkerAnswer(problem=reason) if reason else None
                        self._requests.answer(request, answer or answered(self._folder, request.deed, self._in_use))
                    asked_at = self._clock.now()
                self._clock.sleep(LINGER_LOOK_SECONDS)
                now_ms, requests = self._requests.take()
        except redis.RedisError as error:
            log.warning("a request for a log or a folder could not be answered: %s", error)


def answered(root: Path, deed: WorkerDeed, in_use: InUse | None = lambda study: ()) -> WorkerAnswer:
    """Return the answer to a request about files below the folder of checkpoints `root`. Carry out a Sweep.

    A Sweep is refused if `in_use` is None.
    """
    try:
        match deed:
            case control.ReadLog():
                if (found := read_log(log_path(root, deed.study, deed.number, deed.attempt), deed.after)) is not None:
                    return WorkerAnswer(is_done=True, text=found[0][-control.MAX_SENT :], end=found[1])
            case control.ListFolder():
                files = [*islice(files_in(below(root, deed.study, str(deed.number))), MAX_FILES + 1)]
                return WorkerAnswer(is_done=bool(files), files=files)
            case control.ReadFile():
                size = deed.size if deed.is_digest else min(deed.size, MAX_PIECE)
                data = read_part(root, f"{deed.study}/{deed.number}", deed.path, deed.start, size)
                return WorkerAnswer(is_done=True, data=blake2b(data).digest() if deed.is_digest else data)
            case Sweep() if in_use is not None:
                studies, is_sure = deed.studies.items(), deed.is_sure
                swept = {key: sweep(root, key, each, in_use(key), is_sure=is_sure) for key, each in studies}
                if is_sure and any(count for count, _ in swept.values()):
                    log.info("deleted by study: number of folders, bytes: %s", swept)
                return WorkerAnswer(is_done=True, swept=swept)
    except (OSError, UsageError) as error:
        log.warning("what a trial has left cannot be read or deleted: %s", error)
        return WorkerAnswer(problem=one_line(error, 300))
    return WorkerAnswer()


class TrialLines:
    """Writes a line about each ended attempt to the worker's log. One thread calls `beat`; any may call `tell`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told = self._more = 0

    def tell(self, payload: Payload, attempt: Attempt, outcome: Outcome) -> None:
        """Write the line about an ended attempt, or only count it after MOST_LINES lines since the last beat."""
        with self._lock:
            self._told += 1
            if self._told > MOST_LINES:
                self._more += 1
                return
        level = logging.WARNING if outcome.state is TrialState.FAILED or outcome.warning else logging.INFO
        log.log(level, "%s", line(payload, attempt, outcome))

    def beat(self) -> None:
        """Write the number of ended attempts that got no line. Call this about every second."""
        with self._lock:
            more, self._told, self._more = self._more, 0, 0
        if more:
            log.info("%d more trials have ended within a second", more)


def line(payload: Payload, attempt: Attempt, outcome: Outcome) -> str:
    """Return the line about an ended attempt for the worker's log."""
    # The scheduler decides whether a failed attempt ends its trial, or is retried on another worker.
    has_failed = outcome.state is TrialState.FAILED
    which = f", attempt {attempt.attempt}" if attempt.attempt > 1 or has_failed else ""
    parts = [f"study {payload.name or payload.study}, trial {attempt.number}{which} ({attempt.subspace})"]
    # With several losses, only the scheduler knows which ones are negated because they are maximised.
    loss = "" if outcome.loss is None or outcome.losses else f", loss {outcome.loss:.6g}"
    parts.append(f"{'failed' if has_failed else outcome.state}{loss}, {outcome.seconds or 0.0:.3g} s")
    if has_failed:
        parts.append(headline(outcome.error))
    return ": ".join(parts) + (f"; {outcome.warning}" if outcome.warning else "")


def tell(text: str) -> None:
    """Write a line to the worker's log, at any log level."""
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))


def ready(name: str, worker: Worker, queues: Sequence[str], broker: str) -> str:
    """Return the line for the worker's log that says that the worker is ready. `broker` is a URL without a password."""
    room = f"{worker.slots} slot{'s' * (worker.slots > 1)}"
    return f"{name} is ready. Class {worker.compute_class}, {room}, queues {' and '.join(queues)} on {broker}"
