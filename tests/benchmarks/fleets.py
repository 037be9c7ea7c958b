"""Clusters made from public measurements, and the best that any placement could do on them.

Speeds: Gavel's measured GPU rates (stanford-futuredata/gavel, MIT). Sizes: run times of Microsoft's Philly clusters
(alibaba/clusterdata, CC BY 4.0). SVM times: SHADHO's own record (prijatelj/shadho).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from hyperopt import hp
from scipy.optimize import linprog

from shadho_celery.context import Outcome
from shadho_celery.executors.simulated import Play
from shadho_celery.trial import Trial, TrialState

FOUR = ("ResNet-50 (batch size 64)", "LM (batch size 20)", "Recommendation (batch size 2048)", "A3C")
#: mean seconds of a family's trial over the classes
MEAN_SECONDS = 60.0
FAILURE_RATE = 0.02
#: a trial takes (1 + |N(0, .5)|) / 1.399 times its family's and size's seconds
STRAGGLE, STRAGGLE_MEAN = 0.5, 1.399
#: trials whose sizes are drawn at once
BLOCK = 4096
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
    """The Philly job sizes between the tenth and the ninetieth percentile, divided by their mean."""
    values = np.array(json.loads(path.read_text())["p10_p90"], dtype=float)
    return tuple((values / values.mean()).tolist())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fleet and the families of trials it is given, in an even mix."""

    name: str
    #: mean seconds of a trial by family and class
    seconds: Mapping[str, Mapping[str, float]]
    #: workers by class, the strongest first
    fleet: Mapping[str, int]
    #: sizes of the trials, mean 1; empty where all are alike
    sizes: tuple[float, ...]
    hours: float

    @property
    def bound(self) -> float:
        """The most trials that could be completed in its time."""
        return (1.0 - FAILURE_RATE) * bound(self.seconds, self.fleet) * self.hours * 3600

    def play(self, seed: int) -> Play:
        """What the trials do: the number of a trial says its size, how it straggles, and whether it fails."""
        generator = np.random.default_rng(seed)
        factors, fails = np.empty(0), np.empty(0, dtype=bool)

        def play(trial: Trial, compute_class: str) -> Outcome:
            nonlocal factors, fails
            while trial.number >= len(factors):
                drawn = (1.0 + np.abs(generator.normal(0.0, STRAGGLE, BLOCK))) / STRAGGLE_MEAN
                drawn *= generator.choice(self.sizes, BLOCK) if self.sizes else 1.0
                factors = np.append(factors, drawn)
                fails = np.append(fails, generator.random(BLOCK) < FAILURE_RATE)
            family = trial.subspace.removeprefix("family=")
            seconds = self.seconds[family][compute_class] * float(factors[trial.number])
            if fails[trial.number]:
                return Outcome(state=TrialState.FAILED, error="a failure of the benchmark", seconds=seconds)
            return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds)

        return play

    def space(self) -> Any:
        """One subspace a family."""
        return hp.choice("family", [{"family": name, "x": hp.uniform(f"x {name}", 0, 1)} for name in self.seconds])


def svm_seconds() -> dict[str, dict[str, float]]:
    """The SVM case: speeds differ, but in the same way for all kernels."""
    return {k: {c: s * factor for c, factor in SVM_FACTORS.items()} for k, s in SVM_SECONDS.items()}


def bound(
    seconds: Mapping[str, Mapping[str, float]], fleet: Mapping[str, int], mix: Mapping[str, float] | None = None
) -> float:
    """The most trials a second that any placement can complete in the mix, were speeds known and nothing random.

    max lambda subject to sum_c x_jc / S_jc >= lambda p_j and sum_j x_jc <= n_c; x_jc are the workers of class c on
    family j. `mix` are the p_j, even by default.
    """
    families, classes = list(seconds), list(fleet)
    part = np.array([1.0 if mix is None else mix[family] for family in families])
    part /= part.sum()
    pairs = len(families) * len(classes)
    cost = np.append(np.zeros(pairs), -1.0)
    work = np.zeros((len(families), pairs + 1))
    for row, family in enumerate(families):
        for column, name in enumerate(classes):
            work[row, row * len(classes) + column] = -1.0 / seconds[family][name]
    work[:, -1] = part
    room = np.hstack([np.tile(np.eye(len(classes)), len(families)), np.zeros((len(classes), 1))])
    limits = np.append(np.zeros(len(families)), [float(fleet[name]) for name in classes])
    solution = linprog(cost, A_ub=np.vstack([work, room]), b_ub=limits, method="highs")
    assert solution.success, solution.message
    return float(-solution.fun)
