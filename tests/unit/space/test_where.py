"""Bounds between params: draws obey them, and bounds that allow nothing or little are named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery.errors import UsageError
from shadho_celery.samplers.wrapped import points
from shadho_celery.space import space as module
from shadho_celery.space.compile import compile_space
from shadho_celery.space.space import Space
from shadho_celery.space.split import Subspace, bounded, split, undivided

EXPRESSION = {
    "low": hp.uniform("low", 0, 1),
    "high": hp.uniform("high", 0, 1),
    "model": hp.choice("model", [{"tag": "tree", "depth": hp.randint("depth", 9)}, {"tag": "flat"}]),
}


def space(where: Callable[[Any], Any] | None) -> Space:
    return replace(compile_space(EXPRESSION), where=where)


def found(where: Callable[[Any], Any]) -> tuple[tuple[Subspace, ...], str | None]:
    return bounded(split(space(where)))


def test_draws_obey_the_bounds_and_keep_those_that_obeyed_them_anyway() -> None:
    def is_ordered(values: Any) -> bool:
        return bool(values["low"] < values["high"])

    drawn = space(is_ordered).sample(np.random.default_rng(0), 200)
    free = space(None).sample(np.random.default_rng(0), 200)
    assert len(drawn) == 200
    assert all(params["low"] < params["high"] for params in drawn)
    kept = [params for params in free if params["low"] < params["high"]]
    assert drawn[: len(kept)] == kept


def test_bounds_that_allow_no_point_are_refused_with_a_hint_that_an_equality_needs_another_space() -> None:
    with pytest.raises(UsageError, match=r"none of 10000 draws .*must be equal, or sum up to a number.*one param less"):
        found(lambda values: values["low"] == values["high"])


def test_bounds_that_allow_few_points_are_warned_of() -> None:
    assert found(lambda values: values["low"] < 0.5)[1] is None
    _, warning = found(lambda values: values["low"] < 0.004)
    assert warning is not None
    assert "where allows about 0.4" in warning


def test_a_subspace_without_an_allowed_point_is_left_out() -> None:
    kept, warning = found(lambda values: values["model"]["tag"] == "flat")
    assert [each.name for each in kept] == ["model=flat"]
    assert kept[0].probability == pytest.approx(1.0)
    assert warning == "where allows no point of subspace model=tree, which is left out"
    whole = kept[0].space
    assert {params["model"] for params in undivided(whole).sample(np.random.default_rng(0), 50)} == {1}
    assert not whole.allows({"low": 0.1, "high": 0.2, "model": 0, "depth": 3})


@cases(
    ("where", "why"),
    [
        (lambda values: values["width"] > 1, "KeyError: 'width'"),
        (lambda values: print(end=""), "it returned None"),
        (lambda: True, "takes 0 positional arguments"),
        (lambda values: np.array([True, False]), "it returned array([ True, False])"),
        (lambda values: "no", "it returned 'no'"),
    ],
)
def test_bounds_that_fail_name_the_point(where: Callable[..., Any], why: str) -> None:
    with pytest.raises(UsageError, match=r"where failed for \{'high': 0.*'model': .*return True or False") as refused:
        found(where)
    assert why in str(refused.value)


def test_a_search_for_an_allowed_draw_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_REFUSED", 500)
    with pytest.raises(UsageError, match="where allows none of 500 draws"):
        space(lambda values: False).sample(np.random.default_rng(0), 1)


def test_the_points_of_a_finite_space_are_the_allowed_ones() -> None:
    pair = replace(compile_space([hp.randint("a", 4), hp.randint("b", 4)]), where=lambda pair: pair[0] < pair[1])
    listed = list(points(undivided(pair), np.random.default_rng(0)))
    assert sorted((each["a"], each["b"]) for each in listed) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
