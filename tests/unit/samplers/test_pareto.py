"""The order of trials with several losses puts better fronts first, and spreads its beginnings over a front."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shadho_celery.samplers.pareto import contributions, crowding, order_of, spread
from shadho_celery.study.front import MOST_EXACT, first_front, hypervolume

Array = NDArray[np.float64]

#: small whole numbers: many are equal, and volumes can be counted
points_of = st.integers(2, 4).flatmap(
    lambda losses: st.lists(st.tuples(*[st.integers(0, 4)] * losses), min_size=1, max_size=9)
)
#: those whose hypervolume is exact
exact_points_of = points_of.filter(lambda found: len(found[0]) <= MOST_EXACT)


@given(exact_points_of)
def test_a_contribution_is_the_volume_that_goes_with_its_point(found: list[tuple[int, ...]]) -> None:
    points = np.array(found, dtype=float)
    points, reference = points[first_front(points)], np.full(points.shape[1], 6.0)
    without = [hypervolume(np.delete(points, place, axis=0), reference) for place in range(len(points))]
    assert contributions(points, reference) == pytest.approx(hypervolume(points, reference) - np.array(without))


def is_dominated(point: Array, points: Array) -> bool:
    return any((other <= point).all() and (other < point).any() for other in points)


@given(points_of, st.integers(0, 12))
def test_a_better_front_comes_first_and_what_breaks_a_constraint_last(found: list[tuple[int, ...]], most: int) -> None:
    points = np.array(found, dtype=float)
    violations = np.where(np.arange(len(points)) % 3 == 2, points[:, 0] + 1.0, 0.0)
    order = order_of(points, violations, most).tolist()
    assert len({*order}) == len(order) == min(most, len(points))
    for place, one in enumerate(order):
        for later in [*order[place + 1 :], *({*range(len(points))} - {*order})]:
            assert violations[one] <= violations[later]
            if violations[one] == 0 == violations[later]:
                assert not is_dominated(points[one], points[[later]])


def test_the_beginnings_of_a_spread_order_cover_most() -> None:
    first = np.linspace(0, 1, 21)
    crowded = np.array([[x, 1 - x] for x in (*first, *(0.5 + first / 1000))])
    few = crowded[spread(crowded)[:6]]
    assert np.diff(np.sort(few[:, 0])).max() < 0.35
    three = np.array([[x, y, 2 - x - y] for x in first[::4] for y in first[::4]])
    assert sorted(spread(three).tolist()) == [*range(len(three))]


def test_the_least_crowded_come_first_of_more_than_three_losses() -> None:
    points = np.array([[place, -place, place, -place] for place in (0.0, 1.0, 1.1, 1.2, 3.0)])
    assert spread(points).tolist() == [0, 4, 3, 1, 2]


def test_the_ends_of_a_front_are_the_least_crowded() -> None:
    found = crowding(np.array([[0.0, 3.0], [1.0, 1.0], [1.5, 0.5], [3.0, 0.0]]))
    assert found.tolist() == [np.inf, 4.0, 3.0, np.inf]


@pytest.mark.parametrize("losses", [2, 3, 4])
def test_the_greatest_losses_have_an_order(losses: int) -> None:
    points = np.where(np.eye(losses) == 1, -1.7e308, 0.0)
    assert sorted(spread(points).tolist()) == [*range(losses)]
