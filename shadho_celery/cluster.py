"""Reads the description of a cluster for the simulator: a TOML file."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shadho_celery.errors import UsageError
from shadho_celery.executors.simulated import LEASE_SECONDS, Change
from shadho_celery.space.split import DEFAULT_MAX_SUBSPACES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

EXAMPLE = """\
# The end: after this many simulated seconds or trials (at least one of the two), or at a loss.
seconds = 10800
# trials = 1000
# target = 0.001
seed = 0
failure_rate = 0.02            # part of the trials that fail, after all their time
lease_seconds = 30             # after which a dead worker's trial is known to be lost

[classes.gpu_large]            # the strongest first
workers = 4                    # each has one slot
memory_gib = 40                # optional

[classes.gpu_small]
workers = 8
memory_gib = 11

[classes.cpu]
workers = 20

[families.network]             # one subspace a family
seconds = { gpu_large = 40, gpu_small = 90, cpu = 1200 }     # mean seconds of a trial
share = 2                      # optional: its part of the trials beside the other families'; 1 by default
memory_gib = 6                 # optional: a trial fails on a class that has less
loss = { best = 0.0, spread = 1.0 }    # optional: best + spread * (x - 0.3)^2 for x drawn from [0, 1]

[families.forest]
seconds = { gpu_large = 60, gpu_small = 70, cpu = 90 }
failure_rate = 0.1             # optional: instead of the cluster's
loss = { best = 0.05, spread = 0.5 }

[size]                         # optional: how trials of one family differ; scaled to a mean of 1
law = "lognormal"              # constant; uniform (low, high); lognormal (sigma); samples (values)
sigma = 0.5

[straggler]                    # optional: what slows a trial down by chance
law = "halfnormal"             # none; halfnormal (scale): (1 + |N(0, scale)|) / its mean; slow (probability, factor)
scale = 0.5

[[changes]]                    # optional: workers that come, or die with what they run
at = 3600
class = "cpu"
workers = -10

[[changes]]
at = 5400
class = "cpu"
workers = 15
"""

#: what may stand in each table, and in each law
_TOP = (
    "seconds", "trials", "target", "seed", "failure_rate", "lease_seconds",
    "classes", "families", "size", "straggler", "changes",
)  # fmt: skip
_SIZES = {"constant": (), "uniform": ("low", "high"), "lognormal": ("sigma",), "samples": ("values",)}
_STRAGGLERS = {"none": (), "halfnormal": ("scale",), "slow": ("probability", "factor")}

GIB = 2**30

#: bounds on what a file may say: beyond them memory, time or the precision of a float would run out
LARGEST, MOST_WORKERS, MOST_TRIALS = 1e15, 10**6, 10**9

#: a trial takes so long at least: did it take no time, a simulation would not get on
LEAST_SECONDS = 1e-3

#: of a law's numbers; beyond such a sigma nearly all of the mean comes from trials too rare to be drawn
_MOST = {"probability": 1.0, "sigma": 5.0}


@dataclass(frozen=True, kw_only=True)
class Family:
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


@dataclass(frozen=True, kw_only=True)
class Law:
    """A law of random factors, by name, with its numbers."""

    name: str
    values: Mapping[str, Any]

    def draw(self, generator: np.random.Generator, size: int) -> NDArray[np.float64]:
        """Factors, shape (size,)."""
        factors: NDArray[np.float64] = self._draw(generator, size)
        return factors

    def _draw(self, generator: np.random.Generator, size: int) -> Any:
        value = self.values
        if self.name == "uniform":
            return generator.uniform(value["low"], value["high"], size) * float(2 / (value["low"] + value["high"]))
        if self.name == "lognormal":
            return generator.lognormal(-(value["sigma"] ** 2) / 2, value["sigma"], size)
        if self.name == "samples":
            samples = np.asarray(value["values"], dtype=float)
            return generator.choice(samples / samples.mean(), size)
        if self.name == "halfnormal":
            mean = 1.0 + value["scale"] * math.sqrt(2 / math.pi)
            return (1.0 + np.abs(generator.normal(0.0, value["scale"], size))) / mean
        if self.name == "slow":
            return np.where(generator.random(size) < value["probability"], value["factor"], 1.0)
        return np.ones(size)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Classes of workers, families of trials, and what happens to them."""

    #: slots by class at the start, the strongest class first
    slots: Mapping[str, int]
    #: bytes by class; 0 where they do not matter
    memory: Mapping[str, int]
    families: Mapping[str, Family]
    size: Law
    straggler: Law
    changes: Sequence[Change] = ()
    seconds: float | None = None
    trials: int | None = None
    target: float | None = None
    seed: int = 0
    lease_seconds: float = LEASE_SECONDS


def load(path: Path, instead: Mapping[str, Any] | None = None) -> Cluster:
    """The cluster described in a file, `instead` taking the place of what it says at the top.

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
    """The cluster that a file's content describes. Raises UsageError, naming the key, where it makes no sense."""
    top = _Table("", description, _TOP)
    classes = {
        name: _Table(f"classes.{name}", value, ("workers", "memory_gib")) for name, value in top.tables("classes")
    }
    slots = {name: table.whole("workers", least=0, most=MOST_WORKERS) for name, table in classes.items()}
    changes = [
        _change(place, value, slots) for place, value in enumerate(top.array("changes", "write [[changes]] above each"))
    ]
    if not sum(slots.values()) and not any(change.slots > 0 for change in changes):
        raise UsageError("classes: there are no workers; give a class workers = 1 or more")
    rate = top.number("failure_rate", 0.0, most=1.0)
    families = {name: _family(name, value, list(slots), rate) for name, value in top.tables("families")}
    if not families or not slots:
        raise UsageError(f"{'classes' if not slots else 'families'}: at least one is needed; --example shows the form")
    if len(families) > DEFAULT_MAX_SUBSPACES:
        raise UsageError(f"families: a search tells {DEFAULT_MAX_SUBSPACES} apart at most, and not {len(families)}")
    cluster = Cluster(
        slots=slots,
        memory={name: int(table.number("memory_gib", 0.0) * GIB) for name, table in classes.items()},
        families=families,
        size=_law("size", top.value("size", {"law": "constant"}), _SIZES),
        straggler=_law("straggler", top.value("straggler", {"law": "none"}), _STRAGGLERS),
        changes=changes,
        seconds=top.number("seconds", above=0.0) if top.has("seconds") else None,
        trials=top.whole("trials", least=1, most=MOST_TRIALS) if top.has("trials") else None,
        target=top.number("target", least=-LARGEST) if top.has("target") else None,
        seed=top.whole("seed", 0, least=0, most=2**64),
        lease_seconds=top.number("lease_seconds", LEASE_SECONDS),
    )
    if cluster.seconds is None and cluster.trials is None:
        raise UsageError("seconds: a simulation needs an end; give seconds or trials")
    return cluster


class _Table:
    """One table of the file, which knows its own name for the sake of the errors."""

    def __init__(self, where: str, values: Any, known: Sequence[str] | None = None) -> None:
        self._where = where
        if not isinstance(values, Mapping):
            raise UsageError(f"{where}: this is no table but {_kind(values)}; --example shows the form")
        self._values = values
        for key in values if known is not None else ():
            if key not in (known or ()):
                raise UsageError(f"{self.key(key)}: there is no such key; known are {', '.join(known or ())}")

    def key(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def has(self, name: str) -> bool:
        return name in self._values

    def value(self, name: str, default: Any = None) -> Any:
        if name not in self._values and default is None:
            raise UsageError(f"{self.key(name)}: it is missing; --example shows the form")
        return self._values.get(name, default)

    def number(
        self,
        name: str,
        default: float | None = None,
        *,
        least: float = 0.0,
        most: float = LARGEST,
        above: float | None = None,
    ) -> float:
        value = self.value(name, default)
        is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        if isinstance(value, bool) or not is_finite:
            raise UsageError(f"{self.key(name)}: {_short(value)} is no number")
        if value < least or value > most or (above is not None and value <= above):
            bounds = f"above {above:g}" if above is not None else f"at least {least:g}"
            raise UsageError(f"{self.key(name)}: {_short(value)} will not do; it must be {bounds} and at most {most:g}")
        return float(value)

    def whole(self, name: str, default: int | None = None, *, least: float, most: float) -> int:
        if not self.number(name, default, least=least, most=most).is_integer():
            raise UsageError(f"{self.key(name)}: {self.value(name, default)!r} is no whole number")
        return int(self.value(name, default))  # not by way of a float, which has fewer digits

    def tables(self, name: str) -> list[tuple[str, Any]]:
        return list(_Table(self.key(name), self.value(name))._values.items())

    def array(self, name: str, form: str) -> list[Any]:
        value = self.value(name, [])
        if not isinstance(value, list):
            raise UsageError(f"{self.key(name)}: this is no list but {_kind(value)}; {form}")
        return value


def _family(name: str, value: Any, classes: Sequence[str], rate: float) -> Family:
    table = _Table(f"families.{name}", value, ("seconds", "share", "memory_gib", "failure_rate", "loss"))
    seconds = _Table(table.key("seconds"), table.value("seconds"), classes)
    loss = _Table(table.key("loss"), table.value("loss", {}), ("best", "spread"))
    return Family(
        seconds={each: seconds.number(each, least=LEAST_SECONDS) for each in classes},
        share=table.number("share", 1.0, least=1e-6, most=1e6),
        failure_rate=table.number("failure_rate", rate, most=1.0),
        memory=int(table.number("memory_gib", 0.0) * GIB),
        best=loss.number("best", 0.0, least=-LARGEST),
        spread=loss.number("spread", 1.0),
    )


def _law(where: str, value: Any, known: Mapping[str, Sequence[str]]) -> Law:
    name = _Table(where, value).value("law")
    if not isinstance(name, str) or name not in known:
        raise UsageError(f"{where}.law: there is no law {_short(name)}; choose one of {', '.join(known)}")
    table = _Table(where, value, ("law", *known[name]))
    if name == "samples":
        samples = table.array("values", "write values = [1.0, 2.0]") if table.has("values") else table.value("values")
        each = _Table(f"{where}.values", {str(place): sample for place, sample in enumerate(samples)})
        values = [each.number(str(place)) for place in range(len(samples))]
        if not sum(values) > 0:
            raise UsageError(f"{where}.values: at least one sample above 0 is needed")
        return Law(name=name, values={"values": values})
    numbers = {key: table.number(key, most=_MOST.get(key, LARGEST)) for key in known[name]}
    if name == "uniform" and not numbers["low"] <= numbers["high"] != 0:
        raise UsageError(f"{where}.high: it must be above 0 and not below low")
    if name == "slow" and numbers["factor"] < 1:
        raise UsageError(f"{where}.factor: a straggler takes longer; it must be at least 1")
    return Law(name=name, values=numbers)


def _change(place: int, value: Any, slots: Mapping[str, int]) -> Change:
    table = _Table(f"changes.{place}", value, ("at", "class", "workers"))
    name = table.value("class")
    if not isinstance(name, str) or name not in slots:
        raise UsageError(f"{table.key('class')}: there is no class {_short(name)}; there are {', '.join(slots)}")
    workers = table.whole("workers", least=-MOST_WORKERS, most=MOST_WORKERS)
    return Change(at=table.number("at"), compute_class=name, slots=workers)


def _kind(value: Any) -> str:
    return {bool: "a truth value", int: "a number", float: "a number", str: "a text", list: "a list"}.get(
        type(value), type(value).__name__
    )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + "..."
