"""What the simulator costs: ``python tests/benchmarks/simulator.py [--full]``.

CPU seconds and peak memory of 150 workers for three simulated hours, some 36,000 trials; what a trial costs in searches
of 1,000 to 100,000 trials, and on more and more workers; and whether the same seed gives the same to the bit. With
--full also 1,000,000 trials and 10,000 workers, and both at once: half an hour. Every search is measured in a process
of its own that has played a short one before, so that imports and caches are not taken for work.

  python tests/benchmarks/simulator.py --beside ../earlier     # a trial's cost beside that in another checkout
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from figures import finish, goal
from rich.console import Console
from rich.table import Table

sys.path.append(str(Path(__file__).parents[1]))

from services.families import Family, cluster_of, fleet_of, half_normal, log_normal, with_settings

import shadho_celery
from shadho_celery.placement.policies import POLICIES
from shadho_celery.placement.shares import SHARES
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS
from shadho_celery.simulation.cluster_file import Cluster
from shadho_celery.simulation.simulation import Simulation, simulate

#: mean seconds of a trial by family and class: unlike machines, each family with another order of them
CLASSES = ("v100", "p100", "k80")
SECONDS = {"resnet": (27, 50, 100), "lm": (34, 56, 123), "recommendation": (45, 47, 67), "a3c": (56, 62, 70)}

#: workers of the three hours and of the searches of more and more trials
WORKERS = 150
HOURS = 3.0
TRIALS = (1_000, 10_000, 100_000)
MOST_TRIALS = 1_000_000
#: workers of searches that give each of them as many trials
FLEETS = (15, 150, 1_500)
MOST_WORKERS = 10_000
TRIALS_EACH = 20

#: simulations of the shortest search, of which the quickest counts: it is over in a fraction of a second
REPEATS = 3

HERE = Path(__file__).resolve().parents[2]

#: searches of so many trials in each of two checkouts, by turns, and what a trial may cost beside the other
PAIRS, PAIR_TRIALS, BESIDE = 8, 10_000, 1.5


class Run(NamedTuple):
    """One measurement."""

    #: trials that ended
    trials: int
    cpu_seconds: float
    #: of the process when it was done, and how much of that the simulation added
    peak_mib: float
    added_mib: float

    @property
    def microseconds(self) -> float:
        """CPU time of a trial."""
        return 1e6 * self.cpu_seconds / self.trials


def cluster(workers: int, trials: int | None = None) -> Cluster:
    """So many workers, a third of each class, until as many trials or the three hours are over."""
    each, left = divmod(workers, len(CLASSES))
    return cluster_of(
        fleet_of({name: each + (place < left) for place, name in enumerate(CLASSES)}),
        {
            name: Family(seconds=dict(zip(CLASSES, row, strict=True)), failure_rate=0.02)
            for name, row in SECONDS.items()
        },
        {"trials": trials} if trials else {"seconds": HOURS * 3600},
        size=partial(log_normal, 0.5),
        straggler=partial(half_normal, 0.5),
    )


def play(described: Cluster, policy: str, shares: str) -> Simulation:
    return simulate(described, policy=policy, shares=shares)


def measure(workers: int, trials: int | None, policy: str, shares: str) -> Run:
    """To be called in a fresh process: peak memory never falls."""
    before = play(cluster(WORKERS, 200), policy, shares).peak_mib
    repeats = REPEATS if trials is not None and trials <= TRIALS[0] else 1
    found = [play(cluster(workers, trials), policy, shares) for _ in range(repeats)]
    best = min(found, key=lambda each: each.cpu_seconds)
    return Run(best.trials, best.cpu_seconds, best.peak_mib, best.peak_mib - before)


def alone(*arguments: object) -> Run:
    """The measurement, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def same(policy: str, shares: str) -> bool:
    """Return True when an hour of the cluster goes the same way twice, to the bit."""
    described = with_settings(cluster(WORKERS), seconds=3600.0)
    first, second = (repr(list(play(described, policy, shares).rows())) for _ in "12")
    return first == second


def beside(checkout: Path) -> list[float]:
    """Return the cost of a trial as a multiple of that in another checkout, by pair of searches."""
    ratios = []
    for pair in range(PAIRS):
        cost = {}
        for folder in (checkout, HERE) if pair % 2 else (HERE, checkout):
            command = [sys.executable, __file__, "--one"]
            environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
            run = subprocess.run(command, env=environment, cwd=folder, check=True, capture_output=True, text=True)
            module, seconds = run.stdout.split()
            if not Path(module).is_relative_to(folder.resolve()):
                raise SystemExit(f"{folder} is no checkout: its search used {module}")
            cost[folder] = float(seconds)
        ratios.append(cost[HERE] / cost[checkout])
        print(f"pair {pair + 1} of {PAIRS}: {ratios[-1]:.2f}", flush=True)
    return ratios


def one() -> None:
    """Print which code a search ran, and what it cost."""
    found = [play(cluster(WORKERS, trials), "cost", "uniform").cpu_seconds for trials in (200, PAIR_TRIALS)]
    print(shadho_celery.__file__, found[-1])


def show(title: str, unit: str, runs: Mapping[int, Run]) -> None:
    table = Table(unit, "trials", "CPU seconds", "us a trial", "peak MiB", "bytes a trial", title=title)
    for number, run in runs.items():
        added = f"{run.added_mib * 2**20 / run.trials:.0f}"
        row = (run.trials, f"{run.cpu_seconds:.2f}", f"{run.microseconds:.0f}", f"{run.peak_mib:.0f}", added)
        table.add_row(str(number), *map(str, row))
    Console(width=100).print(table)


def growth(runs: Mapping[int, Run]) -> float:
    """Return the greatest cost of a trial, as a multiple of its cost in the smallest search."""
    first, *others = (run.microseconds for run in runs.values())
    return max(others) / first


def series(numbers: Sequence[int], title: str, unit: str, measured: Mapping[int, Run]) -> dict[int, Run]:
    runs = {number: measured[number] for number in numbers}
    show(title, unit, runs)
    return runs


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="a million trials and ten thousand workers too")
    parser.add_argument("--beside", type=Path, help="another checkout: only measure a trial's cost beside it")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT_SETTINGS.policy)
    parser.add_argument("--shares", choices=SHARES, default=DEFAULT_SETTINGS.shares)
    given = parser.parse_args()
    if given.one:
        one()
        return
    if given.beside:
        ratios = beside(given.beside)
        reach = {"CPU of a trial beside the other checkout": goal(float(np.median(ratios)), at_most=BESIDE)}
        finish({"ratios": ratios}, reach, {"trials": PAIR_TRIALS, "workers": WORKERS})
        return
    how = (given.policy, given.shares)
    hours = alone(WORKERS, None, *how)
    show(f"{HOURS:g} simulated hours", "workers", {WORKERS: hours})
    sizes = [*TRIALS, MOST_TRIALS] if given.full else [*TRIALS]
    by_trials = {trials: alone(WORKERS, trials, *how) for trials in sizes}
    show(f"{WORKERS} workers, more and more trials", "limit", by_trials)
    fleets = [*FLEETS, MOST_WORKERS] if given.full else [*FLEETS]
    by_workers = {workers: alone(workers, TRIALS_EACH * workers, *how) for workers in fleets}
    show(f"more and more workers, {TRIALS_EACH} trials each", "workers", by_workers)
    reach = {
        f"three hours of {WORKERS} workers, CPU seconds": goal(hours.cpu_seconds, at_most=25.0),
        "CPU of a trial among more trials, beside the fewest": goal(growth(by_trials), at_most=1.5),
        "CPU of a trial among more workers, beside the fewest": goal(growth(by_workers), at_most=1.5),
        "the same to the bit": goal(float(same(*how)), at_least=1.0),
    }
    if given.full:
        most = alone(MOST_WORKERS, MOST_TRIALS, *how)
        show("the largest", "workers", {MOST_WORKERS: most})
        reach["a million trials on ten thousand workers, CPU seconds"] = goal(most.cpu_seconds, at_most=720.0)
        by_workers[MOST_TRIALS] = most
    figures = {
        "hours": hours._asdict(),
        "by_trials": {str(number): run._asdict() for number, run in by_trials.items()},
        "by_workers": {str(number): run._asdict() for number, run in by_workers.items()},
    }
    finish(figures, reach, {"policy": given.policy, "shares": given.shares, "full": given.full})


if __name__ == "__main__":
    sys.exit(main())
