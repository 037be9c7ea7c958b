"""Fleets as people have them, on simulated machines: ``python tests/benchmarks/fleets_of_people.py [--quick]``.

- spot: machines that are preempted every 20 minutes on average. No trial may fail by that. The time is compared with
  the bound of a fleet whose trials only read their checkpoints again, on the machines that were there. Beside it stands
  the share of the trials that were interrupted three times: where each interruption is a lost attempt, these fail.
- limited: workers that end after four hours. Their idle tail is the time from the end of a worker's last trial to its
  own end. A trial is killed if it still runs then. Seconds depend on params only, so that predictions can hold.
- money: prices of 2.5, 1.0 and .08 an hour, and a deadline of twice the time that the same search takes by time.

Each part has 95 % intervals over its seeds. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from figures import finish, goal, interval, results_of
from rich.console import Console
from rich.table import Table

from shadho_celery.core.records import AttemptRecord, End, Leaving, unpack
from shadho_celery.core.trial import TrialState
from shadho_celery.placement.bound import cheapest, throughput_bound
from shadho_celery.simulation.cluster_file import Cluster, parse
from shadho_celery.simulation.simulation import Simulation, family_of, simulate

#: workers by class, each with one slot
FLEET = {"gpu_large": 8, "gpu_small": 24, "cpu": 40}
CLASSES = tuple(FLEET)
#: classes of the spot machines
SPOT = ("gpu_large", "gpu_small")
#: money that a slot costs an hour
PRICES = {"gpu_large": 2.5, "gpu_small": 1.0, "cpu": 0.08}
#: mean seconds of a trial by family and class
SECONDS = {
    "resnet": {"gpu_large": 300, "gpu_small": 700, "cpu": 9000},
    "lstm": {"gpu_large": 400, "gpu_small": 800, "cpu": 4000},
    "mlp": {"gpu_large": 240, "gpu_small": 270, "cpu": 600},
    "forest": {"gpu_large": 600, "gpu_small": 600, "cpu": 650},
}

#: mean seconds between preemptions of a machine, and from one to the start of the next machine; its start-up
PREEMPTION_SECONDS, RETURN_SECONDS, STARTUP_SECONDS = 1200, 120, 60
#: seconds to read a checkpoint of another machine
HANDOVER_SECONDS = 5
#: number of interruptions of a trial after which it fails where each of them is a lost attempt
LOSSES = 3

#: seconds that a worker stays
FOR_SECONDS = 4 * 3600
#: a prediction holds if a trial takes at most this multiple of it
HELD = 1.1

#: the deadline, as a multiple of the seconds that the search takes by time
DEADLINE = 2.0

SPOT_TRIALS, MONEY_TRIALS, LIMITED_SECONDS = 5000, 1000, 12 * 3600
SEEDS, QUICK_SEEDS = 10, 3

Figures = Mapping[str, float]


def cluster(
    per_class: Mapping[str, Any],
    families: Mapping[str, Any] | None = None,
    classes: Sequence[str] = CLASSES,
    **top: Any,
) -> Cluster:
    """The fleet with these further keys of each class, and at the top of its file."""
    known = {family: {name: by_class[name] for name in classes} for family, by_class in SECONDS.items()}
    return parse(
        {
            "classes": {name: {"workers": FLEET[name], "price": PRICES[name], **per_class} for name in classes},
            "families": families or {name: {"seconds": by_class} for name, by_class in known.items()},
            **top,
        }
    )


VARIED = {"size": {"law": "uniform", "low": 0.5, "high": 1.5}, "straggler": {"law": "halfnormal", "scale": 0.3}}


def attempts_of(found: Simulation) -> list[AttemptRecord]:
    """The attempts that a worker has claimed and that have ended."""
    return [each for each in found.store.attempts() if each.started_at is not None and each.ended_at is not None]


def spot(seed: int) -> Figures:
    """A fleet of spot machines."""
    stay = {
        "preemption_seconds": PREEMPTION_SECONDS,
        "return_seconds": RETURN_SECONDS,
        "worker_startup_seconds": STARTUP_SECONDS,
    }
    kept = {"checkpoints": "shared", "checkpoint_seconds": 60, "handover_seconds": HANDOVER_SECONDS}
    described = cluster(stay, classes=SPOT, trials=SPOT_TRIALS, **kept, **VARIED)
    found = simulate(described, seed=seed)
    there: defaultdict[str, float] = defaultdict(float)
    for session in found.store.sessions():
        there[session.compute_class] += (session.until or found.seconds) - session.since
    slots = {name: seconds / found.seconds for name, seconds in there.items()}
    handover = HANDOVER_SECONDS * found.interrupted / found.trials
    needed = {family: {name: by_class[name] + handover for name in SPOT} for family, by_class in SECONDS.items()}
    bound = SPOT_TRIALS / throughput_bound(needed, slots).rate
    ends = Counter(each.number for each in attempts_of(found) if each.end in {End.RETURNED, End.LOST})
    return {
        "failed": found.study.count(TrialState.FAILED),
        "time beside the bound": found.seconds / bound,
        "interrupted attempts a trial": found.interrupted / found.trials,
        "busy": float(np.mean([*found.utilisation.values()])),
        "would fail by three losses": sum(n >= LOSSES for n in ends.values()) / found.trials,
    }


def _takes(found: Simulation, attempt: AttemptRecord) -> float:
    """Return the seconds that an attempt would have taken in a fleet without random factors."""
    trial = found.study.trial(attempt.number)
    family = family_of(trial)
    return SECONDS[family][str(attempt.compute_class)] * float(trial.params[f"width of {family}"])


def _predicted(found: Simulation, attempt: AttemptRecord) -> float:
    """Return the seconds that were predicted for an attempt; 0 if nothing was."""
    placed = unpack(attempt.placed, found.study.record.classes).get(str(attempt.compute_class))
    return 0.0 if placed is None else placed.seconds or 0.0


def limited(seed: int) -> Figures:
    """A fleet of workers with limited time."""
    width = {"width": {"law": "uniform", "low": 0.5, "high": 1.5}}
    families = {
        family: {"params": width, "seconds": {name: f"{each} * width" for name, each in by_class.items()}}
        for family, by_class in SECONDS.items()
    }
    described = cluster({"for_seconds": FOR_SECONDS, "return_seconds": 60}, families, seconds=LIMITED_SECONDS)
    found = simulate(described, seed=seed)
    by_worker: defaultdict[str, list[AttemptRecord]] = defaultdict(list)
    for each in attempts_of(found):
        by_worker[str(each.host)].append(each)
    tail = total = 0.0
    for session in found.store.sessions():
        if session.reason is not Leaving.STOPPED or session.until is None:
            continue
        ends = [e.ended_at for e in by_worker[session.worker] if session.since <= (e.started_at or 0) < session.until]
        tail += session.until - max([each for each in ends if each is not None], default=session.since)
        total += session.until - session.since
    killed = [each for each in attempts_of(found) if each.end is End.RETURNED]
    held = [each for each in killed if _takes(found, each) <= HELD * _predicted(found, each)]
    return {
        "idle tail": tail / total,
        "killed although predicted": len(held),
        "killed": len(killed),
        "busy": float(np.mean([*found.utilisation.values()])),
    }


def money(seed: int) -> Figures:
    """A search by money beside one by time."""
    described = cluster({}, trials=MONEY_TRIALS, **VARIED)
    by_time = simulate(described, seed=seed)
    deadline = DEADLINE * by_time.seconds
    found = simulate(described, seed=seed, place_by="money", deadline=deadline)
    spent = sum(by_time.money.values())
    each = MONEY_TRIALS / len(SECONDS)
    best = cheapest(SECONDS, dict.fromkeys(SECONDS, each), FLEET, PRICES, dict.fromkeys(FLEET, deadline))
    assert best is not None
    return {
        "money beside that by time": sum(found.money.values()) / spent,
        "least money beside that by time": best.money / spent,
        "time beside the deadline": found.seconds / deadline,
    }


PARTS: Mapping[str, Callable[[int], Figures]] = {"spot": spot, "limited": limited, "money": money}


def goals(results: Mapping[str, Sequence[Figures]], *, by_mean: bool) -> dict[str, dict[str, Any]]:
    """Return the goals of the parts that ran."""
    wanted: Mapping[str, Mapping[str, dict[str, float]]] = {
        "spot": {"failed": {"at_most": 0}, "time beside the bound": {"at_most": 1.05}},
        "limited": {"idle tail": {"at_most": 0.03}, "killed although predicted": {"at_most": 0}},
        "money": {"money beside that by time": {"at_most": 0.75}, "time beside the deadline": {"at_most": 1.0}},
    }
    return {
        f"{part}: {name}": goal([each[name] for each in runs], **bound, by_mean=by_mean)
        for part, runs in results.items()
        for name, bound in wanted[part].items()
    }


def show(results: Mapping[str, Sequence[Figures]]) -> None:
    """Print the means of all figures with their intervals."""
    table = Table("part", "figure", "mean", "95 % interval")
    for part, runs in results.items():
        for name in runs[0]:
            values = [each[name] for each in runs]
            low, high = interval(values)
            table.add_row(
                part, name, f"{np.mean(values):.3g}", f"{low:.3g} to {high:.3g}", end_section=name == [*runs[0]][-1]
            )
    Console(width=100).print(table)


def main() -> None:
    """Run the parts in parallel processes, and print figures and goals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="runs of each part (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_SEEDS} runs, judged by their means")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    given = parser.parse_args()
    seeds = min(given.seeds, QUICK_SEEDS) if given.quick else given.seeds
    if seeds < 1:
        parser.error(f"--seeds is {seeds}: give a number above 0")
    with ProcessPoolExecutor(given.jobs) as pool:
        futures = {name: [pool.submit(PARTS[name], seed) for seed in range(seeds)] for name in given.part or PARTS}
        results = results_of(futures, "fleets")
    show(results)
    figures = {part: {name: [run[name] for run in runs] for name in runs[0]} for part, runs in results.items()}
    finish(figures, goals(results, by_mean=given.quick), {"seeds": seeds, "fleet": FLEET})


if __name__ == "__main__":
    main()
