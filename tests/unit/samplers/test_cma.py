"""CMA-ES moves to the better trials, learns from any of them, and begins elsewhere once it has converged."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.trials import search, told

from shadho_celery import minimize
from shadho_celery.core.trial import TrialState
from shadho_celery.samplers.cma import FIRST_WIDTH, CmaSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

NUMBERS = {name: hp.uniform(name, -2, 2) for name in "xyz"}


def cma(space: Any, seed: int = 0) -> CmaSampler:
    return CmaSampler(split(compile_space(space), max_subspaces=1)[0], (seed, 0))


def valley(p: Any) -> float:
    return float(100 * (p["y"] - p["x"] ** 2) ** 2 + (1 - p["x"]) ** 2 + p["z"] ** 2)


@pytest.mark.slow
def test_a_curved_valley_is_followed_to_its_end() -> None:
    ours, plain = (minimize(valley, NUMBERS, trials=700, sampler=name, seed=0).best for name in ("cma", "random"))
    assert ours is not None
    assert plain is not None
    assert (ours.loss or 0.0) < 1e-3 < (plain.loss or 0.0)


def test_trials_that_it_did_not_ask_for_teach_it() -> None:
    """Known points, and trials of another sampler: it goes on where that one has come to."""
    sampler = cma(NUMBERS)
    points = [dict(zip("xyz", each, strict=True)) for each in np.random.default_rng(0).normal(1.2, 0.1, (200, 3))]
    sampler.tell([told(each, sum((value - 1) ** 2 for value in each.values())) for each in points])
    asked = sampler.ask(30, [])
    assert np.abs(np.array([[*each.values()] for each in asked]).mean(axis=0) - 1).max() < 0.35


def test_rounded_numbers_keep_trying_their_neighbours() -> None:
    space = {"n": hp.randint("n", 100), "x": hp.uniform("x", -1, 1)}
    asked = search(cma(space), lambda p: (p["n"] - 60) ** 2 + p["x"] ** 2, 500)
    last = Counter(params["n"] for params in asked[200:])
    assert last.most_common(1)[0][0] == 60
    assert 2 < last[59] + last[61] < 150


def test_choices_are_those_of_better_trials_mostly() -> None:
    space = {"kind": hp.choice("kind", ["a", "b", "c", "d"]), "x": hp.uniform("x", -1, 1)}
    asked = search(cma(space), lambda p: abs(p["kind"] - 2) + p["x"] ** 2, 150)
    last = Counter(params["kind"] for params in asked[100:])
    assert last[2] > 30
    assert len(last) > 1


def test_without_numbers_it_draws_from_the_law() -> None:
    space = hp.pchoice("kind", [(0.9, "a"), (0.1, "b")])
    asked = search(cma(space), lambda p: -p["kind"], 200)
    assert 5 < sum(params["kind"] for params in asked) < 40


def test_a_label_that_is_inactive_in_the_better_trials_is_drawn_all_the_same() -> None:
    space = hp.choice("top", [hp.uniform("a", 0, 1), {"b": hp.uniform("b", 0, 1)}])
    asked = search(cma(space), lambda p: p.get("a", 2.0), 200)
    assert min(params.get("a", 2.0) for params in asked) < 1e-3
    assert any("b" in params for params in asked[100:])


def test_once_it_has_converged_it_begins_elsewhere_with_twice_as_many() -> None:
    sampler = cma(NUMBERS)
    population = sampler._evolution.population_size
    search(sampler, lambda p: sum(value**2 for value in p.values()), 900)
    assert sampler._evolution.population_size >= 2 * population


def test_where_all_fails_it_begins_elsewhere() -> None:
    asked = search(cma(NUMBERS), lambda p: TrialState.FAILED if p["x"] < 1.5 else (p["x"] - 1.7) ** 2, 400)
    assert sum(params["x"] > 1.5 for params in asked) > 100


def test_what_was_asked_for_before_it_began_elsewhere_does_not_draw_it_back() -> None:
    sampler = cma(NUMBERS)
    population = sampler._evolution.population_size
    sampler.tell(
        [told(params, TrialState.FAILED, asked_at=1.0, finished_at=2.0) for params in sampler.ask(population, [])]
    )
    mean = sampler._evolution.mean.copy()
    late = [told(dict.fromkeys("xyz", 1.9), 0.0, asked_at=1.5, finished_at=3.0)] * 40
    sampler.tell(late)
    assert (sampler._evolution.mean == mean).all()
    assert (sampler._evolution.widths == FIRST_WIDTH).all()
