"""Rungs on unlike machines: top-budget results an hour, and the time to the first one, under `cost` and `fifo`.

A fleet of few strong slots and many weak ones, with a start-up of every trial and with none. Trials continue from
checkpoints on shared storage; their sizes and delays are random. The bound is the linear program's at the mix of rungs
that a run has completed itself, so that promoting more than 1 / eta gains nothing.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from figures import goal, interval, results_of

sys.path.append(str(Path(__file__).parents[1]))

from services.families import Family, cluster_of, fleet_of, half_normal, log_normal

from shadho_celery.core.trial import TrialState
from shadho_celery.placement.bound import throughput_bound
from shadho_celery.simulation.cluster_file import Cluster
from shadho_celery.simulation.simulation import simulate

Json = dict[str, Any]

LEAST, MOST, ETA = 1, 81, 3
BUDGETS = (1.0, 3.0, 9.0, 27.0, 81.0)
SLOTS = {"strong": 8, "weak": 32}
#: seconds of a unit of budget on a strong slot, and of a start-up
UNIT, STARTUPS = 3.0, (30.0, 0.0)
#: the first result varies more than the rates, and comes soon: by start-up, it has so many times the seeds, each so
#: much shorter
FIRSTS = {30.0: (4, 0.5), 0.0: (12, 0.2)}
#: standard deviation of the log size of trials, and of the half-normal delay
SIZES, DELAYS = 0.5, 0.5


class Run(NamedTuple):
    """What came of one run."""

    #: results at the top budget, an hour
    top_an_hour: float
    #: part of the bound at the run's own mix of rungs
    share: float
    #: seconds to the first of them
    first: float


def describe(startup: float, slower: float, hours: float) -> Cluster:
    """The fleet, whose weak slots take `slower` times as long for a unit."""
    settings = {"seconds": hours * 3600, "fidelity": {"least": LEAST, "most": MOST, "eta": ETA, "how": "asha"}}
    return cluster_of(
        fleet_of(SLOTS, checkpoints="shared"),
        {"net": Family(seconds={"strong": UNIT, "weak": UNIT * slower})},
        settings,
        overhead_seconds=lambda values, machine: startup,
        size=partial(log_normal, SIZES),
        straggler=partial(half_normal, DELAYS),
    )


def seconds_of(startup: float, slower: float) -> dict[str, dict[str, float]]:
    """Mean seconds of a promoted trial by rung and class."""
    work = [budget - before for before, budget in zip((0.0, *BUDGETS), BUDGETS, strict=False)]
    rates = {"strong": UNIT, "weak": UNIT * slower}
    return {
        str(rung): {name: startup + rate * units for name, rate in rates.items()} for rung, units in enumerate(work)
    }


def most(startup: float, slower: float, mix: Mapping[str, float]) -> float:
    """The most trials a second that any placement can complete in a mix of rungs."""
    seconds = seconds_of(startup, slower)
    return throughput_bound({rung: seconds[rung] for rung in mix}, SLOTS, mix).rate


def gain(startup: float, slower: float) -> float:
    """The bound beside the rate at which every slot takes rungs as they come, in the mix of the ladder."""
    mix, seconds = {str(rung): float(ETA**-rung) for rung in range(len(BUDGETS))}, seconds_of(startup, slower)
    as_they_come = sum(
        slots * sum(mix.values()) / sum(part * seconds[rung][name] for rung, part in mix.items())
        for name, slots in SLOTS.items()
    )
    return most(startup, slower, mix) / as_they_come


def play(policy: str, startup: float, slower: float, hours: float, seed: int) -> Run:
    """One run."""
    played = simulate(describe(startup, slower, hours), policy=policy, sampler="random", seed=seed)
    done = [trial for trial in played.study.trials if trial.state is TrialState.COMPLETE]
    ends = [trial.finished_at or math.inf for trial in done if trial.rung == len(BUDGETS) - 1]
    mix = {rung: float(count) for rung, count in Counter(str(trial.rung) for trial in done).items()}
    return Run(
        top_an_hour=len(ends) / played.seconds * 3600,
        share=sum(mix.values()) / played.seconds / most(startup, slower, mix),
        first=min(ends, default=played.seconds),
    )


def machines(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return the figures by start-up and policy, and the goals."""

    def played(lengths: Mapping[float, tuple[int, float]], words: str) -> dict[tuple[float, str], list[Run]]:
        runs = {
            (startup, policy): [
                processes.submit(
                    play, policy, startup, arguments.slower, part * arguments.hours, arguments.first_seed + seed
                )
                for seed in range(times * arguments.seeds)
            ]
            for startup, (times, part) in lengths.items()
            for policy in ("cost", "fifo")
        }
        return results_of(runs, words)

    found = played(dict.fromkeys(STARTUPS, (1, 1.0)), "rungs on unlike machines")
    firsts = played(FIRSTS, "their first results at the top")
    figures: Json = {}
    goals: Json = {}
    for startup in STARTUPS:
        cost, fifo = found[startup, "cost"], found[startup, "fifo"]
        beside = [one.top_an_hour / max(two.top_an_hour, 1e-9) for one, two in zip(cost, fifo, strict=True)]
        pairs = zip(firsts[startup, "cost"], firsts[startup, "fifo"], strict=True)
        sooner = [math.log(two.first / one.first) for one, two in pairs]
        for policy, each in (("cost", cost), ("fifo", fifo)):
            means = [statistics.mean(column) for column in zip(*each, strict=True)]
            means[-1] = statistics.mean(run.first for run in firsts[startup, policy])
            figures[f"start-up {startup:g} s, {policy}"] = dict(zip(Run._fields, means, strict=True))
            print(
                f"start-up {startup:3g} s, {policy:5s} {means[0]:6.1f} results at the top an hour, "
                f"{means[1]:.3f} of the bound at its mix, the first after {means[2]:.0f} s"
            )
        name = f"start-up of {startup:g} s"
        print(f"{name}: the bound is {gain(startup, arguments.slower):.3f} of the rate of fifo")
        if startup:
            goals[f"{name}: share of the bound"] = goal(
                [one.share for one in cost], at_least=0.95, by_mean=arguments.quick
            )
        else:
            goals[f"{name}: results at the top an hour beside fifo"] = goal(
                beside, at_least=0.98, by_mean=arguments.quick
            )
        low, high = interval(sooner)
        # Of ratios the geometric mean: 44 seeds tell it within a tenth, 132 within a twentieth.
        mean = goal(math.exp(statistics.mean(sooner)), at_least=1.25)
        mean |= {"interval": [math.exp(low), math.exp(high)], "seeds": len(sooner)}
        goals[f"{name}: time to the first result at the top, fifo's beside cost's"] = mean
    return figures, goals
