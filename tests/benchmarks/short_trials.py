"""Short trials with `auto`: what they cost beside random search and Optuna's TPE, and what a proposal takes by decade.

- On two embedded workers, trials a second by progress, beside random search.
- `minimize` of cheap functions in this process: CPU seconds beside Optuna's TPE, run by turns. Imports do not count.
- By decade of the trials' seconds: CPU milliseconds of a proposal, the mean over a study.
"""

from __future__ import annotations

import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from figures import goal
from hyperopt import hp
from peers import suggest
from problems import CLOSED_FORMS, Problem

from shadho_celery import minimize
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.samplers import make_sampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

Json = dict[str, Any]
ROOT = Path(__file__).parents[2]

TRIALS, SLOTS = 5000, 2
#: `auto` beside random search, and its slowest part beside its fastest, from trial FIRST on
OF_RANDOM, FLAT, FIRST = 0.8, 0.8, 100
#: parts of the study whose rates are compared
PARTS = 5

#: numbers of trials of `minimize`, and its CPU seconds beside Optuna's TPE
LENGTHS, OF_OPTUNA = (200, 1000), 2.0
#: cheap functions that `minimize` gets
CHEAP: Mapping[str, Problem] = {
    "parabola": Problem({"x": hp.uniform("x", -10, 10)}, lambda params: (params["x"] - 3) ** 2, 0.0),
    "branin": CLOSED_FORMS["branin"],
    "mixed": CLOSED_FORMS["mixed"],
}
#: seconds of a trial -> most milliseconds of a proposal; with a minute a proposal may take a second
DECADES: Mapping[float, float] = {0.005: 2.0, 0.05: 2.0, 0.5: 10.0, 5.0: 100.0, 60.0: 1000.0}
#: problems on which a proposal is timed, with 2, 6 and 25 labels, and the number of trials
TIMED, TIMED_TRIALS = ("branin", "hartmann6", "five_of_25"), 200

STUDY = """
import time
from hyperopt import hp
SPACE = {"x": hp.uniform("x", -5, 10), "y": hp.uniform("y", 0, 15), "option": hp.choice("option", [0, 1, 2])}
def objective(params):
    time.sleep(0.01)
    return (params["x"] - 1) ** 2 + (params["y"] - 3) ** 2 + params["option"]
"""


def ends(sampler: str, seed: int, trials: int) -> list[float]:
    """Return the moments at which the trials of a study ended, in order."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "short_study.py").write_text(STUDY)
        command = [sys.executable, "-m", "shadho_celery.launch", "short_study", "--store", "sqlite:///trials.db"]
        settings = ["--trials", str(trials), "--sampler", sampler, "--seed", str(seed), "--workers", f"cpu={SLOTS}"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        subprocess.run(
            [*command, *settings, "--no-speculation"], cwd=folder, env=environment, check=True, capture_output=True
        )
        with sqlite3.connect(Path(folder) / "trials.db") as store:
            return sorted(moment for (moment,) in store.execute("SELECT finished_at FROM trials"))


def rate(moments: list[float]) -> float:
    """Return trials a second between the first and the last of some ends."""
    return (len(moments) - 1) / (moments[-1] - moments[0])


def short(arguments: Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return figures and goals of short trials. The searches run one after the other and ignore `processes`."""
    figures: Json = {}
    goals: Json = {}
    parts = {"workers": on_workers, "minimize": beside_optuna, "ms a proposal": by_decade}
    for name, part in parts.items():
        figures[name], reached = part(arguments.quick)
        goals |= reached
    return figures, goals


def on_workers(quick: bool) -> tuple[Json, Json]:
    """Return trials a second by sampler, side by side."""
    trials = 1500 if quick else TRIALS
    repeats = 1 if quick else 3
    figures: Json = {"random": [], "auto": [], "auto, by part": []}
    for seed in range(repeats):
        for sampler in ("random", "auto") if seed % 2 == 0 else ("auto", "random"):
            moments = ends(sampler, seed, trials)
            figures[sampler].append(rate(moments))
            if sampler == "auto":
                size = (trials - FIRST) // PARTS
                figures["auto, by part"].append(
                    [rate(moments[start : start + size]) for start in range(FIRST, FIRST + PARTS * size, size)]
                )
        print(f"trials/s: random {figures['random'][-1]:.0f}, auto {figures['auto'][-1]:.0f}", end="; ")
        print(f"from trial {FIRST}, by part:", " ".join(f"{part:.0f}" for part in figures["auto, by part"][-1]))
    of_random = statistics.median(ours / other for ours, other in zip(figures["auto"], figures["random"], strict=True))
    flat = statistics.median(min(parts) / max(parts) for parts in figures["auto, by part"])
    return figures, {
        "trials/s of auto, in those of random search": goal(of_random, at_least=OF_RANDOM),
        "trials/s of auto, slowest part in those of the fastest": goal(flat, at_least=FLAT),
    }


def beside_optuna(quick: bool) -> tuple[Json, Json]:
    """Return CPU seconds of `minimize` and of Optuna's TPE, by function and number of trials."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    figures: Json = {}
    goals: Json = {}
    for name, problem in CHEAP.items():
        for trials in LENGTHS:
            cpu_seconds(with_ours, problem, 0, 30)  # imports
            cpu_seconds(with_optuna, problem, 0, 30)
            seeds = range(3 if quick else 5)
            taken = [[cpu_seconds(who, problem, seed, trials) for who in (with_ours, with_optuna)] for seed in seeds]
            ours, theirs = map(statistics.median, zip(*taken, strict=True))
            figures[f"{name}, {trials} trials"] = {"auto": ours, "optuna tpe": theirs}
            print(f"{name}, {trials} trials: auto {ours:.2f} s, Optuna's TPE {theirs:.2f} s of CPU")
            goals[f"{name}, {trials} trials: CPU seconds of minimize, in those of Optuna's TPE"] = goal(
                ours / theirs, at_most=OF_OPTUNA
            )
    return figures, goals


def cpu_seconds(search: Callable[[Problem, int, int], None], problem: Problem, seed: int, trials: int) -> float:
    """Return the CPU seconds of one search in this process."""
    began = time.process_time()
    search(problem, seed, trials)
    return time.process_time() - began


def with_ours(problem: Problem, seed: int, trials: int) -> None:
    minimize(problem.objective, problem.space, trials=trials, seed=seed, progress=False)


def with_optuna(problem: Problem, seed: int, trials: int) -> None:
    import optuna

    space = compile_space(problem.space)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=seed))
    study.optimize(lambda trial: problem.objective(space.evaluate(suggest(trial, space))), n_trials=trials)


def by_decade(quick: bool) -> tuple[Json, Json]:
    """Return the mean milliseconds of a proposal by seconds of a trial and problem, and their goals."""
    figures: Json = {}
    goals: Json = {}
    milliseconds(TIMED[0], 60.0, 30)  # imports
    print(f"{'ms a proposal':16s}" + "".join(f" {name:>12s}" for name in TIMED))
    for seconds, most in DECADES.items():
        row = {name: milliseconds(name, seconds, TIMED_TRIALS) for name in TIMED[: 2 if quick else None]}
        figures[f"{seconds:g}"] = row
        print(f"{f'{seconds:g} s':16s}" + "".join(f" {value:12.2f}" for value in row.values()))
        goals[f"ms a proposal with trials of {seconds:g} s"] = goal(max(row.values()), at_most=most)
    return figures, goals


def milliseconds(name: str, seconds: float, trials: int) -> float:
    """Return the mean CPU milliseconds of a proposal by `auto` in a study whose trials are said to last so long."""
    problem = CLOSED_FORMS[name]
    subspace = split(compile_space(problem.space), max_subspaces=1)[0]
    sampler, taken = make_sampler("auto", subspace, (0,)), []
    for number in range(trials):
        began = time.process_time()
        (params,) = sampler.ask(1, [])
        taken.append(time.process_time() - began)
        loss = problem.objective(subspace.space.evaluate(params))
        outcome = Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)
        trial = Trial(number=number, subspace="all", params=params, state=outcome.state, outcome=outcome)
        began = time.process_time()
        sampler.tell([trial])
        taken[-1] += time.process_time() - began
    return 1000 * float(np.mean(taken))
