"""Simulated fleets, and clusters whose space is a choice of families of trials: each has its seconds by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hyperopt import hp

from shadho_celery.simulation.executor import Fleet, SimulatedClass
from shadho_celery.simulation.simulation import Cluster, Machine

#: value of x in [0, 1] at which a family has its least loss
OPTIMUM = 0.3


@dataclass(frozen=True, kw_only=True)
class Family:
    """Similar trials, which are one subspace."""

    #: mean seconds by class, or a function of params and machine
    seconds: Mapping[str, float] | Callable[[Mapping[str, Any], Machine], float]
    #: params besides x, on which the loss depends: function from a label to the node of hyperopt
    params: Mapping[str, Callable[[str], Any]] = field(default_factory=dict)
    #: part of the trials, beside the other families
    share: float = 1.0
    failure_rate: float = 0.0
    memory_gib: float = 0.0
    best: float = 0.0
    spread: float = 1.0


@dataclass(frozen=True)
class Families:
    """The functions of a cluster that has these families by name."""

    of: Mapping[str, Family]

    def space(self) -> Any:
        total = sum(family.share for family in self.of.values())
        options = {
            name: {
                "family": name,
                "x": hp.uniform(f"x {name}", 0, 1),
                "params": {param: node(f"{param} of {name}") for param, node in family.params.items()},
            }
            for name, family in self.of.items()
        }
        return hp.pchoice("family", [(family.share / total, options[name]) for name, family in self.of.items()])

    def seconds(self, values: Any, machine: Machine) -> float:
        seconds = self.of[values["family"]].seconds
        return seconds(values["params"], machine) if callable(seconds) else seconds[machine.compute_class]

    def loss(self, values: Any) -> float:
        family = self.of[values["family"]]
        return family.best + family.spread * (float(values["x"]) - OPTIMUM) ** 2

    def memory_gib(self, values: Any) -> float:
        return self.of[values["family"]].memory_gib

    def failure_rate(self, values: Any) -> float:
        return self.of[values["family"]].failure_rate


def fleet_of(classes: Mapping[str, int | Mapping[str, Any]], **facts: Any) -> Fleet:
    """A fleet of these workers by class, with one slot each; or of classes with these facts."""
    described = {name: {"workers": each} if isinstance(each, int) else each for name, each in classes.items()}
    return Fleet(classes={name: SimulatedClass(**each) for name, each in described.items()}, **facts)


def cluster_of(fleet: Fleet, families: Mapping[str, Family], settings: Mapping[str, Any], **functions: Any) -> Cluster:
    """A cluster of a fleet and families; `functions` are its size and straggler, and more."""
    of = Families(families)
    return Cluster(
        space=of.space(),
        fleet=fleet,
        settings=settings,
        **{
            "seconds": of.seconds,
            "loss": of.loss,
            "memory_gib": of.memory_gib,
            "failure_rate": of.failure_rate,
            **functions,
        },
    )


def with_settings(cluster: Cluster, **settings: Any) -> Cluster:
    """The cluster with these settings; None for a setting that it then has not."""
    changed = {**cluster.settings, **settings}
    return replace(cluster, settings={name: value for name, value in changed.items() if value is not None})


# Random factors, to be bound to their constants with `partial`. Those of all but `slow` have a mean of 1.


def uniform(low: float, high: float, generator: np.random.Generator, count: int) -> Any:
    return generator.uniform(low, high, count) * float(2 / (low + high))


def log_normal(sigma: float, generator: np.random.Generator, count: int) -> Any:
    return generator.lognormal(-(sigma**2) / 2, sigma, count)


def samples(values: Sequence[float], generator: np.random.Generator, count: int) -> Any:
    found = np.asarray(values, dtype=float)
    return generator.choice(found / found.mean(), count)


def half_normal(scale: float, generator: np.random.Generator, count: int) -> Any:
    mean = 1.0 + scale * math.sqrt(2 / math.pi)
    return (1.0 + np.abs(generator.normal(0.0, scale, count))) / mean


def slow(probability: float, factor: float, generator: np.random.Generator, count: int) -> Any:
    """Slow down by `factor` with this probability."""
    return np.where(generator.random(count) < probability, factor, 1.0)
