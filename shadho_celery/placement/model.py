"""Cost model: predicts the seconds and the memory of a trial on a compute class.

Seconds are predicted from finished and running trials, and from the setting `cost`. On machines that may be preempted,
a trial without checkpoints is expected to take longer (`charged`). Memory is predicted from the past trials with the
most similar params.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shadho_celery.core.failures import user_code
from shadho_celery.core.hardware import ComputeClass, shortages, uses_gpus
from shadho_celery.core.settings import Cost
from shadho_celery.core.trial import Attempt, Memory, Params, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement.budgets import BudgetCosts, OwnRuns, Work
from shadho_celery.placement.durations import Durations, Elapsed
from shadho_celery.placement.effects import ParamEffects
from shadho_celery.samplers.avoidance import MemoryBound
from shadho_celery.space.compile import Space
from shadho_celery.space.features import Array, complexity, features
from shadho_celery.space.split import Subspace
from shadho_celery.space.tree import Value

#: hours without a preemption that are added to the observed hours of workers
PRIOR_HOURS = 1.0
#: maximum of the expected preemptions of a trial; above it, exp would make the expected seconds huge
MOST_EXPECTED = 20.0


def preemption_rate(preempted: int, hours: float) -> float:
    """Return the expected preemptions of a worker in an hour, after `preempted` preemptions in `hours` of all workers
    of its class.

    A trial runs on one worker, and all slots of a worker end together, so its slots do not count. The rate is n / (h +
    PRIOR_HOURS): the posterior mean of a Poisson rate, where the prior is the limit of a gamma distribution whose shape
    is 0 and whose rate is PRIOR_HOURS. Source: Gelman et al., "Bayesian Data Analysis", 2013, section 2.6.
    """
    return preempted / (hours + PRIOR_HOURS)


def charged(log_seconds: Array, rates: Array) -> Array:
    """Return the log of the expected seconds until trials end, if they begin again after each preemption.

    `rates` are the preemptions of each class in a second; classes are the last axis of `log_seconds`. The expected
    seconds of a trial of T seconds are (exp(r T) - 1) / r, without the waiting times before each new start. Source:
    Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
    Systems 22, 2006, with one interval.
    """
    expected = np.clip(np.exp(log_seconds) * rates, 1e-12, MOST_EXPECTED)
    return np.asarray(log_seconds + np.log(np.expm1(expected) / expected))


#: number of past trials used for a prediction
NEIGHBOURS = 20
#: number of latest trials kept, so that 100 predictions take about two milliseconds
MEMORY = 2000
#: with fewer trials, all of them are neighbours
MIN_TRIALS = 2 * NEIGHBOURS
#: after EXAMINED trials, only one in EXAMINED_LATER is used to compare predictions from neighbours and from all trials
EXAMINED, EXAMINED_LATER = 200, 8
#: weight of the newest error in the moving average of errors
DECAY = 0.02
#: least number of trials for which `highest` returns a value; correlation above which values may depend on a feature;
#: log values with at most this standard deviation count as equal
LEAST, RELATED, SAME = 3, 0.3, 0.02


class Neighbours:
    """Predicts a trial's value from the latest trials of one subspace: from the most similar ones, or from all of them.

    A trial has a row of features in [0, 1], and a value. Before a trial is stored, its value is predicted in both ways.
    Predictions use the way with the smaller recent error (prequential; Dawid 1984).
    """

    def __init__(self, dimensions: int) -> None:
        # Arrays of full size, because memory pages that are never written take no memory.
        self._features = np.empty((MEMORY, dimensions))
        self._values = np.empty(MEMORY)
        self._told = 0
        #: mean absolute errors of recent predictions from the neighbours, and from all trials
        self._errors = np.zeros(2)

    def __len__(self) -> int:
        return min(self._told, MEMORY)

    @property
    def are_useful(self) -> bool:
        """True if predictions from the neighbours are better than predictions from all trials."""
        return self._told > MIN_TRIALS and bool(self._errors[0] < self._errors[1])

    def tell(self, row: Array, value: float) -> None:
        """Store a trial. `row` has shape (d,)."""
        if self._told >= MIN_TRIALS and (self._told < EXAMINED or self._told % EXAMINED_LATER == 0):
            known = self._values[: len(self)]
            near = np.median(known[self._nearest(row[None, :])[0]])
            self._errors += DECAY * (np.abs([near - value, np.median(known) - value]) - self._errors)
        place = self._told % MEMORY
        self._features[place], self._values[place] = row, value
        self._told += 1

    def predict(self, rows: Array) -> Array:
        """Return the predicted median value for each of `rows`, shape (n,). `rows` have shape (n, d).

        There must be at least one trial.
        """
        known = self._values[: len(self)]
        if self.are_useful:
            return np.asarray(np.median(known[self._nearest(rows)], axis=1))
        return np.full(len(rows), np.median(known))

    def highest(self, row: Array) -> float | None:
        """Return the highest value of the most similar trials, or of all trials if the similar ones do not predict
        better.

        Return None if there are fewer than LEAST trials, or if the row has a feature outside the range of the trials on
        which the values may depend.
        """
        known, values = self._features[: len(self)], self._values[: len(self)]
        if len(values) < LEAST:
            return None
        outside = (row < known.min(axis=0)) | (row > known.max(axis=0))
        if any(_are_related(column, values) for column in known[:, outside].T):
            return None
        return float(np.max(values[self._nearest(row[None, :])[0]] if self.are_useful else values))

    def _nearest(self, rows: Array) -> NDArray[np.intp]:
        """Return the indexes of the nearest trials, shape (n, NEIGHBOURS)."""
        known = self._features[: len(self)]
        squares = np.square(known).sum(axis=1) - 2.0 * rows @ known.T  # up to a constant for each row
        return np.argpartition(squares, NEIGHBOURS - 1, axis=1)[:, :NEIGHBOURS]


def _are_related(feature: Array, values: Array) -> bool:
    """Return whether values may depend on a feature: they are correlated, or the feature was the same in all trials."""
    spread = float(feature.std() * values.std())
    if not feature.std():
        return True
    product = (feature - feature.mean()) @ (values - values.mean()) / len(values)
    return bool(values.std() > SAME and abs(product) > RELATED * spread)


#: stands for the params of a typical trial of a subspace
TYPICAL: Params = MappingProxyType({})

#: function of subspace and params that returns a number to which the seconds are assumed to be proportional
DeclaredCost = Callable[[str, Params], float]

#: shorter trials count as this many seconds, because their differences do not matter to a scheduler
LEAST_SECONDS = 1e-3
#: seconds of the most complex subspace divided by those of the simplest one, assumed if no cost is declared
COMPLEXITY_RATIO = 4.0
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


class Prediction(NamedTuple):
    """Predicted log seconds of n trials on classes, arrays of shape (n, classes)."""

    #: expected log seconds of an attempt that is not interrupted: the median seconds
    mean: Array
    #: standard deviation of the effect of the pair of subspace and class, which few trials leave uncertain
    spread: Array
    #: number of trials of the subspace on the class that have ended, or whose total seconds are extrapolated from their
    #: reports
    evidence: Array
    #: variance of the log seconds of single trials about the mean, shape (n, 1)
    noise: Array


class Costs(NamedTuple):
    """What placement compares: what n trials cost on classes at the best width, arrays of shape (n, classes)."""

    #: log of the slot seconds until a trial has ended, charged for preemption
    log_seconds: Array
    #: log of the number of slots
    log_widths: Array


class _Timing(NamedTuple):
    """Seconds of a trial, converted to the form from which the predictors learn."""

    row: int
    column: int
    #: log seconds per unit of work at declared cost 1, and their weight
    work: float
    weight: float


class CostModel:
    """Predicts seconds and memory of trials. It learns from finished trials, in the order of their ends.

    The log seconds of a trial are a sum: those of its subspace and class (`Durations`), the effects of its params on
    the class (`ParamEffects`), the log of the declared cost, and the log of the budget. Budget that a checkpoint covers
    is left out. If trials have a start-up (`BudgetCosts`), the work and the start-up are added. Failed and pruned
    trials are ignored, because they may end at any time.

    `predict` is the only prediction: placement compares it, and it is what is recorded and shown, and what decides
    about declined trials, copies and widths. Placement compares `costs`, which are derived from this sum. If the number
    of slots of a trial is searched (`widths`), its cost on a class is that of its best width there, in slot seconds.
    The cost includes the expected time that preemptions make a trial repeat.

    If widths are searched, a class counts as one for each width: its *kinds*, see `kind`. Their seconds are learned
    separately, and assumed to be in inverse proportion to the width before.
    """

    def __init__(
        self, subspaces: Sequence[Subspace], declared: DeclaredCost | None = None, widths: Sequence[int] = ()
    ) -> None:
        #: numbers of slots among which the scheduler chooses for a trial, in rising order; () if it does not choose
        self.widths = tuple(widths)
        #: by class: the number of slots of its largest worker
        self._room: dict[str, int] = {}
        self._subspaces = {subspace.name: subspace for subspace in subspaces}
        #: by subspace: its row in `durations`
        self.row_of = {subspace.name: row for row, subspace in enumerate(subspaces)}
        self._column: dict[str, int] = {}
        #: by class: the group of its columns in `durations`
        self._group_of: dict[str, int] = {}
        self._declared = declared or _by_complexity(subspaces)
        #: by row: sum of the logs of the trials' declared costs, and number of trials
        self._declared_logs = np.zeros((2, len(subspaces)))
        self.budgets = BudgetCosts()
        self._own_runs = OwnRuns()
        #: latest trials with budgets, with their work
        self._with_budgets: deque[tuple[Trial, Work]] = deque(maxlen=RELEARNED)
        #: log seconds by row of the subspace and column of the class
        self.durations = Durations(len(subspaces))
        self._effects = {s.name: ParamEffects(s) for s in subspaces}
        #: subspaces with enough new trials for a fit of the effects of params
        self._due: set[str] = set()
        #: preemptions a second of each class's workers; empty if trials have checkpoints
        self._preemptions: dict[str, float] = {}
        #: whether each of the latest repeated trials found a checkpoint
        self._found: deque[bool] = deque(maxlen=REPEATED)
        #: number of changes of predictions and costs, except those that `durations` counts
        self._changes = 0
        #: by subspace, class and kind of memory: log bytes of the trials
        self._memory: dict[tuple[str, str, Memory], Neighbours] = {}
        #: version and compute class of the latest `typical_seconds`, and these seconds
        self._typical: tuple[int, str, Mapping[str, float]] = -1, "", {}
        #: by subspace and kind of memory: the probability that a trial runs out of it
        self.bounds = {(s.name, memory): MemoryBound(s.domains) for s in subspaces for memory in Memory}
        #: number, class and kind of memory of the trials that ran out of memory
        self._outgrown: set[tuple[int, str, Memory]] = set()

    @property
    def version(self) -> int:
        """Version of predictions and costs. Reading it makes the fits that are due.

        As long as it is the same, they are the same to the bit.
        """
        means = self.durations.estimate().mean
        for name in sorted(self._due) if self._due else ():
            if self._effects[name].are_asked:
                self._effects[name].read(means[self.row_of[name]])
                self._due.remove(name)
                self._changes += 1
        return self.durations.version + self._changes

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials in order. One call with many trials is much faster than one call for each trial.

        `following` is the number of later trials in the same history, by subspace.
        """
        latest: set[int] = set()
        by_subspace: defaultdict[str, list[Trial]] = defaultdict(list)
        for trial in trials:
            by_subspace[trial.subspace].append(trial)
        for name in by_subspace.keys() & self._subspaces.keys():
            # The params of older trials are not learned, because they would be forgotten again.
            told = by_subspace[name]
            latest.update(t.number for t in told[max(0, len(told) + (following or {}).get(name, 0) - MEMORY) :])
        for trial in trials:
            self._tell(trial, is_latest=trial.number in latest)

    def _tell(self, trial: Trial, *, is_latest: bool) -> None:
        """Learn from one trial. If it is not one of the latest, learn only the seconds of its subspace on its class."""
        for name, memory in shortages(trial.outgrown, trial.outgrown_memory):
            self.tell_out_of_memory(trial, name, memory)
        outcome, compute_class = trial.outcome, trial.compute_class
        is_complete = trial.state is TrialState.COMPLETE and trial.subspace in self.row_of
        if not is_complete or compute_class is None:
            return
        if is_latest:
            for memory in Memory:
                if memory is Memory.HOST or uses_gpus(compute_class):
                    self.bounds[trial.subspace, memory].tell(trial.params, self._kind_of(trial), fits=True)
        if trial.origin is None and outcome.continued is not None:
            self._found.append(outcome.continued)
        # A negative or infinite time, by an executor's mistake, would spoil all estimates.
        # Those of an attempt that continued an interrupted one are only a part of its trial's.
        is_whole = trial.origin is not None or not outcome.continued
        if is_whole and outcome.seconds is not None and 0 <= outcome.seconds < math.inf:
            work = Work(None) if trial.budget is None else self.budgets.work(trial)
            self._tell_seconds(trial, work, is_latest=is_latest)
            if trial.budget is not None:
                self._tell_budget(trial, work, is_latest=is_latest)
        for memory, peak in ((Memory.HOST, outcome.memory), (Memory.GPU, outcome.gpu_memory)):
            if peak and is_latest:
                row = self._rows(trial.subspace, [trial.params], [trial.budget])[0]
                key = trial.subspace, self._kind_of(trial), memory
                if key not in self._memory:
                    self._memory[key] = Neighbours(len(row))
                self._memory[key].tell(row, math.log(peak))

    def _tell_seconds(self, trial: Trial, work: Work, *, is_latest: bool = True) -> None:
        timing = self._timing(trial, trial.outcome.seconds or 0.0, work)
        is_telling = is_latest and timing.weight >= TELLING_PART**2
        if trial.rung is not None and is_telling:
            origin = trial.number if trial.origin is None else trial.origin
            expected = self._rates([trial])[0] if origin in self._own_runs else None
            self._own_runs.tell(origin, timing.column, timing.work, expected)
        self.durations.tell(timing.row, timing.column, timing.work, timing.weight)
        self._declared_logs[:, timing.row] += (math.log(self._declared(trial.subspace, trial.params)), 1.0)
        if is_telling and self._effects[trial.subspace].tell(trial.params, timing.column, timing.work):
            self._due.add(trial.subspace)

    def _tell_budget(self, trial: Trial, work: Work, *, is_latest: bool) -> None:
        if is_latest:
            self._with_budgets.append((trial, work))
        if self.budgets.tell(trial, work):
            self._relearn()

    def _relearn(self) -> None:
        """Learn the seconds again from the latest trials with budgets, because the start-up estimate has changed."""
        self.durations.forget()
        self._own_runs = OwnRuns()
        self._declared_logs[:] = 0.0
        self._due.clear()
        for effects in self._effects.values():
            effects.forget()
        self._changes += 1
        for trial, work in self._with_budgets:
            self._tell_seconds(trial, work)

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
            self._changes += 1

    def watch(self, running: Iterable[Elapsed]) -> None:
        """Learn from running trials: a trial takes its extrapolated seconds, or at least those that it has run."""
        timings = [
            (trial, self._timing(trial, seconds, Work(trial.budget)), is_total)
            for trial, seconds, is_total in running
            if trial.subspace in self.row_of and trial.compute_class is not None
        ]
        self.durations.suppose([(t.row, t.column, t.work, t.weight, is_total) for _, t, is_total in timings])
        by_subspace: dict[str, list[tuple[Params, int, float, bool]]] = {name: [] for name in self._effects}
        for trial, timing, is_total in timings:
            if timing.weight >= TELLING_PART**2:
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
            return _Timing(row, column, log_seconds - offset, 1.0)
        centre = float(self.durations.estimate().mean[row, column])
        worked = math.exp(centre + offset)
        part = worked / (worked + startup)
        departure = log_seconds - math.log(worked + startup)
        highest = log_seconds - offset
        value = min(max(centre + departure / part, highest + math.log(LEAST_PART)), highest)
        return _Timing(row, column, value, max(part, LEAST_PART) ** 2)

    @property
    def has_learned(self) -> bool:
        """True once the model has learned from a trial."""
        return any(self.durations.by_column)

    def typical(self, budget: float | None = None) -> list[Trial]:
        """Return for each subspace a trial of which only the subspace is known. Its params have no effect.

        Its declared cost is the geometric mean of those of the subspace's trials.
        """
        return [Trial(number=0, subspace=name, params=TYPICAL, budget=budget) for name in self.row_of]

    def typical_seconds(self, compute_class: str) -> Mapping[str, float]:
        """Return for each subspace the predicted seconds of a `typical` trial on a class, as of the latest version."""
        if self._typical[:2] != (known := (self.version, compute_class)):
            seconds = np.exp(self.predict(self.typical(), [compute_class]).mean[:, 0]).tolist()
            self._typical = *known, dict(zip(self.row_of, seconds, strict=True))
        return self._typical[2]

    def predict(
        self, trials: Sequence[Trial | Attempt], classes: Sequence[str], width: int | None = None
    ) -> Prediction:
        """Return the predicted log seconds of n trials on classes, on `width` slots, or on as many as they have.

        The work of a promoted trial is that of the worst machine of the class, or of the machine that an attempt must
        run on. Before there are trials, the mean is 0 at a declared cost and a budget of 1. Raises KeyError for an
        unknown subspace.
        """
        for name in {trial.subspace for trial in trials if trial.params is not TYPICAL}:
            self._effects[name].are_asked = True
        _ = self.version
        widths = [width or trial.slots for trial in trials]
        kinds = {each: [self._column_of(self.kind(name, each)) for name in classes] for each in {*widths}}
        columns = np.array([kinds[each] for each in widths], np.intp).reshape(len(trials), len(classes))
        rates = self._rates(trials)
        rows = np.array([self.row_of[trial.subspace] for trial in trials], np.intp)[:, None]
        mean = np.take_along_axis(rates, columns, axis=1)
        mean += np.array([self._offset(trial.subspace, trial.params, trial.budget) for trial in trials])[:, None]
        if any(trial.origin is not None for trial in trials) or self.budgets:
            self._add_starts(mean, trials, classes, rates)
        estimate = self.durations.estimate()
        return Prediction(
            mean=mean,
            spread=estimate.deviation[rows, columns],
            evidence=self.durations.measured[rows, columns],
            noise=np.array([self._effects[trial.subspace].regression.noise for trial in trials])[:, None],
        )

    def _rates(self, trials: Sequence[Trial | Attempt]) -> Array:
        """Return the log seconds of trials per unit of work at declared cost 1, by column, shape (n, columns)."""
        rows = np.array([self.row_of[trial.subspace] for trial in trials], np.intp)
        rates = self.durations.estimate().mean[rows]
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for place, trial in enumerate(trials):
            if trial.params is not TYPICAL:
                alike[trial.subspace].append(place)
        for name, places in alike.items():
            params = [trials[place].params for place in places]
            rates[places] += self._effects[name].departures(params, rates.shape[1])
        return rates

    def _add_starts(self, mean: Array, trials: Sequence[Trial | Attempt], classes: Sequence[str], rates: Array) -> None:
        """Add to the log seconds of trials what their own earlier runs show, their start-ups, and their checkpoints."""
        startups = np.zeros(mean.shape)
        for place, trial in enumerate(trials):
            if trial.budget is not None:
                startups[place] = [self.budgets.startup(trial.subspace, name) for name in classes]
            if trial.origin is None:
                continue
            mean[place] += self._own_runs.departure(trial.origin, rates[place])
            for column, name in enumerate(classes):
                work = self.budgets.ahead(trial, name)
                mean[place, column] += math.log((work.units or 1.0) / (trial.budget or 1.0))
                startups[place, column] += self.budgets.handover if work.is_handed_over else 0.0
        if startups.any():
            # The logarithm of 0 is undefined. No real start-up is as short as this minimum.
            mean[:] = np.logaddexp(mean, np.log(np.maximum(startups, 1e-300)))

    def promoted_seconds(self, trial: Trial, classes: Sequence[str], home: str) -> Array:
        """Return the seconds of a promoted trial, charged for preemption, shape (2, classes): on the worst machine of
        each class, and on the machine called `home`.

        For a subspace that the space no longer has, nothing is known, and all results are one second.
        """
        if trial.subspace not in self.row_of:
            return np.ones((2, len(classes)))
        found = self.predict([trial, trial.attempted(only_on=home)], classes)
        return np.exp(self._charged(found.mean, classes))

    def mean_seconds(self, trials: Sequence[Trial], classes: Sequence[str], optimism: float = 0.0) -> Array:
        """Return the mean seconds of trials, charged for preemption, shape (n, classes).

        The noise raises the mean above the median. `optimism` is as in `costs`.
        """
        found = self.predict(trials, classes)
        return np.exp(self._charged(found.mean - optimism * found.spread + found.noise / 2, classes))

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
        return np.asarray(np.exp(np.max([past.predict(rows) for past in pasts], axis=0)))

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
            self.bounds[trial.subspace, memory].tell(trial.params, compute_class, fits=False)

    def costs(self, trials: Sequence[Trial], classes: Sequence[str], optimism: float = 0.0) -> Costs:
        """Return what trials cost on classes at the best width, charged for preemption.

        A width is left out until a trial of the subspace has ended with it, or the total seconds of a running trial
        are extrapolated from its reports. The widest is never left out, because it is tried first (see `Widths`). With
        `optimism`, a pair counts as faster by that many standard deviations, so that pairs with little evidence are
        tried (a confidence bound).
        """
        if not self.widths:
            found = self.predict(trials, classes)
            logs = self._charged(found.mean - optimism * found.spread, classes)
            return Costs(logs, np.zeros(logs.shape))
        logs, widths = np.empty((2, len(trials), len(classes)))
        for column, name in enumerate(classes):
            seconds, evidence = self.slot_seconds(trials, name, optimism)
            seconds[:, :-1][evidence[:, :-1] == 0] = np.inf
            logs[:, column] = np.log(seconds.min(axis=1))
            widths[:, column] = np.log(self.widths_on(name))[seconds.argmin(axis=1)]
        return Costs(logs, widths)

    def slot_seconds(self, trials: Sequence[Trial], compute_class: str, optimism: float = 0.0) -> tuple[Array, Array]:
        """Return the slot seconds of new trials for each of `widths_on` a class, and the evidence of each prediction.

        Both have the shape (trials, widths). `optimism` is as in `costs`.
        """
        widths = self.widths_on(compute_class)
        seconds, evidence = np.empty((2, len(trials), len(widths)))
        for place, width in enumerate(widths):
            found = self.predict(trials, [compute_class], width)
            logs = self._charged(found.mean - optimism * found.spread, [compute_class])
            seconds[:, place], evidence[:, place] = np.exp(logs[:, 0]) * width, found.evidence[:, 0]
        return seconds, evidence

    def _charged(self, log_seconds: Array, classes: Sequence[str]) -> Array:
        """Return the log seconds of whole trials, shape (n, classes), charged for preemption."""
        if not self._preemptions:
            return log_seconds
        return charged(log_seconds, np.array([self._preemptions.get(name, 0.0) for name in classes]))

    def timed(self, compute_class: str) -> int:
        """Return the number of a class's trials from which the model has learned."""
        columns = [self._column_of(self.kind(compute_class, each)) for each in self.widths_on(compute_class)]
        return sum(self.durations.by_column[column] for column in columns)

    # Widths

    def see(self, classes: Iterable[ComputeClass]) -> None:
        """Update the live classes: the storages of their machines, and the widths for which their workers have room."""
        classes = [*classes]
        self.budgets.see(classes)
        if self.widths and (room := {each.name: each.room for each in classes}).items() - self._room.items():
            self._room |= room
            self._changes += 1

    def widths_on(self, compute_class: str) -> Sequence[int]:
        """Return the widths for which a class has room; (1,) if widths are not searched."""
        widths = self.widths or (1,)
        return [each for each in widths if each <= self._room.get(compute_class, widths[-1])] or widths[:1]

    def kind(self, compute_class: str, slots: int) -> str:
        """Return the name under which trials are learned that take this many slots of a class."""
        return f"{compute_class}*{slots}" if self.widths else compute_class

    def _kind_of(self, trial: Trial) -> str:
        return self.kind(str(trial.compute_class), trial.slots)

    def split(self, kind: str) -> tuple[str, int]:
        """Return the class and the width of a kind."""
        name, _, slots = kind.rpartition("*")
        return (name, int(slots)) if self.widths else (kind, 1)

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
        if params is TYPICAL:
            total, count = self._declared_logs[:, self.row_of[subspace]]
            declared = float(total / max(count, 1.0))
        else:
            declared = math.log(self._declared(subspace, params))
        return (math.log(budget) if budget else 0.0) + declared


def _by_complexity(subspaces: Sequence[Subspace]) -> DeclaredCost:
    """Return the costs that are assumed if none are declared, from the ranks of the subspaces by complexity.

    Their logarithms rise in equal steps from the simplest subspace to the most complex one.
    """
    ordered = sorted(subspaces, key=lambda subspace: complexity(subspace.domains.values()))
    middle = (len(ordered) - 1) / 2
    relative = {s.name: COMPLEXITY_RATIO ** ((place - middle) / max(1, 2 * middle)) for place, s in enumerate(ordered)}
    return lambda subspace, params: relative[subspace]


log = logging.getLogger(__name__)


def declared_cost(cost: Cost, space: Space, subspaces: Sequence[Subspace]) -> DeclaredCost:
    """Return the setting `cost` as a function of subspace and drawn params.

    Raises UsageError for an unknown subspace, and if the cost of params drawn from the space is not a positive number.
    If a user's function fails later, the cost of a typical draw from the subspace is used.
    """
    if not callable(cost):
        return _by_name(cost, [subspace.name for subspace in subspaces])
    costs = cost
    typical = {s.name: _typical(costs, space, s) for s in subspaces}
    failed: list[str] = []

    def of_params(subspace: str, params: Params) -> float:
        try:
            return _positive(costs(space.evaluate(params)))
        except (Exception, SystemExit) as error:
            if not failed:
                log.warning("STUDY['cost'] failed and is ignored for these trials: %s: %s", type(error).__name__, error)
                failed.append(subspace)
            return typical[subspace]

    return of_params


def _by_name(costs: Mapping[str, float], names: Sequence[str]) -> DeclaredCost:
    known: dict[str, float] = {}
    for name, value in costs.items():
        if name not in names:
            raise UsageError(f"STUDY['cost'] names {name!r}, which is not a subspace; there are {', '.join(names)}")
        try:
            known[name] = _positive(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(f"STUDY['cost'] of {name!r} is {value!r}: {error}") from None
    middle = math.exp(float(np.mean([math.log(value) for value in known.values()]))) if known else 1.0
    return lambda subspace, params: known.get(subspace, middle)


def _typical(cost: Callable[[Value], float], space: Space, subspace: Subspace) -> float:
    params = subspace.sample(np.random.default_rng(0), 1)[0]
    remedy = "it gets what the objective gets, and returns a number above 0 to which the seconds are in proportion"
    with user_code(f"STUDY['cost'] failed for params of {subspace.name}", remedy=remedy):
        return _positive(cost(space.evaluate(params)))


def _positive(value: float) -> float:
    number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"{number} is not a number above 0")
    return number
