"""A trial that was copied looks like the oldest of its live attempts; any other is its own only attempt."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from shadho_celery.attempts import Attempts
from shadho_celery.trial import Trial, TrialState

S = TrialState

RUNNING = Trial(
    number=0, subspace="all", params={}, state=S.RUNNING, attempt=1, compute_class="cpu", host="first", started_at=1.0
)


@pytest.fixture
def attempts() -> Attempts:
    return Attempts()


def copied(attempts: Attempts) -> Trial:
    """The trial as a study shows it once it was copied."""
    attempts.add(RUNNING, "gpu")
    return RUNNING.evolve(attempt=2)


def test_a_trial_that_was_not_copied_is_its_own_only_attempt(attempts: Attempts) -> None:
    assert attempts.of(RUNNING) == {1: RUNNING}
    assert attempts.beside(RUNNING) == []
    assert attempts.may_add(RUNNING)
    assert not attempts.is_copy(RUNNING, 2)
    assert attempts.change(RUNNING, RUNNING.evolve(host="other")).host == "other"
    assert not attempts.lose(RUNNING, 1)


def test_a_copy_waits_beside_the_attempt_that_is_shown(attempts: Attempts) -> None:
    trial = copied(attempts)
    assert {number: (one.state, one.compute_class) for number, one in attempts.of(trial).items()} == {
        1: (S.RUNNING, "cpu"),
        2: (S.QUEUED, "gpu"),
    }
    assert [one.attempt for one in attempts.beside(trial)] == [2]
    assert attempts.shown(trial) == trial
    assert not attempts.may_add(trial)
    assert [attempts.is_copy(trial, attempt) for attempt in (1, 2)] == [False, True]


def test_when_the_oldest_is_lost_the_next_one_is_shown_under_the_number_of_the_latest(attempts: Attempts) -> None:
    trial = copied(attempts)
    assert attempts.lose(trial, 1)
    shown = attempts.shown(trial)
    assert (shown.state, shown.compute_class, shown.host, shown.started_at) == (S.QUEUED, "gpu", None, None)
    assert (shown.attempt, attempts.beside(shown), attempts.is_copy(shown, 2)) == (2, [], False)
    assert attempts.may_add(shown)


def test_what_is_lost_with_its_last_attempt_begins_anew(attempts: Attempts) -> None:
    trial = copied(attempts)
    assert [attempts.lose(trial, attempt) for attempt in (1, 2)] == [True, False]
    again = trial.evolve(attempt=3)
    assert attempts.of(again) == {3: again}


def test_what_is_kept_of_live_attempts_is_what_json_knows_and_brings_them_back(attempts: Attempts) -> None:
    trial = copied(attempts)
    attempts.change(trial, attempts.of(trial)[2].evolve(state=S.RUNNING, host="second", started_at=2.0))
    kept = json.loads(json.dumps(attempts.kept(trial)))
    assert kept == attempts.kept(trial)
    again = Attempts()
    again.take_up(replace(trial, live=kept))
    assert again.of(trial) == attempts.of(trial)
    assert again.shown(trial) == trial


def test_of_a_trial_whose_latest_attempt_alone_lives_nothing_needs_to_be_kept(attempts: Attempts) -> None:
    assert attempts.kept(RUNNING) is None
    trial = copied(attempts)
    attempts.lose(trial, 1)
    assert attempts.kept(attempts.shown(trial)) is None
    attempts.take_up(trial)
    assert list(attempts.of(trial)) == [2]


def test_where_the_copy_was_lost_it_is_kept_that_the_first_attempt_lives(attempts: Attempts) -> None:
    trial = copied(attempts)
    attempts.lose(trial, 2)
    again = Attempts()
    again.take_up(replace(trial, live=attempts.kept(trial)))
    assert again.of(trial) == {1: RUNNING}
    assert again.may_add(trial)
    assert again.add(replace(trial, live=attempts.kept(trial)), "gpu").live is None


def test_a_suspect_is_not_to_be_copied_again_in_any_later_attempt(attempts: Attempts) -> None:
    trial = copied(attempts)
    attempts.suspect(trial)
    attempts.lose(trial, 1)
    assert not attempts.may_add(trial)
    attempts.end(trial)
    assert not attempts.may_add(trial)
