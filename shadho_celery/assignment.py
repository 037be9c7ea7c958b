"""Which subspace the next free slot of a compute class works on."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from shadho_celery import heuristics, ranking
from shadho_celery.clock import Clock
from shadho_celery.errors import UsageError
from shadho_celery.space.split import Subspace
from shadho_celery.trial import Trial

#: results between two refreshes of the performance scores (the paper's figure)
REFRESH_RESULTS = 10

#: seconds between two refreshes at least, so that a search of very short trials does not spend its time on them
REFRESH_SECONDS = 1.0

#: latest trials of a subspace that its performance is judged by
HISTORY = 1000


class Policy(Protocol):
    """Decides what a free slot works on."""

    def see_classes(self, names: Sequence[str]) -> None:
        """The classes with live workers, strongest first; told whenever they have changed."""

    def tell(self, trial: Trial) -> None:
        """A trial has finished."""

    def pick(self, compute_class: str, choices: Sequence[str]) -> str:
        """One of `choices`: subspaces that may get a trial, the one most behind its share first."""


class FifoPolicy:
    """Every slot takes the trial that is next by the shares, whatever the slot: first come, first served."""

    def see_classes(self, names: Sequence[str]) -> None:
        pass

    def tell(self, trial: Trial) -> None:
        pass

    def pick(self, compute_class: str, choices: Sequence[str]) -> str:
        return choices[0]


class PaperPolicy:
    """SHADHO's own rule: ranked subspaces on ranked classes, Planck weights inside a class (arXiv 1707.01428).

    A class whose subspaces have all been dealt out helps with the others: no slot idles while there is work.
    """

    def __init__(self, subspaces: Sequence[Subspace], generator: np.random.Generator, clock: Clock) -> None:
        self._complexity = {s.name: heuristics.complexity(s.leaves) for s in subspaces}
        # In descending complexity, so that it decides as long as all performances are equal.
        self._subspaces = {s.name: s for s in sorted(subspaces, key=lambda s: -self._complexity[s.name])}
        self._performance = dict.fromkeys(self._subspaces, heuristics.START_VALUE)
        #: by subspace, its latest trials: a row of features and the loss each
        self._history: dict[str, deque[tuple[Any, float]]] = {name: deque(maxlen=HISTORY) for name in self._subspaces}
        self._stale: set[str] = set()
        self._results = 0
        self._refreshed_at = clock.now()
        self._generator = generator
        self._clock = clock
        self._classes: tuple[str, ...] = ()
        self._mapping: dict[str, list[str]] = {}

    @property
    def mapping(self) -> Mapping[str, Sequence[str]]:
        """Subspaces by class, the highest ranked first."""
        return self._mapping

    def see_classes(self, names: Sequence[str]) -> None:
        if tuple(names) != self._classes:
            self._classes = tuple(names)
            self._rank()

    def tell(self, trial: Trial) -> None:
        # One subspace needs no rank.
        if len(self._subspaces) < 2 or trial.loss is None or trial.subspace not in self._history:
            return
        row = heuristics.features([trial.params], self._subspaces[trial.subspace].domains)[0]
        self._history[trial.subspace].append((row, trial.loss))
        self._stale.add(trial.subspace)
        self._results += 1
        if self._results >= REFRESH_RESULTS and self._clock.now() - self._refreshed_at >= REFRESH_SECONDS:
            self._refresh()

    def pick(self, compute_class: str, choices: Sequence[str]) -> str:
        open_ones = set(choices)
        ranked = [name for name in self._mapping.get(compute_class, ()) if name in open_ones]
        if not ranked:
            return choices[0]
        if len(ranked) == 1:
            return ranked[0]
        return ranked[int(self._generator.choice(len(ranked), p=ranking.planck_weights(len(ranked))))]

    def _refresh(self) -> None:
        """Score anew the subspaces that have new results, and rank."""
        for name in sorted(self._stale):
            rows, losses = zip(*self._history[name], strict=True)
            self._performance[name] = heuristics.performance(np.array(rows), np.array(losses), self._generator)
        self._stale.clear()
        self._results = 0
        self._refreshed_at = self._clock.now()
        self._rank()

    def _rank(self) -> None:
        ranked = ranking.rank(list(self._subspaces), self._complexity, self._performance)
        self._mapping = ranking.pair(ranked, self._classes) if self._classes else {}


POLICIES = ("paper", "fifo")


def make_policy(name: str, subspaces: Sequence[Subspace], generator: np.random.Generator, clock: Clock) -> Policy:
    """The policy called `name`; UsageError for an unknown one."""
    check(name)
    return PaperPolicy(subspaces, generator, clock) if name == "paper" else FifoPolicy()


def check(name: str) -> None:
    """Raise UsageError for a name that no policy has."""
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")


class Shares:
    """How many of a study's trials each subspace gets: in proportion to its probability under the search space.

    Trials are dealt out by Webster's (Sainte-Laguë's) rule: the next one goes to the subspace with the greatest
    p / (2 d + 1), d the trials it has. So the first n trials of a longer study are those of a study of n.
    """

    def __init__(self, probabilities: Mapping[str, float]) -> None:
        self._names = list(probabilities)
        self._probabilities = np.array([probabilities[name] for name in self._names], dtype=float)

    def in_order(self, dealt: Mapping[str, int]) -> list[str]:
        """The subspaces, the one whose turn it is first."""
        counts = np.array([dealt[name] for name in self._names], dtype=float)
        order = np.argsort(-self._probabilities / (2 * counts + 1), kind="stable")
        return [self._names[i] for i in order]

    def quotas(self, trials: int) -> dict[str, int]:
        """Trials by subspace when `trials` have been dealt out."""
        # A rounded multiple of the probabilities is where the rule stands after as many trials: start there, step on.
        counts = np.floor(self._probabilities * max(0, trials - len(self._names)) + 0.5)
        for _ in range(trials - int(counts.sum())):
            counts[np.argmax(self._probabilities / (2 * counts + 1))] += 1
        return {name: int(n) for name, n in zip(self._names, counts, strict=True)}
