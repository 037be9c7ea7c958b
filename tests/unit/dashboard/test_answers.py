"""Figures that the pages show beside the charts."""

from __future__ import annotations

import numpy as np
import pytest

from shadho_celery.dashboard.answers import rate_a_minute


def test_the_rate_is_that_of_the_latest_trials_and_not_of_a_pause_before_them() -> None:
    before, after = np.arange(40) * 2.0, 10_000 + np.arange(12) * 2.0
    assert rate_a_minute(np.concatenate([before, after])) == pytest.approx(30.0)
    assert rate_a_minute(np.arange(10) * 600.0) == pytest.approx(0.1), "slow trials have no pause"


@pytest.mark.parametrize("ends", [[], [5.0], [5.0, 5.0]])
def test_there_is_no_rate_before_two_trials_have_ended_at_different_times(ends: list[float]) -> None:
    assert rate_a_minute(np.array(ends)) is None
