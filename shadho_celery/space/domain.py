"""What every domain can do: draw, be mapped onto [0, 1], be counted, be described, and say what is wrong with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from shadho_celery.errors import SpaceError

Array = npt.NDArray[Any]


def number_text(value: float) -> str:
    """The shortest exact text of a number: 5.0 is "5", 0.1 is "0.1"."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))


@dataclass(frozen=True)
class Domain(ABC):
    """One leaf's set of values and the law its values follow; values are hyperopt's raw draws (indexes for choices)."""

    #: hyperopt's name of the law
    law: ClassVar[str] = ""
    #: whether values lie on an axis (False: they are option indexes without an order)
    is_numeric: ClassVar[bool] = True

    @abstractmethod
    def sample(self, generator: np.random.Generator, size: int) -> Array:
        """Draw `size` values, shape (size,), int64 or float64, from the law."""

    @abstractmethod
    def quantile(self, masses: npt.ArrayLike) -> Array:
        """The values below which the law has `masses`, each in [0, 1]: turns quasi-random points into draws."""

    @abstractmethod
    def central_interval(self, mass: float) -> tuple[float, float]:
        """The bounds that hold `mass` of the unscaled variable's probability, equal tails cut; 0 < mass < 1."""

    @abstractmethod
    def cardinality(self, mass: float) -> int | None:
        """How many values there are, a grid's within its central interval; None where they count as a continuum."""

    @abstractmethod
    def to_unit(self, values: npt.ArrayLike) -> Array:
        """Values as features in [0, 1], linear in the unscaled variable; an index i of n becomes i / (n - 1)."""

    @abstractmethod
    def from_unit(self, units: npt.ArrayLike) -> Array:
        """The inverse of `to_unit`, on the grid where there is one."""

    @abstractmethod
    def contains(self, value: object) -> bool:
        """Whether the value could have been drawn, by its type and bounds; one between two grid points passes."""

    @abstractmethod
    def problem(self) -> str | None:
        """What is wrong with the parameters and the remedy, or None."""

    def hint(self) -> str | None:
        """A warning where the parameters look mistaken but can be searched, or None."""
        return None

    def describe(self) -> str:
        """A text such as "uniform(-5, 15)", the same in every process, to compare a stored space with this one."""
        return f"{self.law}({', '.join(number_text(getattr(self, field.name)) for field in fields(self))})"


def validate(label: str, domain: Domain) -> None:
    """Raise SpaceError, naming the label, the cause and the remedy, if the domain cannot be searched."""
    if problem := domain.problem():
        raise SpaceError(f"Hyperparameter {label!r}: {problem}.")
