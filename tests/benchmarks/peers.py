"""Searches of the samplers' benchmark: ours through `minimize`, hyperopt's and Optuna's as their users call them."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import warnings
from collections.abc import Callable
from typing import Any

import hyperopt
import numpy as np
from problems import Problem, Unlucky

from shadho_celery import minimize
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.domains import Categorical, Normal, RandInt, Uniform

OPTUNA = ("optuna tpe", "optuna multivariate", "optuna gp")
HYPEROPT = ("hyperopt tpe", "hyperopt anneal")
#: trial number -> its seconds; the same ones for everybody
Seconds = Callable[[int], float]


def search(problem: Problem, algorithm: str, seed: int, trials: int) -> list[float]:
    """The losses of one search in order; infinite where a trial failed."""
    if algorithm in HYPEROPT:
        return _search_with_hyperopt(problem, algorithm, seed, trials)
    if algorithm in OPTUNA:
        return search_with_optuna(problem, algorithm, seed, trials, 1, lambda _: 1.0)
    study = minimize(problem.objective, problem.space, trials=trials, seed=seed, sampler=algorithm, max_failures=0)
    return [math.inf if trial.loss is None else trial.loss for trial in study.trials]


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
