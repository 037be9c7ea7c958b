"""SHADHO's own SVM runs as an oracle: what a trial would have taken, and what loss it would have had.

A trial is played by the recorded run of its kernel whose params are nearest, on whatever machine that ran: on 16 cores
there are only forty runs of poly. Its seconds are scaled from that machine's class to the trial's by the median seconds
of the kernel on the two. Source: result files of prijatelj/shadho, 2018 (SVM on MNIST on a campus cluster).
"""

from __future__ import annotations

import csv
import gzip
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hyperopt import hp
from scipy.spatial import KDTree

from shadho_celery.core.trial import Attempt, Outcome, Params, TrialState
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

KERNELS = ("linear", "rbf", "sigmoid", "poly")
#: cores by class, the strongest first: those of the paper's experiment
CLASSES = {"cores16": 16, "cores8": 8, "cores4": 4}


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
    """One recorded run."""

    #: the search that it belongs to
    run: str
    kernel: str
    cores: int
    params: dict[str, Any]
    seconds: float
    loss: float


def read(path: Path) -> list[Row]:
    """The record, its params as the space above draws them. Raises ValueError where the file is none."""
    try:
        with gzip.open(path, "rt") as lines:
            rows = [_row(line) for line in csv.DictReader(lines)]
    except (OSError, EOFError, UnicodeDecodeError, KeyError, ValueError) as error:
        raise ValueError(f"{path} is no record of SHADHO's SVM runs (a .csv.gz): {error!r}") from error
    absent = {(k, c) for k in KERNELS for c in CLASSES.values()} - {(row.kernel, row.cores) for row in rows}
    if absent:
        kernel, cores = min(absent)
        raise ValueError(f"{path} has no run of {kernel} on {cores} cores, so its seconds there are unknown")
    return rows


def _row(line: Mapping[str, str]) -> Row:
    kernel = line["kernel"]
    raw = {"C": math.log2, "gamma": math.log10, "coef0": float, "degree": float}
    drawn = {f"{kernel}_{label}": change(float(line[label])) for label, change in raw.items() if line[label]}
    params = {"kernel": KERNELS.index(kernel), **drawn}
    return Row(line["run"], kernel, int(line["class_cores"]), params, float(line["run_s"]), float(line["loss"]))


class Record:
    """Answers what a trial would have done."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._domains = {s.name: s.domains for s in split(compile_space(space()))}
        self._rows: dict[str, list[Row]] = defaultdict(list)
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        for row in rows:
            self._rows[f"kernel={row.kernel}"].append(row)
            seconds[row.kernel, row.cores].append(row.seconds)
        self._trees = {name: KDTree([self._unit(name, r.params) for r in each]) for name, each in self._rows.items()}
        #: median seconds by kernel and cores
        self.medians = {pair: statistics.median(each) for pair, each in seconds.items()}

    def play(self, attempt: Attempt, compute_class: str) -> Outcome:
        """Return the outcome that the trial would have had on that class."""
        row = self.nearest(attempt.subspace, attempt.params)
        factor = self.medians[row.kernel, CLASSES[compute_class]] / self.medians[row.kernel, row.cores]
        return Outcome(state=TrialState.COMPLETE, loss=row.loss, seconds=row.seconds * factor)

    def nearest(self, subspace: str, params: Params) -> Row:
        """Return the recorded run of a kernel whose params are most like these."""
        return self._rows[subspace][int(self._trees[subspace].query(self._unit(subspace, params))[1])]

    def _unit(self, subspace: str, params: Params) -> list[float]:
        return [float(domain.to_unit([params[label]])[0]) for label, domain in self._domains[subspace].items()]
