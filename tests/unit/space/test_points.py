"""Known points are completed by the space's law, and refused by name if they are no part of the space."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery.errors import SpaceError
from shadho_celery.space.compile import compile_space
from shadho_celery.space.points import complete, given_values
from shadho_celery.space.split import split

SPACE = compile_space(
    hp.choice(
        "model",
        [
            {"model": "small", "rate": hp.uniform("rate", 0, 1)},
            {
                "model": "large",
                "width": hp.randint("width", 4),
                "drop": hp.choice("drop", [None, {"p": hp.uniform("p", 0, 1)}]),
            },
        ],
    )
)
SUBSPACES = split(SPACE)


def completed(point: Any, seed: int = 0) -> tuple[str, dict[str, Any]]:
    name, params = complete(SPACE, SUBSPACES, point, np.random.default_rng(seed))
    return name, dict(params)


def test_a_whole_point_is_taken_as_it_is() -> None:
    assert completed({"model": 0, "rate": 0.25}) == ("model=small", {"model": 0, "rate": 0.25})


def test_what_is_left_out_is_drawn_and_choices_so_that_the_given_labels_are_active() -> None:
    for seed in range(20):
        name, params = completed({"p": 0.5}, seed)
        assert (params["model"], params["drop"], params["p"]) == (1, 1, 0.5)
        assert name.startswith("model=large")
        assert 0 <= params["width"] < 4
    assert {completed({}, seed)[1]["model"] for seed in range(20)} == {0, 1}


def test_an_option_may_be_given_by_its_name_and_numbers_as_json_or_numpy_have_them() -> None:
    assert completed({"model": "small", "rate": 1})[1] == {"model": 0, "rate": 1.0}
    assert completed({"model": np.int64(1), "width": 2.0, "drop": 0})[1] == {"model": 1, "width": 2, "drop": 0}


@pytest.mark.parametrize("options", [["1", 1], ["2", "1", "0"], [1, "1"], ["1", True, "True"]])
def test_a_text_is_the_option_of_that_text_before_it_is_a_name_or_an_index(options: list[Any]) -> None:
    space = compile_space(hp.choice("c", options))
    assert given_values(space, {"c": "1"}) == {"c": [*map(repr, options)].index(repr("1"))}


GRIDS = {
    "q": hp.quniform("x", 0, 1, 0.1),
    "negative": hp.quniform("x", -1, 1, 0.1),
    "overhang": hp.quniform("x", -0.05, 0.95, 0.1),
    "third": hp.quniform("x", 0, 9, 1 / 3),
    "tiny": hp.quniform("x", 0, 1e-300, 1e-302),
    "fine": hp.quniform("x", 0, 1, 1e-15),
    "large": hp.quniform("x", 0, 1e18, 3e15),
    "log": hp.qloguniform("x", -3, 3, 0.7),
    "normal": hp.qnormal("x", 0, 1, 0.1),
    "lognormal": hp.qlognormal("x", 0, 1, 0.3),
    "whole": hp.uniformint("x", 1, 9),
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_value_that_was_rounded_is_the_one_of_its_grid(name: str) -> None:
    space = compile_space({"x": GRIDS[name]})
    for params in space.sample(np.random.default_rng(0), 50):
        for given in (params["x"], float(f"{params['x']:.15g}"), np.nextafter(params["x"], np.inf)):
            assert given_values(space, {"x": given}) in ({"x": params["x"]}, {"x": given} if name == "fine" else {})


@pytest.mark.parametrize(
    ("name", "value", "nearest"),
    [
        ("q", 0.35, "0.3 and 0.4"),
        ("q", 0.3000001, "0.3 and 0.4"),
        ("negative", -0.35, "-0.4 and -0.3"),
        ("whole", 2.5, "2 and 3"),
        ("log", 1, "0.7 and 1.4"),
        ("large", 1e15, "0 and 3e"),
        ("tiny", 1.5e-302, "1e-302 and 2e-302"),
    ],
)
def test_a_value_between_two_of_a_grid_is_refused_with_the_nearest(name: str, value: float, nearest: str) -> None:
    space = compile_space({"x": GRIDS[name]})
    with pytest.raises(SpaceError, match=f"the nearest are {nearest}"):
        given_values(space, {"x": value})
    assert given_values(space, {"x": value}, off_grid=True) == {"x": value}


@cases(
    "point, about",
    [
        ({"rat": 0.5}, "no label 'rat'; known are model, rate"),
        ({3: 0.5}, "no label 3"),
        ({"rate": 2.0}, r"'rate': 2.0 is outside uniform\(0, 1\)"),
        ({"rate": "x"}, "'rate': 'x' is outside"),
        ({"rate": True}, "'rate': True is outside"),
        ({"rate": float("nan")}, "'rate': nan is outside"),
        ({"model": 2}, "'model': 2 is outside"),
        ({"model": "huge"}, "no option 'huge'.*small, large"),
        ({"width": 1.5}, "'width': 1.5 is outside"),
        ({"model": 0, "width": 2}, "'width' is not active together"),
        ({"rate": 0.5, "width": 2}, "'width' is not active together"),
        ([0.5], "not a dict of labels and values"),
        (None, "not a dict of labels and values"),
    ],
)
def test_a_point_that_is_no_part_of_the_space_is_refused_by_name(point: Any, about: str) -> None:
    with pytest.raises(SpaceError, match=about) as refused:
        completed(point)
    assert "\n" not in str(refused.value)


def test_an_option_of_probability_0_is_refused() -> None:
    space = compile_space(hp.pchoice("p", [(1.0, {"x": hp.uniform("x", 0, 1)}), (0.0, {"y": hp.uniform("y", 0, 1)})]))
    for point in ({"p": 1}, {"y": 0.5}):
        with pytest.raises(SpaceError, match=r"probability 0|not active"):
            complete(space, split(space), point, np.random.default_rng(0))
