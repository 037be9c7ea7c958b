"""Which params will do, judged by those that did and those that did not: a trial that fails, a memory too small.

A Gaussian process classifier at its mode: the log odds are a sum of functions of one label and of pairs of labels, so
that one bad option among ten labels is found as fast as one of three, and a limit on a product of two is found too.
Sources: Rasmussen, Williams, "Gaussian Processes for Machine Learning", 2006, algorithms 3.1 and 3.2; Duvenaud,
Nickisch, Rasmussen, "Additive Gaussian Processes", NeurIPS 2011.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import cho_factor, cho_solve
from scipy.special import expit, logit

from shadho_celery.core.trial import Params
from shadho_celery.predictors.features import features
from shadho_celery.space.domains import Domain

Array = NDArray[np.float64]

#: variances of the log odds: of their level, of the sum of one label's functions, of the sum of the pairs'
LEVEL, SINGLE, PAIR = 4.0, 100.0, 50.0
#: how far a numeric label's function reaches, in units of its range; and how much of it is a straight line
LENGTH, STRAIGHT = 0.2, 0.5
#: Newton steps at most, and the step below which the mode is reached
STEPS, SMALL_STEP = 30, 1e-3
#: trials that are remembered, with those that have come since the last fit: a fit then takes a millisecond or two, and
#: no linear algebra library puts its threads to work on it
MEMORY, MOST = 50, 60
#: a trial that pulls less than this at the log odds, of 1, says what is known without it
LITTLE_PULL = 0.05
#: a fit is made anew for each trial with the outcome, and once those without it have grown by this share
GROWTH = 0.1
#: the chance that a trial does not fit a class's memory, before anything is known but that some did not
TOO_LARGE = 0.1
#: latest trials that a new compute class is judged by
LOG = 200


class Features:
    """Rows of numbers for the params of one subspace: places in the range, option indexes, NaN where inactive."""

    def __init__(self, domains: Mapping[str, Domain]) -> None:
        self._domains = domains
        self.is_numeric = np.array([domain.is_numeric for domain in domains.values()], dtype=bool)

    def rows(self, params_list: Sequence[Params]) -> Array:
        """Return the params of n trials, shape (n, labels)."""
        return features(params_list, self._domains, inactive=math.nan)


class Classifier:
    """The chance of an outcome by the params, of which it is known that before any trial it is `prior`."""

    def __init__(self, is_numeric: NDArray[np.bool_], prior: float) -> None:
        self._is_numeric = is_numeric
        self._level = float(logit(prior))
        self._rows = np.empty((0, len(is_numeric)))
        self._pulls = np.empty(0)

    def fit(self, rows: Array, outcomes: NDArray[np.bool_]) -> Array:
        """Learn from n trials, shapes (n, labels) and (n,), and from nothing before.

        Returns each trial's pull at the log odds, from -1 to 1: the less, the better it was expected.
        """
        kernel, values = self._kernel(rows, rows), outcomes.astype(float)
        odds = pulls = np.zeros(len(rows))
        for _ in range(STEPS):
            chances = expit(self._level + odds)
            roots = np.sqrt(chances * (1.0 - chances))
            target = roots**2 * odds + values - chances
            factor = cho_factor(np.eye(len(rows)) + roots[:, None] * kernel * roots, lower=True)
            pulls = target - roots * cho_solve(factor, roots * (kernel @ target))
            step = kernel @ pulls - odds
            odds = odds + step
            if np.abs(step).max(initial=0.0) < SMALL_STEP:
                break
        self._rows, self._pulls = rows, pulls
        return pulls

    def chances(self, rows: Array) -> Array:
        """The chance of the outcome for n sets of params, shape (n,)."""
        chances: Array = expit(self._level + self._kernel(rows, self._rows) @ self._pulls)
        return chances

    def _kernel(self, left: Array, right: Array) -> Array:
        """Covariances of the log odds, shape (left, right): level, sum over labels, sum over pairs of labels."""
        single = np.zeros((len(left), len(right)))
        squares = np.zeros_like(single)
        labels = len(self._is_numeric)
        for place in range(labels):
            alike = self._alike(left[:, place, None], right[:, place], place)
            single += alike
            squares += alike**2
        pairs = (single**2 - squares) / 2.0  # Newton's identity: each product of two, once
        covariances: Array = LEVEL + SINGLE / max(labels, 1) * single + PAIR / max(math.comb(labels, 2), 1) * pairs
        return covariances

    def _alike(self, left: Array, right: Array, place: int) -> Array:
        """How alike two trials are in one label: 1 for the same option, and where the label is inactive in both."""
        if self._is_numeric[place]:
            curved = np.exp(-0.5 * ((left - right) / LENGTH) ** 2)
            alike = (1.0 - STRAIGHT) * curved + STRAIGHT * 4.0 * (left - 0.5) * (right - 0.5)
        else:
            alike = (left == right).astype(float)
        inactive = np.isnan(left), np.isnan(right)
        if inactive[0].any() or inactive[1].any():
            alike = np.where(inactive[0] | inactive[1], inactive[0] & inactive[1], alike)
        return alike


class FailureModel:
    """The trials of one subspace that had an outcome, a failure say, and those that had not; fitted when asked."""

    def __init__(self, is_numeric: NDArray[np.bool_], prior: float) -> None:
        self._classifier = Classifier(is_numeric, prior)
        self._rows: list[Array] = []
        self._outcomes: list[bool] = []
        #: whether any trial has had the outcome
        self.any = False
        self._new = 0
        self._due = False

    def tell(self, row: Array, outcome: bool) -> None:
        """A trial has ended."""
        self._rows.append(row)
        self._outcomes.append(outcome)
        self.any |= outcome
        self._new += 1
        self._due |= outcome or self._new > GROWTH * len(self._rows)
        if len(self._rows) > MOST:
            self._fit() if self.any else self._forget(np.ones(len(self._rows)))

    def chances(self, rows: Array) -> Array:
        """The chance of the outcome for n sets of params, shape (n,); 0 where there was none yet."""
        if not self.any:
            return np.zeros(len(rows))
        if self._due:
            self._fit()
        return self._classifier.chances(rows)

    def _fit(self) -> None:
        pulls = self._classifier.fit(np.array(self._rows), np.array(self._outcomes))
        self._new, self._due = 0, False
        self._forget(np.abs(pulls))

    def _forget(self, pulls: Array) -> None:
        """Drop what pulls least, or where everything pulls what is oldest: with it went the share of the outcome."""
        kept = list(range(len(pulls)))
        while len(kept) > MEMORY:
            least = min(range(len(kept)), key=lambda place: pulls[kept[place]])
            kept.pop(least if pulls[kept[least]] < LITTLE_PULL else 0)
        self._rows = [self._rows[place] for place in kept]
        self._outcomes = [self._outcomes[place] for place in kept]


class MemoryBound:
    """Which params of one subspace run out of memory on which compute class; no byte needs to be known.

    What is too large for a class is so for every smaller one, and what fits it fits every larger one.
    """

    def __init__(self, domains: Mapping[str, Domain]) -> None:
        self._features = Features(domains)
        #: of the latest trials: params, class, whether it ran out of memory there
        self._log: deque[tuple[Params, str, bool]] = deque(maxlen=LOG)
        self._told = 0
        #: whether any trial has run out of memory
        self._any = False
        #: by a class's smaller and greater ones: what is known of it, and how many trials it knows of
        self._known: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[FailureModel, int]] = {}

    def tell(self, params: Params, compute_class: str, *, fits: bool) -> None:
        """A trial of these params fitted the memory of a class, or ran out of it."""
        self._log.append((params, compute_class, not fits))
        self._told += 1
        self._any |= not fits

    def chance(self, params: Params, compute_class: str, classes_by_memory: Sequence[str]) -> float:
        """The chance that params run out of memory on a class; 0 as long as nothing has that tells of it."""
        if not self._any:
            return 0.0
        outcomes = self._outcomes(compute_class, classes_by_memory)
        return float(outcomes.chances(self._features.rows([params]))[0]) if outcomes.any else 0.0

    def _outcomes(self, compute_class: str, classes_by_memory: Sequence[str]) -> FailureModel:
        """What is known of a class, all that is new in the log told."""
        order = tuple(classes_by_memory) if compute_class in classes_by_memory else (compute_class,)
        place = order.index(compute_class)
        upwards, downwards = order[place:], order[: place + 1]
        outcomes, read = self._known.get((downwards, upwards)) or (
            FailureModel(self._features.is_numeric, TOO_LARGE),
            0,
        )
        new = min(self._told - read, len(self._log))
        for params, name, too_large in islice(self._log, len(self._log) - new, None):
            if name in (upwards if too_large else downwards):
                outcomes.tell(self._features.rows([params])[0], too_large)
        self._known[downwards, upwards] = outcomes, self._told
        return outcomes
