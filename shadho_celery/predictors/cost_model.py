"""Cost of a trial on a class of machines, in seconds and in memory: predicted from the trials that have finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.predictors.durations import Durations
from shadho_celery.predictors.feasibility import MemoryBound
from shadho_celery.predictors.features import Array, complexity, features
from shadho_celery.predictors.neighbours import MEMORY, Neighbours
from shadho_celery.space.split import Subspace

#: (subspace, params) -> a number that the seconds are thought to be in proportion to
DeclaredCost = Callable[[str, Params], float]

QUANTILES = (0.1, 0.5, 0.9)

#: trials shorter than this are all alike to a scheduler
LEAST_SECONDS = 1e-3
#: prior seconds of the most complex subspace over those of the simplest one, if no cost is declared
COMPLEXITY_RATIO = 4.0
#: memory has no groups: its trials depart from one value
_ONE_GROUP = np.zeros(1)
#: prior standard deviation of log bytes within a subspace
_MEMORY_SPREAD = 0.5
#: logarithm of the largest usual budget: the budget's feature then lies in about [0, 1]
_BUDGETS = math.log(1000.0)


class CostModel:
    """Learns online from finished trials, in the order in which they come.

    Log seconds of a trial = those of its subspace and class (`Durations`) + log declared cost + log budget + departure
    of trials with alike params (`Neighbours`). Failed and pruned trials teach nothing: they end at any time.
    """

    def __init__(self, subspaces: Sequence[Subspace], declared: DeclaredCost | None = None) -> None:
        self._subspaces = {subspace.name: subspace for subspace in subspaces}
        self._row = {subspace.name: row for row, subspace in enumerate(subspaces)}
        self._column: dict[str, int] = {}
        self._declared = declared or _by_complexity(subspaces)
        self._durations = Durations(len(subspaces))
        self._past = {s.name: Neighbours(len(s.domains) + 1) for s in subspaces}
        #: by subspace and class
        self._memory: dict[tuple[str, str], Neighbours] = {}
        self._bounds = {s.name: MemoryBound(s.domains) for s in subspaces}
        #: trials that ran out of memory, by number and class
        self._outgrown: set[tuple[int, str]] = set()

    @property
    def version(self) -> int:
        """Number that changes with the belief about the classes' speeds."""
        self._durations.estimate()
        return self._durations.version

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials in their order; from many at once far faster than from one after the other.

        `following` are the trials by subspace that come after these in the same history.
        """
        rows: dict[int, Array] = {}
        for name, told in groupby(sorted(trials, key=lambda trial: trial.subspace), lambda trial: trial.subspace):
            if name in self._subspaces:
                # Older ones would only be dropped again.
                latest = list(told)
                latest = latest[max(0, len(latest) + (following or {}).get(name, 0) - MEMORY) :]
                latest_rows = self._rows(name, [t.params for t in latest], [t.budget for t in latest])
                rows.update(zip((t.number for t in latest), latest_rows, strict=True))
        for trial in trials:
            self._tell(trial, rows.get(trial.number))

    def _tell(self, trial: Trial, row: Array | None) -> None:
        """Learn from one trial; without its row of features only the seconds of its subspace on its class."""
        for outgrown in trial.outgrown.split(",") if trial.outgrown else ():
            self.tell_out_of_memory(trial, outgrown)
        outcome, compute_class = trial.outcome, trial.compute_class
        is_complete = trial.state is TrialState.COMPLETE and trial.subspace in self._row
        if not is_complete or outcome is None or compute_class is None:
            return
        if row is not None:
            self._bounds[trial.subspace].tell(trial.params, compute_class, fits=True)
        # An earlier version measured by the time of day, which may have been set back within the trial.
        if outcome.seconds is not None and outcome.seconds >= 0:
            place, column, value = self._timing(trial, compute_class, outcome.seconds)
            self._durations.tell(place, column, value)
            if row is not None:
                self._past[trial.subspace].tell(row, value, column, self._durations.estimate().mean[place])
        if outcome.memory and row is not None:
            key = trial.subspace, compute_class
            if key not in self._memory:
                self._memory[key] = Neighbours(len(row))
            self._memory[key].tell(row, math.log(outcome.memory), 0, _ONE_GROUP)

    def watch(self, running: Iterable[tuple[Trial, float]]) -> None:
        """Learn from the trials that run now, which take at least the seconds beside them: those they have run."""
        self._durations.suppose(
            self._timing(trial, trial.compute_class, seconds)
            for trial, seconds in running
            if trial.subspace in self._row and trial.compute_class is not None
        )

    def _timing(self, trial: Trial, compute_class: str, seconds: float) -> tuple[int, int, float]:
        """Return row and column of a trial's pair, and its log seconds beside its declared cost and budget."""
        log_seconds = math.log(max(seconds, LEAST_SECONDS))
        offset = self._offset(trial.subspace, trial.params, trial.budget)
        return self._row[trial.subspace], self._column_of(compute_class), log_seconds - offset

    def seconds(
        self,
        subspace: str,
        compute_class: str,
        params_list: Sequence[Params],
        *,
        quantiles: Sequence[float] = QUANTILES,
        budget: float | None = None,
    ) -> Array:
        """Return the predicted seconds of n sets of params on a class, shape (n, q): quantiles, ascending with q.

        Raises KeyError for an unknown subspace. Before there are trials, a second in the middle.
        """
        row, column = self._row[subspace], self._column_of(compute_class)
        estimate = self._durations.estimate()
        spread = math.hypot(estimate.noise, float(estimate.deviation[row, column]))
        departures = self._past[subspace].departures(
            self._rows(subspace, params_list, [budget]), np.asarray(quantiles), estimate.mean[row], spread
        )
        centre = estimate.mean[row, column] + np.array([self._offset(subspace, each, budget) for each in params_list])
        return np.asarray(np.exp(centre[:, None] + departures))

    def memory(
        self,
        subspace: str,
        params_list: Sequence[Params],
        classes: Sequence[str],
        *,
        quantile: float = 0.5,
        budget: float | None = None,
    ) -> Array | None:
        """Return the predicted peak bytes of n sets of params, shape (n,); None before a trial has measured any.

        `classes` are those whose memory is of one kind, a GPU's or a host's; the one that took most is believed.
        """
        pasts = [self._memory[subspace, name] for name in classes if (subspace, name) in self._memory]
        if not pasts:
            return None
        rows, levels = self._rows(subspace, params_list, [budget]), np.array([quantile])
        logs = [
            past.middle + past.departures(rows, levels, np.array([past.middle]), _MEMORY_SPREAD)[:, 0] for past in pasts
        ]
        return np.asarray(np.exp(np.max(logs, axis=0)))

    def tell_out_of_memory(self, trial: Trial, compute_class: str) -> None:
        """Learn that a trial did not fit the memory of a class; a second call for it has no effect."""
        if trial.subspace in self._bounds and (trial.number, compute_class) not in self._outgrown:
            self._outgrown.add((trial.number, compute_class))
            self._bounds[trial.subspace].tell(trial.params, compute_class, fits=False)

    def outgrows(self, subspace: str, params: Params, compute_class: str, classes_by_memory: Sequence[str]) -> float:
        """Return the chance that a trial runs out of memory on a class; `classes_by_memory` begin with the smallest.

        0 as long as no trial of the subspace ran out of memory on the class or a larger one.
        """
        return self._bounds[subspace].chance(params, compute_class, classes_by_memory)

    def efficiencies(self, classes: Sequence[str], optimism: float = 0.0) -> dict[str, dict[str, float]]:
        """Return by class and subspace the fastest class's seconds over this class's: 1 if no class is faster.

        With `optimism` a pair counts as so many standard deviations faster than it is believed to be, so that little
        known pairs get tried (an upper confidence bound).
        """
        columns = [self._column_of(name) for name in classes]
        estimate = self._durations.estimate()
        logs = estimate.mean[:, columns] - optimism * estimate.deviation[:, columns]
        ratios = np.exp(logs.min(axis=1, keepdims=True) - logs)
        return {c: dict(zip(self._row, ratios[:, place].tolist(), strict=True)) for place, c in enumerate(classes)}

    def slowness(self, compute_class: str) -> float:
        """Return the log seconds of a class beside the mean of all classes, its slowness in any subspace."""
        column = self._column_of(compute_class)
        return float(self._durations.estimate().by_class[column])

    def timed(self, compute_class: str) -> int:
        """Return the number of a class's trials that the model has learned from."""
        column = self._column_of(compute_class)
        return int(self._durations.counts[:, column].sum())

    def _column_of(self, compute_class: str) -> int:
        if compute_class not in self._column:
            self._column[compute_class] = len(self._column)
            self._durations.add_column()
        return self._column[compute_class]

    def _rows(self, subspace: str, params_list: Sequence[Params], budgets: Sequence[float | None]) -> Array:
        """Return rows of `features` and the budgets' logarithms, one for all or each its own; shape (n, d + 1)."""
        rows = np.empty((len(params_list), len(self._subspaces[subspace].domains) + 1))
        rows[:, :-1] = features(params_list, self._subspaces[subspace].domains)
        rows[:, -1] = [math.log(budget) / _BUDGETS if budget else 0.0 for budget in budgets]
        return rows

    def _offset(self, subspace: str, params: Params, budget: float | None) -> float:
        """Return the log of declared cost and budget, known before any trial."""
        return (math.log(budget) if budget else 0.0) + math.log(self._declared(subspace, params))


def _by_complexity(subspaces: Sequence[Subspace]) -> DeclaredCost:
    """Return seconds by the rank of the complexities, from simple to complex in equal steps of their logarithm."""
    ordered = sorted(subspaces, key=lambda subspace: complexity(subspace.domains.values()))
    middle = (len(ordered) - 1) / 2
    relative = {s.name: COMPLEXITY_RATIO ** ((place - middle) / max(1, 2 * middle)) for place, s in enumerate(ordered)}
    return lambda subspace, params: relative[subspace]
