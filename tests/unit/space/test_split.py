"""A space is split into one subspace for each combination of structural choices, lazily and never beyond a bound."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from hyperopt.pyll import scope
from services.cases import cases

from shadho_celery.space.compile import compile_space
from shadho_celery.space.features import complexity
from shadho_celery.space.split import Subspace, split


def leaf(label: str) -> Any:
    return hp.uniform(label, 0, 1)


def subspaces_of(expression: Any, limit: int = 64) -> tuple[Subspace, ...]:
    space = compile_space(expression)
    subspaces = split(space, limit)
    assert math.fsum(subspace.probability for subspace in subspaces) == pytest.approx(1)
    assert len({subspace.name for subspace in subspaces}) == len(subspaces)
    return subspaces


def golden_mixed() -> Any:
    return {
        "A": [leaf("a"), leaf("b"), leaf("c")],
        "B": hp.choice("B", [{"d": leaf("d")}, {"e": leaf("e")}]),
        "C": hp.choice("C", [None, {"f": leaf("f"), "g": leaf("g")}]),
        "D": hp.choice("D", [None, hp.choice("D_on", [{"h": leaf("h")}, {"i": leaf("i")}])]),
    }


@pytest.mark.parametrize(
    ("expression", "count"),
    [
        ({"a": leaf("a"), "b": leaf("b")}, 1),
        (hp.choice("c", [{"a": leaf("a")}, {"b": leaf("b")}]), 2),
        (hp.choice("c", [None, {"a": leaf("a"), "b": leaf("b")}]), 2),
        (hp.choice("c", [None, {"a": leaf("a")}, {"b": leaf("b")}]), 3),
        (golden_mixed(), 12),
        (hp.choice("c", ["x", "y", "z"]), 1),
    ],
)
def test_the_number_of_subspaces_is_the_papers(expression: Any, count: int) -> None:
    assert len(subspaces_of(expression)) == count


def svm() -> Any:
    def c(kernel: str) -> Any:
        return 2 ** hp.uniform(f"C_{kernel}", -5, 15)

    def gamma(kernel: str) -> Any:
        return 10 ** hp.uniform(f"gamma_{kernel}", -3, 3)

    def coef0(kernel: str) -> Any:
        return hp.uniform(f"coef0_{kernel}", -1000, 1000)

    return hp.choice(
        "kernel",
        [
            {"kernel": "linear", "C": c("linear")},
            {"kernel": "rbf", "C": c("rbf"), "gamma": gamma("rbf")},
            {"kernel": "sigmoid", "C": c("sigmoid"), "gamma": gamma("sigmoid"), "coef0": coef0("sigmoid")},
            {
                "kernel": "poly",
                "C": c("poly"),
                "gamma": gamma("poly"),
                "coef0": coef0("poly"),
                "degree": hp.choice("degree", list(range(2, 15))),
            },
        ],
    )


def test_the_svms_leaves_give_the_papers_complexities() -> None:
    found = {subspace.name: complexity(subspace.domains.values()) for subspace in subspaces_of(svm())}
    assert found == pytest.approx(
        {"kernel=linear": 21.98, "kernel=rbf": 175.71, "kernel=sigmoid": 351416.24, "kernel=poly": 675800.46}, rel=1e-4
    )


def test_a_subspace_knows_its_pins_leaves_and_share() -> None:
    inner = hp.choice("inner", [{"u": leaf("u")}, {"v": leaf("v")}])
    expression = [
        hp.pchoice("outer", [(0.3, {"i": inner}), (0.7, {"w": leaf("w"), "plain": hp.choice("plain", "ab")})])
    ]
    first, second, third = subspaces_of(expression)
    assert (first.name, dict(first.fixed), tuple(first.domains)) == (
        "outer={'i': inner},inner={'u': u}",
        {"outer": 0, "inner": 0},
        ("u",),
    )
    assert (second.name, second.probability) == ("outer={'i': inner},inner={'v': v}", pytest.approx(0.15))
    assert (third.name, tuple(third.domains), third.probability) == (
        "outer={'plain': plain, 'w': w}",
        ("plain", "w"),
        0.7,
    )
    assert len(third.domains) == 2
    for params in third.sample(np.random.default_rng(0), 10):
        assert set(params) == {"outer", "w", "plain"}
        assert third.contains(params)
        assert not first.contains(params)


def test_the_undivided_space_is_named_all() -> None:
    (only,) = subspaces_of({"x": leaf("x")})
    assert (only.name, dict(only.fixed), only.probability) == ("all", {}, 1)


@cases(
    "options, names",
    [
        ([{"c": "linear"}, {"c": "rbf", "x": 0}], ["linear", "rbf"]),
        ([{"act": "relu", "type": "svm", "x": 0}, {"act": "relu", "type": "tree", "y": 0}], ["svm", "tree"]),
        ([("svm", {"x": 0}), ("tree", {"y": 0})], ["svm", "tree"]),
        ([None, {"x": 0}], ["None", "{'x': x}"]),
        ([True, 2.5, "a", {"x": 0}], ["True", "2.5", "a", "{'x': x}"]),
        ([{"t": "same", "x": 0}, {"t": "same", "y": 0}], ["{'t': 'same', 'x': x}", "{'t': 'same', 'y': y}"]),
        ([{"n": 1, "x": 0}, {"n": 2, "y": 0}], ["1", "2"]),
        ([{"c": 8, "n": 1, "x": 0}, {"c": 9, "n": 2, "y": 0}], ["8", "9"]),
        ([{"n": 1, "x" * 30 + each + "x" * 30: 0} for each in "ab"], ["0", "1"]),
        ([(64,), (64, 128), (1, {"x": 0})], ["(64,)", "(64, 128)", "(1, {'x': x})"]),
        (["1", {"x": 0}], ["1", "{'x': x}"]),
        (["", ("a" * 50, {"x": 0})], ["", "a" * 50]),
        (["1", (2, "a" * 50, {"x": 0})], ["1", "(2, '" + "a" * 13 + "..." + "a" * 7 + "', {'x': x})"]),
        ([{"only": "first", "x": 0}, {"y": 0}], ["first", "{'y': y}"]),
    ],
)
def test_an_options_name_is_its_literal_tag_else_its_text_else_its_index(options: list[Any], names: list[str]) -> None:
    def filled(option: Any) -> Any:
        if isinstance(option, tuple):
            return tuple(map(filled, option))
        if isinstance(option, dict):
            return {key: leaf(key) if value == 0 else value for key, value in option.items()}
        return option

    found = [subspace.name for subspace in subspaces_of(hp.choice("c", [filled(option) for option in options]))]
    assert found == [f"c={name}" for name in names]


def test_names_stay_different_where_labels_hold_commas() -> None:
    expression = [
        hp.choice("a", ["x", "x,b=y", leaf("p")]),
        hp.choice("b", ["y", leaf("q"), "y,b=y"]),
    ]
    assert len(subspaces_of(expression)) == 9


def deep_unet(levels: int = 8) -> Any:
    """Convolutions with many inner choices a level: far more combinations than atoms in a hand."""
    return {
        f"level{level}": hp.choice(
            f"block{level}",
            [
                [hp.choice(f"drop{level}_{part}", [None, {"p": leaf(f"p{level}_{part}")}]) for part in range(6)],
                {"width": leaf(f"width{level}")},
            ],
        )
        for level in range(levels)
    }


def test_a_space_of_many_combinations_is_split_on_the_outermost_choices_only(caplog: pytest.LogCaptureFixture) -> None:
    expression = deep_unet()
    space = compile_space(expression)
    with caplog.at_level(logging.INFO):
        subspaces = split(space, 64)
    assert len(caplog.records) == 1
    assert "more than 64 combinations" in caplog.text
    assert len(subspaces) == 64
    assert [set(subspace.fixed) for subspace in subspaces] == [{f"block{level}" for level in range(6)}] * 64
    assert "drop0_0" in subspaces[0].domains
    assert "block7" in subspaces[0].domains
    assert "drop0_0" not in subspaces[-1].domains
    assert math.fsum(subspace.probability for subspace in subspaces) == pytest.approx(1)


def test_a_gigantic_space_is_split_in_milliseconds() -> None:
    space = compile_space(deep_unet(40))
    began = time.process_time()
    subspaces = split(space, 64)
    assert time.process_time() - began < 1  # generous: it takes milliseconds
    assert len(subspaces) == 64


def test_what_fits_the_bound_exactly_is_split_in_full(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert len(subspaces_of(golden_mixed(), 12)) == 12
    assert not caplog.records
    assert len(subspaces_of(golden_mixed(), 11)) == 8
    assert caplog.records


def test_one_choice_beyond_the_bound_leaves_the_space_whole() -> None:
    (only,) = subspaces_of(hp.choice("c", [{"x": leaf(f"x{place}")} for place in range(100)]))
    assert only.name == "all"
    assert len(only.domains) == 101


def test_a_leaf_under_two_branches_is_a_leaf_of_both() -> None:
    both = leaf("both")
    first, second = subspaces_of(hp.choice("c", [{"x": both}, {"y": both, "z": leaf("z")}]))
    assert tuple(first.domains) == ("both",)
    assert tuple(second.domains) == ("both", "z")


def test_a_trial_has_the_labels_of_one_option_of_each_choice() -> None:
    inner = hp.choice("inner", [{"a": leaf("a"), "b": leaf("b"), "c": leaf("c")}, {"d": leaf("d")}])
    space = {"x": leaf("x"), "outer": hp.choice("outer", [{"e": leaf("e"), "in": inner}, {"f": leaf("f")}, 0])}
    (all_of_it,) = subspaces_of(space, limit=1)
    # x, outer, e, inner and three of the first inner option
    assert all_of_it.most_drawn == 7
    assert [each.most_drawn for each in subspaces_of(space)] == [5, 3, 2, 1]
    shared = leaf("x")
    (twice,) = subspaces_of({"x": shared, "m": hp.choice("m", [{"x": shared}, 0])}, limit=1)
    assert twice.most_drawn == 2


def test_a_choice_that_stands_in_two_places_is_pinned_once() -> None:
    shared = hp.choice("shared", [{"x": leaf("x")}, {"y": leaf("y")}])
    expression = [hp.choice("a", [{"s": shared}, leaf("p")]), hp.choice("b", [{"s": shared}, leaf("q")])]
    subspaces = subspaces_of(expression)
    # a and b both take it: 2; one of them: 2 + 2; none: 1
    assert len(subspaces) == 7
    for subspace in subspaces:
        assert ("shared" in subspace.fixed) == (subspace.fixed["a"] == 0 or subspace.fixed["b"] == 0)
        for params in subspace.sample(np.random.default_rng(0), 5):
            assert subspace.contains(params)


def test_one_index_over_two_lists_of_options_is_pinned_once() -> None:
    index = scope.hyperopt_param("i", scope.randint(2))
    expression = [scope.switch(index, leaf("a"), leaf("b")), scope.switch(index, 0, leaf("c"))]
    first, second = subspaces_of(expression)
    assert tuple(first.domains) == ("a",)
    assert tuple(second.domains) == ("b", "c")


def test_options_picked_by_a_computed_index_are_not_split() -> None:
    index = scope.int(hp.quniform("q", 0, 1, 1))
    (only,) = subspaces_of(scope.switch(index, leaf("a"), hp.choice("c", [leaf("b"), None])))
    assert set(only.domains) == {"q", "a", "b", "c"}


def test_an_option_that_is_never_drawn_has_no_subspace() -> None:
    (only,) = subspaces_of(hp.pchoice("c", [(0.0, leaf("x")), (1.0, leaf("y"))]))
    assert (only.name, tuple(only.domains)) == ("c=y", ("y",))


def test_many_choices_in_many_places_are_counted_in_time() -> None:
    space: Any = leaf("x")
    for level in range(60):
        space = [hp.choice(f"{side}{level}", [{"a": space}, {"b": space}, None]) for side in "lr"]
    compiled = compile_space(space)
    began = time.process_time()
    assert len(split(compiled, 64)) == 9
    assert time.process_time() - began < 1


def test_domains_and_splitting_do_without_hyperopt() -> None:
    script = "import sys, shadho_celery.space.split, shadho_celery.space.domains; sys.exit('hyperopt' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
