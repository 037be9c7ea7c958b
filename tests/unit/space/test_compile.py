"""What a space may be written as, what is refused and how, and what a compiled space tells of itself."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.stats
from hyperopt import hp, space_eval
from hyperopt.pyll import as_apply, scope
from services.cases import cases

from shadho_celery.errors import SpaceError
from shadho_celery.space.compile import MAX_DEPTH, compile_space
from shadho_celery.space.domains import Categorical, LogUniform, QUniform, RandInt


def refusal(expression: Any) -> str:
    """The message with which a space is refused, which must be one line."""
    with pytest.raises(SpaceError) as caught:
        compile_space(expression)
    message = str(caught.value)
    assert "\n" not in message
    assert ";" in message or ":" in message
    return message


def unlabelled() -> Any:
    return {"a": hp.uniform("x", 0, 1), "b": scope.normal(0, 1)}


def looping() -> Any:
    choice = hp.choice("x", [1, {"a": 2}])
    choice.pos_args[2].named_args.append(["again", choice])
    return choice


def containing_itself() -> Any:
    space: dict[str, Any] = {"x": hp.uniform("x", 0, 1)}
    space["again"] = [space]
    return space


def same_label_in_two_branches() -> Any:
    return hp.choice("c", [{"x": hp.uniform("x", 0, 1)}, {"x": hp.uniform("x", 0, 1)}])


def bound_from_another() -> Any:
    return hp.uniform("x", 0, 1 + hp.uniform("y", 1, 2))


REFUSED: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "two nodes, one label": (lambda: [hp.uniform("x", 0, 1), hp.uniform("x", 0, 1)], ["'x'", "two different nodes"]),
    "one label in two branches": (same_label_in_two_branches, ["'x'", "two different nodes"]),
    "label as text and bytes": (lambda: [hp.uniform("x", 0, 1), hp.normal(b"x", 0, 1)], ["'x'", "two different nodes"]),
    "low above high": (lambda: hp.uniform("x", 1, 0), ["'x'", "low = 1 is not below high = 0"]),
    "low equals high": (lambda: hp.quniform("x", 0, 0, 1), ["'x'", "low = 0 is not below high = 0"]),
    "NaN": (lambda: hp.uniform("x", 0, math.nan), ["'x'", "high of uniform is nan", "finite"]),
    "infinite": (lambda: hp.uniform("x", -math.inf, 0), ["'x'", "low of uniform is -inf", "finite"]),
    "range overflows": (lambda: hp.uniform("x", -1e308, 1e308), ["'x'", "overflows"]),
    "huge integer": (lambda: hp.uniform("x", 0, 10**400), ["'x'", "too large"]),
    "string": (lambda: hp.uniform("x", "a", "b"), ["'x'", "'a'", "number"]),
    "None": (lambda: hp.uniform("x", None, 1), ["'x'", "None", "number"]),
    "bool": (lambda: hp.uniform("x", False, True), ["'x'", "False", "number"]),
    "list": (lambda: hp.uniform("x", 0, [1, 2]), ["'x'", "(1, 2)", "number"]),
    "no bounds": (lambda: hp.uniform("x", 0), ["'x'", "lacks high"]),
    "too many": (lambda: hp.uniform("x", 0, 1, 2), ["'x'", "low, high"]),
    "size": (lambda: hp.uniform("x", 0, 1, size=3), ["'x'", "'size'", "leave it out"]),
    "bound from another": (bound_from_another, ["'x'", "its high depends on 'y'", "scale"]),
    "random bound": (lambda: hp.uniform("x", 0, scope.uniform(1, 2)), ["'x'", "its high is random"]),
    "failing bound": (lambda: hp.uniform("x", 0, as_apply(1) / 0), ["'x'", "its high cannot be computed"]),
    "raw bounds of a log": (lambda: hp.loguniform("x", 1e-5, 1e5), ["'x'", "logarithms", "np.log(low), np.log(high)"]),
    "raw bounds of a log grid": (lambda: hp.qloguniform("x", 1, 1e4, 1), ["'x'", "logarithms", "np.log"]),
    "lognormal overflows": (lambda: hp.lognormal("x", 1000, 1), ["'x'", "overflow", "np.log"]),
    "sigma 0": (lambda: hp.normal("x", 0, 0), ["'x'", "sigma of normal is 0", "above 0"]),
    "sigma below 0": (lambda: hp.lognormal("x", 0, -1), ["'x'", "sigma of lognormal is -1"]),
    "q 0": (lambda: hp.quniform("x", 0, 1, 0), ["'x'", "q of quniform is 0", "above 0"]),
    "q below 0": (lambda: hp.qnormal("x", 0, 1, -2), ["'x'", "q of qnormal is -2"]),
    "q too small": (lambda: hp.quniform("x", 0, 1e10, 1e-310), ["'x'", "too small"]),
    "empty choice": (lambda: hp.choice("x", []), ["'x'", "nothing to choose from"]),
    "empty randint": (lambda: hp.randint("x", 0), ["'x'", "nothing to choose from"]),
    "empty randint range": (lambda: hp.randint("x", 5, 5), ["'x'", "nothing to choose from", "low < high"]),
    "randint of a fraction": (lambda: hp.randint("x", 2.5), ["'x'", "2.5", "whole number"]),
    "randint beyond 64 bits": (lambda: hp.randint("x", 2**70), ["'x'", "64 bits"]),
    "negative probability": (lambda: hp.pchoice("x", [(-0.5, 1), (1.5, 2)]), ["'x'", "probability", "0 to 1"]),
    "probabilities sum to 0.6": (lambda: hp.pchoice("x", [(0.3, 1), (0.3, 2)]), ["'x'", "sum to 0.6"]),
    "probability is text": (lambda: hp.pchoice("x", [("half", 1), (0.5, 2)]), ["'x'", "'half'", "number"]),
    "NaN probability": (lambda: hp.pchoice("x", [(math.nan, 1), (0.5, 2)]), ["'x'", "probability"]),
    "too few options": (lambda: scope.switch(hp.randint("x", 3), 1, 2), ["'x'", "2 options"]),
    "option leads back": (looping, ["contains itself"]),
    "dict in itself": (containing_itself, ["contains itself"]),
    "keys of two types": (lambda: {1: hp.uniform("x", 0, 1), "a": 2}, ["keys", "strings"]),
    "no expression": (lambda: None, ["is None", "hp expression"]),
    "unlabelled": (unlabelled, ["normal has no label", "hp.normal"]),
    "unlabelled choice": (lambda: scope.one_of(1, 2), ["randint has no label"]),
    "law unknown": (lambda: scope.hyperopt_param("x", as_apply(3)), ["'x'", "not one of hyperopt's distributions"]),
}


@cases("case", REFUSED)
def test_a_space_that_cannot_be_searched_is_refused_in_one_line_with_cause_and_remedy(case: str) -> None:
    make, parts = REFUSED[case]
    message = refusal(make())
    for part in parts:
        assert part in message


def test_bounds_of_a_log_law_that_look_raw_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"'x'.*np\.log\(low\), np\.log\(high\)") as caught:
        space = compile_space(hp.loguniform("x", 1e-3, 10))
    assert caught[0].filename == __file__
    assert space.domains == {"x": LogUniform(1e-3, 10)}


@pytest.mark.parametrize("bounds", [(np.log(1e-5), np.log(1e5)), (1, 99), (-10, 10), (0, 200)])
def test_ordinary_bounds_of_a_log_law_are_not_warned_of(bounds: tuple[float, float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compile_space(hp.loguniform("x", *bounds))


def nested(depth: int) -> Any:
    space: Any = hp.uniform("x", 0, 1)
    for level in range(depth):
        space = hp.choice(f"c{level}", [None, {"below": space}])
    return space


ACCEPTED: dict[str, Callable[[], Any]] = {
    "q wider than the range": lambda: hp.quniform("x", 0, 1, 10),
    "one option": lambda: hp.choice("x", ["only"]),
    "one option with a hyperparameter": lambda: hp.choice("x", [{"y": hp.uniform("y", 0, 1)}]),
    "a huge randint": lambda: hp.randint("x", 2**40),
    "all of int64": lambda: hp.randint("x", 2**63),
    "nesting of 50": lambda: nested(50),
    "nesting of 150": lambda: nested(150),
    "non-ASCII label": lambda: hp.uniform("学習率 η", 0, 1),
    "very long label": lambda: hp.uniform("x" * 10_000, 0, 1),
    "empty label": lambda: hp.uniform("", 0, 1),
    "label with commas": lambda: hp.choice("a=1,b", [hp.uniform("x", 0, 1), 2]),
    "literal label": lambda: hp.uniform(as_apply("x"), 0, 1),
    "numpy bounds": lambda: hp.uniform("x", np.float32(0), np.array(3)),
    "computed bounds": lambda: hp.uniform("x", 0, scope.add(as_apply(1), 2) * 2),
    "keyword bounds": lambda: hp.quniform("x", low=0, high=4, q=2),
    "integral float randint": lambda: hp.randint("x", 5.0),
    "nearly 1": lambda: hp.pchoice("x", [(1 / 3 + 1e-8, 1), (1 / 3, 2), (1 / 3, 3)]),
    "probability 0": lambda: hp.pchoice("x", [(0.0, {"y": hp.uniform("y", 0, 1)}), (1.0, 2)]),
    "numbers as keys": lambda: {1: hp.uniform("x", 0, 1), 2: (3,)},
    "a bare node": lambda: hp.normal("x", 0, 1),
}


@cases("case", ACCEPTED)
def test_an_extreme_space_is_searched(case: str) -> None:
    expression = ACCEPTED[case]()
    space = compile_space(expression)
    for params in space.sample(np.random.default_rng(0), 20):
        space.check(params)
        assert space.evaluate(params) == space_eval(expression, params)
    assert set(space.describe()) == set(space.domains)


def test_a_label_in_bytes_becomes_text() -> None:
    space = compile_space({"a": hp.uniform(b"x", 0, 1)})
    assert tuple(space.domains) == ("x",)
    assert space.evaluate({"x": 0.5}) == {"a": 0.5}


def test_nesting_that_python_cannot_follow_is_refused_with_the_limit() -> None:
    assert str(MAX_DEPTH) in refusal(nested(400))
    plain: Any = hp.uniform("x", 0, 1)
    for _ in range(5000):
        plain = [plain]
    assert str(MAX_DEPTH) in refusal(plain)
    shallow: Any = hp.uniform("x", 0, 1)
    for _ in range(400):
        shallow = [shallow]
    compile_space(shallow).evaluate({"x": 0.5})


def test_what_stands_in_many_places_is_read_and_built_once() -> None:
    space: Any = [hp.uniform("x", 0, 1), hp.choice("c", [1, {"y": hp.uniform("y", 0, 1)}])]
    for _ in range(60):
        space = {"left": space, "right": space}
    compiled = compile_space(space)
    (params,) = compiled.sample(np.random.default_rng(0), 1)
    built = compiled.evaluate(params)
    assert built["left"] is built["right"]
    assert compiled.conditions == {"x": ((),), "c": ((),), "y": ((("c", 1),),)}


def test_choices_shared_by_choices_do_not_multiply() -> None:
    space: Any = hp.uniform("x", 0, 1)
    for level in range(60):
        space = [hp.choice(f"{side}{level}", [{"a": space}, {"b": space}, None]) for side in "lr"]
    compiled = compile_space(space)
    for params in compiled.sample(np.random.default_rng(0), 20):
        assert set(compiled.active(params)) == set(params)
    assert set(compiled.conditions) == set(compiled.domains)


@pytest.mark.slow
def test_ten_thousand_options_compile_and_draw_at_once() -> None:
    expression = hp.choice("x", [{"place": place, "y": hp.uniform(f"y{place}", 0, 1)} for place in range(10_000)])
    began = time.process_time()
    space = compile_space(expression)
    (params,) = space.sample(np.random.default_rng(0), 1)
    assert len(params) == 2
    assert space.evaluate(params)["place"] == params["x"]
    assert time.process_time() - began < 5  # generous: it takes a tenth of a second
    assert len(space.describe()["x"]) < 1000


def test_labels_come_in_order_of_first_appearance() -> None:
    space = compile_space([hp.choice("c", [hp.uniform("b", 0, 1), hp.uniform("a", 0, 1)]), hp.normal("z", 0, 1)])
    assert tuple(space.domains) == ("c", "b", "a", "z")
    assert space.active({"c": 1, "a": 0.5, "z": 0.0, "b": 9.0}) == ("c", "a", "z")


def test_each_form_has_its_domain() -> None:
    space = compile_space(
        [hp.choice("c", "ab"), hp.randint("r", 2, 5), hp.uniformint("u", 1, 9), hp.pchoice("p", [(1, 0), (0, 1)])]
    )
    assert space.domains == {
        "c": Categorical((0.5, 0.5)),
        "r": RandInt(2, 5),
        "u": QUniform(1, 9, 1),
        "p": Categorical((1.0, 0.0)),
    }


def test_a_missing_active_label_is_named() -> None:
    space = compile_space(hp.choice("c", [hp.uniform("x", 0, 1), 2]))
    assert space.evaluate({"c": 1}) == 2
    for call in (space.evaluate, space.check):
        with pytest.raises(SpaceError, match="'x'"):
            call({"c": 0})
    with pytest.raises(SpaceError, match="'c'"):
        space.active({})


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"c": 0, "x": 2.0}, "outside uniform"),
        ({"c": 0, "x": "1"}, "outside uniform"),
        ({"c": 0, "x": True}, "outside uniform"),
        ({"c": 0, "x": math.nan}, "outside uniform"),
        ({"c": 2}, "outside choice"),
        ({"c": 1.0}, "outside choice"),
        ({"c": 1, "zz": 3}, "'zz'"),
    ],
)
def test_params_that_cannot_have_been_drawn_are_told(params: dict[str, Any], word: str) -> None:
    with pytest.raises(SpaceError, match=word):
        compile_space(hp.choice("c", [hp.uniform("x", 0, 1), 2])).check(params)


def test_what_has_side_effects_happens_once_and_only_where_it_is_chosen() -> None:
    calls: list[float] = []
    counted = scope.call(lambda value: calls.append(value) or len(calls), [hp.uniform("x", 0, 1)])
    space = compile_space({"a": counted, "b": [counted], "c": hp.choice("c", [counted, 0])})
    assert space.evaluate({"x": 0.5, "c": 1}) == {"a": 1, "b": (1,), "c": 0}
    assert calls == [0.5]


def test_conditions_name_the_options_that_open_a_label() -> None:
    both = hp.uniform("both", 0, 1)
    some = hp.uniform("some", 0, 1)
    space = compile_space(
        {
            "c": hp.choice("c", [{"a": both, "s": some}, {"b": both}]),
            "d": hp.choice("d", [None, {"s": some, "e": hp.choice("e", [1, {"in": hp.uniform("in", 0, 1)}])}]),
        }
    )
    assert space.conditions == {
        "c": ((),),
        "both": ((),),
        "some": ((("c", 0),), (("d", 1),)),
        "d": ((),),
        "e": ((("d", 1),),),
        "in": ((("d", 1), ("e", 1)),),
    }


def test_a_description_tells_law_options_and_condition() -> None:
    space = compile_space(hp.choice("kernel", [{"kernel": "linear"}, {"C": 2 ** hp.uniform("C", -5, 15)}]))
    assert space.describe() == {
        "kernel": "choice(2) of {'kernel': 'linear'}, {'C': pow(2, float(<C>))}",
        "C": "uniform(-5, 15) as pow(2, float(<C>)) if kernel=1",
    }


def test_a_description_tells_what_is_computed_from_a_label_alone() -> None:
    x, y = hp.uniform("x", 0, 1), hp.uniformint("y", 1, 9)
    both = {"sum": x + y, "list": [2**x, -x], "y": y, "inner": scope.sqrt(x * 2)}
    assert compile_space(both).describe() == {
        "x": "uniform(0, 1) as neg(float(<x>)), pow(2, float(<x>)), sqrt(mul(float(<x>), 2))",
        "y": "quniform(1, 9, 1)",
    }


def test_a_plain_dict_keeps_its_order() -> None:
    expression = {"b": hp.uniform("z", 0, 1), "a": {"d": hp.uniform("y", 0, 1), "c": hp.uniform("x", 0, 1)}}
    space = compile_space(expression)
    assert tuple(space.domains) == ("z", "y", "x")
    assert list(space.evaluate({"x": 1.0, "y": 2.0, "z": 3.0})) == ["b", "a"]


def test_a_long_chain_of_arithmetic_is_computed_or_refused() -> None:
    total: Any = hp.uniform("x", 0, 1)
    for _ in range(400):
        total = total + 1
    assert compile_space(total).evaluate({"x": 0.5}) == pytest.approx(400.5)
    for _ in range(400):
        total = total + 1
    assert str(MAX_DEPTH) in refusal(total)


@pytest.mark.slow
def test_a_description_is_the_same_in_every_process() -> None:
    script = (
        "from hyperopt import hp; from shadho_celery.space.compile import compile_space;"
        "options = [object(), print, {1, 'b', 'a'}, lambda x: x, {'x': hp.uniform('x', 0, 1)}];"
        "space = compile_space(hp.choice('c', options));"
        "print(space.describe())"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": "."},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
    assert b"0x" not in texts.pop()


def test_changed_options_or_order_change_the_description() -> None:
    texts = [
        compile_space(hp.choice("c", options)).describe()["c"]
        for options in (
            ["a", "b"],
            ["b", "a"],
            ["a", 1],
            ["a", "1"],
            [("a",), "b"],
            list(range(50)),
            list(range(1, 51)),
        )
    ]
    assert len(set(texts)) == len(texts)


# Constants


class Options:
    """Something of the user's own, which holds a list."""

    def __init__(self) -> None:
        self.entries = [1]

    def __repr__(self) -> str:
        return f"Options({self.entries})"


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "array": (lambda: np.ones(3), lambda w: w.__imul__(10)),
    "array of objects": (lambda: np.array([[1], 2], dtype=object), lambda w: w[0].append(2)),
    "set": (lambda: {1, 2}, lambda w: w.clear()),
    "bytes": (lambda: bytearray(b"12"), lambda w: w.clear()),
    "own class": (Options, lambda w: w.entries.append(2)),
    "own class in a list": (lambda: [Options()], lambda w: w[0].entries.append(2)),
    "array in an option": (lambda: hp.choice("c", [{"w": np.ones(3)}]), lambda w: w["w"].__imul__(10)),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_constant_that_an_objective_changes_reaches_the_next_trial_as_the_space_has_it(kind: str) -> None:
    make, change = CHANGES[kind]
    space, params = compile_space(make()), {"c": 0}
    values = space.evaluate(params)
    before = repr(values)
    change(values)
    assert repr(values) != before
    assert repr(space.evaluate(params)) == before


def test_a_constant_in_two_places_is_one_object_in_both() -> None:
    constant = np.ones(3)
    values = compile_space({"a": constant, "b": (constant, hp.uniform("x", 0, 1))}).evaluate({"x": 0.5})
    assert values["a"] is values["b"][0]


def test_a_large_array_is_not_copied_and_cannot_be_written() -> None:
    constant = np.zeros(2**18)
    values = compile_space({"a": constant, "b": constant}).evaluate({})
    assert values["a"] is values["b"]
    assert np.shares_memory(values["a"], constant)
    with pytest.raises(ValueError, match="read-only"):
        values["a"] *= 10
    constant[0] = 1.0


@pytest.mark.parametrize("constant", [object(), threading.Lock(), len, partial(max, 1), math])
def test_a_constant_that_cannot_change_or_be_copied_is_itself(constant: Any) -> None:
    assert compile_space({"p": constant}).evaluate({})["p"] is constant


def test_a_generator_that_the_space_draws_from_goes_on() -> None:
    space = compile_space({"p": scope.uniform(0, 1, rng=np.random.default_rng(1))})
    assert space.evaluate({}) != space.evaluate({})


@cases(
    "space, remedy",
    [
        ({"n": range(1, 9)}, "hp.randint('n', 1, 9) or hp.uniformint('n', 1, 8)"),
        ({"n": range(0, 9, 2)}, "hp.choice('n', range(0, 9, 2))"),
        ([range(3)], "hp.randint('x', 0, 3)"),
        ({"m": hp.choice("m", [{"n": range(3)}, 2])}, "hp.randint('n', 0, 3)"),
        ({"a": {"n": scipy.stats.loguniform(1, 10)}}, "hp.uniform('n', 0, 1) or another hp function"),
        ({"n": scipy.stats.norm}, "hp.uniform('n', 0, 1)"),
        (scipy.stats.norm(), "hp.uniform('x', 0, 1)"),
        (range(3), "hp.randint('x', 0, 3)"),
    ],
)
def test_a_range_or_another_tools_distribution_in_a_space_is_refused_with_the_remedy(space: Any, remedy: str) -> None:
    with pytest.raises(SpaceError, match="would be a constant; write ") as caught:
        compile_space(space)
    assert remedy in str(caught.value)


def test_lists_in_a_dict_of_a_space_are_one_warning_and_tuples_and_options_are_none() -> None:
    lists = {"C": [0.1, 1, 10], "kernel": ["rbf", "linear"], "u": hp.uniform("u", 0, 1)}
    with pytest.warns(UserWarning, match=r"a list as C, kernel, .* write hp\.choice\('C', \[0\.1, 1, 10\]\)") as caught:
        compile_space(lists)
    assert len(caught) == 1
    meant = {"C": (0.1, 1, 10), "layers": hp.choice("layers", [[64], [64, 64], range(3)]), "u": lists["u"], "none": []}
    meant["data"] = np.arange(3)
    meant["m"] = hp.choice("m", [{"layers": [64]}, scipy.stats.norm()])
    assert compile_space(meant).evaluate({"layers": 1, "u": 0.5, "m": 0})["layers"] == (64, 64)
