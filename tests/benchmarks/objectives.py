"""Several objectives and constraints, a part of `samplers.py`: ours beside Optuna's TPE and NSGA-II.

ZDT1 to ZDT3 (Zitzler, Deb, Thiele, "Comparison of Multiobjective Evolutionary Algorithms", 2000) with ten labels: the
hypervolume against (1.1, 1.1). And Branin's function within a disc that cuts one of its three optima off: the regret of
the best feasible trial.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from figures import goal, p_no_worse, results_of
from hyperopt import hp
from peers import MINUTE
from playing import play_study

from shadho_celery import minimize
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.study.front import hypervolume

Json = dict[str, Any]
Values = Mapping[str, float]

LABELS = [f"x{place}" for place in range(10)]
UNIT = dict.fromkeys(LABELS, (0.0, 1.0))
REFERENCE = np.array([1.1, 1.1])
EVALUATIONS = 300
OURS, PEERS = ("auto", "tpe"), {"optuna tpe": "TPESampler", "optuna nsga-ii": "NSGAIISampler"}
#: losses of a trial, and its constraints
Evaluation = tuple[list[float], list[float]]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Boxes of the labels, and what is evaluated in them."""

    boxes: Mapping[str, tuple[float, float]]
    evaluate: Callable[[Values], Evaluation]
    #: the least feasible loss; None for several losses
    optimum: float | None = None

    def score(self, evaluations: list[Evaluation]) -> float:
        """Return the regret of the best feasible trial, or minus the hypervolume: the less, the better."""
        feasible = [losses for losses, constraints in evaluations if all(each <= 0 for each in constraints)]
        if self.optimum is None:
            return -hypervolume(np.array(feasible).reshape(-1, 2), REFERENCE)
        return min((loss for (loss,) in feasible), default=math.inf) - self.optimum


def zdt(shape: Callable[[float, float], float]) -> Problem:
    """Return the problem of Zitzler's family whose front has a `shape`, a function of the first loss and g."""

    def evaluate(values: Values) -> Evaluation:
        g = 1.0 + 9.0 * statistics.fmean(values[label] for label in LABELS[1:])
        return [values["x0"], g * shape(values["x0"], g)], []

    return Problem(boxes=UNIT, evaluate=evaluate)


def branin_in_a_disc(values: Values) -> Evaluation:
    x, y = values["x"], values["y"]
    bent = y - 5.1 * x**2 / (4.0 * math.pi**2) + 5.0 * x / math.pi - 6.0
    loss = bent**2 + 10.0 * (1.0 - 1.0 / (8.0 * math.pi)) * math.cos(x) + 10.0
    return [loss], [(x - 2.5) ** 2 + (y - 7.5) ** 2 - 50.0]


PROBLEMS = {
    "zdt1": zdt(lambda f, g: 1.0 - math.sqrt(f / g)),
    "zdt2": zdt(lambda f, g: 1.0 - (f / g) ** 2),
    "zdt3": zdt(lambda f, g: 1.0 - math.sqrt(f / g) - f / g * math.sin(10.0 * math.pi * f)),
    "branin in a disc": Problem(
        boxes={"x": (-5.0, 10.0), "y": (0.0, 15.0)}, evaluate=branin_in_a_disc, optimum=0.397887357729739
    ),
}


def searched(name: str, algorithm: str, seed: int, trials: int) -> float:
    """Return the score of one search."""
    problem = PROBLEMS[name]
    search = search_with_optuna if algorithm in PEERS else search_with_ours
    return problem.score(search(problem, algorithm, seed, trials))


def search_with_ours(problem: Problem, algorithm: str, seed: int, trials: int) -> list[Evaluation]:
    found: list[Evaluation] = []

    def objective(values: Values) -> Json:
        losses, constraints = problem.evaluate(values)
        found.append((losses, constraints))
        told: Json = {"loss": losses[0]} if len(losses) == 1 else {"losses": dict(zip("ab", losses, strict=True))}
        return told | {"constraints": {str(place): each for place, each in enumerate(constraints)}}

    space = {label: hp.uniform(label, *box) for label, box in problem.boxes.items()}
    if problem.optimum is None:
        named = {"a": "minimize", "b": "minimize"}
        minimize(objective, space, trials=trials, seed=seed, sampler=algorithm, objectives=named)
        return found

    # With one loss, `auto` would spend less on trials as short as these really are.
    def play(attempt: Attempt, compute_class: str) -> Outcome:
        told = objective(attempt.params)
        return Outcome(state=TrialState.COMPLETE, loss=told["loss"], constraints=told["constraints"], seconds=MINUTE)

    play_study(space, {"cpu": 1}, play, None, trials=trials, sampler=algorithm, shares=None, seed=seed)
    return found


def search_with_optuna(problem: Problem, algorithm: str, seed: int, trials: int) -> list[Evaluation]:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = getattr(optuna.samplers, PEERS[algorithm])(seed=seed)
    study = optuna.create_study(sampler=sampler, directions=["minimize"] * (1 if problem.optimum is not None else 2))
    found: list[Evaluation] = []
    for _ in range(trials):
        trial = study.ask()
        values = {label: trial.suggest_float(label, *box) for label, box in problem.boxes.items()}
        losses, constraints = problem.evaluate(values)
        for place, each in enumerate(constraints):
            trial.set_constraint(str(place), each)
        study.tell(trial, losses)
        found.append((losses, constraints))
    return found


def several(seeds: range, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return figures and goals: medians by algorithm, and whether ours are no worse than each peer."""
    algorithms = (*OURS, *PEERS)
    runs = {
        (name, algorithm): [processes.submit(searched, name, algorithm, seed, EVALUATIONS) for seed in seeds]
        for name in PROBLEMS
        for algorithm in algorithms
    }
    found = results_of(runs, "searches")
    figures, worse = {}, []
    print(f"{'median':18s}" + "".join(f" {algorithm:>14s}" for algorithm in algorithms))
    for name, problem in PROBLEMS.items():
        scores = {algorithm: found[name, algorithm] for algorithm in algorithms}
        sign = 1.0 if problem.optimum is not None else -1.0
        medians = {algorithm: sign * statistics.median(scores[algorithm]) for algorithm in algorithms}
        p_values = {ours: {peer: p_no_worse(scores[ours], scores[peer]) for peer in PEERS} for ours in OURS}
        worse += [f"{ours} on {name}" for ours in OURS if min(p_values[ours].values()) < 0.05]
        what = "hypervolume" if problem.optimum is None else "regret"
        figures[name] = {f"median_{what}": medians, "p_no_worse": p_values}
        print(f"{name:18s}" + "".join(f" {value:14.4g}" for value in medians.values()) + f"  {what}")
    print(*(f"worse: {each}" for each in worse), sep="\n", end="\n" if worse else "")
    return figures, {"searches with auto and tpe that are worse than Optuna's": goal(len(worse), at_most=0)}
