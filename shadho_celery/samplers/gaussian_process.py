"""Gaussian process regression: an estimate of the loss, or of a constraint, as a function of the params.

The kernel is Matérn 5/2 with one length scale per label (automatic relevance determination), plus noise. Length scales
and variances are set to their most likely values under priors. The prior of the length scales grows with the root of
the number of labels, as in Hvarfner, Hellsten, Nardi, "Vanilla Bayesian Optimization Performs Great in High
Dimensions", ICML 2024, section 4. Everything else follows Rasmussen, Williams, "Gaussian Processes for Machine
Learning", 2006, algorithm 2.1 and equation 5.9.

A label that is inactive in a trial gets the middle of its range. Lévesque, Durand, Gagné, Sabourin, "Bayesian
Optimization for Conditional Hyperparameter Spaces", IJCNN 2017, compare this and other treatments. The length scale of
a choice says how much its branches differ. The distances are Euclidean, as in the arc kernel of Hutter, Osborne, "A
Kernel for Hierarchical Parameter Spaces", arXiv 1310.5738, so the kernel is positive definite. If inactive labels were
left out of the distance, it would not be positive definite.

`ConstraintModel` has one process for each constraint, from which it computes the probability that params are feasible.
Source: Gardner, Kusner, Xu, Weinberger, Cunningham, "Bayesian Optimization with Inequality Constraints", ICML 2014: the
expected improvement is multiplied by this probability (equation 6), which is a product over constraints.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy
from numpy.typing import NDArray

from shadho_celery.space.features import INACTIVE, Array

#: mean and standard deviation of the priors of the logarithms of length scale, variance and noise variance. Half the
#: logarithm of the number of labels is added to the first mean
LENGTH, VARIANCE, NOISE = (math.sqrt(2.0) - 3.0, math.sqrt(3.0)), (0.0, 1.0), (-4.0, 3.0)
#: bounds of these logarithms
LENGTHS, VARIANCES, NOISES = (-4.0, 7.0), (-4.0, 4.0), (-14.0, 1.0)
#: maximum number of steps of a fit
STEPS = 60
#: added to the diagonal, so that the matrix stays positive definite despite rounding errors
JITTER = 1e-8
ROOT_5 = math.sqrt(5.0)


class Rungs(NamedTuple):
    """Rungs of n known trials in a study with budgets, whose values are predictions of those at the top.

    The error of a prediction is a function of the params, too, with the same length scales. Two trials share the error
    of the higher of their rungs. So many trials on a low rung do not make up for one at the top. Source: a sum of
    processes of rising fidelity, as in Kennedy, O'Hagan, "Predicting the output from a complex computer code when fast
    approximations are available", Biometrika 87, 2000.
    """

    #: index of the rung of each trial, shape (n,)
    known: NDArray[np.intp]
    #: variance of the error of each rung, the lowest first; 0 for the top
    errors: Array
    #: rung whose result a proposal would get. The deviation of a prediction is that of this result, so a point whose
    #: result is known has none, although its value at the top is not known
    next: int = 0


class GaussianProcess:
    """Gaussian process over rows of features. Standardise the values, because they are not scaled here."""

    def __init__(self, is_numeric: Sequence[bool], apart: Collection[int] = (), active: int | None = None) -> None:
        """`is_numeric` is False for a label with options, which have no order: two of them are either equal or not.

        Trials that differ in a label at one of the places `apart` are independent. `active` is the number of labels
        that a trial has, by default all.
        """
        self._apart = sorted(apart)
        self._is_numeric = list(is_numeric)
        labels = len(self._is_numeric)
        self._has_options = not all(self._is_numeric)
        self._middles = np.where(self._is_numeric, INACTIVE, -1.0)
        self._length_mean = LENGTH[0] + 0.5 * math.log(max(labels if active is None else active, 1))
        #: rows of the known trials, with NaN for inactive labels; and the same rows after `_placed`
        self.rows = self._known = np.empty((0, labels))
        self.values = np.empty(0)
        #: logarithms from which each fit starts: long length scales, and a noise variance of 0.1
        self._start = np.array([self._length_mean + 1.0] * labels + [0.0, -2.3])
        self._start[self._apart] = LENGTHS[0]
        self._estimate(self._start)

    def fit(self, rows: Array, values: Array, rungs: Rungs | None = None) -> None:
        """Estimate length scales and variances from n trials, shapes (n, labels) and (n,).

        The cost may have two minima: short length scales without noise, and long ones with noise. So each fit starts
        from the latter and from the last estimates, and the better result is used.
        """
        from scipy.optimize import minimize  # slow to import, and not every search needs it

        errors = 0.0 if rungs is None else rungs.errors[np.maximum.outer(rungs.known, rungs.known)]
        rows = self._placed(rows)
        squares = np.array([self._squares(rows, rows, place) for place in range(rows.shape[1])])
        bounds = [LENGTHS] * rows.shape[1] + [VARIANCES, NOISES]
        for place in self._apart:
            bounds[place] = (LENGTHS[0], LENGTHS[0])
        rest: dict[str, Any] = {"jac": True, "method": "L-BFGS-B", "bounds": bounds, "options": {"maxiter": STEPS}}
        found = [minimize(self._cost, start, (squares, values, errors), **rest) for start in (self._start, self._logs)]
        self._estimate(min(found, key=lambda each: each.fun).x)

    def learn(self, rows: Array, values: Array, rungs: Rungs | None = None) -> None:
        """Learn the function from n trials, shapes (n, labels) and (n,), and forget earlier ones."""
        self.rows, self.values = rows, values
        self._rungs = rungs or Rungs(np.zeros(len(rows), np.intp), np.zeros(1))
        self._condition()

    def suppose(self, rows: Array) -> None:
        """Treat the predicted values at the rows of trials without a result as observed (kriging believer)."""
        values = (self._likeness(self._placed(rows)) * self._scales) @ self._weights
        self.rows, self.values = np.concatenate([self.rows, rows]), np.concatenate([self.values, values])
        known = np.concatenate([self._rungs.known, np.full(len(rows), self._rungs.next)])
        self._rungs = self._rungs._replace(known=known)
        self._condition()

    @property
    def r_squared(self) -> float:
        """Leave-one-out R² of the predictions; Rasmussen, Williams, equation 5.12."""
        errors = self._weights / self._inverse.diagonal()
        total = float(np.square(self.values - self.values.mean()).sum())
        return 1.0 - float(np.square(errors).sum()) / total if total > 0 else 0.0

    def predict(self, rows: Array) -> tuple[Array, Array]:
        """Return the mean and the standard deviation of the function at n rows, each of shape (n,).

        In a study with budgets, they are the mean at the top, and the deviation of the next result.
        """
        likeness = self._likeness(self._placed(rows))
        kernel = likeness * self._scales
        explained = kernel @ self._inverse
        variance = self._prior_variance - (explained * kernel).sum(axis=1)
        return (self._variance * likeness) @ self._weights, np.sqrt(np.maximum(variance, 1e-12))

    def slopes(self, row: Array) -> tuple[float, float, Array, Array]:
        """Return the mean and the standard deviation at one row, and their derivatives by features, shapes (labels,).

        The derivatives by labels with options are 0.
        """
        differences = self._placed(row[None]) - self._known
        # These are the sums of `_kernel`, for all labels at once, because a local maximisation calls this hundreds
        # of times.
        squares = np.square(differences.T, order="C")
        if self._has_options:
            options = np.logical_not(self._is_numeric)
            squares[options] = differences.T[options] != 0.0
            differences[:, options] = 0.0
        squares *= self._by_length[:, None]
        scaled = ROOT_5 * np.sqrt(np.add.reduce(squares, axis=0))
        # The functions `_matern` and `_steepness`, with the exponential computed only once.
        decay, linear = np.exp(-scaled), 1.0 + scaled
        likeness = (linear + scaled**2 / 3.0) * decay
        kernel = self._scales * likeness
        steep = 5.0 / 3.0 * linear * decay
        explained = self._inverse @ kernel
        deviation = math.sqrt(max(self._prior_variance - float(explained @ kernel), 1e-12))
        steps = -differences / self._squared_lengths
        by_mean = (self._weights * (steep * self._variance)) @ steps
        by_deviation = -((explained * (steep * self._scales)) @ steps) / deviation
        return float((self._variance * likeness) @ self._weights), deviation, by_mean, by_deviation

    def _estimate(self, logs: Array) -> None:
        """Set the logarithms of the length scales, of the variance and of the noise variance."""
        self._logs = logs
        self._squared_lengths = np.exp(logs[:-2]) ** 2
        self._by_length, self._variance = np.exp(-2.0 * logs[:-2]), math.exp(logs[-2])

    def _cost(self, logs: Array, squares: Array, values: Array, errors: Array | float = 0.0) -> tuple[float, Array]:
        """Return the negative logarithm of the likelihood times the prior, and its gradient.

        `errors` are the variances of the errors that two trials share, see `Rungs`.
        """
        weights, variance, noise = np.exp(-2.0 * logs[:-2]), math.exp(logs[-2]), math.exp(logs[-1])
        distances = np.sqrt(np.tensordot(weights, squares, axes=1))
        likeness = _matern(distances)
        kernel = (variance + errors) * likeness
        try:
            factor, inverse = _inverted(kernel, noise + JITTER)
        except scipy.linalg.LinAlgError:
            return 1e12, np.zeros_like(logs)
        pulls = inverse @ values
        # Rasmussen, Williams, equation 5.9: the gradient is half the trace of this matrix times the kernel's
        # derivative.
        pull = np.outer(pulls, pulls) - inverse
        by_squares = (variance + errors) * _steepness(distances) * pull
        gradient = np.empty_like(logs)
        gradient[:-2] = -0.5 * np.tensordot(squares, by_squares, axes=2) * weights
        gradient[-2] = -0.5 * float((pull * (variance * likeness)).sum())
        gradient[-1] = -0.5 * float(np.trace(pull)) * noise
        means = np.array([self._length_mean] * len(weights) + [VARIANCE[0], NOISE[0]])
        spreads = np.array([LENGTH[1]] * len(weights) + [VARIANCE[1], NOISE[1]])
        off = (logs - means) / spreads
        cost = 0.5 * float(values @ pulls) + float(np.log(factor.diagonal()).sum()) + 0.5 * float(off @ off)
        return cost, gradient + off / spreads

    def _condition(self) -> None:
        self._known = self._placed(self.rows)
        known, errors, next_rung = self._rungs
        kernel = self._likeness(self._known) * (self._variance + errors[np.maximum.outer(known, known)])
        #: variance of the next result, and its covariance with the result of each known trial at the same point
        self._prior_variance = self._variance + float(errors[next_rung])
        self._scales = self._variance + errors[np.maximum(known, next_rung)]
        noise = math.exp(self._logs[-1]) + JITTER
        while True:
            try:
                _, self._inverse = _inverted(kernel, noise)
                break
            except scipy.linalg.LinAlgError:
                noise *= 10.0
        self._weights = self._inverse @ self.values

    def _likeness(self, rows: Array) -> Array:
        """Return the correlations of the function at these rows with those at the known rows, shape (rows, known)."""
        squares = np.zeros((len(rows), len(self._known)))
        for place, by_length in enumerate(self._by_length):
            squares += by_length * self._squares(rows, self._known, place)
        return _matern(np.sqrt(squares))

    def _squares(self, left: Array, right: Array, place: int) -> Array:
        """Return squared distances in one label: 1 for two different options."""
        one, two = left[:, place, None], right[None, :, place]
        return np.asarray(np.square(one - two) if self._is_numeric[place] else (one != two).astype(float))

    def _placed(self, rows: Array) -> Array:
        """Return rows in which each inactive label has a value: the middle of its range, or an option that means
        inactive.
        """
        missing = np.isnan(rows)
        return np.where(missing, self._middles, rows) if missing.any() else rows


class ConstraintModel:
    """Predicts the probability that params are feasible, by a process for each constraint.

    It is 1 without constraints.
    """

    def __init__(self, is_numeric: Sequence[bool], active: int | None = None) -> None:
        self._is_numeric, self._active = is_numeric, active
        #: by name of a constraint: its process, and the greatest scaled value of a feasible trial
        self._processes: dict[str, tuple[GaussianProcess, float]] = {}

    @property
    def any(self) -> bool:
        """True once a constraint is known from a trial."""
        return bool(self._processes)

    def learn(self, rows: Array, told: Sequence[Mapping[str, float]], *, fit: bool) -> None:
        """Learn from n trials, and forget earlier ones. `rows` are features, shape (n, labels); `told` are constraints.

        If `fit`, also estimate the length scales and variances.
        """
        for name in dict.fromkeys(name for constraints in told for name in constraints):
            known = np.array([name in constraints for constraints in told])
            values, limit = scaled(np.array([constraints[name] for constraints in told if name in constraints]))
            process, _ = self._processes.get(name) or (GaussianProcess(self._is_numeric, active=self._active), limit)
            self._processes[name] = process, limit
            if fit:
                process.fit(rows[known], values)
            process.learn(rows[known], values)

    def log_chances(self, rows: Array) -> Array:
        """Return the log probability that n rows of features are feasible, shape (n,)."""
        total = np.zeros(len(rows))
        for process, limit in self._processes.values():
            means, deviations = process.predict(rows)
            total += scipy.special.log_ndtr((limit - means) / deviations)
        return total

    def slopes(self, row: Array) -> tuple[float, Array]:
        """Return the log probability that one row is feasible, and its derivatives by the features, shape (labels,)."""
        total, gradient = 0.0, np.zeros(len(row))
        for process, limit in self._processes.values():
            mean, deviation, by_mean, by_deviation = process.slopes(row)
            z = (limit - mean) / deviation
            level = float(scipy.special.log_ndtr(z))
            total += level
            # The derivative of log Phi(z) is phi(z) / Phi(z).
            steep = math.exp(min(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - level, 700.0))
            gradient -= steep * (by_mean + z * by_deviation) / deviation
        return total, gradient


def scaled(values: Array) -> tuple[Array, float]:
    """Return the values of a constraint scaled to mean 0 and variance 1, and the scaled value of its limit, 0.

    The scale is compressed for large values, because it matters little how much a constraint is violated.
    """
    unit = float(np.median(np.abs(values))) or float(np.abs(values).max(initial=0.0)) or 1.0
    bent = np.arcsinh(values / unit)
    mean, spread = float(bent.mean()), float(bent.std()) or 1.0
    return np.asarray((bent - mean) / spread), -mean / spread


def _inverted(kernel: Array, noise: float) -> tuple[Array, Array]:
    """Return the Cholesky factor and the inverse of a kernel matrix with this noise on its diagonal.

    Raises LinAlgError if it is not positive definite.
    """
    unit = np.eye(len(kernel))
    factor = scipy.linalg.cholesky(kernel + noise * unit, lower=True, check_finite=False)
    half = scipy.linalg.solve_triangular(factor, unit, lower=True, check_finite=False)
    return factor, half.T @ half


def _matern(distances: Array) -> Array:
    """Return Matérn 5/2: Rasmussen, Williams, equation 4.17."""
    scaled = ROOT_5 * distances
    return np.asarray((1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled))


def _steepness(distances: Array) -> Array:
    """Return minus the derivative of Matérn 5/2 by the distance, divided by the distance."""
    scaled = ROOT_5 * distances
    return np.asarray(5.0 / 3.0 * (1.0 + scaled) * np.exp(-scaled))
