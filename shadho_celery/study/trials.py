"""The finished trials of a study, behind one interface: add, get, iterate, count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shadho_celery.core.trial import Attempt, Trial, TrialState


def merit(trial: Trial) -> tuple[float, float]:
    """Order COMPLETE trials, the best first: losses compare at one budget only, and the highest budget counts."""
    return -(math.inf if trial.budget is None else trial.budget), math.inf if trial.loss is None else trial.loss


class Counts:
    """Numbers of trials by state and subspace, and of attempts by compute class."""

    def __init__(self) -> None:
        self._by_state: Counter[TrialState] = Counter()
        self._by_subspace: Counter[tuple[str, TrialState]] = Counter()
        self._by_class: Counter[tuple[str | None, TrialState]] = Counter()

    def add(self, trial: Trial, by: int = 1) -> None:
        """Count a trial, or with `by` -1 count it no more."""
        self._by_state[trial.state] += by
        self._by_subspace[trial.subspace, trial.state] += by

    def add_placed(self, one: Attempt | Trial, by: int = 1) -> None:
        """Count an attempt, or a trial in its place, in its class."""
        self._by_class[one.compute_class, one.state] += by

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Return the trials in one of `states`; of one compute class or of one subspace where that is given."""
        if compute_class is not None:
            return sum(self._by_class[compute_class, state] for state in states)
        if subspace is not None:
            return sum(self._by_subspace[subspace, state] for state in states)
        return sum(self._by_state[state] for state in states)


class FinishedTrials:
    """Finished trials in the order in which their results came, and the best of them."""

    def __init__(self, earlier: Iterable[Trial] = ()) -> None:
        """`earlier` trials come in the order of their numbers."""
        #: the COMPLETE trial with the least loss, of those with the highest budget; the first of equals
        self.best: Trial | None = None
        self._best_of: dict[str, Trial] = {}
        self._in_order: list[Trial] = []
        self._by_number: dict[int, Trial] = {}
        self._counts = Counts()
        self.count = self._counts.count
        for trial in earlier:
            self.add(trial)
        self._in_order.sort(key=lambda trial: trial.finished_at or 0.0)

    def __len__(self) -> int:
        return len(self._in_order)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._in_order)

    def __reversed__(self) -> Iterator[Trial]:
        return reversed(self._in_order)

    def __getitem__(self, place: int) -> Trial:
        """The trial that was the `place`-th to finish; -1 for the latest."""
        return self._in_order[place]

    def add(self, trial: Trial) -> None:
        """Add a trial that has finished."""
        self._in_order.append(trial)
        self._by_number[trial.number] = trial
        self._counts.add(trial)
        self._counts.add_placed(trial)
        if trial.state is TrialState.COMPLETE and trial.loss is not None:
            of_it = self._best_of.get(trial.subspace)
            if of_it is None or merit(trial) < merit(of_it):
                self._best_of[trial.subspace] = trial
            if self.best is None or merit(trial) < merit(self.best):
                self.best = trial

    def get(self, number: int) -> Trial | None:
        """Return the trial of that number; None where it has not finished."""
        return self._by_number.get(number)

    def best_of(self, subspace: str) -> float | None:
        """Return the least loss in `subspace`, at the highest budget that it was given."""
        best = self._best_of.get(subspace)
        return None if best is None else best.loss
