"""A study sends no more trials at a time than `at_once` allows, copies included, and wants no more slots than that."""

from __future__ import annotations

from typing import Any

import pytest
from hyperopt import hp
from services.cases import cases
from services.searching import SimulatedSearch

from shadho_celery.core.files import ClassSpec
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.scheduler.wishes import HOLD_SECONDS, LOOK_SECONDS, Demand
from shadho_celery.space.compile import compile_space
from shadho_celery.study.state import Limits


def search(slots: dict[str, int], at_once: int | None, *, slow: int = -1, ahead: int = 0, **given: Any) -> Any:
    """A study of trials of ten seconds; trial number `slow` takes an hour where it runs first."""

    def play(trial: Attempt, compute_class: str) -> Outcome:
        seconds = 3600.0 if (trial.number, trial.attempt) == (slow, 1) else 10.0
        return Outcome(state=TrialState.COMPLETE, loss=trial.params["x"], seconds=seconds)

    return SimulatedSearch(
        compile_space({"x": hp.uniform("x", 0, 1)}),
        play,
        slots,
        settings=StudySettings(**{"sampler": "random", **given}),
        limits=Limits(trials=40, at_once=at_once),
        clock=ManualClock(1000.0),
        seed=0,
        ahead=ahead,
    )


def most_at_once(made: Any) -> int:
    most = 0

    def note(search: Any) -> bool:
        nonlocal most
        most = max(most, len(search.study.attempts))
        return False

    made.run(until=note)
    assert made.study.counted == 40
    return most


@pytest.mark.slow
@cases("slots", [{"cpu": 8}, {"gpu": 2, "cpu": 6}, {"cpu": 2}])
@cases("policy", ["cost", "fifo"])
@cases("ahead", [0, 4])
def test_no_more_trials_are_in_flight(slots: dict[str, int], policy: str, ahead: int) -> None:
    assert most_at_once(search(slots, 3, policy=policy, ahead=ahead)) <= 3
    assert most_at_once(search(slots, 1, policy=policy, ahead=ahead)) == 1


def test_as_many_run_as_are_allowed() -> None:
    assert most_at_once(search({"cpu": 8}, 3)) == 3
    assert most_at_once(search({"cpu": 8}, None)) == 8


@pytest.mark.slow
def test_a_copy_of_a_late_trial_counts() -> None:
    """With one trial at a time, the late one has no copy; with two, it gets one once nothing else is to be sent."""
    assert most_at_once(search({"a": 2, "b": 2}, 1, slow=39)) == 1
    made = search({"a": 2, "b": 2}, 2, slow=39)
    assert most_at_once(made) == 2
    assert made.study.trial(39).attempt == 2


def test_the_number_may_change_while_the_study_runs() -> None:
    made = search({"cpu": 8}, 1)
    made.run(until=lambda search: search.study.counted == 5)
    made.scheduler.change_limits(Limits(trials=40, at_once=4))
    assert most_at_once(made) == 4


def test_what_is_announced_as_still_to_be_sent_fits_beside_the_running_ones() -> None:
    made = search({"cpu": 8}, 3)
    assert made.scheduler.sendable == 3
    made.run(until=lambda search: len(search.study.attempts) == 3)
    assert made.scheduler.sendable == 0


@pytest.mark.parametrize("live", [0, 8])
def test_no_more_slots_are_wanted_of_workers_on_demand(live: int) -> None:
    """Of live ones, too: those that are not wanted may end."""
    made = search({"cloud": live}, 3, speculate=False)
    scheduler = made.scheduler
    spec = {"cloud": ClassSpec(slots=2, max_workers=8), "other": ClassSpec(slots=2, max_workers=8)}
    scheduler.demand = Demand(spec, made.study, scheduler.cost_model, scheduler.proposals)
    wanted = []

    def note(search: Any) -> bool:
        wanted.append(sum(search.scheduler.wanted_slots.values()))
        return bool(search.study.counted >= 30) or search.clock.now() > 1000.0 + HOLD_SECONDS + 3 * LOOK_SECONDS

    made.run(until=note)
    assert max(wanted) == 3
