"""Cluster file of the simulator: a Python file with a search space, a fleet, and functions that simulate trials."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from shadho_celery.core.checks import as_record, short
from shadho_celery.core.failures import read_failure
from shadho_celery.core.files import parse, read_classes
from shadho_celery.errors import UsageError
from shadho_celery.objective.study_file import import_file
from shadho_celery.simulation.executor import LARGEST, Fleet, SimulatedClass

V = TypeVar("V")

#: minimum seconds of a trial; with 0 seconds, the simulated time would not advance
LEAST_SECONDS = 1e-3

#: by name of a function that returns a number: the bounds of the number
BOUNDS: Mapping[str, tuple[float, float]] = {
    "seconds": (LEAST_SECONDS, LARGEST),
    "overhead_seconds": (0.0, LARGEST),
    "memory_gib": (0.0, LARGEST),
    "failure_rate": (0.0, 1.0),
    "loss": (-LARGEST, LARGEST),
}
#: functions that draw random factors
DRAWN = ("size", "straggler")

#: names of the settings in STUDY that a simulation supports
PLAYED = "trials seconds target sampler policy place_by deadline shares pool fidelity speculate gpus"

_FORM = "--example prints a cluster file"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of a trial, as far as it matters: the second argument of `seconds`."""

    compute_class: str
    #: number of its slots that the trial takes
    slots: int
    #: memory of the machine; 0 if it is not limited
    memory_gib: float = 0.0


def _zero(*_: object) -> float:
    return 0.0


def _ones(_: np.random.Generator, count: int) -> NDArray[np.float64]:
    return np.ones(count)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The content of a cluster file: a simulated fleet, and functions that simulate the trials of a study.

    `values` are the values that an objective would get for a trial's params.
    """

    #: SPACE, the search space
    space: Any
    #: CLUSTER
    fleet: Fleet
    #: (values, machine) -> mean seconds of a trial's work on the machine; for trials with budgets, the seconds for one
    #: unit
    seconds: Callable[[Any, Machine], float]
    #: (values, machine) -> seconds that a trial takes in addition to its work, for any budget
    overhead_seconds: Callable[[Any, Machine], float] = _zero
    #: (values) -> loss of a trial
    loss: Callable[[Any], float] = _zero
    #: (values) -> memory that a trial needs; it fails on a machine that has less
    memory_gib: Callable[[Any], float] = _zero
    #: (values) -> probability that a trial fails at its end
    failure_rate: Callable[[Any], float] = _zero
    #: (generator, count) -> random factors of the seconds of trials, with a mean of 1; all attempts of a trial have the
    #: same factor
    size: Callable[[np.random.Generator, int], Any] = _ones
    #: (generator, count) -> further random factors, which differ between the attempts of a trial
    straggler: Callable[[np.random.Generator, int], Any] = _ones
    #: STUDY, the settings of the study
    settings: Mapping[str, Any] = field(default_factory=dict)
    #: name of the file's module
    name: str = "the cluster"

    def ask(self, function: str, *given: Any) -> float:
        """Call one of the functions in BOUNDS and return its number. Raises UsageError if it fails or the number is
        invalid.
        """
        least, most = BOUNDS[function]
        value = self._called(function, float, *given)
        if not least <= value <= most:
            raise UsageError(
                f"{function} of {self.name} gives {value:g} for {short(given[0])}, but must give {least:g} to {most:g}"
            )
        return value

    def draw(self, function: str, generator: np.random.Generator, count: int) -> list[float]:
        """Call one of the functions in DRAWN and return its random factors. Raises UsageError if it fails or they are
        invalid.
        """
        drawn = self._called(function, _as_array, generator, count)
        if drawn.shape != (count,) or not (np.isfinite(drawn) & (drawn >= 0)).all():
            raise UsageError(f"{function} of {self.name} must give {count} finite numbers from 0, as an array")
        found: list[float] = drawn.tolist()
        return found

    def _called(self, function: str, convert: Callable[[Any], V], *given: Any) -> V:
        try:
            return convert(getattr(self, function)(*given))
        except Exception as error:
            failure = read_failure(traceback.format_exc())
            raise UsageError(f"{function} of {self.name} failed for {short(given[0])}: {failure}; fix it") from error


def _as_array(drawn: Any) -> NDArray[np.float64]:
    return np.asarray(drawn, dtype=float)


def load(module: str) -> Cluster:
    """Return the cluster that a file defines. Raises UsageError, with the invalid name and the remedy, if it is not
    valid.
    """
    if module.endswith(".toml"):
        raise UsageError(f"{short(module)} is not a Python file, but a cluster is described by one; {_FORM}")
    found = import_file(module, ("SPACE", "CLUSTER", "seconds"), "cluster file", _FORM)
    functions = {name: found.names[name] for name in (*BOUNDS, *DRAWN) if name in found.names}
    if wrong := [name for name, given in functions.items() if not callable(given)]:
        raise UsageError(f"{wrong[0]} of {found.module} is not a function; {_FORM}")
    if unplayed := [name for name in found.stated if name not in PLAYED.split()]:
        raise UsageError(f'STUDY["{unplayed[0]}"] of {found.module} is not simulated; leave it out')
    try:
        fleet = read_fleet(found.names["CLUSTER"])
    except UsageError as error:
        raise UsageError(f"CLUSTER of {found.module}: {error}") from None
    space, settings = found.names["SPACE"], found.stated
    return Cluster(space=space, fleet=fleet, settings=settings, name=found.module, **functions)


def read_fleet(described: object) -> Fleet:
    """Return the fleet that CLUSTER describes. Its `classes` may be the path of a TOML file.

    Raises UsageError, which names the invalid key.
    """
    if not isinstance(described, Mapping):
        raise UsageError(f"it is not a dict; {_FORM}")
    fleet = as_record({**described, "classes": {}}, Fleet, form=_FORM)
    given = described.get("classes", {})
    if isinstance(given, str):
        classes = read_classes(Path(given), SimulatedClass)
    else:
        classes = parse({"classes": given}, SimulatedClass, _FORM)
    for place, change in enumerate(fleet.changes):
        if change.compute_class not in classes:
            name, known = short(change.compute_class, 60), ", ".join(classes)
            raise UsageError(f"changes.{place}.class: there is no class {name}; there are {known}")
    workers = [each.workers for each in classes.values()] + [change.workers for change in fleet.changes]
    if max(workers) <= 0:
        raise UsageError("classes: there are no workers; give a class workers of 1 or more")
    return replace(fleet, classes=classes)
