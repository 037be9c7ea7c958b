"""Params of a simulated family: the laws by which a cluster file lets them be drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from hyperopt import hp
from msgspec import Meta, Struct

from shadho_celery.core.checks import misfit_at
from shadho_celery.simulation.expression import Value

#: bound on the ends of a law
LARGEST = 1e15

_End = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Whole = Annotated[int, Meta(ge=-(2**31), le=2**31)]


class Param(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag=str.lower):
    """Law of one param, by its name in the file."""

    def node(self, label: str) -> Any:
        """Return hyperopt's node of the law."""
        raise NotImplementedError

    def quantile(self, mass: float) -> Value:
        """Return the value, as expressions see it, below which the law has this mass, from 0 to 1."""
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
    """Any number between two ends above 0, its logarithm uniform; hyperopt's has the ends' logarithms."""

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
            raise misfit_at("high", "it must not be below low")

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


#: laws by name
PARAMS: Mapping[str, type[Param]] = {
    str(law.__struct_config__.tag): law for law in (Uniform, LogUniform, Integer, Choice)
}
