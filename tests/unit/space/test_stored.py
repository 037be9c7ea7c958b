"""The machine-readable form of a space gives the values that the space itself gives, without its module."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from hyperopt.pyll import scope

from shadho_celery.space.compile import compile_space, find_function
from shadho_celery.space.stored import RestoredSpace, Shown, to_json

SHARED = 2 * hp.uniform("shared", 0, 1)
SPACES: dict[str, Any] = {
    "flat": {"u": hp.uniform("u", -1, 1), "n": scope.int(hp.quniform("n", 1, 9, 1)), "fixed": "text", "no": None},
    "nested": hp.choice(
        "model",
        [
            {"name": "a", "layers": [hp.randint("l1", 4), hp.randint("l2", 2, 9)], "deep": (hp.normal("w", 0, 1),)},
            {"name": "b", "inner": hp.choice("inner", [None, {"rate": hp.loguniform("rate", -9, 0)}, "text"])},
        ],
    ),
    "computed": {"C": 2 ** hp.uniform("C", -5, 15), "root": scope.sqrt(hp.uniform("r", 0, 1)), "log": [SHARED, SHARED]},
    "literals": hp.pchoice("p", [(0.5, (1, 3)), (0.5, {"deep": [True, 1e-300]})]),
    "a constant": 3,
}


@pytest.mark.parametrize("name", SPACES)
def test_values_are_those_of_the_space_after_a_way_through_json(name: str) -> None:
    space = compile_space(SPACES[name])
    restored = RestoredSpace(json.loads(json.dumps(to_json(space))), find_function)
    for params in space.sample(np.random.default_rng(0), 30):
        assert restored.evaluate(params) == (space.evaluate(params), True)


def test_a_function_among_the_options_is_a_text_and_is_said_to_be_one() -> None:
    space = compile_space({"f": hp.choice("f", [len, "plain"]), "x": hp.uniform("x", 0, 1)})
    restored = RestoredSpace(json.loads(json.dumps(to_json(space))), find_function)
    value, is_exact = restored.evaluate({"f": 0, "x": 0.5})
    assert isinstance(value["f"], Shown)
    assert repr(value["f"]) == "builtins.len"
    assert not is_exact
    assert restored.evaluate({"f": 1, "x": 0.5}) == ({"f": "plain", "x": 0.5}, True)


def test_an_unknown_function_is_a_text_too() -> None:
    space = compile_space({"C": 2 ** hp.uniform("C", -5, 15)})
    tree = json.loads(json.dumps(to_json(space)).replace('"pow"', '"gone"'))
    assert RestoredSpace(tree, find_function).evaluate({"C": 1.0}) == ({"C": "gone(...)"}, False)


@pytest.mark.parametrize(
    ("space", "params", "shown"),
    [
        (hp.choice("o", ["adam", "sgd"]), {"o": 1}, "sgd"),
        (hp.choice("o", [{"name": "a"}, {"name": "b", "x": hp.uniform("x", 0, 1)}]), {"o": 1, "x": 0.5}, "b"),
        (hp.choice("o", [(32,), (64, 64)]), {"o": 1}, "(64, 64)"),
        (hp.choice("o", [(64, 32), (128,), [16, 16]]), {"o": 1}, "(128,)"),
        (hp.choice("o", [("a", 1), ("b", ())]), {"o": 1}, "('b', ())"),
        (
            hp.choice("o", [{"loss": 3}, {"deep": ((None,), {}), "loss": 4}]),
            {"o": 1},
            "{'deep': ((None,), {}), 'loss': 4}",
        ),
        (hp.choice("o", [{"k": 3}, {"k": 3, "x": hp.uniform("x", 0, 1)}]), {"o": 1, "x": 0.5}, "{'k': 3, 'x': ...}"),
        (hp.choice("o", [1.0, math.nan]), {"o": 1}, "nan"),
        (hp.choice("o", [None, 2 * hp.uniform("x", 0, 1)]), {"o": 1, "x": 0.5}, "..."),
        (hp.choice("o", [len, max]), {"o": 0}, "builtins.len"),
        (hp.choice("o", [np.int64(8), np.int64(16)]), {"o": 1}, 16),
        (scope.int(hp.quniform("o", 1, 9, 1)), {"o": 5.0}, 5),
        (2 ** hp.quniform("o", 1, 9, 1), {"o": 3.0}, 8.0),
        ({"a": hp.uniform("o", 0, 1)}, {"o": 0.5}, 0.5),
    ],
)
def test_a_table_shows_what_the_objective_got_of_a_label(space: Any, params: dict[str, Any], shown: Any) -> None:
    restored = RestoredSpace(to_json(compile_space(space)), find_function)
    assert restored.shown(params, "o") == shown


def test_laws_and_conditions_are_there_for_other_programs() -> None:
    tree = to_json(compile_space(SPACES["nested"]))
    assert tree["labels"]["rate"]["law"] == "loguniform"
    assert tree["labels"]["rate"]["parameters"] == {"low": -9.0, "high": 0.0}
    assert [[list(step) for step in way] for way in tree["labels"]["rate"]["conditions"]] == [
        [["model", 1], ["inner", 1]]
    ]
    assert tree["labels"]["model"]["options"] == ["a", "b"]


class Opaque:
    """An object without a text of its own."""


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ([1, "1"], ["1", "'1'"]),
        ([1, 1.0, True], ["1", "1.0", "True"]),
        ([0.0, -0.0], ["0.0", "-0.0"]),
        ([None, "None"], ["None", "'None'"]),
        (["", "a"], ["''", "'a'"]),
        ([Path("a"), Path("b")], [f"{type(Path()).__name__}('a')", f"{type(Path()).__name__}('b')"]),
        ([np.float32(0.5), np.float64(0.5)], ["numpy.float32(0.5)", "numpy.float64(0.5)"]),
        (
            [partial(max, 1), partial(max, 2)],
            ["functools.partial(builtins.max, 1)", "functools.partial(builtins.max, 2)"],
        ),
        ([{"name": "1", "x": hp.uniform("x", 0, 1)}, 1], ["{'name': '1', 'x': ...}", 1]),
        ([{"x": hp.uniform("x", 0, 1)}, {"x": hp.uniform("y", 0, 1)}, 3], ["{'x': ...} #0", "{'x': ...} #1", "3"]),
    ],
)
def test_no_two_options_of_a_choice_are_shown_alike(options: list[Any], shown: list[str]) -> None:
    stored = to_json(compile_space(hp.choice("o", options)))
    assert stored["labels"]["o"]["options"] == shown


def test_an_option_without_a_text_of_its_own_has_its_index_and_is_marked() -> None:
    stored = to_json(compile_space(hp.choice("o", [Opaque(), "a", Opaque()])))
    name = f"{Opaque.__module__}.Opaque object"
    assert stored["labels"]["o"]["options"] == [f"{name} #0", "'a'", f"{name} #2"]
    assert stored["labels"]["o"]["alike"] == [0, 2]
