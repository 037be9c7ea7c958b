"""Finite subspaces: every point once, then a word; then repeats. Infinite ones are the sampler's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery import Study, minimize
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.samplers.wrapped import points
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, undivided

#: a choice of 3 points and of 4 points
SPACE = hp.choice("kind", [{"a": hp.randint("a", 3)}, {"b": hp.quniform("b", 0, 1.5, 0.5)}])


def whole(space: Any) -> Subspace:
    return undivided(compile_space(space))


def test_points_are_those_that_the_law_draws() -> None:
    space = whole({"n": hp.qnormal("n", 5, 2, 2), "l": hp.qloguniform("l", -1, 2, 3), "top": SPACE})
    found = [tuple(sorted(each.items())) for each in points(space, np.random.default_rng(0))]
    drawn = {tuple(sorted(each.items())) for each in space.sample(np.random.default_rng(0), 2000)}
    assert len(found) == len({*found})
    assert all(-2 <= dict(each)["n"] <= 12 for each in found)
    assert {each for each in drawn if -1 < dict(each)["n"] < 11} <= {*found}


@pytest.mark.parametrize("domain", [hp.randint("x", 2**62), hp.quniform("x", 0, 1e12, 1)])
def test_a_space_of_very_many_points_is_no_trouble(domain: Any) -> None:
    sampler = find_sampler("tpe")(whole(domain), (0, 0))
    assert len(sampler.ask(20, [])) == 20


def test_an_infinite_subspace_is_left_to_the_sampler() -> None:
    space = whole({"x": hp.uniform("x", 0, 1), "c": hp.choice("c", [1, 2])})
    assert find_sampler("tpe")(space, (0, 0)).ask(5, []) == TpeSampler(space, (0, 0)).ask(5, [])


@pytest.mark.parametrize("sampler", ["auto", "tpe", "gp"])
def test_a_study_tries_the_points_of_all_subspaces_before_one_twice(sampler: str) -> None:
    """Also where one subspace is exhausted long before the other, and the limit lies beyond the points."""
    with pytest.warns(UserWarning, match="all 7 points of the space have been tried") as warned:
        study = minimize(lambda values: 1.0, SPACE, trials=10, seed=0, sampler=sampler, progress=False)
    assert [each.filename for each in warned] == [__file__], "it is said once"
    drawn = [tuple(trial.params.items()) for trial in study.trials]
    assert len({*drawn[:7]}) == 7
    assert len(drawn) == 10


def test_a_resumed_study_knows_the_points_that_were_tried() -> None:
    with Study(SPACE, seed=0) as study:
        for _ in range(4):
            study.tell(study.ask(), error="no")
        study.enqueue([{"kind": 0, "a": 1}] if all(each.params.get("a") != 1 for each in study.trials) else [])
        study.run(lambda values: 1.0, trials=7, progress=False)
        assert len({tuple(trial.params.items()) for trial in study.trials}) == 7
        assert [study._scheduler().proposals.all_tried] == [None]
        study.ask()
        assert study._scheduler().proposals.all_tried == 7
        assert "all 7 points" in str(study._scheduler().notices())


def test_a_random_search_keeps_its_law() -> None:
    study = minimize(lambda values: 1.0, hp.choice("c", [1, 2]), trials=6, seed=0, sampler="random", progress=False)
    assert len(study.trials) == 6


def test_many_exhausted_subspaces_hold_nothing_up() -> None:
    space = hp.choice("kind", [{f"a{place}": hp.randint(f"a{place}", 2)} for place in range(60)])
    with Study(space, seed=0, sampler="tpe") as study:
        study.add([{"kind": kind, f"a{kind}": a} for kind in range(60) for a in range(2)], [1.0] * 120)
        assert study.ask().number == 120


@pytest.mark.parametrize("sampler", ["qmc", "tpe", "gp"])
def test_few_allowed_points_are_not_repeated(sampler: str) -> None:
    """Although `where` allows 100 of 10,000 points, so that nearly all proposals are replaced by draws."""
    space = {"x": hp.randint("x", 100), "y": hp.randint("y", 100)}
    arguments = {"where": lambda values: values["x"] == values["y"], "seed": 0, "progress": False}
    study = minimize(lambda values: float(values["x"]), space, trials=25, sampler=sampler, **arguments)
    assert len({trial.params["x"] for trial in study.trials}) == 25
