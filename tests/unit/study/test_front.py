"""Front, hypervolume and order of several losses: those of the definitions by brute force; beginnings are spread."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shadho_celery.study.front import (
    MOST_EXACT,
    Front,
    contributions,
    crowding,
    first_front,
    hypervolume,
    hypervolumes,
    order_of,
    reference_point,
    spread,
)

Array = NDArray[np.float64]

#: small whole numbers: many are equal, and volumes can be counted
points_of = st.integers(2, 4).flatmap(
    lambda losses: st.lists(st.tuples(*[st.integers(0, 4)] * losses), min_size=1, max_size=9)
)
#: those whose hypervolume is exact
exact_points_of = points_of.filter(lambda found: len(found[0]) <= MOST_EXACT)


def counted(points: Array, reference: Array) -> float:
    """Return the hypervolume as the number of unit cells that a point is below of."""
    cells = itertools.product(*(range(int(end)) for end in reference))
    return float(sum(any((point <= cell).all() for point in points) for cell in np.array([*cells])))


@given(exact_points_of)
def test_the_hypervolume_is_the_volume_of_what_is_dominated(found: list[tuple[int, ...]]) -> None:
    points = np.array(found, dtype=float)
    for end in (3.0, 5.0):
        reference = np.full(points.shape[1], end)
        assert hypervolume(points, reference) == counted(points, reference)


@pytest.mark.parametrize("losses", [4, 8])
def test_the_hypervolume_of_many_losses_is_estimated_and_repeatable(losses: int) -> None:
    points = np.vstack([np.eye(losses), np.full(losses, 0.25)])
    reference = np.full(losses, 2.0)
    # The first point covers half of the cube up to the reference, the unit points all of it but one unit.
    found = hypervolumes(points, reference, [1, losses, losses + 1])
    assert found[0] == pytest.approx(2 ** (losses - 1))
    assert found[1] == pytest.approx(2**losses - 1, rel=0.02)
    assert found == sorted(found)
    assert hypervolume(points, reference) == found[-1]


def is_dominated(point: Array, points: Array) -> bool:
    return any((other <= point).all() and (other < point).any() for other in points)


@given(points_of)
def test_the_first_front_is_what_nothing_dominates_and_of_equal_points_the_first(found: list[tuple[int, ...]]) -> None:
    points = np.array(found, dtype=float)
    firsts = {place for place, point in enumerate(found) if found.index(point) == place}
    expected = [place in firsts and not is_dominated(point, points) for place, point in enumerate(points)]
    assert first_front(points).tolist() == expected


@given(points_of)
def test_a_front_that_grows_point_by_point_is_the_front_of_all(found: list[tuple[int, ...]]) -> None:
    front = Front()
    changed = [front.add(number, losses) for number, losses in enumerate(found)]
    expected = np.flatnonzero(first_front(np.array(found, dtype=float))).tolist()
    assert sorted(front.numbers) == expected
    assert all(changed[number] for number in expected)
    assert [*map(tuple, front.points)] == sorted(found[number] for number in expected)


def test_the_reference_point_lies_beyond_the_worst_by_a_tenth_of_the_range() -> None:
    assert reference_point(np.array([[0.0, -5.0], [10.0, -5.0]])).tolist() == [11.0, -5.0]


def test_nothing_is_covered_by_points_at_the_reference_or_beyond() -> None:
    assert hypervolume(np.array([[1.0, 0.0], [2.0, -1.0]]), np.array([1.0, 1.0])) == 0.0
    assert hypervolume(np.empty((0, 2)), np.array([1.0, 1.0])) == 0.0


@pytest.mark.parametrize("losses", [2, 3, 4])
def test_the_greatest_losses_have_a_finite_hypervolume(losses: int) -> None:
    points = np.where(np.eye(losses) == 1, -1.7e308, 0.0)
    assert 0 < hypervolume(points, reference_point(points)) < np.inf
    assert np.isfinite(reference_point(-points)).all()


@given(exact_points_of)
def test_a_contribution_is_the_volume_that_goes_with_its_point(found: list[tuple[int, ...]]) -> None:
    points = np.array(found, dtype=float)
    points, reference = points[first_front(points)], np.full(points.shape[1], 6.0)
    without = [hypervolume(np.delete(points, place, axis=0), reference) for place in range(len(points))]
    assert contributions(points, reference) == pytest.approx(hypervolume(points, reference) - np.array(without))


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
