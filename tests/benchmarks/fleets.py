"""Clusters made from public measurements, and the best that any placement could do on them.

Speeds: Gavel's measured GPU rates (stanford-futuredata/gavel, MIT). Sizes: run times of Microsoft's Philly clusters
(alibaba/clusterdata, CC BY 4.0); see data/README.md. SVM times: SHADHO's own record (prijatelj/shadho).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from figures import ROOT
from scipy.stats import qmc
from services.families import Family, cluster_of, fleet_of, half_normal, samples

from shadho_celery.placement.bound import throughput_bound
from shadho_celery.simulation.simulation import Cluster, Machine
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

#: the tables that come with the benchmarks, and the name of the one with the rates
DATA = ROOT / "tests" / "benchmarks" / "data"
RATES = "gavel_single_gpu.json"

FOUR = ("ResNet-50 (batch size 64)", "LM (batch size 20)", "Recommendation (batch size 2048)", "A3C")
#: trials of a subspace whose seconds the linear program has
KINDS = 512
#: mean seconds of a family's trial over the classes
MEAN_SECONDS = 60.0
FAILURE_RATE = 0.02
#: a trial takes (1 + |N(0, .5)|) / 1.399 times its family's and size's seconds
STRAGGLE = 0.5
#: seconds on 16 cores; on 8 and on 4 it is twice and three times as much for all: machines that differ only in speed
SVM_SECONDS = {"linear": 20.0, "rbf": 154.0, "sigmoid": 68.0, "poly": 24.0}
SVM_FACTORS = {"cores16": 1.0, "cores8": 2.0, "cores4": 3.0}


def rates(path: Path) -> dict[str, dict[str, float]]:
    """Steps per second by family and class, as Gavel's file has them."""
    table: dict[str, dict[str, float]] = json.loads(path.read_text())
    return table


def seconds_of(table: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """S_jc = 60 * geometric mean over the classes of rate_j / rate_jc."""
    found = {}
    for family, by_class in table.items():
        mean = math.exp(np.mean(np.log(list(by_class.values()))))
        found[family] = {name: MEAN_SECONDS * mean / rate for name, rate in by_class.items()}
    return found


def sizes(path: Path) -> tuple[float, ...]:
    """The Philly job sizes between the tenth and the ninetieth percentile; the simulator divides by their mean."""
    return tuple(json.loads(path.read_text())["p10_p90"])


def describe(
    seconds: Mapping[str, Mapping[str, float]],
    fleet: Mapping[str, int],
    sizes: Sequence[float],
    hours: float,
    failure_rate: float = FAILURE_RATE,
) -> Cluster:
    """A cluster with an even mix of families; `sizes` are empty where all trials of a family are alike."""
    families = {
        family: Family(seconds=dict(by_class), failure_rate=failure_rate) for family, by_class in seconds.items()
    }
    factors: dict[str, Any] = {"size": partial(samples, tuple(sizes))} if sizes else {}
    straggler = partial(half_normal, STRAGGLE)
    return cluster_of(fleet_of(fleet), families, {"seconds": hours * 3600}, straggler=straggler, **factors)


def slots_of(cluster: Cluster) -> dict[str, int]:
    """The slots of the cluster's classes at the start."""
    return {name: each.workers * each.slots for name, each in cluster.fleet.classes.items()}


def most(cluster: Cluster, drawn: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> float:
    """The most trials that any placement could complete on a cluster in its time, in the mix of its subspaces.

    A trial that fails takes its time and gives nothing. Workers that come and go count for the part of the time in
    which they are there. `drawn` are the params of each subspace's trials, by default some that cover it evenly.
    """
    seconds, fleet, space = cluster.settings.get("seconds"), cluster.fleet, compile_space(cluster.space)
    assert seconds is not None, "a case needs an end in time"
    there = {name: slots * 1.0 for name, slots in slots_of(cluster).items()}
    for change in fleet.changes:
        slots = change.workers * fleet.classes[change.compute_class].slots
        there[change.compute_class] += slots * max(0.0, 1.0 - change.at / seconds)
    needed: dict[str, dict[str, float]] = {}
    mix: dict[str, float] = {}
    for subspace in split(space):
        kinds: Counter[tuple[float, ...]] = Counter()
        for params in (drawn or {}).get(subspace.name) or even(subspace):
            values = space.evaluate(params)
            rate = 1.0 - cluster.ask("failure_rate", values)
            machines = [Machine(compute_class=name, slots=1) for name in there]
            kinds[tuple(cluster.ask("seconds", values, machine) / rate for machine in machines)] += 1
        for place, (each, count) in enumerate(kinds.items()):
            needed[f"{subspace.name} {place}"] = dict(zip(there, each, strict=True))
            mix[f"{subspace.name} {place}"] = subspace.probability * count / kinds.total()
    return throughput_bound(needed, there, mix).rate * seconds


def even(subspace: Subspace) -> list[dict[str, Any]]:
    """Params that cover a subspace evenly."""
    points = qmc.Sobol(max(1, len(subspace.domains)), seed=0).random(KINDS)
    return [subspace.at(point) for point in points]


def svm_seconds() -> dict[str, dict[str, float]]:
    """The SVM case: speeds differ, but in the same way for all kernels."""
    return {k: {c: s * factor for c, factor in SVM_FACTORS.items()} for k, s in SVM_SECONDS.items()}
