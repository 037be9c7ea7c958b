"""Trackers, which show ended trials in other tools: their role, and a process for each of them beside a run.

The process reads the store, asks its tracker which trials it shows, and adds the others. So a resumed study continues,
nothing about trackers is stored, and a tracker that hangs, prints or is slow affects no run. `Trackers` starts and ends
the processes, each of which runs `main`.
"""

from __future__ import annotations

import fcntl
import os
import re
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from subprocess import PIPE, Popen
from tempfile import TemporaryFile
from typing import Any, Protocol

from shadho_celery.core.checks import check_name, mask, one_line, printable
from shadho_celery.core.files import TRACKED, below
from shadho_celery.core.names import NO_TRACK, TRACKERS, named
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import Outage
from shadho_celery.errors import UsageError
from shadho_celery.results.study import StudyResults, trial_json
from shadho_celery.store.memory import LateStore

#: environment variable of a tracker's process with the URL of the store
STORE = "SHADHO_TRACKED_STORE"
#: folder of this package; and program of a tracker's process, which searches no module in the working directory,
#: because a file there may have the name of a library
ROOT = str(Path(__file__).parents[2])
CHILD = f"import sys\nsys.path = [*filter(None, sys.path), {ROOT!r}]\nfrom {__name__} import main\nmain(*sys.argv[1:])"
#: seconds between two checks whether a process has ended; between two readings of the store; and at most between two
#: tries after an error
TICK_SECONDS, LOOK_SECONDS, MAX_PAUSE = 0.1, 1.0, 60.0
#: seconds after the end of a run after which a line tells that it waits; and then seconds without a further trial after
#: which the process ends. On a busy machine, MLflow takes half a minute to be imported and to make its tables
WAIT_SECONDS, END_SECONDS = 10.0, 40.0


class EndedTrial:
    """An ended trial for trackers. All texts are printable."""

    def __init__(self, study: StudyResults, number: int) -> None:
        trial = study.trial(number)
        found, shown = {**trial_json(trial), "user": study.owner}, study.shown(trial).items()
        first, end = next(iter(study.objectives), "loss"), trial.finished_at or 0.0
        #: number in the study; globally unique id; and seconds since the epoch
        self.number, self.id, self.started_at = number, f"{study.key}-{number}", trial.started_at or end
        #: by label: the value as tables show it, a bool, a number or a text
        self.params = {printable(k): v if isinstance(v, (int, float)) else printable(str(v)) for k, v in shown}
        #: the user, and those facts of the trial's JSON that are texts or numbers
        self.facts = {name: printable(str(v)) for name, v in found.items() if isinstance(v, (str, int, float))}
        numbers = {**found["metrics"], **{f"constraint.{name}": v for name, v in found["constraints"].items()}}
        numbers |= found["losses"] or {first: found["loss"]}
        metrics = {printable(k): float(v) for k, v in numbers.items() if isinstance(v, (int, float)) and abs(v) < 1e308}
        # If several attempts have reported a step, the last of them counts.
        steps = {each.step: (each.step, each.at, each.losses or {first: each.loss}) for each in trial.reports}
        #: step, seconds since the epoch, and numbers by name: the losses of each report, which may be NaN or infinite;
        #: then, for the end, the losses as the objective returned them, constraints, and metrics that are numbers
        self.points = [*(steps[step] for step in sorted(steps)), (max(steps, default=0), end, metrics)]


class Tracker(Protocol):
    """Shows the ended trials of one study in another tool. It is made with the study's name and key and the URI.

    Any call may raise any exception. The object is then dropped, and later another one is made.
    """

    #: numbers of the trials that the tool showed completely when the object was made
    known: Collection[int]

    def log(self, trial: EndedTrial) -> None:
        """Show a trial. If an interrupted call has left a part of it, complete or replace this part."""


class Follower:
    """Brings a tracker up to date with the store, in turns that may fail."""

    def __init__(self, tracker: str, uri: str, read: Callable[[], StudyResults], tell: Callable[[str], None]) -> None:
        """`read` reads the study's record from the store. `tell` shows a line to the user."""
        self._name, self._uri, self._read, self._tell = tracker, uri, read, tell
        self._outage = Outage(tracker)
        self._tracker: Tracker | None = None
        #: numbers of the trials that the tool shows; and of the ended trials that it lacks, in the order of the tries
        self.shown, self.lacking = set[int](), dict[int, None]()
        #: latest change number of the study that was read; and seconds until the next turn
        self._change, self.pause = 0, LOOK_SECONDS

    def run(self, has_ended: threading.Event) -> None:
        """Take turns until the run has ended, and then the last ones."""
        while not has_ended.wait(self.pause):
            self.turn()
        for _ in range(3):  # the first ones may fail
            self.turn()

    def turn(self) -> None:
        """Show the trials that have ended. After an error, the next turn tries again."""
        trouble = None
        try:
            # The record may have got labels. The change number is read before the trials, so that a trial that changes
            # meanwhile is read again.
            study = self._read()
            change = study.change
            for rows in study.rows_of_trials(("number", "finished_at"), self._change):
                self.lacking |= {number: None for number, at in rows if at is not None and number not in self.shown}
            self._change = change
            if self._tracker is None:
                self._tracker = tracker = named(TRACKERS[self._name])(study.name, study.key, self._uri)
                self.shown.update(tracker.known)
                self.lacking = {number: None for number in self.lacking if number not in self.shown}
            for number in [*self.lacking]:
                # It becomes the last one, so that a trial which the tool refuses does not keep back the others.
                self.lacking[number] = self.lacking.pop(number)
                self._tracker.log(EndedTrial(study, number))
                del self.lacking[number]
                self.shown.add(number)
            self.pause = LOOK_SECONDS
        except Exception as error:  # a library may raise anything
            self._tracker, self.pause = None, min(2 * self.pause, MAX_PAUSE)
            cause = _said(f"{type(error).__name__}: {error}")
            trouble = f"Warning: {self._name} takes no trials: {cause}; trying again"
        if line := self._outage.see(trouble, time.monotonic()):
            self._tell(line)


def _said(text: str) -> str:
    """Return a library's error in one line, with asterisks in place of users and passwords in URLs."""
    return one_line(re.sub(r"//[^/@\s]*@", "//***@", text))


def claim(root: Path, study: str, key: str) -> Path:
    """Make the folder of the study below `root`, and in it one for unfinished files, which is returned.

    Raises UsageError if the study's folder is another study's.
    """
    part = below(root, study, f".shadho-{key}")
    if any(each != part for each in part.parent.glob(".shadho-*")):
        raise UsageError(f"{part.parent} is of another study of this name; move it away, or resume with another URI")
    part.mkdir(parents=True, exist_ok=True)
    return part


def chosen(settings: StudySettings, store: str) -> dict[str, str]:
    """Return the URIs of the trackers by name, "" for the default of a tool. Raises UsageError for an invalid one."""
    parts = [each.strip().partition(":") for each in (settings.track or NO_TRACK).split(",")]
    found = {name: uri for name, _, uri in parts if name != NO_TRACK}
    if 1 < len(parts) != len(found):
        raise UsageError(f"track is {mask(settings.track or '')!r}; name each tracker once, or {NO_TRACK} alone")
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

    def __init__(self, settings: StudySettings, study: str, store: str) -> None:
        """Start the processes. `study` is its name, and `store` a URL. Raises UsageError as `chosen`."""
        #: by tracker: its process, until the end of this was noticed
        self._study, self._all = study, dict[str, Any]()
        # Ctrl-C in the terminal must reach only the run. In a session of its own, no process can ask for a login. The
        # store is passed in a variable, because other users can see arguments, and its URL may have a password.
        form: Any = {"start_new_session": True, "env": {**os.environ, STORE: store}, "stdin": PIPE, "stdout": PIPE}
        for name, uri in chosen(settings, store).items():
            # Libraries may print a lot on standard error, which a pipe could not take.
            errors = TemporaryFile()  # noqa: SIM115 # closed with the process
            process: Any = Popen([sys.executable, "-c", CHILD, study, name, uri], stderr=errors, **form)
            self._all[name], process.stderr = process, errors
            os.set_blocking(process.stdout.fileno(), False)

    def news(self, tell: Callable[[str], None]) -> None:
        """Call `tell` with the lines for the user since the last call, and once for a process that has failed."""
        for name, process in [*self._all.items()]:
            code = process.poll()
            for line in (process.stdout.read() or b"").decode(errors="replace").splitlines():
                tell(line)
            if code is not None:
                process.stderr.seek(0)
                with self._all.pop(name):
                    last = b"".join(deque(process.stderr, 1)).decode(errors="replace")
                # -9 is that of `close`.
                cause = "" if code in (os.EX_TEMPFAIL, -9) else f", as its process ended: {_said(last) or code}"
                if code:
                    tell(f"{name} may lack trials{cause}; a run with --resume {self._study} adds them")

    def close(self, tell: Callable[[str], None], is_interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait for trackers as long as they advance, and end their processes. `tell` shows a line to the user.

        All trials must be recorded before. The wait ends early if `is_interrupted`, or with a KeyboardInterrupt.
        """
        try:
            for each in self._all.values():
                # A byte is written, because a process that was forked from this one may keep the pipe open.
                with suppress(OSError), each.stdin:
                    each.stdin.write(b"\n")
            while self._all and not is_interrupted():
                time.sleep(TICK_SECONDS)
                self.news(tell)
        finally:
            for each in self._all.values():
                each.kill()
                each.wait()
            self.news(tell)


def main(study: str, tracker: str, uri: str) -> None:
    """Show the trials of a study in a tracker until the run writes a byte to standard input, or is dead."""
    from shadho_celery.store.sql import SqlStore

    # Standard output is for the lines of `tell`, but libraries print on it, too.
    out = os.dup(1)
    os.dup2(2, 1)

    def tell(text: str) -> None:
        with suppress(BrokenPipeError):  # the scheduler may be dead
            os.write(out, f"{text}\n".encode())

    def watch() -> None:
        os.read(0, 1)
        has_ended.set()
        time.sleep(WAIT_SECONDS)
        tell(f"{tracker} still lacks trials; Ctrl-C ends the wait")
        shown = -1
        while shown < (shown := len(follower.shown)):
            time.sleep(END_SECONDS)
        # A call hangs.
        os._exit(os.EX_TEMPFAIL)

    store, has_ended = SqlStore(os.environ.pop(STORE), read_only=True), threading.Event()
    lock = below(TRACKED, store.find(study).key, tracker)
    follower = Follower(tracker, uri, lambda: StudyResults(store, store.find(study)), tell)
    threading.Thread(target=watch, daemon=True).start()
    with suppress(OSError):
        # The process of a scheduler that was killed may still show trials.
        lock.parent.mkdir(parents=True, exist_ok=True)
        fcntl.flock(os.open(lock, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX)
    follower.run(has_ended)
    # Threads of libraries may hang, too.
    os._exit(os.EX_TEMPFAIL if follower.lacking else 0)
