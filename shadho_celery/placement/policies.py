"""Placement policies: the choice of a trial, or of a subspace, for the next free slot of a compute class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from shadho_celery.core.checks import check_name
from shadho_celery.core.settings import POLICIES
from shadho_celery.core.trial import Trial
from shadho_celery.placement.paper import PaperPolicy
from shadho_celery.placement.pool import Pool
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.features import Array
from shadho_celery.space.split import Subspace

#: k of the index rule: trials that a subspace must fall behind to count twice as much
PATIENCE = 15.0

#: standard deviations by which a pair of subspace and class counts as faster than it is believed to be
OPTIMISM = 1.0


#: digits of an index's logarithm that count: of equals but for rounding, the first in turn is taken
DIGITS = 9

#: step of a class's price, in its logarithm, for a trial that goes to another class than the one it is cheapest on
STEP = 0.02
#: the most steps that one trial moves a price by
MOST_STEPS = 4.0


def _anything(trial: Trial) -> bool:
    return True


class Policy(Protocol):
    """Gives a free slot its trial, or the subspace that a new one is drawn in."""

    #: drawn trials that it chooses from; None if it chooses a subspace only, before the draw
    pool: Pool | None

    def see_classes(self, names: Sequence[str]) -> None:
        """Note the classes with live workers, strongest first; called whenever they have changed."""

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        """Learn from finished trials; of an earlier run's many a part, which so many by subspace are `following`."""

    def pick(
        self, compute_class: str, backlogs: Mapping[str, float], fits: Callable[[Trial], bool] = _anything
    ) -> str | Trial:
        """Return a trial of the pool that `fits`, or one of the subspaces that may get a new trial.

        The first in `backlogs` is the one whose turn it is. A subspace with trials in the pool is named only if none of
        all subspaces' trials there fits, and no subspace is without.
        """


class CostPolicy:
    """Gives a slot the trial that its class is comparatively good at, unless other subspaces are far behind.

    That is the trial i, of subspace j, with the greatest (backlog_j + k) * min_c' P_c' S_ic' / (P_c S_ic), S the
    predicted seconds on the live classes and P the price of a class's second. A subspace without trials in the pool
    stands for its next one, with its mean seconds. The backlogs and the prices find by themselves the dual variables of
    the linear program of the best placement. Sources: MaxWeight, Tassiulas and Ephremides, IEEE TAC 37, 1992, where k
    keeps it from following mere noise; for the prices, dual subgradient steps as in Devanur and Hayes, "The Adwords
    Problem", ACM EC 2009: a class that is wanted more than it can do gets dearer.
    """

    def __init__(self, cost_model: CostModel, pool_size: int | None = None) -> None:
        """Choose from up to `pool_size` trials, by default as many as the slots ask for."""
        self.pool: Pool | None = Pool(cost_model, pool_size)
        self._pool = self.pool
        self._model = cost_model
        self._classes: tuple[str, ...] = ()
        #: log price by class
        self._prices: dict[str, float] = {}
        #: log seconds plus log prices of the trials in the pool, as of the last pick
        self._costs = np.empty((0, 0))
        #: log seconds of the subspaces on the live classes
        self._log_seconds: Mapping[str, Array] = {}
        self._version = -1

    def see_classes(self, names: Sequence[str]) -> None:
        if tuple(names) != self._classes:
            self._classes = tuple(names)
            self._prices = dict.fromkeys(names, 0.0) | self._prices
            self._version = -1
        self._pool.see_classes(names)

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        pass

    def pick(
        self, compute_class: str, backlogs: Mapping[str, float], fits: Callable[[Trial], bool] = _anything
    ) -> str | Trial:
        column = self._classes.index(compute_class)
        drawn, worth = self._best_drawn(column, backlogs, fits)
        undrawn = [name for name in backlogs if not self._pool.count(name)]
        if drawn is None:
            undrawn = undrawn or list(backlogs)
        if undrawn:
            name, its_worth = self._best_undrawn(column, undrawn, backlogs)
            if drawn is None or its_worth > worth:
                return name
        assert drawn is not None
        self._move_prices(self._costs[drawn], column)
        return self._pool.trials[drawn]

    def _best_drawn(
        self, column: int, backlogs: Mapping[str, float], fits: Callable[[Trial], bool]
    ) -> tuple[int | None, float]:
        """Return the place in the pool of the trial that fits with the greatest index, and the index's logarithm."""
        trials = self._pool.trials
        if not trials:
            return None, -np.inf
        costs = self._costs = self._pool.log_seconds() + self._log_prices()
        worth = costs.min(axis=1) - costs[:, column]
        if len(backlogs) > 1:
            behind = {name: math.log(backlog + PATIENCE) for name, backlog in backlogs.items()}
            worth += [behind[trial.subspace] for trial in trials]
        worth = worth.round(DIGITS)
        # Mostly the first fits.
        for _ in trials:
            place = int(worth.argmax())
            if fits(trials[place]):
                return place, float(worth[place])
            worth[place] = -np.inf
        return None, -np.inf

    def _best_undrawn(self, column: int, names: Sequence[str], backlogs: Mapping[str, float]) -> tuple[str, float]:
        """Return the subspace with the greatest index for its next trial, and the index's logarithm."""
        version = self._model.version
        if self._version != version:
            self._version = version
            self._log_seconds = self._model.log_seconds(self._classes, OPTIMISM)
        costs = np.array([self._log_seconds[name] for name in names]) + self._log_prices()
        worth = costs.min(axis=1) - costs[:, column] + np.log([backlogs[name] + PATIENCE for name in names])
        worth = worth.round(DIGITS)
        place = int(worth.argmax())
        return names[place], float(worth[place])

    def _log_prices(self) -> Array:
        return np.array([self._prices[name] for name in self._classes])

    def _move_prices(self, costs: Array, column: int) -> None:
        """Make the class that a trial is cheapest on dearer, and the one that takes it cheaper, by what is lost."""
        cheapest = int(costs.argmin())
        if cheapest != column:
            lost = min(float(np.exp(costs[column] - costs[cheapest])), MOST_STEPS)
            self._prices[self._classes[cheapest]] += STEP
            self._prices[self._classes[column]] -= STEP * lost
            # Only their differences count; a new class has the mean price.
            mean = sum(self._prices.values()) / len(self._prices)
            self._prices = {name: price - mean for name, price in self._prices.items()}


class FifoPolicy:
    """Every slot takes the trial that is next by the shares, whatever the slot: first come, first served."""

    pool: Pool | None = None

    def see_classes(self, names: Sequence[str]) -> None:
        pass

    def tell(self, *trials: Trial, following: Mapping[str, int] | None = None) -> None:
        pass

    def pick(
        self, compute_class: str, backlogs: Mapping[str, float], fits: Callable[[Trial], bool] = _anything
    ) -> str | Trial:
        return next(iter(backlogs))


def make_policy(
    name: str,
    subspaces: Sequence[Subspace],
    cost_model: CostModel,
    generator: np.random.Generator,
    pool_size: int | None = None,
) -> Policy:
    """Return the policy called `name`, of which cost has a pool. Raises UsageError for an unknown one."""
    check_name("policy", name, POLICIES)
    if name == "paper":
        return PaperPolicy(subspaces, generator)
    return CostPolicy(cost_model, pool_size) if name == "cost" else FifoPolicy()
