"""Every executor that has two machines runs a trial on both of them, if asked to, and brings one good result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from contract.test_executors import PATIENCE, Rig, all_end, collect, ends, queued, run
from services.families import fleet_of

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Result, Started, TrialState
from shadho_celery.simulation.executor import SimulatedExecutor

#: losses of trials that take long in their first attempt, that fail in the second one before the first has ended, and
#: that take long in every attempt
STUCK, FRAGILE, ENDLESS = 7.5, 6.5, 9.0


@dataclass(frozen=True, kw_only=True)
class Pair(Rig):
    """An executor with two machines, each of which serves a class."""

    elsewhere: str


@pytest.fixture
def rig() -> Iterator[Pair]:
    def play(attempt: Attempt, compute_class: str) -> Outcome:
        x, which = attempt.params["x"], attempt.attempt
        if (x, which) == (FRAGILE, 2):
            return Outcome(state=TrialState.FAILED, error="the second one fails", seconds=3.0)
        seconds = {(STUCK, 1): 60.0, (FRAGILE, 1): 6.0, (ENDLESS, which): 60.0}.get((x, which), 3.0)
        return Outcome(state=TrialState.COMPLETE, loss=x, seconds=seconds)

    executor = SimulatedExecutor(fleet_of({"gpu": 2, "cpu": 1}), play, ManualClock())
    yield Pair(executor=executor, compute_class="gpu", elsewhere="cpu", catches_running=True)
    executor.close()


def copied(rig: Pair, number: int, x: float) -> None:
    """Have a trial run, and another attempt of it sent elsewhere."""
    first = queued(rig, number, x)
    rig.executor.submit([first])
    begun: list[Event] = []
    for _ in range(PATIENCE):
        begun += rig.executor.poll(1.0)
        if begun:
            break
    assert [type(event) for event in begun] == [Started]
    rig.executor.submit([first.evolve(attempt=2, compute_class=rig.elsewhere)])


def test_of_two_attempts_of_a_trial_the_first_to_end_well_ends_both(rig: Pair) -> None:
    copied(rig, 40, STUCK)
    events = collect(rig, all_end(1))
    assert [(type(event), event.attempt) for event in events] == [(Started, 2), (Result, 2)]
    result = events[-1]
    assert isinstance(result, Result)
    assert (result.outcome.state, result.outcome.loss, result.compute_class) == (
        TrialState.COMPLETE,
        STUCK,
        rig.elsewhere,
    )
    # The slot of the other one is free again.
    results = run(rig, [queued(rig, number) for number in range(50, 54)])
    assert sorted(result.number for result in results) == list(range(50, 54))


def test_an_attempt_that_fails_leaves_the_trial_to_the_other(rig: Pair) -> None:
    def ended_well(events: list[Event]) -> bool:
        return any(isinstance(event, Result) and event.outcome.state is TrialState.COMPLETE for event in events)

    copied(rig, 41, FRAGILE)
    *before, last = ends(collect(rig, ended_well))
    assert all(event.attempt == 2 for event in before)
    assert isinstance(last, Result)
    assert (last.attempt, last.outcome.state, last.outcome.loss) == (1, TrialState.COMPLETE, FRAGILE)


def test_both_attempts_of_a_trial_are_taken_back_where_it_is_not_wanted(rig: Pair) -> None:
    copied(rig, 42, ENDLESS)
    rig.executor.cancel([42], running=True)
    events = ends(collect(rig, all_end(2)))
    assert sorted(event.attempt for event in events) == [1, 2]
    assert all(isinstance(event, Lost) or event.outcome.state is TrialState.CANCELLED for event in events)
