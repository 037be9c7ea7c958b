"""What runs in a worker, apart from Redis."""

from __future__ import annotations

from unittest.mock import MagicMock

from shadho_celery.node.leases import Running, Underway


def test_a_trial_that_has_ended_is_not_stopped_any_more_for_its_slot_may_run_another() -> None:
    """Its lease ends with it, so a renewal that was under way is told that the lease is gone."""
    underway = Underway(MagicMock(), MagicMock())
    running = Running("study", 1, 1, "delivery", MagicMock())
    underway.stop(running, "gone")
    running.runner.stop_trial.assert_not_called()
    assert not running.stopped
    with underway.holding(running):
        underway.stop(running, "cancel")
    running.runner.stop_trial.assert_called_once()
    assert running.stopped == "cancel"
