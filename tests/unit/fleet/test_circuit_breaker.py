"""What one worker alone fails is held against it; what several fail is the trials' own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import redis
from msgspec.structs import replace

from shadho_celery.core.failures import read_failure
from shadho_celery.core.trial import Memory, Outcome, Result, TrialState
from shadho_celery.fleet.channel import Quarantine
from shadho_celery.fleet.circuit_breaker import MAX_OPINIONS, PATIENCE, CircuitBreaker
from shadho_celery.fleet.redis import flush

S = TrialState

BROKEN = "OSError: no space left on device"
OWN = "ValueError: x is too large"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What follows from a result: whether its trial is tried elsewhere, and whose breakers are set to what."""

    elsewhere: bool = False
    closed: frozenset[str] = frozenset()
    half_open: frozenset[str] = frozenset()
    quarantined: frozenset[str] = frozenset()
    #: the kind of failure that is the trials' own from now on
    known: str | None = None


@dataclass
class Said:
    """Stands in for the quarantine in Redis: what it was told since the last verdict."""

    verdict: Verdict = field(default_factory=Verdict)
    error: redis.RedisError | None = None

    def close(self, worker: str, kind: str | None = None) -> None:
        self._note(closed=self.verdict.closed | {worker}, known=kind)

    def half_open(self, worker: str) -> None:
        self._note(half_open=self.verdict.half_open | {worker})

    def quarantine(self, worker: str) -> None:
        self._note(quarantined=self.verdict.quarantined | {worker})

    def _note(self, **changes: Any) -> None:
        if self.error is not None:
            raise self.error
        self.verdict = Verdict(**{**vars(self.verdict), **changes})


class Judge:
    """A circuit breaker, and what it says in Redis."""

    def __init__(self) -> None:
        self.said = Said()
        self.breaker = CircuitBreaker(cast("Quarantine", self.said))

    def tell(self, result: Result, others: int) -> Verdict:
        """Judge a result while so many workers live that have not run the trial."""
        judged = self.breaker.judge(result, {result.worker, *(f"other {n}" for n in range(others))})
        assert replace(judged, retry=None) == result, "nothing else is changed"
        flush(self.breaker.pending_calls)
        verdict, self.said.verdict = self.said.verdict, Verdict()
        return Verdict(**{**vars(verdict), "elsewhere": judged.retry is not None})


@pytest.fixture
def judge() -> Judge:
    return Judge()


def done(worker: str, number: int, seconds: float = 1.0) -> Result:
    outcome = Outcome(state=S.COMPLETE, loss=0.0, seconds=seconds)
    return Result(number=number, attempt=1, outcome=outcome, at=0.0, worker=worker)


def failed(worker: str, number: int, error: str = BROKEN, seconds: float = 0.0) -> Result:
    outcome = Outcome(state=S.FAILED, error=error, seconds=seconds)
    return Result(number=number, attempt=1, outcome=outcome, at=0.0, worker=worker, host="h1")


def test_a_failure_that_only_one_worker_has_had_is_tried_elsewhere(judge: Judge) -> None:
    assert judge.tell(failed("bad", 0), 1) == Verdict(elsewhere=True)
    retry = judge.breaker.judge(failed("bad", 1), {"bad", "good"}).retry
    assert retry is not None
    assert retry.reason == f"it failed on bad, so another worker tries it: {BROKEN}"
    assert retry.outgrown is None
    assert retry.failed_on == "bad"


def test_a_worker_that_fails_everything_is_quarantined_once_another_has_finished_one_of_three(judge: Judge) -> None:
    for number in range(3):
        assert judge.tell(failed("bad", number), 1).elsewhere
    assert judge.tell(done("good", 0), 0).quarantined == {"bad"}
    [notice] = judge.breaker.notices
    assert notice.startswith("worker bad on h1 is quarantined")
    assert BROKEN in notice
    assert judge.breaker.quarantined == {"bad"}
    assert not judge.tell(done("good", 1), 0).quarantined, "once is enough"
    assert judge.breaker.notices == [notice]


@pytest.mark.parametrize(("failures", "released"), [(["bad"], {"good"}), (["bad", "good"], {"bad", "good"})])
def test_where_all_pause_those_without_an_undecided_failure_go_on_first(
    judge: Judge, failures: list[str], released: set[str]
) -> None:
    for number, worker in enumerate(failures):
        judge.tell(failed(worker, number, f"{worker}: no"), 1)
    judge.breaker.release(["bad", "good"])
    flush(judge.breaker.pending_calls)
    assert judge.said.verdict.closed == released


def test_a_suspect_that_has_finished_nothing_is_not_asked_about_the_failures_of_one_that_has(judge: Judge) -> None:
    judge.tell(done("good", 0), 1)
    for number in (1, 2):
        assert judge.breaker.judge(failed("bad", number), {"bad", "good"}).retry is not None
    assert judge.breaker.judge(failed("good", 3, OWN), {"bad", "good"}).retry is None
    assert judge.breaker.judge(failed("good", 4, OWN + " again"), {"bad", "good", "third"}).retry is not None


def test_a_worker_that_began_to_fail_is_quarantined_after_two_that_others_finish(judge: Judge) -> None:
    for number in range(10):
        judge.tell(done("bad", number), 1)
    for number in (10, 11):
        assert judge.tell(failed("bad", number), 1).elsewhere
    assert not judge.tell(done("good", 10), 1).quarantined
    assert judge.tell(done("good", 11), 1).quarantined == {"bad"}


def test_a_worker_that_fails_every_other_trial_is_quarantined_after_five(judge: Judge) -> None:
    quarantined = []
    for number in range(0, 20, 2):
        judge.tell(done("flaky", number), 1)
        judge.tell(failed("flaky", number + 1), 1)
        quarantined.append(bool(judge.tell(done("good", number + 1), 1).quarantined))
    assert quarantined == [False] * 4 + [True] + [False] * 5


def test_the_breaker_of_a_worker_that_has_only_begun_is_not_closed_by_what_others_finish(judge: Judge) -> None:
    judge.tell(failed("bad", 0), 1)
    assert judge.tell(done("good", 0), 1) == Verdict(half_open=frozenset({"bad"}))
    judge.tell(failed("bad", 2), 1)
    assert judge.tell(done("good", 2), 1).quarantined == {"bad"}


def test_the_breaker_of_a_worker_whose_failure_nobody_shares_is_half_open_although_its_trial_fails_elsewhere_too(
    judge: Judge,
) -> None:
    for worker in ("a", "b"):
        judge.tell(failed(worker, 9, OWN), 1)
    assert judge.tell(failed("bad", 0, BROKEN), 1).elsewhere
    verdict = judge.tell(failed("good", 0, OWN), 1)
    assert verdict.closed == {"good"}
    assert verdict.half_open == {"bad"}


def test_a_worker_that_seldom_fails_alone_is_not_quarantined(judge: Judge) -> None:
    for number in range(0, 300, 30):
        for other in range(number + 1, number + 30):
            judge.tell(done("w", other), 1)
        assert judge.tell(failed("w", number), 1).elsewhere
        assert judge.tell(done("other", number), 1) == Verdict(half_open=frozenset({"w"}))


def test_a_failure_that_two_workers_have_had_is_known_and_believed_from_then_on(judge: Judge) -> None:
    assert judge.tell(failed("a", 0, OWN), 1).elsewhere
    assert judge.tell(failed("b", 0, OWN), 1) == Verdict(closed=frozenset({"a", "b"}), known=read_failure(OWN).cause)
    for number in range(1, 20):
        assert not judge.tell(failed("a", number, OWN), 1).elsewhere
    assert judge.tell(failed("a", 20, BROKEN), 1).elsewhere, "another kind of failure"


def test_a_trial_that_fails_in_two_ways_on_two_workers_gets_a_third_opinion(judge: Judge) -> None:
    assert judge.tell(failed("bad", 0, BROKEN), 2).elsewhere
    assert judge.tell(failed("good", 0, OWN), 2).elsewhere
    verdict = judge.tell(failed("third", 0, "RuntimeError: neither"), 2)
    assert not verdict.elsewhere
    assert verdict.known is None, "it is still one worker's word"


def test_without_another_worker_every_failure_is_believed_at_once_until_another_joins(judge: Judge) -> None:
    for number in range(3):
        assert judge.tell(failed("only", number), 0) == Verdict(closed=frozenset({"only"}))
    assert judge.tell(failed("only", 3), 1).elsewhere, "one worker's failures do not show that trials cause them"
    assert judge.tell(done("good", 3), 1).quarantined == {"only"}


def test_a_trial_that_no_other_worker_has_taken_and_that_fails_again_is_believed(judge: Judge) -> None:
    assert [judge.tell(failed("w", 0), 1).elsewhere for _ in range(2)] == [True, False]


def test_without_a_worker_that_has_not_failed_it_a_trials_failure_is_believed(judge: Judge) -> None:
    able = {"one", "two"}
    assert judge.breaker.judge(failed("one", 0, BROKEN), able).retry is not None
    assert judge.breaker.judge(failed("two", 0, OWN), able).retry is None


def test_a_trial_that_fails_differently_everywhere_is_believed_on_the_third_worker(judge: Judge) -> None:
    verdicts = [judge.tell(failed(f"w{n}", 0, f"OSError: {'x' * n}"), 9).elsewhere for n in range(MAX_OPINIONS)]
    assert verdicts == [True] * (MAX_OPINIONS - 1) + [False]


def test_a_failure_that_took_longer_than_trials_take_is_believed(judge: Judge) -> None:
    judge.tell(done("good", 0, seconds=10.0), 1)
    assert not judge.tell(failed("w", 1, seconds=10.0 * PATIENCE + 1), 1).elsewhere
    assert judge.tell(failed("w", 2, seconds=10.0), 1).elsewhere


def test_a_failure_within_a_second_is_tried_elsewhere_however_short_the_trials_are(judge: Judge) -> None:
    judge.tell(done("good", 0, seconds=0.01), 1)
    assert judge.tell(failed("w", 1, seconds=1.0), 1).elsewhere


@pytest.mark.parametrize(
    ("worker", "changes"),
    [("w", {"out_of_memory": Memory.HOST}), ("w", {"rank_lost": True}), ("w", {"state": S.CANCELLED}), ("", {})],
    ids=["out of memory", "rank lost", "cancelled", "of an unknown worker"],
)
def test_other_ends_say_nothing_of_a_worker(judge: Judge, worker: str, changes: Mapping[str, Any]) -> None:
    for number in range(5):
        result = failed(worker, number)
        assert judge.tell(replace(result, outcome=replace(result.outcome, **changes)), 1) == Verdict()
    assert judge.tell(done("good", 0), 1) == Verdict()


def test_a_breaker_is_closed_only_when_nothing_is_left_to_tell(judge: Judge) -> None:
    judge.tell(failed("w", 0, OWN), 1)
    judge.tell(failed("w", 1, BROKEN), 1)
    assert judge.tell(failed("v", 0, OWN), 1).closed == {"v"}
    assert judge.tell(failed("v", 1, BROKEN), 1).closed == {"v", "w"}


def test_where_no_other_worker_is_left_breakers_are_closed(judge: Judge) -> None:
    judge.breaker.release(["v", "w"])
    flush(judge.breaker.pending_calls)
    assert judge.said.verdict == Verdict(closed=frozenset({"v", "w"}))


def test_what_was_decided_while_redis_is_away_is_said_when_it_is_back(judge: Judge) -> None:
    judge.said.error = redis.ConnectionError("cut off")
    for number in range(3):
        judge.breaker.judge(failed("bad", number), {"bad", "good"})
    judge.breaker.judge(done("good", 0), {"bad", "good"})
    with pytest.raises(redis.ConnectionError):
        flush(judge.breaker.pending_calls)
    assert judge.breaker.quarantined == {"bad"}
    judge.said.error = None
    flush(judge.breaker.pending_calls)
    assert judge.said.verdict == Verdict(quarantined=frozenset({"bad"}))
    judge.said.verdict = Verdict()
    flush(judge.breaker.pending_calls)
    assert judge.said.verdict == Verdict(), "once"
