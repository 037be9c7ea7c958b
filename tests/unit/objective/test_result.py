"""Named losses and constraints that an objective returns, and those that are refused in one line."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from services.cases import cases

from shadho_celery.objective.result import Unreadable, read

TWO = {"error": "minimize", "accuracy": "maximize"}
ONE = {"accuracy": "maximize"}
BOTH = {"error": 1, "accuracy": 0.5}


def test_several_losses_are_minimised_in_the_order_of_the_study_and_the_first_is_the_loss() -> None:
    found = read({"losses": {"accuracy": np.float32(0.5), "error": 1}, "epochs": 3}, TWO)
    assert [*found.losses.items()] == [("error", 1.0), ("accuracy", -0.5)]
    assert (found.loss, found.metrics, found.constraints) == (1.0, {"epochs": 3}, {})


@pytest.mark.parametrize("returned", [0.5, {"losses": {"accuracy": 0.5}}])
def test_a_single_objective_needs_no_name(returned: Any) -> None:
    found = read(returned, ONE)
    assert (found.loss, found.losses) == (-0.5, {"accuracy": -0.5})


def test_constraints_stand_beside_any_loss() -> None:
    found = read({"loss": 2.0, "constraints": {"memory_gb": -1, "ms": 2.5}})
    assert (found.loss, found.constraints, found.violation) == (2.0, {"memory_gb": -1.0, "ms": 2.5}, 2.5)
    assert read({"losses": BOTH, "constraints": {"ms": -0.5}}, TWO).violation == 0.0
    assert read({"loss": 0.0, "constraints": {"a": 1.7e308, "b": 1.7e308}}).violation < math.inf


@cases(
    "returned, objectives, words",
    [
        ({"losses": BOTH}, None, "the study has no objectives; name them, such as STUDY"),
        ({"loss": 1.0}, TWO, "a dict with 'loss'; return {'losses': {'error': ..., 'accuracy': ...}}"),
        ({"loss": 1.0, "losses": BOTH}, TWO, "a dict with 'loss'"),
        ({"error": 1.0}, TWO, "a dict without 'losses'"),
        (0.5, TWO, "returned one number; return {'losses'"),
        (None, TWO, "is None; return {'losses'"),
        ({"losses": {"error": 1}}, TWO, "have no accuracy; the study's objectives are error, accuracy"),
        ({"losses": BOTH | {"ms": 1}}, TWO, "have 'ms'; the study's objectives are error, accuracy"),
        ({"losses": {"error": 1, "accuracy": math.nan}}, TWO, "'accuracy' of 'losses' is nan"),
        ({"losses": {"error": math.inf, "accuracy": 0}}, TWO, "'error' of 'losses' is inf"),
        ({"losses": [1, 2]}, TWO, "'losses' is not a dict but list"),
        ({"loss": 1, "constraints": 3}, None, "'constraints' is not a dict but int: 3; give numbers by name"),
        ({"loss": 1, "constraints": {"ms": math.nan}}, None, "'ms' of 'constraints' is nan"),
        ({"loss": 1, "constraints": {"ms": "2"}}, None, "'ms' of 'constraints' is not a number but str"),
        ({"loss": 1, "constraints": {3: 2}}, None, "has the name 3; a name is a text"),
        ({"loss": 1, "constraints": {f"c{place}": 0 for place in range(101)}}, None, "more than 100 numbers"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(returned: Any, objectives: Any, words: str) -> None:
    with pytest.raises(Unreadable) as caught:
        read(returned, objectives)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
