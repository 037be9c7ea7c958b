"""Seconds of a running trial are extrapolated from its reports, if other trials show how many steps there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.cases import cases

from shadho_celery.core.trial import Outcome, Report, Trial, TrialState
from shadho_celery.placement.durations import Elapsed, Extrapolation

#: when trials begin, by their workers' clocks
START = 1000.0
#: steps that a trial reports, each with the seconds after its start
Steps = Sequence[tuple[int, float]]
#: at 2 s a step, after 10 s for the start and the first step
USUAL: Steps = [(1, 10.0), (3, 14.0), (5, 18.0)]


def trial(number: int, **facts: Any) -> Trial:
    facts = {"subspace": "s", "params": {}, "attempt": 1, "started_at": START, "state": TrialState.RUNNING, **facts}
    return Trial(number=number, **facts)


def reporting(extrapolation: Extrapolation, running: Trial, steps: Steps, attempt: int = 1) -> None:
    for step, after in steps:
        report = Report(number=running.number, attempt=attempt, step=step, loss=0.5, at=START + after)
        extrapolation.tell(running, report)


def ended(
    extrapolation: Extrapolation,
    *last_steps: int,
    first: int = 1,
    seconds: float = 100.0,
    attempt: int = 1,
    **facts: Any,
) -> Extrapolation:
    """Let a trial end for each last step, which its first attempt reports after 100 s."""
    for number, step in enumerate(last_steps, 100):
        reporting(extrapolation, trial(number, **facts), [(first, 1.0), (step, 100.0)])
        outcome = Outcome(state=facts.get("state", TrialState.COMPLETE), seconds=seconds)
        extrapolation.end(trial(number, **{**facts, "state": outcome.state, "attempt": attempt, "outcome": outcome}))
    return extrapolation


def known() -> Extrapolation:
    """Return an extrapolation to which three trials of 20 steps were told."""
    return ended(Extrapolation(), 20, 20, 20)


def found(extrapolation: Extrapolation, steps: Steps = USUAL, ran: float = 25.0, **facts: Any) -> tuple[float, bool]:
    """Seconds of a trial that has reported these steps, and whether they are extrapolated."""
    running = trial(1, **facts)
    reporting(extrapolation, running, steps)
    elapsed = extrapolation.elapsed(running, ran)
    assert elapsed == Elapsed(running, elapsed.seconds, elapsed.is_total)
    return elapsed.seconds, elapsed.is_total


def test_the_steps_to_come_take_as_long_as_those_between_the_reports() -> None:
    assert found(known()) == (18.0 + 15 * 2.0, True)


def test_a_step_that_does_not_grow_shows_nothing() -> None:
    assert found(known(), [*USUAL, (5, 30.0), (4, 31.0)]) == (18.0 + 15 * 2.0, True)


def test_a_trial_that_has_stopped_reporting_takes_at_least_as_long_as_it_has_run() -> None:
    assert found(known(), ran=490.0) == (490.0, True)


def test_a_trial_at_its_last_step_takes_as_long_as_until_its_report() -> None:
    assert found(known(), [*USUAL, (20, 60.0)]) == (60.0, True)


def test_a_trial_of_which_only_late_reports_are_known_took_long_before_them() -> None:
    """The study was resumed 5 s ago, or the trial's start was not known before."""
    assert found(known(), [(11, 500.0), (13, 600.0)], ran=5.0) == (600.0 + 7 * 50.0, True)


def test_last_steps_may_differ_a_little() -> None:
    assert found(ended(Extrapolation(), 21, 20, 19)) == (18.0 + 16 * 2.0, True)


def test_steps_may_begin_anywhere() -> None:
    extrapolation = ended(Extrapolation(), 1020, 1020, 1020, first=1001)
    assert found(extrapolation, [(1001, 10.0), (1005, 18.0)]) == (18.0 + 15 * 2.0, True)
    assert found(ended(Extrapolation(), 0, 0, 0, first=-19), [(-19, 10.0), (-15, 18.0)]) == (18.0 + 15 * 2.0, True)


@cases(
    ("extrapolation", "steps"),
    [
        (Extrapolation(), USUAL),
        (ended(Extrapolation(), 20, 20), USUAL),
        (ended(Extrapolation(), 20, 20, 20, state=TrialState.FAILED), USUAL),
        (ended(Extrapolation(), 20, 20, 20, subspace="other"), USUAL),
        (ended(Extrapolation(), 20, 20, 20, budget=3.0), USUAL),
        (ended(known(), 7), USUAL),
        (ended(known(), 120), USUAL),
        # Other numbers of steps, although the last ones differ little.
        (ended(ended(Extrapolation(), 1020, 1020, first=1001), 1102, first=1001), [(1001, 10.0), (1005, 18.0)]),
        # They report nothing but their end.
        (ended(Extrapolation(), 1, 1, 1), [(1, 10.0)]),
        # Most of their time is after the last report.
        (ended(Extrapolation(), 20, 20, 20, seconds=150.0), USUAL),
        (known(), []),
        (known(), [(1, 10.0)]),
        (ended(Extrapolation(), 100, 100, 100), USUAL),
        # The worker's clock was set.
        (known(), [(1, 10.0), (5, 10.0)]),
        (known(), [(1, 10.0), (5, 2.0)]),
    ],
)
def test_without_enough_reports_or_trials_of_as_many_steps_only_the_seconds_so_far_are_known(
    extrapolation: Extrapolation, steps: Steps
) -> None:
    assert found(extrapolation, steps) == (25.0, False)


def test_a_running_trial_with_more_steps_shows_that_trials_differ() -> None:
    """The short ones end first."""
    extrapolation, longer = known(), trial(2)
    assert found(extrapolation)[1]
    reporting(extrapolation, longer, [(30, 50.0)])
    assert not found(extrapolation)[1]


def test_a_trial_that_is_beyond_the_steps_of_those_that_ended_later_is_not_extrapolated() -> None:
    extrapolation = Extrapolation()
    reporting(extrapolation, trial(1), [(1, 1.0), (30, 50.0)])
    ended(extrapolation, 20, 20, 20)
    assert found(extrapolation, []) == (25.0, False)


@cases(("facts", "attempt"), [({"attempt": 2}, 2), ({"attempt": 2}, 1), ({"attempt": 1}, 2), ({"origin": 0}, 1)])
def test_a_trial_that_may_have_begun_at_a_checkpoint_is_not_extrapolated(facts: dict[str, Any], attempt: int) -> None:
    extrapolation, running = known(), trial(1, **facts)
    reporting(extrapolation, running, USUAL, attempt)
    assert extrapolation.elapsed(running, 25.0) == (running, 25.0, False)


def test_a_trial_that_ended_in_another_attempt_does_not_show_the_last_step() -> None:
    """Its first attempt was lost at step 7."""
    assert found(ended(known(), 7, attempt=2)) == (18.0 + 15 * 2.0, True)


def test_an_ended_trial_is_forgotten() -> None:
    extrapolation = known()
    assert found(extrapolation)[1]
    extrapolation.end(trial(1, state=TrialState.CANCELLED))
    assert not found(extrapolation, [])[1]
