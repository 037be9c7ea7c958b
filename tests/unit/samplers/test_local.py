"""Local search goes on from the best trial by steps whose width follows their success, and begins anew in the end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
from hyperopt import hp
from services.trials import search, told

from shadho_celery import minimize
from shadho_celery.core.trial import Params, TrialState
from shadho_celery.samplers.local import DRAWS, FIRST_WIDTH, LocalSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

NUMBERS = {name: hp.uniform(name, -2, 2) for name in "xyz"}
MIXED = {
    "kind": hp.choice("kind", [{"rate": hp.loguniform("rate", -9, 0)}, "other", {"n": hp.randint("n", 30)}]),
    "x": hp.uniform("x", -1, 1),
}


def local(space: Any) -> LocalSampler:
    return LocalSampler(split(compile_space(space), max_subspaces=1)[0], (0, 0))


def bowl(params: Params) -> float:
    return float(sum((value - 1) ** 2 for value in params.values()))


def test_it_comes_far_nearer_than_random_search() -> None:
    ours, plain = (minimize(bowl, NUMBERS, trials=200, sampler=name, seed=0).best for name in ("local", "random"))
    assert ours is not None
    assert plain is not None
    assert (ours.loss or 0.0) < 1e-4 < (plain.loss or 0.0)


def test_conditional_labels_and_whole_numbers_are_searched() -> None:
    asked = search(local(MIXED), lambda p: abs(p.get("n", 50) - 17) + p["x"] ** 2, 300)
    assert Counter(params.get("n") for params in asked[150:]).most_common(1)[0][0] == 17
    assert {params["kind"] for params in asked} == {0, 1, 2}


def test_steps_get_narrower_without_success_and_wider_with_it() -> None:
    sampler = local(NUMBERS)
    search(sampler, bowl, DRAWS)
    for trials in (10, 20):
        before = sampler._width
        search(sampler, lambda _: 100.0, trials)
        assert sampler._width < before
    before = sampler._width
    losses = iter(range(0, -100, -1))
    search(sampler, lambda _: next(losses), 3)
    assert before < sampler._width <= FIRST_WIDTH


def test_a_run_ends_once_its_steps_are_too_narrow_and_the_next_one_begins_at_the_best_trial_or_anew() -> None:
    sampler = local(NUMBERS)
    search(sampler, bowl, 30)
    best = sampler._best
    seen = [sampler._runs]
    while sampler._runs < 3:
        search(sampler, lambda _: 50.0, 1)
        if sampler._runs != seen[-1]:
            seen.append(sampler._runs)
            assert sampler._width == FIRST_WIDTH
            assert sampler._good == ([best] if sampler._runs % 2 else [])
    assert seen == [0, 1, 2, 3]


def test_slots_that_were_filled_before_a_success_do_not_narrow_the_steps() -> None:
    sampler = local(NUMBERS)
    search(sampler, bowl, DRAWS)
    asked = sampler.ask(16, [])
    sampler.tell([told(asked[0], -1.0, asked_at=0.0, finished_at=1.0)])
    width = sampler._width
    sampler.tell([told(params, 9.0, asked_at=0.5, finished_at=2.0) for params in asked[1:]])
    assert sampler._width == width
    sampler.tell([told(asked[0], 9.0, asked_at=1.5, finished_at=2.5)])
    assert sampler._width < width


def test_where_all_fails_it_draws_from_the_law() -> None:
    asked = search(local(NUMBERS), lambda _: TrialState.FAILED, 60)
    assert np.std([params["x"] for params in asked[30:]]) > 0.8
