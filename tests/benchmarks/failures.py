"""Do failures teach the samplers? ``python tests/benchmarks/failures.py [--quick]``.

Search spaces where some settings always raise (`failing_spaces`), each searched for 40 trials, one at a time, by

- random search, TPE, and TPE with shares by promise, through `shadho_celery.minimize`;
- hyperopt's ``tpe.suggest``, told of a failure by its status;
- Optuna's TPE, told of a failure by its exception.

Counted are the failing trials of the last 20.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

import hyperopt
import numpy as np
import optuna
from failing_spaces import TASKS, Raised, for_hyperopt, from_optuna
from figures import finish, goal
from hyperopt.exceptions import AllTrialsFailed
from peers import quiet

from shadho_celery import minimize

TRIALS = 40
#: failures are counted after this many trials
WARM_UP = 20
#: how far a mean over seeds may lie above another one that it equals: this many standard errors
ERRORS = 2.0


def with_ours(sampler: str, shares: str = "uniform") -> Callable[[str, int], list[float]]:
    """Search with this package."""

    def search(name: str, seed: int) -> list[float]:
        task = TASKS[name]
        study = minimize(task, for_hyperopt(task.tree), trials=TRIALS, seed=seed, sampler=sampler, shares=shares)
        return [math.inf if trial.loss is None else trial.loss for trial in study.trials]

    return search


def with_hyperopt(name: str, seed: int) -> list[float]:
    """Search with hyperopt's TPE."""
    task = TASKS[name]

    def objective(params: Any) -> dict[str, Any]:
        try:
            return {"loss": task(params), "status": hyperopt.STATUS_OK}
        except Raised:
            return {"status": hyperopt.STATUS_FAIL}

    done = hyperopt.Trials()
    with suppress(AllTrialsFailed):
        hyperopt.fmin(
            objective, for_hyperopt(task.tree), hyperopt.tpe.suggest, TRIALS,
            trials=done, rstate=np.random.default_rng(seed), show_progressbar=False, verbose=False, return_argmin=False,
        )  # fmt: skip
    return [math.inf if loss is None else float(loss) for loss in done.losses()]


def with_optuna(name: str, seed: int) -> list[float]:
    """Search with Optuna's TPE, its settings as they come."""
    task = TASKS[name]
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(lambda trial: task(from_optuna(task.tree, trial)), n_trials=TRIALS, catch=(Raised,))
    return [math.inf if trial.value is None else trial.value for trial in study.trials]


ALGORITHMS: dict[str, Callable[[str, int], list[float]]] = {
    "random": with_ours("random"),
    "tpe": with_ours("tpe"),
    "promise": with_ours("tpe", "promise"),
    "hyperopt": with_hyperopt,
    "optuna": with_optuna,
}


def search(name: str, algorithm: str, seed: int) -> list[float]:
    """The losses of one search in order; infinite where a trial failed."""
    return ALGORITHMS[algorithm](name, seed)


def failing(run: Sequence[float]) -> float:
    """Trials that failed after the warm-up."""
    return float(sum(math.isinf(loss) for loss in run[WARM_UP:]))


def compare(runs: dict[str, list[list[float]]]) -> dict[str, Any]:
    """One space's figures: means of failing trials, medians of best losses, and by how much ours lies above random."""
    figures: dict[str, Any] = {f"failing_{name}": statistics.mean(map(failing, runs[name])) for name in runs}
    figures |= {f"best_{name}": statistics.median(map(min, runs[name])) for name in runs}
    for name in {"tpe", "promise"} & runs.keys():
        above = [failing(a) - failing(b) for a, b in zip(runs[name], runs["random"], strict=True)]
        error = statistics.stdev(above) / math.sqrt(len(above)) if len(above) > 1 else 0.0
        figures[f"excess_{name}"] = statistics.mean(above) - ERRORS * error
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="5 seeds")
    parser.add_argument("--seeds", type=int, default=30)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS))
    arguments = parser.parse_args()
    seeds, algorithms = 5 if arguments.quick else arguments.seeds, arguments.algorithms

    figures: dict[str, dict[str, Any]] = {}
    heading = "".join(f" {name:>9s}" for name in algorithms)
    print(f"{'':24s}{f'failing of trials {WARM_UP + 1} to {TRIALS}':>{10 * len(algorithms)}s}  median best loss")
    print(f"{'':24s}{heading}{heading}")
    with ProcessPoolExecutor(arguments.processes, get_context("spawn"), initializer=hush) as pool:
        runs = {
            (task, name): [pool.submit(search, task, name, seed) for seed in range(seeds)]
            for task in TASKS
            for name in algorithms
        }
        for task in TASKS:
            figures[task] = compare({name: [run.result() for run in runs[task, name]] for name in algorithms})
            print(f"{task:24s}" + "".join(f" {v:9.3g}" for k, v in figures[task].items() if "excess" not in k))
    goals = {}
    for name in ("tpe", "promise"):
        if {name, "random"} <= set(algorithms):
            for task, row in figures.items():
                goals[f"{task}: failing, {name} - random, less {ERRORS:g} standard errors"] = goal(
                    row[f"excess_{name}"], at_most=0.0
                )
    finish(figures, goals, {"seeds": seeds, "trials": TRIALS})


def hush() -> None:
    """Keep the searches' own words out of the table."""
    quiet()
    optuna.logging.set_verbosity(optuna.logging.ERROR)


if __name__ == "__main__":
    main()
