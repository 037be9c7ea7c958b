"""Distributions of labels, as hyperopt defines them, and `make_domain`, which builds one from a space's arguments.

`Domain` is any of them. Values are hyperopt's raw draws: floats, whole numbers, and option indexes for choices.

A continuous distribution is a *latent* one (uniform, normal), exponentiated if `log`, and rounded to a grid of step `q`
if there is one: value = round(exp(latent) / q) * q. "Unscaled" means the latent variable, so a loguniform's interval is
its exponent's.
"""

from __future__ import annotations

import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import scipy

from shadho_celery.core.checks import short
from shadho_celery.errors import SpaceError

Array = npt.NDArray[Any]

#: a grid with more values than this in its central interval counts as continuous (the rule of SHADHO's complexity)
MAX_GRID = 64
#: mass of an unbounded distribution that `to_unit` maps onto [0, 1]
UNIT_MASS = 0.999
#: probability mass of an interval that draws practically never leave: six standard deviations of a Gaussian
_ALL_BUT_NEVER = math.erf(6.0 / math.sqrt(2.0))
_MAX_FLOAT, _TINY, _BELOW_ONE = np.finfo(float).max, np.finfo(float).tiny, 1 - np.finfo(float).epsneg
#: fraction of a step by which a value may miss its grid
_ROUNDING = 1e-9
_LOG_HINT = "the bounds of {law} are logarithms, so write {law}(np.log(low), np.log(high))"


@dataclass(frozen=True)
class Continuous(ABC):
    """A latent variable, which is exponentiated if `log`, and rounded to a grid if there is a `step`."""

    #: hyperopt's name of the distribution
    law: ClassVar[str] = ""
    #: True because values lie on an axis
    is_numeric: ClassVar[bool] = True
    log: ClassVar[bool] = False
    #: mass of the latent distribution that `to_unit` maps onto [0, 1]
    unit_mass: ClassVar[float] = 1.0

    @property
    def step(self) -> float | None:
        """Step q of the grid, or None without a grid."""
        return None

    @abstractmethod
    def _draw(self, generator: np.random.Generator, size: int) -> Array:
        """Draw the latent variable."""

    @abstractmethod
    def _latent_quantile(self, masses: Array) -> Array:
        """Return quantiles of the latent variable."""

    @abstractmethod
    def central_interval(self, mass: float) -> tuple[float, float]:
        """Return the bounds that hold `mass` of the latent variable's probability, with equal tails cut; 0 < mass <=
        1.
        """

    @abstractmethod
    def _shape_problem(self) -> str | None:
        """Return what is wrong with the latent distribution's parameters, or None."""

    def sample(self, generator: np.random.Generator, size: int) -> Array:
        """Draw `size` values, shape (size,), float64."""
        return self._scale(self._draw(generator, size))

    def quantile(self, masses: npt.ArrayLike) -> Array:
        """Return the quantiles at `masses`, each in [0, 1]. This turns quasi-random points into draws."""
        return self._drawn(self._scale(self._latent_quantile(np.asarray(masses, dtype=float))))

    def _scale(self, latent: npt.ArrayLike) -> Array:
        values = np.exp(latent) if self.log else np.asarray(latent)
        return values if self.step is None else (values / self.step).round() * self.step

    def _drawn(self, values: Array) -> Array:
        """Round values to the grid. A value of probability 0, beyond a bound between two grid points, becomes the next
        one.
        """
        return values if self._ends is None else values.clip(*self._ends)

    @cached_property
    def _ends(self) -> tuple[float, float] | None:
        """Least and greatest value with a positive probability in a bounded distribution's grid; None without grid or
        bounds.
        """
        bounds = np.asarray(self.central_interval(1.0))
        if self.step is None or not np.isfinite(bounds).all():
            return None
        low, high = ((np.exp(bounds) if self.log else bounds) / self.step).tolist()
        if max(abs(low), abs(high)) * _ROUNDING > 0.5:  # neighbouring values cannot be distinguished
            return None
        first, last = math.floor(low + 0.5 + _ROUNDING), math.ceil(high - 0.5 - _ROUNDING)
        return (first * self.step, last * self.step) if first <= last else None

    def cardinality(self, mass: float) -> int | None:
        """Return the number of values of a grid in its central interval, or None if the domain counts as continuous."""
        if self.step is None:
            return None
        low, high = self._drawn(self._scale(self.central_interval(mass))).tolist()
        count = round((high - low) / self.step) + 1
        return count if count <= MAX_GRID else None

    def steps(self) -> tuple[range, float] | None:
        """Return a range of whole numbers and a size, whose products are the values; None for infinitely many values.

        For an unbounded distribution they are the values that `from_unit` returns.
        """
        if self.step is None:
            return None
        low, high = self.from_unit([0.0, 1.0]).tolist()
        return range(round(low / self.step), round(high / self.step) + 1), self.step

    @cached_property
    def _unit_interval(self) -> tuple[float, float]:
        """Bounds of the latent variable that `to_unit` maps onto 0 and 1."""
        return self.central_interval(self.unit_mass)

    def to_unit(self, values: npt.ArrayLike) -> Array:
        """Map values to features in [0, 1], linear in the unscaled variable."""
        latent = np.asarray(values, dtype=float)
        low, high = self._unit_interval
        if self.log:  # a grid of a log distribution may contain 0, which belongs to the lower end
            latent = np.log(np.maximum(latent, _TINY))
        # A distribution may be narrower than the distance between two floats.
        return ((latent - low) / ((high - low) or 1.0)).clip(0.0, 1.0)

    def from_unit(self, units: npt.ArrayLike) -> Array:
        """Map features in [0, 1] back to values, which are rounded to the grid if there is one."""
        low, high = self._unit_interval
        return self._drawn(self._scale(low + np.asarray(units, dtype=float).clip(0.0, 1.0) * (high - low)))

    def contains(self, value: object) -> bool:
        """Return True if the value has the right type and lies in the bounds. It may lie between two grid points."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _is_finite(value):
            return False
        low, high = self._scale(self.central_interval(1.0)).tolist()
        slack = 1e-9 * max(abs(low), abs(high)) if math.isfinite(low + high) else 0.0
        return bool(low - slack <= value <= high + slack)

    def on_grid(self, value: float) -> float | None:
        """Return the value that the distribution draws for this one: the grid's if it differs only by rounding, else
        None.
        """
        if self.step is None or not math.isfinite(value / self.step):
            return value
        # The same product as in drawing: two floats that differ by rounding are one value of the grid.
        nearest = round(value / self.step) * self.step
        return nearest if abs(value - nearest) <= max(_ROUNDING * self.step, math.ulp(value)) else None

    def beside(self, value: float) -> list[float]:
        """Return the grid points below and above this value that can be drawn."""
        below = math.floor(value / (self.step or 1.0))
        return [end for step in (below, below + 1) if self.contains(end := step * (self.step or 1.0))]

    def describe(self) -> str:
        """Return a text such as "uniform(-5, 15)", the same in every process, for comparison with a stored space."""
        return f"{self.law}({', '.join(_number(getattr(self, field.name)) for field in fields(self))})"

    def problem(self) -> str | None:
        """Return what is wrong with the parameters and the remedy, or None."""
        for field in fields(self):
            if not math.isfinite(value := getattr(self, field.name)):
                return f"{field.name} of {self.law} is {value}; give a finite number"
        if self.step is not None and self.step <= 0:
            return f"the step q of {self.law} is {_number(self.step)}; give one above 0"
        if (problem := self._shape_problem()) or self.step is None:
            return problem
        with np.errstate(over="ignore"):
            if not np.isfinite(self._scale(self.central_interval(_ALL_BUT_NEVER))).all():
                return f"the step q = {self.step!r} is too small for the range; give a larger one"
        return None


@dataclass(frozen=True)
class _Quantised(Continuous):
    #: step of the grid
    q: float

    @property
    def step(self) -> float | None:
        return self.q


@dataclass(frozen=True)
class Uniform(Continuous):
    """hp.uniform: uniform between low and high."""

    law = "uniform"

    #: bounds of the latent variable
    low: float
    high: float

    def _draw(self, generator: np.random.Generator, size: int) -> Array:
        return generator.uniform(self.low, self.high, size)

    def _latent_quantile(self, masses: Array) -> Array:
        return self.low + masses * (self.high - self.low)

    def central_interval(self, mass: float) -> tuple[float, float]:
        tail = (1.0 - mass) / 2 * (self.high - self.low)
        return self.low + tail, self.high - tail

    def _shape_problem(self) -> str | None:
        low, high = _number(self.low), _number(self.high)
        if self.low >= self.high:
            return f"low = {low} is not below high = {high} in {self.law}; give low < high"
        if not math.isfinite(self.high - self.low):
            return f"the range from {low} to {high} overflows; use a log law or a smaller range"
        if self.log and self.high > math.log(_MAX_FLOAT):
            return f"exp({high}) overflows: {_LOG_HINT.format(law=self.law)}"
        return None

    def hint(self) -> str | None:
        """Return a warning if the bounds of a log distribution look like plain values: both positive with a ratio of
        100 or more.
        """
        if not self.log or self.low <= 0 or self.high / self.low < 100:
            return None
        drawn = f"draws from {math.exp(self.low):g} to {math.exp(self.high):g}"
        return f"{self.describe()} {drawn}; if that is not intended, {_LOG_HINT.format(law=self.law)}"


@dataclass(frozen=True)
class QUniform(_Quantised, Uniform):
    """hp.quniform and hp.uniformint: uniform, rounded to multiples of q, so the ends may exceed the bounds."""

    law = "quniform"


class LogUniform(Uniform):
    """hp.loguniform: exp of a uniform variable."""

    law = "loguniform"
    log = True


class QLogUniform(QUniform):
    """hp.qloguniform: exp of a uniform variable, rounded to multiples of q."""

    law = "qloguniform"
    log = True


@dataclass(frozen=True)
class Normal(Continuous):
    """hp.normal: Gaussian."""

    law = "normal"
    unit_mass = UNIT_MASS

    #: mean and standard deviation of the latent variable
    mu: float
    sigma: float

    def _draw(self, generator: np.random.Generator, size: int) -> Array:
        return generator.normal(self.mu, self.sigma, size)

    def _latent_quantile(self, masses: Array) -> Array:
        # the ends of an unbounded distribution are infinite, so stay slightly inside
        return self.mu + self.sigma * np.asarray(scipy.special.ndtri(masses.clip(_TINY, _BELOW_ONE)))

    def central_interval(self, mass: float) -> tuple[float, float]:
        half = self.sigma * float(scipy.special.ndtri((1.0 + mass) / 2))
        return self.mu - half, self.mu + half

    def _shape_problem(self) -> str | None:
        if self.sigma <= 0:
            return f"sigma of {self.law} is {_number(self.sigma)}; give one above 0"
        _, top = self.central_interval(_ALL_BUT_NEVER)
        if not math.isfinite(top) or (self.log and top > math.log(_MAX_FLOAT)):
            return f"draws of {self.describe()} overflow; give a smaller mu and sigma" + (
                " (they are those of the logarithm, so write np.log(mean))" if self.log else ""
            )
        return None


@dataclass(frozen=True)
class QNormal(_Quantised, Normal):
    """hp.qnormal: Gaussian, rounded to multiples of q."""

    law = "qnormal"


class LogNormal(Normal):
    """hp.lognormal: exp of a Gaussian variable."""

    law = "lognormal"
    log = True


class QLogNormal(QNormal):
    """hp.qlognormal: exp of a Gaussian variable, rounded to multiples of q."""

    law = "qlognormal"
    log = True


@dataclass(frozen=True)
class Discrete(ABC):
    """Whole numbers from `first` on, `count` of them: a randint's values, or the option indexes of a choice.

    Its methods are those of `Continuous`. `to_unit` maps the i-th of n values to i / (n - 1).
    """

    law: ClassVar[str] = ""
    #: False for option indexes, which have no order; otherwise values lie on an axis
    is_numeric: ClassVar[bool] = True

    @property
    @abstractmethod
    def first(self) -> int:
        """Least value."""

    @property
    @abstractmethod
    def count(self) -> int:
        """Number of values."""

    def cardinality(self, mass: float) -> int | None:
        return self.count

    def steps(self) -> tuple[range, float] | None:
        return range(self.first, self.first + self.count), 1

    def to_unit(self, values: npt.ArrayLike) -> Array:
        offsets = np.asarray(values, dtype=float) - self.first
        return (offsets / max(self.count - 1, 1)).clip(0.0, 1.0)

    def from_unit(self, units: npt.ArrayLike) -> Array:
        offsets = (np.asarray(units, dtype=float).clip(0.0, 1.0) * (self.count - 1)).round()
        offsets = np.minimum(offsets, math.nextafter(self.count, 0))  # near 2**63 a float is coarser than an int
        return np.asarray(offsets, dtype=np.int64) + self.first

    def contains(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            return False
        return self.first <= int(value) < self.first + self.count


@dataclass(frozen=True)
class RandInt(Discrete):
    """hp.randint: whole numbers from low to high - 1, with equal probabilities. They lie on an axis."""

    law = "randint"

    low: int
    high: int

    @property
    def first(self) -> int:
        return self.low

    @property
    def count(self) -> int:
        return self.high - self.low

    def sample(self, generator: np.random.Generator, size: int) -> Array:
        return generator.integers(self.low, self.high, size)

    def quantile(self, masses: npt.ArrayLike) -> Array:
        return (_below_one(masses) * self.count).astype(np.int64) + self.low

    def central_interval(self, mass: float) -> tuple[float, float]:
        tail = math.floor((1.0 - mass) / 2 * self.count)
        return float(self.low + tail), float(self.high - 1 - tail)

    def probability(self, value: int) -> float:
        """Return the probability of this value, which is 0 outside the range."""
        return 1.0 / self.count if self.low <= value < self.high else 0.0

    def problem(self) -> str | None:
        if self.low >= self.high:
            return f"nothing to choose from, randint({self.low}, {self.high}) is empty; give an option, or low < high"
        if self.low < -(2**63) or self.high > 2**63 or self.count > 2**63:
            return f"randint({self.low}, {self.high}) does not fit in 64 bits; give a smaller range"
        return None

    def describe(self) -> str:
        return f"randint({self.low}, {self.high})"


@dataclass(frozen=True)
class Categorical(Discrete):
    """hp.choice and hp.pchoice: the index of an option; indexes have no order."""

    law = "categorical"
    is_numeric = False
    first = 0

    #: probability of each option; they sum to 1
    probabilities: tuple[float, ...]

    @classmethod
    def uniform(cls, count: int) -> Categorical:
        """Return the distribution of hp.choice over `count` options."""
        return cls((1.0 / count,) * count)

    @property
    def count(self) -> int:
        return len(self.probabilities)

    @cached_property
    def _cumulative(self) -> Array:
        cumulative: Array = np.cumsum(self.probabilities)
        # rounding may leave the last cumulative sum below 1: a draw above it is the last option that can be drawn
        cumulative[np.flatnonzero(self.probabilities)[-1] :] = 1.0
        return cumulative

    @cached_property
    def is_uniform(self) -> bool:
        """All options have the same probability."""
        return min(self.probabilities) == max(self.probabilities)

    def sample(self, generator: np.random.Generator, size: int) -> Array:
        if self.is_uniform:
            return generator.integers(0, self.count, size)
        return self._cumulative.searchsorted(generator.random(size), side="right")

    def quantile(self, masses: npt.ArrayLike) -> Array:
        return self._cumulative.searchsorted(_below_one(masses), side="right")

    def central_interval(self, mass: float) -> tuple[float, float]:
        return 0.0, float(self.count - 1)

    def probability(self, value: int) -> float:
        return self.probabilities[value] if 0 <= value < self.count else 0.0

    def problem(self) -> str | None:
        if not self.probabilities:
            return "nothing to choose from; give at least one option"
        if not all(math.isfinite(mass) and mass >= 0 for mass in self.probabilities):
            return "a probability is negative or not a finite number; give numbers from 0 to 1"
        if abs(math.fsum(self.probabilities) - 1.0) > 1e-6:
            return f"the probabilities sum to {math.fsum(self.probabilities):g}; make them sum to 1"
        return None

    def describe(self) -> str:
        if self.is_uniform:
            return f"choice({self.count})"
        return f"pchoice({', '.join(f'{mass:.12g}' for mass in self.probabilities)})"


#: the set of values of a label, with their distribution
Domain = Uniform | Normal | RandInt | Categorical

#: hyperopt's name of a distribution with real parameters -> its domain, whose fields are the parameters in order
CONTINUOUS: Mapping[str, type[Uniform] | type[Normal]] = {
    kind.law: kind for kind in (Uniform, QUniform, LogUniform, QLogUniform, Normal, QNormal, LogNormal, QLogNormal)
}


def make_domain(label: str, law: str, arguments: Mapping[str, object]) -> Domain:
    """Build and validate the domain of one hyperparameter.

    `law` is one of hyperopt's names. `arguments` are its parameters by hyperopt's names, already numbers (for
    "categorical": "p", a sequence). Raises SpaceError with the label, the cause and the remedy.
    """
    domain: Domain
    if law == "categorical":
        domain = _categorical(label, arguments.get("p"))
    elif law == "randint":
        low = _whole(label, "low", arguments)
        has_high = arguments.get("high") is not None
        domain = RandInt(low, _whole(label, "high", arguments)) if has_high else RandInt(0, low)
    else:
        domain = CONTINUOUS[law](*(_real(label, law, field.name, arguments) for field in fields(CONTINUOUS[law])))
    validate(label, domain)
    return domain


def validate(label: str, domain: Domain) -> None:
    """Raise SpaceError with the label, the cause and the remedy if the domain cannot be searched."""
    if problem := domain.problem():
        raise SpaceError(f"Hyperparameter {label!r}: {problem}.")


def cell(domain: Domain, value: Any) -> tuple[float, float]:
    """Return the interval that is rounded to a number's value, in units of `to_unit`. Without a grid, both ends are
    equal.
    """
    half = (domain.step or 0.0) / 2 if isinstance(domain, Continuous) else 0.5
    low, high = domain.to_unit([value - half, value + half]).tolist()
    return low, high


def _real(label: str, law: str, name: str, arguments: Mapping[str, object]) -> float:
    if name not in arguments:
        raise SpaceError(f"Hyperparameter {label!r}: {law} lacks {name}; give a number.")
    value = arguments[name]
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    # Python counts a bool as a number, but as a bound it is a mistake
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpaceError(f"Hyperparameter {label!r}: {name} of {law} is {short(value, 60)}; give a number.")
    try:
        return float(value)
    except OverflowError:
        raise SpaceError(
            f"Hyperparameter {label!r}: {name} of {law} is too large for a float; give a smaller one."
        ) from None


def _whole(label: str, name: str, arguments: Mapping[str, object]) -> int:
    """Return the parameter as an int. 5.0 is accepted as 5."""
    value = arguments.get(name)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    real = _real(label, "randint", name, arguments)
    if not real.is_integer():
        raise SpaceError(f"Hyperparameter {label!r}: {name} of randint is {short(value, 60)}; give a whole number.")
    return int(real)


def _categorical(label: str, weights: object) -> Categorical:
    """Return the distribution of a pchoice, with probabilities renormalised if rounding left their sum slightly off
    1.
    """
    if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes)):
        raise SpaceError(f"Hyperparameter {label!r}: its probabilities are {short(weights, 60)}; give one per option.")
    masses = tuple(_real(label, "pchoice", "probability", {"probability": weight}) for weight in weights)
    validate(label, Categorical(masses))
    total = math.fsum(masses)
    return Categorical(tuple(mass / total for mass in masses))


def _is_finite(value: numbers.Real) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        # A whole number that is too large for a float.
        return False


def _below_one(masses: npt.ArrayLike) -> Array:
    """Return masses as an array. 1 becomes the float below 1, which belongs to the last value."""
    return np.asarray(masses, dtype=float).clip(max=_BELOW_ONE)


def _number(value: float) -> str:
    """Return the shortest exact text of a number: 5.0 is "5", 0.1 is "0.1"."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
