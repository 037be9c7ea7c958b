"""The schema of labels that objectives ask for: laws and their unions, what explains a label, and the space."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from shadho_celery.core.trial import POINT
from shadho_celery.errors import SpaceError
from shadho_celery.space.schema import Law, Schema, Suggested, choice, number, read_point
from shadho_celery.space.split import split

#: values that a test gives to labels; an objective asks for them with one of the functions below
Values = Mapping[str, Any]
MODELS = ["svm", "rf", "dummy"]


def asked(**laws: tuple[Law, Any]) -> dict[str, Suggested]:
    """Return what a trial has asked for: by label its law, and the value that it got."""
    found = {label: (law, law.place(value)) for label, (law, value) in laws.items()}
    return {label: Suggested(law=law, drawn=place) for label, (law, place) in found.items() if place is not None}


def trial_of_models(draw: random.Random) -> dict[str, Suggested]:
    """Return a trial with a choice between models, a choice below it, a loop, and a label behind a condition."""
    labels = asked(rate=(number("rate", 0, 1, is_int=False), rate := draw.random()))
    model = draw.choice(MODELS)
    labels |= asked(model=(choice("model", MODELS), model))
    if model == "svm":
        kernel = draw.choice(["rbf", "poly"])
        labels |= asked(kernel=(choice("kernel", ["rbf", "poly"]), kernel))
        labels |= asked(cost=(number("cost", 1e-3, 1e3, is_int=False, log=True), 1.0))
        if kernel == "poly":
            labels |= asked(degree=(number("degree", 2, 5, is_int=True), draw.randint(2, 5)))
    if model == "rf":
        layers = draw.randint(1, 3)
        labels |= asked(layers=(number("layers", 1, 3, is_int=True), layers))
        for place in range(layers):
            labels |= asked(**{f"units{place}": (number(f"units{place}", 4, 512, is_int=True, log=True), 8)})
    if rate > 0.5:
        labels |= asked(late=(number("late", 0, 1, is_int=False), 0.5))
    return labels


def seen(make: Callable[[random.Random], dict[str, Suggested]], trials: int = 40) -> Schema:
    schema, draw = Schema(), random.Random(0)
    for _ in range(trials):
        schema = schema.seen(make(draw), is_complete=True)
    return schema


def test_a_choice_explains_its_labels_a_count_those_of_a_loop_and_others_are_always_proposed() -> None:
    schema = seen(trial_of_models)
    assert {label: schema.parent(label) for label in schema.laws} == {
        "rate": None,
        "model": None,
        "kernel": ("model", [0]),
        "cost": ("model", [0]),
        "degree": ("kernel", [1]),
        "layers": ("model", [1]),
        "units0": ("model", [1]),
        "units1": ("layers", [2, 3]),
        "units2": ("layers", [3]),
        "late": None,
    }


def test_choices_make_subspaces_and_counts_do_not() -> None:
    space = seen(trial_of_models).space()
    names = ["model=svm,kernel=rbf", "model=svm,kernel=poly", "model=rf", "model=dummy"]
    assert [subspace.name for subspace in split(space)] == names
    for params in space.sample(np.random.default_rng(0), 100):
        expected = {"rate", "model", "late"}
        if params["model"] == 0:
            expected |= {"kernel", "cost"} | ({"degree"} if params["kernel"] == 1 else set())
        if params["model"] == 1:
            expected |= {"layers"} | {f"units{place}" for place in range(params["layers"])}
        assert params.keys() == expected
    assert (named := seen(trial_of_models).read_values({"model": 1, "layers": 2, "other": 3})) == {
        "model": "rf",
        "layers": 2,
    }, named


def test_a_schema_survives_json() -> None:
    schema = seen(trial_of_models)
    assert msgspec.convert(msgspec.json.decode(msgspec.json.encode(schema)), Schema) == schema


def test_a_trial_that_has_not_ended_well_does_not_show_that_a_label_is_absent() -> None:
    law, model = number("x", 0, 1, is_int=False), choice("model", MODELS)
    schema = Schema().seen(asked(model=(model, "svm"), x=(law, 0.5)), is_complete=True)
    assert schema.seen(asked(model=(model, "rf")), is_complete=False).parent("x") is None
    assert schema.seen(asked(model=(model, "rf")), is_complete=True).parent("x") == ("model", [0])


def test_a_label_that_two_choices_decide_together_is_always_proposed() -> None:
    def trial(draw: random.Random) -> dict[str, Suggested]:
        one, two = draw.choice([True, False]), draw.choice([1, 2])
        labels = asked(one=(choice("one", [True, False]), one), two=(choice("two", [1, 2]), two))
        return labels | (asked(both=(number("both", 0, 1, is_int=False), 0.5)) if one and two == 2 else {})

    assert seen(trial).parent("both") is None


def test_bounds_of_several_trials_are_joined() -> None:
    found = number("x", 0, 10, is_int=True).joined("x", number("x", -5, 3, is_int=True))
    assert (found.low, found.high, found.step) == (-5, 10, 1)
    assert number("x", 0, 10, is_int=True, step=5).joined("x", number("x", 2, 4, is_int=True, step=2)).step == 1
    assert number("x", 0, 1, is_int=False, step=0.5).joined("x", number("x", 0, 1, is_int=False)).step is None
    same = number("x", 0, 1, is_int=False)
    assert same.joined("x", number("x", 0.25, 0.5, is_int=False)) is same


def test_a_space_has_the_widest_laws_of_several_trials() -> None:
    far = 2**62 - 1
    schema = Schema()
    for sign, step in ((1, 1e307 / 3), (-1, None)):
        whole = {"n": number("n", -far, far, is_int=True, step=3 if step else 5)}
        laws = {"x": number("x", sign * 9.9e306, sign * 9.9e306, is_int=False, step=step)} | whole
        schema = schema.seen({label: Suggested(law=law, drawn=0) for label, law in laws.items()}, is_complete=True)
    assert {*schema.space().domains} == {"x", "n"}


@pytest.mark.parametrize(
    ("law", "other", "said"),
    [
        (number("x", 0, 1, is_int=False), number("x", 0, 1, is_int=True), "suggested as int, and was float"),
        (number("x", 1, 2, is_int=False), choice("x", [1, 2]), r"suggested as categorical of \[1, 2\], and was float"),
        (
            number("x", 1, 2, is_int=False),
            number("x", 1, 2, is_int=False, log=True),
            "suggested as float with log, and was float;",
        ),
        (choice("x", [1, 2]), choice("x", [1, 3]), r"of \[1, 3\], and was categorical of \[1, 2\]"),
        (choice("x", [1]), choice("x", [True]), r"of \[True\], and was categorical of \[1\]"),
    ],
)
def test_another_kind_log_or_other_options_are_refused_by_the_label(law: Law, other: Law, said: str) -> None:
    schema = Schema().seen({"x": Suggested(law=law, drawn=1)}, is_complete=True)
    with pytest.raises(SpaceError, match=f"^'x' .*{said}"):
        schema.seen({"x": Suggested(law=other, drawn=1)}, is_complete=True)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: number("x", 1, 0, is_int=False), "the lower one first"),
        (lambda: number("x", 0, math.nan, is_int=False), "no range"),
        (lambda: number("x", 0, math.inf, is_int=True), "is no range"),
        (lambda: number("x", "a", 1, is_int=False), "is no range"),
        (lambda: number("x", -(2**63), 2**63, is_int=True), "is no range"),
        (lambda: number("x", 2**63, 2**63 + 8, is_int=True), r"Whole numbers, .*, are below 2\*\*62"),
        (lambda: number("x", 0, 1e307, is_int=False), r"others below 1e\+307"),
        (lambda: number("x", 0, 1, is_int=False, step=1e307), r"others below 1e\+307"),
        (lambda: number("x", 1e300, 1e300, is_int=False, step=1e-300), r"divided by the step, are below 2\*\*62"),
        (lambda: number("x", 0, 1, is_int=False, log=True), "a lower bound above 0"),
        (lambda: number("x", 0, 9, is_int=True, log=True), "of 1 or more"),
        (lambda: number("x", 1, 9, is_int=True, log=True, step=2), "and no step"),
        (lambda: number("x", 1e-9, 9, is_int=False, log=True, step=1), "and no step"),
        (lambda: number("x", 1, 9, is_int=True, step=0), "a step above 0"),
        (lambda: choice("x", []), "has no options"),
        (lambda: choice("x", [object()]), "use them as names of other objects"),
        (lambda: choice("x", [math.inf]), "use them as names of other objects"),
    ],
)
def test_a_law_without_values_is_refused_by_the_label(make: Callable[[], Law], said: str) -> None:
    with pytest.raises(SpaceError, match=f"^'x'.*{said}"):
        make()


LAWS = [
    number("x", 0.5, 2, is_int=False),
    number("x", 3, 3, is_int=False),
    number("x", 1e-5, 1e3, is_int=False, log=True),
    number("x", 1, 1, is_int=False, log=True),
    number("x", 1e-3, 1e-3, is_int=False, log=True),
    number("x", 1e18, 1e18, is_int=False, step=1),
    number("x", 2**60 + 2, 2**60 + 2, is_int=True, step=2),
    number("x", 2**60, 2**60, is_int=True, log=True),
    number("x", 0.1, 1.05, is_int=False, step=0.2),
    number("x", -1, 1, is_int=False, step=0.25),
    number("x", -3, 7, is_int=True),
    number("x", 5, 5, is_int=True),
    number("x", 1, 1000, is_int=True, log=True),
    number("x", 10, 99, is_int=True, step=10),
    number("x", 1, 20, is_int=True, step=3),
    choice("x", ["a", None, 3, True]),
    choice("x", [0.5]),
]


@pytest.mark.parametrize("law", LAWS, ids=str)
def test_a_law_draws_what_its_space_contains_and_takes_what_its_space_draws(law: Law) -> None:
    space = Schema().seen({"x": Suggested(law=law, drawn=law.low)}, is_complete=True).space()
    generator = np.random.default_rng(0)
    for _ in range(200):
        drawn = law.draw(generator)
        assert space.domains["x"].contains(drawn)
        assert law.fitted(drawn) == pytest.approx(drawn)
        assert law.place(law.value(drawn)) == pytest.approx(drawn)
    found = {law.fitted(params["x"]) for params in space.sample(generator, 200)}
    assert law.low == law.high or None not in found
    assert all(value is None or space.domains["x"].contains(value) for value in found)
    if law.kind == "int":
        assert {type(value) for value in found} == {int}


def test_a_value_outside_of_the_law_is_none_of_its_values() -> None:
    law = number("x", 0, 10, is_int=True, step=5)
    assert [law.fitted(value) for value in (-3, 0.0, 6, 11, 13, "a", None, math.nan)] == [
        None, 0, 5, 10, None, None, None, None,
    ]  # fmt: skip
    assert choice("x", ["a", "b"]).fitted(2) is None
    assert choice("x", [1, True]).place(True) == 1


@pytest.mark.parametrize("text", ["{", "[" * 100_000, "3", 3, [1]])
def test_a_point_that_cannot_be_read_has_no_values(text: object) -> None:
    assert read_point({POINT: text}) == {}
