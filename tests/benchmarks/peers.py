"""Searches of the samplers' benchmark: ours with trials of a minute, hyperopt's and Optuna's as users call them."""

from __future__ import annotations

import heapq
import itertools
import json
import logging
import math
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hyperopt
import numpy as np
from playing import play_study
from problems import Problem, Unlucky

from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.domains import Categorical, Normal, RandInt, Uniform

OPTUNA = ("optuna tpe", "optuna multivariate", "optuna gp")
HYPEROPT = ("hyperopt tpe", "hyperopt anneal")
#: seconds that a trial of ours is said to last
MINUTE = 60.0
#: trial number -> its seconds; the same ones for everybody
Seconds = Callable[[int], float]


def search(problem: Problem, algorithm: str, seed: int, trials: int) -> list[float]:
    """The losses of one search in order; infinite where a trial failed."""
    if algorithm in HYPEROPT:
        return _search_with_hyperopt(problem, algorithm, seed, trials)
    if algorithm in OPTUNA:
        return search_with_optuna(problem, algorithm, seed, trials, 1, lambda _: 1.0)
    return _search_with_ours(problem, algorithm, seed, trials)


def _search_with_ours(problem: Problem, algorithm: str, seed: int, trials: int) -> list[float]:
    """Search on one slot of a virtual clock. `auto` would spend less on trials as short as these really are."""
    space = compile_space(problem.space)

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        try:
            loss = float(problem.objective(space.evaluate(attempt.params)))
        except Unlucky:
            return Outcome(state=TrialState.FAILED, seconds=MINUTE)
        return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=MINUTE)

    study = play_study(problem.space, {"cpu": 1}, play, None, trials=trials, sampler=algorithm, shares=None, seed=seed)
    return [math.inf if trial.outcome.loss is None else trial.outcome.loss for trial in study]


def _search_with_hyperopt(problem: Problem, algorithm: str, seed: int, trials: int) -> list[float]:
    def objective(params: Any) -> dict[str, Any]:
        try:
            return {"loss": problem.objective(params), "status": hyperopt.STATUS_OK}
        except Unlucky:
            return {"status": hyperopt.STATUS_FAIL}

    suggest = {"hyperopt tpe": hyperopt.tpe, "hyperopt anneal": hyperopt.anneal}[algorithm].suggest
    done = hyperopt.Trials()
    hyperopt.fmin(
        objective, problem.space, suggest, trials,
        trials=done, rstate=np.random.default_rng(seed), show_progressbar=False, verbose=False, return_argmin=False,
    )  # fmt: skip
    return [math.inf if loss is None else float(loss) for loss in done.losses()]


def search_with_optuna(
    problem: Problem, algorithm: str, seed: int, trials: int, slots: int, seconds: Seconds
) -> list[float]:
    """The losses in the order in which the trials end, on so many slots of a virtual clock."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    makes: dict[str, Callable[[], Any]] = {
        "optuna tpe": lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=slots > 1),
        "optuna multivariate": lambda: optuna.samplers.TPESampler(seed=seed, multivariate=True, group=True),
        "optuna gp": lambda: optuna.samplers.GPSampler(seed=seed),
    }
    space = compile_space(problem.space)
    losses: list[float] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multivariate and constant liar are experimental
        study = optuna.create_study(sampler=makes[algorithm]())
        running: list[tuple[float, int, Any, float]] = []
        counter = itertools.count()

        def begin(now: float) -> None:
            trial = study.ask()
            try:
                loss = problem.objective(space.evaluate(suggest(trial, space)))
            except Unlucky:
                loss = math.inf
            number = next(counter)
            heapq.heappush(running, (now + seconds(number), number, trial, loss))

        for _ in range(min(slots, trials)):
            begin(0.0)
        while running:
            now, _, trial, loss = heapq.heappop(running)
            failed = math.isinf(loss)
            state = optuna.trial.TrialState.FAIL if failed else optuna.trial.TrialState.COMPLETE
            study.tell(trial, None if failed else loss, state=state)
            losses.append(loss)
            if len(losses) + len(running) < trials:
                begin(now)
    return losses


def search_with_smac(problem: Problem, seed: int, trials: int, python: str) -> list[float]:
    """Return the losses of SMAC3 in the interpreter that has it. It asks by lines of output, and reads the losses."""
    space = compile_space(problem.space)
    laws = {label: _law_for_smac(domain) for label, domain in space.domains.items()}
    labels = {label: law | {"under": _options_above(space, label)} for label, law in laws.items()}
    losses: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        words = [python, str(Path(__file__).with_name("structural_smac.py")), str(trials), str(seed), folder]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            print(json.dumps(labels), file=process.stdin, flush=True)
            for line in process.stdout:
                asked = json.loads(line)
                params = {label: value * (laws[label].get("step") or 1) for label, value in asked.items()}
                losses.append(problem.objective(space.evaluate(params)))
                print(losses[-1], file=process.stdin, flush=True)
    if len(losses) != trials:
        sys.exit(f"{python} has no SMAC3, or it has failed; give --smac an interpreter that has it")
    return losses


def _law_for_smac(domain: Any) -> dict[str, Any]:
    """Return the range that SMAC3 gets for a label, in steps if there are any."""
    if isinstance(domain, Categorical):
        return {"options": domain.count}
    if isinstance(domain, RandInt):
        return {"low": domain.low, "high": domain.high - 1, "whole": True, "log": False}
    assert isinstance(domain, Uniform)
    if domain.step is not None:
        assert not domain.log
        low, high = round(domain.low / domain.step), round(domain.high / domain.step)
        return {"low": low, "high": high, "whole": True, "log": False, "step": domain.step}
    low, high = (math.exp(end) if domain.log else end for end in (domain.low, domain.high))
    return {"low": low, "high": high, "whole": False, "log": domain.log}


def _options_above(space: Space, label: str) -> dict[str, list[int]]:
    """Return the options under which a label is active, by choice; of nested choices only the nearest."""
    if label in space.block.labels:
        return {}
    branches = [branch for block in space.blocks for branch in block.branches]
    under = {
        branch.label: [place for place, option in enumerate(branch.options) if label in option.labels]
        for branch in branches
        if branch.label is not None
    }
    return {choice: places for choice, places in under.items() if places}


def suggest(trial: Any, space: Space) -> dict[str, Any]:
    """Ask an Optuna trial for params as its users write them: choices first, then what is under them."""
    params: dict[str, Any] = {}
    for block in space.walk(params):
        for label in block.labels:
            domain = space.domains[label]
            if isinstance(domain, Categorical):
                params[label] = trial.suggest_categorical(label, [*range(domain.count)])
            elif isinstance(domain, RandInt):
                params[label] = trial.suggest_int(label, domain.low, domain.high - 1)
            elif isinstance(domain, Normal) or (domain.step and domain.log):
                # Optuna has no such law.
                params[label] = domain.from_unit([trial.suggest_float(label, 0.0, 1.0)]).tolist()[0]
            else:
                assert isinstance(domain, Uniform)
                low, high = (math.exp(end) if domain.log else end for end in (domain.low, domain.high))
                params[label] = trial.suggest_float(label, low, high, step=domain.step, log=domain.log)
    return params


def quiet() -> None:
    """Keep the searches' own words out of the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
