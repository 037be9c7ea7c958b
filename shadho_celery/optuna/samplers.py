"""Optuna's samplers by the names of their classes: samplers of this package, or of Optuna itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from shadho_celery.errors import UsageError
from shadho_celery.program.interrupts import warn

#: class -> name of the sampler here
_HERE = {
    "TPESampler": "tpe",
    "GPSampler": "gp",
    "CmaEsSampler": "cma",
    "QMCSampler": "qmc",
    "RandomSampler": "random",
    "BruteForceSampler": "grid",
    "NSGAIISampler": "optuna:NSGAIISampler",
    "NSGAIIISampler": "optuna:NSGAIIISampler",
}
#: class that is refused -> what to do instead
_INSTEAD = {
    "GridSampler": "BruteForceSampler tries every point of the space that the objective asks for",
    "PartialFixedSampler": "enqueue_trial fixes labels of single trials",
    "BaseSampler": "a sampler of your own is a class with ask and tell, see the README of samplers",
}


@dataclass(frozen=True)
class Sampler:
    """A sampler by its name here, and the seed of the study."""

    name: str
    seed: int | None = None


def _make(kind: str, *args: Any, seed: int | None = None, **options: Any) -> Sampler:
    if options.get("constraints_func") is not None:
        raise UsageError(
            'constraints_func: here the objective returns its constraints, as {"loss": 1.0, "constraints": {"memory": '
            "0.5}}, of which none is above 0 in a feasible trial"
        )
    if given := [*options, *(["its arguments"] if args else [])]:
        warn(f"{kind}: {', '.join(given)} have no effect, because the sampler here is {_HERE[kind]}")
    return Sampler(_HERE[kind], seed)


def __getattr__(name: str) -> Any:
    if name in _HERE:
        return partial(_make, name)
    if name in _INSTEAD:
        raise UsageError(f"there is no {name} here; {_INSTEAD[name]}")
    raise AttributeError(f"there is no sampler {name} here; choose one of {', '.join(_HERE)}")
