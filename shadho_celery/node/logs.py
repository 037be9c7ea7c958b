"""A worker's answers to requests for logs and folders of its trials, and the lines in its own log.

Folders that a study with the setting `keep` does not need are deleted once its scheduler says so.

The worker's log has a line about each ended attempt. Lines about the worker itself (`tell`) are written at any log
level, because people wait for them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from re import fullmatch
from typing import TypeVar

import redis

from shadho_celery.core.failures import headline
from shadho_celery.core.files import STUDY_KEY, below
from shadho_celery.core.folders import MAX_PIECE, LeftFile, delete, digest, files_in, read_part, unneeded_folders
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import Clock
from shadho_celery.core.threads import NoThread, start_thread
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.fleet import control
from shadho_celery.fleet.control import Asked, LogAnswer, Sweep, Swept, WorkerAnswer, WorkerDeed
from shadho_celery.fleet.registry import Worker
from shadho_celery.node.leases import Leases
from shadho_celery.runner.output import log_path, read_log

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds between two checks for requests; after a check that has found requests, the next beat checks at once
LOOK_SECONDS = 2.0

#: seconds for which further parts of a folder are awaited after an answer, and between two checks meanwhile
LINGER_SECONDS, LINGER_LOOK_SECONDS = 1.0, 0.01

#: seconds between two checks which folders are not needed
DELETE_SECONDS = 5.0

#: maximum bytes of the paths in one answer
MAX_PATHS = 50_000

#: maximum number of lines about ended attempts between two beats (about a second); further ones are only counted
MOST_LINES = 100

#: returns the numbers of the trials of a study whose folders are in use
InUse = Callable[[str], Collection[int]]


def _started(work: Callable[[T], None], given: T) -> threading.Thread | None:
    """Return a thread that works on what is given, or None if the system refuses it."""
    thread = threading.Thread(target=work, args=[given], name=f"shadho{work.__name__}", daemon=True)
    try:
        start_thread(thread)
    except NoThread as error:
        log.warning("requests for logs and folders are not answered, and folders are not deleted: %s", error)
        return None
    return thread


class AnswerServer:
    """Answers requests about the files below one folder of checkpoints. `beat` is for one thread."""

    def __init__(self, requests: control.WorkerRequests, folder: Path, in_use: InUse, clock: Clock) -> None:
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
            # The last requests are still being answered, because the disk is slow, or parts of a folder follow.
            return
        self._looked_at = now
        requests = self._taken()
        self._was_asked = bool(requests)
        if requests:
            # The caller's thread also renews the leases, so it must not wait for a disk.
            self._answering = _started(self._answer, requests)
        if self._requests.forged and not self._has_warned:
            self._has_warned = True
            log.warning(
                "requests for logs and folders are refused: they are unsigned, signed with another key, or malformed"
            )

    def _taken(self) -> list[Asked[WorkerDeed]]:
        now_ms, requests = self._requests.take()
        # Nobody waits for the others any more.
        return [request for request in requests if request.expires >= now_ms]

    def _answer(self, requests: Sequence[Asked[WorkerDeed]]) -> None:
        until = 0.0
        try:
            while requests or self._clock.now() < until:
                for request in requests:
                    self._requests.answer(request, answered(self._folder, request.deed, self._in_use))
                    if not isinstance(request.deed, control.ReadLog):
                        until = self._clock.now() + LINGER_SECONDS
                if until:
                    self._clock.sleep(LINGER_LOOK_SECONDS)
                requests = self._taken() if until else []
        except redis.RedisError as error:
            log.warning("a request for a log or a folder could not be answered: %s", error)


def answered(root: Path, deed: WorkerDeed, in_use: InUse) -> WorkerAnswer:
    """Return the answer about files below the folder of checkpoints `root`. Delete what a Sweep is sure about."""
    try:
        match deed:
            case control.ReadLog():
                text = read_log(log_path(root, deed.study, deed.number, deed.attempt), deed.after)
                return LogAnswer() if text is None else LogAnswer(text=text[0][-control.MAX_SENT :], end=text[1])
            case control.ListFolder():
                return _listed(below(root, deed.study, str(deed.number)), deed.after)
            case control.ReadFile():
                size = deed.size if deed.is_digest else min(deed.size, MAX_PIECE)
                data = read_part(root, f"{deed.study}/{deed.number}", deed.path, deed.start, size)
                return control.FileAnswer(data=digest(data) if deed.is_digest else data)
            case Sweep():
                return _swept(root, deed, in_use)
    except (OSError, UsageError) as error:
        log.warning("what a trial has left cannot be read: %s", error)
    return control.FileAnswer(data=b"") if isinstance(deed, control.ReadFile) else LogAnswer()


def _listed(folder: Path, after: int) -> WorkerAnswer:
    files, length = sorted(files_in(folder), key=lambda file: file.path), 0
    shown: list[LeftFile] = []
    for file in files[after:]:
        length += len(file.path)
        if shown and length > MAX_PATHS:
            break
        shown.append(file)
    return control.FolderAnswer(files=shown) if files else LogAnswer()


def _swept(root: Path, deed: Sweep, in_use: InUse) -> Swept:
    """Delete the folders of a request if it is sure. Return which these are."""
    found, in_use_here = {}, []
    for study, trials in deed.studies.items():
        in_use_here += [study] if trials is None and in_use(study) else []
        folders = unneeded_folders(root, study, trials, in_use(study))
        found[study] = len(folders), sum(map(_size, folders))
        for folder in folders if deed.is_sure else ():
            log.info("deleted by shadho-celery clean: %s", folder)
            delete(root, folder)
    others = () if deed.is_sure else _studies(root)
    return Swept(
        found=found, others={each: _size(root / each) for each in others if each not in found}, in_use=in_use_here
    )


def _studies(root: Path) -> Iterator[str]:
    for each in root.iterdir() if root.is_dir() else ():
        if fullmatch(STUDY_KEY, each.name) and each.is_dir() and not each.is_symlink():
            yield each.name


def _size(folder: Path) -> int:
    return sum(file.size for file in files_in(folder))


class Deletions:
    """Deletes the folders that studies do not need. `beat` is for one thread."""

    def __init__(
        self, read: Callable[[Sequence[str]], dict[str, bytes]], folder: Path, leases: Leases, clock: Clock
    ) -> None:
        """`read` returns by study the trials whose folders are not needed."""
        self._read, self._folder, self._leases, self._clock = read, folder, leases, clock
        self._looked_at = clock.now()
        #: by study of which trials have run here: the trials whose folders were deleted
        self._done: dict[str, bytes] = {}
        self._deleting: threading.Thread | None = None

    def beat(self) -> None:
        """Delete folders in another thread. Call this about every second. Raises redis-py's errors."""
        now = self._clock.now()
        is_busy = self._deleting is not None and self._deleting.is_alive()
        if is_busy or not (self._done or self._leases.ran) or now - self._looked_at < DELETE_SECONDS:
            return
        self._looked_at = now
        while self._leases.ran:
            self._done.setdefault(self._leases.ran.pop(), b"")
        studies = [*self._done]
        found = self._read(studies)
        for study in studies:
            if study not in found and not self._leases.in_use(study):
                self._done.pop(study)
        new = {study: trials for study, trials in found.items() if trials != self._done.get(study)}
        if new:
            # The caller's thread also renews the leases, so it must not wait for a disk.
            self._deleting = _started(self._delete, new)

    def _delete(self, unneeded: dict[str, bytes]) -> None:
        for study, trials in unneeded.items():
            try:
                # A copy of a trial that has ended may still run here, and uses its folder.
                for folder in unneeded_folders(self._folder, study, trials, kept := self._leases.in_use(study)):
                    delete(self._folder, folder)
                if not kept:
                    self._done[study] = trials
            except (OSError, UsageError) as error:
                log.warning("folders of trials cannot be deleted: %s", error)


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
    """Write a line to the worker's log, whatever its log level."""
    log.handle(log.makeRecord(log.name, logging.INFO, __file__, 0, text, (), None))


def ready(name: str, worker: Worker, queues: Sequence[str], broker: str) -> str:
    """Return the line for the worker's log that says that the worker is ready. `broker` is a URL without a password."""
    room = f"{worker.slots} slot{'s' * (worker.slots > 1)}"
    return f"{name} is ready. Class {worker.compute_class}, {room}, queues {' and '.join(queues)} on {broker}"
