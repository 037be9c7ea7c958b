"""The first attempt that ends well ends its trial; one that does not leaves the trial to the attempts that live on."""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from shadho_celery.core.attempts import Attempts


@pytest.fixture
def attempts() -> Attempts[str]:
    """Trial 7 was copied, trial 3 was not."""
    live: Attempts[str] = Attempts()
    live.put(7, 1, "first")
    live.put(3, 5, "alone")
    live.put(7, 2, "copy")
    return live


def test_trials_and_attempts_come_in_the_order_in_which_they_were_sent(attempts: Attempts[str]) -> None:
    assert list(attempts.numbers) == [7, 3]
    assert list(attempts) == ["first", "copy", "alone"]
    assert len(attempts) == 2, "it counts trials"
    assert dict(attempts.of(7)) == {1: "first", 2: "copy"}


def test_what_is_not_known_is_not_there(attempts: Attempts[str]) -> None:
    assert dict(attempts.of(8)) == {}
    assert (attempts.find(8, 1), attempts.find(7, 3), attempts.find(7, 2)) == (None, None, "copy")
    assert len(attempts) == 2, "asking enters nothing"


def test_what_is_put_again_takes_the_place_of_what_was_known_and_keeps_its_turn(attempts: Attempts[str]) -> None:
    attempts.put(7, 1, "started")
    assert list(attempts) == ["started", "copy", "alone"]


def test_a_lost_attempt_leaves_its_trial_to_the_others_and_the_last_one_takes_it_away(
    attempts: Attempts[str],
) -> None:
    assert [attempts.lose(7, attempt) for attempt in (1, 1, 2, 2)] == [False, False, True, True]
    assert attempts.lose(3, 5)
    assert attempts.lose(9, 1)
    assert (list(attempts), list(attempts.numbers), len(attempts)) == ([], [], 0)


def test_what_is_sent_after_all_were_lost_begins_anew(attempts: Attempts[str]) -> None:
    for attempt in (1, 2):
        attempts.lose(7, attempt)
    attempts.put(7, 3, "again")
    assert dict(attempts.of(7)) == {3: "again"}
    assert list(attempts.numbers) == [3, 7], "the one sent last is at the end"


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_ends_well_ends_its_trial_and_with_it_the_others(attempts: Attempts[str], attempt: int) -> None:
    assert attempts.finish(7, attempt, well=True)
    assert list(attempts) == ["alone"]


@pytest.mark.parametrize("attempt", [1, 2])
def test_an_attempt_that_does_not_leaves_the_trial_to_those_that_live(attempts: Attempts[str], attempt: int) -> None:
    assert not attempts.finish(7, attempt, well=False)
    assert list(attempts.of(7)) == [3 - attempt]
    assert attempts.finish(7, 3 - attempt, well=False), "the last one ends it, however it ends"
    assert list(attempts) == ["alone"]


def test_an_attempt_after_which_none_lives_ends_its_trial_however_it_ends(attempts: Attempts[str]) -> None:
    assert attempts.finish(3, 5, well=False)
    assert list(attempts.numbers) == [7]


def test_the_good_result_of_an_attempt_that_was_given_up_ends_its_trial(attempts: Attempts[str]) -> None:
    """Nobody else has told yet."""
    attempts.lose(7, 1)
    assert attempts.finish(7, 1, well=True)
    assert list(attempts.of(7)) == []
    assert attempts.finish(7, 2, well=True), "its trial has ended: that it is recorded once is the study's part"


def test_a_bad_result_that_is_heard_again_changes_nothing(attempts: Attempts[str]) -> None:
    """Events come again after a crash between their record and their confirmation."""
    assert not attempts.finish(7, 1, well=False)
    assert not attempts.finish(7, 1, well=False)
    assert list(attempts.of(7)) == [2]
    attempts.lose(7, 2)
    assert not attempts.finish(7, 1, well=False), "the trial waits for its next attempt"


def test_whatever_comes_in_whatever_order_no_attempt_lives_that_has_ended() -> None:
    news = [("lose", 1), ("lose", 2), ("bad", 1), ("bad", 2), ("well", 1), ("well", 2)]
    for order in itertools.permutations(news):
        attempts: Attempts[int] = Attempts()
        attempts.put(0, 1, 1)
        attempts.put(0, 2, 2)
        told: set[int] = set()
        for kind, attempt in order:
            told.add(attempt)
            end = attempts.lose if kind == "lose" else partial(attempts.finish, well=kind == "well")
            is_repeated = kind == "bad" and attempt not in attempts.of(0)
            is_over = end(0, attempt)
            assert not (is_over and is_repeated)
            assert is_repeated or (not is_over) is bool(attempts.of(0))
            assert bool(attempts.of(0)) is bool(len(attempts))
            assert told.isdisjoint(attempts.of(0))
