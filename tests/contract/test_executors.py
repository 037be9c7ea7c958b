"""Every executor gets its trials run, each to one result, and takes back what it is asked to.

A new executor is one more function in `RIGS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from services.families import fleet_of

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import FINISHED, Attempt, Event, Lost, Outcome, Result, Started, TrialState
from shadho_celery.objective.call import call
from shadho_celery.objective.context import Context, LocalContext
from shadho_celery.scheduler.executors import INLINE_CLASS, Executor, InlineExecutor
from shadho_celery.simulation.executor import SimulatedExecutor

#: polls after which a rig has failed: each may last a second of its clock
PATIENCE = 200


def objective(params: Mapping[str, Any], context: Context) -> Any:
    """Return x as the loss, and half of it and the budget, where there is one, as metrics; fail where x is negative."""
    if params["x"] < 0:
        raise ArithmeticError("x is negative")
    budget = {} if context.budget is None else {"budget": context.budget}
    return {"loss": params["x"], "half": params["x"] / 2, **budget}


@dataclass(frozen=True, kw_only=True)
class Rig:
    """An executor that runs `objective`, and a class that it serves."""

    executor: Executor
    compute_class: str
    #: False where a trial begins and ends within one poll, so that none is ever caught running
    catches_running: bool


@contextmanager
def inline() -> Iterator[Rig]:
    executor = InlineExecutor(objective, lambda params: params)
    yield Rig(executor=executor, compute_class=INLINE_CLASS, catches_running=False)
    executor.close()


@contextmanager
def simulated() -> Iterator[Rig]:
    def play(attempt: Attempt, compute_class: str) -> Outcome:
        outcome = call(objective, lambda: attempt.params, LocalContext(budget=attempt.budget))
        return Outcome(state=outcome.state, loss=outcome.loss, metrics=outcome.metrics, error=outcome.error, seconds=3)

    executor = SimulatedExecutor(fleet_of({"gpu": 2, "cpu": 1}), play, ManualClock())
    yield Rig(executor=executor, compute_class="gpu", catches_running=True)
    executor.close()


RIGS: dict[str, Callable[[], AbstractContextManager[Rig]]] = {"inline": inline, "simulated": simulated}


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    with RIGS[request.param]() as built:
        yield built


def queued(rig: Rig, number: int, x: float = 1.0, attempt: int = 1) -> Attempt:
    return Attempt(number=number, subspace="all", params={"x": x}, attempt=attempt, compute_class=rig.compute_class)


def collect(rig: Rig, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """Poll until the events are `enough`, and a few times more: nothing else must come."""
    events: list[Event] = []
    for _ in range(PATIENCE):
        events += rig.executor.poll(1.0)
        if enough(events):
            break
    else:
        pytest.fail(f"nothing more came after {events}")
    for _ in range(5):
        events += rig.executor.poll(1.0)
    return events


def ends(events: list[Event]) -> list[Result | Lost]:
    return [event for event in events if isinstance(event, (Result, Lost))]


def all_end(number: int) -> Callable[[list[Event]], bool]:
    return lambda events: len(ends(events)) >= number


def run(rig: Rig, attempts: list[Attempt]) -> list[Result]:
    """Results of all trials; an attempt that is lost is followed by the next, as the scheduler would have it."""
    results: list[Result] = []
    while attempts:
        rig.executor.submit(attempts)
        ended = ends(collect(rig, all_end(len(attempts))))
        results += [event for event in ended if isinstance(event, Result)]
        lost = {event.number for event in ended if isinstance(event, Lost)}
        attempts = [each.evolve(attempt=each.attempt + 1) for each in attempts if each.number in lost]
    return results


def test_every_submitted_trial_ends_in_exactly_one_result(rig: Rig) -> None:
    xs = [0.5, -1.0, 2.0, 0.0, -3.0, 7.0]
    results = run(rig, [queued(rig, number, x) for number, x in enumerate(xs)])
    assert Counter(result.number for result in results) == Counter(range(len(xs)))
    for result in results:
        x = xs[result.number]
        assert result.compute_class == rig.compute_class
        outcome = result.outcome
        assert outcome.seconds is not None
        assert outcome.seconds >= 0
        assert outcome.memory is None or outcome.memory > 0
        if x < 0:
            assert outcome.state is TrialState.FAILED
            assert outcome.loss is None
            assert "x is negative" in str(outcome.error)
        else:
            assert result.attempt == 1
            assert (outcome.state, outcome.loss, outcome.metrics) == (TrialState.COMPLETE, x, {"half": x / 2})
            assert outcome.error is None


def test_a_trials_budget_reaches_its_objective_and_without_one_it_has_all(rig: Rig) -> None:
    budgets = [0.25, None, 81.0]
    rig.executor.submit([queued(rig, number).evolve(budget=budget) for number, budget in enumerate(budgets)])
    results = [event for event in collect(rig, all_end(len(budgets))) if isinstance(event, Result)]
    seen = {result.number: result.outcome.metrics.get("budget") for result in results}
    assert seen == dict(enumerate(budgets))


def test_a_trial_starts_once_and_before_its_result(rig: Rig) -> None:
    rig.executor.submit([queued(rig, number) for number in range(5)])
    events = collect(rig, all_end(5))
    for number in range(5):
        of_it = [event for event in events if event.number == number]
        assert [type(event) for event in of_it] == [Started, Result]
        assert {event.attempt for event in of_it} == {1}
        started, result = of_it
        assert isinstance(started, Started)
        assert isinstance(result, Result)
        assert started.at <= result.at
        assert started.host == result.host


def test_trials_submitted_later_run_too(rig: Rig) -> None:
    for number in range(3):
        rig.executor.submit([queued(rig, number)])
        [end] = ends(collect(rig, all_end(1)))
        assert (end.number, type(end)) == (number, Result)


def test_cancel_takes_back_what_nobody_has_claimed(rig: Rig) -> None:
    rig.executor.submit([queued(rig, number, x=8.0) for number in range(12)])
    rig.executor.cancel(range(12), running=False)
    events = collect(rig, all_end(12))
    assert sorted(event.number for event in ends(events)) == list(range(12))
    lost = [event for event in events if isinstance(event, Lost)]
    assert lost
    assert not any(event.claimed for event in lost)
    assert all(event.outcome.state is TrialState.COMPLETE for event in events if isinstance(event, Result))
    started = {event.number for event in events if isinstance(event, Started)}
    assert started.isdisjoint(event.number for event in lost)


def test_cancel_leaves_the_others_alone(rig: Rig) -> None:
    rig.executor.submit([queued(rig, number) for number in range(8)])
    rig.executor.cancel([7, 99], running=True)
    events = ends(collect(rig, all_end(8)))
    assert sorted(event.number for event in events) == list(range(8))
    assert [event.number for event in events if isinstance(event, Lost)] == [7]
    assert all(event.outcome.state is TrialState.COMPLETE for event in events if isinstance(event, Result))


def test_with_running_the_running_trials_end_cancelled_without_a_loss(rig: Rig) -> None:
    rig.executor.submit([queued(rig, 0)])
    events = list(rig.executor.poll(0.0))
    assert isinstance(events[0], Started)
    # Inline a trial has ended by then.
    assert (len(events) == 1) is rig.catches_running
    rig.executor.cancel([0], running=True)
    for event in collect(rig, lambda _: True):
        assert isinstance(event, Result)
        assert (event.outcome.state, event.outcome.loss) == (TrialState.CANCELLED, None)
        events.append(event)
    assert [type(event) for event in events] == [Started, Result]


def test_a_trial_taken_back_runs_when_it_is_sent_again(rig: Rig) -> None:
    rig.executor.submit([queued(rig, number) for number in range(9)])
    rig.executor.cancel([8], running=True)
    collect(rig, all_end(9))
    rig.executor.submit([queued(rig, 8, attempt=2)])
    [end] = ends(collect(rig, all_end(1)))
    assert isinstance(end, Result)
    assert (end.number, end.attempt, end.outcome.state) == (8, 2, TrialState.COMPLETE)


def test_a_trial_left_running_by_an_earlier_scheduler_ends_in_an_event(rig: Rig) -> None:
    left = queued(rig, 3, attempt=2).evolve(state=TrialState.RUNNING, host="gone", started_at=0.0)
    rig.executor.submit([left])
    events = collect(rig, all_end(1))
    [end] = ends(events)
    assert (end.number, end.attempt) == (3, 2)
    assert not any(isinstance(event, Started) for event in events), "it is watched, not sent"
    known = ("gone", "any more", "no record")
    assert isinstance(end, Result) or any(words in end.reason for words in known)


def test_a_trial_for_a_class_that_has_no_workers_ends_in_an_event(rig: Rig) -> None:
    """As after a resume on other machines."""
    rig.executor.submit([queued(rig, 0).evolve(compute_class="dismantled")])
    [end] = ends(collect(rig, all_end(1)))
    assert isinstance(end, Result) or not end.claimed


def test_there_is_a_class_with_room_before_and_after_trials_ran(rig: Rig) -> None:
    def check() -> None:
        classes = rig.executor.classes()
        assert len({c.name for c in classes}) == len(classes)
        [served] = [c for c in classes if c.name == rig.compute_class]
        assert served.slots >= 1
        assert served.busy == 0
        assert served.workers >= 1
        assert served.share > 0

    check()
    rig.executor.submit([queued(rig, number) for number in range(4)])
    collect(rig, all_end(4))
    check()


def test_with_nothing_to_do_nothing_happens(rig: Rig) -> None:
    assert list(rig.executor.poll(0.0)) == []
    assert list(rig.executor.poll(1.0)) == []
    rig.executor.submit([])
    rig.executor.cancel([], running=True)
    assert list(rig.executor.poll(1.0)) == []


def test_a_result_is_final(rig: Rig) -> None:
    """Cancelled after its end, a trial stays ended; its result's state is one that ends trials."""
    rig.executor.submit([queued(rig, 0)])
    [end] = ends(collect(rig, all_end(1)))
    assert isinstance(end, Result)
    assert end.outcome.state in FINISHED
    rig.executor.cancel([0], running=True)
    assert list(rig.executor.poll(1.0)) == []
