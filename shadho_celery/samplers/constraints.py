"""Constraints for samplers: the probability that params are feasible, with one Gaussian process for each constraint.

Source: Gardner, Kusner, Xu, Weinberger, Cunningham, "Bayesian Optimization with Inequality Constraints", ICML 2014: the
expected improvement is multiplied by that probability (equation 6), the product over constraints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from shadho_celery.samplers.gaussian_process import GaussianProcess

Array = NDArray[np.float64]


class ConstraintModel:
    """Constraints by name, each a function of a trial's features. Before the first one everything is feasible."""

    def __init__(self, is_numeric: Sequence[bool]) -> None:
        self._is_numeric = is_numeric
        #: the process and the scaled value up to which a trial is feasible, by name
        self._processes: dict[str, tuple[GaussianProcess, float]] = {}

    @property
    def any(self) -> bool:
        """True once a trial has had a constraint."""
        return bool(self._processes)

    def learn(self, rows: Array, told: Sequence[Mapping[str, float]], *, fit: bool) -> None:
        """Learn from n trials, features of shape (n, labels), and forget earlier ones. With `fit`, estimate length
        scales.
        """
        for name in dict.fromkeys(name for constraints in told for name in constraints):
            known = np.array([name in constraints for constraints in told])
            values, limit = scaled(np.array([constraints[name] for constraints in told if name in constraints]))
            process = self._processes[name][0] if name in self._processes else GaussianProcess(self._is_numeric)
            self._processes[name] = process, limit
            if fit:
                process.fit(rows[known], values)
            process.learn(rows[known], values)

    def log_chances(self, rows: Array) -> Array:
        """Return the log probability that n rows of features are feasible, shape (n,)."""
        total = np.zeros(len(rows))
        for process, limit in self._processes.values():
            means, deviations = process.predict(rows)
            total += log_ndtr((limit - means) / deviations)
        return total

    def slopes(self, row: Array) -> tuple[float, Array]:
        """Return the log probability at one row, and its derivatives by the features, shape (labels,)."""
        total, gradient = 0.0, np.zeros(len(row))
        for process, limit in self._processes.values():
            mean, deviation, by_mean, by_deviation = process.slopes(row)
            z = (limit - mean) / deviation
            level = float(log_ndtr(z))
            total += level
            # The derivative of log Phi(z) is phi(z) / Phi(z).
            steep = math.exp(min(-0.5 * z**2 - 0.5 * math.log(2 * math.pi) - level, 700.0))
            gradient -= steep * (by_mean + z * by_deviation) / deviation
        return total, gradient


def scaled(values: Array) -> tuple[Array, float]:
    """Return values of a constraint with mean 0 and variance 1, and the scaled value of the limit 0.

    Large values are moved closer together: by how much a constraint is far violated does not matter.
    """
    unit = float(np.median(np.abs(values))) or float(np.abs(values).max(initial=0.0)) or 1.0
    bent = np.arcsinh(values / unit)
    mean, spread = float(bent.mean()), float(bent.std()) or 1.0
    return np.asarray((bent - mean) / spread), -mean / spread
