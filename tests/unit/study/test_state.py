"""A study takes events in any order and any number of times, and gives each trial at most one result."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import (
    COUNTED,
    FINISHED,
    MAX_ATTEMPTS,
    NO_OUTCOME,
    Attempt,
    Event,
    Lost,
    Memory,
    Outcome,
    Report,
    Result,
    Retry,
    Started,
    Trial,
    TrialState,
    digest_of,
)
from shadho_celery.errors import (
    SpaceChanged,
    StoreOutage,
    StudyError,
    StudyLocked,
    StudyNotFound,
    UsageError,
)
from shadho_celery.space.compile import compile_space
from shadho_celery.space.describe import VERSION
from shadho_celery.space.stored import to_json
from shadho_celery.store.base import holder_name
from shadho_celery.store.sql import SqlStore
from shadho_celery.study import open as open_module
from shadho_celery.study.open import MAX_NAME, open_study
from shadho_celery.study.state import MAX_LOST, MAX_VANISHED, StudyState

S = TrialState

SPACE: Mapping[str, str] = {"x": "uniform(0, 1)", "größe": "randint(0, 5) if x=1"}


def begin(store: SqlStore | None = None, **options: Any) -> StudyState:
    options = {"clock": ManualClock(1000.0), "module": "m", **options}
    return open_study(store or SqlStore("sqlite://"), options.pop("space", SPACE), **options)


def sent(study: StudyState, compute_class: str = "cpu", subspace: str = "all") -> Attempt:
    return study.send(study.add(subspace, {"x": 0.5}, seed=len(study)), compute_class)


def started(trial: Attempt, attempt: int | None = None) -> Started:
    return Started(number=trial.number, attempt=attempt or trial.attempt, host="h", at=1001.0)


def result(
    trial: Attempt,
    loss: float = 0.5,
    *,
    state: TrialState = S.COMPLETE,
    attempt: int | None = None,
    memory: int | None = None,
    retry: Retry | None = None,
) -> Result:
    return Result(
        number=trial.number,
        attempt=attempt or trial.attempt,
        outcome=Outcome(state=state, loss=loss, metrics={"loss was": loss}, seconds=2.0, memory=memory),
        host="h",
        compute_class="cpu",
        at=1003.0,
        retry=retry,
    )


def lost(trial: Attempt, *, claimed: bool = True, attempt: int | None = None) -> Lost:
    return Lost(number=trial.number, attempt=attempt or trial.attempt, reason="silence", claimed=claimed)


# Telling


def test_a_trial_goes_through_its_life_as_events_say() -> None:
    study = begin()
    trial = sent(study)
    assert (trial.state, trial.attempt, trial.compute_class) == (S.QUEUED, 1, "cpu")
    queued = study.trial(0)
    assert (queued.state, queued.attempt, queued.compute_class, queued.asked_at) == (S.QUEUED, 1, "cpu", 1000.0)
    running = study.tell(started(trial)).trial
    assert running is not None
    assert (running.state, running.host, running.started_at) == (S.RUNNING, "h", 1001.0)
    ended = study.tell(result(trial, 0.25)).trial
    assert ended is not None
    assert (ended.state, ended.outcome.loss, ended.finished_at, ended.outcome.seconds) == (
        S.COMPLETE,
        0.25,
        1003.0,
        2.0,
    )
    assert ended.outcome.metrics == {"loss was": 0.25}
    assert [*study.trials] == [ended] == [study.trial(0)]
    assert ended.outcome == result(trial, 0.25).outcome
    assert study.best is ended


def test_the_first_result_stands_whatever_comes_after_it() -> None:
    study = begin()
    trial = sent(study)
    first = study.tell(result(trial, 0.5)).trial
    later: list[Event] = [
        result(trial, 0.5),
        result(trial, 0.1, attempt=2),
        result(trial, state=S.FAILED),
        started(trial),
        lost(trial),
        Report(number=0, attempt=1, step=1, loss=0.0, at=0.0),
    ]
    assert [study.tell(event).trial for event in later] == [None] * len(later)
    assert study.trial(0) is first
    assert (study.counted, study.count(S.COMPLETE), study.in_flight) == (1, 1, 0)


def test_a_result_may_overtake_the_news_of_its_start_and_of_its_loss() -> None:
    study = begin()
    overtaking, given_up = sent(study), sent(study)
    assert study.tell(result(overtaking)).trial.state is S.COMPLETE  # type: ignore[union-attr]
    assert study.trial(0).started_at == pytest.approx(1001.0)
    assert study.tell(lost(given_up)).trial.state is S.WAITING  # type: ignore[union-attr]
    assert study.tell(result(given_up)).trial.state is S.COMPLETE  # type: ignore[union-attr]
    assert study.next_waiting() is None


def test_a_late_result_of_an_earlier_attempt_counts_while_the_next_one_runs() -> None:
    study = begin()
    trial = sent(study)
    study.tell(lost(trial))
    again = study.send(study.trial(0), "gpu")
    study.tell(started(again))
    assert study.tell(result(trial, attempt=1)).trial.state is S.COMPLETE  # type: ignore[union-attr]
    assert study.tell(result(again, 0.0)).trial is None
    assert study.count(S.COMPLETE) == len(study.trials) == 1


def test_news_of_an_earlier_attempt_do_not_touch_the_next_one() -> None:
    study = begin()
    trial = sent(study)
    study.tell(lost(trial))
    again = study.send(study.trial(0), "gpu")
    shown = study.trial(0)
    for event in (started(trial, attempt=1), lost(trial, attempt=1), lost(trial, attempt=1, claimed=False)):
        assert study.tell(event).trial is None
    assert study.trial(0) is shown
    assert [*study.attempts] == [again]


def test_an_event_of_an_unknown_trial_changes_nothing() -> None:
    study = begin()
    assert study.tell(Started(number=9, attempt=1, host="h", at=0.0)).trial is None
    assert len(study) == 0


def test_claimed_attempts_that_were_lost_end_the_trial_failed_with_the_reason() -> None:
    study = begin()
    trial = sent(study)
    for attempt in range(1, MAX_LOST):
        assert study.tell(lost(trial)).trial.state is S.WAITING  # type: ignore[union-attr]
        waiting = study.next_waiting()
        assert waiting is not None
        trial = study.send(waiting, "cpu")
        assert trial.attempt == attempt + 1
    ended = study.tell(lost(trial)).trial
    assert ended is not None
    assert (ended.state, ended.lost, ended.finished_at) == (S.FAILED, MAX_LOST, 1000.0)
    assert "silence" in str(ended.outcome.error)
    assert str(MAX_LOST) in str(ended.outcome.error)
    assert study.next_waiting() is None
    assert (study.counted, study.in_flight) == (1, 0)


def test_machines_that_vanish_are_free_at_first_and_then_end_the_trial_with_that_reason() -> None:
    """Also in a study that is resumed meanwhile, because the number is recorded."""
    study = begin()
    trial = sent(study)
    for losses in range(1, MAX_VANISHED + MAX_LOST):
        told = study.tell(replace(lost(trial), vanished=True)).trial
        assert told is not None
        assert (told.vanished, told.lost) == (min(losses, MAX_VANISHED), max(0, losses - MAX_VANISHED))
        study.commit()
        [stored] = study.store.trials(study.record.key, [0])
        assert (stored.vanished, stored.lost) == (told.vanished, told.lost)
        waiting = study.next_waiting()
        assert waiting is not None
        trial = study.send(waiting, "cpu")
    ended = study.tell(replace(lost(trial), vanished=True)).trial
    assert ended is not None
    assert ended.state is S.FAILED
    assert f"{MAX_LOST} attempts were lost, besides {MAX_VANISHED} whose machines vanished" in str(ended.outcome.error)


def test_losing_attempts_that_nobody_claimed_is_free() -> None:
    study = begin()
    trial = sent(study)
    for _ in range(10 * MAX_LOST):
        study.tell(lost(trial, claimed=False))
        waiting = study.next_waiting()
        assert waiting is not None
        trial = study.send(waiting, "cpu")
    assert (study.trial(0).lost, trial.attempt) == (0, 10 * MAX_LOST + 1)


def test_a_trial_whose_attempts_are_spent_ends_failed_with_the_reason() -> None:
    study = begin()
    trial = sent(study)
    while trial.attempt < MAX_ATTEMPTS:
        study.tell(lost(trial, claimed=False))
        trial = study.send(study.next_waiting() or study.trial(0), "cpu")
    study.tell(started(trial))
    assert not list(study.alone), "nor is it copied"
    ended = study.tell(lost(trial, claimed=False)).trial
    assert ended is not None
    assert (ended.state, ended.attempt, study.in_flight) == (S.FAILED, MAX_ATTEMPTS, 0)
    assert ended.outcome.error == f"all {MAX_ATTEMPTS} attempts were lost; the last one: silence"


def test_a_result_of_other_params_than_its_trials_is_refused_and_counted() -> None:
    """A scheduler with a copy of the store may have sent a trial of the same number."""
    study = begin()
    trial = sent(study)
    foreign = replace(result(trial), digest=digest_of({"x": 0.25}))
    for event in (foreign, replace(foreign, attempt=7), replace(foreign, retry=Retry(reason="memory"))):
        assert study.tell(event).trial is None
    assert (study.refused, study.trial(0).state) == (3, S.QUEUED)
    assert study.tell(replace(result(trial), digest=digest_of({"x": 0.5}))).trial is not None
    assert (study.refused, study.trial(0).state) == (3, S.COMPLETE)


def test_trials_to_be_sent_again_come_in_the_order_in_which_they_were_lost() -> None:
    study = begin()
    trials = [sent(study) for _ in range(3)]
    for trial in (trials[2], trials[0]):
        study.tell(lost(trial))
    numbers = [waiting.number for waiting in iter(study.next_waiting, None)]
    assert numbers == [2, 0]


def test_a_new_trial_waits_to_be_sent_only_once_it_is_put_in_the_queue() -> None:
    study = begin()
    study.add("all", {"x": 0.5}, seed=1)
    assert study.next_waiting() is None
    held = study.add("all", {"x": 0.6}, seed=2)
    study.put_waiting(held)
    assert study.count(S.WAITING) == 2
    assert study.in_flight == 0
    assert study.next_waiting() is held
    assert study.next_waiting() is None, "it is taken off the list"


def test_the_first_that_fits_is_taken_and_the_others_go_on_waiting() -> None:
    study = begin()
    for seed in range(6):
        study.put_waiting(study.add("ab"[seed % 2], {"x": 0.5}, seed=seed))
    assert study.next_waiting(lambda trial: trial.seed > 10) is None
    taken = [study.next_waiting(lambda trial: trial.subspace == "b") for _ in range(4)]
    assert [trial and trial.number for trial in taken] == [1, 3, 5, None]
    assert [trial.number for trial in iter(study.next_waiting, None)] == [0, 2, 4], "the others keep their turn"


def test_a_trial_that_ends_while_it_waits_is_not_sent() -> None:
    study = begin()
    trial = sent(study)
    study.tell(lost(trial))
    study.tell(result(trial))
    asked: list[int] = []

    def fits(trial: Trial) -> bool:
        asked.append(trial.number)
        return True

    assert study.next_waiting(fits) is None
    assert asked == []


def test_waiting_trials_wait_again_when_the_study_is_resumed() -> None:
    study = begin(name="s")
    for seed in range(3):
        study.put_waiting(study.add("all", {"x": 0.5}, seed=seed))
    study.send(study.trial(1), "cpu")
    study.close()
    again = begin(study.store, name="s", resume=True)
    assert [trial.number for trial in iter(again.next_waiting, None)] == [0, 2]
    assert [trial.number for trial in again.sent] == [1]


def test_what_was_sent_and_has_not_ended_is_known_the_one_sent_last_at_the_end() -> None:
    study = begin()
    trials = [sent(study) for _ in range(4)]
    study.add("all", {"x": 0.5}, seed=9)
    assert [trial.number for trial in study.sent] == [0, 1, 2, 3]
    study.tell(started(trials[2]))
    study.tell(result(trials[0]))
    study.tell(lost(trials[1]))
    assert [(trial.number, trial.state) for trial in study.sent] == [(2, S.RUNNING), (3, S.QUEUED)]
    study.send(study.trial(1), "gpu")
    assert [trial.number for trial in study.sent] == [2, 3, 1]
    assert study.in_flight == len(study.sent) == 3


def test_counts_are_kept_by_class_and_by_subspace() -> None:
    study = begin()
    one = sent(study, "cpu", "a")
    sent(study, "gpu", "b")
    study.tell(lost(one))
    again = study.send(study.trial(0), "gpu")
    assert study.count(S.QUEUED, compute_class="cpu") == 0
    assert study.count(S.QUEUED, S.RUNNING, compute_class="gpu") == 2
    study.tell(result(again, state=S.FAILED))
    assert study.count(S.FAILED, subspace="a") == 1
    assert study.subspaces == ["a", "b"]
    assert study.compute_classes == ["cpu", "gpu"]
    assert (study.asked("a"), study.asked("c")) == (1, 0)


def test_a_wide_trial_takes_its_slots_of_the_class_it_was_sent_to_last_until_it_ends() -> None:
    study = begin()
    trial = study.send(study.add("all", {"x": 0.5}, seed=1, slots=3), "cpu")
    assert (trial.slots, study.taken("cpu"), study.taken("gpu"), study.in_flight) == (3, 3, 0, 1)
    study.tell(lost(trial))
    assert (study.taken("cpu"), study.in_flight) == (0, 0)
    again = study.send(study.trial(0), "gpu")
    study.tell(started(again))
    assert (study.taken("cpu"), study.taken("gpu"), study.count(S.RUNNING, compute_class="gpu")) == (0, 3, 1)
    study.tell(result(again, state=S.FAILED))
    assert (study.taken("gpu"), study.in_flight, study.counted, study.count(*S), len(study)) == (0, 0, 1, 1, 1)


def test_a_trial_that_carries_another_on_was_not_drawn() -> None:
    study = begin(name="s")
    study.add("all", {"x": 0.5}, seed=1)
    study.add("all", {"x": 0.5}, seed=1, origin=0)
    assert (len(study), study.asked("all"), study.count(S.WAITING, subspace="all")) == (2, 1, 2)
    study.close()
    assert begin(study.store, name="s", resume=True).asked("all") == 1


def test_of_those_that_wait_the_wide_ones_are_known_until_they_are_sent() -> None:
    study = begin()
    trials = [study.add("all", {"x": 0.5}, seed=1, slots=slots) for slots in (1, 2, 3, 3)]
    assert [len(study.wider(slots)) for slots in (0, 1, 2, 3)] == [4, 3, 2, 0]
    again = study.send(trials[2], "cpu")
    assert study.wider(2) == [trials[3]]
    study.tell(lost(again))
    assert len(study.wider(2)) == 2


def test_a_result_that_is_to_be_tried_again_takes_only_its_attempt_away() -> None:
    study = begin()
    trial = sent(study)
    failed = result(trial, state=S.FAILED, retry=Retry(reason="out of memory", outgrown="cpu", memory=Memory.HOST))
    waiting = study.tell(failed).trial
    assert waiting is not None
    assert (waiting.state, waiting.lost, waiting.outgrown, waiting.outcome) == (S.WAITING, 0, "cpu", NO_OUTCOME)
    assert study.tell(failed).trial is None, "it was told before"
    again = study.send(study.trial(0), "gpu")
    study.tell(result(again, state=S.FAILED, retry=Retry(reason="out of memory", outgrown="gpu", memory=Memory.GPU)))
    assert (study.trial(0).outgrown, study.trial(0).outgrown_memory) == ("cpu,gpu", "host,gpu")
    last = study.send(study.trial(0), "large")
    assert study.tell(result(last)).trial.state is S.COMPLETE  # type: ignore[union-attr]
    assert study.trial(0).outgrown == "cpu,gpu"


def test_a_retry_after_a_loss_counts_as_a_lost_attempt_and_the_last_one_is_the_trials_failure() -> None:
    study = begin()
    trial = sent(study)
    for number in range(MAX_LOST):
        assert study.trial(0).lost == number
        study.tell(result(trial, state=S.FAILED, retry=Retry(reason="rank 1 was lost", is_loss=True)))
        if number < MAX_LOST - 1:
            trial = study.send(study.trial(0), "cpu")
    assert study.trial(0).state is S.FAILED
    assert study.trial(0).outcome.error == f"{MAX_LOST} attempts were lost; the last one: rank 1 was lost"


def test_a_trial_that_is_tried_again_for_another_reason_has_outgrown_nothing() -> None:
    study = begin()
    trial = sent(study)
    for _ in range(2 * MAX_LOST):
        study.tell(result(trial, state=S.FAILED, retry=Retry(reason="tried elsewhere")))
        assert (study.trial(0).state, study.trial(0).lost, study.trial(0).outgrown) == (S.WAITING, 0, None)
        trial = study.send(study.trial(0), "cpu")


ATTEMPTS = st.integers(1, 4)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(["cpu", "gpu"]), st.sampled_from("ab")),
        st.tuples(st.just("send again"), st.sampled_from(["cpu", "gpu"])),
        st.tuples(st.just("started"), st.integers(0, 5), ATTEMPTS),
        st.tuples(st.just("report"), st.integers(0, 5), ATTEMPTS, st.integers(0, 2)),
        st.tuples(st.just("lost"), st.integers(0, 5), ATTEMPTS, st.booleans()),
        st.tuples(st.just("result"), st.integers(0, 5), ATTEMPTS, st.sampled_from(sorted(FINISHED)), st.integers(0, 3)),
        st.tuples(st.just("commit")),
    ),
    max_size=60,
)


def apply(study: StudyState, operation: tuple[Any, ...]) -> None:
    kind, *values = operation
    if kind == "send":
        sent(study, *values)
    elif kind == "send again":
        waiting = study.next_waiting()
        if waiting is not None:
            study.send(waiting, *values)
    elif kind == "commit":
        study.commit()
    else:
        study.tell(event_of(kind, *values))


def event_of(kind: str, number: int, attempt: int, *values: Any) -> Event:
    if kind == "started":
        return Started(number=number, attempt=attempt, host="h", at=1.0)
    if kind == "report":
        return Report(number=number, attempt=attempt, step=values[0], loss=0.0, at=1.0)
    if kind == "lost":
        return Lost(number=number, attempt=attempt, reason="silence", claimed=values[0])
    state, loss = values
    outcome = Outcome(state=state, loss=loss if state is S.COMPLETE else None)
    return Result(number=number, attempt=attempt, outcome=outcome, at=2.0)


def check_sums(study: StudyState) -> None:
    """Every sum that the study keeps is what its trials add up to."""
    trials = list(study)
    assert [trial.number for trial in trials] == list(range(len(study)))
    for state in S:
        of_state = [trial for trial in trials if trial.state is state]
        assert study.count(state) == len(of_state)
        for name in ("cpu", "gpu"):
            # What waits is of no class, whichever its last attempt was sent to.
            of_class = [] if state is S.WAITING else [t for t in of_state if t.compute_class == name]
            assert study.count(state, compute_class=name) == len(of_class)
        for name in ("a", "b"):
            assert study.count(state, subspace=name) == sum(t.subspace == name for t in of_state)
    for name in ("a", "b"):
        assert study.asked(name) == sum(trial.subspace == name for trial in trials)
    assert study.counted == sum(trial.state in COUNTED for trial in trials)
    in_flight = [trial for trial in trials if trial.state in (S.QUEUED, S.RUNNING)]
    assert study.in_flight == len(in_flight)
    for name in ("cpu", "gpu"):
        assert study.taken(name) == sum(trial.compute_class == name for trial in in_flight)
    assert sorted(trial.number for trial in study.sent) == [trial.number for trial in in_flight]
    assert sorted(t.number for t in study.trials) == [t.number for t in trials if t.state.is_finished]
    losses = [t.outcome.loss for t in study.trials if t.state is S.COMPLETE and t.outcome.loss is not None]
    assert (study.best.outcome.loss if study.best else None) == min(losses, default=None)
    assert all(trial.lost < MAX_LOST or trial.state.is_finished for trial in trials)
    assert not any(trial.state is S.LOST for trial in trials), "a lost attempt leaves its trial WAITING or FAILED"


@pytest.mark.slow
@settings(max_examples=150)
@given(OPERATIONS)
def test_whatever_comes_in_whatever_order_the_sums_hold_and_a_result_is_final(operations: list[Any]) -> None:
    study = begin()
    ended: dict[int, Trial] = {}
    for operation in operations:
        apply(study, operation)
        check_sums(study)
        for trial in study.trials:
            assert ended.setdefault(trial.number, trial) == trial
    waiting = {trial.number for trial in study if trial.state is S.WAITING}
    assert {trial.number for trial in iter(study.next_waiting, None)} == waiting
    study.close()
    study.store.close()


@pytest.mark.slow
@settings(max_examples=60)
@given(OPERATIONS)
def test_a_resumed_study_is_the_one_that_was_closed(operations: list[Any]) -> None:
    study = begin(name="s")
    for operation in operations:
        apply(study, operation)
    study.close()
    again = begin(study.store, name="s", resume=True)
    assert list(again) == list(study)
    check_sums(again)
    assert (again.best and again.best.outcome.loss) == (study.best and study.best.outcome.loss)
    waiting = {trial.number for trial in study if trial.state is S.WAITING}
    assert {trial.number for trial in iter(again.next_waiting, None)} == waiting
    study.store.close()


# Writing


def test_what_is_not_committed_is_not_in_the_store_and_what_is_is() -> None:
    study = begin()
    attempt = sent(study)
    trial = study.trial(0)
    assert list(study.store.trials(study.record.key)) == []
    study.commit()
    assert list(study.store.trials(study.record.key)) == [trial]
    ended = study.tell(result(attempt)).trial
    assert list(study.store.trials(study.record.key)) == [trial]
    study.commit()
    assert list(study.store.trials(study.record.key)) == [ended]


def test_reports_of_the_running_attempt_are_kept() -> None:
    study = begin()
    trial = sent(study)
    study.tell(started(trial))
    reports = [Report(number=0, attempt=1, step=step, loss=1 / (1 + step), at=1002.0) for step in range(3)]
    for report in reports:
        assert study.tell(report).trial is study.trial(0)
    study.tell(reports[0])
    assert study.tell(Report(number=0, attempt=2, step=9, loss=0.0, at=0.0)).trial is None
    study.commit()
    assert study.store.reports(study.record.key) == reports


def test_a_study_without_news_still_renews_its_lock() -> None:
    clock = ManualClock(1000.0)
    study = begin(clock=clock)
    key = study.record.key
    study.store.unlock(key, 1)
    fence = study.store.lock(key, "elsewhere 1 1", clock.now())
    study = StudyState(study.store, study.record, fence, clock=clock)
    for _ in range(10):
        clock.sleep(6)
        study.commit()
    with pytest.raises(StudyLocked):
        study.store.lock(key, holder_name(), clock.now() + 20)


# Opening


def test_a_running_study_cannot_be_opened_a_second_time() -> None:
    study = begin(name="s")
    with pytest.raises(StudyLocked):
        begin(study.store, name="s", resume=True)
    study.close()
    begin(study.store, name="s", resume=True)


def test_resuming_what_is_not_there_or_another_modules_is_refused() -> None:
    study = begin(name="s")
    study.close()
    with pytest.raises(StudyNotFound, match="'t'"):
        begin(study.store, name="t", resume=True)
    with pytest.raises(StudyNotFound, match="'s'"):
        begin(study.store, name="s", module="other", resume=True)


@pytest.mark.parametrize(
    ("space", "labels"),
    [
        ({**SPACE, "y": "uniform(0, 2)"}, ["y", "was absent", "uniform(0, 2)"]),
        ({"x": SPACE["x"]}, ["größe", "is absent"]),
        ({**SPACE, "x": "uniform(0, 2)"}, ["x", "uniform(0, 1)", "uniform(0, 2)"]),
        ({f"l{i}": "uniform(0, 1)" for i in range(50)}, ["l0", "more"]),
    ],
)
def test_a_changed_space_is_refused_naming_the_labels_that_differ(space: Mapping[str, str], labels: list[str]) -> None:
    study = begin(name="s")
    study.close()
    with pytest.raises(SpaceChanged) as caught:
        begin(study.store, name="s", resume=True, space=space)
    assert all(label in str(caught.value) for label in labels)
    assert "\n" not in str(caught.value)
    begin(study.store, name="s", resume=True)


def test_a_refused_resume_names_the_command_that_begins_a_successor(tmp_path: Path) -> None:
    """With the store and the settings of the study, those of this run before those of earlier ones."""
    store = SqlStore(f"sqlite:///{tmp_path}/a b.db")
    begin(store, name="s", settings={"trials": 9, "sampler": "tpe", "direction": "maximize"}).close()
    with pytest.raises(SpaceChanged) as caught:
        begin(store, name="s", resume=True, space={"x": "uniform(0, 3)"}, settings={"trials": 20})
    command = "shadho-celery run m --store 'sqlite:///{}/a b.db' --trials 20 --maximize --sampler tpe --warm-start s"
    assert str(caught.value).endswith(f": {command.format(tmp_path)}")


def test_a_refused_resume_of_a_program_names_the_call_that_begins_a_successor(tmp_path: Path) -> None:
    store = SqlStore(f"sqlite:///{tmp_path}/s.db")
    begin(store, module="", name="s").close()
    with pytest.raises(SpaceChanged) as caught:
        begin(store, module="", name="s", resume=True, space={"x": "uniform(0, 3)"})
    assert str(caught.value).endswith(f": minimize(..., store='sqlite:///{tmp_path}/s.db', warm_start='s')")


def test_a_study_that_is_resumed_if_it_exists_begins_the_first_time() -> None:
    first = begin(name="s-1", resume="if-exists")
    first.add("all", {"x": 0.5}, seed=0)
    first.close()
    again = begin(first.store, name="s-1", resume="if-exists")
    assert (again.record.key, len(again)) == (first.record.key, 1)
    again.close()
    # The beginning of another study's name is a name of its own.
    other = begin(first.store, name="s", resume="if-exists")
    assert (other.record.name, len(other)) == ("s", 0)
    other.close()
    assert begin(first.store, resume="if-exists").record.name in {"s", "s-1"}
    assert begin(first.store, resume="if-exists", module="n").record.module == "n"


def test_a_study_of_another_version_is_refused_and_nothing_is_changed() -> None:
    """Its texts cannot be compared, and options may have been swapped."""
    space = compile_space(hp.choice("x", ["a", "b"]))
    for version in (0, VERSION - 1, VERSION + 1):
        study = begin(name="s", space=space.describe(), tree={**to_json(space), "version": version})
        study.close()
        before = study.store.find("s")
        with pytest.raises(StudyError, match=r"begun by another version of shadho_celery; begin another study"):
            begin(study.store, name="s", resume=True, space=space.describe(), tree=to_json(space))
        assert study.store.find("s") == before


def test_a_swap_of_options_that_are_objects_is_refused() -> None:
    spaces = [compile_space(hp.choice("x", [Path(name) for name in names])) for names in ("ab", "ba")]
    study = begin(name="s", space=spaces[0].describe(), tree=to_json(spaces[0]))
    study.close()
    with pytest.raises(SpaceChanged, match="'b'"):
        begin(study.store, name="s", resume=True, space=spaces[1].describe(), tree=to_json(spaces[1]))
    begin(study.store, name="s", resume=True, space=spaces[0].describe(), tree=to_json(spaces[0]))


def test_another_seed_is_refused_and_the_same_one_is_not() -> None:
    study = begin(name="s", seed=7)
    study.close()
    with pytest.raises(UsageError, match="7"):
        begin(study.store, name="s", resume=True, seed=8)
    again = begin(study.store, name="s", resume=True, seed=7)
    assert again.record.seed == 7


@pytest.mark.parametrize("seed", [-1, 2**63, 2**200])
def test_a_seed_that_cannot_be_kept_is_refused_before_anything_is_recorded(seed: int) -> None:
    store = SqlStore("sqlite://")
    with pytest.raises(UsageError, match="seed"):
        begin(store, name="s", seed=seed)
    with pytest.raises(StudyNotFound):
        store.find("s")


@pytest.mark.parametrize(
    "name",
    ["", " ", "a/b", "a\\b", "..", ".hidden", "two\nlines", "nul\0", "x" * 201, "\x1b[31m"],
)
def test_a_bad_name_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(UsageError, match="cannot name a study") as caught:
        begin(name=name)
    assert "\n" not in str(caught.value)
    assert "\0" not in str(caught.value)


@pytest.mark.parametrize("name", ["größe 学习 [1]", "x" * 200, "a.b-c_d", "'; drop table studies; --"])
def test_a_good_name_is_kept_as_it_is(name: str) -> None:
    assert begin(name=name).name == name


def test_without_a_name_a_study_gets_a_short_one_that_begins_like_its_module() -> None:
    store = SqlStore("sqlite://")
    names = [begin(store, module="tasks.svm").name for _ in range(5)]
    assert len(set(names)) == 5
    assert all(re.fullmatch("svm-[0-9a-f]{4}", name) for name in names)
    assert begin(module="").name.startswith("study-")
    assert len(begin(module="m" * 300).name.encode()) <= MAX_NAME


def test_a_name_that_is_taken_gets_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    store = SqlStore("sqlite://")
    keys = iter(["3f2a0" + 11 * "0", "3f2a1" + 11 * "0"])
    monkeypatch.setattr(open_module, "new_key", lambda: next(keys))
    assert [begin(store, module="tasks.svm").name for _ in range(2)] == ["svm-3f2a", "svm-3f2a1"]


def test_a_trial_that_cannot_be_read_loses_nobodys_turn() -> None:
    study = begin()
    for seed in range(3):
        study.put_waiting(study.add("all", {"x": 0.5}, seed=seed))

    def fits(trial: Trial) -> bool:
        if trial.seed == 1:
            raise StoreOutage("the store is away")
        return False

    with pytest.raises(StoreOutage):
        study.next_waiting(fits)
    assert [trial.number for trial in iter(study.next_waiting, None)] == [0, 1, 2]


def test_a_failure_that_is_heard_again_does_not_end_the_trial_that_is_tried_again() -> None:
    """Events come again after a crash between their record and their confirmation."""
    study = begin()
    trial = sent(study)
    study.tell(result(trial, state=S.FAILED, retry=Retry(reason="tried elsewhere")))
    assert study.tell(result(trial, state=S.FAILED)).trial is None
    again = study.send(study.next_waiting() or trial, "cpu")
    assert study.tell(result(trial, state=S.FAILED)).trial is None
    assert study.trial(trial.number).state is S.QUEUED
    study.tell(result(again))
    assert study.trial(trial.number).state is S.COMPLETE


# Cancelling


def test_a_waiting_trial_that_is_cancelled_ends_at_once() -> None:
    study = begin()
    trial = study.add("all", {"x": 0.5}, seed=0)
    study.put_waiting(trial)
    ended = study.cancel(0)
    assert ended is not None
    assert (ended.state, study.trial(0).state, study.counted) == (S.CANCELLED, S.CANCELLED, 0)
    assert study.next_waiting() is None
    assert study.commit()
    assert [each.state for each in study.store.trials(study.record.key, [0])] == [S.CANCELLED]


@pytest.mark.parametrize("how", ["lost", "lost unclaimed", "retried", "cancelled", "complete"])
def test_a_trial_in_flight_that_is_cancelled_ends_with_its_last_attempt(how: str) -> None:
    """It does not wait again; a result that comes first stands."""
    study = begin()
    trial = sent(study)
    study.tell(started(trial))
    assert study.cancel(0) is None
    events: Mapping[str, Event] = {
        "lost": lost(trial),
        "lost unclaimed": lost(trial, claimed=False),
        "retried": result(trial, state=S.FAILED, retry=Retry(reason="a quarantine")),
        "cancelled": replace(result(trial), outcome=Outcome(state=S.CANCELLED)),
        "complete": result(trial),
    }
    ended = study.tell(events[how]).trial
    assert ended is not None
    assert ended.state is (S.COMPLETE if how == "complete" else S.CANCELLED)
    assert (study.in_flight, study.next_waiting()) == (0, None)


def test_a_cancelled_trial_with_a_copy_ends_with_the_later_attempt() -> None:
    study = begin()
    first = sent(study)
    study.tell(started(first))
    copy = study.send(study.trial(0), "gpu")
    assert study.cancel(0) is None
    assert study.tell(lost(first)).trial is not None
    assert study.trial(0).state is S.QUEUED
    ended = study.tell(lost(copy, claimed=False)).trial
    assert ended is not None
    assert ended.state is S.CANCELLED
