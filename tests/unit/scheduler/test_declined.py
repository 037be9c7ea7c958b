"""A class gets a trial that it has declined again after a pause, which doubles, and other classes get it at once."""

from __future__ import annotations

import math

from shadho_celery.placement.copies import FIRST_PAUSE, LONGEST_PAUSE, Declined


def test_a_declined_trial_returns_to_its_class_after_a_pause_that_doubles() -> None:
    declined = Declined()
    assert not declined
    assert declined.due(0.0) == math.inf
    now, pause = 10.0, FIRST_PAUSE
    for _ in range(20):
        declined.add(7, "gpu", now)
        assert declined.due(now) == now + pause
        assert declined.is_paused(7, "gpu", now + pause - 0.1)
        assert not declined.is_paused(7, "gpu", now + pause)
        assert not declined.is_paused(7, "cpu", now)
        assert not declined.is_paused(8, "gpu", now)
        now, pause = now + pause, min(2 * pause, LONGEST_PAUSE)
    assert pause == LONGEST_PAUSE


def test_a_trial_that_was_taken_is_forgotten() -> None:
    declined = Declined()
    declined.add(7, "gpu", 0.0)
    declined.end(8)
    assert declined
    declined.end(7)
    assert not declined
    assert not declined.is_paused(7, "gpu", 0.0)
