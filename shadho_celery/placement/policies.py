"""Placement policies: the choice of a subspace for the next free slot of a compute class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from shadho_celery.core.checks import check_name
from shadho_celery.core.settings import POLICIES
from shadho_celery.core.trial import Trial
from shadho_celery.placement.paper import PaperPolicy
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.space.split import Subspace

#: k of the index rule: trials that a subspace must fall behind to count twice as much
PATIENCE = 15.0

#: standard deviations by which a pair of subspace and class counts as faster than it is believed to be
OPTIMISM = 1.0


class Policy(Protocol):
    """Gives a free slot its subspace."""

    def see_classes(self, names: Sequence[str]) -> None:
        """Note the classes with live workers, strongest first; called whenever they have changed."""

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials; of an earlier run's many a part, which so many by subspace are `following`."""

    def pick(self, compute_class: str, backlogs: Mapping[str, float]) -> str:
        """Return one of the subspaces that may get a trial; the first in `backlogs` is the one whose turn it is."""


class CostPolicy:
    """Gives a slot the subspace that its class is comparatively good at, unless others are far behind.

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

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
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

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        pass

    def pick(self, compute_class: str, backlogs: Mapping[str, float]) -> str:
        return next(iter(backlogs))


def make_policy(
    name: str, subspaces: Sequence[Subspace], cost_model: CostModel, generator: np.random.Generator
) -> Policy:
    """Return the policy called `name`. Raises UsageError for an unknown one."""
    check_name("policy", name, POLICIES)
    if name == "paper":
        return PaperPolicy(subspaces, generator)
    return CostPolicy(cost_model) if name == "cost" else FifoPolicy()
