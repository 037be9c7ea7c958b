"""What the simulator costs: ``python tests/benchmarks/simulator.py``.

CPU seconds and peak memory of 150 workers for three simulated hours, some 36,000 trials; what a trial costs in searches
of 1,000 to 100,000 trials, and on more and more workers; and whether the same seed gives the same to the bit. Every
search is measured in a process of its own that has played a short one before, so that imports and caches are not taken
for work.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from figures import finish, goal, make_parser, show
from services.families import Family, cluster_of, fleet_of, half_normal, log_normal, with_settings

from shadho_celery.placement.policies import POLICIES
from shadho_celery.scheduler.plan import DEFAULT_SETTINGS
from shadho_celery.simulation.simulation import Cluster, simulate

#: mean seconds of a trial by family and class: unlike machines, each family with another order of them
CLASSES = ("v100", "p100", "k80")
SECONDS = {"resnet": (27, 50, 100), "lm": (34, 56, 123), "recommendation": (45, 47, 67), "a3c": (56, 62, 70)}

#: workers of the three hours and of the searches of more and more trials
WORKERS = 150
HOURS = 3.0
TRIALS = (1_000, 10_000, 100_000)
#: workers of searches that give each of them as many trials
FLEETS = (15, 150, 1_500)
TRIALS_EACH = 20

#: simulations of the shortest search, of which the quickest counts: it is over in a fraction of a second
REPEATS = 3


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


def measure(workers: int, trials: int | None, policy: str) -> Run:
    """To be called in a fresh process: peak memory never falls."""
    before = simulate(cluster(WORKERS, 200), policy=policy).peak_mib
    repeats = REPEATS if trials is not None and trials <= TRIALS[0] else 1
    found = [simulate(cluster(workers, trials), policy=policy) for _ in range(repeats)]
    best = min(found, key=lambda each: each.cpu_seconds)
    return Run(best.trials, best.cpu_seconds, best.peak_mib, best.peak_mib - before)


def alone(*arguments: object) -> Run:
    """The measurement, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def same(policy: str) -> bool:
    """Return True when an hour of the cluster goes the same way twice, to the bit."""
    described = with_settings(cluster(WORKERS), seconds=3600.0)
    first, second = (repr(list(simulate(described, policy=policy).rows())) for _ in "12")
    return first == second


def series(numbers: Sequence[int], title: str, unit: str, measured: Sequence[Run]) -> dict[str, Run]:
    """Print what some searches cost, and return them by number of workers or trials."""
    runs = dict(zip(map(str, numbers), measured, strict=True))
    rows = {
        number: {
            "trials": run.trials,
            "CPU seconds": f"{run.cpu_seconds:.2f}",
            "us a trial": f"{run.microseconds:.0f}",
            "peak MiB": f"{run.peak_mib:.0f}",
            "bytes a trial": f"{run.added_mib * 2**20 / run.trials:.0f}",
        }
        for number, run in runs.items()
    }
    show(rows, unit, title)
    return runs


def growth(runs: Mapping[str, Run]) -> float:
    """Return the greatest cost of a trial, as a multiple of its cost in the smallest search."""
    first, *others = (run.microseconds for run in runs.values())
    return max(others) / first


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--policy", choices=POLICIES, default=DEFAULT_SETTINGS.policy)
    policy = parser.parse_args().policy
    hours = series([WORKERS], f"{HOURS:g} simulated hours", "workers", [alone(WORKERS, None, policy)])
    searches = [alone(WORKERS, trials, policy) for trials in TRIALS]
    by_trials = series(TRIALS, f"{WORKERS} workers, more and more trials", "limit", searches)
    searches = [alone(workers, TRIALS_EACH * workers, policy) for workers in FLEETS]
    by_workers = series(FLEETS, f"more and more workers, {TRIALS_EACH} trials each", "workers", searches)
    goals = {
        f"three hours of {WORKERS} workers, CPU seconds": goal(hours[str(WORKERS)].cpu_seconds, at_most=25.0),
        "CPU of a trial among more trials, beside the fewest": goal(growth(by_trials), at_most=1.5),
        "CPU of a trial among more workers, beside the fewest": goal(growth(by_workers), at_most=1.5),
        "the same to the bit": goal(float(same(policy)), at_least=1.0),
    }
    found = {"hours": hours, "by_trials": by_trials, "by_workers": by_workers}
    figures = {name: {number: run._asdict() for number, run in runs.items()} for name, runs in found.items()}
    finish(figures, goals, {"policy": policy})


if __name__ == "__main__":
    main()
