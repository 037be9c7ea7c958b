"""How much of the best possible throughput each policy reaches: ``python tests/benchmarks/placement.py DATA``.

DATA is a folder with gavel_single_gpu.json, philly_quantiles.json and svm_trace_*.csv.gz. Every run is the real
scheduler with its cost model, which learns the speeds from nothing, on simulated slots. Other fleets and tables:

  python tests/benchmarks/placement.py DATA --fleet 15/45/90
  python tests/benchmarks/placement.py DATA --rates my_rates.json --fleet 8/2     # {family: {class: trials a second}}
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from collections.abc import Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import fleets
import numpy as np
from figures import finish, goal, quartiles
from fleets import Case
from playing import play_study
from replay import KERNELS, Record, read, space
from rich.console import Console
from rich.table import Table

from shadho_celery.context import Outcome
from shadho_celery.trial import Trial, TrialState

POLICIES = ("cost", "fifo", "paper", "push")
FLEETS = ("50/50/50", "15/45/90")
#: the chance that a trial of the time-to-target study reaches its target
TARGET_CHANCE = 0.0005


class Run(NamedTuple):
    """What came of one run."""

    #: trials completed
    count: int
    #: completed an hour in the even mix: families * the least count of any
    balanced: float
    #: that, as a share of the linear program's bound
    share: float
    utilisation: float
    #: how far the family that departs most is from its share
    spread: float


def run(case: Case, policy: str, seed: int) -> Run:
    """One run of a case under a policy."""
    if policy == "push":
        return push(case, seed)
    end = case.hours * 3600
    study = play_study(case.space(), case.fleet, case.play(seed), end, policy=policy, seed=seed)
    ended = [t for t in study.trials if (t.finished_at or 0.0) <= end]
    busy = sum(t.seconds or 0.0 for t in ended) + sum(end - (t.started_at or end) for t in study.sent)
    families = [t.subspace.removeprefix("family=") for t in ended if t.state is TrialState.COMPLETE]
    return summarise(case, families, busy, end)


def summarise(case: Case, families: list[str], busy: float, seconds: float) -> Run:
    """The figures of a run of so many seconds in which a trial of each of `families` was completed."""
    counts = np.array([families.count(family) for family in case.seconds], dtype=float)
    balanced = counts.min() * len(counts) / seconds * 3600
    return Run(
        count=len(families),
        balanced=balanced,
        share=balanced * case.hours / case.bound,
        utilisation=busy / (seconds * sum(case.fleet.values())),
        spread=float(np.abs(counts / max(counts.mean(), 1e-9) - 1.0).max()),
    )


def push(case: Case, seed: int) -> Run:
    """What a plain Celery user would write: all trials are pushed at the start, the classes' queues in turn.

    As many as the bound allows, and the run ends with the last one: a queue's trials wait for its own class, however
    idle the others are.
    """
    play = case.play(seed)
    queues: dict[str, list[Trial]] = {name: [] for name in case.fleet}
    families = itertools.cycle(case.seconds)
    for number in range(int(case.bound)):
        # Rounds of families start at another class each time, so that every class sees every family.
        name = list(queues)[(number + number // len(case.seconds)) % len(queues)]
        queues[name].append(Trial(number=number, subspace=f"family={next(families)}", params={}))
    completed, busy, end = [], 0.0, 0.0
    for name, waiting in queues.items():
        slots = [0.0] * case.fleet[name]
        for trial in waiting:
            outcome = play(trial, name)
            done_at = slots[0] + outcome.seconds
            heapq.heapreplace(slots, done_at)
            busy, end = busy + outcome.seconds, max(end, done_at)
            if outcome.state is TrialState.COMPLETE:
                completed.append(trial.subspace.removeprefix("family="))
    return summarise(case, completed, busy, end)


# Time to a target


def hours_to_target(trace: Path, case: Case, target: float, policy: str, shares: str, seed: int) -> float:
    """Hours until a study of SHADHO's SVM space, with its recorded losses and a case's speeds, reaches the target."""
    record, timed = Record(read(trace)), case.play(seed)
    family_of = {f"kernel={kernel}": f"family={family}" for kernel, family in zip(KERNELS, case.seconds, strict=True)}

    def play(trial: Trial, compute_class: str) -> Outcome:
        outcome = timed(trial.evolve(subspace=family_of[trial.subspace]), compute_class)
        if outcome.state is TrialState.FAILED:
            return outcome
        return Outcome(state=outcome.state, seconds=outcome.seconds, loss=record.nearest(trial, "cores4").loss)

    # A few runs are unlucky: they are given ten times the time that a target takes on average.
    end = 10 / TARGET_CHANCE / case.bound * case.hours * 3600
    study = play_study(space(), case.fleet, play, end, target=target, policy=policy, shares=shares, seed=seed)
    return study.clock.now() / 3600


def target_of(trace: Path) -> float:
    """The loss that TARGET_CHANCE of an even mix of draws reach."""
    from shadho_celery.space.compile import compile_space
    from shadho_celery.space.split import split

    record, generator = Record(read(trace)), np.random.default_rng(0)
    losses = [
        record.nearest(Trial(number=0, subspace=subspace.name, params=params), "cores4").loss
        for subspace in split(compile_space(space()))
        for params in subspace.sample(generator, 5000)
    ]
    return float(np.quantile(losses, TARGET_CHANCE))


# The cases, and the table


def cases(given: argparse.Namespace) -> list[Case]:
    """The standard cases, or those that were asked for."""
    values = fleets.sizes(given.data / "philly_quantiles.json")
    table = fleets.seconds_of(fleets.rates(given.rates or given.data / "gavel_single_gpu.json"))
    classes = list(next(iter(table.values())))
    four = {} if given.rates else {family: table[family] for family in fleets.FOUR}
    found = []
    for text in given.fleet or FLEETS:
        workers = [int(part) for part in text.split("/")]
        if len(workers) != len(classes):
            raise SystemExit(f"--fleet {text} does not give a number for each of {', '.join(classes)}")
        fleet = dict(zip(classes, workers, strict=True))
        for families in (four, table):
            if families:
                name = f"{len(families)} families {text}"
                found.append(Case(name=name, seconds=families, fleet=fleet, sizes=values, hours=given.hours))
    if not given.fleet and not given.rates:
        fleet = dict.fromkeys(fleets.SVM_FACTORS, 50)
        found.append(Case(name=SPEED_ONLY, seconds=fleets.svm_seconds(), fleet=fleet, sizes=values, hours=given.hours))
    return found


SPEED_ONLY = "SVM, speed only 50/50/50"


def show(results: Mapping[tuple[str, str], list[Run]]) -> None:
    """One row for each case and policy."""
    table = Table(
        "case", "policy", "trials", "an hour, even mix", "share of bound (seeds)", "utilised", "worst family off by"
    )
    for (case, policy), runs in results.items():
        means = [float(np.mean(column)) for column in zip(*runs, strict=True)]
        shares = [each.share for each in runs]
        table.add_row(
            case,
            policy,
            f"{means[0]:.0f}",
            f"{means[1]:.0f}",
            f"{means[2]:.3f} ({min(shares):.3f}-{max(shares):.3f})",
            f"{means[3]:.3f}",
            f"{100 * means[4]:.1f} %",
            end_section=policy == POLICIES[-1],
        )
    Console(width=118).print(table)


def goals(results: Mapping[tuple[str, str], list[Run]]) -> dict[str, dict[str, object]]:
    """What `cost` should reach on each case."""
    found = {}
    for case in dict.fromkeys(case for case, _ in results):
        cost, fifo = (float(np.mean([each.share for each in results[case, p]])) for p in ("cost", "fifo"))
        if case == SPEED_ONLY:
            found[f"{case}: beside fifo"] = goal(cost / fifo, at_least=0.98)
        else:
            least = 0.95 if case.startswith("4 ") else 0.90
            found[f"{case}: share of bound"] = goal(cost, at_least=least)
            found[f"{case}: beside fifo"] = goal(cost / fifo, at_least=1.25)
        worst = max(each.spread for each in results[case, "cost"])
        found[f"{case}: worst family off by"] = goal(worst, at_most=0.10)
    return found


def main() -> None:
    """Run everything in parallel processes and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with the tables")
    parser.add_argument("--fleet", action="append", help="workers by class, as 50/50/50; may be repeated")
    parser.add_argument("--rates", type=Path, help="another table of rates, JSON: {family: {class: rate}}")
    parser.add_argument("--hours", type=float, default=3.0, help="simulated hours (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each case (default: %(default)s)")
    parser.add_argument("--target-seeds", type=int, default=20, help="runs to a target loss (default: %(default)s)")
    parser.add_argument("--pictures", type=Path, help="folder for placement.svg and gantt.png")
    parser.add_argument("--jobs", type=int, help="processes (default: one for each core)")
    given = parser.parse_args()
    wanted = cases(given)
    with ProcessPoolExecutor(given.jobs) as pool:
        runs: dict[tuple[str, str], list[Future[Run]]] = {
            (case.name, policy): [pool.submit(run, case, policy, seed) for seed in range(given.seeds)]
            for case in wanted
            for policy in POLICIES
        }
        results = {key: [future.result() for future in futures] for key, futures in runs.items()}
        show(results)
        reach = goals(results)
        times = time_to_target(given, wanted[0], pool)
    if times:
        reach["time to target: fifo's beside cost's with shares by promise"] = show_times(times)
    if given.pictures:
        from placement_pictures import chart, gantt

        chart(results, given.pictures / "placement.svg")
        gantt(wanted[0], given.pictures / "gantt.png")
    figures = {
        f"{case}, {policy}": {
            name: quartiles(list(column)) for name, column in zip(Run._fields, zip(*each, strict=True), strict=True)
        }
        for (case, policy), each in results.items()
    }
    finish(figures | {"hours_to_target": times}, reach, {"hours": given.hours, "seeds": given.seeds})


def show_times(times: Mapping[str, list[float]]) -> dict[str, object]:
    """Print the hours to the target; the goal compares a search by promise on placed machines with plain fifo."""
    plain = np.array(times["fifo, uniform"])
    for name, hours in times.items():
        ratio = float(np.median(plain / np.array(hours)))
        print(f"  {name}: median {np.median(hours):.3f} hours; plain fifo takes {ratio:.2f} times as long (median)")
    return goal(float(np.median(plain / np.array(times["cost, promise"]))), at_least=1.3)


def time_to_target(given: argparse.Namespace, case: Case, pool: ProcessPoolExecutor) -> dict[str, list[float]]:
    """Hours by policy and shares; nothing where there is no trace, or no four families."""
    traces = sorted(given.data.glob("svm_trace_*.csv.gz"))
    if not traces or len(case.seconds) != len(KERNELS) or not given.target_seeds:
        return {}
    target = target_of(traces[0])
    print(f"time to a loss of {target:.4g}, which {TARGET_CHANCE:.2%} of the trials reach, on {case.name}:")
    variants = [(policy, shares) for policy in ("fifo", "cost") for shares in ("uniform", "promise")]
    futures = {
        f"{policy}, {shares}": [
            pool.submit(hours_to_target, traces[0], case, target, policy, shares, seed)
            for seed in range(given.target_seeds)
        ]
        for policy, shares in variants
    }
    return {name: [future.result() for future in each] for name, each in futures.items()}


if __name__ == "__main__":
    main()
