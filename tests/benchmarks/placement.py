"""How much of the best possible throughput each policy reaches: ``python tests/benchmarks/placement.py [DATA]``.

DATA is a folder with gavel_single_gpu.json and philly_quantiles.json, tests/benchmarks/data by default. Every run is
the real scheduler with its cost model, which learns the speeds from nothing, on simulated slots. Split cases have
families of known seconds; in flat ones the seconds depend on params (flat.py). Other fleets and tables:

  python tests/benchmarks/placement.py --fleet 15/45/90
  python tests/benchmarks/placement.py --cluster my_cluster.py   # as `python -m shadho_celery.simulate` takes it
  python tests/benchmarks/placement.py --rates my_rates.json --fleet 8/2     # {family: {class: trials a second}}
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import flat
import fleets
import numpy as np
from figures import beside, count, finish, goal, make_parser, quartiles, runs_of, show
from fleets import most, slots_of
from msgspec.structs import replace

from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement.shares import UniformShares
from shadho_celery.scheduler.proposals import trial_seed
from shadho_celery.simulation.simulation import Cluster, load, make_play, simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

POLICIES = ("cost", "fifo", "paper", "push")


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


def run(case: Cluster | str, policy: str, seed: int) -> Run:
    """One run of a case under a policy. A cluster file is read here, since its functions do not travel to a process."""
    cluster = load(case) if isinstance(case, str) else case
    if policy == "push":
        return push(cluster, seed)
    played = simulate(cluster, policy=policy, seed=seed)
    slots = slots_of(cluster)
    busy = sum(played.utilisation[name] * number for name, number in slots.items())
    return summarise(cluster, played.complete, busy / sum(slots.values()), played.seconds)


def summarise(cluster: Cluster, complete: Mapping[str, int], utilisation: float, seconds: float) -> Run:
    """The figures of a run of so many seconds in which that many trials of each subspace were completed."""
    # Trials of each subspace, in units of its part of the mix.
    counts = np.array([complete[each.name] / each.probability for each in split(compile_space(cluster.space))])
    balanced = float(counts.min()) / seconds
    return Run(
        count=sum(complete.values()),
        balanced=balanced * 3600,
        share=balanced * cluster.settings.get("seconds", seconds) / most(cluster),
        utilisation=utilisation,
        spread=float(np.abs(counts / max(sum(complete.values()), 1) - 1.0).max()),
    )


def push(cluster: Cluster, seed: int) -> Run:
    """Push all trials at the start, to the classes' queues in turn, as a plain Celery user would.

    As many as the bound allows, and the run ends with the last one: a queue's trials wait for its own class, however
    idle the others are.
    """
    space, slots_by_class = compile_space(cluster.space), slots_of(cluster)
    play, subspaces = make_play(seeded(cluster, seed), space), split(space)
    shares = UniformShares({subspace.name: subspace.probability for subspace in subspaces})
    left = {name: number for name, number in shares.quotas(int(most(cluster))).items() if number}
    classes = [name for name, number in slots_by_class.items() if number]
    slots = {name: [0.0] * slots_by_class[name] for name in classes}
    complete, busy, end = dict.fromkeys([subspace.name for subspace in subspaces], 0), 0.0, 0.0
    turns = itertools.count()
    for place, subspace in enumerate(subspaces):
        samples = subspace.sample(np.random.default_rng([seed, place]), left.get(subspace.name, 0))
        for index, params in enumerate(samples):
            where = classes[next(turns) % len(classes)]
            own = trial_seed(seed, place, index)
            attempt = Attempt(number=0, attempt=1, subspace=subspace.name, params=params, seed=own)
            outcome = play(attempt, where)
            seconds = outcome.seconds or 0.0
            done_at = slots[where][0] + seconds
            heapq.heapreplace(slots[where], done_at)
            busy, end = busy + seconds, max(end, done_at)
            complete[subspace.name] += outcome.state is TrialState.COMPLETE
    return summarise(cluster, complete, busy / (end * sum(slots_by_class.values())), end)


def seeded(cluster: Cluster, seed: int) -> Cluster:
    """The cluster with another seed."""
    return dataclasses.replace(cluster, fleet=replace(cluster.fleet, seed=seed))


# The cases, and the table


def cases(given: argparse.Namespace) -> dict[str, Cluster]:
    """The standard cases, or those that were asked for."""
    philly = given.data / "philly_quantiles.json"
    values = fleets.sizes(philly) if philly.exists() else ()
    table = fleets.seconds_of(fleets.rates(given.rates or given.data / fleets.RATES))
    classes = list(next(iter(table.values())))
    four = {family: table[family] for family in fleets.FOUR if family in table}
    found = {}
    for text in given.fleet or _fleets(len(classes)):
        workers = [int(part) for part in text.split("/")]
        if len(workers) != len(classes):
            raise SystemExit(f"--fleet {text} does not give a number for each of {', '.join(classes)}")
        fleet = dict(zip(classes, workers, strict=True))
        for families in (four, table) if len(four) == 4 and four != table else (table,):
            found[f"{len(families)} families {text}"] = fleets.describe(families, fleet, values, given.hours)
    if not given.fleet and not given.rates:
        fleet = dict.fromkeys(fleets.SVM_FACTORS, 50)
        found[SPEED_ONLY] = fleets.describe(fleets.svm_seconds(), fleet, values, given.hours)
    return found


def _fleets(classes: int) -> list[str]:
    """150 workers, evenly and with few of the first class, whose name is that of the fastest in Gavel's table."""
    steps = [place * (place + 1) / 2 for place in range(1, classes + 1)]
    even, few = [150 // classes] * classes, [round(150 * step / sum(steps)) for step in steps]
    return ["/".join(map(str, workers)) for workers in (even, few)]


SPEED_ONLY = "SVM, speed only 50/50/50"


def tell(results: Mapping[tuple[str, str], list[Run]]) -> None:
    """One row for each case and policy."""
    rows = {}
    for (case, policy), runs in results.items():
        means = [float(np.mean(column)) for column in zip(*runs, strict=True)]
        shares = [each.share for each in runs]
        rows[f"{case}: {policy}"] = {
            "trials": f"{means[0]:.0f}",
            "an hour, even mix": f"{means[1]:.0f}",
            "share of bound (seeds)": f"{means[2]:.3f} ({min(shares):.3f}-{max(shares):.3f})",
            "utilised": f"{means[3]:.3f}",
            "worst family off by": f"{100 * means[4]:.1f} %",
        }
    show(rows, "case: policy")


def goals(results: Mapping[tuple[str, str], list[Run]]) -> dict[str, dict[str, object]]:
    """Return the goals of `cost` on each case, each seed beside the same one of `fifo`."""
    found = {}
    for case in dict.fromkeys(case for case, _ in results):
        cost, fifo = ([each.share for each in results[case, policy]] for policy in ("cost", "fifo"))
        ratios = beside(cost, [max(each, 1e-9) for each in fifo])
        if case == SPEED_ONLY:
            found[f"{case}: beside fifo"] = goal(ratios, at_least=0.98)
        else:
            least = 0.95 if case.startswith("4 ") else 0.90
            found[f"{case}: share of bound"] = goal(cost, at_least=least)
            found[f"{case}: beside fifo"] = goal(ratios, at_least=1.25)
        worst = max(each.spread for each in results[case, "cost"])
        found[f"{case}: worst family off by"] = goal(worst, at_most=0.10)
    return found


def main() -> None:
    """Run everything in parallel processes and print the tables."""
    parser = make_parser(__doc__)
    parser.add_argument("data", type=Path, nargs="?", default=fleets.DATA, help="folder with the tables")
    parser.add_argument("--fleet", action="append", help="workers by class, as 50/50/50; may be repeated")
    parser.add_argument("--cluster", action="append", help="a cluster file instead; may be repeated")
    parser.add_argument("--rates", type=Path, help="another table of rates, JSON: {family: {class: rate}}")
    parser.add_argument("--flat-seeds", type=count, default=3, help="runs of each flat case (default: %(default)s)")
    parser.add_argument("--hours", type=float, default=3.0, help="simulated hours (default: %(default)s)")
    parser.add_argument("--seeds", type=count, default=5, help="runs of each case (default: %(default)s)")
    parser.add_argument("--pictures", type=Path, help="folder for placement.svg, gantt.png and flat.svg")
    parser.add_argument("--jobs", type=count, help="processes (default: one for each core)")
    given = parser.parse_args()
    try:
        described = {(each := load(path)).name: each for path in given.cluster or ()}
    except UsageError as error:
        parser.error(str(error))
    for each in described.values():
        if each.settings.get("seconds") is None:
            parser.error(f"cluster {each.name}: STUDY has no seconds; give the time for which policies are compared")
    if not given.cluster and not (rates := given.rates or given.data / fleets.RATES).is_file():
        parser.error(f"there is no {rates}: name a folder such as {fleets.DATA}, which has it")
    wanted = described or cases(given)
    sources = dict(zip(described, given.cluster or (), strict=True)) or wanted
    with ProcessPoolExecutor(given.jobs) as pool:
        jobs = {(name, policy): partial(run, case, policy) for name, case in sources.items() for policy in POLICIES}
        results = runs_of(pool, "split spaces", jobs, range(given.seeds))
        tell(results)
        reach, of_flat = goals(results), {}
        if not (given.cluster or given.rates or given.fleet):
            of_flat, more = play_flat(given.hours, given.flat_seeds, pool)
            reach |= more
    if given.pictures:
        from picture import gantt, over_time, shares_of_the_bound

        shares_of_the_bound(results, given.pictures / "placement.svg")
        gantt(next(iter(wanted.values())), given.pictures / "gantt.png")
        over_time(flat.flat_cases(given.hours)["two numbers"], given.pictures / "flat.svg", given.seeds)
    figures = {
        f"{case}, {policy}": {
            name: quartiles(list(column)) for name, column in zip(Run._fields, zip(*each, strict=True), strict=True)
        }
        for (case, policy), each in results.items()
    }
    finish(figures | of_flat, reach, {"hours": given.hours, "seeds": given.seeds})


def play_flat(
    hours: float, seeds: int, pool: ProcessPoolExecutor
) -> tuple[dict[str, object], dict[str, dict[str, object]]]:
    """Play the flat spaces and the one with structural options; return figures and goals."""
    jobs = {
        (name, how): partial(flat.run, name, hours, how) for name in flat.flat_cases(hours) for how in flat.ways(name)
    }
    results = runs_of(pool, "flat spaces", jobs, range(seeds))
    flat.tell(results)
    reach = flat.goals(results)
    options = {"structural": partial(flat.structural, hours)}
    [found] = runs_of(pool, "structural options", options, range(seeds)).values()
    print(f"forty structural options, not split: {np.mean(found):.3f} of the bound")
    reach["forty structural options: share of bound"] = goal(found, at_least=0.95)
    return {f"{case}, {how}": [run._asdict() for run in runs] for (case, how), runs in results.items()}, reach


if __name__ == "__main__":
    main()
