"""The books of what is in flight."""

from __future__ import annotations

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fleet.in_flight import InFlight, Sent


def in_flight(*pairs: tuple[int, int]) -> InFlight:
    books = InFlight()
    for number, attempt in pairs:
        books.add(Sent(number, attempt, "cpu", 0.0))
    return books


def test_a_trial_is_in_the_books_until_its_last_attempt_is_struck_out() -> None:
    books = in_flight((0, 1), (1, 1), (0, 2))
    assert [(sent.number, sent.attempt) for sent in books] == [(0, 1), (0, 2), (1, 1)]
    books.remove(0, 1)
    assert (books.attempts(0), books.find(0, 1)) == ([2], None)
    books.remove(0)
    assert books.attempts(0) == []
    assert books
    books.remove(1, 1)
    assert not books


def test_to_strike_out_what_is_not_there_changes_nothing() -> None:
    books = in_flight((0, 1))
    books.remove(0, 7)
    books.remove(5)
    assert [sent.attempt for sent in books] == [1]


def test_the_other_host_is_that_of_another_attempt_that_runs() -> None:
    books = in_flight((0, 1), (0, 2))
    copy = Trial(number=0, subspace="all", params={}, state=TrialState.QUEUED, attempt=2)
    assert books.other_host(copy) is None
    for attempt, host in ((1, "here"), (2, "there")):
        sent = books.find(0, attempt)
        assert sent is not None
        sent.claimed, sent.host = True, host
    assert books.other_host(copy) == "here"
