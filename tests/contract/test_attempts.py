"""One rule, in Python for the study and in Lua for Redis: an attempt that ends badly leaves its trial to its others.

The first attempt that ends well ends its trial, and with it the others; so does the last one, however it ends.
"""

from __future__ import annotations

from typing import Any, Protocol

import pytest
from services.channels import Channel

from shadho_celery.core.attempts import Attempts
from shadho_celery.core.trial import WELL, Memory, Outcome, Result, Started, TrialState
from shadho_celery.fleet.channel import Claim, SchedulerChannel, keys

STUDY, NUMBER = "k1", 0

#: what may come of an attempt's end: the trial ends with it, lives on in the others, or had ended before
OVER, GOES_ON, REFUSED = "over", "goes on", "refused"

OUTCOMES = {
    "completes": Outcome(state=TrialState.COMPLETE, loss=0.5),
    "is pruned": Outcome(state=TrialState.PRUNED),
    "fails": Outcome(state=TrialState.FAILED, error="ValueError: x"),
    "wants memory": Outcome(state=TrialState.FAILED, error="MemoryError", out_of_memory=Memory.HOST),
    "is cancelled": Outcome(state=TrialState.CANCELLED, error="cancelled"),
}


class Rule(Protocol):
    """Who decides which attempts of one trial live, and whether it has ended."""

    def start(self, attempt: int) -> None:
        """An attempt begins to run."""

    def lose(self, attempt: int) -> None:
        """An attempt will not end any more."""

    def end(self, attempt: int, outcome: Outcome) -> str:
        """An attempt has ended; what becomes of the trial."""

    def live(self) -> list[int]:
        """The attempts that live."""


class InPython:
    """`core.trial`, asked as a study asks: of a trial that has ended nothing is told any more."""

    def __init__(self) -> None:
        self._attempts: Attempts[str] = Attempts()
        self._is_over = False

    def start(self, attempt: int) -> None:
        self._attempts.put(NUMBER, attempt, "known")

    def lose(self, attempt: int) -> None:
        self._attempts.lose(NUMBER, attempt)

    def end(self, attempt: int, outcome: Outcome) -> str:
        if self._is_over:
            return REFUSED
        self._is_over = self._attempts.finish(NUMBER, attempt, well=outcome.state in WELL)
        return OVER if self._is_over else GOES_ON

    def live(self) -> list[int]:
        return sorted(self._attempts.of(NUMBER))


class InRedis:
    """The channel's scripts, as workers and their scheduler call them; each attempt runs on a worker of its own."""

    def __init__(self, client: Any, *, gives_up: bool) -> None:
        """An attempt is lost as its lease runs out, or else its scheduler `gives_up` on it."""
        self._client = client
        self._gives_up = gives_up
        self._attempts, self._leases = keys(STUDY, "attempts", "leases")
        self.scheduler = SchedulerChannel(client, STUDY)

    def claim(self, attempt: int) -> Claim:
        started = Started(number=NUMBER, attempt=attempt, host="h", at=0.0)
        return self._worker(attempt).finish_and_claim(STUDY, None, started, delivery=f"d{attempt}")[1]

    def start(self, attempt: int) -> None:
        assert self.claim(attempt) is Claim.TAKEN

    def lose(self, attempt: int) -> None:
        if self._gives_up:
            self.scheduler.give_up([(NUMBER, attempt)], "its worker is gone", claimed=True)
            return
        self._client.zadd(self._leases, {f"{NUMBER}.{attempt}": 1})
        assert self.scheduler.ended_leases() == [(NUMBER, attempt)]
        self.scheduler.forget([(NUMBER, attempt)])

    def end(self, attempt: int, outcome: Outcome) -> str:
        result = Result(number=NUMBER, attempt=attempt, outcome=outcome, at=1.0)
        is_taken, _ = self._worker(attempt).finish_and_claim(STUDY, result, None, delivery=f"d{attempt}", watched=True)
        if not is_taken:
            return REFUSED
        return OVER if self._client.hget(self._attempts, str(NUMBER)).startswith("done:") else GOES_ON

    def live(self) -> list[int]:
        members = self._client.zrangebyscore(self._leases, "(0", "+inf")
        return sorted(int(member.partition(".")[2]) for member in members)

    def results(self) -> list[int]:
        """Attempts whose results have come through to the scheduler."""
        return [event.attempt for event in self.scheduler.drain(0) if isinstance(event, Result)]

    def _worker(self, attempt: int) -> Channel:
        return Channel(self._client, lease_seconds=600.0, worker=f"w{attempt}")


@pytest.fixture(params=["in Python", "in Redis, by leases that run out", "in Redis, by giving up"])
def rule(request: pytest.FixtureRequest) -> Rule:
    if request.param == "in Python":
        return InPython()
    return InRedis(request.getfixturevalue("client"), gives_up=request.param.endswith("giving up"))


#: what happens to which attempt, and for an end what becomes of the trial; and the attempts that live afterwards
Step = tuple[str, int, str, list[int]]


def starts(attempt: int, *live: int) -> Step:
    return "starts", attempt, "", [*live]


def is_lost(attempt: int, *live: int) -> Step:
    return "is lost", attempt, "", [*live]


def ends(how: str, attempt: int, then: str, *live: int) -> Step:
    return how, attempt, then, [*live]


BOTH = [starts(1, 1), starts(2, 1, 2)]
#: the ways to end badly
BADLY = ["fails", "wants memory", "is cancelled"]
CASES: dict[str, list[Step]] = {
    "a single attempt completes": [starts(1, 1), ends("completes", 1, OVER)],
    "a single attempt is pruned": [starts(1, 1), ends("is pruned", 1, OVER)],
    **{f"a single attempt {how}": [starts(1, 1), ends(how, 1, OVER)] for how in BADLY},
    **{
        f"the {word} of two {how}, the other completes": [
            *BOTH,
            ends(how, one, GOES_ON, 3 - one),
            ends("completes", 3 - one, OVER),
        ]
        for how in BADLY
        for word, one in (("first", 1), ("copy", 2))
    },
    "both end badly, the copy first": [*BOTH, ends("fails", 2, GOES_ON, 1), ends("fails", 1, OVER)],
    "both end badly, the first one first": [*BOTH, ends("fails", 1, GOES_ON, 2), ends("is cancelled", 2, OVER)],
    "the first good result wins, later ones are refused": [
        *BOTH,
        ends("completes", 2, OVER),
        ends("completes", 1, REFUSED),
        ends("fails", 1, REFUSED),
    ],
    "what is pruned wins, too": [*BOTH, ends("is pruned", 1, OVER), ends("completes", 2, REFUSED)],
    "an attempt that ended badly cannot end its trial a second time": [
        *BOTH,
        ends("fails", 1, GOES_ON, 2),
        ends("completes", 2, OVER),
        ends("completes", 1, REFUSED),
    ],
    "the first is lost while the copy runs, which completes": [*BOTH, is_lost(1, 2), ends("completes", 2, OVER)],
    "the first is lost while the copy runs, which fails": [*BOTH, is_lost(1, 2), ends("fails", 2, OVER)],
    "the copy is lost while the first runs, which fails": [*BOTH, is_lost(2, 1), ends("fails", 1, OVER)],
    "the copy fails, the first is lost, a third attempt completes": [
        *BOTH,
        ends("fails", 2, GOES_ON, 1),
        is_lost(1),
        starts(3, 3),
        ends("completes", 3, OVER),
    ],
    "both are lost, what is sent anew fails": [*BOTH, is_lost(1, 2), is_lost(2), starts(3, 3), ends("fails", 3, OVER)],
    "the copy is lost, a third attempt fails, the first still runs": [
        *BOTH,
        is_lost(2, 1),
        starts(3, 1, 3),
        ends("fails", 3, GOES_ON, 1),
        ends("completes", 1, OVER),
    ],
    "of three, two end badly and one completes": [
        *BOTH,
        starts(3, 1, 2, 3),
        ends("fails", 3, GOES_ON, 1, 2),
        ends("fails", 1, GOES_ON, 2),
        ends("completes", 2, OVER),
    ],
    "of three, one completes and the others are refused": [
        *BOTH,
        starts(3, 1, 2, 3),
        ends("completes", 3, OVER),
        ends("completes", 1, REFUSED),
        ends("fails", 2, REFUSED),
    ],
}


@pytest.mark.parametrize("steps", CASES.values(), ids=CASES)
def test_an_attempt_that_ends_badly_leaves_its_trial_to_its_other_attempts(rule: Rule, steps: list[Step]) -> None:
    taken = []
    for what, attempt, then, live in steps:
        if what == "starts":
            rule.start(attempt)
        elif what == "is lost":
            rule.lose(attempt)
        else:
            assert rule.end(attempt, OUTCOMES[what]) == then, (what, attempt)
            taken += [attempt] if then != REFUSED else []
        assert rule.live() == live, (what, attempt)
    if isinstance(rule, InRedis):
        assert rule.results() == taken, "what was refused does not reach the scheduler"


def test_redis_leaves_the_trial_to_a_copy_that_nobody_has_claimed_yet_once_its_scheduler_says_so(client: Any) -> None:
    """Redis knows of an attempt when it is claimed, the scheduler when it is sent: it knows that one lives."""
    known, redis = Attempts[str](), InRedis(client, gives_up=False)
    for attempt in (1, 2):
        known.put(NUMBER, attempt, "sent")
    redis.start(1)
    assert redis.end(1, OUTCOMES["fails"]) == OVER
    assert redis.claim(2) is Claim.REFUSED
    assert not known.finish(NUMBER, 1, well=False)
    redis.scheduler.reopen([(NUMBER, 1)])
    redis.start(2)
    assert redis.end(2, OUTCOMES["completes"]) == OVER


def test_a_copy_is_claimed_once_only_though_the_first_attempt_is_given_up(client: Any) -> None:
    redis = InRedis(client, gives_up=True)
    for attempt in (1, 2):
        redis.start(attempt)
    redis.lose(1)
    started = Started(number=NUMBER, attempt=2, host="h", at=0.0)
    _, again = Channel(client, worker="another").finish_and_claim(STUDY, None, started, delivery="another")
    assert again is Claim.REFUSED
