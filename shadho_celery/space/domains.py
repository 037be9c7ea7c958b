"""Distributions of labels, as hyperopt defines them, and `make_domain`, which creates a distribution by its name.

A `Domain` is one of these distributions. Values are hyperopt's raw draws: floats, integers, and for choices the indexes
of options.

A continuous distribution has a *latent* or unscaled variable, which is uniform or normal. If `log`, the exponential of
this variable is taken. If there is a step `q`, the result is rounded to a grid: value = round(exp(latent) / q) * q.
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

#: a grid with more values in its central interval counts as continuous (the rule of SHADHO's complexity)
MAX_GRID = 64
#: probability of the central interval of an unbounded distribution that `to_unit` maps to [0, 1]
UNIT_MASS = 0.999
#: probability of an interval that contains practically all draws: six standard deviations of a Gaussian to each side
_ALL_BUT_NEVER = math.erf(6.0 / math.sqrt(2.0))
_MAX_FLOAT, _TINY, _BELOW_ONE = np.finfo(float).max, np.finfo(float).tiny, 1 - np.finfo(float).epsneg
#: fraction of a step by which a value may differ from its grid point
_ROUNDING = 1e-9
_LOG_HINT = "the bounds of {law} are logarithms, so write {law}(np.log(low), np.log(high))"


@dataclass(frozen=True)
class Continuous(ABC):
    """A continuous distribution: a latent variable, of which the exponential is taken if `log`, rounded if there is a
    `step`.
    """

    #: hyperopt's name of the distribution
    law: ClassVar[str] = ""
    #: True because values lie on an axis
    is_numeric: ClassVar[bool] = True
    log: ClassVar[bool] = False
    #: probability of the latent variable's interval that `to_unit` maps to [0, 1]
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
        """Return the bounds of the latent variable's interval with probability `mass` and equal tails; 0 <
        mass <= 1.
        """

    @abstractmethod
    def _shape_problem(self) -> str | None:
        """Return what is wrong with the latent distribution's parameters, or None."""

    def sample(self, generator: np.random.Generator, size: int) -> Array:
        """Draw `size` values, shape (size,), float64."""
        return self._scale(self._draw(generator, size))

    def quantile(self, masses: npt.ArrayLike) -> Array:
        """Return the quantiles at `masses`, each in [0, 1]. Quasi-random points are converted to draws by this."""
        return self._drawn(self._scale(self._latent_quantile(np.asarray(masses, dtype=float))))

    def _scale(self, latent: npt.ArrayLike) -> Array:
        values = np.exp(latent) if self.log else np.asarray(latent)
        return values if self.step is None else (values / self.step).round() * self.step

    def _drawn(self, values: Array) -> Array:
        """Move values of probability 0, which rounding has put beyond the bounds, to the nearest value that can be
        drawn.
        """
        return values if self._ends is None else values.clip(*self._ends)

    @cached_property
    def _ends(self) -> tuple[float, float] | None:
        """Least and greatest value of a grid with a positive probability; None without a grid or bounds."""
        bounds = np.asarray(self.central_interval(1.0))
        if self.step is None or not np.isfinite(bounds).all():
            return None
        low, high = ((np.exp(bounds) if self.log else bounds) / self.step).tolist()
        if max(abs(low), abs(high)) * _ROUNDING > 0.5:  # neighbouring values cannot be distinguished
            return None
        first, last = math.floor(low + 0.5 + _ROUNDING), math.ceil(high - 0.5 - _ROUNDING)
        return (first * self.step, last * self.step) if first <= last else None

    def cardinality(self, mass: float) -> int | None:
        """Return the number of grid values in the central interval of this `mass`; None if the domain counts as
        continuous.
        """
        if self.step is None:
            return None
        low, high = self._drawn(self._scale(self.central_interval(mass))).tolist()
        count = round((high - low) / self.step) + 1
        return count if count <= MAX_GRID else None

    def steps(self) -> tuple[range, float] | None:
        """Return a range of integers and a step, whose products are the values; None for infinitely many values.

        For an unbounded distribution, these are the values that `from_unit` can return.
        """
        if self.step is None:
            return None
        low, high = self.from_unit([0.0, 1.0]).tolist()
        return range(round(low / self.step), round(high / self.step) + 1), self.step

    @cached_property
    def _unit_interval(self) -> tuple[float, float]:
        """Bounds of the latent variable that `to_unit` maps to 0 and 1."""
        return self.central_interval(self.unit_mass)

    def to_unit(self, values: npt.ArrayLike) -> Array:
        """Map values to features in [0, 1], linear in the unscaled variable."""
        latent = np.asarray(values, dtype=float)
        low, high = self._unit_interval
        if self.log:  # the grid of a log distribution may contain 0, which is mapped to the lower end
            latent = np.log(np.maximum(latent, _TINY))
        # If the bounds are nearly equal, their difference may be 0.
        return ((latent - low) / ((high - low) or 1.0)).clip(0.0, 1.0)

    def from_unit(self, units: npt.ArrayLike) -> Array:
        """Map features in [0, 1] back to values, rounded to the grid if there is one."""
        low, high = self._unit_interval
        return self._drawn(self._scale(low + np.asarray(units, dtype=float).clip(0.0, 1.0) * (high - low)))

    def contains(self, value: object) -> bool:
        """Return True if the value has the right type and is within the bounds. It may be between two grid points."""
        if isinstance(value, bool) or not isinstance(value, numbers.Real) or not _is_finite(value):
            return False
        low, high = self._scale(self.central_interval(1.0)).tolist()
        slack = 1e-9 * max(abs(low), abs(high)) if math.isfinite(low + high) else 0.0
        return bool(low - slack <= value <= high + slack)

    def on_grid(self, value: float) -> float | None:
        """Return the grid value that differs from this value only by rounding, or None; without a grid, the value
        itself.
        """
        if self.step is None or not math.isfinite(value / self.step):
            return value
        # The same product as in drawing, so that floats that differ only by rounding give the same value.
        nearest = round(value / self.step) * self.step
        return nearest if abs(value - nearest) <= max(_ROUNDING * self.step, math.ulp(value)) else None

    def beside(self, value: float) -> list[float]:
        """Return the neighbouring grid points below and above this value, if they can be drawn."""
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
        """Return a warning if the bounds of a log distribution look as if the user forgot to take the logarithm.

        This is the case if both are positive and their ratio is at least 100.
        """
        if not self.log or self.low <= 0 or self.high / self.low < 100:
            return None
        drawn = f"draws from {math.exp(self.low):g} to {math.exp(self.high):g}"
        return f"{self.describe()} {drawn}; if that is not intended, {_LOG_HINT.format(law=self.law)}"


@dataclass(frozen=True)
class QUniform(_Quantised, Uniform):
    """hp.quniform and hp.uniformint: uniform, rounded to multiples of q. Values may therefore be beyond the bounds."""

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
        # The quantiles at 0 and 1 are infinite, so masses slightly inside are used.
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
    """The integers from `first` to `first + count - 1`: the values of a randint, or the option indexes of a choice.

    It has the same methods as `Continuous`. `to_unit` maps the i-th of n values (from 0) to i / (n - 1).
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
        offsets = np.minimum(offsets, math.nextafter(self.count, 0))  # a float near 2**63 may be rounded up
        return np.asarray(offsets, dtype=np.int64) + self.first

    def contains(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            return False
        return self.first <= int(value) < self.first + self.count


@dataclass(frozen=True)
class RandInt(Discrete):
    """hp.randint: integers from low to high - 1, with equal probabilities."""

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
    """hp.choice and hp.pchoice: the index of an option. Indexes have no order."""

    law = "categorical"
    is_numeric = False
    first = 0

    #: probabilities of the options, which sum to 1
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
        # Rounding may leave the last cumulative sum below 1, so it is set to 1 from the last option with a positive
        # probability on.
        cumulative[np.flatnonzero(self.probabilities)[-1] :] = 1.0
        return cumulative

    @cached_property
    def is_uniform(self) -> bool:
        """True if all options have the same probability."""
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


#: distribution of a label, which also determines the set of its values
Domain = Uniform | Normal | RandInt | Categorical

#: by hyperopt's name of a distribution with float parameters: its class, whose fields are the parameters in order
CONTINUOUS: Mapping[str, type[Uniform] | type[Normal]] = {
    kind.law: kind for kind in (Uniform, QUniform, LogUniform, QLogUniform, Normal, QNormal, LogNormal, QLogNormal)
}


def make_domain(label: str, law: str, arguments: Mapping[str, object]) -> Domain:
    """Return the domain of a hyperparameter.

    `law` is hyperopt's name of the distribution. `arguments` are its parameters by hyperopt's names: numbers, or for
    "categorical" the sequence "p". Raises SpaceError with the label, the cause and the remedy if they are invalid.
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
    """Return the interval that is rounded to this value, mapped by `to_unit`. Without a grid, both ends are equal."""
    half = (domain.step or 0.0) / 2 if isinstance(domain, Continuous) else 0.5
    low, high = domain.to_unit([value - half, value + half]).tolist()
    return low, high


def _real(label: str, law: str, name: str, arguments: Mapping[str, object]) -> float:
    if name not in arguments:
        raise SpaceError(f"Hyperparameter {label!r}: {law} lacks {name}; give a number.")
    value = arguments[name]
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    # In Python a bool is a number, but as a parameter it is a mistake.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpaceError(f"Hyperparameter {label!r}: {name} of {law} is {short(value, 60)}; give a number.")
    try:
        return float(value)
    except OverflowError:
        raise SpaceError(
            f"Hyperparameter {label!r}: {name} of {law} is too large for a float; give a smaller one."
        ) from None


def _whole(label: str, name: str, arguments: Mapping[str, object]) -> int:
    """Return a parameter as an int. 5.0 is accepted as 5."""
    value = arguments.get(name)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    real = _real(label, "randint", name, arguments)
    if not real.is_integer():
        raise SpaceError(f"Hyperparameter {label!r}: {name} of randint is {short(value, 60)}; give a whole number.")
    return int(real)


def _categorical(label: str, weights: object) -> Categorical:
    """Return the distribution of a pchoice. The probabilities are scaled, so that they sum to exactly 1."""
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
        # The value is an int that is too large for a float.
        return False


def _below_one(masses: npt.ArrayLike) -> Array:
    """Return masses as an array in which 1 is replaced by the next smaller float, whose quantile is the last value."""
    return np.asarray(masses, dtype=float).clip(max=_BELOW_ONE)


def _number(value: float) -> str:
    """Return the shortest exact text of a number: "5" for 5.0, "0.1" for 0.1."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
