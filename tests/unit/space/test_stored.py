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
from services.cases import cases

from shadho_celery.space.compile import compile_space
from shadho_celery.space.describe import MAX_LEVELS
from shadho_celery.space.stored import LEAST_STEPS, RestoredSpace, Shown, shown_options, to_json

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
    restored = RestoredSpace(json.loads(json.dumps(to_json(space))))
    for params in space.sample(np.random.default_rng(0), 30):
        assert restored.evaluate(params) == (space.evaluate(params), True)


def test_a_function_among_the_options_is_a_text_and_is_said_to_be_one() -> None:
    space = compile_space({"f": hp.choice("f", [len, "plain"]), "x": hp.uniform("x", 0, 1)})
    restored = RestoredSpace(json.loads(json.dumps(to_json(space))))
    value, is_exact = restored.evaluate({"f": 0, "x": 0.5})
    assert isinstance(value["f"], Shown)
    assert repr(value["f"]) == "builtins.len"
    assert not is_exact
    assert restored.evaluate({"f": 1, "x": 0.5}) == ({"f": "plain", "x": 0.5}, True)


def test_an_unknown_function_is_a_text_too() -> None:
    space = compile_space({"C": 2 ** hp.uniform("C", -5, 15)})
    tree = json.loads(json.dumps(to_json(space)).replace('"pow"', '"gone"'))
    assert RestoredSpace(tree).evaluate({"C": 1.0}) == ({"C": "gone(...)"}, False)


@cases(
    "space, params, shown",
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
    restored = RestoredSpace(to_json(compile_space(space)))
    assert restored.shown(params, "o") == shown


def test_an_outline_of_an_option_is_bounded_and_has_an_ellipsis_for_what_is_drawn() -> None:
    deep: Any = 1
    for _ in range(MAX_LEVELS + 1):
        deep = (deep,)
    options = [{"k": (1, hp.uniform("x", 0, 1) + 1, len)}, deep, "a word", {"type": "tree", "k": 1}]
    stored = to_json(compile_space(hp.choice("o", options)))
    outlines = RestoredSpace(stored).outlines("o")
    assert outlines == {0: {"k": (1, "...", "builtins.len")}, 1: ((((("...",),),),),)}
    assert RestoredSpace(stored).outlines("x") == RestoredSpace(stored).outlines("none") == {}


def test_a_strangers_outline_takes_no_more_than_its_steps() -> None:
    """Each of these nodes refers a hundred times to the one before it."""
    nodes: list[dict[str, Any]] = [{"kind": "literal", "value": 1}]
    nodes += [{"kind": "sequence", "items": [place] * 100} for place in range(5)]
    nodes += [{"kind": "param", "label": "o"}, {"kind": "switch", "index": 6, "options": [5, 0]}]
    label = {"law": "randint", "parameters": {}, "conditions": [[]], "options": ["(1)", 1]}
    assert RestoredSpace({"nodes": nodes, "labels": {"o": label}}).outlines("o") == {}


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
    space = compile_space(hp.choice("o", [Opaque(), "a", Opaque()]))
    name = f"{Opaque.__module__}.Opaque object"
    assert shown_options("o", space.switches["o"]) == ([f"{name} #0", "'a'", f"{name} #2"], [0, 2])


def literal(value: Any) -> dict[str, Any]:
    return {"kind": "literal", "value": value}


def call(name: str, *args: int, **kwargs: int) -> dict[str, Any]:
    return {"kind": "call", "name": name, "args": [*args], "kwargs": [*kwargs.items()]}


def sequence(*items: int) -> dict[str, Any]:
    return {"kind": "sequence", "items": [*items]}


def of_nodes(*nodes: dict[str, Any]) -> RestoredSpace:
    return RestoredSpace({"nodes": [*nodes], "labels": {}})


@pytest.mark.parametrize(
    "nodes",
    [
        [literal("x"), literal("__class__"), call("getattr", 0, 1)],
        [literal("x"), literal("upper"), call("call_method", 0, 1)],
        [literal("x"), literal("__class__"), call("getitem", 0, 1)],
        [literal(1.5), literal("real"), call("getitem", 0, 1)],
        [literal("{0.__class__}"), literal(1), call("mod", 0, 1)],
        [literal("x"), call("partial", 0)],
        [literal("print"), call("call", 0)],
        [literal("os"), call("__import__", 0)],
        [literal("9" * 100), call("int", 0)],
    ],
)
def test_a_record_calls_pure_functions_of_plain_values_and_nothing_else(nodes: list[dict[str, Any]]) -> None:
    value, is_exact = of_nodes(*nodes).evaluate({})
    assert isinstance(value, Shown)
    assert not is_exact


@cases(
    "nodes",
    [
        [literal(9), literal(9), call("pow", 1, 1), call("pow", 0, 2), call("pow", 0, 3)],
        [literal(2), literal(10**18), call("pow", 0, 1)],
        [literal("x"), literal(8 * 10**9), call("mul", 0, 1)],
        [literal(8 * 10**9), literal("x"), call("mul", 0, 1)],
        [literal(0), sequence(0), literal(10**9), call("mul", 1, 2)],
        [literal(10**11), call("range", 0), call("sum", 1)],
        [literal(0), *(sequence(place, place) for place in range(60))],
        [literal(0), sequence(0, 0), *(call("add", place, place) for place in range(1, 60))],
        [literal("xx"), *(call("add", place, place) for place in range(60))],
        [literal(3), *(call("mul", place, place) for place in range(60))],
        [literal(0), *(sequence(place) for place in range(5000))],
        [literal(10**5), *(call("pow", place, place) for place in range(60))],
        [literal(1.5), *(call("pow", place, place) for place in range(60))],
    ],
)
def test_a_record_cannot_take_long_or_fill_the_memory(nodes: list[dict[str, Any]]) -> None:
    """Sizes and steps have bounds; what would go beyond is a text."""
    value, is_exact = of_nodes(*nodes).evaluate({})
    assert len(repr(value)) < 20 * LEAST_STEPS
    assert not is_exact


@pytest.mark.parametrize(
    "nodes",
    [
        [],
        [call("neg", 0)],
        [literal(1), sequence(-1)],
        [literal(1), sequence(2), sequence(1)],
        [literal([1])],
        [literal({"a": 1})],
        [literal(1), {"kind": "shared", "node": 1}],
    ],
)
def test_a_record_in_a_circle_or_with_constants_of_its_own_kind_is_none(nodes: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        of_nodes(*nodes)


def test_pure_functions_give_what_hyperopts_give() -> None:
    x, n = hp.uniform("x", 0.1, 1), scope.int(hp.quniform("n", 1, 9, 1))
    space = compile_space(
        {
            "numbers": [x + n, x - n, x * n, x / n, x // n, -x, n**3, 2**x, n + 1, scope.int(x * 9), scope.float(n)],
            "functions": [
                scope.exp(x),
                scope.log(x),
                scope.sqrt(x),
                scope.max(x, n),
                scope.min(n, 3),
                scope.sum([x, n]),
            ],
            "picked": scope.getitem([10, 20, 30], scope.int(hp.quniform("i", 0, 2, 1))),
            "keyed": {1: x, 2: "two"},
        }
    )
    restored = RestoredSpace(json.loads(json.dumps(to_json(space))))
    for params in space.sample(np.random.default_rng(1), 20):
        assert restored.evaluate(params) == (space.evaluate(params), True)
