"""Searches on many slots of a virtual clock: ours through the scheduler, Optuna's TPE with its constant liar."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from figures import goal, p_no_worse, results_of
from peers import search_with_optuna
from playing import play_study
from problems import CLOSED_FORMS, Problem

from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.space.compile import compile_space

Json = dict[str, Any]

NAMES = ("branin", "hartmann3", "hartmann6", "levy4", "mixed", "tree")
SLOTS = (16, 64)
#: evaluations for each slot
EVALUATIONS = 10
#: seconds of a trial: their median, and the standard deviation of their logarithm
SECONDS, SPREAD = 60.0, 0.5
#: slots with which the regret is held against that of one slot, and its greatest multiple
FEWER, MULTIPLE = 16, 1.5


def seconds_of(number: int, seed: int) -> float:
    """Return a trial's seconds: the same ones for everybody."""
    return SECONDS * float(np.exp(SPREAD * np.random.default_rng([seed, number]).standard_normal()))


def search_on_slots(
    name: str, shift: int | None, algorithm: str, seed: int, slots: int, trials: int
) -> tuple[float, float]:
    """Return the best loss of a search, and the regret below which there is no difference."""
    problem = CLOSED_FORMS[name] if shift is None else CLOSED_FORMS[name].shifted(shift)
    if algorithm == "optuna tpe":
        losses = search_with_optuna(problem, algorithm, seed, trials, slots, lambda number: seconds_of(number, seed))
    else:
        losses = _search(problem, algorithm, seed, slots, trials)
    assert problem.optimum is not None
    return min(losses) - problem.optimum, problem.equal()


def _search(problem: Problem, algorithm: str, seed: int, slots: int, trials: int) -> list[float]:
    space = compile_space(problem.space)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        loss = float(problem.objective(space.evaluate(attempt.params)))
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds_of(attempt.number, seed))

    study = play_study(
        problem.space, {"cpu": slots}, play, None, trials=trials, sampler=algorithm, shares=None, seed=seed
    )
    return [math.inf if trial.outcome.loss is None else trial.outcome.loss for trial in study]


def parallel(arguments: Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return regrets by problem and number of slots, and their goals."""
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.parallel_seeds)
    # Algorithm, slots and evaluations.
    settings = [(algorithm, slots, EVALUATIONS * slots) for slots in SLOTS for algorithm in ("auto", "optuna tpe")]
    settings.append(("auto", 1, EVALUATIONS * FEWER))
    runs = {
        (name, setting): [
            processes.submit(search_on_slots, name, arguments.shift, setting[0], seed, *setting[1:]) for seed in seeds
        ]
        for name in NAMES
        for setting in settings
    }
    found = results_of(runs, "searches")
    figures: Json = {}
    print(f"{'median regret':14s}" + "".join(f" {f'{name}, {slots}':>14s}" for name, slots, _ in settings))
    for name in NAMES:
        medians = {
            f"{setting[0]}, {setting[1]}": statistics.median(regret for regret, _ in found[name, setting])
            for setting in settings
        }
        figures[name] = {"median_regret": medians} | _compared(
            {setting[:2]: [max(run) for run in found[name, setting]] for setting in settings}
        )
        print(f"{name:14s}" + "".join(f" {median:14.3g}" for median in medians.values()))
    goals = {
        f"problems of {len(NAMES)} on which auto is no worse than Optuna's TPE, {slots} slots": goal(
            sum(row["no_worse"][str(slots)] for row in figures.values()), at_least=len(NAMES)
        )
        for slots in SLOTS
    }
    most = max(row["multiple"] for row in figures.values())
    goals[f"regret of {FEWER} slots, in that of one slot"] = goal(most, at_most=MULTIPLE)
    return figures, goals


def _compared(regrets: Mapping[tuple[str, int], Sequence[float]]) -> Json:
    """Return whether `auto` is no worse than Optuna's TPE by slots, and the regret's multiple of that of one slot."""
    no_worse = {str(slots): p_no_worse(regrets["auto", slots], regrets["optuna tpe", slots]) >= 0.05 for slots in SLOTS}
    fewer, one = (statistics.median(regrets["auto", slots]) for slots in (FEWER, 1))
    return {"no_worse": no_worse, "multiple": fewer / one}
