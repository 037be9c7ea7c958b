"""hyperopt's continuous laws and their quantised forms.

Every law is a *latent* one (uniform, normal), perhaps exponentiated (`log`), perhaps rounded to a grid of step `q`:
value = round(exp(latent) / q) * q. "Unscaled" means the latent variable, so a loguniform's interval is its exponent's.
"""

from __future__ import annotations

import math
import numbers
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from shadho_celery.space.domain import Array, Domain, number_text

#: a grid with more values than this in its central interval counts as continuous (the SHADHO complexity's rule)
MAX_GRID = 64
#: the mass of an unbounded law that is mapped onto [0, 1] by `to_unit`
UNIT_MASS = 0.999
#: a lognormal whose exponent overflows this many sigmas out would sooner or later draw an infinity
_SIGMAS = 6.0
_LOG_HINT = "the bounds of {law} are logarithms, so write {law}(np.log(low), np.log(high))"


class _Latent(Domain):
    """What the uniform and normal families share: exponent and grid over a latent variable."""

    log: ClassVar[bool] = False

    @property
    def step(self) -> float | None:
        """The grid's step q, or None."""
        return None

    @abstractmethod
    def _draw(self, generator: np.random.Generator, size: int) -> Array:
        """Draw the latent variable."""

    @abstractmethod
    def _latent_quantile(self, masses: Array) -> Array:
        """Quantiles of the latent variable."""

    @abstractmethod
    def _span(self) -> tuple[float, float]:
        """The latent bounds that `to_unit` maps to 0 and 1."""

    def _scale(self, latent: Array) -> Array:
        values = np.exp(latent) if self.log else latent
        return values if self.step is None else np.round(values / self.step) * self.step

    def sample(self, generator: np.random.Generator, size: int) -> Array:
        return self._scale(self._draw(generator, size))

    def quantile(self, masses: npt.ArrayLike) -> Array:
        return self._scale(self._latent_quantile(np.asarray(masses, dtype=float)))

    def cardinality(self, mass: float) -> int | None:
        if self.step is None:
            return None
        low, high = np.round(np.asarray(self._ends(self.central_interval(mass))) / self.step)
        count = high - low + 1
        return int(count) if count <= MAX_GRID else None

    def _ends(self, latent: tuple[float, float]) -> tuple[float, float]:
        return (math.exp(latent[0]), math.exp(latent[1])) if self.log else latent

    def to_unit(self, values: npt.ArrayLike) -> Array:
        latent = np.asarray(values, dtype=float)
        low, high = self._span()
        if self.log:  # a grid of a log law may hold 0: it belongs to the lower end
            latent = np.log(np.maximum(latent, np.finfo(float).tiny))
        return np.clip((latent - low) / (high - low), 0.0, 1.0)

    def from_unit(self, units: npt.ArrayLike) -> Array:
        low, high = self._span()
        return self._scale(low + np.clip(np.asarray(units, dtype=float), 0.0, 1.0) * (high - low))

    def contains(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
            return False
        low, high = self._value_bounds()
        slack = 1e-9 * max(abs(low), abs(high)) if math.isfinite(low + high) else 0.0
        return low - slack <= float(value) <= high + slack

    @abstractmethod
    def _value_bounds(self) -> tuple[float, float]:
        """The least and the greatest value that can be drawn."""

    def problem(self) -> str | None:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in values.items():
            if not math.isfinite(value):
                return f"{name} of {self.law} is {value}; give a finite number"
        if self.step is not None and self.step <= 0:
            return f"the step q of {self.law} is {number_text(self.step)}; give one above 0"
        if problem := self._shape_problem():
            return problem
        if self.step is not None and not math.isfinite(max(map(abs, self._ends(self._extremes()))) / self.step):
            return f"the step q = {self.step!r} is too small for the range; give a larger one"
        return None

    @abstractmethod
    def _shape_problem(self) -> str | None:
        """What is wrong with the latent law's parameters, or None."""

    @abstractmethod
    def _extremes(self) -> tuple[float, float]:
        """Latent bounds that draws practically never leave."""


@dataclass(frozen=True)
class _Quantised(_Latent):
    #: the grid's step
    q: float

    @property
    def step(self) -> float | None:
        return self.q


@dataclass(frozen=True)
class _UniformLaw(_Latent):
    #: the latent variable's bounds
    low: float
    high: float

    def _draw(self, generator: np.random.Generator, size: int) -> Array:
        return generator.uniform(self.low, self.high, size)

    def _latent_quantile(self, masses: Array) -> Array:
        return self.low + masses * (self.high - self.low)

    def central_interval(self, mass: float) -> tuple[float, float]:
        tail = (1.0 - mass) / 2 * (self.high - self.low)
        return self.low + tail, self.high - tail

    def _span(self) -> tuple[float, float]:
        return self.low, self.high

    def _extremes(self) -> tuple[float, float]:
        return self.low, self.high

    def _value_bounds(self) -> tuple[float, float]:
        low, high = self._scale(np.array([self.low, self.high]))
        return float(low), float(high)

    def _shape_problem(self) -> str | None:
        low, high = number_text(self.low), number_text(self.high)
        if self.low >= self.high:
            return f"low = {low} is not below high = {high} in {self.law}; give low < high"
        if not math.isfinite(self.high - self.low):
            return f"the range from {low} to {high} overflows; use a log law or a smaller range"
        if self.log and self.high > math.log(np.finfo(float).max):
            return f"exp({high}) overflows: {_LOG_HINT.format(law=self.law)}"
        return None

    def hint(self) -> str | None:
        """A warning where the bounds of a log law look like raw values: both positive, their ratio 100 or more."""
        if not self.log or self.low <= 0 or self.high / self.low < 100:
            return None
        drawn = f"draws from {math.exp(self.low):g} to {math.exp(self.high):g}"
        return f"{self.describe()} {drawn}; if that is not meant, {_LOG_HINT.format(law=self.law)}"


@dataclass(frozen=True)
class _NormalLaw(_Latent):
    #: the latent variable's mean and standard deviation
    mu: float
    sigma: float

    def _draw(self, generator: np.random.Generator, size: int) -> Array:
        return generator.normal(self.mu, self.sigma, size)

    def _latent_quantile(self, masses: Array) -> Array:
        tiny = np.finfo(float).tiny  # the ends of an unbounded law are infinite: stay a little inside
        latent: Array = self.mu + self.sigma * ndtri(np.clip(masses, tiny, 1 - np.finfo(float).epsneg))
        return latent

    def central_interval(self, mass: float) -> tuple[float, float]:
        half = self.sigma * float(ndtri((1.0 + mass) / 2))
        return self.mu - half, self.mu + half

    def _span(self) -> tuple[float, float]:
        return self.central_interval(UNIT_MASS)

    def _extremes(self) -> tuple[float, float]:
        return self.mu - _SIGMAS * self.sigma, self.mu + _SIGMAS * self.sigma

    def _value_bounds(self) -> tuple[float, float]:
        return (0.0 if self.log else -math.inf), math.inf

    def _shape_problem(self) -> str | None:
        if self.sigma <= 0:
            return f"sigma of {self.law} is {number_text(self.sigma)}; give one above 0"
        top = self.mu + _SIGMAS * self.sigma
        if not math.isfinite(top) or (self.log and top > math.log(np.finfo(float).max)):
            return f"draws of {self.describe()} overflow; give a smaller mu and sigma" + (
                " (they are those of the logarithm, so write np.log(mean))" if self.log else ""
            )
        return None


@dataclass(frozen=True)
class Uniform(_UniformLaw):
    """hp.uniform: evenly between low and high."""

    law = "uniform"


@dataclass(frozen=True)
class QUniform(_Quantised, _UniformLaw):
    """hp.quniform and hp.uniformint: uniform, rounded to multiples of q, so that the ends may overhang."""

    law = "quniform"


@dataclass(frozen=True)
class LogUniform(_UniformLaw):
    """hp.loguniform: exp of a uniform."""

    law = "loguniform"
    log = True


@dataclass(frozen=True)
class QLogUniform(_Quantised, _UniformLaw):
    """hp.qloguniform: exp of a uniform, rounded to multiples of q."""

    law = "qloguniform"
    log = True


@dataclass(frozen=True)
class Normal(_NormalLaw):
    """hp.normal: Gaussian."""

    law = "normal"


@dataclass(frozen=True)
class QNormal(_Quantised, _NormalLaw):
    """hp.qnormal: Gaussian, rounded to multiples of q."""

    law = "qnormal"


@dataclass(frozen=True)
class LogNormal(_NormalLaw):
    """hp.lognormal: exp of a Gaussian."""

    law = "lognormal"
    log = True


@dataclass(frozen=True)
class QLogNormal(_Quantised, _NormalLaw):
    """hp.qlognormal: exp of a Gaussian, rounded to multiples of q."""

    law = "qlognormal"
    log = True
