"""Clusters made from public measurements, and the best that any placement could do on them.

Speeds: Gavel's measured GPU rates (stanford-futuredata/gavel, MIT). Sizes: run times of Microsoft's Philly clusters
(alibaba/clusterdata, CC BY 4.0); see data/README.md. SVM times: SHADHO's own record (prijatelj/shadho).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shadho_celery.placement.bound import throughput_bound
from shadho_celery.simulation.cluster_file import Cluster, parse

#: the tables that come with the benchmarks, and the name of the one with the rates
DATA = Path(__file__).parent / "data"
RATES = "gavel_single_gpu.json"

FOUR = ("ResNet-50 (batch size 64)", "LM (batch size 20)", "Recommendation (batch size 2048)", "A3C")
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
    return parse(
        {
            "seconds": hours * 3600,
            "failure_rate": failure_rate,
            "classes": {name: {"workers": workers} for name, workers in fleet.items()},
            "families": {family: {"seconds": dict(by_class)} for family, by_class in seconds.items()},
            "size": {"law": "samples", "values": list(sizes)} if sizes else {"law": "constant"},
            "straggler": {"law": "halfnormal", "scale": STRAGGLE},
        }
    )


def most(cluster: Cluster) -> float:
    """The most trials that any placement could complete on a cluster in its time, in the families' mix.

    A trial that fails takes its time and gives nothing. Workers that come and go count for the part of the time in
    which they are there.
    """
    assert cluster.seconds is not None, "a case needs an end in time"
    there = {name: workers * 1.0 for name, workers in cluster.slots.items()}
    for change in cluster.changes:
        there[change.compute_class] += change.slots * max(0.0, 1.0 - change.at / cluster.seconds)
    needed = {
        name: {c: s / (1.0 - family.failure_rate) for c, s in family.seconds.items()}
        for name, family in cluster.families.items()
    }
    shares = {name: family.share for name, family in cluster.families.items()}
    return throughput_bound(needed, there, shares).rate * cluster.seconds


def svm_seconds() -> dict[str, dict[str, float]]:
    """The SVM case: speeds differ, but in the same way for all kernels."""
    return {k: {c: s * factor for c, factor in SVM_FACTORS.items()} for k, s in SVM_SECONDS.items()}
