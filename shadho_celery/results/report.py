"""Report of a study: the record that the live view, the summary at the end of a run, `show` and JSON display.

It is made from the state of the scheduler that runs the study, or from the store. After the end of the study, both
reports are equal. The first part of the module finds, for each subspace, the param that best explains on which compute
classes its trials were placed (`preferences`).
"""

from __future__ import annotations

import math
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery import __version__
from shadho_celery.core.checks import listed, one_line
from shadho_celery.core.failures import FailureCount, Failures
from shadho_celery.core.records import Action
from shadho_celery.core.trial import COUNTED, Trial, TrialState, shown_limit, turned_first, violation_of
from shadho_celery.core.units import counted, duration, money
from shadho_celery.results.trial import TrialResult, Values
from shadho_celery.store.base import StudyRecord
from shadho_celery.study.front import Coverage, coverage
from shadho_celery.study.repeats import Repeated
from shadho_celery.study.state import StudyState
from shadho_celery.study.table import FinishedTrials, OnClass, RungSummary, StudyTrials

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore

T = TypeVar("T")

#: minimum number of trials of a subspace before its params are examined
LEAST_TRIALS = 60
#: minimum association (Cramer's V) of param and class for a preference; 0 means that they are independent, 1 that the
#: param determines the class
LEAST_ASSOCIATION = 0.2
#: maximum p-value of such an association
SIGNIFICANCE = 1e-3
#: number of parts into which the values of a numeric param are divided; with fewer different values, each is a part
PARTS = 6
#: if the association is above this, the seconds on different classes are not compared, because too few trials with
#: similar values of the param ran on different classes
SEPARATED = 0.7
#: minimum standard deviation, in log seconds, of the difference between the param's effects on different classes
LEAST_GAIN = 0.05
#: maximum number of options in `Part.values`
OPTIONS = 4


class Part(Struct, frozen=True, kw_only=True):
    """Group of trials with similar values of a param, in a `Preference`."""

    #: text of the param's values, such as ``24 to 64``
    values: str
    trials: int
    #: compute class whose share of these trials exceeds its share of all trials by the greatest factor; and below it
    #: the class's share of these trials
    compute_class: str
    share: float


class Preference(Struct, frozen=True, kw_only=True):
    """A param of a subspace by which its trials were placed on compute classes."""

    subspace: str
    label: str
    parts: Sequence[Part]

    def __str__(self) -> str:
        parts = (f"{part.values} -> {part.compute_class} {100 * part.share:.0f} %" for part in self.parts)
        return f"{self.label} {', '.join(parts)}"


def preferences(trials: Iterable[Trial], shown: Callable[[Trial, str], Any]) -> list[Preference]:
    """Return the preferences of the subspaces whose COMPLETE trials were placed by a param, the strongest first.

    `shown` gets a trial and an active label, and returns the label's value as the objective got it.
    """
    by_subspace: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.state is TrialState.COMPLETE and trial.compute_class is not None:
            by_subspace[trial.subspace].append(trial)
    found = [best for name, told in by_subspace.items() if (best := _strongest(name, told, shown)) is not None]
    return [preference for _, preference in sorted(found, key=lambda pair: -pair[0])]


def _strongest(
    subspace: str, trials: Sequence[Trial], shown: Callable[[Trial, str], Any]
) -> tuple[float, Preference] | None:
    """Return the strength and the preference of the param with the strongest association to the class.

    Return None if no param has a significant association.
    """
    classes, places = np.unique([str(trial.compute_class) for trial in trials], return_inverse=True)
    if len(trials) < LEAST_TRIALS or len(classes) < 2:
        return None
    # A label that only some of the trials have depends on a choice. The label of that choice is examined instead.
    labels = [label for label in trials[0].params if all(label in trial.params for trial in trials)]
    strongest: tuple[float, Preference] | None = None
    logs = np.log([max(trial.outcome.seconds or 0.0, 1e-9) for trial in trials])
    for label in labels:
        values = [shown(trial, label) for trial in trials]
        groups, words = _groups(values)
        table = np.zeros((len(words), len(classes)))
        np.add.at(table, (groups, places), 1)
        strength = _association(table)
        is_strongest = strength >= LEAST_ASSOCIATION and (strongest is None or strength > strongest[0])
        if is_strongest and (strength >= SEPARATED or _gains(values, places, logs)):
            parts = _parts(table, words, [str(name) for name in classes])
            strongest = strength, Preference(subspace=subspace, label=label, parts=parts)
    return strongest


def _groups(values: Sequence[Any], parts: int = PARTS) -> tuple[NDArray[np.intp], list[tuple[Any, ...]]]:
    """Return the group of each value; and for each group, its least and greatest number, or its option as text."""
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        options, groups = np.unique([str(value) for value in values], return_inverse=True)
        return groups, [(str(option),) for option in options]
    numbers = np.array(values, float)
    distinct, groups = np.unique(numbers, return_inverse=True)
    if len(distinct) > parts:
        edges = np.quantile(numbers, np.arange(1, parts) / parts)
        groups = np.unique(np.searchsorted(edges, numbers), return_inverse=True)[1]
    members = [numbers[groups == group] for group in range(groups.max() + 1)]
    return groups, [(float(each.min()), float(each.max())) for each in members]


def _association(table: NDArray[np.float64]) -> float:
    """Return Cramer's V of a contingency table, or 0 if it is not significant."""
    if min(table.shape) < 2:
        return 0.0
    # Imported late, because the import takes a third of a second.
    from scipy.stats import chi2_contingency

    result = chi2_contingency(table)
    if result.pvalue > SIGNIFICANCE:
        return 0.0
    return math.sqrt(float(result.statistic) / (table.sum() * (min(table.shape) - 1)))


def _gains(values: Sequence[Any], places: NDArray[np.intp], logs: NDArray[np.float64]) -> bool:
    """Return whether the effect of the param on log seconds differs significantly between classes.

    Otherwise placing trials by this param saves no time. The test is the F test of the interaction of param and class
    in an analysis of covariance. The effect of a number is a quadratic function of its rank; the effect of an option is
    a constant.
    """
    from scipy.stats import f

    effect = _effect(values)
    classes = np.equal.outer(places, np.arange(places.max() + 1)).astype(float)
    alike = np.concatenate([classes, effect], axis=1)
    unlike = np.concatenate([classes, *(effect * classes[:, [place]] for place in range(classes.shape[1]))], axis=1)
    fits = [design @ np.linalg.lstsq(design, logs, rcond=None)[0] for design in (alike, unlike)]
    ranks = [int(np.linalg.matrix_rank(design)) for design in (alike, unlike)]
    free, rest = ranks[1] - ranks[0], len(logs) - ranks[1]
    if free < 1 or rest < 1:
        # The trials of each option ran on only one class, so classes cannot be compared.
        return True
    if float(np.std(fits[1] - fits[0])) < LEAST_GAIN:
        return False
    left = [float(np.square(logs - fit).sum()) for fit in fits]
    return left[1] <= 0 or float(f.sf((left[0] - left[1]) / free / (left[1] / rest), free, rest)) < SIGNIFICANCE


def _effect(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return the regressors of log seconds: the rank of a number and its square, or one indicator for each option."""
    groups, words = _groups(values, len(values))
    if len(words[0]) > 1:
        ranks = groups / max(1, groups.max()) - 0.5
        return np.stack([ranks, ranks**2], axis=1)
    return np.equal.outer(groups, np.arange(len(words))).astype(float)


def _parts(table: NDArray[np.float64], words: Sequence[tuple[Any, ...]], classes: Sequence[str]) -> list[Part]:
    """Return the parts of a preference. Groups that prefer the same class are joined; groups of numbers only if
    adjacent.

    A group prefers the class whose share of the group's trials exceeds its share of all trials by the greatest factor.
    """
    overall = table.sum(axis=0) / table.sum()
    preferred = np.argmax(table / table.sum(axis=1, keepdims=True) / overall, axis=1).tolist()
    order = range(len(words)) if len(words[0]) > 1 else sorted(range(len(words)), key=preferred.__getitem__)
    parts = []
    for place, members in groupby(order, preferred.__getitem__):
        groups = [*members]
        counts = table[groups].sum(axis=0)
        parts.append(
            Part(
                values=_in_words([words[group] for group in groups]),
                trials=int(counts.sum()),
                compute_class=classes[place],
                share=float(counts[place] / counts.sum()),
            )
        )
    return parts


def _in_words(found: Sequence[tuple[Any, ...]]) -> str:
    if len(found[0]) == 1:
        return listed([option for (option,) in found], OPTIONS)
    least, most = (
        str(int(number)) if number.is_integer() and abs(number) < 1e9 else f"{number:.3g}"
        for number in (found[0][0], found[-1][-1])
    )
    return least if least == most else f"{least} to {most}"


#: number of best trials in a report, and maximum number of different warnings of trials
BEST, WARNINGS = 5, 3
#: number of latest trials whose placement is examined
LATEST = 2000
#: minimum number of ended trials for the notice that the last half of them brought no progress; and the value of
#: `early_stop` that this notice proposes
STILL, ENOUGH = 60, 30

_S = TrialState


class Ended(Struct, frozen=True, kw_only=True):
    """Numbers of ended trials by final state."""

    complete: int
    pruned: int
    failed: int


class OfSubspace(Ended, frozen=True, kw_only=True):
    """Numbers of ended trials of one subspace, and its best loss."""

    #: best loss at the highest budget, as the objective returned it; with several losses, the first one
    best: float | None
    #: numbers and seconds of the same trials by compute class
    classes: Mapping[str, OnClass]


class Recorded(StudyTrials):
    """The trials of a study, as they were in its store when this object was created."""

    def __init__(self, store: SqlStore, record: StudyRecord) -> None:
        # The record is read again to get the latest choices of the sampler.
        super().__init__(store, store.find(record.name), store.earlier(record.key), store.warm_start(record.key))


class OfRecord(Generic[T]):
    """Read-only attribute of a study that returns the attribute of its record with the same name."""

    def __init__(self, words: str) -> None:
        """`words` describe the fact to users."""
        self.__doc__ = words

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: StudyFacts | None, owner: type) -> T:
        return self if instance is None else getattr(instance.record, self._name)  # type: ignore[return-value]

    def __set__(self, instance: StudyFacts, value: T) -> None:
        raise AttributeError(f"{self._name} of a study cannot be set")


class StudyFacts:
    """The facts of a study that are in its record."""

    record: StudyRecord

    name = OfRecord[str]("Name of the study in its store.")
    key = OfRecord[str]("Unique among all stores, and the name of the study's checkpoint folder.")
    owner = OfRecord[str | None]("User who has begun it: SHADHO_USER, or login@host; None if it was not recorded.")
    module = OfRecord[str]('Module with SPACE and objective; "" for a study that a program runs without a study file.')
    command = OfRecord[str]('Command that its trials run, in the form of a shell; "" if they call a function.')
    seed = OfRecord[int]("Seed of the search.")
    created_at = OfRecord[float]("Time of its creation in seconds since the epoch.")
    settings = OfRecord[Mapping[str, Any]]("Settings that were given in all runs so far; defaults are left out.")
    in_force = OfRecord[Mapping[str, Any]](
        "All settings of its latest run, defaults included. The sampler is None if it was a user's own class."
    )
    asked = OfRecord[int | None]("Limit on the number of trials in the latest run, or None.")
    is_simulated = OfRecord[bool]("True if its trials were simulated (`simulate --store`). It cannot be resumed.")
    objectives = OfRecord[Mapping[str, str]](
        'Direction of each loss by name, "minimize" or "maximize"; empty for one loss that has no name.'
    )
    space = OfRecord[Mapping[str, str]]("Domain and condition of each label as text.")
    tree = OfRecord[Mapping[str, Any] | None](
        "The labels of the search space in the form of `space.stored`; None if they were not recorded."
    )

    @property
    def has_repeats(self) -> bool:
        """True if the best trial is the one with the best mean of its results under several seeds."""
        return bool(self.in_force.get("repeats", 1) > 1)


@dataclass(frozen=True, kw_only=True)
class Overview(StudyFacts):
    """Numbers of a study's trials, and its best trial. It is fast to create, because the live view needs it often."""

    #: record of the study; in its `choices`, the subspaces with the most trials come first
    record: StudyRecord
    #: URL of the store without a password
    store: str
    #: number of all trials by state
    counts: Mapping[TrialState, int]
    #: the best trial; None if no trial is complete
    best: TrialResult | None
    #: results of the best trial and its repeats, the mean as the objective returned it; None if it has no repeats
    repeated: Repeated | None
    #: number of trials on the front; 0 in a study with one loss
    on_front: int
    #: number of complete trials by budget
    budgets: Mapping[float, int]
    #: number of trials that have ended since the best feasible trial, or since the last change of the front; and since
    #: the last complete trial. Comparisons of overviews ignore these numbers, because the order of trials that ended at
    #: the same time is not recorded
    without_gain: int = field(compare=False)
    without_complete: int = field(compare=False)

    @property
    def ended(self) -> int:
        """Number of ended trials that count towards the limit `asked`: all except cancelled ones."""
        return sum(self.counts[state] for state in COUNTED)

    @property
    def still_words(self) -> str:
        """Notice that the last half of the trials brought no complete or no better trial; "" if there was progress.

        It is also "" if the study has the setting `early_stop`, or no complete trial at all.
        """
        if self.best is None or self.ended < STILL or self.in_force.get("early_stop"):
            return ""
        remedy = f"--early-stop {ENOUGH} (early_stop={ENOUGH} in Python) ends a search that makes no progress"
        if 2 * self.without_complete >= self.ended:
            why = (
                "all were pruned or failed, as when a search has converged" if self.counts[_S.PRUNED] else "all failed"
            )
            return f"no trial has completed in the last {self.without_complete:,} of {self.ended:,}: {why}; {remedy}"
        if 2 * self.without_gain < self.ended:
            return ""
        gain = (
            "no change of the front" if self.on_front else "no feasible trial" if self.violation else "no better loss"
        )
        return f"{gain} in the last {self.without_gain:,} of {self.ended:,} trials; {remedy}"

    @property
    def violation(self) -> float:
        """Violation of the best trial; above 0 as long as no trial is feasible."""
        return 0.0 if self.best is None else violation_of(self.best.constraints)

    @property
    def counts_words(self) -> str:
        """Text with the number of ended trials by state, and the limit if there is one."""
        counts = self.counts
        pruned = f", {counts[_S.PRUNED]} pruned" if counts[_S.PRUNED] else ""
        words = f"{counts[_S.COMPLETE]} complete{pruned}, {counts[_S.FAILED]} failed"
        limit = shown_limit(self.asked, self.ended)
        return f"{words} of {counted(limit, 'trial')}" if limit else words

    @property
    def best_words(self) -> str:
        """Text with the best loss so far and its name; for several losses, also with the size of the front."""
        best = self.best
        if best is None:
            return "no complete trial yet" if self.counts[_S.PRUNED] else "no loss yet"
        if self.violation:
            return "no feasible trial yet"
        name, loss = next(iter(best.losses.items()), ("loss", best.loss))
        loss, known = (loss, "") if self.repeated is None else (self.repeated.mean, f", {self.repeated.words}")
        size = self.on_front
        front = f"front of {counted(size, 'trial')}, " if size else ""
        at = "" if best.budget is None else f" at budget {best.budget:.6g}"
        return f"{front}best {name} {loss:.6g}{at}{known}"


@dataclass(frozen=True, kw_only=True)
class StudyReport(Overview):
    """All results of a study: those of `Overview`, and the numbers by class, subspace, budget and machine."""

    #: host and process of the scheduler that runs the study, or None
    running_on: str | None
    # See `StudyResults.state`.
    #: state of the study: running, paused, stopping, stopped (by a signal or `stop`), interrupted or ended
    state: str
    #: the best trials, the best first
    best_few: Sequence[TrialResult]
    #: feasible trials that no other trial dominates, sorted by their first loss; empty in a study with one loss
    front: Sequence[TrialResult]
    #: hypervolume of the front over time; None in a study with one loss
    coverage: Coverage | None
    #: by compute class: numbers of ended trials
    classes: Mapping[str, Ended]
    #: by subspace: numbers of ended trials, the `best` loss, and the same numbers by class, with seconds
    subspaces: Mapping[str, OfSubspace]
    #: by budget, the lowest first: numbers of ended trials by class, and the `agreement` of losses with the next rung
    rungs: Sequence[RungSummary]
    #: by subspace: param by which its latest trials were placed on classes
    placed_by_params: Sequence[Preference]
    #: number of pruned trials by the step of their last report
    last_steps: Sequence[tuple[int, int]]
    #: failures by kind, the most frequent first
    failures: Sequence[FailureCount]
    #: messages to the user, one line each: about warnings of trials, lost attempts and waiting trials
    notices: Sequence[str]
    #: number of trials by machine; number of trials by version of the code
    hosts: Mapping[str, int]
    codes: Mapping[str, int]
    #: requests to the running study: `id`, `at`, `by` whom, `action`, `arguments`, and the `answer`
    actions: Sequence[Action]
    #: fencing number of its latest scheduler; None if it was deleted
    fence: int | None
    #: seconds from the first start to the last end of a trial, without the pauses between runs
    active_seconds: float
    #: number of trials of earlier studies from which the study learned
    warm_start: int
    #: by class: money that ended attempts have cost at the prices of the workers; empty without prices
    money: Mapping[str, float]
    #: money that had been spent when the best trial ended; None if there is no best trial or no price
    money_to_best: float | None
    #: time in seconds since the epoch at which the last trial ended; None if no trial has ended
    last_end: float | None

    @property
    def is_spent(self) -> bool:
        """True if the trials have cost as much money as the latest limit allows."""
        most = self.record.settings.get("max_cost")
        return most is not None and sum(self.money.values()) >= most

    @property
    def deadline_words(self) -> str:
        """Text that says whether a study keeps its deadline; "" unless its trials are placed by money."""
        plan = self.record.money_plan
        if plan is None:
            return ""
        at = time.strftime("%Y-%m-%d %H:%M", time.localtime(plan.deadline))
        early = plan.deadline - (self.last_end or 0.0)
        if self.running_on is None and self.asked and self.ended >= self.asked:
            when = f"{duration(abs(early))} {'before' if early >= 0 else 'after'}"
            return f"placed by money: ended {when} its deadline, {at}; by the last plan {plan.hour_words}"
        if plan.money is None:
            return f"placed by money: the deadline {at} cannot be kept, so trials are placed by time"
        kept = f"about {money(plan.money)} in all by the deadline {at}"
        return f"placed by money: {kept}; {plan.hour_words}"

    @property
    def money_words(self) -> str:
        """Text with the money that the trials have cost; "" without prices."""
        if not self.money:
            return ""
        total, complete = sum(self.money.values()), self.counts[_S.COMPLETE]
        parts = [f"{one_line(name, 60)} {money(each)}" for name, each in self.money.items()]
        found = [f"money spent: {money(total)} ({', '.join(parts)})"]
        found += [f"{money(total / complete)} a complete trial"] if complete else []
        found += [] if self.money_to_best is None else [f"{money(self.money_to_best)} until the best loss"]
        return "; ".join(found)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Facts of a run that are not in the store, so only the process that runs the study knows them."""

    seconds: float
    #: number of trials that have ended in this run, by state
    counts: Mapping[TrialState, int]
    #: maximum number of live slots by class
    slots: Mapping[str, int] = field(default_factory=dict)
    #: failures by kind, the most frequent first
    failures: Sequence[FailureCount] = ()
    #: messages to the user, one line each
    notices: Sequence[str] = ()
    #: versions of the software
    versions: Sequence[str] = (f"shadho_celery {__version__}", f"Python {platform.python_version()}")


def overview_of(known: StudyTrials, values: Values | None = None) -> Overview:
    """Return the `Overview` of a study, without reading its store."""
    return Overview(**_overview(known, values or Values(known.record)))


def state_at_rest(record: StudyRecord, steered: Collection[str], ended: int) -> str:
    """Return "stopped" if an action (`Store.steered`) has ended the study before its limit on trials, else "ended"."""
    return "stopped" if "stop" in steered and ended < (record.asked or math.inf) else "ended"


def report_of(
    known: StudyTrials,
    store: SqlStore,
    values: Values,
    subspaces: Iterable[str] = (),
    *,
    running_on: str | None = None,
    state: str = "ended",
) -> StudyReport:
    """Return the report of a study.

    `subspaces` are the names of all subspaces, if known; subspaces with trials are always included. `running_on` and
    `state` are as in `StudyReport`.
    """
    trials, key = known.trials, known.record.key
    placed, spent = trials.by_subspace(), store.spent(key)
    until = None if trials.best is None else trials.best.finished_at
    return StudyReport(
        **_overview(known, values),
        running_on=running_on,
        state=state,
        best_few=[_result(trial, known, values) for trial in trials.best_few(BEST)],
        front=[_result(trial, known, values) for trial in trials.front],
        coverage=coverage(*trials.losses(known.record.objectives), known.record.objectives),
        classes={name: Ended(**_counts(trials, compute_class=name)) for name in sorted(trials.compute_classes)},
        subspaces={
            name: OfSubspace(
                **_counts(trials, subspace=name),
                best=None if (best := trials.best_of(name)) is None else turned_first(best, known.record.objectives),
                classes=placed.get(name, {}),
            )
            for name in dict.fromkeys([*subspaces, *sorted(placed)])
        },
        rungs=trials.rungs(),
        placed_by_params=placed_by_params(known, values),
        last_steps=trials.last_steps(),
        failures=Failures(trials.of_state(_S.FAILED)).common(),
        notices=[*_warnings(trials), *_faults(known, is_running=running_on is not None)],
        hosts=dict(sorted(store.tally(key, "host").items())),
        codes=store.tally(key, "code"),
        actions=store.actions(key),
        fence=store.fence(key),
        active_seconds=trials.active_seconds(),
        warm_start=len(known.warm_start),
        money=spent,
        money_to_best=sum(store.spent(key, until=until).values()) if spent and until is not None else None,
        last_end=trials.last_end(),
    )


def run_of(
    study: StudyState, seconds: float, counts: Mapping[TrialState, int], slots: Mapping[str, int], refused: int = 0
) -> Run:
    """Return the facts of a run.

    The arguments after `study` are the seconds of the run, its numbers of ended trials by state, the maximum number of
    live slots by class, and the number of refused results.
    """
    found = {
        f"late trials copied to an idle slot: {study.copied}; ended by the copy: {study.rescued}": study.copied,
        f"results refused, late or of other params; each trial counts once: {refused}": refused,
    }
    notices = [line for line, count in found.items() if count]
    return Run(seconds=seconds, counts=counts, slots=slots, failures=study.failures.common(), notices=notices)


def placed_by_params(known: StudyTrials, values: Values) -> list[Preference]:
    """Return the params by which the latest trials were placed on classes; [] unless the policy is `cost`."""
    if len(known.trials.compute_classes) < 2 or known.record.in_force.get("policy", "cost") != "cost":
        return []
    return preferences(known.trials.latest(LATEST), values.outlined)


def _overview(known: StudyTrials, values: Values) -> dict[str, Any]:
    best, found = known.trials.best, known.trials.repeated
    choices = {name: known.choices[name] for name in sorted(known.choices, key=lambda name: -known.asked(name))}
    return {
        "record": replace(known.record, choices=choices),
        "store": known.store.safe_url,
        "counts": {state: known.count(state) for state in TrialState},
        "best": None if best is None else _result(best, known, values),
        "repeated": found and found.turned(known.record.objectives),
        "on_front": known.trials.on_front,
        "budgets": dict(known.trials.by_budget),
        "without_gain": known.trials.without_gain,
        "without_complete": known.trials.without_complete,
    }


def _result(trial: Trial, known: StudyTrials, values: Values) -> TrialResult:
    return TrialResult(trial, values, known.store, known.record)


def _counts(trials: FinishedTrials, **where: str) -> dict[str, int]:
    return {state.lower(): trials.count(state, **where) for state in (_S.COMPLETE, _S.PRUNED, _S.FAILED)}


def _warnings(trials: FinishedTrials) -> list[str]:
    """Return a line for each of the first WARNINGS different warnings of trials.

    A line names the first trial with the warning, and has the number of further trials.
    """
    numbers: dict[str, list[int]] = {}
    for trial in trials.warned():
        text = one_line(trial.outcome.warning or "", 300)
        if text and (text in numbers or len(numbers) < WARNINGS):
            numbers.setdefault(text, []).append(trial.number)
    return [
        f"trial {first}{f' and {len(others)} more' if others else ''}: {text}"
        for text, (first, *others) in numbers.items()
    ]


def _faults(known: StudyTrials, *, is_running: bool) -> list[str]:
    """Return a line about lost attempts and a line about waiting trials, if there are any."""
    # If the study does not run, trials that were queued or running at its end wait, too.
    waiting = known.count(_S.WAITING, *(() if is_running else (_S.QUEUED, _S.RUNNING)))
    counts = {
        f"attempts lost and run again: {known.lost}": known.lost,
        f"trials that wait for --resume: {waiting}": waiting,
    }
    return [line for line, count in counts.items() if count]
