"""Cluster file of the simulator: a TOML file that describes classes, families of trials, and what happens to them."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from shadho_celery.core.checks import as_record, misfit_at, short
from shadho_celery.errors import UsageError
from shadho_celery.executors.simulated import LEASE_SECONDS, Change
from shadho_celery.space.split import DEFAULT_MAX_SUBSPACES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

GIB = 2**30

#: bounds on what a file may say: beyond them memory, time or the precision of a float would run out
LARGEST, MOST_WORKERS, MOST_TRIALS = 1e15, 10**6, 10**9

#: a trial takes so long at least: did it take no time, a simulation would not get on
LEAST_SECONDS = 1e-3

_FORM = "--example shows the form"

_Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
_Any = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Part = Annotated[float, Meta(ge=0, le=1)]
_Seconds = Annotated[float, Meta(ge=LEAST_SECONDS, le=LARGEST)]


class Law(Protocol):
    """A law of random factors."""

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Return factors, shape (size,); those of a size law, and of a half-normal straggler, have a mean of 1."""


class _Law(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag=str.lower):
    """A law by its name in the file."""


class Constant(_Law, frozen=True, kw_only=True):
    """All trials alike."""

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.ones(size)


class Uniform(_Law, frozen=True, kw_only=True):
    """Evenly between two bounds."""

    low: _Amount
    high: _Amount

    def __post_init__(self) -> None:
        if not self.low <= self.high != 0:
            raise misfit_at("high", "it must be above 0 and not below low")

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return generator.uniform(self.low, self.high, size) * float(2 / (self.low + self.high))


class LogNormal(_Law, frozen=True, kw_only=True):
    """Log-normal, of this standard deviation of the logarithm."""

    # Beyond 5 nearly all of the mean comes from trials too rare to be drawn.
    sigma: Annotated[float, Meta(ge=0, le=5)]

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return generator.lognormal(-(self.sigma**2) / 2, self.sigma, size)


class Samples(_Law, frozen=True, kw_only=True):
    """One of these, as likely as any other."""

    values: list[_Amount]

    def __post_init__(self) -> None:
        if not sum(self.values) > 0:
            raise misfit_at("values", "at least one sample above 0 is needed")

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        samples = np.asarray(self.values, dtype=float)
        return generator.choice(samples / samples.mean(), size)


class NoStraggler(_Law, frozen=True, kw_only=True, tag="none"):
    """No trial is slowed down."""

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.ones(size)


class HalfNormal(_Law, frozen=True, kw_only=True):
    """(1 + |N(0, scale)|) over its mean."""

    scale: _Amount

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        mean = 1.0 + self.scale * math.sqrt(2 / math.pi)
        return (1.0 + np.abs(generator.normal(0.0, self.scale, size))) / mean


class Slow(_Law, frozen=True, kw_only=True):
    """By this factor slower, with this probability."""

    probability: _Part
    factor: Annotated[float, Meta(ge=1, le=LARGEST)]

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.where(generator.random(size) < self.probability, self.factor, 1.0)


_SIZES: Mapping[str, type[_Law]] = {
    "constant": Constant,
    "uniform": Uniform,
    "lognormal": LogNormal,
    "samples": Samples,
}
_STRAGGLERS: Mapping[str, type[_Law]] = {"none": NoStraggler, "halfnormal": HalfNormal, "slow": Slow}


class Family(Struct, frozen=True, kw_only=True):
    """Trials that are alike: one subspace."""

    #: mean seconds of a trial by class
    seconds: Mapping[str, float]
    #: its part of the trials, beside the other families'
    share: float = 1.0
    failure_rate: float = 0.0
    #: peak bytes of a trial; 0 where it does not matter
    memory: int = 0
    best: float = 0.0
    spread: float = 1.0


class Cluster(Struct, frozen=True, kw_only=True):
    """Classes of workers, families of trials, and what happens to them."""

    #: slots by class at the start, the strongest class first
    slots: Mapping[str, int]
    #: bytes by class; 0 where they do not matter
    memory: Mapping[str, int]
    families: Mapping[str, Family]
    size: Law = Constant()
    straggler: Law = NoStraggler()
    changes: Sequence[Change] = ()
    seconds: float | None = None
    trials: int | None = None
    target: float | None = None
    seed: int = 0
    lease_seconds: float = LEASE_SECONDS


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class _Top(_Table, frozen=True, kw_only=True):
    classes: dict[str, Any]
    families: dict[str, Any]
    seconds: Annotated[float, Meta(gt=0, le=LARGEST)] | None = None
    trials: Annotated[int, Meta(ge=1, le=MOST_TRIALS)] | None = None
    target: _Any | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    failure_rate: _Part = 0.0
    lease_seconds: _Amount = LEASE_SECONDS
    size: Any = field(default_factory=lambda: {"law": "constant"})
    straggler: Any = field(default_factory=lambda: {"law": "none"})
    changes: list[Any] = []


class _Class(_Table, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
    memory_gib: _Amount = 0.0


class _Loss(_Table, frozen=True, kw_only=True):
    best: _Any = 0.0
    spread: _Amount = 1.0


class _Family(_Table, frozen=True, kw_only=True):
    seconds: dict[str, Any]
    share: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    memory_gib: _Amount = 0.0
    failure_rate: _Part | None = None
    loss: _Loss = _Loss()


class _Named(Struct, frozen=True, kw_only=True):
    law: Any


class _Change(_Table, frozen=True, kw_only=True):
    at: _Amount
    workers: Annotated[int, Meta(ge=-MOST_WORKERS, le=MOST_WORKERS)]
    compute_class: Any = field(name="class")


def example() -> str:
    """Return a cluster file to begin with, in which every key is explained."""
    return (Path(__file__).parent / "example.toml").read_text(encoding="utf-8")


def load(path: Path, instead: Mapping[str, Any] | None = None) -> Cluster:
    """Return the cluster described in a file, `instead` taking the place of what it says at the top.

    Raises UsageError, naming file, key and remedy, where it is not one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(f"{path} cannot be read: {reason}; --example prints a cluster file to begin with") from None
    try:
        return parse({**tomllib.loads(text), **(instead or {})})
    except (ValueError, RecursionError) as error:  # numbers of too many digits, lists in lists in lists
        raise UsageError(f"{path} is no TOML: {error}") from None
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None


def parse(description: Mapping[str, Any]) -> Cluster:
    """Return the cluster that a file's content describes. Raises UsageError, naming the key, where it makes no sense."""
    top = as_record(_with_whole_numbers(dict(description)), _Top, form=_FORM)
    classes = {name: as_record(value, _Class, f"classes.{name}", _FORM) for name, value in top.classes.items()}
    slots = {name: each.workers for name, each in classes.items()}
    changes = [_change(place, value, slots) for place, value in enumerate(top.changes)]
    if not sum(slots.values()) and not any(change.slots > 0 for change in changes):
        raise UsageError("classes: there are no workers; give a class workers = 1 or more")
    families = {name: _family(name, value, list(slots), top.failure_rate) for name, value in top.families.items()}
    if not families:
        raise UsageError(f"families: at least one is needed; {_FORM}")
    if len(families) > DEFAULT_MAX_SUBSPACES:
        raise UsageError(f"families: a search tells {DEFAULT_MAX_SUBSPACES} apart at most, and not {len(families)}")
    if top.seconds is None and top.trials is None:
        raise UsageError("seconds: a simulation needs an end; give seconds or trials")
    return Cluster(
        slots=slots,
        memory={name: int(each.memory_gib * GIB) for name, each in classes.items()},
        families=families,
        size=_law("size", top.size, _SIZES),
        straggler=_law("straggler", top.straggler, _STRAGGLERS),
        changes=changes,
        seconds=top.seconds,
        trials=top.trials,
        target=top.target,
        seed=top.seed,
        lease_seconds=top.lease_seconds,
    )


def _with_whole_numbers(value: Any) -> Any:
    """Return a file's content with ints for all whole numbers: 2.0 workers are two."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _family(name: str, value: object, classes: Sequence[str], rate: float) -> Family:
    table = as_record(value, _Family, f"families.{name}", _FORM)
    where = f"families.{name}.seconds"
    if unknown := [key for key in table.seconds if key not in classes]:
        raise UsageError(f"{where}.{unknown[0]}: there is no such key; known are {', '.join(classes)}")
    if missing := [key for key in classes if key not in table.seconds]:
        raise UsageError(f"{where}.{missing[0]}: it is missing; {_FORM}")
    return Family(
        seconds={key: as_record(table.seconds[key], _Seconds, f"{where}.{key}") for key in classes},
        share=table.share,
        failure_rate=rate if table.failure_rate is None else table.failure_rate,
        memory=int(table.memory_gib * GIB),
        best=table.loss.best,
        spread=table.loss.spread,
    )


def _law(where: str, value: object, known: Mapping[str, type[_Law]]) -> Law:
    name = as_record(value, _Named, where, _FORM).law
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"{where}.law: there is no law {short(name, 60)}; choose one of {', '.join(known)}")
    law: Law = as_record(value, known[name], where, _FORM)  # type: ignore[assignment]
    return law


def _change(place: int, value: object, slots: Mapping[str, int]) -> Change:
    table = as_record(value, _Change, f"changes.{place}", _FORM)
    name = table.compute_class
    if not isinstance(name, str) or name not in slots:
        raise UsageError(f"changes.{place}.class: there is no class {short(name, 60)}; there are {', '.join(slots)}")
    return Change(at=table.at, compute_class=name, slots=table.workers)
