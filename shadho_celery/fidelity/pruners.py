"""Pruners, which decide from a trial's reports whether it should be stopped, and their settings.

`Pruning` decides this for all trials of a study, with a pruner for each budget.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from heapq import merge
from operator import itemgetter
from typing import Annotated, ClassVar, Protocol

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import as_record, short, unknown
from shadho_celery.core.names import FIDELITIES, NO_PRUNER, PRUNERS, named
from shadho_celery.core.trial import Attempt, Report, Trial, TrialState, turned_first
from shadho_celery.errors import UsageError
from shadho_celery.study.front import dominates

#: after this number of COMPLETE trials without any report, a notice says that no trial can be pruned
ENOUGH = 5

_Trials = Annotated[int, Meta(ge=1, le=1_000_000)]
_Steps = Annotated[int, Meta(ge=0, le=2**62)]


class Pruner(Protocol):
    """Decides from a trial's reports whether it should be stopped."""

    def tell(self, trial: int, step: int, losses: Sequence[float]) -> bool:
        """Record a report of a trial. Return whether the trial should be stopped.

        The steps of a trial must increase. If one of the losses was NaN, all of them are passed as infinity.
        """

    def end(self, trial: int, *, complete: bool) -> None:
        """Record that a trial has ended, and whether it is COMPLETE."""


class _Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="how", tag=str.lower):
    """Settings of a pruner, as in ``STUDY["pruner"]``. `how` is its name."""

    #: name of the setting whose value may follow the pruner's name, as in ``percentile:25``
    in_short: ClassVar[str]


class Percentile(_Settings, frozen=True, kw_only=True):
    """Stop a trial whose best loss so far is worse than this percentile of the COMPLETE trials at the same step."""

    in_short = "percentile"

    percentile: Annotated[float, Meta(gt=0, lt=100, description="a number between 0 and 100")] = 25.0
    #: no trial is stopped before this number of trials are COMPLETE
    startup_trials: _Trials = 5
    #: a trial is not stopped before this step
    warmup_steps: _Steps = 0

    def make(self) -> Pruner:
        """Return the pruner."""
        return PercentilePruner(self)


class Median(_Settings, frozen=True, kw_only=True):
    """Stop a trial whose best loss so far is worse than the median of the COMPLETE trials at the same step."""

    in_short = "startup_trials"
    percentile: ClassVar = 50.0

    startup_trials: _Trials = 5
    warmup_steps: _Steps = 0

    def make(self) -> Pruner:
        """Return the pruner."""
        return PercentilePruner(self)


class Patience(_Settings, frozen=True, kw_only=True):
    """Stop a trial whose loss has not improved for this many steps."""

    in_short = "steps"

    steps: Annotated[int, Meta(ge=1, le=2**62, description="a whole number from 1")] = 10
    #: a smaller decrease of the loss does not count as an improvement
    least_gain: Annotated[float, Meta(ge=0, le=1e300)] = 0.0

    def make(self) -> Pruner:
        """Return the pruner."""
        return PatiencePruner(self)


class Threshold(_Settings, frozen=True, kw_only=True):
    """Stop a trial whose loss is above `upper`, below `lower`, or NaN."""

    in_short = "upper"

    upper: float = math.inf
    lower: float = -math.inf
    warmup_steps: _Steps = 0

    def make(self) -> Pruner:
        """Return the pruner."""
        return ThresholdPruner(self)


class Asha(_Settings, frozen=True, kw_only=True):
    """Stop a trial that is not among the best 1 / eta when it reaches step least, least * eta, least * eta**2, ..."""

    in_short = "eta"

    eta: Annotated[int, Meta(ge=2, le=1000, description="a whole number from 2")] = 3
    least: Annotated[int, Meta(ge=1, le=2**62, description="a whole number from 1")] = 1

    def make(self) -> Pruner:
        """Return the pruner."""
        return AshaPruner(self)


PrunerSettings = Percentile | Median | Patience | Threshold | Asha

_FORM = f"give {', '.join((*PRUNERS, NO_PRUNER))}, also as percentile:25, or a dict such as {{'how': 'asha', 'eta': 4}}"

#: part of the message for the name of an algorithm for budgets where a pruner is needed
_GIVES = "gives trials budgets, see STUDY['fidelity']: a pruner stops one by its reports"


def read_pruner(given: object, objectives: Mapping[str, str] | None = None) -> PrunerSettings | None:
    """Return the settings of a pruner that is given as ``median``, ``percentile:25`` or a dict; None for no pruner.

    The bounds of `threshold` are losses as the objective returns them; if these are maximised, the bounds are negated.
    The number in ``threshold:10`` is the bound beyond which losses are bad. Raises UsageError for unknown or invalid
    settings.
    """
    if given in (None, NO_PRUNER, {"how": NO_PRUNER}):
        return None
    is_turned, several = turned_first(1.0, objectives) < 0, len(objectives or ()) > 1
    if isinstance(given, str):
        name, colon, number = given.partition(":")
        settings: dict[str, object] = {"how": name}
        if colon and name in PRUNERS:
            setting = "lower" if is_turned and name == "threshold" else named(PRUNERS[name]).in_short
            settings[setting] = _number(given, number)
    elif isinstance(given, Mapping):
        settings = dict(given)
        if "how" not in settings:
            raise UsageError(f"pruner.how: it is missing; {_FORM}")
    else:
        raise UsageError(f"pruner: {short(given, 60)} is not a pruner; {_FORM}")
    how = settings.get("how")
    if how == NO_PRUNER:
        raise UsageError(f"pruner: none takes no settings; {_FORM}")
    if not isinstance(how, str) or how not in PRUNERS:
        reason = unknown(how, (*PRUNERS, NO_PRUNER), FIDELITIES, _GIVES)
        raise UsageError(f"pruner: {reason}; {_FORM}")
    kind: type[PrunerSettings] = named(PRUNERS[how])
    if several and kind in (Patience, Threshold):
        raise UsageError(f"pruner {how} judges one loss, but this study has several; choose asha, median or percentile")
    read = as_record(settings, kind, f"pruner {how}", _FORM)
    if isinstance(read, Threshold):
        if read.upper == math.inf and read.lower == -math.inf:
            raise UsageError("pruner threshold needs the loss above which a trial is stopped, such as threshold:10")
        # `not <` also refuses a bound that is NaN.
        if not read.lower < read.upper:
            raise UsageError(f"pruner threshold: nothing lies between {read.lower:g} and {read.upper:g}; {_FORM}")
        return replace(read, upper=-read.lower, lower=-read.upper) if is_turned else read
    return read


def _number(given: str, number: str) -> float:
    """Return the number in the short form of a pruner, as an int if possible.

    Raises UsageError if it is not a number.
    """
    try:
        return int(number) if number.removeprefix("-").isdecimal() else float(number)
    except ValueError:
        raise UsageError(f"pruner {short(given, 60)}: {short(number, 30)} is not a number; {_FORM}") from None


class _Peers:
    """Trials with which others are compared: by their loss, or by their rank if they have several losses.

    The rank of a trial is the number of trials that dominate it, as no loss of them is worse and one is better. Source:
    Fonseca, Fleming, "Genetic Algorithms for Multiobjective Optimization", ICGA 1993, section 3.
    """

    def __init__(self) -> None:
        #: one loss of each trial, sorted
        self._sorted: list[float] = []
        #: several losses of each trial, shape (trials, losses), and its rank
        self._points, self._ranks = np.empty((0, 0)), np.empty(0)

    def add(self, losses: Sequence[float]) -> None:
        """Add a trial."""
        if len(losses) == 1:
            insort(self._sorted, losses[0])
            return
        rank, points = self._rank(losses), self._points.reshape(-1, len(losses))
        self._ranks = np.append(self._ranks + dominates(np.array(losses), points), rank)
        self._points = np.vstack([points, losses])

    def _rank(self, losses: Sequence[float]) -> float:
        return float(dominates(self._points.reshape(-1, len(losses)), np.array(losses)).sum())

    def are_better(self, losses: Sequence[float], percent: float) -> bool:
        """Return whether these losses are worse than this percentile of the trials; False if there are none.

        Losses that no trial dominates never are.
        """
        mine, ordered = losses[0], self._sorted
        if len(losses) > 1:
            mine, ordered = self._rank(losses), sorted(self._ranks.tolist())
        # The best loss so far is never worse, even if the percentile is rounded.
        return bool(ordered) and mine > max(ordered[0], percentile(ordered, percent))


class PercentilePruner:
    """Compares a trial's best loss so far with the best losses of the COMPLETE trials up to the same step.

    Source: the median stopping rule in Golovin et al., "Google Vizier: A Service for Black-Box Optimization", KDD 2017,
    which compares running averages instead of the best losses. With several losses, the best values of each loss so far
    are compared.
    """

    def __init__(self, settings: Percentile | Median) -> None:
        self._settings = settings
        #: by running trial: the best losses up to each reported step
        self._curves: defaultdict[int, dict[int, Sequence[float]]] = defaultdict(dict)
        #: by step: the COMPLETE trials, with their best losses up to this step
        self._complete: defaultdict[int, _Peers] = defaultdict(_Peers)
        self._count = 0

    def tell(self, trial: int, step: int, losses: Sequence[float]) -> bool:
        curve = self._curves[trial]
        best = tuple(map(min, losses, next(reversed(curve.values()), losses)))
        curve[step] = best
        if self._count < self._settings.startup_trials or step < self._settings.warmup_steps:
            return False
        return step in self._complete and self._complete[step].are_better(best, self._settings.percentile)

    def end(self, trial: int, *, complete: bool) -> None:
        curve = self._curves.pop(trial, {})
        if complete and curve:
            self._count += 1
            for step, best in curve.items():
                self._complete[step].add(best)


class PatiencePruner:
    """Stops a trial whose loss has stopped improving."""

    def __init__(self, settings: Patience) -> None:
        self._settings = settings
        #: by running trial: its best loss, and the step of that
        self._best: dict[int, tuple[float, int]] = {}

    def tell(self, trial: int, step: int, losses: Sequence[float]) -> bool:
        loss, (best, since) = losses[0], self._best.get(trial, (math.inf, step))
        if trial not in self._best or loss < best - self._settings.least_gain:
            self._best[trial] = min(loss, best), step
            return False
        return step - since >= self._settings.steps

    def end(self, trial: int, *, complete: bool) -> None:
        self._best.pop(trial, None)


class ThresholdPruner:
    """Stops a trial whose loss is outside the bounds, because its training has diverged or has an error."""

    def __init__(self, settings: Threshold) -> None:
        self._settings = settings

    def tell(self, trial: int, step: int, losses: Sequence[float]) -> bool:
        loss, lower, upper = losses[0], self._settings.lower, self._settings.upper
        # An infinite loss may have been NaN, so it counts as outside the bounds.
        return step >= self._settings.warmup_steps and not (lower <= loss <= upper and loss < math.inf)

    def end(self, trial: int, *, complete: bool) -> None:
        pass


class AshaPruner:
    """Asynchronous successive halving by stopping: of the trials that have reached a rung so far, the best 1 / eta
    continue.

    Rungs are steps. At its first report on a rung, a trial is compared with the trials that have reached this rung
    before. It never waits. Source: Li et al., "A System for Massively Parallel Hyperparameter Tuning", MLSys 2020, but
    trials are stopped instead of promoted.
    """

    def __init__(self, settings: Asha) -> None:
        self._settings = settings
        #: by step of a rung: all trials that have reached it
        self._rungs: defaultdict[int, _Peers] = defaultdict(_Peers)
        #: by running trial: step of the last rung that it has reached
        self._reached: dict[int, int] = {}

    def tell(self, trial: int, step: int, losses: Sequence[float]) -> bool:
        # Find the highest rung up to this step.
        rung = self._settings.least
        while rung * self._settings.eta <= step:
            rung *= self._settings.eta
        if step < rung or rung <= self._reached.get(trial, 0):
            return False
        self._reached[trial] = rung
        self._rungs[rung].add(losses)
        return self._rungs[rung].are_better(losses, 100.0 / self._settings.eta)

    def end(self, trial: int, *, complete: bool) -> None:
        self._reached.pop(trial, None)


class Pruning:
    """Decides which trials of a study should stop, with a pruner for each budget.

    Reports whose step does not increase are ignored, because they were delivered twice or late, or another attempt
    repeats steps. No trial is stopped at the greatest step of the COMPLETE trials, because that would save no time.
    """

    def __init__(
        self,
        settings: PrunerSettings,
        objectives: Collection[str] = (),
        *,
        is_command: bool = False,
        needs_reports: bool = True,
    ) -> None:
        """`objectives` are the names of the losses. `is_command` is True if the trials run a command.

        Without `needs_reports`, no notice says that none comes.
        """
        #: names of several losses; () for one loss
        self._names = tuple(objectives) if len(objectives) > 1 else ()
        #: how a trial makes a report, in words
        self._how = 'print lines such as {"step": 1, "loss": 0.3}' if is_command else "call context.report(step, loss)"
        #: by budget: its pruner
        self._pruners: defaultdict[float | None, Pruner] = defaultdict(settings.make)
        #: by budget: the greatest step of all COMPLETE trials
        self._longest: dict[float | None, int] = {}
        #: by running trial: its greatest step so far
        self._steps: dict[int, int] = {}
        #: by running trial: the latest report of any of its attempts
        self._latest: dict[int, Report] = {}
        #: number of the first trial with an attempt whose reported steps do not increase
        self._without_growth: int | None = None
        #: numbers of the trials that should stop
        self._stopped: set[int] = set()
        #: number of COMPLETE trials in this run
        self._silent = 0
        self._has_reports = not needs_reports

    @property
    def notice(self) -> str | None:
        """Notice for the user if reports are missing or ignored; None otherwise."""
        if self._without_growth is not None:
            return (
                f"the pruner ignores reports whose step does not grow, such as those of trial "
                f"{self._without_growth}: {self._how}, and count up"
            )
        if self._has_reports or self._silent < ENOUGH:
            return None
        return f"no trial has reported a loss, so the pruner stops none: {self._how}"

    def tell(self, trial: Trial | Attempt, report: Report) -> bool:
        """Record a report. Return whether the trial should stop.

        Once this was True for a trial, it is True for all of its later reports.
        """
        number, step = trial.number, report.step
        self._has_reports = True
        self._note_growth(report)
        if number in self._stopped or step <= self._steps.get(number, step - 1):
            return number in self._stopped
        self._steps[number] = step
        is_bad = self._pruners[trial.budget].tell(number, step, self._losses(report))
        if is_bad and step < self._longest.get(trial.budget, math.inf):
            self._stopped.add(number)
        return number in self._stopped

    def _losses(self, report: Report) -> tuple[float, ...]:
        named = report.losses or {}
        losses = tuple(named.get(name, math.nan) for name in self._names) or (report.loss,)
        return (math.inf,) * len(losses) if any(map(math.isnan, losses)) else losses

    def _note_growth(self, report: Report) -> None:
        """Note the first trial with an attempt whose steps do not increase. Another attempt of a trial may repeat
        steps.
        """
        before = self._latest.get(report.number)
        # The same report may arrive twice, after a broken connection, or if the trial ran in this process.
        if before is not None and before.attempt == report.attempt and report.at <= before.at:
            return
        self._latest[report.number] = report
        is_bad = before is not None and before.attempt == report.attempt and report.step <= before.step
        if is_bad and self._without_growth is None:
            self._without_growth = report.number

    def end(self, trial: Trial) -> None:
        """Record that a trial has ended."""
        self._latest.pop(trial.number, None)
        last, is_complete = self._steps.pop(trial.number, None), trial.state is TrialState.COMPLETE
        if is_complete and last is not None:
            self._longest[trial.budget] = max(last, self._longest.get(trial.budget, last))
        self._silent += is_complete
        self._stopped.discard(trial.number)
        self._pruners[trial.budget].end(trial.number, complete=is_complete)

    def recall(self, trials: Iterable[Trial], reports: Iterable[Report]) -> None:
        """Learn from the trials of earlier runs and their reports, in the order in which they occurred."""
        known = {trial.number: trial for trial in trials}
        said = ((report.at, 0, known[report.number], report) for report in reports if report.number in known)
        ends = sorted((t.finished_at or 0.0, 1, t.number) for t in known.values() if t.state.is_finished)
        ended = ((at, order, known[number], None) for at, order, number in ends)
        for _, _, trial, report in merge(said, ended, key=itemgetter(0, 1)):
            if report is None:
                self.end(trial)
            else:
                self.tell(trial, report)
        # The reports of earlier runs do not show what the present code of the objective reports, so these facts are
        # reset.
        self._silent, self._without_growth = 0, None
        # Only the decisions that were recorded in the study count, not those made again here.
        self._stopped = {number for number, trial in known.items() if trial.step is not None}
        self._stopped -= {number for number, trial in known.items() if trial.state.is_finished}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return a percentile of sorted values, by linear interpolation between the two nearest values."""
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    left, right = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    # This comes first, because the weighted mean of infinite values is NaN.
    return left if left == right or place == below else left + (right - left) * (place - below)
