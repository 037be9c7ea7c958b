"""A trial's next run departs from what is expected as its earlier ones did, as far as runs repeat departures."""

from __future__ import annotations

import numpy as np
import pytest

from shadho_celery.placement.budgets import ENOUGH_DEPARTURES, OwnRuns

#: what is expected without regard to earlier runs, on two classes
EXPECTED = np.array([1.0, 3.0])


def told(own: float, new: float, runs: int = 2, trials: int = 500) -> tuple[OwnRuns, np.ndarray]:
    """Runs of many trials on either class: standard deviations of what is a trial's own, and of what is new in each."""
    rng = np.random.default_rng(0)
    departures = rng.normal(0, own, (trials, 1)) + rng.normal(0, new, (trials, runs + 1))
    learned = OwnRuns()
    for run in range(runs):
        for origin in range(trials):
            column = (origin + run) % 2
            learned.tell(origin, column, float(EXPECTED[column] + departures[origin, run]), EXPECTED)
    return learned, departures


def test_where_runs_repeat_their_departure_it_is_expected_again_on_any_class() -> None:
    learned, departures = told(own=0.5, new=0.0)
    for origin in range(10):
        assert learned.departure(origin, EXPECTED) == pytest.approx(float(departures[origin, 0]), rel=1e-6)


@pytest.mark.parametrize(("own", "new"), [(0.4, 0.4), (0.5, 0.1), (0.0, 0.5)])
def test_the_next_run_is_foretold_better_than_by_nothing_or_by_the_mean_of_the_runs(own: float, new: float) -> None:
    learned, departures = told(own, new)
    foretold = np.array([learned.departure(origin, EXPECTED) for origin in range(len(departures))])
    truth, mean = departures[:, 2], departures[:, :2].mean(axis=1)
    error = float(np.mean((truth - foretold) ** 2))
    assert error < 1.02 * float(np.mean((truth - mean) ** 2))
    assert error < float(np.mean(truth**2)) * (0.9 if own else 1.02)


def test_before_enough_pairs_and_of_a_trial_without_runs_nothing_is_expected() -> None:
    learned = OwnRuns()
    for origin in range(ENOUGH_DEPARTURES - 1):
        for _ in range(2):
            learned.tell(origin, 0, 2.0 + origin, EXPECTED)
    assert learned.departure(0, EXPECTED) == 0.0
    for _ in range(2):
        learned.tell(ENOUGH_DEPARTURES, 0, 3.0, EXPECTED)
    assert learned.departure(ENOUGH_DEPARTURES, EXPECTED) == pytest.approx(2.0)
    assert learned.departure(99, EXPECTED) == 0.0


def test_a_departure_is_from_what_is_believed_now() -> None:
    """The first runs are told when nothing is known yet."""
    learned, _ = told(own=0.5, new=0.0)
    learned.tell(1000, 0, 9.0)
    assert learned.departure(1000, EXPECTED) == pytest.approx(8.0)
    assert learned.departure(1000, EXPECTED + 8.0) == pytest.approx(0.0)
