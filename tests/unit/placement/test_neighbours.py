"""Params count where they have shown that they help, and only there; what is predicted then fits what comes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shadho_celery.placement.model import MEMORY, MIN_TRIALS, Neighbours

Array = NDArray[np.float64]
Law = Callable[[Array, np.random.Generator], float]


def slope(row: Array, generator: np.random.Generator) -> float:
    return float(2 * row[0] + generator.normal(0, 0.3))


def noise(row: Array, generator: np.random.Generator) -> float:
    return float(generator.normal(0, 0.5))


def told(law: Law, trials: int, dimensions: int = 2, seed: int = 0) -> tuple[Neighbours, np.random.Generator]:
    generator = np.random.default_rng(seed)
    neighbours = Neighbours(dimensions)
    for _ in range(trials):
        row = generator.random(dimensions)
        neighbours.tell(row, law(row, generator))
    return neighbours, generator


def errors(law: Law, trials: int, dimensions: int = 2, seed: int = 0) -> tuple[float, float]:
    """Mean absolute errors on fresh trials: of the prediction, and of the median of all."""
    neighbours, generator = told(law, trials, dimensions, seed)
    rows = generator.random((500, dimensions))
    values = np.array([law(row, generator) for row in rows])
    predicted = neighbours.predict(rows)
    plain, _ = told(law, trials, dimensions, seed)
    centre = np.median([law(row, generator) for row in generator.random((2000, dimensions))])
    assert len(plain) == len(neighbours)
    return float(np.abs(predicted - values).mean()), float(np.abs(centre - values).mean())


# Whether params count


@pytest.mark.parametrize("dimensions", [1, 8])
def test_where_params_matter_they_are_used_and_beat_the_median(dimensions: int) -> None:
    neighbours, _ = told(slope, 400, dimensions)
    assert neighbours.are_useful
    predicted, plain = errors(slope, 400, dimensions)
    assert predicted < 0.85 * plain


def test_where_params_do_not_matter_they_are_seldom_used_and_cost_next_to_nothing() -> None:
    """By chance they look useful now and then."""
    seeds, dimensions = range(20), 3
    assert sum(told(noise, 400, dimensions, seed)[0].are_useful for seed in seeds) < 10
    predicted, plain = np.mean([errors(noise, 400, dimensions, seed) for seed in seeds], axis=0)
    assert predicted < 1.03 * plain


def test_with_few_trials_params_are_not_used() -> None:
    generator = np.random.default_rng(0)
    neighbours = Neighbours(1)
    for _ in range(MIN_TRIALS):
        row = generator.random(1)
        neighbours.tell(row, float(row[0]))
        assert not neighbours.are_useful
    rows = np.array([[0.0], [0.5], [1.0]])
    predicted = neighbours.predict(rows)
    assert (predicted == predicted[0]).all()


def test_params_that_begin_to_matter_are_used_and_those_that_cease_to_mislead_no_more() -> None:
    neighbours, generator = told(noise, 500)
    differences = []
    for law in (slope, noise):
        for _ in range(2 * MEMORY):
            row = generator.random(2)
            neighbours.tell(row, law(row, generator))
        low, high = neighbours.predict(np.array([[0.0, 0.5], [1.0, 0.5]]))
        differences.append(high - low)
    assert differences == [pytest.approx(2.0, abs=0.6), pytest.approx(0.0, abs=0.6)]


# What is predicted


def test_of_few_trials_the_median_is_predicted() -> None:
    neighbours = Neighbours(1)
    for value in (5.0, 1.0, 100.0):
        neighbours.tell(np.zeros(1), value)
    assert neighbours.predict(np.zeros((2, 1))).tolist() == [5.0, 5.0]


# What is remembered


@pytest.mark.parametrize("trials", [0, 17, MEMORY, MEMORY + 1, 3 * MEMORY])
def test_as_many_trials_are_remembered_as_there_were_up_to_the_limit(trials: int) -> None:
    neighbours = Neighbours(1)
    for place in range(trials):
        neighbours.tell(np.zeros(1), float(place >= trials - MEMORY))
    assert len(neighbours) == min(trials, MEMORY)
    if trials:
        assert neighbours.predict(np.zeros((1, 1)))[0] == 1.0


@settings(max_examples=50)
@given(st.integers(1, 120), st.integers(1, 5), st.integers(0, 1000))
def test_predictions_lie_within_what_was_seen(trials: int, dimensions: int, seed: int) -> None:
    neighbours, generator = told(slope, trials, dimensions, seed)
    predicted = neighbours.predict(generator.random((7, dimensions)))
    assert predicted.shape == (7,)
    assert (np.abs(predicted) < 5).all()


def test_params_that_are_all_alike_do_no_harm() -> None:
    generator = np.random.default_rng(0)
    neighbours = Neighbours(3)
    for _ in range(500):
        neighbours.tell(np.full(3, 0.5), float(generator.normal()))
    assert abs(neighbours.predict(np.full((1, 3), 0.5))[0]) < 1


def test_no_rows_ask_for_no_predictions() -> None:
    neighbours, _ = told(slope, 200)
    assert neighbours.predict(np.empty((0, 2))).shape == (0,)


# The highest value


def with_values(rows: list[list[float]], values: list[float]) -> Neighbours:
    neighbours = Neighbours(len(rows[0]))
    for row, value in zip(rows, values, strict=True):
        neighbours.tell(np.array(row), value)
    return neighbours


def test_the_highest_value_is_unknown_before_some_trials() -> None:
    assert Neighbours(1).highest(np.zeros(1)) is None
    assert with_values([[0.0]] * 2, [1.0, 2.0]).highest(np.zeros(1)) is None
    assert with_values([[0.0]] * 3, [1.0, 3.0, 2.0]).highest(np.zeros(1)) == 3.0


def test_nothing_is_known_beyond_the_trials_in_what_the_values_depend_on() -> None:
    """The first feature matters, the second does not, and the third was always the same."""
    rows = [[0.2, 0.5, 0.0], [0.4, 0.2, 0.0], [0.6, 0.2, 0.0], [0.8, 0.5, 0.0]]
    neighbours = with_values(rows, [1.0, 2.0, 3.0, 4.0])
    assert neighbours.highest(np.array([0.5, 0.3, 0.0])) == 4.0
    assert neighbours.highest(np.array([0.5, 0.9, 0.0])) == 4.0
    assert neighbours.highest(np.array([0.9, 0.3, 0.0])) is None
    assert neighbours.highest(np.array([0.5, 0.3, 1.0])) is None
    alike = with_values(rows, [1.0, 1.001, 1.0, 1.001])
    assert alike.highest(np.array([0.9, 0.3, 0.0])) == 1.001


def test_the_highest_value_is_that_of_similar_trials_once_these_predict_better() -> None:
    neighbours, _ = told(lambda row, _: float(10 * row[0]), 400)
    low, high = neighbours.highest(np.array([0.1, 0.5])), neighbours.highest(np.array([0.95, 0.5]))
    assert low is not None
    assert high is not None
    assert 1.0 <= low < 6.0
    assert high >= 9.5
