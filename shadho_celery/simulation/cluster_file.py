"""Cluster file of the simulator: a TOML file that describes compute classes, families of trials, and changes."""

from __future__ import annotations

import keyword
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from msgspec import Meta, Struct, field
from msgspec.structs import asdict
from numpy.typing import NDArray

from shadho_celery.core.checks import as_record, misfit_at, plain, short
from shadho_celery.core.files import read_toml
from shadho_celery.core.trial import MAX_SLOTS, Price
from shadho_celery.errors import UsageError
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.simulation.example import MOST_TRIALS
from shadho_celery.simulation.executor import LEASE_SECONDS, Change, Stay
from shadho_celery.simulation.params import PARAMS, Choice, Expression, Param, Value, by_name
from shadho_celery.space.split import DEFAULT_MAX_SUBSPACES

GIB = 2**30

#: maximum values of numbers in a file, set by memory, time and the precision of a float
LARGEST, LARGEST_SEED, MOST_WORKERS = 1e15, 2**64, 10**6

#: maximum number of reports of a trial, each of which takes the simulator a moment
MOST_STEPS = 1000

#: minimum time of a trial, without which a simulation would not advance
LEAST_SECONDS = 1e-3

#: number of random draws of a family's params for which its expressions must give valid seconds
CHECKED_DRAWS = 100

_FORM = "--example shows the form"

_L = TypeVar("_L")
_Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
_Signed = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
_Part = Annotated[float, Meta(ge=0, le=1)]
_Count = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
_Seconds = Annotated[float, Meta(ge=LEAST_SECONDS, le=LARGEST)]
#: times of workers: with shorter ones a simulation would hardly advance
_LongSeconds = Annotated[float, Meta(ge=1, le=LARGEST)]


class Law(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="law", tag=str.lower):
    """Distribution of random factors. The class's name in lower case, or its tag, is the value of `law` in the file."""

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Return random factors, shape (size,). Their mean is 1, except for `Slow`."""
        raise NotImplementedError


class Constant(Law, frozen=True, kw_only=True):
    """No random variation: each factor is 1."""

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.ones(size)


class Uniform(Law, frozen=True, kw_only=True):
    """Uniform distribution between two bounds."""

    low: _Amount
    high: _Amount

    def __post_init__(self) -> None:
        if not self.low <= self.high != 0:
            raise misfit_at("high", "it must be above 0 and not below low")

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return generator.uniform(self.low, self.high, size) * float(2 / (self.low + self.high))


class LogNormal(Law, frozen=True, kw_only=True):
    """Log-normal distribution. `sigma` is the standard deviation of the logarithm."""

    # For greater values, nearly all of the mean comes from factors that are too rare to be drawn.
    sigma: Annotated[float, Meta(ge=0, le=5)]

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return generator.lognormal(-(self.sigma**2) / 2, self.sigma, size)


class Samples(Law, frozen=True, kw_only=True):
    """Uniform choice of one of the values, divided by their mean."""

    values: Annotated[list[_Amount], Meta(description="write values = [1.0, 2.0]")]

    def __post_init__(self) -> None:
        if not sum(self.values) > 0:
            raise misfit_at("values", "at least one sample above 0 is needed")

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        samples = np.asarray(self.values, dtype=float)
        return generator.choice(samples / samples.mean(), size)


class NoStraggler(Constant, frozen=True, kw_only=True, tag="none"):
    """No stragglers: each factor is 1."""


class HalfNormal(Law, frozen=True, kw_only=True):
    """Distribution of (1 + |N(0, scale)|) divided by its mean."""

    scale: _Amount

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        mean = 1.0 + self.scale * math.sqrt(2 / math.pi)
        return (1.0 + np.abs(generator.normal(0.0, self.scale, size))) / mean


class Slow(Law, frozen=True, kw_only=True):
    """Slowdown by `factor` with this probability, else a factor of 1."""

    probability: _Part
    factor: Annotated[float, Meta(ge=1, le=LARGEST, description="a straggler takes longer")]

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        return np.where(generator.random(size) < self.probability, self.factor, 1.0)


_SIZES: Mapping[str, type[Law]] = by_name(Constant, Uniform, LogNormal, Samples)
_STRAGGLERS: Mapping[str, type[Law]] = by_name(NoStraggler, HalfNormal, Slow)


class _Table(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables in the file: unknown keys are refused."""


class _Loss(_Table, frozen=True, kw_only=True):
    #: least loss of a family, and the range of its losses
    best: _Signed = 0.0
    spread: _Amount = 1.0


class Family(_Loss, frozen=True, kw_only=True):
    """A family of similar trials, which is one subspace of the search."""

    #: mean seconds of a trial by class; an expression computes them from the trial's params
    seconds: Mapping[str, float | Expression]
    #: params of a trial besides the one on which its loss depends
    params: Mapping[str, Param] = {}
    #: share of the trials, relative to the other families
    share: float = 1.0
    failure_rate: float = 0.0
    #: peak bytes of a trial; 0 to ignore memory
    memory: int = 0
    #: number of slots of one worker that a trial takes; an expression computes it from the trial's params. A list has
    #: the numbers among which the study chooses
    gpus: int | Expression | Sequence[int] = 1

    def width(self, values: Mapping[str, Value]) -> float:
        """Return the slots of a trial with these values of its params. Raises ValueError for an impossible expression.

        A scheduler refuses what is not a whole number.
        """
        assert isinstance(self.gpus, (Expression, int))
        return self.gpus(values) if isinstance(self.gpus, Expression) else self.gpus

    def seconds_on(self, compute_class: str, values: Mapping[str, Value]) -> float:
        """Return the mean seconds of a trial with these values of its params. Raises ValueError for impossible ones."""
        seconds = self.seconds[compute_class]
        return _computed(seconds, values) if isinstance(seconds, Expression) else seconds

    def values(self, masses: Sequence[float]) -> dict[str, Value]:
        """Return the values of the params at these quantiles of their distributions, one for each param."""
        return {name: law.quantile(mass) for (name, law), mass in zip(self.params.items(), masses, strict=True)}


class _Bounds(Struct, frozen=True, kw_only=True):
    """Settings at the top of the file that need no conversion."""

    seconds: Annotated[float, Meta(gt=0, le=LARGEST)] | None = None
    trials: Annotated[int, Meta(ge=1, le=MOST_TRIALS)] | None = None
    target: _Signed | None = None
    seed: Annotated[int, Meta(ge=0)] = 0
    lease_seconds: _Amount = LEASE_SECONDS
    #: where promoted trials find the checkpoints of the trials that they continue
    checkpoints: Literal["none", "machine", "shared"] = "none"
    #: seconds to read the checkpoint of another machine
    handover_seconds: _Amount = 0.0
    #: seconds of work between two checkpoints, from which a trial continues after its worker has ended; None if it
    #: begins again
    checkpoint_seconds: _Amount | None = None
    #: number of steps after each of which a trial reports, as a training does after its epochs; 0 for no reports
    steps: Annotated[int, Meta(ge=0, le=MOST_STEPS)] = 0
    #: budgets of the trials, as in ``STUDY["fidelity"]``; None for all of the fidelity
    fidelity: Mapping[str, Any] | None = None


class Cluster(_Bounds, frozen=True, kw_only=True):
    """A simulated cluster and its trials: classes of workers and their changes, and families of trials."""

    #: slots by class at the start, the strongest class first
    slots: Mapping[str, int]
    #: number of slots of a worker by class, if it is not 1 everywhere
    per_worker: Mapping[str, int] = {}
    #: bytes by class; 0 to ignore memory
    memory: Mapping[str, int]
    families: Mapping[str, Family]
    #: money that a slot costs an hour, by class; None if it is not known
    prices: Mapping[str, float | None] = {}
    #: seconds before a trial starts its work, by class
    startup: Mapping[str, float] = {}
    #: how long workers stay, by class
    stays: Mapping[str, Stay] = {}
    size: Law = Constant()
    straggler: Law = NoStraggler()
    changes: Sequence[Change] = ()

    @property
    def shares(self) -> dict[str, float]:
        """Shares of the trials by family, relative to each other."""
        return {name: family.share for name, family in self.families.items()}

    @property
    def widths(self) -> list[int]:
        """Numbers of slots among which the study chooses for a trial; [] if it does not."""
        gpus = next(iter(self.families.values())).gpus
        return [*gpus] if isinstance(gpus, Sequence) else []

    @property
    def takes_gpus(self) -> bool:
        """True if a trial may take several slots of one worker."""
        return bool(self.per_worker) or any(family.gpus != 1 for family in self.families.values())


class _Top(_Bounds, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file, before its tables are checked."""

    classes: dict[str, object]
    families: dict[str, object]
    failure_rate: _Part = 0.0
    size: object = field(default_factory=lambda: {"law": "constant"})
    straggler: object = field(default_factory=lambda: {"law": "none"})
    changes: Annotated[list[object], Meta(description="write [[changes]] above each")] = []

    def __post_init__(self) -> None:
        # msgspec's own bounds end at 2**63.
        if self.seed > LARGEST_SEED:
            raise misfit_at("seed", "it must be at most 2**64")


class _Class(_Table, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    memory_gib: _Amount = 0.0
    startup_seconds: _Amount = 0.0
    price: Price | None = None
    worker_startup_seconds: _Amount = 0.0
    preemption_seconds: _LongSeconds | None = None
    notice: bool = True
    for_seconds: _LongSeconds | None = None
    return_seconds: _Amount | None = None

    def __post_init__(self) -> None:
        leaves = self.preemption_seconds is not None or self.for_seconds is not None
        if self.return_seconds is not None and not leaves:
            raise misfit_at("return_seconds", "its workers stay; give preemption_seconds or for_seconds, too")
        if not self.notice and self.preemption_seconds is None:
            raise misfit_at("notice", "its workers are not preempted; give preemption_seconds, too")

    @property
    def stay(self) -> Stay:
        """The keys of a class that say how long its workers stay, as one record."""
        return Stay(
            startup_seconds=self.worker_startup_seconds,
            preemption_seconds=self.preemption_seconds,
            notice=self.notice,
            for_seconds=self.for_seconds,
            return_seconds=self.return_seconds,
        )


class _Family(_Table, frozen=True, kw_only=True):
    seconds: dict[str, object]
    params: dict[str, object] = {}
    share: Annotated[float, Meta(ge=1e-6, le=1e6)] = 1.0
    memory_gib: _Amount = 0.0
    failure_rate: _Part | None = None
    gpus: object = 1
    loss: object = field(default_factory=dict)


class _Named(Struct, frozen=True, kw_only=True):
    law: object


class _Change(_Table, frozen=True, kw_only=True):
    at: _Amount
    workers: Annotated[int, Meta(ge=-MOST_WORKERS, le=MOST_WORKERS)]
    compute_class: object = field(name="class")


def load(path: Path, instead: Mapping[str, object] | None = None) -> Cluster:
    """Return the cluster described in a file. Settings in `instead` replace those at the top of the file.

    Raises UsageError with file, key and remedy if the file is not valid.
    """
    remedy = "--example prints a cluster file"
    return read_toml(path, str(path), lambda content: parse({**content, **(instead or {})}), remedy)


def parse(description: Mapping[str, object]) -> Cluster:
    """Return the cluster that a file's content describes. Raises UsageError with the key of an invalid value."""
    top = as_record(_with_whole_numbers(plain(description)), _Top, form=_FORM)
    classes = {name: as_record(value, _Class, f"classes.{name}", _FORM) for name, value in top.classes.items()}
    slots = {name: each.workers * each.slots for name, each in classes.items()}
    per_worker = {name: each.slots for name, each in classes.items()}
    changes = [_change(place, value, per_worker) for place, value in enumerate(top.changes)]
    if not sum(slots.values()) and not any(change.slots > 0 for change in changes):
        raise UsageError("classes: there are no workers; give a class workers = 1 or more")
    families = {name: _family(name, value, per_worker, top.failure_rate) for name, value in top.families.items()}
    if len({tuple(each.gpus) if isinstance(each.gpus, list) else None for each in families.values()}) > 1:
        raise UsageError("families: with a list, gpus is that of the whole study; give all families the same list")
    if not families:
        raise UsageError(f"families: at least one is needed; {_FORM}")
    if len(families) > DEFAULT_MAX_SUBSPACES:
        raise UsageError(
            f"families: a search has at most {DEFAULT_MAX_SUBSPACES} subspaces, but there are {len(families)} families"
        )
    if top.fidelity is not None:
        Ladder.of(top.fidelity, "fidelity")
    if top.checkpoint_seconds is not None and top.checkpoints != "shared":
        raise UsageError(
            'checkpoint_seconds: a trial goes on elsewhere only from a shared checkpoint; give checkpoints = "shared"'
        )
    if top.seconds is None and top.trials is None:
        raise UsageError("seconds: a simulation needs an end; give seconds or trials")
    return Cluster(
        slots=slots,
        per_worker=per_worker if {*per_worker.values()} != {1} else {},
        memory={name: int(each.memory_gib * GIB) for name, each in classes.items()},
        prices={name: each.price for name, each in classes.items()},
        startup={name: each.startup_seconds for name, each in classes.items()},
        stays={name: each.stay for name, each in classes.items()},
        families=families,
        size=_law("size", top.size, _SIZES),
        straggler=_law("straggler", top.straggler, _STRAGGLERS),
        changes=changes,
        **{name: getattr(top, name) for name in _Bounds.__struct_fields__},
    )


def _with_whole_numbers(value: object) -> object:
    """Convert whole numbers to ints, because msgspec would refuse 2.0 workers."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _family(name: str, value: object, classes: Mapping[str, int], rate: float) -> Family:
    """Return a family. `classes` has the number of slots of a worker of each class."""
    table = as_record(value, _Family, f"families.{name}", _FORM)
    where = f"families.{name}.seconds"
    if unknown := [key for key in table.seconds if key not in classes]:
        raise UsageError(f"{where}.{unknown[0]}: there is no such key; known are {', '.join(classes)}")
    if missing := [key for key in classes if key not in table.seconds]:
        raise UsageError(f"{where}.{missing[0]}: it is missing; {_FORM}")
    params = {key: _param(f"families.{name}.params.{key}", key, law) for key, law in table.params.items()}
    gpus = _gpus(f"families.{name}.gpus", table.gpus, params, max(classes.values(), default=1))
    named: Mapping[str, Param] = params
    if isinstance(gpus, list):
        # Expressions may name the chosen number.
        named = {"gpus": Choice(options=[*map(float, gpus)]), **params}
    return Family(
        seconds={key: _seconds(f"{where}.{key}", table.seconds[key], named) for key in classes},
        params=params,
        share=table.share,
        failure_rate=rate if table.failure_rate is None else table.failure_rate,
        memory=int(table.memory_gib * GIB),
        gpus=gpus,
        **asdict(as_record(table.loss, _Loss, f"families.{name}.loss", _FORM)),
    )


def _param(where: str, name: str, value: object) -> Param:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise UsageError(f"{where}: expressions cannot name {short(name, 60)}; use letters, digits and underscores")
    return _law(where, value, PARAMS)


def _seconds(where: str, value: object, params: Mapping[str, Param]) -> float | Expression:
    """Return a number of seconds, or an expression that gives valid seconds for random draws of the params."""
    if not isinstance(value, str) or not params:
        return as_record(value, _Seconds, where, _FORM)
    return _expression(where, value, params, _computed)


def _gpus(where: str, value: object, params: Mapping[str, Param], most: int) -> int | Expression | list[int]:
    """Return a number of slots, from 1 to `most`, or an expression that gives one for random draws of the params, or a
    list of such numbers.
    """
    if isinstance(value, list) and value:
        return sorted({_number_of_slots(f"{where}.{place}", each, most) for place, each in enumerate(value)})
    if not isinstance(value, str) or not params:
        return _number_of_slots(where, value, most)

    def check(expression: Callable[[Mapping[str, Value]], float], values: Mapping[str, Value]) -> None:
        if not (gpus := expression(values)).is_integer() or not 1 <= gpus <= most:
            raise ValueError(_no_slots(gpus, most))

    return _expression(where, value, params, check)


def _number_of_slots(where: str, value: object, most: int) -> int:
    number = as_record(value, _Count, where, _FORM)
    if number > most:
        raise UsageError(f"{where}: {number} is refused: {_no_slots(number, most)}; {_FORM}")
    return number


def _no_slots(gpus: float, most: int) -> str:
    return f"it gives {gpus:g}, but a trial takes 1 to {most} slots, those of the largest worker"


def _expression(where: str, text: str, params: Mapping[str, Param], check: Callable[..., object]) -> Expression:
    """Return an expression for which `check` raises no ValueError with random draws of the params."""
    generator = np.random.default_rng(0)
    try:
        expression = Expression(text, params)
        for _ in range(CHECKED_DRAWS):
            values = {name: law.quantile(float(generator.random())) for name, law in params.items()}
            check(expression, values)
    except ValueError as error:
        raise UsageError(f"{where}: {short(text, 60)} is refused: {error}; {_FORM}") from None
    return expression


def _computed(expression: Expression, values: Mapping[str, Value]) -> float:
    """Return the seconds that an expression gives. Raises ValueError if they are too small or too great."""
    seconds = expression(values)
    if not LEAST_SECONDS <= seconds <= LARGEST:
        raise ValueError(f"it gives {seconds:g} for {dict(values)}, but must give {LEAST_SECONDS:g} to {LARGEST:g}")
    return seconds


def _law(where: str, value: object, known: Mapping[str, type[_L]]) -> _L:
    name = as_record(value, _Named, where, _FORM).law
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"{where}.law: there is no law {short(name, 60)}; choose one of {', '.join(known)}")
    return as_record(value, known[name], where, _FORM)


def _change(place: int, value: object, per_worker: Mapping[str, int]) -> Change:
    table = as_record(value, _Change, f"changes.{place}", _FORM)
    name = table.compute_class
    if not isinstance(name, str) or name not in per_worker:
        known = ", ".join(per_worker)
        raise UsageError(f"changes.{place}.class: there is no class {short(name, 60)}; there are {known}")
    return Change(at=table.at, compute_class=name, slots=table.workers * per_worker[name])
