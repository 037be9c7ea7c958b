"""What one worker alone fails is held against it; what several fail is the trials' own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shadho_celery.core.failures import signature
from shadho_celery.core.trial import Result, TrialState
from shadho_celery.fleet.standing import MAX_FAILURES, PATIENCE, Standing, Verdict

S = TrialState

BROKEN = "OSError: no space left on device"
OWN = "ValueError: x is too large"


def done(worker: str, number: int, seconds: float = 1.0) -> Result:
    return Result(number=number, attempt=1, state=S.COMPLETE, loss=0.0, seconds=seconds, at=0.0, worker=worker)


def failed(worker: str, number: int, error: str = BROKEN, seconds: float = 0.0) -> Result:
    return Result(
        number=number, attempt=1, state=S.FAILED, error=error, seconds=seconds, at=0.0, worker=worker, host="h1"
    )


def test_a_failure_that_only_one_worker_has_had_is_tried_elsewhere() -> None:
    assert Standing().tell(failed("bad", 0), 1) == Verdict(elsewhere=True)


def test_a_worker_that_fails_everything_is_fenced_once_another_has_finished_one_of_three() -> None:
    standing = Standing()
    for number in range(3):
        assert standing.tell(failed("bad", number), 1).elsewhere
    assert standing.tell(done("good", 0), 0).fenced == {"bad"}
    assert standing.errors["bad"] == ("h1", BROKEN)
    assert not standing.tell(done("good", 1), 0).fenced, "once is enough"


def test_a_worker_that_began_to_fail_is_fenced_after_two_that_others_finish() -> None:
    standing = Standing()
    for number in range(10):
        standing.tell(done("bad", number), 1)
    for number in (10, 11):
        assert standing.tell(failed("bad", number), 1).elsewhere
    assert not standing.tell(done("good", 10), 1).fenced
    assert standing.tell(done("good", 11), 1).fenced == {"bad"}


def test_a_worker_that_fails_every_other_trial_is_fenced_after_five() -> None:
    standing = Standing()
    fenced = []
    for number in range(0, 20, 2):
        standing.tell(done("flaky", number), 1)
        standing.tell(failed("flaky", number + 1), 1)
        fenced.append(bool(standing.tell(done("good", number + 1), 1).fenced))
    assert fenced == [False] * 4 + [True] + [False] * 5


def test_a_worker_that_has_only_begun_is_not_absolved_by_what_others_finish() -> None:
    standing = Standing()
    standing.tell(failed("bad", 0), 1)
    verdict = standing.tell(done("good", 0), 1)
    assert (verdict.absolved, verdict.on_probation, verdict.fenced) == (frozenset(), {"bad"}, frozenset())
    standing.tell(failed("bad", 2), 1)
    assert standing.tell(done("good", 2), 1).fenced == {"bad"}


def test_a_worker_whose_failure_nobody_shares_is_on_probation_although_its_trial_fails_elsewhere_too() -> None:
    standing = Standing()
    for worker in ("a", "b"):
        standing.tell(failed(worker, 9, OWN), 1)
    assert standing.tell(failed("bad", 0, BROKEN), 1).elsewhere
    verdict = standing.tell(failed("good", 0, OWN), 1)
    assert (verdict.absolved, verdict.on_probation) == ({"good"}, {"bad"})


def test_a_worker_that_seldom_fails_alone_is_not_fenced() -> None:
    standing = Standing()
    for number in range(0, 300, 30):
        for other in range(number + 1, number + 30):
            standing.tell(done("w", other), 1)
        assert standing.tell(failed("w", number), 1).elsewhere
        verdict = standing.tell(done("other", number), 1)
        assert not verdict.fenced
        assert verdict.on_probation == {"w"}


def test_a_failure_that_two_workers_have_had_is_known_and_believed_from_then_on() -> None:
    standing = Standing()
    assert standing.tell(failed("a", 0, OWN), 1).elsewhere
    verdict = standing.tell(failed("b", 0, OWN), 1)
    assert (verdict.elsewhere, verdict.known, verdict.absolved) == (False, signature(OWN), {"a", "b"})
    for number in range(1, 20):
        assert not standing.tell(failed("a", number, OWN), 1).elsewhere
    assert standing.tell(failed("a", 20, BROKEN), 1).elsewhere, "another kind of failure"


def test_a_trial_that_fails_in_two_ways_on_two_workers_gets_a_third_opinion() -> None:
    standing = Standing()
    assert standing.tell(failed("bad", 0, BROKEN), 1).elsewhere
    assert standing.tell(failed("good", 0, OWN), 1).elsewhere
    verdict = standing.tell(failed("good", 0, OWN), 1)
    assert not verdict.elsewhere
    assert verdict.known is None, "it is still one worker's word"


def test_without_another_worker_every_failure_is_believed_at_once() -> None:
    standing = Standing()
    verdict = standing.tell(failed("only", 0), 0)
    assert (verdict.elsewhere, verdict.known, verdict.absolved) == (False, signature(BROKEN), {"only"})


def test_one_worker_may_fail_a_trial_only_so_often() -> None:
    standing = Standing()
    verdicts = [standing.tell(failed("w", 0), 1).elsewhere for _ in range(MAX_FAILURES)]
    assert verdicts == [True] * (MAX_FAILURES - 1) + [False]


def test_a_failure_that_took_longer_than_trials_take_is_believed() -> None:
    standing = Standing()
    standing.tell(done("good", 0, seconds=10.0), 1)
    assert not standing.tell(failed("w", 1, seconds=10.0 * PATIENCE + 1), 1).elsewhere
    assert standing.tell(failed("w", 2, seconds=10.0), 1).elsewhere


@pytest.mark.parametrize(
    "change",
    [lambda r: {"out_of_memory": True}, lambda r: {"state": S.CANCELLED}, lambda r: {"worker": ""}],
    ids=["out of memory", "cancelled", "of an unknown worker"],
)
def test_other_ends_say_nothing_of_a_worker(change: Callable[[Result], dict[str, object]]) -> None:
    from dataclasses import replace

    standing = Standing()
    for number in range(5):
        result = failed("w", number)
        assert standing.tell(replace(result, **change(result)), 1) == Verdict()  # type: ignore[arg-type]
    assert not standing.errors


def test_a_worker_is_absolved_only_when_nothing_is_left_to_tell() -> None:
    standing = Standing()
    standing.tell(failed("w", 0, OWN), 1)
    standing.tell(failed("w", 1, BROKEN), 1)
    assert standing.tell(failed("v", 0, OWN), 1).absolved == {"v"}
    assert standing.tell(failed("v", 1, BROKEN), 1).absolved == {"v", "w"}


TRACE = """Traceback (most recent call last):
  File "{folder}/shadho_celery/context.py", line 107, in call
    returned = objective(params)
  File "{folder}/study.py", line {line}, in objective
    raise {error}
{error}
"""


def test_a_signature_is_the_kind_and_the_place_and_neither_the_folder_nor_the_words() -> None:
    one = signature(TRACE.format(folder="/home/a", line=3, error="ValueError: x is 0.5"))
    assert one == signature(TRACE.format(folder="/mnt/b", line=3, error="ValueError: x is 0.7"))
    assert one != signature(TRACE.format(folder="/home/a", line=4, error="ValueError: x is 0.5"))
    assert one != signature(TRACE.format(folder="/home/a", line=3, error="KeyError: 'x'"))
    assert signature("'loss' is nan") == signature("'other' is nan")
    assert signature("exit code 3") == signature("exit code 4")
    assert signature(None) == signature("") == "no reason"
