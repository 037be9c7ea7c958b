"""Finished trials of a study, behind one interface: add, get, iterate, count."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from shadho_celery.core.trial import Attempt, Trial, TrialState


def merit(trial: Trial) -> tuple[float, float]:
    """Return a sort key, least for the best COMPLETE trial: the highest budget first, then the least loss."""
    return -(math.inf if trial.budget is None else trial.budget), math.inf if trial.loss is None else trial.loss


class Counts:
    """Numbers of trials by state and subspace, and of attempts by compute class."""

    def __init__(self) -> None:
        #: by compute class, subspace and state; None for all classes or all subspaces
        self._counts: Counter[tuple[str | None, str | None, TrialState]] = Counter()

    def add(self, trial: Trial, by: int = 1) -> None:
        """Count a trial, or with `by` -1 count it no more."""
        self._counts[None, None, trial.state] += by
        self._counts[None, trial.subspace, trial.state] += by

    def add_placed(self, one: Attempt | Trial, by: int = 1) -> None:
        """Count an attempt, or a finished trial, in its class; a trial that was never sent has none."""
        if one.compute_class is not None:
            self._counts[one.compute_class, None, one.state] += by

    def count(self, *states: TrialState, compute_class: str | None = None, subspace: str | None = None) -> int:
        """Return the number in one of `states`, of one compute class or one subspace if that is given."""
        return sum(self._counts[compute_class, subspace, state] for state in states)


class FinishedTrials:
    """Finished trials in the order of their results, and the best of them."""

    def __init__(self, earlier: Iterable[Trial] = ()) -> None:
        """`earlier` trials come by number."""
        #: by subspace, and of all under None; the first of equals
        self._best: dict[str | None, Trial] = {}
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
        """Return the trial that was the `place`-th to finish; -1 for the latest."""
        return self._in_order[place]

    def add(self, trial: Trial) -> None:
        """Add a finished trial."""
        self._in_order.append(trial)
        self._by_number[trial.number] = trial
        self._counts.add(trial)
        self._counts.add_placed(trial)
        if trial.state is TrialState.COMPLETE and trial.loss is not None:
            for group in (None, trial.subspace):
                self._best[group] = min(self._best.get(group, trial), trial, key=merit)

    def get(self, number: int) -> Trial | None:
        """Return the trial of that number; None if it has not finished."""
        return self._by_number.get(number)

    @property
    def best(self) -> Trial | None:
        """The COMPLETE trial with the least loss, of those with the highest budget; the first of equals."""
        return self._best.get(None)

    def best_of(self, subspace: str) -> float | None:
        """Return the least loss in `subspace` at the highest budget of its trials; None without a loss."""
        best = self._best.get(subspace)
        return None if best is None else best.loss
