"""What a scheduler knows of the attempts that it has sent; that they are kept by trial is told of in core."""

from __future__ import annotations

from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.fleet.in_flight import InFlight, Sent


def attempt(number: int, which: int) -> Attempt:
    return Attempt(number=number, attempt=which, subspace="all", params={}, compute_class="cpu")


def in_flight(*pairs: tuple[int, int]) -> InFlight:
    known = InFlight()
    for number, which in pairs:
        known.put(number, which, Sent(attempt(number, which), 0.0))
    return known


def test_a_trial_is_in_flight_until_its_last_attempt_has_gone() -> None:
    known = in_flight((0, 1), (1, 1), (0, 2))
    assert [sent.key for sent in known] == [(0, 1), (0, 2), (1, 1)]
    assert not known.lose(0, 1)
    assert (list(known.of(0)), known.find(0, 1)) == ([2], None)
    assert known.lose(0, 2)
    assert (list(known.of(0)), bool(known)) == ([], True)
    assert known.finish(1, 1, well=True)
    assert not known


def test_to_take_away_what_is_not_there_changes_nothing() -> None:
    known = in_flight((0, 1))
    assert not known.lose(0, 7)
    assert known.lose(5, 1)
    assert known.finish(5, 1, well=True)
    assert [sent.key for sent in known] == [(0, 1)]


def test_the_other_host_is_that_of_another_attempt_that_runs() -> None:
    known = in_flight((0, 1), (0, 2))
    copy = attempt(0, 2)
    assert known.other_host(copy) is None
    for which, host in ((1, "here"), (2, "there")):
        sent = known.find(0, which)
        assert sent is not None
        assert not sent.is_claimed
        sent.attempt = sent.attempt.evolve(state=TrialState.RUNNING, host=host)
        assert sent.is_claimed
    assert known.other_host(copy) == "here"
    assert known.other_host(attempt(1, 1)) is None
