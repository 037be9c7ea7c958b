"""Cost of a trial on a class of machines, in seconds and in memory: predicted from the trials that have finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from shadho_celery.core.hardware import shortages, uses_gpus
from shadho_celery.core.trial import Memory, Params, Trial, TrialState
from shadho_celery.predictors.durations import Durations
from shadho_celery.predictors.feasibility import MemoryBound
from shadho_celery.predictors.features import Array, complexity, features
from shadho_celery.predictors.neighbours import MEMORY, Neighbours
from shadho_celery.predictors.param_effects import ParamEffects
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
        #: by subspace, its row in `log_seconds`
        self.row_of = {subspace.name: row for row, subspace in enumerate(subspaces)}
        self._column: dict[str, int] = {}
        self._declared = declared or _by_complexity(subspaces)
        self._durations = Durations(len(subspaces))
        self._past = {s.name: Neighbours(len(s.domains) + 1) for s in subspaces}
        self._effects = {s.name: ParamEffects(s) for s in subspaces}
        #: subspaces of which the effects of params have been asked for, and those of them with news
        self._asked: set[str] = set()
        self._due: set[str] = set()
        #: number of changes of the belief in the effects
        self._reads = 0
        #: by subspace, class and kind
        self._memory: dict[tuple[str, str, Memory], Neighbours] = {}
        self._bounds = {(s.name, memory): MemoryBound(s.domains) for s in subspaces for memory in Memory}
        #: trials that ran out of memory, by number, class and kind
        self._outgrown: set[tuple[int, str, Memory]] = set()

    @property
    def version(self) -> int:
        """Number that changes with the belief about the classes' speeds."""
        return self._durations.version

    @property
    def effects_version(self) -> int:
        """Number that changes with the belief about the effects of params."""
        for name in sorted(self._due & self._asked) if self._due else ():
            self._effects[name].read(self._durations.estimate().mean[self.row_of[name]])
            self._due.remove(name)
            self._reads += 1
        return self._reads

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
        for name, memory in shortages(trial.outgrown, trial.outgrown_memory):
            self.tell_out_of_memory(trial, name, memory)
        outcome, compute_class = trial.outcome, trial.compute_class
        is_complete = trial.state is TrialState.COMPLETE and trial.subspace in self.row_of
        if not is_complete or outcome is None or compute_class is None:
            return
        if row is not None:
            for memory in Memory:
                if memory is Memory.HOST or uses_gpus(compute_class):
                    self._bounds[trial.subspace, memory].tell(trial.params, compute_class, fits=True)
        # An earlier version measured by the time of day, which may have been set back within the trial. What is no
        # finite time, by an executor's mistake, would spoil all that is known.
        if outcome.seconds is not None and 0 <= outcome.seconds < math.inf:
            place, column, value = self._timing(trial, compute_class, outcome.seconds)
            self._durations.tell(place, column, value)
            if row is not None:
                self._past[trial.subspace].tell(row, value, column, self._durations.estimate().mean[place])
                effects = self._effects[trial.subspace]
                effects.tell(trial.params, column, value)
                if effects.is_due:
                    self._due.add(trial.subspace)
        for memory, peak in ((Memory.HOST, outcome.memory), (Memory.GPU, outcome.gpu_memory)):
            if peak and row is not None:
                key = trial.subspace, compute_class, memory
                if key not in self._memory:
                    self._memory[key] = Neighbours(len(row))
                self._memory[key].tell(row, math.log(peak), 0, _ONE_GROUP)

    def watch(self, running: Iterable[tuple[Trial, float]]) -> None:
        """Learn from the trials that run now, which take at least the seconds beside them: those they have run."""
        self._durations.suppose(
            self._timing(trial, trial.compute_class, seconds)
            for trial, seconds in running
            if trial.subspace in self.row_of and trial.compute_class is not None
        )

    def _timing(self, trial: Trial, compute_class: str, seconds: float) -> tuple[int, int, float]:
        """Return row and column of a trial's pair, and its log seconds beside its declared cost and budget."""
        log_seconds = math.log(max(seconds, LEAST_SECONDS))
        offset = self._offset(trial.subspace, trial.params, trial.budget)
        return self.row_of[trial.subspace], self._column_of(compute_class), log_seconds - offset

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
        row, column = self.row_of[subspace], self._column_of(compute_class)
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
        memory: Memory = Memory.HOST,
        *,
        quantile: float = 0.5,
        budget: float | None = None,
    ) -> Array | None:
        """Return the predicted peak bytes of n sets of params, shape (n,); None before a trial has measured any.

        `classes` are those on which a trial takes as much of the memory; the one that took most is believed.
        """
        keys = [(subspace, name, memory) for name in classes]
        pasts = [self._memory[key] for key in keys if key in self._memory]
        if not pasts:
            return None
        rows, levels = self._rows(subspace, params_list, [budget]), np.array([quantile])
        logs = [
            past.middle + past.departures(rows, levels, np.array([past.middle]), _MEMORY_SPREAD)[:, 0] for past in pasts
        ]
        return np.asarray(np.exp(np.max(logs, axis=0)))

    def tell_out_of_memory(self, trial: Trial, compute_class: str, memory: Memory) -> None:
        """Learn that a trial did not fit a memory of a class; a second call for it has no effect."""
        told = trial.number, compute_class, memory
        if trial.subspace in self._subspaces and told not in self._outgrown:
            self._outgrown.add(told)
            self._bounds[trial.subspace, memory].tell(trial.params, compute_class, fits=False)

    def outgrows(
        self, subspace: str, params: Params, compute_class: str, classes_by_memory: Sequence[str], memory: Memory
    ) -> float:
        """Return the chance that a trial runs out of a memory on a class; `classes_by_memory` begin with the smallest.

        0 as long as no trial of the subspace ran out of it on the class or a larger one.
        """
        return self._bounds[subspace, memory].chance(params, compute_class, classes_by_memory)

    def log_seconds(self, classes: Sequence[str], optimism: float = 0.0) -> Array:
        """Return the mean log seconds of the subspaces' trials on classes, shape (subspaces, classes).

        They are beside the declared cost, which is the same on all classes. With `optimism` a pair counts as so many
        standard deviations faster than it is believed to be, so that little known pairs get tried (an upper confidence
        bound).
        """
        columns = [self._column_of(name) for name in classes]
        estimate = self._durations.estimate()
        return np.asarray(estimate.mean[:, columns] - optimism * estimate.deviation[:, columns])

    def functions(self, subspace: str, params_list: Sequence[Params]) -> Array:
        """Return what `departures` needs to know of n sets of params, shape (n, functions); it does not change."""
        self._asked.add(subspace)
        return self._effects[subspace].functions(params_list)

    def departures(self, subspace: str, functions: Array, classes: Sequence[str]) -> Array:
        """Return by how much n sets of params depart from `log_seconds` on classes, shape (n, classes).

        That is as believed at the last `effects_version`.
        """
        columns = [self._column_of(name) for name in classes]
        return self._effects[subspace].departures(functions, len(self._column))[:, columns]

    def slowness(self, compute_class: str) -> float:
        """Return the log seconds of a class beside the mean of all classes, its slowness in any subspace."""
        column = self._column_of(compute_class)
        return float(self._durations.estimate().by_class[column])

    def timed(self, compute_class: str) -> int:
        """Return the number of a class's trials that the model has learned from."""
        return self._durations.by_column[self._column_of(compute_class)]

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
