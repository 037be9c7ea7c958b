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
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from shadho_celery.core.checks import check_name, mask, one_line, printable
from shadho_celery.core.failures import headline
from shadho_celery.core.files import TRACKED, below
from shadho_celery.core.names import NO_TRACK, TRACKERS, named
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import Outage
from shadho_celery.core.trial import Report, Trial, turned, turned_first
from shadho_celery.core.units import counted
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults
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
#: seconds without a sign of life after which a tracker counts as hanging; and after which the end of a run, which waits
#: for the last trials, ends its process
HANG_SECONDS, END_SECONDS = 60.0, 20.0
#: seconds of a processor between two checks that are a sign of life, such as those that MLflow needs to make its tables
BUSY_SECONDS = 0.005
#: number of trials that are read from the store at a time
PART = 100
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


def ended(study: StudyResults, trial: Trial, reports: Sequence[Report]) -> EndedTrial:
    """Return a trial as trackers show it. If several attempts have reported a step, the last of them counts."""
    result, ways = study.result_of(trial), study.objectives
    first = next(iter(ways), "loss")
    metrics = {**result.metrics, **{f"constraint.{name}": value for name, value in result.constraints.items()}}
    metrics |= result.losses or ({} if result.loss is None else {first: turned_first(result.loss, ways)})
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float)) and abs(value) < 1e308}
    facts = {"user": study.record.owner, "error": result.error and headline(result.error)}
    facts |= {name: getattr(result, name) for name in FACTS}
    shown = {
        label: value if isinstance(value, (int, float)) else str(value) for label, value in study.shown(result).items()
    }
    by_step = {each.step: (each.at, each.losses or {first: each.loss}) for each in reports}
    return EndedTrial(
        number=trial.number,
        id=f"{study.key}-{trial.number}",
        params={
            printable(label): printable(value) if isinstance(value, str) else value for label, value in shown.items()
        },
        metrics={printable(name): float(value) for name, value in numbers.items()},
        facts={name: printable(str(fact)) for name, fact in facts.items() if fact is not None},
        reports=[(step, at, turned(losses, ways)) for step, (at, losses) in sorted(by_step.items())],
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
        #: seconds until the next turn; and time of the tracker's last sign of life, None between two turns
        self.pause, self.alive_at = LOOK_SECONDS, cast("float | None", None)

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
            self._tell(f"Warning: {error}")

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
            cause = one_line(re.sub(r"//[^/@\s]*@", "//***@", f"{type(error).__name__}: {error}"))
            trouble = f"takes no trials: {cause}; trying again"
        self.alive_at = None
        self.see(trouble)

    def see(self, trouble: str | None) -> None:
        """Tell the user when an outage of the tracker begins, and when it has ended."""
        if line := self._outage.see(trouble and f"Warning: {self._name} {trouble}", time.monotonic()):
            self._tell(line)

    def _look(self) -> None:
        """Read from the store which trials have ended since the last reading."""
        # The change number is read first, so that a trial that changes meanwhile is read again.
        change = self._study.change
        if change == self._change:
            return
        self._study = StudyResults(self._store, self._store.find(self._study.name))
        for rows in self._study.rows_of_trials(("number", "finished_at"), max(0, self._change)):
            numbers = (number for number, finished_at in rows if finished_at is not None)
            self.lacking |= dict.fromkeys(number for number in numbers if number not in self._shown)
        self._change = change

    def _log(self) -> None:
        if self._tracker is None:
            self._tracker = tracker = named(TRACKERS[self._name])(self._study.record, self._uri)
            self._shown.update(tracker.known)
            self.lacking = dict.fromkeys(number for number in self.lacking if number not in self._shown)
        while part := [*islice(self.lacking, PART)]:
            reports = defaultdict[int, list[Report]](list)
            for report in self._study.reports(part):
                reports[report.number].append(report)
            found = {trial.number: trial for trial in self._store.trials(self._study.key, part)}
            for number in part:
                if self.is_orphan:
                    return
                del self.lacking[number]
                if number in found:
                    # It becomes the last one, so that a trial which the tracker refuses does not keep back the others.
                    self.lacking[number] = None
                    self._tracker.log(ended(self._study, found[number], reports[number]))
                    del self.lacking[number]
                self._shown.add(number)
                self.alive_at = time.monotonic()


def claim(folder: Path, study: StudyRecord) -> None:
    """Make a folder for the study. Raises UsageError if it is another study's."""
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / ".shadho"
    if (note.read_text() if note.exists() else "") not in ("", study.key):
        raise UsageError(f"{folder} is of another study of this name; remove it, or give another URI, and --resume")
    note.write_text(study.key)


def chosen(settings: StudySettings, store: str) -> dict[str, str]:
    """Return the URIs of the trackers by name, "" for the default of a tool. Raises UsageError for an invalid one."""
    parts = [each.partition(":") for each in (settings.track or NO_TRACK).split(",")]
    found = {name.strip(): uri for name, _, uri in parts if name.strip() != NO_TRACK}
    if 1 < len(parts) != len(found):
        raise UsageError(
            f"track is {one_line(mask(settings.track or ''))}; name each tracker once, or {NO_TRACK} alone"
        )
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

    def news(self) -> list[str]:
        """Return the lines for the user since the last call."""
        said = [each.stdout.read() or b"" for each in self._all.values()]
        return [line for each in said for line in each.decode(errors="replace").splitlines()]

    def close(self, is_interrupted: Callable[[], bool] = lambda: False) -> list[str]:
        """Wait for trackers as long as they advance, and end their processes. Return the last lines for the user.

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
        finally:
            for each in self._all.values():
                each.kill()
                each.wait()
        killed = [f"{name} may lack trials; --resume adds them" for name, each in self._all.items() if each.returncode]
        lines = [*self.news(), *killed]
        while self._all:
            self._all.popitem()[1].stdout.close()
        return lines


def main(name: str, scheduler: str, tracker: str, uri: str) -> None:
    """Show the trials of the study `name` in a tracker until the run writes a byte to standard input."""
    from shadho_celery.store.sql import SqlStore

    # Standard output is for the lines of `tell`, but libraries print on it, too.
    out = os.dup(1)
    os.dup2(2, 1)

    def tell(text: str) -> None:
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
    idle_since, used = time.monotonic(), 0.0
    while thread.is_alive() and not (has_ended.is_set() and time.monotonic() - idle_since > END_SECONDS):
        thread.join(TICK_SECONDS)
        # A call in progress may still finish, because the tool may be left unusable otherwise.
        follower.is_orphan = os.getppid() != int(scheduler)
        if follower.is_orphan or has_ended.is_set() or select.select([0], [], [], 0)[0]:
            has_ended.set()
        now, before, used = time.monotonic(), used, time.process_time()
        if (follower.alive_at or now) > idle_since or used - before > BUSY_SECONDS:
            idle_since = now
        if now - idle_since > HANG_SECONDS:
            follower.see(f"has not answered for {HANG_SECONDS:.0f} s")
    if follower.lacking:
        tell(f"{tracker} lacks {counted(len(follower.lacking), 'trial')}; a run with --resume {name} adds them")
    # The thread may hang, and so may threads of libraries.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
