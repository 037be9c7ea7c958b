"""Trackers, which show ended trials in other tools: their role, and a process for each of them beside a run.

The process reads the store, asks its tracker which trials it shows, and adds the others. So a resumed study continues,
nothing about trackers is stored, and a tracker that hangs, prints or is slow affects no run. `Trackers` starts and ends
the processes. It runs this module with ``python -m``.
"""

from __future__ import annotations

import fcntl
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shadho_celery.core.checks import check_name, mask, one_line, printable
from shadho_celery.core.failures import headline
from shadho_celery.core.files import TRACKED, below
from shadho_celery.core.names import NO_TRACK, TRACKERS, named
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import Outage
from shadho_celery.core.trial import turned_first
from shadho_celery.core.units import counted
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import LateStore

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore

#: environment variable of a tracker's process with the URL of the store
STORE = "SHADHO_TRACKED_STORE"
#: seconds between two checks whether something has ended
TICK_SECONDS = 0.1
#: seconds between two readings of the store; maximum of the seconds between two tries after an error
LOOK_SECONDS, MAX_PAUSE = 1.0, 60.0
#: seconds without a sign of life after which the end of a run, which waits for the last trials, ends the process
END_SECONDS = 20.0
#: seconds of the wait at the end of a run after which a line tells how many trials are missing; again after twice as
#: many each time
WAIT_SECONDS = 10.0
#: seconds of a processor between two checks that are a sign of life, such as those that MLflow needs to make its tables
BUSY_SECONDS = 0.005
#: facts of a trial that trackers get as texts
FACTS = ("state", "compute_class", "host", "sampler", "subspace", "budget", "origin", "attempts", "seconds", "code")


@dataclass(frozen=True, kw_only=True)
class EndedTrial:
    """An ended trial for trackers. All texts are printable."""

    number: int
    #: globally unique id, made of the study's key and the number
    id: str
    #: by label: the value as tables show it, a bool, a number or a text
    params: Mapping[str, Any]
    #: losses as the objective returned them, constraints, and metrics that are numbers
    metrics: Mapping[str, float]
    #: the FACTS, the user and the error, except those that are not known
    facts: Mapping[str, str]
    #: step, time and losses by name of each report, sorted by step. Losses may be NaN or infinite
    reports: Sequence[tuple[int, float, Mapping[str, float]]]
    #: seconds since the epoch
    started_at: float
    finished_at: float


class Tracker(Protocol):
    """Shows the ended trials of one study in another tool. It is made with the study's record and the URI.

    Any call may raise any exception. The object is then dropped, and later another one is made. UsageError means that
    this would not help: the tool needs a login, or has another study under the name of this one.
    """

    #: numbers of the trials that the tool showed completely when the object was made
    known: Collection[int]

    def log(self, trial: EndedTrial) -> None:
        """Show a trial. If an interrupted call has left a part of it, complete or replace this part."""

    def close(self) -> None:
        """Note that the run has ended."""


def ended(study: StudyResults, trial: TrialResult) -> EndedTrial:
    """Return a trial as trackers show it. If several attempts have reported a step, the last of them counts."""
    first = next(iter(study.objectives), "loss")
    metrics = {**trial.metrics, **{f"constraint.{name}": value for name, value in trial.constraints.items()}}
    metrics |= trial.losses or ({} if trial.loss is None else {first: turned_first(trial.loss, study.objectives)})
    numbers = [(k, v) for k, v in metrics.items() if isinstance(v, (int, float)) and abs(v) < 1e308]
    facts = {"user": study.record.owner, "error": trial.error and headline(trial.error)}
    facts |= {name: getattr(trial, name) for name in FACTS}
    shown = study.shown(trial)
    by_step = {each.step: (each.at, each.losses or {first: each.loss}) for each in trial.reports}
    return EndedTrial(
        number=trial.number,
        id=f"{study.key}-{trial.number}",
        params={printable(k): v if isinstance(v, (int, float)) else printable(str(v)) for k, v in shown.items()},
        metrics={printable(name): float(value) for name, value in numbers},
        facts={name: printable(str(fact)) for name, fact in facts.items() if fact is not None},
        reports=[(step, *by_step[step]) for step in sorted(by_step)],
        started_at=trial.started_at or trial.finished_at or 0.0,
        finished_at=trial.finished_at or 0.0,
    )


class Follower:
    """Brings a tracker up to date with the store, in turns that may fail."""

    def __init__(self, tracker: str, uri: str, store: SqlStore, study: str, tell: Callable[[str], None]) -> None:
        """`study` is the name of a study of `store`. `tell` shows a line to the user."""
        self._name, self._uri, self._store, self._tell = tracker, uri, store, tell
        self._study, self._outage = StudyResults(store, store.find(study)), Outage(tracker)
        self._tracker: Tracker | None = None
        #: latest change number of the study that was read, -1 before the first reading; and numbers of the trials that
        #: the tracker shows
        self._change, self._shown = -1, set[int]()
        #: numbers of the ended trials that the tracker lacks, in the order in which they are tried
        self.lacking = dict[int, None]()
        #: True once the scheduler is dead. The next one may run already, so no further trial is shown
        self.is_orphan = False
        #: seconds until the next turn; and time of the tracker's last sign of life
        self.pause, self.alive_at = LOOK_SECONDS, 0.0

    def run(self, has_ended: threading.Event) -> None:
        """Take turns until the run has ended, and then as long as they show some of the trials but not all."""
        try:
            is_last, advances = False, True
            while advances or not is_last:
                is_last, shown = has_ended.is_set(), len(self._shown)
                self.turn()
                advances = bool(self.lacking) and len(self._shown) > shown
                has_ended.wait(self.pause)
            if self._tracker is not None:
                self._tracker.close()
        except Exception as error:  # a library may raise anything
            if isinstance(error, UsageError):
                # Nothing is said about missing trials, because a further run alone would not add them.
                self.lacking.clear()
            self._tell(_masked(f"Warning: {error}"))

    def turn(self) -> None:
        """Show the trials that have ended. After an error, the next turn tries again. Raises UsageError."""
        trouble, self.alive_at = None, time.monotonic()
        try:
            self._look()
            self._log()
            self.pause = LOOK_SECONDS
        except UsageError:
            raise
        except Exception as error:  # a library may raise anything
            self._tracker, self.pause = None, min(2 * self.pause, MAX_PAUSE)
            cause = one_line(_masked(f"{type(error).__name__}: {error}"))
            trouble = f"Warning: {self._name} takes no trials: {cause}; trying again"
        if line := self._outage.see(trouble, time.monotonic()):
            self._tell(line)

    def _look(self) -> None:
        """Read from the store which trials have ended since the last reading."""
        # The change number is read first, so that a trial that changes meanwhile is read again.
        if (change := self._study.change) == self._change:
            return
        self._study = StudyResults(self._store, self._store.find(self._study.name))
        for rows in self._study.rows_of_trials(("number", "finished_at"), max(0, self._change)):
            self.lacking |= {number: None for number, at in rows if at is not None and number not in self._shown}
        self._change = change

    def _log(self) -> None:
        if self._tracker is None:
            self._tracker = tracker = named(TRACKERS[self._name])(self._study.record, self._uri)
            self._shown.update(tracker.known)
            self.lacking = dict.fromkeys(number for number in self.lacking if number not in self._shown)
        for number in [*self.lacking]:
            if self.is_orphan:
                return
            # It becomes the last one, so that a trial which the tracker refuses does not keep back the others.
            self.lacking[number] = self.lacking.pop(number)
            self._tracker.log(ended(self._study, self._study.trial(number)))
            del self.lacking[number]
            self._shown.add(number)
            self.alive_at = time.monotonic()


def _masked(text: str) -> str:
    """Return a library's error with asterisks in place of users and passwords in URLs."""
    return re.sub(r"//[^/@\s]*@", "//***@", text)


def claim(root: Path, study: StudyRecord) -> Path:
    """Make the folder of the study below `root`, and return it. Raises UsageError if it is another study's."""
    folder = below(root, study.name)
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / ".shadho"
    if (note.read_text() if note.exists() else "") not in ("", study.key):
        raise UsageError(f"{folder} is of another study of this name; remove it, or give another URI, and --resume")
    note.write_text(study.key)
    return folder


def chosen(settings: StudySettings, store: str) -> dict[str, str]:
    """Return the URIs of the trackers by name, "" for the default of a tool. Raises UsageError for an invalid one."""
    parts = [each.partition(":") for each in (settings.track or NO_TRACK).split(",")]
    found = {name.strip(): uri for name, _, uri in parts if name.strip() != NO_TRACK}
    if 1 < len(parts) != len(found):
        given = one_line(mask(settings.track or ""))
        raise UsageError(f"track is {given}; name each tracker once, or {NO_TRACK} alone")
    for name, uri in found.items():
        check_name("tracker", name, (*TRACKERS, NO_TRACK))
        if mask(uri) != uri:
            raise UsageError(f"track: settings are not secret; give {name} its password in the environment")
        # A folder in which wandb keeps its files can be imported, too, but has no origin.
        if getattr(find_spec(name), "origin", None) is None:
            raise UsageError(f'track {name} needs the extra {name}; in the checkout: pip install -e ".[{name}]"')
    if found and store == LateStore.url:
        raise UsageError("track needs a store outside of this process; give one, such as store='sqlite:///shadho.db'")
    return found


class Trackers:
    """The processes that show the ended trials of a study in trackers, one for each tracker."""

    def __init__(self, settings: StudySettings, record: StudyRecord, store: str) -> None:
        """Start the processes. Raises UsageError as `chosen`."""
        arguments = [sys.executable, "-m", __name__, record.name, str(os.getpid())]
        # The store is passed in a variable, because other users can see arguments, and its URL may have a password.
        # Ctrl-C in the terminal must reach only the run. In a session of its own, no process can ask for a login.
        form: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        form |= {"env": {**os.environ, STORE: store}, "start_new_session": True}
        self._all = dict[str, Any]()
        for name, uri in chosen(settings, store).items():
            self._all[name] = subprocess.Popen([*arguments, name, uri], **form)
            os.set_blocking(self._all[name].stdout.fileno(), False)

    def news(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the lines for the user since the last call."""
        for each in self._all.values():
            for line in (each.stdout.read() or b"").decode(errors="replace").splitlines():
                tell(line)

    def close(self, tell: Callable[[str], None], is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait for trackers as long as they advance, and end their processes. `tell` shows a line to the user.

        All trials must be recorded before. The wait ends early if `is_interrupted`, or with a KeyboardInterrupt.
        """
        try:
            for each in self._all.values():
                # A byte is written, because a process that was forked from this one may keep the pipe open.
                with suppress(OSError):
                    each.stdin.write(b"\n")
                    each.stdin.close()
            while any(each.poll() is None for each in self._all.values()) and not is_interrupted():
                time.sleep(TICK_SECONDS)
                self.news(tell)
        finally:
            for each in self._all.values():
                each.kill()
                each.wait()
        self.news(tell)
        for name, each in self._all.items():
            each.stdout.close()
            if each.returncode:
                tell(f"{name} may lack trials; --resume adds them")


def main(name: str, scheduler: str, tracker: str, uri: str) -> None:
    """Show the trials of the study `name` in a tracker until the run writes a byte to standard input."""
    from shadho_celery.store.sql import SqlStore

    # Standard output is for the lines of `tell`, but libraries print on it, too.
    out = os.dup(1)
    os.dup2(2, 1)

    def tell(text: str) -> None:
        with suppress(BrokenPipeError):  # the scheduler may be dead
            os.write(out, f"{one_line(text, 1000)}\n".encode())

    store = SqlStore(os.environ.pop(STORE), read_only=True)
    lock = below(TRACKED, store.find(name).key, tracker)
    with suppress(OSError):
        # The process of a scheduler that was killed may still finish a call.
        lock.parent.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(lock, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
    follower, has_ended = Follower(tracker, uri, store, name, tell), threading.Event()
    thread = threading.Thread(target=follower.run, args=(has_ended,), daemon=True)
    thread.start()
    idle_since = ended_at = time.monotonic()
    used, patience = 0.0, WAIT_SECONDS
    while thread.is_alive() and time.monotonic() - idle_since < END_SECONDS:
        thread.join(TICK_SECONDS)
        # A call in progress may still finish, because the tool may be left unusable otherwise.
        follower.is_orphan = os.getppid() != int(scheduler)
        now, before, used = time.monotonic(), used, time.process_time()
        if not (follower.is_orphan or select.select([0], [], [], 0)[0]):
            idle_since = ended_at = now
            continue
        has_ended.set()
        if follower.alive_at > idle_since or used - before > BUSY_SECONDS:
            idle_since = now
        if now - ended_at > patience and follower.lacking:
            tell(f"{tracker} still lacks {counted(len(follower.lacking), 'trial')}; Ctrl-C ends the wait")
            patience *= 2
    if follower.lacking:
        tell(f"{tracker} lacks {counted(len(follower.lacking), 'trial')}; a run with --resume {name} adds them")
    # The thread may hang, and so may threads of libraries.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
