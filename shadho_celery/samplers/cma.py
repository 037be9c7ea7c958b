"""CMA-ES: a Gaussian over all numbers of a subspace, which adapts its mean and shape to the better trials.

Sources: Hansen, "The CMA Evolution Strategy: A Tutorial", arXiv 1604.00772, as implemented in the package cmaes; [I]
Hansen, "Injecting External Solutions Into CMA-ES", arXiv 1110.4181; [R] Auger, Hansen, "A Restart CMA Evolution
Strategy With Increasing Population Size", CEC 2005. The idea of the margin is from Hamano, Saito, Nomura, Shirakawa,
"CMA-ES with Margin", GECCO 2022; here it is a minimum width.

Finished trials form generations in the order in which they are told, whichever sampler proposed them. A trial that the
present Gaussian has not drawn, such as a known point or a long trial, is moved to where it could have been drawn ([I]).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from cmaes import CMA
from scipy.special import ndtr, ndtri

from shadho_celery.core.columns import feasible_loss
from shadho_celery.core.trial import Params, Trial
from shadho_celery.samplers.random import Learner
from shadho_celery.space.domains import cell
from shadho_celery.space.features import Array
from shadho_celery.space.split import Subspace

#: initial width of the Gaussian, and width below which it has converged, as fractions of the labels' ranges
FIRST_WIDTH, LAST_WIDTH = 0.25, 1e-7
#: minimum width for a rounded number, as a fraction of the distance between two values, so that neighbouring values are
#: drawn, too
MARGIN = 0.25
#: probability that an option is drawn from its distribution. Otherwise it is that of one of the better trials of the
#: last generation
BY_LAW = 0.2
#: maximum number of draws to find params that differ from all trials so far
TRIES = 10
#: maximum number of draws to find a point within the ranges
DRAWS = 10
#: maximum number of draws from the Gaussian until the space's `where` allows one
REFUSED = 100
#: larger losses are replaced by this, so that differences of losses are finite
LARGEST = 1e300


class CmaSampler(Learner):
    """CMA-ES within one subspace. If the subspace has no numbers, params are drawn from its distribution."""

    def __init__(self, subspace: Subspace, entropy: Sequence[int]) -> None:
        super().__init__(subspace, entropy)
        #: time of the latest restart; trials that were proposed before it are ignored
        self._since = -math.inf
        self._numbers = {label: domain for label, domain in subspace.domains.items() if domain.is_numeric}
        self._options = {label: domain for label, domain in subspace.domains.items() if not domain.is_numeric}
        if self._numbers:
            self._evolution = _Evolution(np.full(len(self._numbers), 0.5), FIRST_WIDTH)
            self._least = self._least_widths()
        #: the current generation, with the loss of each trial; and the better half of the last generation
        self._generation: list[tuple[float, Params]] = []
        self._better: list[Params] = []

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        taken = {self._subspace.key(trial.params) for trial in pending}
        asked: list[Params] = []
        for place in self._places(n, pending):
            generator = self._generator(place)
            for _ in range(TRIES):
                params = self._draw(generator)
                if self._is_new(params, taken):
                    break
            asked.append(params)
            taken.add(self._subspace.key(params))
        return asked

    def _learn(self, trial: Trial) -> None:
        if not self._numbers or (trial.asked_at is not None and trial.asked_at < self._since):
            return
        self._generation.append((feasible_loss(trial), trial.params))
        if len(self._generation) == self._evolution.population_size:
            self._evolve(trial)

    def _evolve(self, last: Trial) -> None:
        """Update the Gaussian from a complete generation.

        If it has converged or all trials failed, start again with a Gaussian at another point.
        """
        ranked = sorted(self._generation, key=lambda each: each[0])
        losses = np.array([loss for loss, _ in ranked])
        self._better = [params for _, params in ranked[: len(ranked) // 2]]
        self._generation.clear()
        generator = np.random.default_rng([*self._entropy, self._told, 1])
        has_failed = bool(np.isposinf(losses).all())
        if not has_failed:
            cells = np.array([self._cells(params) for _, params in ranked])
            self._evolution.learn(cells, np.clip(losses, -LARGEST, LARGEST), generator)
        if has_failed or self._evolution.has_converged:
            self._since = -math.inf if last.finished_at is None else last.finished_at
            self._better.clear()
            population = self._evolution.population_size * (1 if has_failed else 2)  # [R]
            self._evolution = _Evolution(generator.random(len(self._numbers)), FIRST_WIDTH, population_size=population)
        self._least = self._least_widths()

    def _least_widths(self) -> Array:
        """Return the minimum width for each number: MARGIN times the step of its grid at the mean; 0 for a number
        without a grid.
        """
        means = zip(self._numbers.values(), self._evolution.mean, strict=True)
        cells = [cell(domain, domain.from_unit([mean]).tolist()[0]) for domain, mean in means]
        return MARGIN * np.diff(cells)[:, 0]

    def _draw(self, generator: np.random.Generator) -> Params:
        """Draw params that the space's `where` allows: from the Gaussian, but after REFUSED draws from the prior."""
        draws = (self._of_gaussian(generator) for _ in range(REFUSED if self._numbers else 0))
        return self._subspace.first_allowed(draws, generator)

    def _of_gaussian(self, generator: np.random.Generator) -> Params:
        params = {**self._subspace.fixed}
        units = self._evolution.draw(generator, self._least)
        for label, domain, unit in zip(self._numbers, self._numbers.values(), units, strict=True):
            params[label] = domain.from_unit([unit]).tolist()[0]
        like: Params = self._better[int(generator.integers(len(self._better)))] if self._better else {}
        for label, domain in self._options.items():
            by_law = domain.sample(generator, 1).tolist()[0]
            params[label] = by_law if generator.random() < BY_LAW else like.get(label, by_law)
        return {label: params[label] for label in self._subspace.space.active(params)}

    def _cells(self, params: Params) -> list[tuple[float, float]]:
        """Return the interval of each number that is rounded to its value, in units of its range; for an inactive
        label, the whole range.
        """
        return [
            cell(domain, params[label]) if label in params else (0.0, 1.0) for label, domain in self._numbers.items()
        ]


class _Evolution(CMA):  # type: ignore[misc]  # cmaes has no types
    """The Gaussian of the package cmaes.

    It can also learn from points that it did not draw, and from rounded points.
    """

    def draw(self, generator: np.random.Generator, least: Array) -> Array:
        """Return a draw in [0, 1]^n. `least` has the minimum width of each coordinate."""
        axes, lengths = self._eigen_decomposition()
        wider = np.maximum(least / self.widths, 1.0)
        point = np.empty(0)
        for _ in range(DRAWS):
            point = self.mean + wider * self._sigma * (axes @ (lengths * generator.normal(size=self.dim)))
            if ((point >= 0.0) & (point <= 1.0)).all():
                break
        return np.asarray(point.clip(0.0, 1.0))

    def learn(self, cells: Array, losses: Array, generator: np.random.Generator) -> None:
        """Learn from points, the best first.

        `cells`, shape (points, n, 2), has the interval of each coordinate that is rounded to its value. Within the
        intervals, a point is placed where this Gaussian could have drawn it.
        """
        with np.errstate(all="ignore"):
            ends = (cells - self.mean[:, None]) / self.widths[:, None]
            low, high = ndtr(ends[..., 0]), ndtr(ends[..., 1])
            inside = ndtri(low + generator.random(low.shape) * (high - low)).clip(ends[..., 0], ends[..., 1])
            steps = np.where(cells[..., 0] < cells[..., 1], inside.clip(-3.0, 3.0), ends[..., 0]) * self.widths
            axes, lengths = self._eigen_decomposition()
            # [I], equation 2: no step is longer than the Gaussian's own steps.
            far = np.linalg.norm(steps @ axes / lengths, axis=1) / self._sigma
            most = math.sqrt(self.dim) + 2 * self.dim / (self.dim + 2)
            points = self.mean + steps * np.minimum(1.0, most / np.maximum(far, most))[:, None]
            self.tell([*zip(points, losses.tolist(), strict=True)])

    @property
    def widths(self) -> Array:
        """Standard deviation of each coordinate."""
        return np.asarray(self._sigma * np.sqrt(np.diag(self._C)))

    @property
    def has_converged(self) -> bool:
        """True if the Gaussian is too narrow to continue, or has numerical problems."""
        if not (np.isfinite(self.mean).all() and np.isfinite(self.widths).all()):
            return True
        with np.errstate(all="ignore"):
            return bool(self.widths.max() < LAST_WIDTH) or self.should_stop()
