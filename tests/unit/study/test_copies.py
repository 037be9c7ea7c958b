"""A trial may have several live attempts: the first to end well ends it, and it is given up only with the last."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Report, Result, Started, TrialState
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import MAX_LOST, StudyState

S = TrialState

RECORD = StudyRecord(key="k", name="s", module="", seed=0, space={}, created_at=0.0)


@pytest.fixture
def study() -> StudyState:
    return open_study(SqlStore("sqlite://"), {}, clock=ManualClock(1000.0))


def started(attempt: int, host: str = "h", at: float = 1001.0) -> Started:
    return Started(number=0, attempt=attempt, host=host, at=at)


def result(attempt: int, state: TrialState = S.COMPLETE, **facts: Any) -> Result:
    outcome = Outcome(state=state, **{"loss": 0.5, "seconds": 2.0, **facts})
    return Result(number=0, attempt=attempt, outcome=outcome, at=1009.0)


def lost(attempt: int, *, claimed: bool = True) -> Lost:
    return Lost(number=0, attempt=attempt, reason="silence", claimed=claimed)


def copied(study: StudyState) -> Attempt:
    """A trial that runs on cpu, with a copy sent to gpu."""
    study.tell(started(study.send(study.add("all", {"x": 1}, seed=7), "cpu").attempt, host="first"))
    return study.send(study.trial(0), "gpu")


def test_a_copy_is_the_same_trial_in_another_attempt(study: StudyState) -> None:
    copy = copied(study)
    assert (copy.number, copy.params, copy.seed) == (0, {"x": 1}, 7)
    assert (copy.state, copy.attempt, copy.compute_class, copy.host) == (S.QUEUED, 2, "gpu", None)
    shown = study.trial(0)
    assert (shown.state, shown.attempt, shown.compute_class, shown.host) == (S.RUNNING, 2, "cpu", "first")


def test_a_copy_is_for_any_machine_and_so_is_the_next_attempt_of_a_trial_that_was_for_one(study: StudyState) -> None:
    trial = study.add("all", {"x": 1}, seed=7)
    first = study.send(trial, "cpu", only_on="a")
    assert (first.only_on, first.compute_class) == ("a", "cpu")
    assert study.send(study.trial(0), "gpu", only_on="b").only_on is None
    for attempt in (1, 2):
        study.tell(lost(attempt, claimed=False))
    again = study.next_waiting()
    assert again is not None
    assert study.send(again, "cpu").only_on is None
    assert study.trial(0).lost == 0


def test_it_is_one_trial_but_takes_a_slot_of_each_class(study: StudyState) -> None:
    copied(study)
    assert (len(study), study.in_flight, study.count(S.RUNNING), study.count(S.QUEUED)) == (1, 1, 1, 0)
    assert (study.taken("cpu"), study.taken("gpu"), study.copies) == (1, 1, 1)
    assert study.count(S.QUEUED, compute_class="gpu") == 1
    study.tell(started(2, host="second"))
    assert study.count(S.RUNNING, compute_class="gpu") == 1
    assert [(each.compute_class, each.host) for each in study.attempts] == [("cpu", "first"), ("gpu", "second")]
    study.tell(result(1))
    assert (study.taken("cpu"), study.taken("gpu"), study.copies, study.in_flight) == (0, 0, 0, 0)
    assert (study.count(*S), study.count(*S, compute_class="gpu")) == (1, 0)


def test_a_transition_names_the_attempts_that_an_event_has_ended(study: StudyState) -> None:
    """An event that ends no attempt has none. A late failure ends none either, but it was the end of an attempt."""
    copied(study)
    assert study.tell(started(2)).ended is None
    failed = study.tell(result(1, S.FAILED, error="bad"))
    assert [each.attempt.attempt for each in failed.ended or ()] == [1]
    assert not failed.is_over
    late = study.tell(result(1, S.FAILED, error="bad"))
    assert (late.trial, late.ended, late.is_over) == (None, (), False)
    study.send(study.trial(0), "cpu")
    over = study.tell(result(3))
    assert [each.attempt.attempt for each in over.ended or ()] == [2, 3]
    assert over.is_over
    assert study.tell(lost(2)).ended is None


@pytest.mark.parametrize("winner", [1, 2])
def test_the_first_attempt_to_end_well_ends_the_trial_and_stands(study: StudyState, winner: int) -> None:
    copied(study)
    study.tell(started(2, host="second", at=1005.0))
    where = {1: ("cpu", "first", 1001.0), 2: ("gpu", "second", 1005.0)}[winner]
    ended = study.tell(result(winner, loss=0.25)).trial
    assert ended is not None
    assert (ended.state, ended.outcome.loss) == (S.COMPLETE, 0.25)
    assert (ended.compute_class, ended.host, ended.started_at) == where
    assert study.tell(result(3 - winner, loss=0.1)).trial is None
    assert (study.counted, study.copied, study.rescued) == (1, 1, winner - 1)


@pytest.mark.parametrize("state", [S.FAILED, S.CANCELLED])
@pytest.mark.parametrize("first", [1, 2])
def test_an_attempt_that_ends_badly_leaves_the_trial_to_the_other(
    study: StudyState, first: int, state: TrialState
) -> None:
    copied(study)
    study.tell(started(2))
    study.tell(result(first, state, error="no GPU here"))
    assert (study.trial(0).state, study.in_flight, study.copies) == (S.RUNNING, 1, 0)
    assert study.trial(0).compute_class == {1: "gpu", 2: "cpu"}[first]
    assert study.tell(result(3 - first)).trial.state is S.COMPLETE  # type: ignore[union-attr]


def test_where_both_end_badly_the_second_one_counts(study: StudyState) -> None:
    copied(study)
    study.tell(started(2))
    study.tell(result(2, S.FAILED, error="first"))
    ended = study.tell(result(1, S.FAILED, error="second")).trial
    assert ended is not None
    assert (ended.state, ended.outcome.error) == (S.FAILED, "second")


@pytest.mark.parametrize("first", [1, 2])
def test_a_lost_attempt_is_taken_away_alone_and_the_trial_waits_once_none_lives(study: StudyState, first: int) -> None:
    copied(study)
    study.tell(started(2))
    study.tell(lost(first))
    assert (study.trial(0).state, study.trial(0).lost, study.next_waiting()) == (S.RUNNING, 1, None)
    assert study.tell(lost(first)).trial is None, "it was told before"
    study.tell(lost(3 - first))
    assert (study.trial(0).state, study.trial(0).lost) == (S.WAITING, 2)
    assert (study.taken("cpu"), study.taken("gpu")) == (0, 0)
    again = study.next_waiting()
    assert again is not None
    assert study.send(again, "cpu").attempt == 3


def test_a_trial_whose_copy_has_not_started_is_shown_as_queued_once_that_is_all_there_is(study: StudyState) -> None:
    copied(study)
    study.tell(lost(1))
    shown = study.trial(0)
    assert (shown.state, shown.compute_class, shown.host, shown.started_at) == (S.QUEUED, "gpu", None, None)
    study.commit()
    study.tell(started(2, host="second"))
    assert (study.trial(0).state, study.trial(0).host) == (S.RUNNING, "second")


def test_it_fails_for_its_lost_attempts_only_when_none_lives(study: StudyState) -> None:
    copied(study)
    study.tell(lost(1))
    for attempt in range(3, MAX_LOST + 2):
        study.send(study.trial(0), "gpu")
        study.tell(lost(attempt))
    assert study.trial(0).lost == MAX_LOST
    assert not study.trial(0).state.is_finished
    study.tell(lost(2, claimed=False))
    assert study.trial(0).state is S.FAILED


def test_what_was_copied_is_not_to_be_copied_again_while_both_live(study: StudyState) -> None:
    copied(study)
    assert list(study.alone) == []
    study.tell(lost(2, claimed=False))
    assert [trial.number for trial in study.alone] == [0]
    assert (study.trial(0).attempt, study.trial(0).compute_class) == (2, "cpu")
    assert study.send(study.trial(0), "gpu").attempt == 3


@pytest.mark.parametrize("state", [S.FAILED, S.CANCELLED])
def test_what_has_failed_in_one_attempt_is_not_copied_again_nor_in_any_later_one(
    study: StudyState, state: TrialState
) -> None:
    """Else a trial that always fails might be copied for ever."""
    copied(study)
    study.tell(started(2))
    study.tell(result(1, state))
    assert (study.trial(0).state, list(study.alone)) == (S.RUNNING, [])
    study.tell(lost(2, claimed=False))
    again = study.send(study.trial(0), "cpu")
    study.tell(started(again.attempt))
    assert (study.trial(0).state, study.trial(0).lost) == (S.RUNNING, 0)
    assert list(study.alone) == []


def test_of_a_trial_whose_latest_attempt_alone_lives_nothing_more_needs_to_be_kept(study: StudyState) -> None:
    trial = study.add("all", {"x": 1}, seed=7)
    assert trial.live is None
    study.tell(started(study.send(trial, "cpu").attempt))
    assert study.trial(0).live is None
    study.send(study.trial(0), "gpu")
    assert [attempt.attempt for attempt in study.trial(0).live or ()] == [1, 2]
    study.tell(lost(1))
    assert (study.trial(0).live, [attempt.attempt for attempt in study.attempts]) == (None, [2])


def test_where_the_copy_was_lost_it_is_kept_that_the_first_attempt_lives(study: StudyState) -> None:
    copied(study)
    study.tell(lost(2, claimed=False))
    assert [(attempt.attempt, attempt.compute_class) for attempt in study.trial(0).live or ()] == [(1, "cpu")]
    assert study.trial(0).attempt == 2


def test_what_loses_its_workers_is_not_copied_to_others(study: StudyState) -> None:
    copied(study)
    for attempt in range(2, MAX_LOST + 1):
        assert study.copies == 1
        study.tell(lost(attempt))
        if list(study.alone):
            study.send(study.trial(0), "gpu")
    assert (study.trial(0).lost, study.copies) == (MAX_LOST - 1, 0)


def test_reports_of_every_live_attempt_are_kept(study: StudyState) -> None:
    copied(study)
    told = [study.tell(Report(number=0, attempt=attempt, step=1, loss=0.1, at=0.0)).trial for attempt in (1, 2, 3)]
    assert [trial is not None for trial in told] == [True, True, False]


def test_in_whatever_order_the_news_come_the_sums_are_right_and_there_is_at_most_one_result(study: StudyState) -> None:
    news: list[Event] = [started(1), started(2), lost(1), lost(2), result(1, S.FAILED), result(2)]
    for order in itertools.permutations(news):
        one = StudyState(MemoryStore(), RECORD, 1, clock=ManualClock(1000.0))
        one.send(one.add("all", {}, seed=0), "cpu")
        one.tell(started(1))
        one.send(one.trial(0), "gpu")
        for event in order:
            one.tell(event)
            shown = one.trial(0)
            live = list(one.attempts)
            assert one.taken("cpu") + one.taken("gpu") == len(live) == one.copies + one.in_flight
            assert one.count(*S) == 1
            assert bool(live) is (shown.state in {S.QUEUED, S.RUNNING})
            one.commit()
        assert len(one.trials) <= 1


def test_a_copied_trial_is_carried_on_after_a_restart_and_a_result_of_either_attempt_counts() -> None:
    store = SqlStore("sqlite://")
    first = open_study(store, {}, clock=ManualClock(1000.0), name="s")
    copied(first)
    first.close()
    second = open_study(store, {}, clock=ManualClock(1010.0), name="s", resume=True)
    assert [(trial.state, trial.attempt) for trial in second.sent] == [(S.RUNNING, 2)]
    assert second.tell(result(1)).trial.state is S.COMPLETE  # type: ignore[union-attr]
    assert second.tell(result(2)).trial is None


def resumed_with_a_copy(*before: Event) -> StudyState:
    """A study that was carried on while a trial ran on cpu and its copy on gpu, and after those events."""
    store = SqlStore("sqlite://")
    first = open_study(store, {}, clock=ManualClock(1000.0), name="s")
    copied(first)
    for event in (started(2, host="second", at=1005.0), *before):
        first.tell(event)
    first.close()
    second = open_study(store, {}, clock=ManualClock(1040.0), name="s", resume=True)
    assert [each.attempt for each in second.attempts] == [each.attempt for each in first.attempts]
    assert list(second) == list(first)
    return second


def test_after_a_restart_both_attempts_live_where_they_did() -> None:
    study = resumed_with_a_copy()
    assert [(t.attempt, t.state, t.compute_class, t.host, t.started_at) for t in study.attempts] == [
        (1, S.RUNNING, "cpu", "first", 1001.0),
        (2, S.RUNNING, "gpu", "second", 1005.0),
    ]
    assert (study.taken("cpu"), study.taken("gpu"), study.copies, study.in_flight) == (1, 1, 1, 1)
    assert list(study.alone) == []


@pytest.mark.parametrize("first", [1, 2])
def test_after_a_restart_the_attempt_that_was_left_is_the_one_that_lives(first: int) -> None:
    study = resumed_with_a_copy(lost(first))
    assert [trial.attempt for trial in study.attempts] == [3 - first]
    assert study.tell(lost(first)).trial is None
    assert study.trial(0).state is S.RUNNING
    study.tell(lost(3 - first, claimed=False))
    again = study.next_waiting()
    assert again is not None
    assert study.send(again, "cpu").attempt == 3


def test_of_a_trial_that_has_ended_no_attempt_lives_after_a_restart() -> None:
    study = resumed_with_a_copy(result(2))
    assert (study.in_flight, list(study.attempts), study.trial(0).live) == (0, [], None)


def test_a_rung_and_an_origin_are_kept_and_losses_of_the_highest_budget_are_the_best() -> None:
    store = SqlStore("sqlite://")
    study = open_study(store, {}, clock=ManualClock(1000.0), name="s")
    study.add("all", {"x": 1}, 7, 1.0, rung=0)
    study.add("all", {"x": 1}, 7, 9.0, rung=1, origin=0)
    study.tell(result(1, loss=0.1))
    assert study.best is not None
    assert study.best.number == 0
    study.tell(Result(number=1, attempt=1, outcome=Outcome(state=S.COMPLETE, loss=0.3), at=1.0))
    assert (study.best.number, study.trials.best_of("all"), study.asked("all")) == (1, 0.3, 1)
    study.close()
    again = open_study(store, {}, clock=ManualClock(1010.0), name="s", resume=True)
    assert [(t.rung, t.origin, t.budget) for t in again] == [(0, None, 1.0), (1, 0, 9.0)]
    assert again.best is not None
    assert again.best.number == 1
