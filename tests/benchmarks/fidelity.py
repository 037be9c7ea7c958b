"""How soon searches with budgets find good params: ``python tests/benchmarks/fidelity.py``.

Parts, in this order; ``--part`` runs some of them:

- reach: Hartmann's functions and counting ones, with budgets that cost less and tell less; one of them misleads. The
  true regret of the incumbent at the cost of 12, 25, 50 and 100 full evaluations: `how: auto` against dehb, Optuna's
  TPE with Hyperband, and random search at the full budget.
- curves: recorded learning curves in the folder ``--data`` (without it, the part is left out), on 1 and 8 slots. The
  mean regret of the best trial that the study names, at the cost of 5, 10, 20 and 40 full evaluations. Promoted trials
  continue from checkpoints. Beside it are the regrets of NePS, Syne Tune, DEHB and Optuna, which `curve_peers.py` has
  recorded. The seeds begin at 200, because lower ones were used for tuning.
- straggling: on 25 and 64 simulated slots whose trials take ``1 + |N(0, 1)|`` times as long, the time in which ASHA
  comes to the final regret of successive halving, and the part of the slots' time that it leaves unused.
- machines: on 8 strong and 32 weak simulated slots, with a start-up of every trial and with none, how many results at
  the top budget ASHA has an hour, and when the first, with policy `cost` beside `fifo` and the best placement. Trials
  continue from checkpoints on shared storage; their sizes and delays are random. The bound is the linear program's at
  the mix of rungs that a run has completed itself, so that promoting more than 1 / eta gains nothing.

Ours run through the scheduler on simulated slots, where a trial takes its cost in seconds. Peers' regrets come from a
table that was recorded in November 2026 with the seeds 0 to 10. With other seeds or problems, only our own regrets are
measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from curve_peers import FIRST, TABLE
from curve_problems import curve_names, read_curves
from fidelity_problems import PROBLEMS, FidelityProblem, read_problems
from figures import beside, count, finish, goal, interval, make_parser, p_no_worse, runs_of, show
from numpy.typing import NDArray
from playing import play_study
from services.families import Family, cluster_of, fleet_of, half_normal, log_normal

from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.placement.bound import throughput_bound
from shadho_celery.simulation.simulation import Cluster, simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.study.state import StudyState

Json = dict[str, Any]

#: regrets by problem, peer and seed
PEERS_TABLE = Path(__file__).parent / "data" / "fidelity_peers.json"
#: costs, in full evaluations, at which there is a figure
AT = (12, 25, 50, 100)
#: the same of learning curves, whose full evaluation takes UNITS simulated seconds
CURVES_AT, UNITS = (5, 10, 20, 40), 200.0
#: half the width of a 95 % interval, in standard errors
NORMAL = 1.96
PEERS = ("random", "optuna tpe, hyperband", "dehb")
SEEDS = 11
#: part of the regret of random search by which `auto` may exceed it where low budgets mislead
TENTH = 0.1
#: slots of the straggling part, its problem, and the cost that is spent on each slot
SLOTS, STRAGGLING, EACH = (25, 64), "mfh6", 8.0
#: simulated seconds of a full evaluation
SECONDS = 1000.0
HOWS = ("auto", "asha", "hyperband", "dehb")


def problems_of(path: Path | None) -> Mapping[str, FidelityProblem]:
    return PROBLEMS if path is None else read_problems(path)


def play(
    problem: FidelityProblem,
    how: str,
    seed: int,
    evaluations: float,
    *,
    slots: int = 1,
    sampler: str = "auto",
    spread: float = 0.0,
) -> tuple[list[tuple[float, float]], StudyState]:
    """Return (time, true regret) whenever the incumbent changes, in full evaluations, and the study at its end."""
    space = compile_space(problem.space)
    full = problem.cost(problem.most)
    path: list[tuple[float, float]] = []
    best = -1

    def run(attempt: Attempt, _: str) -> Outcome:
        budget = problem.most if attempt.budget is None else attempt.budget
        draw = np.random.default_rng([seed, attempt.number])
        loss = float(problem.loss(space.evaluate(attempt.params), budget, draw))
        longer = 1 + spread * abs(float(np.random.default_rng([seed, attempt.number, 1]).standard_normal()))
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=SECONDS * longer * problem.cost(budget) / full)

    def on_turn(study: StudyState) -> None:
        nonlocal best
        if study.best is not None and study.best.number != best:
            best = study.best.number
            regret = problem.truth(space.evaluate(study.best.params)) - problem.optimum
            path.append((study.clock.now() / SECONDS, regret))

    fidelity = None if how == "full" else {"least": problem.least, "most": problem.most, "eta": 3, "how": how}
    study = play_study(
        problem.space,
        {"cpu": slots},
        run,
        SECONDS * evaluations * (1 + 1e-9),
        sampler=sampler,
        shares=None,
        fidelity=fidelity,
        speculate=False,
        seed=seed,
        on_turn=on_turn,
    )
    return path, study


def play_curve(data: Path, name: str, how: str, slots: int, seed: int) -> list[float]:
    """Return the regret at the full budget of the study's best trial, at each of CURVES_AT."""
    problem = read_curves(data, name)
    space = compile_space(problem.space)
    path: list[tuple[float, float]] = []
    best = -1
    reached: dict[int, float] = {}

    def run(attempt: Attempt, _: str) -> Outcome:
        values = space.evaluate(attempt.params)
        budget = problem.most if attempt.budget is None else attempt.budget
        loss, cost = problem.look(values, budget)
        # A promoted trial continues from the checkpoint of its origin.
        origin = attempt.number if attempt.origin is None else attempt.origin
        seconds = UNITS * (cost - reached.get(origin, 0.0))
        reached[origin] = cost
        if math.isnan(loss):
            return Outcome(state=TrialState.FAILED, seconds=seconds)
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)

    def on_turn(study: StudyState) -> None:
        nonlocal best
        if study.best is not None and study.best.number != best:
            best = study.best.number
            path.append((study.clock.now() / UNITS, problem.regret(space.evaluate(study.best.params))))

    fidelity = None if how == "full" else {"least": problem.least, "most": problem.most, "eta": 3, "how": how}
    play_study(
        problem.space,
        {"cpu": slots},
        run,
        UNITS * CURVES_AT[-1] / slots * (1 + 1e-9),
        sampler="auto",
        shares=None,
        fidelity=fidelity,
        speculate=False,
        turn_seconds=UNITS / 100,
        seed=seed,
        on_turn=on_turn,
    )
    spent = [(time * slots, regret) for time, regret in path]
    return [next((r for cost, r in reversed(spent) if cost <= at * (1 + 1e-6)), 1.0) for at in CURVES_AT]


def curves(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return the mean regrets on recorded learning curves by kind, search and number of slots, and the goals.

    The problems are fixed, so the standard error is that of the seeds.
    """
    data: Path | None = arguments.data
    if data is None:
        return {}, {}
    first = FIRST + arguments.first_seed
    seeds = [*range(first, first + arguments.seeds)]
    names, slots = curve_names(data), arguments.slots or (1, 8)
    jobs = {
        (name, how, count): partial(play_curve, data, name, how, count)
        for name in names
        for how in arguments.how
        for count in slots
    }
    found = runs_of(processes, "learning curves", jobs, seeds)
    recorded = json.loads(TABLE.read_text())
    figures: Json = {}
    goals: Json = {}
    texts: dict[str, dict[str, str]] = {}
    no_worse = []
    for (kind, at, most), number in itertools.product((("lcbench", 10, 0.25), ("taskset", 40, 0.2)), slots):
        own = [name for name in names if name.startswith(kind)]
        peers = [each for each in recorded[own[0]] if each.endswith(f" {number} slots")]
        rows = {f"{how}, {number} slots": [found[name, how, number] for name in own] for how in arguments.how}
        rows |= {each: [[*recorded[name][each].values()] for name in own] for each in peers}
        means, errors = zip(*map(mean_and_error, rows.values()), strict=True)
        for place, title in enumerate(rows):
            texts[f"{kind} {title}"] = _shown(means[place], errors[place])
            figures[f"{kind} {title}"] = {"mean": means[place].tolist(), "standard_error": errors[place].tolist()}
            if place:
                difference, error = means[0] - means[place], np.hypot(errors[0], errors[place])
                texts[f"{kind} auto less {title}"] = _shown(difference, error)
                if title in peers:
                    no_worse.append(difference <= NORMAL * error)
        if number == 1:
            reached = float(means[0][CURVES_AT.index(at)])
            goals[f"{kind}: mean regret of auto at the cost of {at}"] = goal(reached, at_most=most)
    show(texts, "search", "mean regret (standard error) at a cost")
    goals["costs, kinds and peers of all at which auto is no worse"] = goal(float(np.mean(no_worse)), at_least=1.0)
    return figures, goals


def mean_and_error(runs: Sequence[Sequence[Sequence[float]]]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean regrets over problems and their seeds, by cost, and the standard errors of the seeds."""
    own = [np.array(each) for each in runs]
    variances = [each.var(axis=0, ddof=1) / len(each) for each in own]
    return np.mean([each.mean(axis=0) for each in own], axis=0), np.sqrt(np.sum(variances, axis=0)) / len(own)


def _shown(means: NDArray[np.float64], errors: NDArray[np.float64]) -> dict[str, str]:
    return {str(at): f"{mean:.3f} ({error:.3f})" for at, mean, error in zip(CURVES_AT, means, errors, strict=True)}


def regrets_at(path: Sequence[tuple[float, float]]) -> list[float]:
    """Return the regret at each of AT, infinite before the first incumbent."""
    return [next((regret for cost, regret in reversed(path) if cost <= at * (1 + 1e-6)), math.inf) for at in AT]


def ours(name: str, path: Path | None, how: str, seed: int) -> list[float]:
    return regrets_at(play(problems_of(path)[name], how, seed, AT[-1])[0])


def reach(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return the regrets by problem and search, and their goals."""
    seeds = [*range(arguments.first_seed, arguments.first_seed + arguments.seeds)]
    names = [name for name in problems_of(arguments.problems) if name in (arguments.only or [name])]
    recorded = {} if arguments.problems else json.loads(PEERS_TABLE.read_text())
    peers = PEERS if recorded and all(str(seed) in recorded[names[0]]["random"] for seed in seeds) else ()
    jobs = {(name, how): partial(ours, name, arguments.problems, how) for name in names for how in arguments.how}
    found = runs_of(processes, "searches with budgets", jobs, seeds)
    for name in names:
        for peer in peers:
            found[name, peer] = [recorded[name][peer][str(seed)] for seed in seeds]
    return _judged(names, [*arguments.how], peers, found)


def _judged(
    names: Sequence[str], hows: Sequence[str], peers: Sequence[str], found: Mapping[tuple[str, str], list[list[float]]]
) -> tuple[Json, Json]:
    figures: Json = {}
    texts: dict[str, dict[str, str]] = {}
    for name in names:
        rows = {each: np.median(np.array(found[name, each]), axis=0).tolist() for each in (*hows, *peers)}
        texts |= {
            f"{name} {each}": {str(at): f"{regret:.4g}" for at, regret in zip(AT, row, strict=True)}
            for each, row in rows.items()
        }
        figures[name] = {
            "median_regret": {each: dict(zip(map(str, AT), row, strict=True)) for each, row in rows.items()}
        }
        if not peers:
            continue
        best = min(peers, key=lambda peer: rows[peer][-1])
        last = {each: [run[-1] for run in found[name, each]] for each in ("auto", best)}
        figures[name] |= {
            "best_peer": best,
            "p_no_worse": p_no_worse(last["auto"], last[best]),
            "most_of_random": max(map(_in_that_of, rows["auto"], rows["random"])),
        }
    show(texts, "search", "median true regret at a cost")
    if not peers:
        return figures, {}
    no_worse = sum(row["p_no_worse"] >= 0.05 for row in figures.values())
    goals = {
        f"problems of {len(names)} on which auto is no worse than the best peer, at the cost of {AT[-1]}": goal(
            no_worse, at_least=max(1, len(names) - 1)
        )
    }
    if "misleading" in figures:
        goals["misleading: regret of auto in that of random search, the most at any cost"] = goal(
            figures["misleading"]["most_of_random"], at_most=1 + TENTH
        )
    return figures, goals


def _in_that_of(regret: float, other: float) -> float:
    """Return a regret in units of another one: equals are 1, whether both are 0 or neither has an incumbent yet."""
    if regret == other:
        return 1.0
    return math.inf if other == 0 else regret / other


def straggle(path: Path | None, slots: int, seed: int) -> tuple[float, float]:
    """Return the time of ASHA in that of halving until its final regret, and the part of slots' time ASHA leaves."""
    problem = problems_of(path)[STRAGGLING] if path is None else next(iter(problems_of(path).values()))
    facts: dict[str, Any] = {"slots": slots, "sampler": "random", "spread": 1.0}
    halving, _ = play(problem, "halving", seed, EACH, **facts)
    asha, study = play(problem, "asha", seed, EACH, **facts)
    _, final = halving[-1]
    # An incumbent of a low budget may be better by chance than the first one of a higher budget: for good counts.
    before = max((place for place, (_, regret) in enumerate(asha) if regret > final), default=-1) + 1
    reached = asha[before][0] if before < len(asha) else 2 * EACH
    now = study.clock.now()
    ran = sum(trial.outcome.seconds or 0.0 for trial in study)
    ran += sum(now - study.running_since(trial) for trial in study.sent if trial.state is TrialState.RUNNING)
    return reached / EACH, 1 - ran / (slots * now)


def straggling(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return ASHA's time in that of successive halving where trials straggle, and the goals."""
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.straggling_seeds)
    jobs = {slots: partial(straggle, arguments.problems, slots) for slots in SLOTS}
    figures: Json = {}
    goals: Json = {}
    for slots, found in runs_of(processes, "searches that straggle", jobs, seeds).items():
        ratios, idle = [ratio for ratio, _ in found], [part for _, part in found]
        figures[str(slots)] = {"time": statistics.median(ratios), "waiting": statistics.mean(idle)}
        print(f"{slots} slots: ASHA's time {statistics.median(ratios):.2f} of halving's, waiting {max(idle):.2%}")
        goals[f"{slots} slots: time of ASHA in that of halving, to its regret"] = goal(
            statistics.median(ratios), at_most=0.7
        )
        goals[f"{slots} slots: part of the slots' time that ASHA leaves"] = goal(max(idle), at_most=0.02)
    return figures, goals


# Rungs on unlike machines

LEAST, MOST, ETA = 1, 81, 3
BUDGETS = (1.0, 3.0, 9.0, 27.0, 81.0)
FLEET = {"strong": 8, "weak": 32}
#: seconds of a unit of budget on a strong slot, and of a start-up
UNIT, STARTUPS = 3.0, (30.0, 0.0)
#: the first result varies more than the rates, and comes soon: by start-up, it has so many times the seeds, each so
#: much shorter
FIRSTS = {30.0: (4, 0.5), 0.0: (12, 0.2)}
#: standard deviation of the log size of trials, and of the half-normal delay
SIZES, DELAYS = 0.5, 0.5


class Rungs(NamedTuple):
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
        fleet_of(FLEET, checkpoints="shared"),
        {"net": Family(seconds={"strong": UNIT, "weak": UNIT * slower})},
        settings,
        overhead_seconds=lambda values, machine: startup,
        size=partial(log_normal, SIZES),
        straggler=partial(half_normal, DELAYS),
    )


def most(startup: float, slower: float, mix: Mapping[str, float]) -> float:
    """The most promoted trials a second that any placement can complete in a mix of rungs."""
    work = {str(rung): budget - before for rung, (before, budget) in enumerate(itertools.pairwise((0.0, *BUDGETS)))}
    rates = {"strong": UNIT, "weak": UNIT * slower}
    seconds = {rung: {name: startup + rate * work[rung] for name, rate in rates.items()} for rung in mix}
    return throughput_bound(seconds, FLEET, mix).rate


def play_rungs(policy: str, startup: float, slower: float, hours: float, seed: int) -> Rungs:
    """One run."""
    played = simulate(describe(startup, slower, hours), policy=policy, sampler="random", seed=seed)
    done = [trial for trial in played.study.trials if trial.state is TrialState.COMPLETE]
    ends = [trial.finished_at or math.inf for trial in done if trial.rung == len(BUDGETS) - 1]
    mix = {rung: float(count) for rung, count in Counter(str(trial.rung) for trial in done).items()}
    return Rungs(
        top_an_hour=len(ends) / played.seconds * 3600,
        share=sum(mix.values()) / played.seconds / most(startup, slower, mix),
        first=min(ends, default=played.seconds),
    )


def machines(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return the figures by start-up and policy, and the goals."""

    def played(startup: float, times: int, part: float) -> dict[str, list[Rungs]]:
        seeds = range(arguments.first_seed, arguments.first_seed + times * arguments.seeds)
        hours = part * arguments.hours
        jobs = {policy: partial(play_rungs, policy, startup, arguments.slower, hours) for policy in ("cost", "fifo")}
        return runs_of(processes, f"rungs, start-up of {startup:g} s", jobs, seeds)

    figures: Json = {}
    goals: Json = {}
    texts = {}
    for startup in STARTUPS:
        found, firsts = played(startup, 1, 1.0), played(startup, *FIRSTS[startup])
        for policy, each in found.items():
            means = [statistics.mean(column) for column in zip(*each, strict=True)]
            means[-1] = statistics.mean(run.first for run in firsts[policy])
            figures[f"start-up {startup:g} s, {policy}"] = dict(zip(Rungs._fields, means, strict=True))
            texts[f"start-up {startup:g} s, {policy}"] = {
                "at the top an hour": f"{means[0]:.1f}",
                "of the bound at its mix": f"{means[1]:.3f}",
                "the first after": f"{means[2]:.0f} s",
            }
        name = f"start-up of {startup:g} s"
        if startup:
            shares = [run.share for run in found["cost"]]
            goals[f"{name}: share of the bound"] = goal(shares, at_least=0.95, by_mean=arguments.quick)
        else:
            cost = [run.top_an_hour for run in found["cost"]]
            fifo = [max(run.top_an_hour, 1e-9) for run in found["fifo"]]
            goals[f"{name}: results at the top an hour beside fifo"] = goal(
                beside(cost, fifo), at_least=0.98, by_mean=arguments.quick
            )
        fifo, cost = ([run.first for run in firsts[policy]] for policy in ("fifo", "cost"))
        sooner = [math.log(ratio) for ratio in beside(fifo, cost)]
        # Of ratios the geometric mean: 44 seeds tell it within a tenth, 132 within a twentieth.
        mean = goal(math.exp(statistics.mean(sooner)), at_least=1.25)
        mean |= {"interval": [math.exp(end) for end in interval(sooner)], "seeds": len(sooner)}
        goals[f"{name}: time to the first result at the top, fifo's beside cost's"] = mean
    show(texts, "policy")
    return figures, goals


PARTS = {"reach": reach, "curves": curves, "straggling": straggling, "machines": machines}


def parse() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="run this part; may be repeated")
    parser.add_argument("--seeds", type=count, default=SEEDS, help="searches of each problem")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--straggling-seeds", type=count, default=SEEDS)
    parser.add_argument("--slower", type=float, default=4.0, help="part machines: of a weak slot beside a strong one")
    parser.add_argument("--hours", type=float, default=0.6, help="part machines: simulated")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="part curves: the data, see curve_problems.py")
    parser.add_argument("--slots", action="append", type=int, help="part curves: numbers of slots (default 1 and 8)")
    parser.add_argument("--how", action="append", choices=HOWS, help="ours beside auto; may be repeated")
    parser.add_argument(
        "--problems", type=Path, metavar="FILE", help="a Python file with PROBLEMS, see fidelity_problems.py"
    )
    parser.add_argument("--only", action="append", metavar="PROBLEM", help="part reach: this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="three seeds of each, judged by their means")
    parser.add_argument("--processes", type=count, default=2)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = arguments.straggling_seeds = 3
    arguments.how = ("auto", *(how for how in dict.fromkeys(arguments.how or ()) if how != "auto"))
    if unknown := set(arguments.only or ()) - set(problems_of(arguments.problems)):
        parser.error(f"--only {min(unknown)}: there are {', '.join(problems_of(arguments.problems))}")
    return arguments


def main() -> None:
    arguments = parse()
    figures: Json = {}
    goals: Json = {}
    with ProcessPoolExecutor(arguments.processes, mp_context=get_context("spawn")) as processes:
        for name in arguments.part or PARTS:
            print(f"\n{name}")
            figures[name], reached = PARTS[name](arguments, processes)
            goals |= reached
    finish(figures, goals, {"seeds": arguments.seeds, "first_seed": arguments.first_seed})


if __name__ == "__main__":
    main()
