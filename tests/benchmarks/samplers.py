"""How good the samplers' guesses are, beside hyperopt's and Optuna's: ``python tests/benchmarks/samplers.py``.

Parts, in this order; ``--part`` runs some of them:

- closed: test functions of known optimum, a mixed and a conditional space, 25 labels of which five matter. Regret is
  the best loss less the optimum. ``auto`` against the best peer of each problem, ``gp`` and ``tpe`` by themselves.
- small: hyperopt's own test domains written by hand; ``tpe`` against random search by wins: a lower best loss under the
  same seed, a tie is half a win.
- time: milliseconds of a suggestion by the length of the history.
- pool (only by name): TPE on a simulated fleet of two classes, with trials drawn ahead against without.

Ours run on a virtual clock, where a trial lasts a minute, because ``auto`` spends less on short trials. The search
space is split into subspaces, and the draws are those of `shadho_celery.minimize`. No worse than a peer means: the
median regret is not above it, or Mann-Whitney's test gives p >= .05; regrets below a thousandth of the loss's range
count as equal. Peers' regrets come from a table that was recorded in November 2026. It has 100 evaluations of these
problems: with ``--shift``, ``--problems`` or ``--trials``, only our own regrets are measured.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from figures import finish, goal, p_no_worse, results_of
from playing import play_study
from problems import CLOSED_FORMS, SMALL, Problem, Unlucky, problems_of

from shadho_celery.core.trial import Attempt, Outcome, Trial, TrialState
from shadho_celery.samplers import make_sampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

Json = dict[str, Any]

#: regrets of hyperopt's and Optuna's samplers by problem and sampler; of Optuna's slow GP five seeds
PEERS_TABLE = Path(__file__).parent / "data" / "sampler_peers.json"
OURS = ("auto", "gp", "tpe")
#: evaluations of the closed forms, and their seeds
EVALUATIONS, SEEDS = 100, 11
#: evaluations after which the table has a figure
AT = (20, 40, 60, 80, 100)
#: `gp` by itself: problem -> evaluations, greatest median regret
GP_GOALS: Mapping[str, tuple[int, float]] = {"branin": (60, 1e-3), "hartmann3": (60, 1e-3), "hartmann6": (80, 0.01)}
#: where `tpe` is held against Optuna's
TPE_GOALS = ("five_of_25", "rastrigin5", "levy4", "hartmann6")
#: part of the closed forms on which `auto` is no worse than the best peer
NO_WORSE = 9 / 11

#: trials of the small problems; failures are counted after the warm-up
SMALL_TRIALS, WARM_UP = 60, 20
SMALL_ALGORITHMS = ("random", "tpe")
#: the spike's bottom lies at -2, the end of the slope at -1
SPIKE = -1.9

#: lengths of the history at which a suggestion is timed
HISTORIES = (20, 100, 300, 1000, 5000)

#: seconds that a trial is said to last
MINUTE = 60.0
#: the fleet on which trials are drawn ahead, and the seconds of the smallest and the largest params on each class
FLEET: Mapping[str, int] = {"gpu": 4, "cpu": 12}
SECONDS: Mapping[str, tuple[float, float]] = {"gpu": (20.0, 30.0), "cpu": (20.0, 420.0)}


@cache
def problems(part: str, file: Path | None = None, shift: int | None = None) -> Mapping[str, Problem]:
    """Return the problems of a part, or of a file, moved if that is asked for."""
    found = problems_of(file) if file else {"closed": CLOSED_FORMS, "small": SMALL}[part]
    return found if shift is None else {name: each.shifted(shift) for name, each in found.items()}


def search_in(where: tuple[Any, ...], name: str, algorithm: str, seed: int, trials: int) -> list[float]:
    """Return the losses of one search, infinite where a trial failed; `where` are the arguments of `problems`."""
    problem = problems(*where)[name]
    space = compile_space(problem.space)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        try:
            loss = float(problem.objective(space.evaluate(attempt.params)))
        except Unlucky:
            return Outcome(state=TrialState.FAILED, seconds=MINUTE)
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=MINUTE)

    study = play_study(problem.space, {"cpu": 1}, play, None, trials=trials, sampler=algorithm, shares=None, seed=seed)
    return [math.inf if trial.outcome.loss is None else trial.outcome.loss for trial in study]


# Closed forms


def closed(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return figures and goals of the closed forms, or of the problems in a file."""
    where = ("closed", arguments.problems, arguments.shift)
    named = problems(*where)
    seeds, trials = arguments.seeds, arguments.trials
    is_recorded = where[1:] == (None, None) and trials == EVALUATIONS
    runs = {
        (name, algorithm): [
            processes.submit(search_in, where, name, algorithm, seed, trials)
            for seed in range(arguments.first_seed, arguments.first_seed + seeds)
        ]
        for name in named
        for algorithm in OURS
    }
    found = results_of(runs, "searches")
    regrets: dict[str, dict[str, list[list[float]]]] = {name: {} for name in named}
    for (name, algorithm), searches in found.items():
        optimum = named[name].optimum
        assert optimum is not None
        regrets[name][algorithm] = [best_so_far(losses, optimum) for losses in searches]
    if is_recorded:
        for name, rows in json.loads(PEERS_TABLE.read_text())["regrets"].items():
            regrets[name] |= rows
    figures = {name: compare(named[name], rows, trials) for name, rows in regrets.items()}
    show(figures)
    goals = goals_beside_peers(figures) if is_recorded else {}
    if arguments.problems is None and trials >= EVALUATIONS:
        goals |= goals_of_ours(figures)
    return figures, goals


def looked_at(trials: int) -> list[int]:
    """Return the evaluations after which there is a figure."""
    return [*(place for place in AT if place < trials), trials]


def best_so_far(losses: Sequence[float], optimum: float) -> list[float]:
    """Return the regret after each of the evaluations that are looked at."""
    best = np.minimum.accumulate(losses) - optimum
    return [float(best[place - 1]) for place in looked_at(len(losses))]


def compare(problem: Problem, rows: Mapping[str, Sequence[Sequence[float]]], trials: int) -> Json:
    """Return one problem's figures: medians by algorithm and evaluation, and `auto` against each peer."""
    equal = problem.equal()
    medians = {
        algorithm: {
            str(at): statistics.median(run[place] for run in runs) for place, at in enumerate(looked_at(trials))
        }
        for algorithm, runs in rows.items()
    }
    last = {algorithm: [max(run[-1], equal) for run in runs] for algorithm, runs in rows.items()}
    peers = [name for name in rows if name not in OURS]
    best = min(peers, key=lambda name: statistics.median(last[name])) if peers else None
    return {
        "median_regret": medians,
        "best_peer": best,
        "p_no_worse": {ours: {peer: p_no_worse(last[ours], last[peer]) for peer in peers} for ours in OURS},
        "auto_is_no_worse": best is None or p_no_worse(last["auto"], last[best]) >= 0.05,
        "tpe_is_no_worse_than_optuna": "optuna tpe" not in last or p_no_worse(last["tpe"], last["optuna tpe"]) >= 0.05,
    }


def show(figures: Mapping[str, Json]) -> None:
    """Print medians of the last evaluation."""
    algorithms = [*next(iter(figures.values()))["median_regret"]]
    print(
        f"{'median regret':14s}"
        + "".join(f" {name.replace('optuna', 'o.').replace('hyperopt', 'h.'):>14s}" for name in algorithms)
    )
    for name, row in figures.items():
        last = [[*row["median_regret"][algorithm].values()][-1] for algorithm in algorithms]
        word = "" if row["auto_is_no_worse"] else f"  worse than {row['best_peer']}"
        print(f"{name:14s}" + "".join(f" {value:14.3g}" for value in last) + word)


def goals_beside_peers(figures: Mapping[str, Json]) -> Json:
    """Return the goals that compare with the recorded peers."""
    p_values = sorted(row["p_no_worse"]["auto"]["optuna tpe"] for row in figures.values())
    # Holm: the least p is held against .05 / n, the next one against .05 / (n - 1), and so on.
    worse = 0
    for place, p in enumerate(p_values):
        if p >= 0.05 / (len(p_values) - place):
            break
        worse += 1
    no_worse = statistics.mean(row["auto_is_no_worse"] for row in figures.values())
    tpe = sum(figures[name]["tpe_is_no_worse_than_optuna"] for name in TPE_GOALS)
    return {
        "part of the problems on which auto is no worse than the best peer": goal(no_worse, at_least=NO_WORSE),
        "problems on which auto is significantly worse than Optuna's TPE": goal(worse, at_most=0),
        "problems of four on which tpe is no worse than Optuna's": goal(tpe, at_least=len(TPE_GOALS)),
    }


def goals_of_ours(figures: Mapping[str, Json]) -> Json:
    """Return the goals of the regrets on our own problems."""
    tree = figures["tree"]["median_regret"]["auto"][str(EVALUATIONS)]
    goals = {"tree: median regret of auto": goal(tree, at_most=0.1)}
    for name, (place, most) in GP_GOALS.items():
        regret = figures[name]["median_regret"]["gp"][str(place)]
        goals[f"{name}: median regret of gp after {place}"] = goal(regret, at_most=most)
    return goals


# Small problems


def small(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return figures and goals of the small problems."""
    where = ("small", None, arguments.shift)
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.small_seeds)
    runs = {
        (problem, name): [processes.submit(search_in, where, problem, name, seed, SMALL_TRIALS) for seed in seeds]
        for problem in SMALL
        for name in SMALL_ALGORITHMS
    }
    found = results_of(runs, "searches")
    figures = {}
    names = ("random", "tpe", "tpe>rnd")
    print(f"{'':14s} {'median best loss':>20s} {'wins':>9s}")
    print(f"{'':14s}" + "".join(f" {name:>9s}" for name in names))
    for problem in SMALL:
        figures[problem] = compare_wins(problem, {name: found[problem, name] for name in SMALL_ALGORITHMS})
        print(f"{problem:14s}" + "".join(f" {value:9.4g}" for value in list(figures[problem].values())[:3]))
    spike = statistics.mean(min(run) <= SPIKE for run in found["distractor", "tpe"])
    goals = {
        "tpe wins against random": goal(_mean(figures, "wins_against_random"), at_least=0.70),
        "distractor: part of tpe's searches that find the spike": goal(spike, at_least=0.8),
    }
    for problem, row in figures.items():
        if SMALL[problem].fails:
            part = row["failing_tpe"] / row["failing_random"]
            goals[f"{problem}: failing trials, tpe / random"] = goal(part, at_most=1.0)
    return figures, goals


def compare_wins(problem: str, runs: Mapping[str, Sequence[Sequence[float]]]) -> Json:
    """Return one problem's figures."""
    best = {name: [min(run) for run in runs[name]] for name in SMALL_ALGORITHMS}
    figures: Json = {f"median_best_{name}": statistics.median(best[name]) for name in SMALL_ALGORITHMS}
    figures["wins_against_random"] = wins(best["tpe"], best["random"])
    if SMALL[problem].fails:
        figures |= {f"failing_{name}": failing(runs[name]) for name in SMALL_ALGORITHMS}
    return figures


def wins(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The share of seeds with a lower best loss."""
    return statistics.mean(0.5 if a == b else float(a < b) for a, b in zip(ours, theirs, strict=True))


def failing(losses: Sequence[Sequence[float]]) -> float:
    """The share of trials that failed after the warm-up."""
    return statistics.mean(math.isinf(loss) for run in losses for loss in run[WARM_UP:])


def _mean(figures: Mapping[str, Mapping[str, float]], name: str) -> float:
    return statistics.mean(row[name] for row in figures.values())


# Time of a suggestion


def timed(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return the milliseconds of a suggestion by sampler and history, and of one of 100 that are asked at once."""
    figures: Json = {}
    print(f"{'ms a suggestion':14s}" + "".join(f" {length:>9d}" for length in HISTORIES))
    for name in ("random", "tpe", "gp", "auto"):
        lengths = HISTORIES if name != "gp" else HISTORIES[:3]
        figures[name] = {str(length): processes.submit(milliseconds, name, length, 1).result() for length in lengths}
        print(f"{name:14s}" + "".join(f" {value:9.3g}" for value in figures[name].values()))
    at_once = processes.submit(milliseconds, "auto", HISTORIES[-1], 100).result()
    figures["auto, 100 asks after 5000"] = at_once
    print(f"auto, a suggestion of 100 that are asked at once after {HISTORIES[-1]} trials: {at_once:.3g} ms")
    return figures, {
        "ms a suggestion of gp after 100 trials": goal(figures["gp"]["100"], at_most=60.0),
        "ms a suggestion of auto, 100 asks at once after 5000 trials": goal(at_once, at_most=1.0),
    }


def milliseconds(name: str, history: int, asks: int) -> float:
    """Return the median milliseconds of a suggestion where so many are asked at once, on Hartmann's 6."""
    problem = CLOSED_FORMS["hartmann6"]
    subspace = split(compile_space(problem.space))[0]
    sampler = make_sampler(name, subspace, (0,))
    generator = np.random.default_rng(0)

    def tell(number: int, params: Any) -> None:
        values = subspace.space.evaluate(params)
        outcome = Outcome(state=TrialState.COMPLETE, loss=problem.objective(values), seconds=0.01)
        sampler.tell([Trial(number=number, subspace="all", params=params, state=outcome.state, outcome=outcome)])

    for number, params in enumerate(subspace.sample(generator, history)):
        tell(number, params)
    took = []
    for number in range(7):
        began = time.perf_counter()
        asked = sampler.ask(asks, [])
        took.append(1000 * (time.perf_counter() - began) / asks)
        tell(history + number, asked[0])
    return statistics.median(took[1:])


# With trials drawn ahead


def with_pool(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return TPE with trials drawn ahead against without."""
    seeds = arguments.small_seeds
    runs = {
        (problem, size): [processes.submit(search_on_fleet, problem, size, seed, SMALL_TRIALS) for seed in range(seeds)]
        for problem in SMALL
        for size in (None, 0)
    }
    found = results_of(runs, "searches")
    figures = {}
    print(f"{'':14s} {'median best loss':>20s} {'wins':>9s}")
    print(f"{'':14s} {'pool':>10s} {'none':>9s}")
    for problem in SMALL:
        ours, without = (found[problem, size] for size in (None, 0))
        row = (statistics.median(ours), statistics.median(without), wins(ours, without))
        figures[problem] = dict(zip(("pool", "none", "wins"), row, strict=True))
        print(f"{problem:14s} {row[0]:10.4g} {row[1]:9.4g} {row[2]:9.2f}")
    # The standard deviation of a mean of so many coins: no significant loss if one half lies within two of them.
    reach = 1.96 * math.sqrt(0.25 / (seeds * len(SMALL)))
    ends = goal(_mean(figures, "wins") + reach, at_least=0.5)
    return figures, {"wins of tpe with the pool, upper end of 95 %": ends}


def search_on_fleet(problem: str, pool: int | None, seed: int, trials: int) -> float:
    """The best loss of TPE on simulated slots, with so many trials drawn ahead; None for the default."""
    task = SMALL[problem]
    space = compile_space(task.space)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        label, domain = next((label, domain) for label, domain in space.domains.items() if label in attempt.params)
        part = float(np.clip(domain.to_unit(attempt.params[label]), 0.0, 1.0))
        low, high = SECONDS[compute_class]
        seconds = low + (high - low) * part
        try:
            loss = float(task.objective(space.evaluate(attempt.params)))
        except Unlucky:
            return Outcome(state=TrialState.FAILED, seconds=seconds)
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)

    study = play_study(task.space, FLEET, play, None, trials=trials, sampler="tpe", pool=pool, seed=seed)
    return math.inf if study.best is None else study.best.outcome.loss or 0.0


def draw(figures: Mapping[str, Json], folder: Path) -> None:
    """Draw the parts that have a picture."""
    from picture import regrets, suggestion_times

    if "closed" in figures:
        regrets(figures["closed"], folder / "regret.png")
    if "time" in figures:
        suggestion_times(figures["time"], folder / "suggestion_times.png")


def quiet() -> None:
    """Keep the searches' own messages out of the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


PARTS = {
    "closed": closed,
    "small": small,
    "time": timed,
    "pool": with_pool,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="5 seeds; under ten minutes")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="of most parts (default 11)")
    parser.add_argument("--small-seeds", type=int, default=20, help="of the small problems (default 20)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--trials", type=int, default=EVALUATIONS, help="of the closed forms (default 100)")
    parser.add_argument("--shift", type=int, metavar="SEED", help="move the boxes by up to 15 %% of their widths")
    parser.add_argument("--problems", type=Path, help="Python file with PROBLEMS = {name: (space, function, optimum)}")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw regret and time there")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = arguments.small_seeds = 5
    if arguments.problems is not None and not arguments.problems.is_file():
        parser.error(f"argument --problems: there is no file {arguments.problems}")
    parts = arguments.part or (["closed"] if arguments.problems else [*PARTS][:-1])
    # Several searches at a time: with several threads each they would wait for one another.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    figures, goals = {}, {}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), initializer=quiet) as processes:
        for part in parts:
            print(f"\n{part}")
            figures[part], reached = PARTS[part](arguments, processes)
            goals.update(reached)
    if arguments.pictures is not None:
        draw(figures, arguments.pictures)
    settings = {name: getattr(arguments, name) for name in ("seeds", "small_seeds", "first_seed", "trials", "shift")}
    finish(figures, goals, settings)


if __name__ == "__main__":
    main()
