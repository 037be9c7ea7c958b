"""Effects of params on the seconds of a subspace's trials, which differ between compute classes.

Log seconds = centre of the class + f(params) + g_c(params) + noise. f is common to all classes, and g_c belongs to
class c. If all g_c are constant, the classes differ only in speed. f and g_c are Gaussian processes with the kernel
`likeness`, written as linear models in a few basis functions. The variances of f, of g_c and of the noise are estimated
from the trials (empirical Bayes), so params without effect have almost no weight. Sources: Williams, Seeger, "Using the
Nyström Method to Speed Up Kernel Machines", NeurIPS 2001; Bishop, "Pattern Recognition and Machine Learning", 2006,
sections 3.3 and 9.3.4.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import scipy
from numpy.typing import NDArray

from shadho_celery.core.system import one_blas_thread
from shadho_celery.core.trial import Params
from shadho_celery.space.features import Array, features, likeness
from shadho_celery.space.split import Subspace

#: number of draws from the subspace from which the basis functions are made; fraction of the kernel's variance that the
#: basis functions cover; and maximum number of basis functions
DRAWS, MASS, MOST = 200, 0.995, 100
#: weight of the part of the kernel that compares pairs of labels; the part for single labels has the rest of the weight
PAIRS = 0.3
#: prior variances of f, of g_c and of the noise; and the number of basis functions or trials that each prior is worth
SHARED, OWN, NOISE, BELIEF = 0.5, 0.1, 0.25, 4.0
#: prior variances of the constant in f, and of the constant in g_c
LEVEL, OWN_LEVEL = 100.0, 0.5
#: a trial that is more than this many standard deviations from its prediction is moved to this distance, because of
#: stragglers
FAR_OUT = 4.0
#: number of trials before FAR_OUT is applied
MIN_TRIALS = 30
#: a running trial is left out while its value so far is more than 4 standard deviations below its expectation, because
#: it adds almost no information
LEAST_TELLING = -4.0
#: a new fit is made when the number of trials has grown by this fraction; minimum and maximum number of new trials
GROWTH, LEAST_NEW, MOST_NEW = 0.15, 4, 1000
#: the values of basis functions are kept for the latest sets of params of a subspace: at most this number of labels and
#: function values in total
KEPT = 2**17


class Basis:
    """Basis functions of one subspace's params, which approximate the kernel.

    They are computed by a pivoted Cholesky decomposition of the kernel matrix of draws from the subspace.
    """

    def __init__(self, draws: Array, is_numeric: Sequence[bool]) -> None:
        """`draws` are rows of features, shape (n, labels), in which an inactive label is NaN.

        `is_numeric` is False for the labels of options.
        """
        self._is_numeric = is_numeric
        pivots, factor = self._decomposed(draws)
        self._pivots = draws[pivots]
        self._weights = np.linalg.inv(factor[pivots]).T
        #: means of the functions over the draws; they are subtracted, so that the functions are 0 on average
        self._mean = factor.mean(axis=0)

    @property
    def size(self) -> int:
        """Number of basis functions."""
        return len(self._mean)

    def functions(self, rows: Array) -> Array:
        """Return the values of the basis functions at rows of features, shape (n, size)."""
        return np.asarray(self._kernel(rows, self._pivots) @ self._weights - self._mean)

    def _decomposed(self, draws: Array) -> tuple[list[int], Array]:
        """Return the indexes of the pivots among the draws, and the Cholesky factor, shape (draws, pivots).

        The draw with the largest remaining variance is taken next, until nearly all of the kernel's variance is
        covered. Source: Harbrecht, Peters, Schneider, "On the Low-Rank Approximation by the Pivoted Cholesky
        Decomposition", 2012.
        """
        kernel = self._kernel(draws, draws)
        unknown = kernel.diagonal().copy()
        enough = (1.0 - MASS) * float(unknown.sum())
        pivots: list[int] = []
        factor = np.zeros((len(draws), 0))
        while len(pivots) < MOST and float(unknown.sum()) > max(enough, 1e-9):
            place = int(unknown.argmax())
            column = (kernel[:, place] - factor @ factor[place]) / math.sqrt(float(unknown[place]))
            pivots.append(place)
            factor = np.column_stack([factor, column])
            unknown = np.maximum(unknown - column**2, 0.0)
        return pivots, factor

    def _kernel(self, left: Array, right: Array) -> Array:
        single, pairs = likeness(left, right, self._is_numeric)
        return (1.0 - PAIRS) * single + PAIRS * pairs


class Regression:
    """Bayesian linear regression with a part common to all groups and a part for each group. Data are kept as sums."""

    def __init__(self, functions: int) -> None:
        size = functions + 1
        #: by group: the sum over trials of the products of a row with itself; a row has 1, the functions, and the value
        self._told = np.zeros((0, size + 1, size + 1))
        #: the same for trials that are still running
        self._open = self._told
        self._centres = np.zeros(0)
        self._shared, self._own = SHARED, OWN
        #: variance of the values of single trials around their expectation
        self.noise = NOISE
        #: coefficients by group, shape (groups, functions + 1), the constant first
        self._coefficients = np.zeros((0, size))
        #: the common part of the coefficients
        self._common = np.zeros(size)

    def add_groups(self, groups: int) -> None:
        """Add groups until there are this many. For a new group, only the common part is known."""
        more = groups - len(self._centres)
        if more <= 0:
            return
        blank = np.zeros((more, *self._told.shape[1:]))
        self._told, self._open = (np.concatenate([table, blank]) for table in (self._told, self._open))
        self._coefficients = np.concatenate([self._coefficients, np.tile(self._common, (more, 1))])
        self._centres = np.append(self._centres, np.zeros(more))

    def tell(self, functions: Array, groups: NDArray[np.intp], values: Array) -> None:
        """Learn from n trials: values of the basis functions, shape (n, functions); groups and values, shape (n,)."""
        if self._told[:, 0, 0].sum() >= MIN_TRIALS:
            expected = self._expected(functions, groups)
            reach = FAR_OUT * math.sqrt(self.noise + self._own)
            values = expected + (values - expected).clip(-reach, reach)
        self._told += self._summed(functions, groups, values)

    def suppose(self, functions: Array, groups: NDArray[np.intp], values: Array, are_total: NDArray[np.bool_]) -> bool:
        """Replace the values of all running trials. Return whether the next fit will differ.

        The first three arguments are as in `tell`. If `are_total` is True for a trial, its value is extrapolated to the
        whole trial, which counts like an ended trial. Otherwise it is the value so far.

        The value of a running trial is censored: it is at least the value so far, which departs from the expectation m
        by z standard deviations s of the noise. Its likelihood has the gradient h / s and the curvature h (h - z) / s^2
        in m, where h is the hazard of the standard normal distribution at z. An ended trial with the value m + s / (h -
        z) and the weight h (h - z) has the same gradient and curvature. It replaces the running trial in the next fit,
        which is a Newton step. The weight rises from 0 for a trial that has just begun to 1 for a very late trial.
        Source: Tobin, "Estimation of Relationships for Limited Dependent Variables", Econometrica 26, 1958.
        """
        expected, deviation = self._expected(functions, groups), math.sqrt(self.noise)
        z = (values - expected) / deviation
        telling = ~are_total & (z > LEAST_TELLING)
        z = z[telling]
        # The normal density divided by its upper tail. In this form neither of them can underflow.
        hazard = math.sqrt(2.0 / math.pi) / scipy.special.erfcx(z / math.sqrt(2.0))
        beyond = hazard - z
        before, standing_for = self._open, expected[telling] + deviation / beyond
        self._open = self._summed(functions[telling], groups[telling], standing_for, hazard * beyond)
        self._open += self._summed(functions[are_total], groups[are_total], values[are_total])
        return bool(before.any() or self._open.any())

    def _expected(self, functions: Array, groups: NDArray[np.intp]) -> Array:
        constant, rest = self._coefficients[groups, 0], self._coefficients[groups, 1:]
        return np.asarray(self._centres[groups] + constant + (functions * rest).sum(axis=1))

    def _summed(self, functions: Array, groups: NDArray[np.intp], values: Array, weights: Array | float = 1.0) -> Array:
        rows = np.column_stack([np.ones(len(functions)), functions, values])
        rows *= np.sqrt(np.broadcast_to(weights, len(rows)))[:, None]
        found = np.zeros_like(self._told)
        for group in np.unique(groups):
            mine = rows[groups == group]
            found[group] = mine.T @ mine
        return found

    def fit(self, centres: Array) -> None:
        """Estimate the coefficients relative to each group's centre, and make one step of expectation maximisation.

        The own parts v_c of the groups are eliminated, then the equation for the common part u is solved: Bishop,
        equations 3.53 and 3.54, in blocks. The centres may differ from those of earlier calls, because the departures
        are computed from sums that do not depend on the centres.
        """
        self._centres = centres.copy()
        table = self._told + self._open
        products = table[:, :-1, :-1]
        sums = table[:, :-1, -1] - centres[:, None] * products[:, :, 0]
        size = sums.shape[1]
        shared, own = np.full(size, 1.0 / self._shared), np.full(size, 1.0 / self._own)
        shared[0], own[0] = 1.0 / LEVEL, 1.0 / OWN_LEVEL
        precision = products / self.noise
        inner = np.linalg.inv(precision + np.diag(own))
        taken = inner @ precision
        left = np.eye(size) - taken
        covariance = np.linalg.inv((precision @ left).sum(axis=0) + np.diag(shared))
        pulls = sums / self.noise
        common = self._common = covariance @ (left.transpose(0, 2, 1) @ pulls[:, :, None]).sum(axis=0)[:, 0]
        own_pull = (inner @ pulls[:, :, None])[:, :, 0]
        found = self._coefficients = left @ common + own_pull
        spread = left @ covariance @ left.transpose(0, 2, 1) + inner
        own_spread = ((taken @ covariance) * taken).sum(axis=2) + inner.diagonal(axis1=1, axis2=2)
        # The noise is estimated only from trials that have ended.
        table = self._told
        ended, counts = table[:, :-1, :-1], table[:, 0, 0]
        sums = table[:, :-1, -1] - centres[:, None] * ended[:, :, 0]
        squares = table[:, -1, -1] - 2.0 * centres * table[:, 0, -1] + centres**2 * counts
        explained = (found * (2.0 * sums - (ended @ found[:, :, None])[:, :, 0])).sum(axis=1)
        self._update(
            common**2 + covariance.diagonal(),
            (own_pull - taken @ common) ** 2 + own_spread,
            squares - explained + (spread * ended).sum(axis=(1, 2)),
            counts,
        )

    def _update(self, shared: Array, own: Array, errors: Array, counts: Array) -> None:
        """Update the variances from the expected squares of errors, and of coefficients except the constants."""
        functions = len(shared) - 1
        self._shared = (float(shared[1:].sum()) + BELIEF * SHARED) / (functions + BELIEF)
        # Groups without trials add no information. They would only pull the estimate to the prior.
        tried = counts > 0
        self._own = (float(own[tried, 1:].sum()) + BELIEF * OWN) / (functions * int(tried.sum()) + BELIEF)
        errors_sum = max(float(errors.sum()), 0.0)
        self.noise = (errors_sum + BELIEF * NOISE) / (float(counts.sum()) + BELIEF)

    def predict(self, functions: Array) -> Array:
        """Return the expected departures from the centres, shape (n, groups), without the constants of the groups.

        A group's constant is left out, because it depends on which params the group happened to get.
        """
        # BLAS is not used, because the last bits of its results depend on the number of rows.
        return np.asarray((functions[:, None, :] * self._coefficients[:, 1:]).sum(axis=2))


class ParamEffects:
    """Effects of params on the log seconds of one subspace's trials. The model is created and fitted when needed."""

    def __init__(self, subspace: Subspace) -> None:
        self._subspace = subspace
        self._basis: Basis | None = None
        #: learns the departures of the log seconds from the centres of the classes
        self.regression = Regression(0)
        #: trials since the last fit: params, column of the class, log seconds
        self._untold: deque[tuple[Params, int, float]] = deque(maxlen=2 * MOST_NEW)
        self._told = 0
        #: True once a prediction was requested; until then no fits are made
        self.are_asked = False
        #: values of the basis functions by params, the latest last
        self._functions: dict[tuple[object, ...], Array] = {}

    def tell(self, params: Params, column: int, log_seconds: float) -> bool:
        """Keep a trial for the next fit: its params, the column of its class, and its log seconds.

        Return whether there are enough new trials since the last `read` for another fit.
        """
        self._untold.append((params, column, log_seconds))
        return len(self._untold) >= min(max(LEAST_NEW, GROWTH * self._told), MOST_NEW)

    def suppose(self, running: Sequence[tuple[Params, int, float, bool]], classes: int) -> bool:
        """Replace the log seconds of all running trials. Return whether another fit is due.

        Each trial has its params, the column of its class, its log seconds, and True if these are extrapolated to the
        whole trial, False for the seconds so far.
        """
        if self._basis is None or not self._basis.size:
            return False
        self.regression.add_groups(classes)
        params_list, columns, values, are_total = zip(*running, strict=True) if running else ((), (), (), ())
        functions = self.functions(params_list)
        with one_blas_thread():
            return self.regression.suppose(
                functions, np.array(columns, np.intp), np.array(values, float), np.array(are_total, bool)
            )

    def forget(self) -> None:
        """Forget all trials."""
        self.regression = Regression(self._basis.size if self._basis is not None else 0)
        self._untold.clear()
        self._told = 0

    @one_blas_thread()
    def functions(self, params_list: Sequence[Params]) -> Array:
        """Return the values of the basis functions for n sets of params, shape (n, functions).

        Values of recent params are kept, so the same params get exactly the same values. If they were computed again
        among another number of rows, linear algebra might round them differently.
        """
        if self._basis is None:
            draws = self._rows(self._subspace.sample(np.random.default_rng(0), DRAWS))
            self._basis = Basis(draws, [domain.is_numeric for domain in self._subspace.domains.values()])
            self.regression = Regression(self._basis.size)
        keys = [tuple(params.items()) for params in params_list]
        new = {key: params for key, params in zip(keys, params_list, strict=True) if key not in self._functions}
        if new:
            self._functions.update(zip(new, self._basis.functions(self._rows([*new.values()])), strict=True))
        for key in keys:
            self._functions[key] = self._functions.pop(key)
        found = np.array([self._functions[key] for key in keys]).reshape(len(keys), self._basis.size)
        most = max(len(keys), KEPT // (len(self._subspace.domains) + self._basis.size + 1))
        while len(self._functions) > most:
            del self._functions[next(iter(self._functions))]
        return found

    @one_blas_thread()
    def read(self, centres: Array) -> None:
        """Learn from the trials kept since the last call. `centres` are the classes' mean log seconds, by column."""
        params_list, columns, values = zip(*self._untold, strict=True) if self._untold else ((), (), ())
        # This may create the basis, so it must come before the groups are added.
        functions = self.functions(params_list)
        self.regression.add_groups(len(centres))
        self.regression.tell(functions, np.array(columns, np.intp), np.array(values, float))
        self.regression.fit(centres)
        self._told += len(self._untold)
        self._untold.clear()

    def departures(self, params_list: Sequence[Params], classes: int) -> Array:
        """Return the expected departures of the log seconds of n sets of params from the centres of the first `classes`
        classes, shape (n, classes).
        """
        functions = self.functions(params_list)
        self.regression.add_groups(classes)
        return self.regression.predict(functions)

    def _rows(self, params_list: Sequence[Params]) -> Array:
        """Return the params as rows of features, shape (n, labels). An inactive label is NaN."""
        return features(params_list, self._subspace.domains, inactive=math.nan)
