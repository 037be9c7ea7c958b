"""Failures teach: what fails is left sooner than by chance, what lies at its edge or behind it can still be reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery import minimize
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.samplers.avoidance import FailureAvoidance
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

Params = Mapping[str, Any]

LINE = {"x": hp.uniform("x", 0, 1)}
SQUARE = {**LINE, "y": hp.uniform("y", 0, 1)}
OPTIONS = {**SQUARE, "option": hp.choice("option", ["a", "b", "broken"])}


class Raised(Exception):
    """A setting that cannot be tried."""


def whole(space: Any) -> Subspace:
    """The undivided space as one subspace."""
    return split(compile_space(space), max_subspaces=1)[0]


def ended(params: Params, state: TrialState) -> Trial:
    outcome = Outcome(state=state, loss=0.0)
    return Trial(number=0, subspace="all", params=dict(params), state=state, outcome=outcome)


def avoiding(space: Any, fails: Callable[[Params], bool], trials: int) -> FailureAvoidance:
    """What is known after `trials` random draws."""
    avoidance, subspace = FailureAvoidance(whole(space)), whole(space)
    for params in subspace.sample(np.random.default_rng(0), trials):
        avoidance.tell(ended(params, TrialState.FAILED if fails(params) else TrialState.COMPLETE), guessed=False)
    return avoidance


def losses(space: Any, loss: Callable[[Params], float], sampler: str, seed: int, trials: int = 40) -> list[float]:
    """A search's losses in order; infinite where a trial failed."""
    study = minimize(loss, space, trials=trials, seed=seed, sampler=sampler, max_failures=0)
    return [math.inf if trial.loss is None else trial.loss for trial in study.trials]


def test_without_failures_nothing_is_drawn_and_nothing_changed() -> None:
    avoidance = avoiding(SQUARE, lambda p: False, 30)
    generator = np.random.default_rng(3)
    before = generator.bit_generator.state
    assert avoidance.weights([{"x": 0.5, "y": 0.5}], generator, whole(SQUARE)).tolist() == [0.0]
    assert generator.bit_generator.state == before
    assert avoidance.draw(generator, whole(SQUARE)) == whole(SQUARE).sample(np.random.default_rng(3), 1)[0]


def test_what_fails_is_drawn_less_often_than_by_the_law() -> None:
    avoidance = avoiding(SQUARE, lambda p: p["x"] > 0.7, 30)
    draws = [avoidance.draw(np.random.default_rng(seed), whole(SQUARE)) for seed in range(100)]
    assert np.mean([params["x"] > 0.7 for params in draws]) < 0.1


def test_where_everything_failed_draws_go_on() -> None:
    avoidance = avoiding(SQUARE, lambda p: True, 30)
    draws = [avoidance.draw(np.random.default_rng(seed), whole(SQUARE)) for seed in range(20)]
    assert len({params["x"] for params in draws}) == 20


def test_of_two_candidates_the_one_that_will_fail_is_worth_less() -> None:
    avoidance = avoiding(SQUARE, lambda p: p["x"] > 0.7, 30)
    failing, other = avoidance.weights(
        [{"x": 0.9, "y": 0.5}, {"x": 0.2, "y": 0.5}], np.random.default_rng(0), whole(SQUARE)
    )
    assert failing < other - 2 < 0


def test_with_more_failures_than_random_search_would_have_only_what_is_safe_is_guessed() -> None:
    avoidance = avoiding(SQUARE, lambda p: p["x"] > 0.7, 30)
    for _ in range(3):
        avoidance.tell(ended({"x": 0.72, "y": 0.5}, TrialState.FAILED), guessed=True)
    failing, other = avoidance.weights(
        [{"x": 0.9, "y": 0.5}, {"x": 0.2, "y": 0.5}], np.random.default_rng(0), whole(SQUARE)
    )
    assert failing == -math.inf
    assert math.isfinite(other)


def test_with_far_fewer_failures_than_random_search_would_have_a_guess_is_bold() -> None:
    avoidance = avoiding(SQUARE, lambda p: p["x"] > 0.7, 30)
    for place in range(30):
        avoidance.tell(ended({"x": 0.02 * place, "y": 0.5}, TrialState.COMPLETE), guessed=True)
    assert avoidance.weights([{"x": 0.9, "y": 0.5}], np.random.default_rng(0), whole(SQUARE)).tolist() == [0.0]


def test_candidates_that_are_all_sure_to_fail_keep_an_order() -> None:
    avoidance = avoiding(SQUARE, lambda p: True, 30)
    assert np.isfinite(
        avoidance.weights([{"x": 0.9, "y": 0.5}, {"x": 0.2, "y": 0.5}], np.random.default_rng(0), whole(SQUARE))
    ).all()


def rising(p: Params) -> float:
    """The further right the better, until it raises."""
    if p["x"] > 0.85:
        raise Raised
    return -float(p["x"])


def one_option_broken(p: Params) -> float:
    if p["option"] == "broken":
        raise Raised
    return float((p["x"] - 0.3) ** 2 + (p["y"] - 0.6) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(("space", "loss"), [(LINE, rising), (OPTIONS, one_option_broken)])
def test_fewer_trials_fail_than_under_random_search(space: Any, loss: Callable[[Params], float]) -> None:
    failed = {
        sampler: sum(math.isinf(v) for seed in range(3) for v in losses(space, loss, sampler, seed)[20:])
        for sampler in ("random", "tpe")
    }
    assert failed["tpe"] < failed["random"]


@pytest.mark.slow
def test_an_optimum_at_the_edge_of_what_fails_is_reached() -> None:
    assert np.median([min(losses(LINE, rising, "tpe", seed)) for seed in range(5)]) < -0.83


@pytest.mark.slow
def test_a_small_island_in_what_fails_is_found_and_searched() -> None:
    def island(p: Params) -> float:
        if not (0.3 < p["x"] < 0.55 and 0.2 < p["y"] < 0.6):
            raise Raised
        return float((p["x"] - 0.5) ** 2 + (p["y"] - 0.5) ** 2)

    found = [losses(SQUARE, island, "tpe", seed) for seed in range(5)]
    assert max(min(run) for run in found) < 0.01
    assert np.mean([math.isinf(v) for run in found for v in run[20:]]) < 0.5
