"""The policies `cost` and `fifo`, which choose a trial, or the subspace of a new trial, for a free slot of a class."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import scipy

from shadho_celery.core.checks import check_name
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.names import POLICIES, named
from shadho_celery.core.trial import Trial
from shadho_celery.placement.base import Choice, Fits, Offers, Policy, Slot
from shadho_celery.placement.model import LEAST_SECONDS, CostModel
from shadho_celery.placement.pool import WHOLE, Pool, Promotions
from shadho_celery.space.features import Array
from shadho_celery.space.split import Subspace

#: k of the index rule: a subspace that is this many trials behind its share has twice the index of one without a
#: backlog
PATIENCE = 15.0

#: a pair of subspace and class counts as faster than estimated by this many standard deviations
OPTIMISM = 1.0

#: logarithms of indices are rounded to this many decimal places, so that of nearly equal indices the first in turn is
#: used
DIGITS = 9

#: change of a class's log price when a trial goes to another class than its cheapest one, in standard deviations of the
#: trials' comparative costs
STEP = 0.05
#: maximum number of steps by which one trial changes a price
MOST_STEPS = 4.0

#: assumed standard deviation of a trial's log seconds, for its chance to end before the limit on time; and log of the
#: chance below which a trial counts as late
SPREAD, LATE = 0.5, math.log(0.5)


class CostPolicy(Policy):
    """Chooses for a slot the trial that its class runs comparatively fast, unless other subspaces are far behind.

    A subspace j has the index (backlog_j + k) * min_c' S_jc' / S_jc on class c, where S are the mean seconds of its
    trials on the live classes. Trial i of its pool has this index times min_c' P_c' D_ic' / (P_c D_ic). D are the
    factors by which the trial's params change the seconds, and P is the price of a class's second within the subspace.
    With a limit on time, the index is also multiplied by the chance that the trial ends before the limit, divided by
    the greatest chance in the subspace. An overdue trial (`Pool.waits`) comes first on the class where it costs least,
    and after twice as long on every class. The trial with the greatest index is taken. A subspace without trials in the
    pool is represented by its next trial. Promoted trials come before others, on the class that is expected to end them
    first (`Promotions`). If one sampler draws in the whole space, there are no backlogs, D are the trial's seconds, and
    there is one set of prices.

    Backlogs approach the dual variables of the shares in the linear program of the best placement, and prices those of
    the classes' time. The price of a class rises if there is more demand than it can serve. Sources: for the index,
    MaxWeight, Tassiulas and Ephremides, IEEE TAC 37, 1992, with k added to reduce the effect of noise; for the prices,
    dual subgradient steps as in Devanur and Hayes, "The Adwords Problem", ACM EC 2009.
    """

    def __init__(self, cost_model: CostModel, pool: Pool) -> None:
        """`pool` has the trials drawn ahead, from which the policy also chooses."""
        self._pool = pool
        self._model = cost_model
        self._promotions = Promotions(cost_model)
        self._classes: tuple[str, ...] = ()
        #: log seconds of typical trials, shape (subspaces, live classes)
        self._typical = np.empty((0, 0))
        #: by live class and row of a subspace: the subspace's least log seconds on any live class minus its log seconds
        #: on this class
        self._advantages: list[list[float]] = []
        #: version of the model, and budget of new trials, with which `_typical` and `_advantages` were computed
        self._known: tuple[int, float | None] = -1, None
        #: log prices of the live classes within each subspace, shape (subspaces, classes)
        self._prices = np.empty((0, 0))
        #: by class that was live earlier: its latest log prices, shape (subspaces,)
        self._prices_seen: dict[str, Array] = {}
        #: log costs of the trials in the pool at the last pick, shape (trials, classes): the log price plus the
        #: departure from the subspace's typical log seconds; with one sampler for the whole space, the log price plus
        #: the log slot seconds
        self._costs = np.empty((0, 0))
        #: by row of a subspace: standard deviation of its trials' comparative costs, for one version of the pool
        self._spreads: dict[int, float] = {}
        self._spreads_version = -1

    def see(self, classes: Sequence[ComputeClass]) -> None:
        self._promotions.see(classes)
        names = tuple(compute_class.name for compute_class in classes)
        if names != self._classes:
            self._prices_seen |= dict(zip(self._classes, self._prices.T, strict=True))
            self._known, self._spreads_version = (-1, None), -1
            # Only differences of log prices matter. The log prices of a subspace are 0 on average, so a new class gets
            # 0.
            new = np.zeros(len(self._model.row_of))
            columns = [self._prices_seen.get(name, new) for name in names]
            self._prices = np.array(columns).reshape(len(names), len(new)).T.copy()
        self._classes = names
        self._pool.see(names, sum(compute_class.slots for compute_class in classes))

    def tell(self, trials: Sequence[Trial], following: Mapping[str, int] | None = None) -> None:
        self._promotions.tell(trials)

    def wants(self) -> Mapping[str, int]:
        return self._pool.missing()

    def offer(self, trials: Sequence[Trial]) -> None:
        self._pool.add(trials)

    def pick(self, slot: Slot, offers: Offers, fits: Fits) -> Choice | None:
        if offers.promotions and (promoted := self._promotions.pick(slot, offers.promotions, fits, offers.rung)):
            return promoted
        column = self._classes.index(slot.compute_class.name)
        indices = [0.0] if self._pool.is_whole else self._indices(column, offers)
        drawn, worth = self._best_drawn(column, indices, slot, fits) if self._pool.trials else (None, -math.inf)
        # A trial is drawn in a subspace with trials in the pool only if none of the pool's trials fits, and no subspace
        # without trials in the pool is open.
        undrawn = [name for name in offers.open if not self._pool.in_part[name]]
        open_ = undrawn if drawn is not None else undrawn or offers.open
        if open_ and self._pool.is_whole:
            return Choice(WHOLE)
        if open_:
            worths = [indices[self._model.row_of[name]] for name in open_]
            if max(worths) > worth:
                return Choice(open_[worths.index(max(worths))])
        if drawn is None:
            return None
        self._move_prices(drawn, column)
        return Choice(self._pool.take(drawn))

    def prices(self, subspace: str) -> Mapping[str, float]:
        """Return the price of a second on each live class for the trials of a subspace, 1 on geometric average.

        A single class has no price.
        """
        if len(self._classes) < 2:
            return {}
        row = self._prices[0 if self._pool.is_whole else self._model.row_of[subspace]]
        return dict(zip(self._classes, np.exp(row).tolist(), strict=True))

    def _indices(self, column: int, offers: Offers) -> list[float]:
        """Return the logarithms of the subspaces' indices on a class, by row; -inf for a subspace without a backlog."""
        if self._known != (known := (self._model.version, offers.budget)):
            self._known, typical = known, self._model.typical(offers.budget)
            self._typical = self._model.costs(typical, self._classes).log_seconds
            seconds = self._model.costs(typical, self._classes, OPTIMISM).log_seconds
            self._advantages = (seconds.min(axis=1, keepdims=True) - seconds).T.tolist()
        # Plain numbers are faster than arrays for a few subspaces.
        advantages, row_of = self._advantages[column], self._model.row_of
        indices = [-math.inf] * len(advantages)
        for name, behind in offers.backlogs.items():
            row = row_of[name]
            indices[row] = round(advantages[row] + math.log(behind + PATIENCE), DIGITS)
        return indices

    def _best_drawn(self, column: int, indices: Sequence[float], slot: Slot, fits: Fits) -> tuple[int | None, float]:
        """Of the trials in the pool that fit, find the one with the greatest index. Return its place and the index's
        logarithm.

        If no trial fits, return None and -inf.
        """
        trials, rows = self._pool.trials, self._pool.rows
        predicted = self._pool.costs()
        # The advantage of a subspace is part of its index.
        departures = predicted.log_seconds - (0.0 if self._pool.is_whole else self._typical[rows])
        costs = departures + self._prices[rows]
        advantage = costs.min(axis=1) - costs[:, column]
        worth = advantage + np.array(indices)[rows]
        if slot.excess is not None:
            worth = worth - slot.excess(trials)
        self._costs, worth = costs, worth.round(DIGITS)
        waits = self._pool.waits()
        overdue = (waits >= 2.0) | ((waits >= 1.0) & (advantage == 0.0))
        if slot.seconds_left < math.inf:
            seconds = predicted.log_seconds - predicted.log_widths
            chances = scipy.special.log_ndtr((math.log(max(slot.seconds_left, LEAST_SECONDS)) - seconds) / SPREAD)
            worth = (worth + self._within_subspaces(chances[:, column])).round(DIGITS)
            overdue &= chances[:, column] >= LATE
            self._pool.set_aside(chances.max(axis=1) < LATE)
        else:
            self._pool.set_aside(None)
        # Of several overdue trials, the oldest is the first.
        worth[overdue] = math.inf
        # Usually the first trial fits.
        for _ in trials:
            place = int(worth.argmax())
            if fits(trials[place], slot.compute_class):
                return place, float(worth[place])
            worth[place] = -np.inf
        return None, -math.inf

    def _within_subspaces(self, logs: Array) -> Array:
        """Return the logs of the pool's trials minus the greatest log in their subspace, so that the shares do not
        change.
        """
        greatest = np.full(len(self._model.row_of), -np.inf)
        np.maximum.at(greatest, self._pool.rows, logs)
        return logs if self._pool.is_whole else np.asarray(logs - greatest[self._pool.rows])

    def _move_prices(self, drawn: int, column: int) -> None:
        """Raise the price of the class on which a trial is cheapest, and lower the price of the class that takes it.

        A step is in proportion to the differences between the trials, so prices do not change if params have no effect.
        A trial of n slots counts as n trials of one slot, which take as many slot seconds.
        """
        costs = self._costs[drawn]
        cheapest = int(costs.argmin())
        if cheapest == column:
            return
        row = int(self._pool.rows[drawn])
        step = STEP * self._spread(row) * self._pool.trials[drawn].slots
        prices = self._prices[row]
        prices[cheapest] += step
        prices[column] -= step * min(float(np.exp(costs[column] - costs[cheapest])), MOST_STEPS)
        prices -= prices.mean()

    def _spread(self, row: int) -> float:
        """Return the standard deviation of the comparative costs of the pool's trials with this row."""
        if self._spreads_version != self._pool.version:
            self._spreads_version = self._pool.version
            self._spreads.clear()
        if row not in self._spreads:
            mine = self._costs[self._pool.rows == row]
            spread = float((mine - mine.mean(axis=1, keepdims=True)).std(axis=0).mean())
            if len(mine) == 1:
                return spread
            self._spreads[row] = spread
        return self._spreads[row]


class FifoPolicy(Policy):
    """Chooses for every slot the next promotion, or else the next subspace by the shares: first come, first served."""

    def pick(self, slot: Slot, offers: Offers, fits: Fits) -> Choice | None:
        if offers.promotions:
            return Choice(offers.promotions[0])
        return Choice(self._next(slot, offers.open)) if offers.open else None

    def _next(self, slot: Slot, names: Sequence[str]) -> str:
        """Return the subspace of the open `names` in which to draw a trial for a slot."""
        return names[0]


def make_policy(
    name: str,
    subspaces: Sequence[Subspace],
    cost_model: CostModel,
    generator: np.random.Generator,
    *,
    pool_size: int | None = None,
    spans_space: bool = False,
    is_adaptive: bool = False,
) -> Policy:
    """Return the policy called `name`. Raises UsageError for an unknown name.

    The keyword arguments are for policy `cost`. `pool_size` is the maximum number of trials drawn ahead, None for the
    default. `spans_space` is True if one sampler draws in the whole space, `is_adaptive` if a sampler learns from
    losses.
    """
    check_name("policy", name, POLICIES)
    if name != "cost":
        parts = (subspaces, generator) if name == "paper" else ()
        policy: Policy = named(POLICIES[name])(*parts)
        return policy
    shares = {WHOLE: 1.0} if spans_space else {subspace.name: subspace.probability for subspace in subspaces}
    return CostPolicy(cost_model, Pool(cost_model, shares, size=pool_size, is_adaptive=is_adaptive))
