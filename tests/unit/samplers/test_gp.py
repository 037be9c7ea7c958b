"""Guesses by a Gaussian process: they find smooth optima in few trials, and bear losses of any kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from msgspec.structs import replace
from scipy.special import log_ndtr
from services.trials import search, told

from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.samplers.gp import GpSampler, log_improvement, standardised
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

S = TrialState
Params = Mapping[str, Any]


def gp(space: Any, seed: int = 0) -> GpSampler:
    return GpSampler(split(compile_space(space), max_subspaces=1)[0], (seed, 0))


def run(sampler: GpSampler, trials: int, end: Callable[[Params], float | TrialState]) -> list[float | TrialState]:
    return [*map(end, search(sampler, end, trials))]


def best(ends: list[float | TrialState]) -> float:
    return min(loss for loss in ends if not isinstance(loss, TrialState))


NUMBERS = [hp.uniform(f"x{place}", -1, 1) for place in range(3)]


def bowl(params: Params) -> float:
    return float(sum((float(params[f"x{place}"]) - 0.3 * place) ** 2 for place in range(3)))


def test_the_optimum_of_a_smooth_function_is_found_to_many_digits() -> None:
    assert best(run(gp(NUMBERS), 30, bowl)) < 1e-4


def test_an_option_a_whole_number_and_a_scale_are_found_together() -> None:
    space = {
        "c": hp.choice("c", ["a", "b", "c", "d"]),
        "n": hp.quniform("n", 1, 20, 1),
        "rate": hp.loguniform("rate", math.log(1e-6), 0),
    }

    def loss(p: Params) -> float:
        return (math.log10(p["rate"]) + 3) ** 2 + 0.05 * (p["n"] - 13) ** 2 + (p["c"] != 2)

    assert best(run(gp(space), 40, loss)) < 0.01


@pytest.mark.slow
def test_labels_that_an_option_switches_on_are_searched() -> None:
    options = [{"u": hp.uniform("u", -2, 2)}, {"v": hp.uniform("v", -2, 2), "w": hp.uniform("w", -2, 2)}]
    space = {"k": hp.choice("k", options)}

    def loss(p: Params) -> float:
        return 0.2 + p["u"] ** 2 if p["k"] == 0 else (p["v"] - 1) ** 2 + (p["w"] + 1) ** 2

    assert best(run(gp(space), 50, loss)) < 0.01


def test_one_enormous_loss_does_not_hide_the_others() -> None:
    assert best(run(gp(NUMBERS), 40, lambda p: 1e30 if p["x0"] > 0.8 else bowl(p))) < 1e-4


@pytest.mark.slow
def test_params_that_fail_are_left() -> None:
    losses = run(gp(NUMBERS), 50, lambda p: TrialState.FAILED if p["x1"] < 0 else bowl(p))
    assert losses[25:].count(TrialState.FAILED) <= 6
    assert best(losses) < 1e-3


@pytest.mark.slow
def test_what_breaks_a_constraint_is_left_and_its_edge_is_found() -> None:
    sampler = gp(NUMBERS)
    best, broken = math.inf, 0
    for place in range(40):
        [params] = sampler.ask(1, [])
        # The bowl's bottom is out of reach: of what remains, x0 = .5 is nearest.
        over = 1000.0 * (0.5 - params["x0"])
        outcome = Outcome(state=TrialState.COMPLETE, loss=bowl(params), constraints={"ms": over})
        sampler.tell([replace(told(params, 0.0), outcome=outcome)])
        best = best if over > 0 else min(best, bowl(params))
        broken += place >= 20 and over > 0
    assert best < 0.25 + 1e-2
    assert broken <= 12


@pytest.mark.slow
def test_while_nothing_is_feasible_it_is_looked_for() -> None:
    sampler, found = gp(NUMBERS), []
    for _ in range(30):
        [params] = sampler.ask(1, [])
        found.append(over := bowl(params) - 0.01)
        sampler.tell([replace(told(params, 0.0), outcome=Outcome(state=S.COMPLETE, loss=0.0, constraints={"c": over}))])
    assert min(found) < 0


@pytest.mark.slow
def test_of_a_long_history_the_best_and_the_latest_are_learned_from() -> None:
    sampler = gp(NUMBERS)
    drawn = split(compile_space(NUMBERS))[0].sample(np.random.default_rng(0), 700)
    sampler.tell([told(params, bowl(params)) for params in drawn])
    [params] = sampler.ask(1, [])
    assert bowl(params) < 0.01


def test_losses_are_standardised_and_bad_ones_drawn_together() -> None:
    found = standardised(np.array([0.0, 1.0, 2.0, 1e6]))
    assert (found.mean(), found.std()) == pytest.approx((0.0, 1.0))
    assert np.all(np.diff(found) > 0)
    assert found[3] - found[2] < 5 * (found[2] - found[0])


@pytest.mark.parametrize("z", [-2e4, -30.0, -5.0, -1.0, -0.999, 0.0, 3.0, 40.0])
def test_the_logarithm_of_the_improvement_is_right_where_the_improvement_is_no_number(z: float) -> None:
    """Beside the sum of logarithms, which is exact where nothing cancels, and beside its bounds where all does."""
    [found] = log_improvement(np.array([z]))
    density = -0.5 * z * z - 0.5 * math.log(2 * math.pi)
    if z >= -1.0:
        assert found == pytest.approx(math.log(math.exp(density) + z * math.exp(log_ndtr(z))))
    else:  # Mills' ratio: the improvement lies between density / (z^2 + 3) and density / z^2
        assert density - math.log(z * z + 3) - 1e-6 * abs(density) <= found
        assert found <= density - 2 * math.log(-z) + 1e-6 * abs(density)


def test_labels_that_do_not_matter_are_spread_over_their_law() -> None:
    """Guesses would else share a value of such a label for many trials, for no reason."""
    space = {"x": hp.uniform("x", -1, 1), "idle": hp.uniform("idle", 0, 1)}
    sampler = gp(space)
    asked: list[Params] = []
    for _ in range(40):
        [params] = sampler.ask(1, [])
        asked.append(params)
        sampler.tell([told(params, (params["x"] - 0.3) ** 2)])
    late = [params["idle"] for params in asked[20:]]
    assert np.histogram(late, bins=4, range=(0, 1))[0].min() >= 1
