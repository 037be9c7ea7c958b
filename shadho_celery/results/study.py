"""A recorded study: its results, their form as JSON in all commands, its deletion, and the calls of user's functions.

The user's functions are called as `on_trial(study, trial)` after each trial, and `on_end(study, why)` after a run.
"""

from __future__ import annotations

import math
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, suppress
from typing import TYPE_CHECKING, Any, TextIO

from msgspec import Struct, to_builtins

from shadho_celery.core.checks import accepts, guess, one_line, plain, short
from shadho_celery.core.columns import names
from shadho_celery.core.failures import Failure, Failures, read_failure
from shadho_celery.core.files import CHECKPOINTS, EMBEDDED, FOLDERS, LOCK, LOCK_SECONDS, below, is_locked
from shadho_celery.core.records import notes_of
from shadho_celery.core.trial import COUNTED, MAX_COUNT, MAX_LEVELS, Report, Trial, TrialState
from shadho_celery.errors import NoSuccessfulTrial, StudyLocked, UsageError
from shadho_celery.results.frame import make_frame, write_csv
from shadho_celery.results.report import Ended, Recorded, Run, StudyFacts, StudyReport, report_of, state_at_rest
from shadho_celery.results.trial import Records, TrialResult, TrialResults, Values
from shadho_celery.space.space import Space
from shadho_celery.store.base import StudyRecord, holder_name
from shadho_celery.store.memory import LateStore, database
from shadho_celery.study.front import Coverage, coverage
from shadho_celery.study.repeats import Repeated
from shadho_celery.study.table import RungSummary

if TYPE_CHECKING:
    import pandas as pd

    from shadho_celery.store.sql import SqlStore


class Deleted(Struct, frozen=True, kw_only=True):
    """Result of deleting a study: what was removed, and what is left."""

    name: str
    #: the study's key
    key: str
    trials: int
    #: greatest number of a trial plus one; numbers may be missing, so it may exceed `trials`
    numbers: int
    #: folders of this machine that were removed
    folders: Sequence[str]
    #: folders of this machine that could not be removed
    left: Sequence[str]
    #: other machines that may have its checkpoints; and their folder there, relative to a worker's working directory
    hosts: Sequence[str]
    folder_there: str


class StudyResults(StudyFacts):
    """A recorded study. Each call reads its store again. Reading takes no lock, so it works while the study runs."""

    def __init__(self, store: SqlStore | LateStore, record: StudyRecord, space: Space | None = None) -> None:
        """`space` is the study's space, if it is available. Without it, the values of trials are those in the store."""
        self._store = store
        #: record of the study, as it was when this object was created
        self.record = record
        self._values = Values(record, space)

    @property
    def _database(self) -> SqlStore:
        return database(self._store)

    @property
    def choices(self) -> Mapping[str, str]:
        """By subspace: the latest choice of the sampler `auto` and its reason; empty with other samplers."""
        return self._database.find(self.name).choices

    @property
    def rungs(self) -> Sequence[RungSummary]:
        """Summary of the finished trials at each budget, the lowest budget first; empty in a study without budgets."""
        return self.recorded.trials.rungs()

    @property
    def taught(self) -> int:
        """Number of trials of earlier studies from which it learns (warm start). They are not among its own trials."""
        return len(self._database.warm_start(self.key))

    @property
    def store(self) -> str:
        """URL of its store, without the password."""
        return self._store.safe_url

    @property
    def running_on(self) -> str | None:
        """Host and process of the scheduler that runs the study, or None."""
        return self._database.holder(self.key, time.time())

    @property
    def state(self) -> str:
        """State in one word: running, paused, stopping, ended, stopped, interrupted or simulated.

        A study is stopped if a request or a signal ended it before it reached its limit on trials. It is interrupted if
        its scheduler ended without recording its end, for instance by a crash.
        """
        asked = self._database.steered(self.key)
        if self.running_on is None:
            # Numbers of trials are read only if they decide the state.
            at_rest = state_at_rest(self.record, asked, self.count(*COUNTED)) if "stop" in asked else "ended"
            is_interrupted = self._database.is_interrupted(self.key, time.time())
            return "simulated" if self.is_simulated else "interrupted" if is_interrupted else at_rest
        if "stop" in asked:
            return "stopping"
        return (
            "paused" if next((name for name in asked if name in ("pause", "unpause")), None) == "pause" else "running"
        )

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of trials by state, such as ``{"COMPLETE": 30}``. States without trials are left out."""
        return {str(state): count for state, count in self._store.counts(self.key).items()}

    def count(self, *states: TrialState | str) -> int:
        """Return the number of trials in one of `states`, or of all trials if none is given."""
        counts = self.counts
        return sum(counts.get(TrialState(state).value, 0) for state in states) if states else sum(counts.values())

    @property
    def trials(self) -> TrialResults:
        """All trials by number, finished or not."""
        return TrialResults(self._store, self.record, self._values)

    def trial(self, number: int) -> TrialResult:
        """Return the trial with this number. Raises UsageError if there is none, StoreError if it cannot be read."""
        # Numbers above MAX_COUNT are not looked up, because a database raises an error for very large integers.
        for trial in self._store.trials(self.key, [number] if 0 <= number <= MAX_COUNT else []):
            return self.result_of(trial)
        numbers = [*self._store.numbers(self.key)]
        known = f"its trials go from {numbers[0]} to {numbers[-1]}" if numbers else "it has none yet"
        raise UsageError(f"study {self.name!r} has no trial {short(number)}; {known}")

    @property
    def records(self) -> Records:
        """The attempts of its trials, and the workers and machines that could run them, as columns."""
        return Records(self._store, self.key)

    def notes(self, trial: int | None = None) -> list[dict[str, Any]]:
        """Return the notes on the study and its trials, or on one `trial`, sorted by time: trial, text, at and by."""
        return notes_of(self._database.actions(self.key), trial)

    @property
    def money(self) -> Mapping[str, float]:
        """By class: money that its ended attempts have cost at the prices of the workers; empty without prices."""
        return self._database.spent(self.key)

    @property
    def change(self) -> int:
        """Latest change number of the study; see `SqlStore.change`."""
        return self._database.change(self.key)

    def rows_of_trials(self, names: Sequence[str], since: int = 0) -> Iterator[Sequence[Sequence[Any]]]:
        """Yield columns of all trials in blocks of unchecked rows; see `SqlStore.rows_of_trials`."""
        return self._database.rows_of_trials(self.key, names, since)

    def rows_of_attempts(self, names: Sequence[str], since: int = 0) -> Iterator[Sequence[Sequence[Any]]]:
        """Yield columns of all attempts in blocks of unchecked rows; see `SqlStore.rows_of_attempts`."""
        return self._database.rows_of_attempts(self.key, names, since)

    def reports(self, numbers: Collection[int] | None = None) -> list[Report]:
        """Return the reports of all trials, or of the trials with these numbers, sorted by trial, attempt and step.

        Their losses are negated if the objective is maximised.
        """
        return self._store.reports(self.record.key, numbers)

    def below(self, trial: TrialResult) -> TrialResult | None:
        """Return the trial on the next lower rung that a promoted `trial` continues, or None."""
        if trial.origin is None or trial.rung is None:
            return None
        return self._numbered(
            trial.origin if trial.rung == 1 else self._database.on_rung(self.key, trial.origin, trial.rung - 1)
        )

    def above(self, trial: TrialResult) -> TrialResult | None:
        """Return the trial on the next higher rung that continues `trial`, or None if it was not promoted."""
        if trial.rung is None:
            return None
        origin = trial.number if trial.origin is None else trial.origin
        return self._numbered(self._database.on_rung(self.key, origin, trial.rung + 1))

    def _numbered(self, number: int | None) -> TrialResult | None:
        """Return the trial with this number, or None if there is no such trial."""
        return next(map(self.result_of, () if number is None else self._store.trials(self.key, [number])), None)

    @property
    def best(self) -> TrialResult:
        """The COMPLETE trial with the best loss among the trials with the highest budget.

        If no trial is feasible, it is the trial with the smallest violation. With several losses, it is the first trial
        of the front. Raises NoSuccessfulTrial, with the reason, if no trial is COMPLETE.
        """
        found = self.best_or_none
        if found is None:
            raise NoSuccessfulTrial(self.why_no_best())
        return found

    @property
    def best_or_none(self) -> TrialResult | None:
        """The trial that `best` returns; None if no trial is COMPLETE."""
        if front := self.front:
            return front[0]
        if self.has_repeats and (found := self.recorded.trials.best) is not None:
            return self.result_of(found)
        number = self._store.best(self.key)
        return None if number is None else self.trial(number)

    @property
    def repeated(self) -> Repeated | None:
        """Results of the best trial and its repeats: `results`, `mean` and `deviation`; None if it has no repeats."""
        found = self.recorded.trials.repeated if self.has_repeats else None
        return found and found.turned(self.objectives)

    @property
    def best_params(self) -> Mapping[str, Any]:
        """By active label: its value in the best trial, as the objective got it.

        For an option that contains labels, the value is the name of the option. A label within an expression has its
        drawn value.
        """
        return self._values.by_label(self.best.record)

    @property
    def best_loss(self) -> float | None:
        """Loss of the best trial, as the objective returned it: with repeats, the mean; with several losses, the first.

        None if no trial is feasible.
        """
        if (found := self.repeated) is not None:
            return found.mean
        best = self.best_or_none
        return None if best is None or not best.is_feasible else next(iter(best.losses.values()), best.loss)

    def why_no_best(self) -> str | None:
        """Return why the study has no best trial, with its most frequent failure; None if it has a best trial."""
        if self.best_or_none is not None:
            return None
        states = {name.lower(): count for name, count in self.counts.items()}
        counts = ", ".join(f"{count} {name}" for name, count in states.items()) or "none so far"
        failures = Failures(self.recorded.trials.of_state(TrialState.FAILED)).common()
        why = f"; {failures[0]}" if failures else ""
        return f"study {self.name} has no successful trial ({counts}){why}"

    def shown(self, trial: TrialResult) -> Mapping[str, Any]:
        """Return the value of each active label of a trial as tables show it."""
        return self._values.shown(trial.record)

    def option(self, label: str, drawn: Any) -> Any:
        """Return the option of a choice as a chart shows it: in the short form of `brief`."""
        return self._values.option(label, drawn)

    @property
    def front(self) -> list[TrialResult]:
        """Feasible trials that no other trial dominates, sorted by the first loss; empty in a study with one loss.

        A trial dominates another if it is as good in all losses, and better in at least one.
        """
        return [self.result_of(trial) for trial in self.recorded.trials.front] if len(self.objectives) > 1 else []

    def coverage(self, reference: Mapping[str, float] | None = None) -> Coverage | None:
        """Return the hypervolume of the front over time; None for a study with one loss, or without a feasible trial.

        The `reference` point has a loss for each name, as the objective returns it. By default it is worse than the
        worst value of each loss so far, by a tenth of the loss's range. Raises UsageError unless it has a finite number
        for each loss.
        """
        return coverage(*self.recorded.trials.losses(self.objectives), self.objectives, reference)

    def read_report(self) -> StudyReport:
        """Return the results of the study so far in one record."""
        return report_of(self.recorded, self._database, self._values, running_on=self.running_on, state=self.state)

    @property
    def recorded(self) -> Recorded:
        """The trials of the study as they are in the store now."""
        return Recorded(self._database, self.record)

    def result_of(self, trial: Trial) -> TrialResult:
        """Return the `TrialResult` of a trial that was read from the store."""
        return TrialResult(trial, self._values, self._store, self.record)

    @property
    def values_note(self) -> str | None:
        """Reason why some values that were read so far are texts instead of the objective's values; None if there are
        none.
        """
        return self._values.note

    def dataframe(self) -> pd.DataFrame:
        """Return the trials as a pandas DataFrame: one row per trial, one column per label and per metric."""
        return make_frame(self.trials, self._values)

    def write_csv(self, file: TextIO, trials: Iterable[TrialResult] | None = None, *, plain: bool = False) -> None:
        """Write the table of `dataframe` as CSV, without pandas; `trials` are all trials by default.

        A text that a spreadsheet would run as a formula gets an apostrophe in front, unless `plain`.
        """
        write_csv(self.trials if trials is None else trials, self._values, file, plain=plain)

    def delete(self) -> Deleted:
        """Delete the study with its trials and reports, and its folders below the current working directory.

        The call waits a few seconds for embedded workers that are still ending. Raises StudyLocked if they have not
        ended, or if the study runs. The result names other machines that may have its checkpoints. Trials that still
        run on a fleet are not stopped here; the command `rm` stops them.
        """
        from shadho_celery.store.sql import SqlStore

        with closing(SqlStore(self._store.url)) as store:
            store.find(self.name)
            if (where := store.holder(self.key, time.time())) is not None:
                raise StudyLocked(f"study {self.name!r} is run by the scheduler on {where}; stop it first")
            if is_locked(EMBEDDED / self.key / LOCK, LOCK_SECONDS):
                raise StudyLocked(f"the workers of study {self.name!r} are still ending; try again in a few seconds")
            fence = store.lock(self.key, holder_name(), time.time())
            trials, numbers = sum(store.counts(self.key).values()), max(store.numbers(self.key), default=-1) + 1
            hosts = store.tally(self.key, "host")
            store.delete(self.key, fence)
        # If the study has no checkpoints here, this machine is named too: its workers may have had another folder.
        here = {"this process"} | ({socket.gethostname()} if (CHECKPOINTS / self.key).is_dir() else set())
        found = [folder for each in FOLDERS if (folder := each / self.key).is_dir()]
        for folder in found:
            with suppress(UsageError):
                # A link is not followed, because it may lead to a folder of another user.
                shutil.rmtree(below(folder.parent, folder.name), ignore_errors=True)
        return Deleted(
            name=self.name,
            key=self.key,
            trials=trials,
            numbers=numbers,
            folders=[str(folder) for folder in found if not folder.exists()],
            left=[str(folder) for folder in found if folder.exists()],
            hosts=[host for host in hosts if host not in here],
            folder_there=str(CHECKPOINTS / self.key),
        )

    if not TYPE_CHECKING:
        # Hidden from type checkers. With a `__getattr__`, they would accept any name.

        def __getattr__(self, name: str) -> Any:
            hint = guess(name, dir(type(self))).rstrip("; ")
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}{hint and f'; {hint}'}")

    def __repr__(self) -> str:
        return f"<study {self.name!r} in {self.store}>"


class RunningStudy(StudyResults):
    """A study that runs, as it is passed to `on_trial`: its results so far, and the method `stop`."""

    #: called by `stop`; set by the run
    end: Callable[[], None]

    def stop(self) -> None:
        """End the study as if it had reached a limit: no more trials are sent, and running trials finish."""
        self.end()


#: called with the study and one of its ended trials
OnTrial = Callable[[RunningStudy, TrialResult], Any]
#: called with the study and the reason why its run has ended
OnEnd = Callable[[StudyResults, str], Any]


class TrialCallback:
    """Calls the user's function with each ended trial. If it raises, the study continues.

    Exceptions that come from the same line of code are reported once.
    """

    def __init__(self, function: OnTrial, study: RunningStudy, say: Callable[[str], None]) -> None:
        self._function = function
        self._study = study
        self._say = say
        self._said: set[str] = set()

    def __call__(self, trial: Trial) -> None:
        """Call the user's function with a recorded trial."""
        try:
            self._function(self._study, self._study.result_of(trial))
        except (Exception, SystemExit) as error:
            failure = _failure(error)
            if failure.location not in self._said:
                self._said.add(failure.location)
                self._say(f"on_trial failed after trial {trial.number}: {one_line(failure)}; the study continues")


class EndCallback(AbstractContextManager["EndCallback"]):
    """Calls the user's function with the reason at the end of a `with` block, if a run has begun in it."""

    #: the study; None until its run begins
    study: StudyResults | None = None
    #: reason of the end, unless the block ends with an error
    why = ""

    def __init__(self, function: OnEnd | None, say: Callable[[str], None]) -> None:
        self._function, self._say = function, say

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        try:
            if self._function is not None and self.study is not None:
                failed = f"failed: {type(error).__name__}: {one_line(error)}".rstrip(": ")
                self._function(self.study, self.why if error is None else failed)
        except (Exception, SystemExit, KeyboardInterrupt) as raised:
            self._say(f"on_end failed: {one_line(_failure(raised))}")


def check_callbacks(of: str = "", **functions: object) -> None:
    """Raise UsageError unless `on_trial` and `on_end` can be called as they will be, or are None.

    `of` follows their names in the message.
    """
    for name, function in functions.items():
        if function is not None and not (callable(function) and accepts(function, 2)):
            second = {"on_trial": "trial", "on_end": "why"}[name]
            what = f"cannot be called with two arguments: it is {short(function, 60)}"
            raise UsageError(f"{name}{of} {what}; write def {name}(study, {second})")


def _failure(error: BaseException) -> Failure:
    return read_failure("".join(traceback.format_exception(error)))


_S = TrialState


def trial_json(trial: TrialResult) -> dict[str, Any]:
    """Return a trial as plain values for JSON.

    `loss` is the first loss, as the objective returned it.
    """
    found = {name: getattr(trial, name) for name in names()}
    loss = next(iter(trial.losses.values()), trial.loss)
    return {"number": trial.number, "values": _values(trial), **found, "loss": loss}


def reports_json(trial: TrialResult) -> list[dict[str, Any]]:
    """Return the reports of a trial as plain values for JSON."""
    reports = [
        {name: getattr(each, name) for name in ("attempt", "step", "loss", "losses", "at")} for each in trial.reports
    ]
    return [{name: value for name, value in each.items() if name != "losses" or value is not None} for each in reports]


def attempt_json(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Return an attempt, as `Records.of_trial` returns it, as plain values for JSON."""
    return {**attempt, "placed": {name: each._asdict() for name, each in attempt["placed"].items()}}


#: attributes of a report that have the same name in JSON: plain values, and records
_PLAIN = ["owner", "state", "running_on", "store", "module", "seed", "created_at", "objectives", "settings", "in_force"]
_PLAIN += ["space", "command", "warm_start", "money", "money_to_best", "hosts", "codes"]
_RECORDS = ("rungs", "placed_by_params", "subspaces", "actions")


def study_json(report: StudyReport, run: Run | None = None) -> dict[str, Any]:
    """Return a study as plain values for JSON. `run` is given by the process that has run the study."""
    slots = {} if run is None else run.slots
    return {
        #: name of the study in its store
        "study": report.name,
        **{name: getattr(report, name) for name in _PLAIN},
        #: seconds of the run that prints it, else null
        "seconds": None if run is None else round(run.seconds, 3),
        #: seconds in which trials ran, in all runs
        "active_seconds": round(report.active_seconds, 3),
        **trials_json(report.counts),
        #: the best trial, or null
        "best": None if report.best is None else trial_json(report.best),
        #: `results` of the best trial under several seeds, their `mean` and `deviation`; null without repeats
        "repeated": to_builtins(report.repeated),
        #: the trials on the front of several losses
        "front": [*map(trial_json, report.front)],
        #: `reference` point, and `history` of (ended trials, hypervolume of the front); null with one loss
        "hypervolume": report.coverage and to_builtins(report.coverage),
        #: notes on it and its trials: `at`, `by` whom, `trial` or null, `text`; in `trial --json`, those on that trial
        "notes": notes_of(report.actions),
        #: with `--place-by money`: `deadline`, `money` (null if missed), `an_hour` (what an hour more saves)
        "money_plan": to_builtins(report.record.money_plan),
        #: by compute class: numbers of ended trials; `slots`: most live slots in the run that prints it, else null
        "classes": {
            name: to_builtins(report.classes.get(name, Ended(complete=0, pruned=0, failed=0)))
            | {"slots": None if run is None else slots.get(name, 0)}
            for name in sorted({*report.classes, *slots})
        },
        #: name of the sampler, and by subspace the latest choice of `auto`
        "sampler": {"name": report.in_force.get("sampler"), "choices": dict(report.record.choices)},
        #: name of the pruner
        "pruner": report.in_force.get("pruner"),
        **{name: to_builtins(getattr(report, name)) for name in _RECORDS},
        #: by exception, line and message without values: `failure`, number of `trials`, number of the `first`
        "failures": [
            {"failure": str(each.failure), "trials": each.trials, "first": each.first} for each in report.failures
        ],
        #: lines about warnings of trials, lost attempts, and trials that wait
        "notices": [*report.notices, *(() if run is None else run.notices), *filter(None, [report.still_words])],
    }


def trials_json(counts: Mapping[TrialState, int]) -> dict[str, dict[str, int]]:
    """Return the numbers of ended and of open trials by state. `total` is the number of ended trials except cancelled
    ones.
    """

    def numbers(*states: TrialState) -> dict[str, int]:
        return {state.lower(): counts.get(state, 0) for state in states}

    counted = numbers(_S.COMPLETE, _S.FAILED, _S.PRUNED)
    ended = {"total": sum(counted.values()), **counted, **numbers(_S.CANCELLED)}
    #: numbers of ended trials by state, and their `total` without cancelled ones; numbers of the other trials by state
    return {"trials": ended, "open": numbers(_S.WAITING, _S.QUEUED, _S.RUNNING)}


def listed_json(study: StudyResults) -> dict[str, Any]:
    """Return a study's entry in a list of studies: a few of the facts in `study_json`, and the best loss."""
    return {
        "study": study.name,
        **{name: getattr(study, name) for name in ("owner", "state", "running_on", "module", "command", "created_at")},
        **trials_json({TrialState(state): count for state, count in study.counts.items()}),
        #: loss of the best trial, or the mean with repeats; only in `studies --json`
        "best_loss": study.best_loss,
    }


def plain_json(value: Any) -> Any:
    """Convert a value to plain values for JSON. NaN and infinity become null, and objects of other types become their
    repr.
    """
    return _known(plain(value, MAX_LEVELS))


def _values(trial: TrialResult) -> Any:
    try:
        return trial.values
    except Exception as error:  # a space may call any function, which may fail for these params
        return f"({type(error).__name__})"


def _known(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _known(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_known(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        # msgspec refuses subclasses of str, such as `space.stored.Shown`, so they are converted.
        return str.__str__(value)
    return value if value is None or isinstance(value, (bool, int)) else repr(value)
