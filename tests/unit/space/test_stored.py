"""The recorded values of a trial are those that the space gives, without its module; what is read is only decoded."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
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
from shadho_celery.space.stored import (
    LONGEST,
    MAX_VALUES,
    Label,
    Shown,
    ValuesRecord,
    read_given,
    read_labels,
    read_shown,
    shown_options,
    to_json,
)

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
    "marks": {"!tuple": [None], "in": {"!text": hp.uniform("x", 0, 1)}, "keyed": {1: (2,), 3: hp.uniform("y", 0, 1)}},
    "numbers": [scope.exp(hp.uniform("x", 0, 1)), scope.sum([hp.uniform("y", 0, 1), 2]), np.int64(3), True],
}


def recorded(space: Any, params: dict[str, Any]) -> tuple[Any, bool]:
    return read_given(ValuesRecord(compile_space(space)).of(params), params)


def labels_of(space: Any) -> Mapping[str, Label]:
    return read_labels(json.loads(json.dumps(to_json(compile_space(space)))))


def shown_of(space: Any, params: dict[str, Any], label: str) -> Any:
    found = read_shown(ValuesRecord(compile_space(space)).of(params))
    return found[label] if label in found else labels_of(space)[label].shown(params[label])


@pytest.mark.parametrize("name", SPACES)
def test_values_are_those_of_the_space_after_a_way_through_json(name: str) -> None:
    space = compile_space(SPACES[name])
    record = ValuesRecord(space)
    for params in space.sample(np.random.default_rng(0), 30):
        values, is_exact = read_given(record.of(params), params)
        assert repr(values) == repr(plain(space.evaluate(params)))
        assert is_exact


def plain(value: Any) -> Any:
    """Return values with Python's own numbers in place of numpy's."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(map(plain, value))
    return value.item() if isinstance(value, np.generic) else value


def test_values_that_are_the_params_take_no_bytes() -> None:
    space = compile_space({"x": hp.uniform("x", 0, 1), "y": hp.normal("y", 0, 1)})
    assert ValuesRecord(space).of({"x": 0.5, "y": 1.0}) is None
    assert read_given(None, {"x": 0.5, "y": 1.0}) == ({"x": 0.5, "y": 1.0}, True)


def test_what_json_lacks_is_exact_where_its_text_is_and_else_a_text_that_is_said_to_be_one() -> None:
    space = {"f": hp.choice("f", [len, "plain", math.nan, -math.inf, b"b", Opaque()]), "x": hp.uniform("x", 0, 1)}
    value, is_exact = recorded(space, {"f": 0, "x": 0.5})
    assert isinstance(value["f"], Shown)
    assert (repr(value["f"]), is_exact) == ("builtins.len", False)
    assert recorded(space, {"f": 1, "x": 0.5}) == ({"f": "plain", "x": 0.5}, True)
    assert [repr(recorded(space, {"f": place, "x": 0.5})) for place in (2, 3, 4)] == [
        "({'f': nan, 'x': 0.5}, True)",
        "({'f': -inf, 'x': 0.5}, True)",
        "({'f': b'b', 'x': 0.5}, False)",
    ]


def test_functions_of_the_space_are_called_and_a_failure_is_the_text_of_the_values() -> None:
    def doubled(x: float) -> float:
        return 2 * x

    scope.define(doubled)
    assert recorded({"x": scope.doubled(hp.uniform("x", 0, 1))}, {"x": 0.5}) == ({"x": 1.0}, True)
    failing = {"x": scope.getitem((1, 2), scope.int(hp.quniform("x", 0, 9, 1)))}
    assert recorded(failing, {"x": 7.0}) == ("(IndexError: tuple index out of range)", False)
    # The objective's own draw is not known here, and its generator is not advanced.
    generator = np.random.default_rng(0)
    noisy = {"x": hp.uniform("x", 0, 1), "noise": scope.normal(0, 1, rng=generator)}
    assert recorded(noisy, {"x": 0.5})[1] is False
    assert generator.random() == np.random.default_rng(0).random()


def test_an_expression_that_fails_outside_its_option_leaves_the_values_alone() -> None:
    x = hp.uniform("x", 0, 1)
    space = {"x": x, "o": hp.choice("o", [1, {"y": scope.getitem((1,), scope.int(x * 9))}])}
    assert recorded(space, {"x": 0.9, "o": 0}) == ({"x": 0.9, "o": 1}, True)


class Costly:
    """A constant that must be neither copied nor described for each trial."""

    described = 0

    def __deepcopy__(self, memo: object) -> Costly:
        raise AssertionError

    def __repr__(self) -> str:
        Costly.described += 1
        return "Costly()"


def test_constants_are_written_once_and_not_copied() -> None:
    record = ValuesRecord(compile_space({"c": hp.choice("c", [Costly(), 1]), "x": hp.uniform("x", 0, 1)}))
    before = Costly.described
    assert [record.of({"c": 0, "x": place / 100}) for place in range(100)][7] is not None
    assert Costly.described == before


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
    assert repr(shown_of(space, params, "o")) == repr(shown)


def test_charts_show_options_in_short_form_with_an_ellipsis_for_what_is_drawn_or_deep() -> None:
    deep: Any = 1
    for _ in range(MAX_LEVELS + 1):
        deep = (deep,)
    options = [{"k": (1.23456789, hp.uniform("x", 0, 1) + 1, len)}, deep, "a word", {"type": "tree", "k": 1}]
    found = labels_of(hp.choice("o", options))
    assert [found["o"].outlined(place) for place in range(5)] == [
        "{k: (1.2346, ..., builtins.len)}",
        "(((((...)))))",
        "a word",
        "tree",
        4,
    ]
    alike = labels_of(hp.choice("o", [(0.1234567,), (0.1234568,)]))
    assert [alike["o"].outlined(place) for place in (0, 1)] == ["(0.1234567,)", "(0.1234568,)"]


def test_a_label_has_what_the_objective_got_of_it_alone() -> None:
    whole = hp.uniformint("whole", 1, 9)
    options = [{"n": 2**whole}, (1, (2, len)), (3, 4), None, "s", {"name": "b", "x": hp.quniform("x", 1, 9, 1)}]
    found = labels_of(
        {"o": hp.choice("o", options), "r": hp.randint("r", 5), "i": scope.int(hp.quniform("i", 1, 9, 1))}
    )
    assert [found["o"].given(place)[0] for place in range(6)] == [
        "{'n': whole}",
        (1, (2, "builtins.len")),
        (3, 4),
        None,
        "s",
        "b",
    ]
    assert [found["o"].given(place)[1] for place in range(3)] == [True, False, True]
    draws = {"whole": 3.0, "r": 2, "i": 4.0, "x": 5.0}
    assert repr([found[label].given(drawn) for label, drawn in draws.items()]) == repr(
        [(3, True), (2, True), (4, True), (5.0, True)]
    )


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


@cases(
    "values",
    [
        [0] * (MAX_VALUES // 10),
        "x" * 10**6,
        [["x" * 1000] * 1000] * 1000,
        [[[[[[[]] * 99] * 99] * 99] * 99] * 99] * 99,
        {place: {} for place in range(5000)},
    ],
)
def test_a_record_has_a_limited_size_also_of_parts_that_are_shared(values: Any) -> None:
    """The functions of a space may make anything, such as a list that holds another one a million times."""

    def made(x: float) -> Any:
        return values

    scope.undefine(made) if "made" in scope._impls else None
    scope.define(made)
    space = compile_space({"x": scope.made(hp.uniform("x", 0, 1)), "y": hp.uniform("y", 0, 1)})
    written = ValuesRecord(space).of({"x": 0.5, "y": 0.25})
    assert written is not None
    assert len(written) < 2 * MAX_VALUES
    found, is_exact = read_given(written, {})
    assert (found["y"], is_exact) == (0.25, False)


@cases(
    "text",
    [
        "",
        "[]",
        "{}",
        "7",
        '{"values": ',
        '{"values": {"!dict": [[{}, 1]]}}',
        '{"values": {"!dict": [1]}}',
        '{"values": {"!call": ["print"]}}',
        '{"values": {"!float": "one"}}',
        '{"values": ' + "[" * 500 + "]" * 500 + "}",
        '{"values": ' + "[" * 10**5 + "]" * 10**5 + "}",
        '{"values": "' + "x" * LONGEST + '"}',
        # Hashes of multiples of 2**61 - 1 are equal.
        '{"values": {"!dict": [' + ",".join(f"[{place * (2**61 - 1)},0]" for place in range(1, 20000)) + "]}}",
    ],
)
def test_a_damaged_record_is_a_text(text: str) -> None:
    value, is_exact = read_given(text, {"x": 1.0})
    assert isinstance(value, (Shown, dict))
    assert not is_exact or value == {}
    assert read_shown(text) == {}


@cases(
    "stored",
    [
        None,
        {},
        {"labels": {"o": {}}},
        {"labels": {"o": {"law": "randint", "parameters": {}, "conditions": [[]], "options": [[1]]}}},
        {"labels": {"o": {"law": "randint", "parameters": {}, "conditions": [[]], "options": ["x" * 10**6] * 9}}},
        {"nodes": [{"kind": "call", "name": "getattr", "args": [0], "kwargs": []}]},
    ],
)
def test_a_damaged_space_has_no_labels(stored: Any) -> None:
    """A text of a megabyte among the options would be shown once for each of its trials."""
    assert read_labels(stored) == {}


def test_recorded_names_and_texts_are_never_looked_up() -> None:
    text = '{"values": {"__class__": "os.system", "f": {"!text": "builtins.print"}}}'
    value, is_exact = read_given(text, {})
    assert (value, is_exact) == ({"__class__": "os.system", "f": "builtins.print"}, False)
