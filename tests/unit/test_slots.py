"""What a worker does with its slots, apart from Redis."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import MagicMock

from shadho_celery.hardware import Machine
from shadho_celery.slots import Slots, _Running


def test_a_trial_that_has_ended_is_not_stopped_any_more_for_its_slot_may_run_another() -> None:
    """Its lease ends with it, so a renewal that was under way is told that the lease is gone."""
    machine = Machine(host="here", cores=1, memory=2**30)
    slots = Slots(MagicMock(), machine=machine, compute_class="cpu", count=1, imports=["m"], checkpoints=Path())
    running = _Running("study", 1, 1, "delivery", MagicMock())
    slots._stop(running, "gone")
    running.runner.stop_trial.assert_not_called()
    assert not running.stopped
    slots._running[running.key] = running
    slots._stop(running, "cancel")
    running.runner.stop_trial.assert_called_once()
    assert running.stopped == "cancel"
