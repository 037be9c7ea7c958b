"""What a study file says of its trials' cost is taken as it is meant, or refused in one line."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.settings import Cost
from shadho_celery.errors import UsageError
from shadho_celery.placement.model import declared_cost
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SPACE = compile_space(
    hp.choice(
        "model",
        [
            {"name": "net", "layers": hp.randint("layers", 1, 9), "rate": 10 ** hp.uniform("rate", -5, 0)},
            {"name": "forest", "trees": hp.quniform("trees", 10, 500, 10)},
            {"name": "svm", "C": hp.lognormal("C", 0, 2)},
        ],
    )
)
SUBSPACES = split(SPACE)
NAMES = [subspace.name for subspace in SUBSPACES]
NET, FOREST, SVM = NAMES
DRAWS = {s.name: s.sample(np.random.default_rng(1), 20) for s in SUBSPACES}


def declared_by(cost: Cost) -> Callable[[str, Any], float]:
    return declared_cost(cost, SPACE, SUBSPACES)


def refusal(cost: Any) -> str:
    with pytest.raises(UsageError) as caught:
        declared_by(cost)
    message = str(caught.value)
    assert "\n" not in message
    assert "STUDY['cost']" in message
    return message


def test_costs_by_name_are_taken_as_they_are_and_a_name_left_out_counts_as_the_middle() -> None:
    declared = declared_by({NET: 100.0, SVM: 1})
    for params in DRAWS[NET]:
        assert declared(NET, params) == 100.0
    assert declared(SVM, DRAWS[SVM][0]) == 1.0
    assert declared(FOREST, DRAWS[FOREST][0]) == pytest.approx(10.0), "the geometric mean of the others"


def test_without_any_name_all_cost_the_same() -> None:
    declared = declared_by({})
    assert {declared(name, DRAWS[name][0]) for name in NAMES} == {1.0}


def test_a_function_gets_what_the_objective_gets() -> None:
    seen: list[Any] = []

    def cost(params: Any) -> float:
        seen.append(params)
        return float(params["layers"]) if params["name"] == "net" else 0.5

    declared = declared_by(cost)
    for params in DRAWS[NET]:
        assert declared(NET, params) == params["layers"]
        assert seen[-1] == SPACE.evaluate(params)
        assert seen[-1]["rate"] == 10 ** params["rate"]
    assert declared(SVM, DRAWS[SVM][0]) == 0.5


@pytest.mark.parametrize("value", [2, np.float32(2.0), np.int64(2), np.array(2.0), "2"])
def test_whatever_can_be_read_as_a_number_above_0_is_a_cost(value: Any) -> None:
    assert declared_by({NET: value})(NET, DRAWS[NET][0]) == 2.0
    assert declared_by({NET: value})(SVM, DRAWS[SVM][0]) == pytest.approx(2.0)
    assert declared_by(lambda params: value)(SVM, DRAWS[SVM][0]) == 2.0


def test_a_name_that_is_no_subspace_is_refused_with_those_there_are() -> None:
    message = refusal({"net": 3.0})
    assert "'net'" in message
    assert all(name in message for name in NAMES)


BAD: list[Any] = [0, -1, 0.0, math.nan, math.inf, -math.inf, None, "much", [1, 2], {}, 10**400]


@pytest.mark.parametrize("value", BAD, ids=[str(value)[:9] for value in BAD])
def test_a_cost_that_is_no_number_above_0_is_refused_naming_the_subspace(value: Any) -> None:
    assert SVM in refusal({NET: 1.0, SVM: value})
    assert SVM in refusal(lambda params: value if params["name"] == "svm" else 1.0)


def test_a_function_that_fails_is_refused_in_one_line_with_its_error_and_what_is_wanted() -> None:
    def cost(params: Any) -> float:
        raise LookupError("no such\nthing")

    message = refusal(cost)
    assert "LookupError: no such (test_declared_cost.py:" in message
    assert NET in message
    assert "above 0" in message
    assert "SystemExit: 3" in refusal(lambda params: sys.exit(3))


def test_a_function_that_fails_later_on_counts_as_the_typical_cost_and_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = False

    def cost(params: Any) -> float:
        if broken and params["name"] == "net":
            raise ArithmeticError("too deep")
        return 3.0 if params["name"] == "net" else math.nan if broken else 0.5

    declared = declared_by(cost)
    broken = True
    with caplog.at_level(logging.WARNING):
        for params in DRAWS[NET]:
            assert declared(NET, params) == 3.0
        assert declared(SVM, DRAWS[SVM][0]) == 0.5
    assert len(caplog.records) == 1
    assert "too deep" in caplog.text
    broken = False
    assert declared(SVM, DRAWS[SVM][0]) == 0.5
