"""How fast classes are at subspaces is recovered from noisy times, also where a pair was never tried."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from shadho_celery.placement.durations import FAR_OUT, NOISE_VARIANCE, PAIR_VARIANCE, Durations

Array = NDArray[np.float64]


def durations(rows: int, columns: int) -> Durations:
    table = Durations(rows)
    for _ in range(columns):
        table.add_column()
    return table


def rank_one(rows: int, columns: int, seed: int) -> Array:
    """Log seconds a_j + b_c, spread over some orders of magnitude."""
    generator = np.random.default_rng(seed)
    table: Array = generator.normal(3, 1.5, rows)[:, None] + generator.normal(0, 1, columns)
    return table


def measure(
    table: Durations, truth: Array, times: int, *, noise: float = 0.3, seed: int = 0, tried: NDArray[Any] | None = None
) -> None:
    """Tell `times` trials of every pair that is tried, by turns."""
    generator = np.random.default_rng(seed)
    pairs = np.argwhere(np.ones(truth.shape) if tried is None else tried)
    for _ in range(times):
        for row, column in pairs:
            table.tell(row, column, float(truth[row, column] + generator.normal(0, noise)))


# What is recovered


def test_a_rank_one_table_is_recovered_from_half_of_its_pairs() -> None:
    truth = rank_one(8, 4, 0)
    tried = np.random.default_rng(0).random(truth.shape) < 0.4
    tried[0] = tried[:, 0] = True
    assert 0.3 < tried.mean() < 0.8
    table = durations(8, 4)
    measure(table, truth, 30, tried=tried)
    estimate = table.estimate()
    assert np.abs(estimate.mean - truth)[tried].max() < 0.25
    assert np.abs(estimate.mean - truth)[~tried].max() < 0.35
    assert estimate.noise == pytest.approx(0.3, rel=0.15)


def test_classes_are_told_apart_by_their_speed_whatever_they_worked_on() -> None:
    """The fast class got the long trials: its mean time says nothing, its column does."""
    truth = np.array([[0.0], [1.0], [4.0], [5.0]]) + np.array([0.0, 0.7, 1.4])
    tried = np.array([[0, 1, 1], [0, 1, 1], [1, 1, 0], [1, 0, 0]])
    table = durations(4, 3)
    measure(table, truth, 30, tried=tried)
    by_class = table.estimate().mean.mean(axis=0)
    assert np.diff(by_class) == pytest.approx([0.7, 0.7], abs=0.4)


# Shrinkage


def test_with_many_trials_the_belief_is_the_measured_mean() -> None:
    generator = np.random.default_rng(0)
    truth = generator.normal(2, 2, (3, 2))
    table = durations(3, 2)
    told = truth[..., None] + generator.normal(0, 0.5, (3, 2, 2000))
    for place in range(2000):
        for row, column in np.ndindex(3, 2):
            table.tell(row, column, float(told[row, column, place]))
    assert table.estimate().mean == pytest.approx(told.mean(axis=2), abs=0.02)
    assert table.estimate().deviation.max() < 0.03


def test_without_trials_the_belief_is_the_parts_of_row_and_column() -> None:
    table = durations(4, 3)
    tried = np.zeros((4, 3))
    tried[0], tried[:, 0] = 1, 1
    truth = rank_one(4, 3, 3)
    measure(table, truth, 30, tried=tried)
    mean = table.estimate().mean
    for row in range(1, 4):
        for column in range(1, 3):
            # Untried pairs obey a_j + b_c exactly: differences between two columns are the same in every untried row.
            assert mean[row, 1] - mean[row, 2] == pytest.approx(mean[1, 1] - mean[1, 2], abs=1e-9)
            assert mean[row, column] == pytest.approx(truth[row, column], abs=0.4)


def test_a_measured_pair_is_believed_between_its_own_mean_and_what_row_and_column_say() -> None:
    """The nearer to its own mean, the more trials it had, and the surer."""
    truth = rank_one(5, 3, 5)
    departures, deviations = [], []
    for times in (0, 1, 3, 10, 60):
        table = durations(5, 3)
        tried = np.ones(truth.shape)
        tried[4, 2] = 0
        for _ in range(times):
            table.tell(4, 2, float(truth[4, 2]) + 1.0)
        measure(table, truth, 40, noise=0.3, tried=tried)
        departures.append(float(table.estimate().mean[4, 2] - truth[4, 2]))
        deviations.append(float(table.estimate().deviation[4, 2]))
    assert departures == sorted(departures)
    assert departures[0] == pytest.approx(0.0, abs=0.2)
    assert 0.0 < departures[1] < 0.9
    assert departures[-1] == pytest.approx(1.0, abs=0.15)
    assert deviations[-1] < deviations[1]


def test_nothing_is_known_of_an_empty_table() -> None:
    estimate = durations(3, 2).estimate()
    assert estimate.mean.tolist() == [[0.0, 0.0]] * 3
    assert estimate.noise == pytest.approx(math.sqrt(NOISE_VARIANCE))
    assert estimate.deviation == pytest.approx(np.full((3, 2), math.sqrt(PAIR_VARIANCE)))


def test_a_table_without_classes_has_an_estimate_without_columns() -> None:
    assert Durations(3).estimate().mean.shape == (3, 0)


def test_one_trial_moves_the_belief_about_everything_towards_it() -> None:
    """That all pairs take one second is no belief worth keeping."""
    table = durations(3, 2)
    table.tell(0, 0, 6.0)
    assert table.estimate().mean == pytest.approx(np.full((3, 2), 6.0), abs=0.5)


def test_a_class_that_appears_late_is_believed_to_be_of_middling_speed_and_leaves_the_others_as_they_were() -> None:
    truth = rank_one(5, 2, 2)
    table = durations(5, 2)
    measure(table, truth, 40)
    before = table.estimate().mean
    table.add_column()
    after = table.estimate().mean
    assert after[:, :2] == pytest.approx(before, abs=0.05)
    assert (after[:, 2] > truth.min(axis=1) - 0.3).all()
    assert (after[:, 2] < truth.max(axis=1) + 0.3).all()
    assert (table.estimate().deviation[:, 2] > table.estimate().deviation[:, :2].max()).all()


# What must not disturb it


def test_stragglers_move_nothing_much() -> None:
    """One trial in a hundred takes a hundred times as long."""
    truth = rank_one(6, 3, 0)
    generator = np.random.default_rng(0)
    table = durations(6, 3)
    for _ in range(100):
        for row, column in np.ndindex(6, 3):
            straggles = math.log(100) if generator.random() < 0.01 else 0.0
            table.tell(row, column, float(truth[row, column] + generator.normal(0, 0.3) + straggles))
    assert np.abs(table.estimate().mean - truth).max() < 0.25
    assert table.estimate().noise < 0.6


def test_one_trial_however_far_out_moves_a_known_pair_by_little() -> None:
    truth = rank_one(4, 2, 0)
    for far in (1e3, -1e3, 700.0):
        table = durations(4, 2)
        measure(table, truth, 50)
        before = table.estimate()
        table.tell(1, 1, far)
        for _ in range(20):
            table.tell(0, 0, float(truth[0, 0]))
        moved = np.abs(table.estimate().mean - before.mean).max()
        assert moved < 2 * FAR_OUT * before.noise / 50 + 0.02


def test_the_order_in_which_trials_come_barely_matters() -> None:
    truth = rank_one(5, 3, 8)
    generator = np.random.default_rng(8)
    trials = [
        (row, column, float(truth[row, column] + generator.normal(0, 0.4)))
        for row, column in np.ndindex(5, 3)
        for _ in range(20)
    ]

    def mean_of(order: NDArray[np.int64]) -> Array:
        table = durations(5, 3)
        for place in order:
            table.tell(*trials[place])
        return table.estimate().mean

    in_order = mean_of(np.arange(len(trials)))
    for _ in range(3):
        assert mean_of(generator.permutation(len(trials))) == pytest.approx(in_order, abs=0.1)


def test_a_change_of_unit_shifts_every_belief_by_its_logarithm() -> None:
    truth = rank_one(4, 3, 6)
    in_seconds, in_hours = durations(4, 3), durations(4, 3)
    measure(in_seconds, truth, 20)
    measure(in_hours, truth - math.log(3600), 20)
    assert in_hours.estimate().mean == pytest.approx(in_seconds.estimate().mean - math.log(3600), abs=0.02)


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.lists(
        st.one_of(
            st.just(None),
            st.tuples(st.integers(0, 3), st.integers(0, 3), st.sampled_from([-7.0, 0.0, 3.0, 20.7, 700.0])),
        ),
        max_size=80,
    ),
)
def test_whatever_it_is_told_the_belief_is_finite_and_within_what_was_seen(
    rows: int, news: list[tuple[int, int, float] | None]
) -> None:
    """None is a class that appears."""
    table = durations(rows, 1)
    columns, seen = 1, [0.0]
    for item in news:
        if item is None:
            table.add_column()
            columns += 1
        else:
            row, column, value = item
            table.tell(row % rows, column % columns, value)
            seen.append(value)
    estimate = table.estimate()
    assert estimate.mean.shape == estimate.deviation.shape == (rows, columns)
    assert all(np.isfinite(part).all() for part in (*estimate[:3], [estimate.noise]))
    assert (estimate.deviation > 0).all()
    assert estimate.noise > 0


# Housekeeping


def test_trials_are_counted_by_column() -> None:
    table = durations(2, 2)
    for _ in range(3):
        table.tell(1, 0, 5.0)
    table.add_column()
    table.tell(0, 2, 5.0)
    assert table.by_column == [3, 0, 1]


def test_the_version_changes_with_the_belief_and_only_with_it() -> None:
    table = durations(2, 2)
    seen: dict[int, Array] = {}
    for place in range(500):
        table.tell(place % 2, place % 3 % 2, float(place % 7))
        mean = table.estimate().mean
        assert (seen.setdefault(table.version, mean) == mean).all()
    assert 10 < len(seen) < 400, "an estimate is made more seldom the more trials there are, but always again"
    before = table.version
    table.estimate()
    assert table.version == before
    table.add_column()
    table.estimate()
    assert table.version > before


# Trials that still run


def test_a_pair_that_is_far_slower_than_expected_is_noticed_before_its_first_trial_ends() -> None:
    table = Durations(2)
    for _ in range(2):
        table.add_column()
    for _ in range(20):
        for row, column in ((0, 0), (0, 1), (1, 0)):
            table.tell(row, column, 0.0)
    before = float(table.estimate().mean[1, 1])
    table.suppose([(1, 1, 5.0, 1.0, False), (1, 1, 5.0, 1.0, False)])
    assert float(table.estimate().mean[1, 1]) > before + 1.0
    table.suppose([])
    assert float(table.estimate().mean[1, 1]) == pytest.approx(before, abs=0.05)


def test_trials_that_run_as_long_as_expected_tell_nothing() -> None:
    table = Durations(1)
    table.add_column()
    for _ in range(20):
        table.tell(0, 0, 1.0)
    before = table.estimate()
    table.suppose([(0, 0, 1.0, 1.0, False), (0, 0, -3.0, 1.0, False)])
    assert table.estimate() is before


def test_a_trial_whose_seconds_are_extrapolated_counts_like_an_ended_one_as_long_as_it_runs() -> None:
    table, other = Durations(2), Durations(2)
    for each in (table, other):
        each.add_column()
        each.tell(0, 0, 3.0)
        each.tell(1, 0, 3.0)
    other.tell(1, 0, -2.0)
    table.suppose([(1, 0, -2.0, 1.0, True)])
    assert table.estimate().mean == pytest.approx(other.estimate().mean, abs=0.1)
    assert table.measured.tolist() == [[1.0], [2.0]]
    table.suppose([(1, 0, -2.0, 1.0, False)])
    assert table.measured.tolist() == [[1.0], [1.0]]
    table.suppose([(1, 0, -2.0, 1.0, True)])
    table.forget()
    assert table.measured.tolist() == [[0.0], [0.0]]


def test_a_column_of_a_group_is_believed_to_be_like_the_others_before_it_is_tried() -> None:
    """It is as slow as they are beside the other classes, up to its usual difference."""
    table = Durations(2)
    for group, usual in ((0, 0.0), (0, -1.0), (1, 0.0), (1, -1.0)):
        table.add_column(group, usual)
    for row in range(2):
        for _ in range(20):
            table.tell(row, 0, 5.0 + row)
            table.tell(row, 2, 1.0 + row)
    mean = table.estimate().mean
    assert mean[:, 1] == pytest.approx([4.0, 5.0], abs=0.3)
    assert mean[:, 3] == pytest.approx([0.0, 1.0], abs=0.3)
