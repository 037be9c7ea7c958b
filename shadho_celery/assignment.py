"""Which subspace the next free slot of a compute class works on."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Protocol

import numpy as np

from shadho_celery import heuristics, ranking
from shadho_celery.cost_model import CostModel
from shadho_celery.errors import UsageError
from shadho_celery.space.split import Subspace
from shadho_celery.trial import Trial

#: results between two refreshes of the performance scores (the paper's figure)
REFRESH_RESULTS = 10

#: k of the index rule: by how many trials a subspace must fall behind to count twice as much
PATIENCE = 15.0

#: standard deviations by which a pair of subspace and class is taken to be faster than it is believed to be
OPTIMISM = 1.0

#: a subspace is scored anew once this part of the trials it is judged by is new: a score takes some ten milliseconds,
#: and fewer would hardly move it
NEWS = 0.1

#: latest trials of a subspace that its performance is judged by
HISTORY = 1000


class Policy(Protocol):
    """Decides what a free slot works on."""

    def see_classes(self, names: Sequence[str]) -> None:
        """The classes with live workers, strongest first; told whenever they have changed."""

    def tell(self, *trials: Trial) -> None:
        """Trials have finished, one or the many of an earlier run."""

    def pick(self, compute_class: str, backlogs: Mapping[str, float]) -> str:
        """One of the subspaces that may get a trial, given by how far each is behind its share, in their turn."""


class CostPolicy:
    """A slot takes what its class is comparatively good at, the more so the less the others are behind.

    That is the subspace j with the greatest (backlog_j + k) * min_c' S_jc' / S_jc, S the predicted seconds on the live
    classes. The backlogs find by themselves the prices at which the linear program of the best placement would have its
    trials done. Source: MaxWeight, Tassiulas and Ephremides, IEEE TAC 37, 1992; k keeps it from following mere noise.
    """

    def __init__(self, cost_model: CostModel) -> None:
        self._model = cost_model
        self._classes: tuple[str, ...] = ()
        self._efficiencies: Mapping[str, Mapping[str, float]] = {}
        self._version = -1

    def see_classes(self, names: Sequence[str]) -> None:
        if tuple(names) != self._classes:
            self._classes = tuple(names)
            self._version = -1

    def tell(self, *trials: Trial) -> None:
        pass

    def pick(self, compute_class: str, backlogs: Mapping[str, float]) -> str:
        if self._version != self._model.version:
            self._version = self._model.version
            self._efficiencies = self._model.efficiencies(self._classes, OPTIMISM)
        efficiency = self._efficiencies[compute_class]
        return max(backlogs, key=lambda name: (backlogs[name] + PATIENCE) * efficiency[name])


class FifoPolicy:
    """Every slot takes the trial that is next by the shares, whatever the slot: first come, first served."""

    def see_classes(self, names: Sequence[str]) -> None:
        pass

    def tell(self, *trials: Trial) -> None:
        pass

    def pick(self, compute_class: str, backlogs: Mapping[str, float]) -> str:
        return next(iter(backlogs))


class PaperPolicy:
    """SHADHO's own rule: ranked subspaces on ranked classes, Planck weights inside a class (arXiv 1707.01428).

    A class whose subspaces have all been dealt out helps with the others: no slot idles while there is work.
    """

    def __init__(self, subspaces: Sequence[Subspace], generator: np.random.Generator) -> None:
        self._complexity = {s.name: heuristics.complexity(s.leaves) for s in subspaces}
        # In descending complexity, so that it decides as long as all performances are equal.
        self._subspaces = {s.name: s for s in sorted(subspaces, key=lambda s: -self._complexity[s.name])}
        self._performance = dict.fromkeys(self._subspaces, heuristics.START_VALUE)
        #: by subspace, its latest trials: a row of features and the loss each
        self._history: dict[str, deque[tuple[Any, float]]] = {name: deque(maxlen=HISTORY) for name in self._subspaces}
        #: by subspace, results since it was scored
        self._news: Counter[str] = Counter()
        self._results = 0
        self._generator = generator
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

    def tell(self, *trials: Trial) -> None:
        # One subspace needs no rank.
        if len(self._subspaces) < 2:
            return
        losses = [trial for trial in trials if trial.loss is not None and trial.subspace in self._history]
        for name, told in groupby(sorted(losses, key=lambda trial: trial.subspace), lambda trial: trial.subspace):
            latest = list(told)
            self._news[name] += len(latest)
            del latest[:-HISTORY]
            rows = heuristics.features([trial.params for trial in latest], self._subspaces[name].domains)
            self._history[name].extend(
                zip(rows, (trial.loss for trial in latest if trial.loss is not None), strict=True)
            )
        self._results += len(losses)
        if self._results >= REFRESH_RESULTS:
            self._refresh()

    def pick(self, compute_class: str, backlogs: Mapping[str, float]) -> str:
        ranked = [name for name in self._mapping.get(compute_class, ()) if name in backlogs]
        if not ranked:
            return next(iter(backlogs))
        if len(ranked) == 1:
            return ranked[0]
        return ranked[int(self._generator.choice(len(ranked), p=ranking.planck_weights(len(ranked))))]

    def _refresh(self) -> None:
        """Score anew the subspaces about which there is news, and rank."""
        for name, results in sorted(self._news.items()):
            if results >= NEWS * len(self._history[name]):
                rows, losses = zip(*self._history[name], strict=True)
                self._performance[name] = heuristics.performance(np.array(rows), np.array(losses), self._generator)
                del self._news[name]
        self._results = 0
        self._rank()

    def _rank(self) -> None:
        ranked = ranking.rank(list(self._subspaces), self._complexity, self._performance)
        self._mapping = ranking.pair(ranked, self._classes) if self._classes else {}


POLICIES = ("cost", "paper", "fifo")


def make_policy(
    name: str, subspaces: Sequence[Subspace], cost_model: CostModel, generator: np.random.Generator
) -> Policy:
    """The policy called `name`; UsageError for an unknown one."""
    check(name)
    if name == "paper":
        return PaperPolicy(subspaces, generator)
    return CostPolicy(cost_model) if name == "cost" else FifoPolicy()


def check(name: str) -> None:
    """Raise UsageError for a name that no policy has."""
    if name not in POLICIES:
        raise UsageError(f"there is no policy {name!r}; choose one of {', '.join(POLICIES)}")
