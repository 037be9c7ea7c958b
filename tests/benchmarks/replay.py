"""Replays SHADHO's own SVM runs under each policy: ``python tests/benchmarks/replay.py svm_trace_dev.csv.gz``.

A trial takes the seconds, and has the loss, of the recorded one whose params are nearest among those of its kernel and
class. Source of the record: result files of prijatelj/shadho, 2018 (SVM on MNIST on a campus cluster).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from figures import finish, goal, quartiles
from hyperopt import hp
from playing import play_study
from rich.console import Console
from rich.table import Table

from shadho_celery.core.trial import Attempt, Outcome, Params, Trial, TrialState
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.study.study import Study

KERNELS = ("linear", "rbf", "sigmoid", "poly")
#: cores by class, the strongest first: those that the record has most of
CLASSES = {"cores4": "4", "cores3": "3", "cores2": "2"}
TARGET = 1.0
POLICIES = ("cost", "paper", "fifo")


def space() -> Any:
    """The part of SHADHO's SVM space that the record covers, raw draws as exponents."""

    def kernel(name: str, *labels: str) -> dict[str, Any]:
        laws = {
            "C": lambda label: hp.uniform(label, -5, 10),
            "gamma": lambda label: hp.uniform(label, -3, 0),
            "coef0": lambda label: hp.uniform(label, -1000, 0),
            "degree": lambda label: hp.quniform(label, 2, 15, 1),
        }
        return {"kernel": name} | {label: laws[label](f"{name}_{label}") for label in labels}

    return hp.choice(
        "kernel",
        [
            kernel("linear", "C"),
            kernel("rbf", "C", "gamma"),
            kernel("sigmoid", "C", "gamma", "coef0"),
            kernel("poly", "C", "gamma", "coef0", "degree"),
        ],
    )


class Row(NamedTuple):
    """One recorded evaluation."""

    run: str
    kernel: str
    cores: str
    params: dict[str, Any]
    seconds: float
    loss: float


def read(path: Path) -> list[Row]:
    """The record, its params as the space above draws them."""
    with gzip.open(path, "rt") as lines:
        return [_row(line) for line in csv.DictReader(lines)]


def _row(line: Mapping[str, str]) -> Row:
    kernel = line["kernel"]
    raw = {"C": math.log2, "gamma": math.log10, "coef0": float, "degree": float}
    drawn = {f"{kernel}_{label}": change(float(line[label])) for label, change in raw.items() if line[label]}
    params = {"kernel": KERNELS.index(kernel), **drawn}
    return Row(line["run"], kernel, line["class_cores"], params, float(line["run_s"]), float(line["loss"]))


class Record:
    """Answers what a trial would have done."""

    def __init__(self, rows: list[Row]) -> None:
        self._domains = {s.name: s.domains for s in split(compile_space(space()))}
        self._points, self._rows = {}, {}
        for kernel in KERNELS:
            for name, cores in CLASSES.items():
                mine = [row for row in rows if row.kernel == kernel and row.cores == cores]
                key = f"kernel={kernel}", name
                self._rows[key] = mine
                self._points[key] = np.array([self._unit(key[0], row.params) for row in mine])

    def play(self, attempt: Attempt, compute_class: str) -> Outcome:
        """Return the outcome that the trial would have had on that class."""
        row = self.nearest(attempt.subspace, attempt.params, compute_class)
        return Outcome(state=TrialState.COMPLETE, loss=row.loss, seconds=row.seconds)

    def nearest(self, subspace: str, params: Params, compute_class: str) -> Row:
        """The recorded evaluation whose params are most like these."""
        key = subspace, compute_class
        distances = np.square(self._points[key] - self._unit(subspace, params)).sum(axis=1)
        return self._rows[key][int(distances.argmin())]

    def _unit(self, subspace: str, params: Mapping[str, Any]) -> np.ndarray:
        return np.array([float(d.to_unit([params[label]])[0]) for label, d in self._domains[subspace].items()])


def prediction_errors(rows: list[Row], seed: int) -> tuple[float, float]:
    """Median relative error of run_s on one half of the runs after the other half: cost model, median by pair."""
    generator = np.random.default_rng(seed)
    runs = sorted({row.run for row in rows})
    trained = set(generator.permutation(runs)[: len(runs) // 2].tolist())
    model = CostModel(split(compile_space(space())))
    by_pair: dict[tuple[str, str], list[float]] = {}
    for number in generator.permutation(len(rows)):
        row = rows[int(number)]
        if row.run in trained:
            by_pair.setdefault((row.kernel, row.cores), []).append(row.seconds)
            model.tell(_ended(int(number), row))
    tested: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.run not in trained and (row.kernel, row.cores) in by_pair:
            tested.setdefault((row.kernel, row.cores), []).append(row)
    ours, theirs = [], []
    for (kernel, cores), those in tested.items():
        seconds = np.array([row.seconds for row in those])
        predicted = model.seconds(f"kernel={kernel}", cores, [row.params for row in those], quantiles=[0.5])[:, 0]
        ours += list(np.abs(predicted - seconds) / seconds)
        theirs += list(np.abs(float(np.median(by_pair[kernel, cores])) - seconds) / seconds)
    return float(np.median(ours)), float(np.median(theirs))


def _ended(number: int, row: Row) -> Trial:
    return Trial(
        number=number,
        subspace=f"kernel={row.kernel}",
        params=row.params,
        state=TrialState.COMPLETE,
        compute_class=row.cores,
        outcome=Outcome(state=TrialState.COMPLETE, seconds=row.seconds),
    )


class Replay(NamedTuple):
    """What came of one replayed search."""

    #: trials completed an hour, were the mix uniform: kernels * the least count of any
    models: float
    #: all trials completed an hour, in whatever mix
    all_models: float
    hours_to_target: float


def replay(path: Path, policy: str, shares: str, seed: int, workers: int, hours: float) -> Replay:
    """One search of `hours` on `workers` workers of each class."""
    record = Record(read(path))
    study = play_study(
        space(), dict.fromkeys(CLASSES, workers), record.play, hours * 3600, policy=policy, shares=shares, seed=seed
    )
    complete = [t for t in study.trials if t.state is TrialState.COMPLETE and (t.finished_at or 0) <= hours * 3600]
    counts = [sum(t.subspace == f"kernel={kernel}" for t in complete) for kernel in KERNELS]
    return Replay(len(KERNELS) * min(counts) / hours, len(complete) / hours, _hours_to(study, hours))


def _hours_to(study: Study, hours: float) -> float:
    good = [t.finished_at or 0.0 for t in study.trials if t.loss is not None and t.loss <= TARGET]
    return min(good, default=hours * 3600) / 3600


def main() -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, help="svm_trace_*.csv.gz")
    parser.add_argument("--seeds", type=int, default=10, help="repeats of every policy (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=12.0, help="simulated hours of a run (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=50, help="workers of each class (default: %(default)s)")
    given = parser.parse_args()
    rows = read(given.trace)
    errors = [prediction_errors(rows, seed) for seed in range(5)]
    ours, theirs = (float(np.median(column)) for column in zip(*errors, strict=True))
    print("median relative error of run_s on runs that were not learned from:")
    print(f"  cost model {ours:.3f}, median by kernel and class {theirs:.3f}")
    variants = [*((policy, "uniform") for policy in POLICIES), ("cost", "promise")]
    with ProcessPoolExecutor() as pool:
        found = {
            variant: [
                pool.submit(replay, given.trace, *variant, seed, given.workers, given.hours)
                for seed in range(given.seeds)
            ]
            for variant in variants
        }
        results = {variant: [future.result() for future in futures] for variant, futures in found.items()}
    table = Table("policy", "shares", "models/h at the uniform mix", "models/h, any mix", f"hours to loss {TARGET}")
    figures = {}
    for (policy, shares), runs in results.items():
        columns = [quartiles(list(column)) for column in zip(*runs, strict=True)]
        table.add_row(policy, shares, *(f"{middle:.3g} ({low:.3g}-{high:.3g})" for low, middle, high in columns))
        figures[f"{policy}_{shares}"] = dict(zip(Replay._fields, columns, strict=True))
    Console().print(table)
    finish(
        {"error_cost_model": ours, "error_pair_median": theirs, "policies": figures},
        {"error_beside_pair_median": goal(ours / theirs, at_most=0.85)},
        {"seeds": given.seeds, "hours": given.hours, "workers": given.workers, "trace": given.trace.name},
    )


if __name__ == "__main__":
    main()
