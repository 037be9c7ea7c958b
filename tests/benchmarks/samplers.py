"""How good the samplers' guesses are: ``python tests/benchmarks/samplers.py [--quick]``.

Standard problems, the first ones hyperopt's own test domains written by hand, each searched by

- random search and TPE, through `shadho_celery.minimize` and so with the search space split into subspaces;
- hyperopt's ``tpe.suggest``, which searches the whole space at once.

One trial at a time, many seeds. A win is a lower best loss under the same seed; a tie is half a win.

With ``--pool`` instead TPE on a simulated fleet of two classes, where the seconds depend on a param: with trials drawn
ahead, for placement to choose from, against without.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import hyperopt
import numpy as np
from figures import finish, goal, results_of
from hyperopt import hp
from playing import play_study

from shadho_celery import minimize
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.space.compile import compile_space

TRIALS = 60
#: failures are counted after this many trials
WARM_UP = 20
ALGORITHMS = ("random", "tpe", "hyperopt")


@dataclass(frozen=True)
class Problem:
    """A search space and its loss."""

    space: Any
    objective: Callable[[Any], float]
    #: whether some settings raise
    fails: bool = False


#: the fleet on which trials are drawn ahead, and the seconds of the smallest and the largest params on each class
FLEET: Mapping[str, int] = {"gpu": 4, "cpu": 12}
SECONDS: Mapping[str, tuple[float, float]] = {"gpu": (20.0, 30.0), "cpu": (20.0, 420.0)}


class Unlucky(Exception):
    """A setting that cannot be trained."""


def distractor(x: float) -> float:
    """A spike near -10, and a slope that leads away from it."""
    return -1 / (1 + math.exp(-x)) - 2 * math.exp(-((x + 10) ** 2))


def gauss_wave(t: float) -> float:
    return -(math.sin(t) + 2 * math.exp(-((t / 5) ** 2)))


def many_wells(p: Mapping[str, float]) -> float:
    """A bowl of two dimensions full of small wells (Rastrigin's function, a gentle one)."""
    return sum(p[k] ** 2 + 3 * (1 - math.cos(2 * math.pi * p[k])) for k in ("x", "y"))


def branin(p: Mapping[str, float]) -> float:
    x, y = p["x"], p["y"]
    trough = (y - 5.1 / (4 * math.pi**2) * x**2 + 5 * x / math.pi - 6) ** 2
    return trough + 10 * (1 - 1 / (8 * math.pi)) * math.cos(x) + 10


HARTMANN_A = np.array(
    [
        [10, 3, 17, 3.5, 1.7, 8],
        [0.05, 10, 17, 0.1, 8, 14],
        [3, 3.5, 1.7, 10, 17, 8],
        [17, 8, 0.05, 10, 0.1, 14],
    ]
)
HARTMANN_P = 1e-4 * np.array(
    [
        [1312, 1696, 5569, 124, 8283, 5886],
        [2329, 4135, 8307, 3736, 1004, 9991],
        [2348, 1451, 3522, 2883, 3047, 6650],
        [4047, 8828, 8732, 5743, 1091, 381],
    ]
)


def hartmann6(p: Sequence[float]) -> float:
    inner = (HARTMANN_A * (np.array(p) - HARTMANN_P) ** 2).sum(axis=1)
    return -float(np.array([1.0, 1.2, 3.0, 3.2]) @ np.exp(-inner))


def svm(p: Mapping[str, Any]) -> float:
    """Four kernels; the best losses lie in a narrow valley of one of them, the others are easier to do fairly in."""
    log_c, coef0 = math.log10(p["C"]), float(p.get("coef0", 0.0))
    if p["kernel"] == "linear":
        return 0.20 + 0.01 * (log_c - 1) ** 2
    if p["kernel"] == "sigmoid":
        return 0.35 + 0.02 * (log_c + 1) ** 2 + 0.01 * coef0**2
    if p["kernel"] == "poly":
        degree = float(p["degree"])
        return 0.18 + 0.02 * (degree - 3) ** 2 + 0.01 * (log_c - 0.5) ** 2 + 0.01 * (coef0 - 0.5) ** 2
    log_gamma = math.log10(p["gamma"])
    return 0.40 - 0.35 * math.exp(-((log_c - 2) ** 2) / 2 - (log_gamma + 3) ** 2 / 0.5)


SVM = hp.choice(
    "kernel",
    [
        {"kernel": "linear", "C": hp.loguniform("linear_C", math.log(1e-3), math.log(1e4))},
        {
            "kernel": "rbf",
            "C": hp.loguniform("rbf_C", math.log(1e-3), math.log(1e4)),
            "gamma": hp.loguniform("gamma", math.log(1e-6), math.log(1e2)),
        },
        {
            "kernel": "poly",
            "C": hp.loguniform("poly_C", math.log(1e-3), math.log(1e4)),
            "degree": hp.quniform("degree", 1, 8, 1),
            "coef0": hp.uniform("poly_coef0", -1, 1),
        },
        {
            "kernel": "sigmoid",
            "C": hp.loguniform("sigmoid_C", math.log(1e-3), math.log(1e4)),
            "coef0": hp.uniform("sigmoid_coef0", -1, 1),
        },
    ],
)


def network(p: Mapping[str, Any]) -> float:
    """A small network's loss by its settings; large steps diverge, and what does not fit in memory raises."""
    log_rate = math.log10(p["rate"])
    if log_rate > -1.0 or p["width"] * p["layers"] > 1600:
        raise Unlucky("diverged, or out of memory")
    size = math.log2(p["width"]) * p["layers"]
    loss = 0.3 + 0.1 * (log_rate + 1.8) ** 2 + 0.002 * (size - 24) ** 2 + 0.4 * (p["dropout"] - 0.2) ** 2
    return float(loss + (0.0, 0.05, 0.15, 0.2)[p["activation"]])


NETWORK = {
    "rate": hp.loguniform("rate", math.log(1e-5), math.log(1.0)),
    "width": hp.qloguniform("width", math.log(16), math.log(1024), 16),
    "layers": hp.randint("layers", 1, 8),
    "dropout": hp.uniform("dropout", 0, 0.7),
    "activation": hp.choice("activation", [0, 1, 2, 3]),
}


def many_dists(z: Sequence[float]) -> float:
    return math.log(1e-2 + sum(z) ** 2)


MANY_DISTS = [
    hp.choice("a", [0, 1, 2]),
    hp.randint("b", 10),
    hp.uniform("c", 4, 7),
    hp.loguniform("d", -2, 0),
    hp.quniform("e", 0, 10, 3),
    hp.qloguniform("f", 0, 3, 2),
    hp.normal("g", 4, 7),
    hp.lognormal("h", -2, 2),
    hp.qnormal("i", 0, 10, 2),
    hp.pchoice("k", [(0.1, 0), (0.9, 1)]),
]


_X = hp.uniform("x", -20, 20)
PROBLEMS: Mapping[str, Problem] = {
    "quadratic1": Problem(hp.uniform("x", -5, 5), lambda x: (x - 3) ** 2),
    "distractor": Problem(hp.uniform("x", -15, 15), distractor),
    "gauss_wave": Problem(hp.choice("curve", [_X, _X + math.pi]), gauss_wave),
    "branin": Problem({"x": hp.uniform("x", -5, 10), "y": hp.uniform("y", 0, 15)}, branin),
    "many_wells": Problem({"x": hp.uniform("x", -5, 5), "y": hp.uniform("y", -5, 5)}, many_wells),
    "many_dists": Problem(MANY_DISTS, many_dists),
    "hartmann6": Problem([hp.uniform(f"x{i}", 0, 1) for i in range(6)], hartmann6),
    "svm": Problem(SVM, svm),
    "network": Problem(NETWORK, network, fails=True),
}


def search(problem: str, algorithm: str, seed: int, trials: int) -> list[float]:
    """The losses of one search in order; infinite where a trial failed."""
    task = PROBLEMS[problem]
    if algorithm == "hyperopt":
        return _search_with_hyperopt(task, seed, trials)
    study = minimize(task.objective, task.space, trials=trials, seed=seed, sampler=algorithm, max_failures=0)
    return [math.inf if trial.loss is None else trial.loss for trial in study.trials]


def search_on_fleet(problem: str, pool: int | None, seed: int, trials: int) -> float:
    """The best loss of TPE on simulated slots, with so many trials drawn ahead; None for the default."""
    task = PROBLEMS[problem]
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
    return math.inf if study.best is None else study.best.loss or 0.0


def _search_with_hyperopt(task: Problem, seed: int, trials: int) -> list[float]:
    def objective(params: Any) -> dict[str, Any]:
        try:
            return {"loss": task.objective(params), "status": hyperopt.STATUS_OK}
        except Unlucky:
            return {"status": hyperopt.STATUS_FAIL}

    done = hyperopt.Trials()
    hyperopt.fmin(
        objective, task.space, hyperopt.tpe.suggest, trials,
        trials=done, rstate=np.random.default_rng(seed), show_progressbar=False, verbose=False, return_argmin=False,
    )  # fmt: skip
    return [math.inf if loss is None else float(loss) for loss in done.losses()]


def wins(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The share of seeds with a lower best loss."""
    return statistics.mean(0.5 if a == b else float(a < b) for a, b in zip(ours, theirs, strict=True))


def failing(losses: Sequence[Sequence[float]]) -> float:
    """The share of trials that failed after the warm-up."""
    return statistics.mean(math.isinf(loss) for run in losses for loss in run[WARM_UP:])


def compare(problem: str, runs: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """One problem's figures."""
    best = {name: [min(run) for run in runs[name]] for name in ALGORITHMS}
    figures: dict[str, Any] = {f"median_best_{name}": statistics.median(best[name]) for name in ALGORITHMS}
    figures["wins_against_random"] = wins(best["tpe"], best["random"])
    figures["hyperopt_wins_against_random"] = wins(best["hyperopt"], best["random"])
    figures["wins_against_hyperopt"] = wins(best["tpe"], best["hyperopt"])
    if PROBLEMS[problem].fails:
        figures |= {f"failing_{name}": failing(runs[name]) for name in ALGORITHMS}
    return figures


def with_pool(seeds: int, trials: int, processes: ProcessPoolExecutor) -> None:
    """Print TPE with trials drawn ahead against without."""
    runs = {
        (problem, size): [processes.submit(search_on_fleet, problem, size, seed, trials) for seed in range(seeds)]
        for problem in PROBLEMS
        for size in (None, 0)
    }
    found = results_of(runs, "searches")
    figures = {}
    print(f"{'':11s} {'median best loss':>20s} {'wins':>9s}")
    print(f"{'':11s} {'pool':>10s} {'none':>9s}")
    for problem in PROBLEMS:
        ours, without = (found[problem, size] for size in (None, 0))
        row = (statistics.median(ours), statistics.median(without), wins(ours, without))
        figures[problem] = dict(zip(("pool", "none", "wins"), row, strict=True))
        print(f"{problem:11s} {row[0]:10.4g} {row[1]:9.4g} {row[2]:9.2f}")
    # The standard deviation of a mean of so many coins: no significant loss if one half lies within two of them.
    reach = 1.96 * math.sqrt(0.25 / (seeds * len(PROBLEMS)))
    ends = goal(_mean(figures, "wins") + reach, at_least=0.5)
    finish(figures, {"wins of tpe with the pool, upper end of 95 %": ends}, {"seeds": seeds, "trials": trials})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="6 seeds")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--trials", type=int, default=TRIALS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--pool", action="store_true", help="only TPE with trials drawn ahead, against without")
    arguments = parser.parse_args()
    seeds = 6 if arguments.quick else arguments.seeds
    if arguments.pool:
        with ProcessPoolExecutor(arguments.processes, get_context("spawn"), initializer=quiet) as pool:
            with_pool(seeds, arguments.trials, pool)
        return

    figures: dict[str, dict[str, Any]] = {}
    names = ("random", "tpe", "hyperopt", "tpe>rnd", "hopt>rnd", "tpe>hopt")
    print(f"{'':11s} {'median best loss':>30s} {'share of wins':>30s}")
    print(f"{'':11s}" + "".join(f" {name:>9s}" for name in names))
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), initializer=quiet) as pool:
        runs = {
            (problem, name): [pool.submit(search, problem, name, seed, arguments.trials) for seed in range(seeds)]
            for problem in PROBLEMS
            for name in ALGORITHMS
        }
        found = results_of(runs, "searches")
        for problem in PROBLEMS:
            figures[problem] = compare(problem, {name: found[problem, name] for name in ALGORITHMS})
            print(f"{problem:11s}" + "".join(f" {value:9.4g}" for value in list(figures[problem].values())[:6]))

    goals = {
        "tpe wins against random": goal(_mean(figures, "wins_against_random"), at_least=0.70),
        "tpe wins against hyperopt's": goal(_mean(figures, "wins_against_hyperopt"), at_least=0.45),
    }
    for problem, row in figures.items():
        if PROBLEMS[problem].fails:
            goals[f"{problem}: failing trials, tpe / random"] = goal(
                row["failing_tpe"] / row["failing_random"], at_most=1.0
            )
    finish(figures, goals, {"seeds": seeds, "trials": arguments.trials})


def quiet() -> None:
    """Keep the searches' own words out of the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _mean(figures: Mapping[str, Mapping[str, float]], name: str) -> float:
    return statistics.mean(row[name] for row in figures.values())


if __name__ == "__main__":
    main()
