"""What every benchmark prints: a table for people, and as the last line one JSON object for scripts."""

from __future__ import annotations

import json
import math
import platform
import statistics
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future, as_completed
from importlib import metadata
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track
from scipy import stats

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

PACKAGES = ("celery", "kombu", "redis", "numpy", "hyperopt", "SQLAlchemy", "optuna")


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of a single value it is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def goal(
    value: float | Sequence[float],
    at_least: float | None = None,
    at_most: float | None = None,
    *,
    by_mean: bool = False,
) -> dict[str, Any]:
    """A figure beside what it should reach; of several seeds the mean, whose whole interval should reach it.

    With `by_mean` it is enough that the mean does, as of so few seeds that their interval is wide.
    """
    assert (at_least is None) != (at_most is None)
    row: dict[str, Any] = {}
    if isinstance(value, int | float):
        low = high = mean = float(value)
    else:
        mean, (low, high) = float(np.mean(value)), interval(value)
        row = {"interval": [low, high], "seeds": len(value)}
    if by_mean:
        low = high = mean
    reached = low >= at_least if at_least is not None else high <= (at_most or 0.0)
    wanted = f">= {at_least}" if at_least is not None else f"<= {at_most}"
    return {"value": mean, **row, "goal": wanted, "reached": reached}


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the 95 % interval of the mean of runs with different seeds (Student's t); of one run it is its value."""
    mean, number = float(np.mean(values)), len(values)
    if number == 1:
        return mean, mean
    reach = float(stats.t.ppf(0.975, number - 1) * np.std(values, ddof=1) / math.sqrt(number))
    return mean - reach, mean + reach


def p_no_worse(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return Mann-Whitney's p of our regrets being like theirs; 1 if their median is not below ours."""
    if statistics.median(ours) <= statistics.median(theirs) or {*ours} == {*theirs}:
        return 1.0
    return float(stats.mannwhitneyu(ours, theirs).pvalue)


def results_of(futures: Mapping[K, Sequence[Future[R]]], words: str) -> dict[K, list[R]]:
    """Return the results of runs by key; show meanwhile, on stderr, how many have ended."""
    runs = [run for each in futures.values() for run in each]
    for run in track(as_completed(runs), words, len(runs), console=Console(stderr=True)):
        run.result()
    return {key: [run.result() for run in each] for key, each in futures.items()}


def finish(figures: Mapping[str, Any], goals: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Print the goals, and the last line."""
    print()
    for name, row in goals.items():
        ends = "" if "interval" not in row else " [{:.3g}, {:.3g}]".format(*row["interval"])
        print(f"{'reached' if row['reached'] else 'MISSED ':8s} {name}: {row['value']:.3g}{ends} (goal {row['goal']})")
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(json.dumps({"figures": {**figures, "settings": dict(settings), "versions": versions}, "goals": dict(goals)}))


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
