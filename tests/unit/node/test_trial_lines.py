"""A worker's log has one line a trial, which names what a person looks for."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.node.logs import MOST_LINES, TrialLines, line


def payload(**facts: Any) -> Payload:
    return Payload(**{"study": "k1", "name": "svm-1", "module": "m", "attempts": [], **facts})


def attempt(number: int = 3, which: int = 1) -> Attempt:
    return Attempt(number=number, attempt=which, subspace="kernel=rbf", params={})


def complete(**facts: Any) -> Outcome:
    return Outcome(state=TrialState.COMPLETE, loss=0.012345678, seconds=2.3456, **facts)


def test_a_line_names_study_trial_subspace_state_loss_and_seconds() -> None:
    assert line(payload(), attempt(), complete()) == (
        "study svm-1, trial 3 (kernel=rbf): COMPLETE, loss 0.0123457, 2.35 s"
    )
    assert line(payload(name=""), attempt(which=2), complete(warning="a metric was dropped")) == (
        "study k1, trial 3, attempt 2 (kernel=rbf): COMPLETE, loss 0.0123457, 2.35 s; a metric was dropped"
    )


def test_the_line_of_a_failure_is_about_the_attempt_as_another_worker_may_try_the_trial_and_has_no_traceback() -> None:
    error = 'Traceback (most recent call last):\n  File "m.py", line 3, in objective\nValueError: no such kernel'
    failed = Outcome(state=TrialState.FAILED, error=error, seconds=0.5)
    assert line(payload(), attempt(), failed) == (
        "study svm-1, trial 3, attempt 1 (kernel=rbf): failed, 0.5 s: ValueError: no such kernel"
    )


def test_of_very_many_trials_only_the_number_is_told(caplog: pytest.LogCaptureFixture) -> None:
    lines = TrialLines()
    with caplog.at_level(logging.INFO):
        for number in range(MOST_LINES + 50):
            lines.tell(payload(), attempt(number), complete())
        lines.beat()
        lines.tell(payload(), attempt(999), complete())
        lines.beat()
    said = [record.message for record in caplog.records]
    assert len(said) == MOST_LINES + 2
    assert said[-2:] == ["50 more trials have ended within a second", line(payload(), attempt(999), complete())]
