"""What the benchmarks share: their options, runs by seed, statistics, tables, and the last line for scripts.

Its import lets a benchmark import from the folder of the tests, which has servers, families of trials and a browser,
and from that of the tasks.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table
from scipy import stats

K = TypeVar("K", bound=Hashable)
R = TypeVar("R")

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests"), str(ROOT)]

PACKAGES = ("celery", "kombu", "redis", "numpy", "hyperopt", "SQLAlchemy", "optuna")


# Options


def make_parser(document: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help begins with the document of a benchmark."""
    return argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)


def count(text: str) -> int:
    """Read a whole number above 0."""
    return int(_above_zero(text, int(text)))


def amount(text: str) -> float:
    """Read a number above 0."""
    return _above_zero(text, float(text))


def _above_zero(text: str, value: float) -> float:
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


# Runs


def runs_of(pool: Executor, words: str, jobs: Mapping[K, Callable[[int], R]], seeds: Iterable[int]) -> dict[K, list[R]]:
    """Return the results of each job, by key: one for each seed. Show meanwhile, on stderr, how many have ended."""
    seeds = list(seeds)
    futures = {key: [pool.submit(job, seed) for seed in seeds] for key, job in jobs.items()}
    runs = [run for each in futures.values() for run in each]
    for run in track(as_completed(runs), words, len(runs), console=Console(stderr=True)):
        run.result()
    return {key: [run.result() for run in each] for key, each in futures.items()}


def calibration() -> float:
    """Return the seconds of a loop that other times are compared with: the machine may be busy."""
    began = time.perf_counter()
    sum(len(str(number)) for number in range(5_000_000))
    return time.perf_counter() - began


# Statistics


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile; of a single value it is all three."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def beside(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return the ratios of runs to others with the same seeds."""
    return [one / other for one, other in zip(ours, theirs, strict=True)]


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


# Goals, tables and the last line


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


def show(rows: Mapping[str, Mapping[str, object]], first: str = "", title: str | None = None) -> None:
    """Print a table: for each row its texts by column. A row may lack columns of others."""
    table = Table(first, title=title, title_justify="left")
    columns = dict.fromkeys(column for row in rows.values() for column in row)
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(str(row.get(column, "")) for column in columns))
    Console(width=118).print(table)


def finish(figures: Mapping[str, Any], goals: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]) -> bool:
    """Print the goals, and the last line; return True if all goals are reached."""
    print()
    for name, row in goals.items():
        ends = "" if "interval" not in row else " [{:.3g}, {:.3g}]".format(*row["interval"])
        print(f"{'reached' if row['reached'] else 'MISSED ':8s} {name}: {row['value']:.3g}{ends} (goal {row['goal']})")
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(json.dumps({"figures": {**figures, "settings": dict(settings), "versions": versions}, "goals": dict(goals)}))
    return all(row["reached"] for row in goals.values())


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"
