"""Params of a simulated family: the distributions from which a cluster file draws them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from hyperopt import hp
from msgspec import Meta, Struct

from shadho_celery.core.checks import misfit_at
from shadho_celery.simulation.expression import Value

#: bound on the ends of a distribution
LARGEST = 1e15

_End = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Whole = Annotated[int, Meta(ge=-(2**31), le=2**31)]


class Param(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag=str.lower):
    """Distribution of one param, with its name in the file."""

    def node(self, label: str) -> Any:
        """Return hyperopt's node of the distribution."""
        raise NotImplementedError

    def quantile(self, mass: float) -> Value:
        """Return the value, as expressions see it, of a quantile from 0 to 1."""
        raise NotImplementedError

    def value(self, drawn: float) -> Value:
        """Convert a trial's raw draw to the value that expressions see."""
        return drawn


class Uniform(Param, frozen=True, kw_only=True):
    """Any number between two ends."""

    low: _End
    high: _End

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise misfit_at("high", "it must be above low")

    def node(self, label: str) -> Any:
        return hp.uniform(label, self.low, self.high)

    def quantile(self, mass: float) -> Value:
        return self.low + mass * (self.high - self.low)


class LogUniform(Uniform, frozen=True, kw_only=True):
    """Any number between two ends above 0, with a uniform logarithm. hyperopt's takes the logarithms of the ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low > 0:
            raise misfit_at("low", "it must be above 0: the ends are values, not logarithms as in hyperopt")

    def node(self, label: str) -> Any:
        return hp.loguniform(label, math.log(self.low), math.log(self.high))

    def quantile(self, mass: float) -> Value:
        return float(self.low * (self.high / self.low) ** mass)


class Integer(Param, frozen=True, kw_only=True):
    """A whole number from `low` to `high`, both included."""

    low: _Whole
    high: _Whole

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise misfit_at("high", "it must be at least low")

    def node(self, label: str) -> Any:
        return hp.randint(label, self.low, self.high + 1)

    def quantile(self, mass: float) -> Value:
        return min(self.low + int(mass * (self.high + 1 - self.low)), self.high)


class Choice(Param, frozen=True, kw_only=True):
    """One of the options, which are texts or numbers."""

    options: Annotated[list[str | float], Meta(min_length=1, max_length=1000, description='write options = ["a", "b"]')]

    def node(self, label: str) -> Any:
        return hp.choice(label, self.options)

    def quantile(self, mass: float) -> Value:
        return self.options[min(int(mass * len(self.options)), len(self.options) - 1)]

    def value(self, drawn: float) -> Value:
        return self.options[int(drawn)]


#: distributions by name
PARAMS: Mapping[str, type[Param]] = {
    str(law.__struct_config__.tag): law for law in (Uniform, LogUniform, Integer, Choice)
}
