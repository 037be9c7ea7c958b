"""Whole-number laws: hyperopt's randint, and the option indexes of its choice and pchoice."""

from __future__ import annotations

import math
import numbers
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shadho_celery.space.domain import Array, Domain


class Discrete(Domain):
    """Whole numbers from `first`, `count` of them: a randint's, or the option indexes of a choice."""

    @property
    @abstractmethod
    def first(self) -> int:
        """The least value."""

    @property
    @abstractmethod
    def count(self) -> int:
        """How many values there are."""

    @abstractmethod
    def probability(self, value: int) -> float:
        """The law's mass on this value; 0 outside."""

    def cardinality(self, mass: float) -> int | None:
        return self.count

    def to_unit(self, values: npt.ArrayLike) -> Array:
        offsets = np.asarray(values, dtype=float) - self.first
        return np.clip(offsets / max(self.count - 1, 1), 0.0, 1.0)

    def from_unit(self, units: npt.ArrayLike) -> Array:
        offsets = np.round(np.clip(np.asarray(units, dtype=float), 0.0, 1.0) * (self.count - 1))
        offsets = np.minimum(offsets, math.nextafter(self.count, 0))  # near 2**63 a float is coarser than an int
        places: Array = offsets.astype(np.int64) + self.first
        return places

    def contains(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            return False
        return self.first <= int(value) < self.first + self.count


@dataclass(frozen=True)
class RandInt(Discrete):
    """hp.randint: whole numbers from low to high - 1, all alike; they lie on an axis."""

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
        offsets: Array = np.floor(_below_one(masses) * self.count).astype(np.int64)
        return offsets + self.low

    def central_interval(self, mass: float) -> tuple[float, float]:
        tail = math.floor((1.0 - mass) / 2 * self.count)
        return float(self.low + tail), float(self.high - 1 - tail)

    def probability(self, value: int) -> float:
        return 1.0 / self.count if self.low <= value < self.high else 0.0

    def problem(self) -> str | None:
        if self.low >= self.high:
            return f"nothing to choose from, randint({self.low}, {self.high}) is empty; give an option, or low < high"
        if self.low < -(2**63) or self.high > 2**63 or self.count > 2**63:
            return f"randint({self.low}, {self.high}) leaves 64 bits; give a smaller range"
        return None

    def describe(self) -> str:
        return f"randint({self.low}, {self.high})"


@dataclass(frozen=True)
class Categorical(Discrete):
    """hp.choice and hp.pchoice: the index of an option; indexes have no order."""

    law = "categorical"
    is_numeric = False

    #: one per option, their sum 1
    probabilities: tuple[float, ...]

    @classmethod
    def uniform(cls, count: int) -> Categorical:
        """The law of hp.choice over `count` options."""
        return cls((1.0 / count,) * count)

    @property
    def first(self) -> int:
        return 0

    @property
    def count(self) -> int:
        return len(self.probabilities)

    @cached_property
    def _cumulative(self) -> Array:
        cumulative: Array = np.cumsum(self.probabilities)
        # rounding may leave the last sum below 1: then a draw above it belongs to the last option that can be drawn
        last = max(index for index, mass in enumerate(self.probabilities) if mass > 0)
        cumulative[last:] = 1.0
        return cumulative

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all options are alike."""
        return min(self.probabilities) == max(self.probabilities)

    def sample(self, generator: np.random.Generator, size: int) -> Array:
        if self.is_uniform:
            return generator.integers(0, self.count, size)
        return self._pick(generator.random(size))

    def quantile(self, masses: npt.ArrayLike) -> Array:
        return self._pick(_below_one(masses))

    def _pick(self, masses: Array) -> Array:
        places: Array = np.searchsorted(self._cumulative, masses, side="right")
        return places

    def central_interval(self, mass: float) -> tuple[float, float]:
        return 0.0, float(self.count - 1)

    def probability(self, value: int) -> float:
        return self.probabilities[value] if 0 <= value < self.count else 0.0

    def problem(self) -> str | None:
        if not self.probabilities:
            return "nothing to choose from; give at least one option"
        if not all(math.isfinite(mass) and mass >= 0 for mass in self.probabilities):
            return "a probability is negative or no finite number; give numbers from 0 to 1"
        if abs(math.fsum(self.probabilities) - 1.0) > 1e-6:
            return f"the probabilities sum to {math.fsum(self.probabilities):g}; make them sum to 1"
        return None

    def describe(self) -> str:
        if self.is_uniform:
            return f"choice({self.count})"
        return f"pchoice({', '.join(f'{mass:.12g}' for mass in self.probabilities)})"


def _below_one(masses: npt.ArrayLike) -> Array:
    """Masses as an array; 1 becomes the float below it, which belongs to the last value."""
    capped: Array = np.minimum(np.asarray(masses, dtype=float), 1 - np.finfo(float).epsneg)
    return capped
