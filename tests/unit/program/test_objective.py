"""Objectives that cannot be called with the values of a trial are refused before the first trial."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery import Study, minimize
from shadho_celery.errors import UsageError

SPACE = {"x": hp.uniform("x", 0, 1)}


class Callable:
    def __call__(self, values: Any) -> float:
        return float(values["x"])

    def method(self, values: Any, context: Any) -> float:
        return float(values["x"])

    def lacking(self) -> float:
        return 0.0


def keyword_only(values: Any, *, data: Any) -> float:
    return float(values["x"])


REFUSED = [
    lambda **params: 0.0,
    lambda: 0.0,
    lambda a, b, c: 0.0,
    lambda *, x: 0.0,
    keyword_only,
    partial(keyword_only, {}, data=1),
    Callable().lacking,
]
TAKEN = [
    lambda values: values["x"],
    lambda *values: values[0]["x"],
    lambda values, context: values["x"],
    lambda values, scale=2, *rest: values["x"] * scale,
    partial(keyword_only, data=1),
    Callable(),
    Callable().method,
]


@pytest.mark.parametrize("objective", REFUSED)
def test_an_objective_of_other_arguments_is_refused_before_the_first_trial(objective: Any) -> None:
    with pytest.raises(UsageError, match="the objective takes "):
        minimize(objective, SPACE, trials=2, seed=0)
    study = Study(SPACE, seed=0)
    with pytest.raises(UsageError, match="the objective takes "):
        study.run(objective, trials=2)
    assert not len(study.trials)
    study.close()


@pytest.mark.parametrize("objective", TAKEN)
def test_an_objective_of_one_argument_and_perhaps_a_context_is_called(objective: Any) -> None:
    assert minimize(objective, SPACE, trials=2, seed=0).counts == {"COMPLETE": 2}
