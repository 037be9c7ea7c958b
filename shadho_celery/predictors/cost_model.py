"""Cost model: predicts the seconds and the memory of a trial on a compute class from finished trials."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from shadho_celery.core.hardware import ComputeClass, shortages, uses_gpus
from shadho_celery.core.trial import Memory, Params, Trial, TrialState
from shadho_celery.predictors.budgets import BudgetCosts, OwnRuns, Work
from shadho_celery.predictors.durations import Durations
from shadho_celery.predictors.extrapolation import Elapsed
from shadho_celery.predictors.feasibility import MemoryBound
from shadho_celery.predictors.features import Array, complexity, features
from shadho_celery.predictors.neighbours import MEMORY, Neighbours
from shadho_celery.predictors.param_effects import ParamEffects
from shadho_celery.predictors.preemption import charged
from shadho_celery.space.split import Subspace

#: function of subspace and params that returns a number to which the seconds are assumed to be proportional
DeclaredCost = Callable[[str, Params], float]

#: shorter trials count as this many seconds, because their differences do not matter to a scheduler
LEAST_SECONDS = 1e-3
#: seconds of the most complex subspace divided by those of the simplest one, assumed if no cost is declared
COMPLEXITY_RATIO = 4.0
#: centres for memory, which has a single group
_ONE_GROUP = np.zeros(1)
#: prior standard deviation of log bytes within a subspace
_MEMORY_SPREAD = 0.5
#: factor by which a trial may need more GPU memory than similar ones
MEMORY_MARGIN = 1.15
#: logarithm of the largest usual budget, by which the budget's feature is scaled to about [0, 1]
_BUDGETS = math.log(1000.0)
#: number of latest trials with budgets from which is learned again when the start-up estimate has changed
RELEARNED = 1000
#: number of latest repeated trials that show whether trials have checkpoints; least relative change of a class's rate
#: of preemption that is used
REPEATED, NEWS = 20, 0.1
#: least fraction of a trial's seconds that counts as work, and fraction above which they show the effect of the params
LEAST_PART, TELLING_PART = 0.02, 0.5


class Beginning(str, Enum):
    """Start of a promoted trial: on its checkpoint's machine, with a checkpoint from elsewhere, or without one."""

    HOME = "home"
    ELSEWHERE = "elsewhere"
    ANEW = "anew"


class _Timing(NamedTuple):
    """Seconds of a trial, converted to the form from which the predictors learn."""

    row: int
    column: int
    #: log seconds per unit of work at declared cost 1, and their weight
    work: float
    weight: float
    #: log seconds per unit of work, if the whole departure from the expected seconds is due to the work
    whole: float


class CostModel:
    """Predicts seconds and memory of trials. It learns from finished trials, in the order of their ends.

    The log seconds of a trial are a sum: those of its subspace and class (`Durations`), the log of the declared cost,
    the log of the budget, and the departure of trials with similar params (`Neighbours`). Budget that a checkpoint
    covers is left out. If trials have a start-up (`BudgetCosts`), it is subtracted first. Failed and pruned trials are
    ignored, because they may end at any time.

    If the number of slots of a trial is searched (`widths`), a class counts as one for each width: its *kinds*, see
    `kind`. Their seconds are learned separately, and assumed to be in inverse proportion to the width before. For
    placement, a trial then costs on a class the slot seconds of its best width there.

    The seconds by which trials are placed (`log_seconds`, `departures`, `mean_seconds`) are charged for preemption, if
    trials begin again after it. The others are those of an attempt that is not interrupted.
    """

    def __init__(
        self, subspaces: Sequence[Subspace], declared: DeclaredCost | None = None, widths: Sequence[int] = ()
    ) -> None:
        #: numbers of slots among which the scheduler chooses for a trial, in rising order; () if it does not choose
        self.widths = tuple(widths)
        #: by class: the number of slots of its largest worker
        self._room: dict[str, int] = {}
        self._subspaces = {subspace.name: subspace for subspace in subspaces}
        #: by subspace: its row in `log_seconds`
        self.row_of = {subspace.name: row for row, subspace in enumerate(subspaces)}
        self._column: dict[str, int] = {}
        #: by class: the group of its columns in `durations`
        self._group_of: dict[str, int] = {}
        self._declared = declared or _by_complexity(subspaces)
        #: by row: sum of the logs of the trials' declared costs, and number of trials
        self._declared_logs = np.zeros((2, len(subspaces)))
        self.budgets = BudgetCosts()
        self._own_runs = OwnRuns()
        #: latest trials with budgets, with their rows of features and their work
        self._with_budgets: deque[tuple[Trial, Array, Work]] = deque(maxlen=RELEARNED)
        #: log seconds by row of the subspace and column of the class
        self.durations = Durations(len(subspaces))
        self._past = {s.name: Neighbours(len(s.domains) + 1) for s in subspaces}
        self._effects = {s.name: ParamEffects(s) for s in subspaces}
        #: subspaces whose effects of params have been requested, and subspaces with enough new trials for a fit
        self._asked: set[str] = set()
        self._due: set[str] = set()
        #: preemptions a second of each class's workers; empty if trials have checkpoints
        self._preemptions: dict[str, float] = {}
        #: whether each of the latest repeated trials found a checkpoint
        self._found: deque[bool] = deque(maxlen=REPEATED)
        #: number of times that effects of params were fitted
        self._reads = 0
        #: by subspace, class and kind of memory: log bytes of the trials
        self._memory: dict[tuple[str, str, Memory], Neighbours] = {}
        self._bounds = {(s.name, memory): MemoryBound(s.domains) for s in subspaces for memory in Memory}
        #: number, class and kind of memory of the trials that ran out of memory
        self._outgrown: set[tuple[int, str, Memory]] = set()

    @property
    def effects_version(self) -> int:
        """Version of the estimated effects of params. It fits those that are due, and increases with each fit."""
        for name in sorted(self._due & self._asked) if self._due else ():
            self._effects[name].read(self.durations.estimate().mean[self.row_of[name]])
            self._due.remove(name)
            self._reads += 1
        return self._reads

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials in order. One call with many trials is much faster than one call for each trial.

        `following` is the number of later trials in the same history, by subspace.
        """
        rows: dict[int, Array] = {}
        by_subspace: defaultdict[str, list[Trial]] = defaultdict(list)
        for trial in trials:
            by_subspace[trial.subspace].append(trial)
        for name in by_subspace.keys() & self._subspaces.keys():
            # Only the latest trials get rows of features, because those of older ones would be dropped again.
            told = by_subspace[name]
            latest = told[max(0, len(told) + (following or {}).get(name, 0) - MEMORY) :]
            latest_rows = self._rows(name, [t.params for t in latest], [t.budget for t in latest])
            rows.update(zip([t.number for t in latest], latest_rows, strict=True))
        for trial in trials:
            self._tell(trial, rows.get(trial.number))

    def _tell(self, trial: Trial, row: Array | None) -> None:
        """Learn from one trial. Without its row of features, learn only the seconds of its subspace on its class."""
        for name, memory in shortages(trial.outgrown, trial.outgrown_memory):
            self.tell_out_of_memory(trial, name, memory)
        outcome, compute_class = trial.outcome, trial.compute_class
        is_complete = trial.state is TrialState.COMPLETE and trial.subspace in self.row_of
        if not is_complete or compute_class is None:
            return
        if row is not None:
            for memory in Memory:
                if memory is Memory.HOST or uses_gpus(compute_class):
                    self._bounds[trial.subspace, memory].tell(trial.params, self._kind_of(trial), fits=True)
        if trial.origin is None and outcome.continued is not None:
            self._found.append(outcome.continued)
        # A negative or infinite time, by an executor's mistake, would spoil all estimates.
        # Those of an attempt that continued an interrupted one are only a part of its trial's.
        is_whole = trial.origin is not None or not outcome.continued
        if is_whole and outcome.seconds is not None and 0 <= outcome.seconds < math.inf:
            work = Work(None) if trial.budget is None else self.budgets.work(trial)
            self._tell_seconds(trial, row, work)
            if trial.budget is not None:
                self._tell_budget(trial, row, work)
        for memory, peak in ((Memory.HOST, outcome.memory), (Memory.GPU, outcome.gpu_memory)):
            if peak and row is not None:
                key = trial.subspace, self._kind_of(trial), memory
                if key not in self._memory:
                    self._memory[key] = Neighbours(len(row))
                self._memory[key].tell(row, math.log(peak), 0, _ONE_GROUP)

    def _tell_seconds(self, trial: Trial, row: Array | None, work: Work) -> None:
        timing = self._timing(trial, trial.outcome.seconds or 0.0, work)
        is_telling = row is not None and timing.weight >= TELLING_PART**2
        if trial.rung is not None and is_telling:
            origin = trial.number if trial.origin is None else trial.origin
            expected = self._rates(trial) if origin in self._own_runs else None
            self._own_runs.tell(origin, timing.column, timing.work, expected)
        self.durations.tell(timing.row, timing.column, timing.work, timing.weight)
        self._declared_logs[:, timing.row] += (math.log(self._declared(trial.subspace, trial.params)), 1.0)
        if row is None:
            return
        self._past[trial.subspace].tell(row, timing.whole, timing.column, self.durations.estimate().mean[timing.row])
        if is_telling and self._effects[trial.subspace].tell(trial.params, timing.column, timing.work):
            self._due.add(trial.subspace)

    def _tell_budget(self, trial: Trial, row: Array | None, work: Work) -> None:
        if row is not None:
            self._with_budgets.append((trial, row, work))
        if self.budgets.tell(trial, work):
            self._relearn()

    def _relearn(self) -> None:
        """Learn the seconds again from the latest trials with budgets, because the start-up estimate has changed."""
        self.durations.forget()
        self._own_runs = OwnRuns()
        self._declared_logs[:] = 0.0
        self._due.clear()
        for name, effects in self._effects.items():
            effects.forget()
            self._past[name] = Neighbours(len(self._subspaces[name].domains) + 1)
        for trial, row, work in self._with_budgets:
            self._tell_seconds(trial, row, work)

    @property
    def has_checkpoints(self) -> bool:
        """True if most of the latest repeated trials found a checkpoint."""
        return 2 * sum(self._found) > len(self._found)

    def note_preemptions(self, rates: Mapping[str, float]) -> None:
        """Charge trials for preemption from now on. `rates` are the preemptions an hour of a worker by class.

        Nothing is charged if trials have checkpoints.
        """
        new = {} if self.has_checkpoints else {name: rate / 3600 for name, rate in rates.items() if rate > 0}
        known = self._preemptions
        if new.keys() != known.keys() or any(abs(new[name] - known[name]) > NEWS * known[name] for name in known):
            self._preemptions = new
            # What was computed from the earlier rates is out of date.
            self.durations.version += 1
            self._reads += 1

    def watch(self, running: Iterable[Elapsed]) -> None:
        """Learn from running trials: a trial takes its extrapolated seconds, or at least those that it has run."""
        timings = [
            (trial, self._timing(trial, seconds, Work(trial.budget)), is_total)
            for trial, seconds, is_total in running
            if trial.subspace in self.row_of and trial.compute_class is not None
        ]
        self.durations.suppose([(t.row, t.column, t.work, t.weight, is_total) for _, t, is_total in timings])
        by_subspace: dict[str, list[tuple[Params, int, float, bool]]] = {name: [] for name in self._asked}
        for trial, timing, is_total in timings:
            if trial.subspace in by_subspace and timing.weight >= TELLING_PART**2:
                by_subspace[trial.subspace].append((trial.params, timing.column, timing.work, is_total))
        self._due |= {
            name for name, found in by_subspace.items() if self._effects[name].suppose(found, len(self._column))
        }

    def _timing(self, trial: Trial, seconds: float, work: Work) -> _Timing:
        """Return the row and column of a trial, and its log seconds without declared cost, budget and start-up.

        With a start-up s and work w, the seconds are y = s + w. log y is linearised in log w around the current
        estimate: d log y / d log w = w / y. A trial that is mostly start-up says little about w, so its weight is low.
        """
        compute_class = str(trial.compute_class)
        log_seconds = math.log(max(seconds, LEAST_SECONDS))
        offset = self._offset(trial.subspace, trial.params, work.units)
        row, column = self.row_of[trial.subspace], self._column_of(self._kind_of(trial))
        startup = 0.0 if trial.budget is None else self.budgets.startup(trial.subspace, compute_class)
        startup += self.budgets.handover if work.is_handed_over else 0.0
        if not startup > 0:
            return _Timing(row, column, log_seconds - offset, 1.0, log_seconds - offset)
        centre = float(self.durations.estimate().mean[row, column])
        worked = math.exp(centre + offset)
        part = worked / (worked + startup)
        departure = log_seconds - math.log(worked + startup)
        highest = log_seconds - offset
        value = min(max(centre + departure / part, highest + math.log(LEAST_PART)), highest)
        return _Timing(row, column, value, max(part, LEAST_PART) ** 2, centre + departure)

    @property
    def has_learned(self) -> bool:
        """True once the model has learned from a trial."""
        return any(self.durations.by_column)

    def seconds(
        self, subspace: str, compute_class: str, params_list: Sequence[Params], *, budget: float | None = None
    ) -> Array:
        """Return the median of the predicted seconds of n sets of params on a class, or kind of it, shape (n,).

        Raises KeyError for an unknown subspace. Before there are trials, the median is one second at a declared cost
        and a budget of 1.
        """
        return self.seconds_on(subspace, [compute_class], params_list, budget=budget)[:, 0]

    def seconds_on(
        self, subspace: str, classes: Sequence[str], params_list: Sequence[Params], *, budget: float | None = None
    ) -> Array:
        """Return what `seconds` returns for each of several classes, shape (n, classes)."""
        row, columns, past = self.row_of[subspace], self._columns_of(classes), self._past[subspace]
        estimate = self.durations.estimate()
        rows = self._rows(subspace, params_list, [budget])
        offsets = np.array([self._offset(subspace, each, budget) for each in params_list])[:, None]
        logs = estimate.mean[row, columns] + offsets
        if budget and self.budgets:
            logs = np.logaddexp(logs, self._log_startups(classes)[row])
        spreads = np.hypot(estimate.noise, estimate.deviation[row, columns]).tolist()
        # The spread, which differs between classes, matters only while there are few trials.
        spreads = spreads[:1] if past.are_enough else spreads
        departures = [past.departures(rows, estimate.mean[row], spread) for spread in spreads]
        return np.asarray(np.exp(logs + np.array(departures).T))

    def mean_seconds(
        self,
        subspace: str,
        params_list: Sequence[Params],
        classes: Sequence[str],
        optimism: float = 0.0,
        *,
        units: float | None = None,
    ) -> Array:
        """Return the expected seconds of n sets of params, shape (n, classes).

        The effects of params differ between classes, as for placement. The variance of the log seconds that they leave
        unexplained raises the mean above the median. `optimism` is as in `log_seconds`. `units` are the part of its
        budget that a trial has to compute; None without budgets.
        """
        functions = self.functions(subspace, params_list)
        _ = self.effects_version
        departures = self._departures(subspace, functions, classes)
        unexplained = max(0.0, self.durations.estimate().noise ** 2 - float(departures.var(axis=0).mean()))
        offsets = np.array([self._offset(subspace, each, units) for each in params_list])[:, None]
        logs = self._log_seconds(classes, optimism)[self.row_of[subspace]] + departures + offsets
        startups = 0.0 if units is None else np.array([self.budgets.startup(subspace, name) for name in classes])
        return self._charged_seconds(np.exp(logs + unexplained / 2) + startups, classes)

    def memory(
        self,
        subspace: str,
        params_list: Sequence[Params],
        classes: Sequence[str],
        memory: Memory = Memory.HOST,
        *,
        budget: float | None = None,
    ) -> Array | None:
        """Return the predicted peak bytes of n sets of params, shape (n,), or None without measurements on `classes`.

        `classes` are those on which a trial takes the same memory. Of their predictions, the largest is used.
        """
        keys = [(subspace, name, memory) for name in classes]
        pasts = [self._memory[key] for key in keys if key in self._memory]
        if not pasts:
            return None
        rows = self._rows(subspace, params_list, [budget])
        logs = [past.middle + past.departures(rows, np.array([past.middle]), _MEMORY_SPREAD) for past in pasts]
        return np.asarray(np.exp(np.max(logs, axis=0)))

    def enough_gpu_memory(
        self, subspace: str, params: Params, compute_class: str, *, budget: float | None = None
    ) -> int | None:
        """Return bytes of GPU memory that suffice for a trial on one GPU of a class, or None if that is not known.

        They are a little more than the highest peak of the most similar trials.
        """
        past = self._memory.get((subspace, self.kind(compute_class, 1), Memory.GPU))
        highest = None if past is None else past.highest(self._rows(subspace, [params], [budget])[0])
        return None if highest is None else math.ceil(MEMORY_MARGIN * math.exp(highest))

    def tell_out_of_memory(self, trial: Trial, compute_class: str, memory: Memory) -> None:
        """Record that a trial ran out of one kind of memory on a class. Repeated calls for a trial have no effect."""
        told = trial.number, compute_class, memory
        if trial.subspace in self._subspaces and told not in self._outgrown:
            self._outgrown.add(told)
            self._bounds[trial.subspace, memory].tell(trial.params, compute_class, fits=False)

    def outgrows(
        self, subspace: str, params: Params, compute_class: str, classes_by_memory: Sequence[str], memory: Memory
    ) -> float:
        """Return the probability that a trial runs out of one kind of memory on a class.

        `classes_by_memory` start with the smallest class. The probability is 0 until a trial of the subspace has run
        out of that memory on the class or on a larger one.
        """
        return self._bounds[subspace, memory].chance(params, compute_class, classes_by_memory)

    def log_seconds(self, classes: Sequence[str], optimism: float = 0.0, budget: float | None = None) -> Array:
        """Return the mean log seconds of the subspaces' trials on classes, shape (subspaces, classes).

        If widths are searched, these are the slot seconds of the best width of each class. Declared cost and budget are
        left out, as they are the same on all classes. With `optimism`, a pair counts as faster by that many standard
        deviations, so that pairs with little evidence are tried (a confidence bound).
        """
        if not self.widths:
            return self._mean_log_seconds(classes, optimism, budget)
        found = [self._log_slot_seconds(name, optimism, budget).min(axis=1) for name in classes]
        return np.asarray(np.array(found).reshape(len(classes), len(self.row_of)).T)

    def _log_slot_seconds(self, compute_class: str, optimism: float = 0.0, budget: float | None = None) -> Array:
        """Return what `log_seconds` returns for each width on a class, shape (subspaces, widths).

        Widths on which no trial of the subspace is `measured` are infinite, except the widest.
        """
        widths = self.widths_on(compute_class)
        kinds = [self.kind(compute_class, each) for each in widths]
        logs = self._mean_log_seconds(kinds, optimism, budget) + np.log(widths)
        logs[:, :-1][self.durations.measured(self._columns_of(kinds[:-1])) == 0] = np.inf
        return logs

    def _mean_log_seconds(self, classes: Sequence[str], optimism: float, budget: float | None) -> Array:
        logs = self._log_seconds(classes, optimism, budget)
        if not self._preemptions:
            return logs
        offsets = self._typical_offsets(budget or 1.0)
        return self._charged(logs + offsets, classes) - offsets

    def _charged(self, log_seconds: Array, classes: Sequence[str]) -> Array:
        """Return the log seconds of whole trials, shape (n, classes), charged for preemption."""
        if not self._preemptions:
            return log_seconds
        return charged(log_seconds, np.array([self._preemptions.get(self.split(name)[0], 0.0) for name in classes]))

    def _charged_seconds(self, seconds: Array, classes: Sequence[str]) -> Array:
        return np.exp(self._charged(np.log(seconds), classes)) if self._preemptions else seconds

    def _log_seconds(self, classes: Sequence[str], optimism: float = 0.0, budget: float | None = None) -> Array:
        columns = self._columns_of(classes)
        estimate = self.durations.estimate()
        logs = np.asarray(estimate.mean[:, columns] - optimism * estimate.deviation[:, columns])
        if not budget or not self.budgets:
            return logs
        offsets = self._typical_offsets(budget)
        return np.asarray(np.logaddexp(logs + offsets, self._log_startups(classes)) - offsets)

    def log_widths(self, classes: Sequence[str], budget: float | None = None) -> Array:
        """Return the log of the width of which `log_seconds` are the slot seconds, shape (subspaces, classes)."""
        if not self.widths:
            return np.zeros((len(self.row_of), len(classes)))
        best = [self._log_slot_seconds(name, 0.0, budget).argmin(axis=1) for name in classes]
        found = [np.log(self.widths_on(name))[places] for name, places in zip(classes, best, strict=True)]
        return np.asarray(np.array(found).reshape(len(classes), len(self.row_of)).T)

    def log_costs(self, subspace: str, params_list: Sequence[Params], budget: float | None = None) -> Array:
        """Return the log of the declared cost times the budget of n sets of params, shape (n,).

        The log seconds of a trial on a class are the sum of these, its `departures` and the `log_seconds`.
        """
        return np.array([self._offset(subspace, params, budget) for params in params_list])

    def typical_seconds(self, classes: Sequence[str], budget: float | None = None) -> Array:
        """Return the predicted seconds of typical trials at a budget, if any, shape (subspaces, classes)."""
        offsets = self._typical_offsets(budget or 1.0)
        return np.asarray(np.exp(self.log_seconds(classes, budget=budget) + offsets))

    def _typical_offsets(self, budget: float) -> Array:
        """Return the log of the budget times the geometric mean of the declared costs, shape (subspaces, 1)."""
        total, count = self._declared_logs
        return np.asarray(total / np.maximum(count, 1.0) + math.log(budget))[:, None]

    def _log_startups(self, classes: Sequence[str]) -> Array:
        names = [self.split(name)[0] for name in classes]
        seconds = [[self.budgets.startup(subspace, name) for name in names] for subspace in self._subspaces]
        # The logarithm of 0 is undefined. No real start-up is as short as this minimum.
        return np.asarray(np.log(np.maximum(np.array(seconds).reshape(len(self._subspaces), len(classes)), 1e-12)))

    def expected(self, trial: Trial, classes: Sequence[str], ways: Sequence[Beginning]) -> Array:
        """Return the expected seconds of a promoted trial for each way to start and each class, shape (ways, classes).

        For a subspace that the space no longer has, nothing is known, and all results are one second.
        """
        if trial.subspace not in self.row_of:
            return np.ones((len(ways), len(classes)))
        kinds = [self.kind(name, trial.slots) for name in classes]
        columns = self._columns_of(kinds)
        known = self._rates(trial)
        rates = known[columns]
        if trial.origin is not None:
            rates = rates + self._own_runs.departure(trial.origin, known)
        startups = np.array([self.budgets.startup(trial.subspace, name) for name in classes])
        budget = trial.budget or 1.0
        rest = max(budget - self.budgets.behind(trial.origin), 0.0) or budget
        found = [
            np.exp(rates + self._offset(trial.subspace, trial.params, budget if way is Beginning.ANEW else rest))
            + startups
            + (self.budgets.handover if way is Beginning.ELSEWHERE else 0.0)
            for way in ways
        ]
        return self._charged_seconds(np.array(found), kinds)

    def _rates(self, trial: Trial) -> Array:
        """Return a trial's log seconds per unit of work on each class, predicted from its subspace and params."""
        rates = self.durations.estimate().mean[self.row_of[trial.subspace]]
        functions = self.functions(trial.subspace, [trial.params])
        return np.asarray(rates + self._departures(trial.subspace, functions, [*self._column])[0])

    def home(self, origin: int) -> str | None:
        """Return the machine of an origin's latest complete trial, which has its checkpoint; None if it is unknown."""
        return self.budgets.host(origin)

    def functions(self, subspace: str, params_list: Sequence[Params]) -> Array:
        """Return the inputs of `departures` for n sets of params, shape (n, functions).

        The same params always give the same inputs.
        """
        self._asked.add(subspace)
        return self._effects[subspace].functions(params_list)

    def departures(self, subspace: str, functions: Array, classes: Sequence[str], budget: float | None = None) -> Array:
        """Return the departures of n sets of params from `log_seconds` on classes, shape (n, classes).

        They are as of the last use of `effects_version`, which updates them. If widths are searched, they are those of
        the slot seconds of the best width.
        """
        if not self.widths:
            return self._mean_departures(subspace, functions, classes, budget)
        row = self.row_of[subspace]
        found = np.empty((len(functions), len(classes)))
        for column, name in enumerate(classes):
            logs = self._log_slot_seconds(name, 0.0, budget)[row]
            kinds = [self.kind(name, each) for each in self.widths_on(name)]
            own = logs + self._mean_departures(subspace, functions, kinds, budget)
            found[:, column] = own.min(axis=1) - logs.min()
        return found

    def _mean_departures(
        self, subspace: str, functions: Array, classes: Sequence[str], budget: float | None = None
    ) -> Array:
        found = self._departures(subspace, functions, classes, budget)
        if not self._preemptions:
            return found
        typical = self._log_seconds(classes, budget=budget) + self._typical_offsets(budget or 1.0)
        own = typical[self.row_of[subspace]]
        return self._charged(own + found, classes) - self._charged(own, classes)

    def _departures(
        self, subspace: str, functions: Array, classes: Sequence[str], budget: float | None = None
    ) -> Array:
        columns = self._columns_of(classes)
        found = self._effects[subspace].departures(functions, len(self._column))[:, columns]
        if not budget or not self.budgets:
            return found
        row = self.row_of[subspace]
        work = self.durations.estimate().mean[row, columns] + self._typical_offsets(budget)[row]
        # The estimated departures are those of the work, which is only a part of the seconds.
        return np.asarray(found * np.exp(work - np.logaddexp(work, self._log_startups(classes)[row])))

    def slowness(self, compute_class: str) -> float:
        """Return how slow a class is in all subspaces: its log seconds minus the mean of all classes.

        If widths are searched, these are slot seconds, on average over the class's trials.
        """
        widths = self.widths_on(compute_class)
        columns = self._columns_of([self.kind(compute_class, each) for each in widths])
        number = [max(1, self.durations.by_column[column]) for column in columns]
        return float(np.average(self.durations.estimate().by_class[columns] + np.log(widths), weights=number))

    def timed(self, compute_class: str) -> int:
        """Return the number of a class's trials from which the model has learned."""
        kinds = [self.kind(compute_class, each) for each in self.widths_on(compute_class)]
        return sum(self.durations.by_column[column] for column in self._columns_of(kinds))

    # Widths

    def see(self, classes: Iterable[ComputeClass]) -> None:
        """Update the live classes, whose workers have room for some of the widths."""
        if self.widths:
            self._room |= {each.name: each.room for each in classes}

    def widths_on(self, compute_class: str) -> Sequence[int]:
        """Return the widths for which a class has room; (1,) if widths are not searched."""
        widths = self.widths or (1,)
        return [each for each in widths if each <= self._room.get(compute_class, widths[-1])] or widths[:1]

    def kind(self, compute_class: str, slots: int) -> str:
        """Return the name under which trials are learned that take this many slots of a class."""
        return f"{compute_class}*{slots}" if self.widths else compute_class

    def slot_seconds(self, trials: Sequence[Trial], compute_class: str, optimism: float = 0.0) -> Array:
        """Return the expected slot seconds of new trials for each of `widths_on` a class, shape (trials, widths).

        `optimism` is as in `log_seconds`.
        """
        widths = self.widths_on(compute_class)
        kinds = [self.kind(compute_class, each) for each in widths]
        _ = self.effects_version
        found = np.empty((len(trials), len(widths)))
        alike: defaultdict[tuple[str, float | None], list[int]] = defaultdict(list)
        for place, trial in enumerate(trials):
            alike[trial.subspace, trial.budget].append(place)
        for (subspace, budget), places in alike.items():
            params = [trials[place].params for place in places]
            logs = self._mean_log_seconds(kinds, optimism, budget)[self.row_of[subspace]]
            departures = self._mean_departures(subspace, self.functions(subspace, params), kinds, budget)
            offsets = np.array([self._offset(subspace, each, budget) for each in params])[:, None]
            found[places] = np.exp(logs + departures + offsets) * widths
        return found

    def measured(self, compute_class: str) -> Array:
        """Return how many trials have ended or are extrapolated, by subspace and by each of `widths_on` a class.

        The shape is (subspaces, widths).
        """
        kinds = [self.kind(compute_class, each) for each in self.widths_on(compute_class)]
        return self.durations.measured(self._columns_of(kinds))

    def _kind_of(self, trial: Trial) -> str:
        return self.kind(str(trial.compute_class), trial.slots)

    def split(self, kind: str) -> tuple[str, int]:
        """Return the class and the width of a kind."""
        name, _, slots = kind.rpartition("*")
        return (name, int(slots)) if self.widths else (kind, 1)

    def _columns_of(self, classes: Sequence[str]) -> list[int]:
        return [self._column_of(name) for name in classes]

    def _column_of(self, compute_class: str) -> int:
        if compute_class not in self._column:
            self._column[compute_class] = len(self._column)
            name, width = self.split(compute_class)
            self.durations.add_column(self._group_of.setdefault(name, len(self._group_of)), -math.log(width))
        return self._column[compute_class]

    def _rows(self, subspace: str, params_list: Sequence[Params], budgets: Sequence[float | None]) -> Array:
        """Return rows of `features` and the scaled logarithm of the budget, shape (n, d + 1).

        `budgets` has one budget for all rows, or one for each row.
        """
        rows = np.empty((len(params_list), len(self._subspaces[subspace].domains) + 1))
        rows[:, :-1] = features(params_list, self._subspaces[subspace].domains)
        rows[:, -1] = [math.log(budget) / _BUDGETS if budget else 0.0 for budget in budgets]
        return rows

    def _offset(self, subspace: str, params: Params, budget: float | None) -> float:
        """Return the log of the declared cost times the budget, which is known before the trial runs."""
        return (math.log(budget) if budget else 0.0) + math.log(self._declared(subspace, params))


def _by_complexity(subspaces: Sequence[Subspace]) -> DeclaredCost:
    """Return the costs that are assumed if none are declared, from the ranks of the subspaces by complexity.

    Their logarithms rise in equal steps from the simplest subspace to the most complex one.
    """
    ordered = sorted(subspaces, key=lambda subspace: complexity(subspace.domains.values()))
    middle = (len(ordered) - 1) / 2
    relative = {s.name: COMPLEXITY_RATIO ** ((place - middle) / max(1, 2 * middle)) for place, s in enumerate(ordered)}
    return lambda subspace, params: relative[subspace]
