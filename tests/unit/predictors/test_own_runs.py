"""A trial's next run departs from what is expected as its earlier ones did, as far as runs repeat departures."""

from __future__ import annotations

import numpy as np
import pytest

from shadho_celery.predictors.own_runs import ENOUGH, OwnRuns


def told(own: float, new: float, trials: int = 500, runs: int = 3) -> tuple[OwnRuns, np.ndarray]:
    """Runs of many trials: standard deviations of what a trial has of its own, and of what is new in each run."""
    rng = np.random.default_rng(0)
    departures = rng.normal(0, own, (trials, 1)) + rng.normal(0, new, (trials, runs))
    learned = OwnRuns()
    for run in range(runs):
        for origin in range(trials):
            learned.tell(origin, float(departures[origin, run]))
    return learned, departures


def test_where_runs_repeat_their_departure_it_is_expected_again() -> None:
    learned, departures = told(own=0.5, new=0.0)
    for origin in range(10):
        assert learned.departure(origin) == pytest.approx(float(departures[origin, 0]), rel=1e-6)


def test_where_each_run_is_new_nearly_nothing_is_expected() -> None:
    learned, departures = told(own=0.0, new=0.5)
    expected = [learned.departure(origin) for origin in range(500)]
    assert np.std(expected) < 0.35 * np.std(departures.mean(axis=1))


def test_in_between_what_is_expected_is_nearer_than_nothing_and_than_the_mean_of_the_runs() -> None:
    learned, departures = told(own=0.4, new=0.4, runs=1)
    second = np.random.default_rng(1)
    for origin in range(500):
        # A second run of the same trials, from another stream for what is new.
        learned.tell(origin, float(departures[origin, 0] * 0.5 + second.normal(0, 0.35)))
    mine = np.array([learned.departure(origin) for origin in range(500)])
    mean = np.array([learned._runs[origin][0] / 2 for origin in range(500)])
    assert np.all(np.abs(mine) <= np.abs(mean) + 1e-12)
    assert np.corrcoef(mine, mean)[0, 1] > 0.999


def test_before_enough_pairs_and_of_a_trial_without_runs_nothing_is_expected() -> None:
    learned = OwnRuns()
    for origin in range(ENOUGH - 1):
        learned.tell(origin, 1.0 + origin)
        learned.tell(origin, 1.0 + origin)
    assert learned.departure(0) == 0.0
    learned.tell(ENOUGH, 2.0)
    learned.tell(ENOUGH, 2.0)
    assert learned.departure(ENOUGH) == pytest.approx(2.0)
    assert learned.departure(99) == 0.0


def test_what_is_forgotten_counts_no_more() -> None:
    learned, _ = told(own=0.5, new=0.0)
    learned.forget()
    assert learned.departure(3) == 0.0
