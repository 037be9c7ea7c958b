"""A trial that is to be pruned ends PRUNED, with the loss and step of its last report, however its attempts end."""

from __future__ import annotations

import math

import pytest

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Lost, Outcome, Report, Result, Started, TrialState
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

S = TrialState


def begin(store: SqlStore | None = None, *, resume: bool = False) -> StudyState:
    return open_study(
        store or SqlStore("sqlite://"),
        {"x": "uniform(0, 1)"},
        name="s",
        module="m",
        resume=resume,
        clock=ManualClock(1000.0),
    )


def running(study: StudyState) -> Attempt:
    attempt = study.send(study.add("all", {"x": 0.5}, seed=1), "cpu")
    study.tell(Started(number=attempt.number, attempt=1, host="h", at=1001.0))
    return attempt


def report(study: StudyState, attempt: Attempt, step: int, loss: float) -> None:
    study.tell(Report(number=attempt.number, attempt=attempt.attempt, step=step, loss=loss, at=1002.0 + step))


def ended(attempt: Attempt, state: TrialState, loss: float | None = None) -> Result:
    outcome = Outcome(state=state, loss=loss, seconds=3.0)
    return Result(number=attempt.number, attempt=attempt.attempt, outcome=outcome, at=1020.0)


def pruned(study: StudyState) -> Attempt:
    attempt = running(study)
    report(study, attempt, 1, 0.9)
    report(study, attempt, 2, 0.8)
    study.prune(attempt.number)
    return attempt


def facts(study: StudyState, number: int = 0) -> tuple[TrialState, float | None, int | None]:
    trial = study.trial(number)
    return trial.state, trial.outcome.loss, trial.step


def test_a_cancelled_attempt_ends_it_with_its_last_report() -> None:
    study = begin()
    attempt = pruned(study)
    report(study, attempt, 3, 0.7)
    study.tell(ended(attempt, S.CANCELLED))
    assert facts(study) == (S.PRUNED, 0.7, 3)
    assert study.trial(0).outcome.seconds == 3.0
    assert study.counted == 1
    assert study.best is None


def test_one_that_went_on_from_a_checkpoint_still_tells_so() -> None:
    study = begin()
    attempt = pruned(study)
    outcome = Outcome(state=S.CANCELLED, continued=True)
    study.tell(Result(number=attempt.number, attempt=1, outcome=outcome, at=1020.0))
    assert facts(study) == (S.PRUNED, 0.8, 2)
    assert study.trial(0).outcome.continued is True


def test_a_lost_attempt_ends_it_too_and_is_not_run_again() -> None:
    study = begin()
    attempt = pruned(study)
    study.tell(Lost(number=0, attempt=attempt.attempt, reason="its worker died"))
    assert facts(study) == (S.PRUNED, 0.8, 2)
    assert study.next_waiting() is None


def test_a_result_that_comes_all_the_same_counts() -> None:
    study = begin()
    attempt = pruned(study)
    study.tell(ended(attempt, S.COMPLETE, 0.1))
    assert facts(study) == (S.COMPLETE, 0.1, None)


def test_one_that_was_cancelled_and_not_pruned_is_cancelled() -> None:
    study = begin()
    attempt = running(study)
    report(study, attempt, 1, 0.9)
    study.tell(ended(attempt, S.CANCELLED))
    assert facts(study) == (S.CANCELLED, None, None)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_without_a_finite_last_loss_it_has_none(loss: float) -> None:
    study = begin()
    attempt = pruned(study)
    report(study, attempt, 3, loss)
    study.tell(ended(attempt, S.CANCELLED))
    assert facts(study) == (S.PRUNED, None, 3)


def test_the_last_report_is_that_of_the_greatest_step() -> None:
    study = begin()
    attempt = pruned(study)
    report(study, attempt, 1, 0.1)
    study.tell(ended(attempt, S.CANCELLED))
    assert facts(study) == (S.PRUNED, 0.8, 2)


def test_of_a_trial_with_a_copy_the_last_attempt_ends_it() -> None:
    study = begin()
    attempt = pruned(study)
    copy = study.send(study.trial(0), "gpu")
    study.tell(ended(attempt, S.CANCELLED))
    assert study.trial(0).state is not S.PRUNED
    study.tell(ended(copy, S.CANCELLED))
    assert facts(study) == (S.PRUNED, 0.8, 2)
    assert study.in_flight == 0


def test_a_resumed_study_stops_it_still_and_knows_its_last_report() -> None:
    store = SqlStore("sqlite://")
    study = begin(store)
    attempt = pruned(study)
    other = running(study)
    study.commit()
    study.close()
    again = begin(store, resume=True)
    assert again.to_stop == [0]
    again.tell(ended(attempt, S.CANCELLED))
    again.tell(ended(other, S.COMPLETE, 0.5))
    assert facts(again) == (S.PRUNED, 0.8, 2)
    again.close()
    third = begin(store, resume=True)
    assert facts(third) == (S.PRUNED, 0.8, 2)
    [recalled] = [trial for trial in third.recalled() if trial.number == 0]
    assert (recalled.state, recalled.outcome.loss, recalled.step) == (S.PRUNED, 0.8, 2)
    assert [each.step for each in third.reports()] == [1, 2]


def test_the_step_may_be_any_number_that_a_report_takes() -> None:
    study = begin()
    attempt = running(study)
    for step in (-(2**63) + 1, 0, 2**63 - 1):
        report(study, attempt, step, 0.5)
    study.prune(0)
    study.tell(ended(attempt, S.CANCELLED))
    study.commit()
    assert facts(study) == (S.PRUNED, 0.5, 2**63 - 1)
    assert [trial.step for trial in study.recalled()] == [2**63 - 1]
