"""The attempts of one message, apart from Redis."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest

from shadho_celery.core.payload import Payload
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, Result, Started, TrialState
from shadho_celery.fleet.channel import Claim
from shadho_celery.node.leases import PATIENCE_SECONDS, Bundle

ATTEMPTS = [Attempt(number=number, attempt=1, subspace="all", params={}) for number in range(4)]


def result(number: int) -> Result:
    return Result(number=number, attempt=1, outcome=Outcome(state=TrialState.COMPLETE, loss=0.5), at=1.0)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def channel() -> MagicMock:
    """Takes all results and all claims; `sent` has the numbers of both, of each call."""
    channel = MagicMock(sent=[])

    def exchange(
        study: str, results: Sequence[Result], claims: Sequence[Started], delivery: str, *, watched: bool
    ) -> tuple[list[bool], list[Claim]]:
        channel.sent.append(([each.number for each in results], [each.number for each in claims]))
        return [True for _ in results], [Claim.TAKEN for _ in claims]

    channel.exchange.side_effect = exchange
    return channel


@pytest.fixture
def bundle(channel: MagicMock, clock: ManualClock) -> Bundle:
    return Bundle(channel, Payload(study="s", module="m", attempts=ATTEMPTS), ATTEMPTS, clock, "h")


def test_results_travel_with_the_next_claims(bundle: Bundle, channel: MagicMock) -> None:
    assert bundle.exchange(1) == [Claim.TAKEN]
    assert bundle.next() == ATTEMPTS[0]
    assert bundle.next() is None
    bundle.add(result(0))
    assert bundle.exchange(9) == [Claim.TAKEN] * 3
    assert [bundle.next() for _ in range(4)] == [*ATTEMPTS[1:], None]
    for number in (1, 2, 3):
        bundle.add(result(number))
    assert bundle.exchange(0) == []
    assert bundle.exchange(0) == []
    assert channel.sent == [([], [0]), ([0], [1, 2, 3]), ([1, 2, 3], [])]


def test_what_waits_behind_a_long_trial_is_given_back_and_the_results_before_it_are_sent(
    bundle: Bundle, channel: MagicMock, clock: ManualClock
) -> None:
    recall = MagicMock()
    bundle.exchange(4)
    bundle.next()
    bundle.add(result(0))
    assert bundle.next() == ATTEMPTS[1], "the long one"
    assert bundle.waiting() == ATTEMPTS[2:]
    bundle.relieve(recall)
    assert len(channel.sent) == 1, "not yet"
    clock.sleep(PATIENCE_SECONDS)
    bundle.relieve(recall)
    assert channel.sent[1:] == [([0], [])]
    [(study, given_back, _)] = [call.args for call in channel.give_back.call_args_list]
    assert (study, given_back) == ("s", [(2, 1), (3, 1)])
    assert bundle.next() is None
    bundle.relieve(recall)
    assert channel.give_back.call_count == recall.call_count == 1


def test_what_did_not_reach_redis_is_sent_again(bundle: Bundle, channel: MagicMock) -> None:
    bundle.exchange(1)
    bundle.add(result(0))
    working, channel.exchange.side_effect = channel.exchange.side_effect, ConnectionError
    with pytest.raises(ConnectionError):
        bundle.exchange(2)
    channel.exchange.side_effect = working
    assert bundle.exchange(2) == [Claim.TAKEN] * 2
    assert channel.sent == [([], [0]), ([0], [1, 2])]


def test_what_is_refused_is_not_run(bundle: Bundle, channel: MagicMock) -> None:
    channel.exchange.side_effect = None
    channel.exchange.return_value = ([], [Claim.TAKEN, Claim.REFUSED, Claim.TAKEN, Claim.BREAKER_OPEN])
    assert bundle.exchange(4)[-1] is Claim.BREAKER_OPEN
    assert [bundle.next() for _ in range(3)] == [ATTEMPTS[0], ATTEMPTS[2], None]
    assert [*bundle.unclaimed] == [*ATTEMPTS[3:]]
