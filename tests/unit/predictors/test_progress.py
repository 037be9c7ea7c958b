"""Seconds of a running trial are extrapolated from its reports, if other trials show how many steps there are."""

from __future__ import annotations

from typing import Any

import pytest
from services.cases import cases

from shadho_celery.core.trial import Report, Trial, TrialState
from shadho_celery.predictors.progress import Elapsed, Progress


def trial(number: int, **facts: Any) -> Trial:
    return Trial(**{"number": number, "subspace": "s", "params": {}, "attempt": 1, **facts})


def report(number: int, step: int, attempt: int = 1, at: float = 0.0) -> Report:
    return Report(number=number, attempt=attempt, step=step, loss=0.5, at=at)


def after_trials_of(*last_steps: int, state: TrialState = TrialState.COMPLETE, **facts: Any) -> Progress:
    """What is known once trials with these last steps have ended."""
    progress = Progress()
    for number, step in enumerate(last_steps, 100):
        ended = trial(number, **facts)
        progress.tell(ended, report(number, 1), 0.0)
        progress.tell(ended, report(number, step), 1.0)
        progress.end(ended.evolve(state=TrialState.QUEUED).evolve(state=TrialState.RUNNING).evolve(state=state))
    return progress


def found(progress: Progress, *steps: tuple[int, float], now: float = 50.0, late: float = 0.0, **facts: Any) -> Elapsed:
    """Seconds of a trial that runs since the time 10 and has reported these steps, each with the time of its report.

    The worker's clock is an hour fast. With `late`, all reports arrive at once at this time.
    """
    running = trial(1, **facts)
    for step, at in steps:
        progress.tell(running, report(1, step, running.attempt, 3600.0 + at), late or at)
    return progress.elapsed(running, 10.0, now)


def test_the_steps_to_come_take_as_long_as_those_between_the_reports() -> None:
    """It began 10 s before its first report, of which its start-up may be a part; a step then takes 2 s."""
    seconds = found(after_trials_of(20), (1, 20.0), (3, 24.0), (5, 28.0))
    assert seconds == (trial(1), (28.0 - 10.0) + 15 * 2.0, True)


def test_reports_that_arrive_together_after_an_outage_show_the_seconds_of_a_step() -> None:
    assert found(after_trials_of(20), (1, 20.0), (5, 28.0), late=30.0) == (trial(1), (30.0 - 10.0) + 15 * 2.0, True)


def test_a_trial_that_ran_before_the_study_was_resumed_takes_the_seconds_of_all_its_steps() -> None:
    """At the pace of its last steps, all of them take 2000 s."""
    assert found(after_trials_of(1000), (900, 20.0), (910, 40.0)) == (trial(1), 2000.0, True)


def test_a_workers_clock_that_is_set_forward_makes_a_trial_at_most_as_slow_as_all_its_seconds_so_far() -> None:
    progress = after_trials_of(20)
    progress.tell(trial(1), report(1, 1, at=0.0), 20.0)
    progress.tell(trial(1), report(1, 5, at=1e9), 30.0)
    assert progress.elapsed(trial(1), 10.0, 50.0) == (trial(1), 20 * 20.0 / 4, True)


def test_a_trial_that_has_stopped_reporting_takes_at_least_as_long_as_it_has_run() -> None:
    assert found(after_trials_of(20), (1, 20.0), (5, 28.0), now=500.0) == (trial(1), 490.0, True)


@cases(
    ("progress", "steps"),
    [
        (after_trials_of(), [(1, 20.0), (5, 28.0)]),
        (after_trials_of(20, state=TrialState.FAILED), [(1, 20.0), (5, 28.0)]),
        (after_trials_of(20, subspace="other"), [(1, 20.0), (5, 28.0)]),
        (after_trials_of(20, budget=3.0), [(1, 20.0), (5, 28.0)]),
        (after_trials_of(20, 7), [(1, 20.0), (5, 28.0)]),
        (after_trials_of(20), []),
        (after_trials_of(20), [(1, 20.0)]),
        (after_trials_of(20), [(5, 20.0), (5, 28.0), (4, 30.0)]),
        (after_trials_of(1000), [(1, 20.0), (5, 28.0)]),
        (after_trials_of(20), [(1, 20.0), (5, 20.0)]),
        (after_trials_of(20), [(1, 20.0), (5, 12.0)]),
        (after_trials_of(20), [(1, 20.0), (20, 28.0)]),
        (after_trials_of(20), [(1, 20.0), (30, 28.0)]),
    ],
)
def test_without_enough_reports_or_trials_of_as_many_steps_only_the_seconds_so_far_are_known(
    progress: Progress, steps: list[tuple[int, float]]
) -> None:
    assert found(progress, *steps) == (trial(1), 40.0, False)


@pytest.mark.parametrize("facts", [{"attempt": 2}, {"origin": 0}], ids=["repeated", "promoted"])
def test_a_trial_that_may_have_begun_at_a_checkpoint_is_not_extrapolated(facts: dict[str, Any]) -> None:
    assert found(after_trials_of(20), (10, 20.0), (15, 28.0), **facts) == (trial(1, **facts), 40.0, False)


def test_reports_of_an_earlier_attempt_are_not_those_of_the_present_one() -> None:
    progress = after_trials_of(20)
    assert found(progress, (1, 20.0), (5, 28.0)).is_total
    assert not progress.elapsed(trial(1, attempt=2), 40.0, 50.0).is_total


def test_an_ended_trial_is_forgotten() -> None:
    progress = after_trials_of(20)
    found(progress, (1, 20.0), (5, 28.0))
    progress.end(trial(1).evolve(state=TrialState.QUEUED).evolve(state=TrialState.CANCELLED))
    assert not progress.elapsed(trial(1), 10.0, 50.0).is_total
