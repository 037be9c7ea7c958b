"""The scheduler wants slots of declared classes as long as trials are left for them, and none for machines' ends."""

from __future__ import annotations

import math
from typing import Any

from hyperopt import hp
from services.searching import SimulatedSearch

from shadho_celery.core.files import ClassSpec
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Lost, Outcome, Started, TrialState
from shadho_celery.scheduler.scheduler import ALONE_SECONDS
from shadho_celery.scheduler.wishes import HOLD_SECONDS, LOOK_SECONDS, Demand
from shadho_celery.space.compile import compile_space
from shadho_celery.study.state import Limits


def search(slots: int = 0, **given: Any) -> SimulatedSearch:
    """A study of trials of ten seconds that declares up to four workers of two slots."""

    def play(trial: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=TrialState.COMPLETE, loss=0.5, seconds=10.0)

    made = SimulatedSearch(
        compile_space({"x": hp.uniform("x", 0, 1)}),
        play,
        {"cloud": slots},
        settings=StudySettings(sampler="random", speculate=False),
        limits=Limits(**{"trials": 20, **given}),
        clock=ManualClock(1000.0),
        seed=0,
    )
    spec = {"cloud": ClassSpec(slots=2, max_workers=4, startup_seconds=60.0)}
    scheduler = made.scheduler
    scheduler.demand = Demand(spec, made.study, scheduler.cost_model, scheduler.proposals)
    return made


def wanted(made: SimulatedSearch) -> int:
    return made.scheduler.wanted_slots.get("cloud", 0)


def test_without_a_worker_the_slots_that_the_trials_need_are_wanted_up_to_the_declared_most() -> None:
    for trials, slots in ((1, 1), (3, 3), (20, 8)):
        made = search(trials=trials)
        made.scheduler.turn()
        assert made.scheduler.wanted_slots == {"cloud": slots}


def test_a_class_whose_workers_are_too_narrow_for_every_trial_is_not_wanted() -> None:
    made = search(slots=1)
    scheduler = made.scheduler
    spec = {"narrow": ClassSpec(slots=2), "wide": ClassSpec(slots=4)}
    scheduler.proposals.width = lambda params: 4
    for widest, is_wanted in (({"narrow": 2, "wide": 4}, False), ({"narrow": 2000}, True), ({}, True)):
        demand = Demand(spec, made.study, scheduler.cost_model, scheduler.proposals, widest=widest)
        demand.update([], 5.0, math.inf)
        assert demand.wanted["wide"] > 0
        assert (demand.wanted["narrow"] > 0) is is_wanted
    # A live worker may have more slots than the spec says.
    demand = Demand(spec, made.study, scheduler.cost_model, scheduler.proposals, widest={"narrow": 2, "wide": 2})
    demand.update([ComputeClass(name="narrow", slots=4)], 5.0, math.inf)
    assert demand.wanted["narrow"] > 0 == demand.wanted["wide"]


def test_until_a_trial_has_ended_a_worker_of_each_class_is_wanted_however_late_it_comes() -> None:
    made = search()
    scheduler = made.scheduler
    spec = {"cloud": ClassSpec(slots=2, max_workers=4), "slow": ClassSpec(slots=3, startup_seconds=3000.0)}
    scheduler.demand = Demand(spec, made.study, scheduler.cost_model, scheduler.proposals)
    scheduler.turn()
    assert scheduler.wanted_slots == {"cloud": 8, "slow": 3}


def test_at_the_end_only_the_slots_that_run_trials_are_wanted() -> None:
    made = search(slots=8).run()
    assert wanted(made) == 8, "a number stays wanted for a while"
    made.clock.sleep(HOLD_SECONDS + 1)
    made.scheduler.update_classes()
    made.scheduler.fill()
    assert made.scheduler.wanted_slots == {"cloud": 0}


def test_a_paused_or_stopped_study_wants_no_new_slots() -> None:
    for act in ("pause", "stop"):
        made = search()
        getattr(made.scheduler, act)()
        made.scheduler.update_classes()
        made.scheduler.fill()
        assert wanted(made) == 0


def fleet(trials: int) -> SimulatedSearch:
    """A study on one live slot of a class, beside two declared classes without workers."""
    made = search(slots=1, trials=trials)
    scheduler = made.scheduler
    spec = {"large": ClassSpec(), "cloud": ClassSpec(), "small": ClassSpec()}
    scheduler.demand = Demand(spec, made.study, scheduler.cost_model, scheduler.proposals)
    return made


def new(made: SimulatedSearch) -> int:
    """Return the number of wanted slots of the classes without workers."""
    return sum(slots for name, slots in made.scheduler.wanted_slots.items() if name != "cloud")


def test_no_more_new_slots_are_wanted_than_trials_are_to_be_sent_and_none_while_a_slot_is_idle() -> None:
    made, seen = fleet(40), list[int]()
    while not made.scheduler.done:
        made.scheduler.turn()
        unsent = 40 - made.study.counted - made.study.in_flight
        seen.append(new(made))
        assert seen[-1] <= unsent
    assert max(seen) > 10
    assert seen[-1] == 0, "although more were wanted less than HOLD_SECONDS before"
    made = fleet(1)
    made.scheduler.turn()
    assert new(made) == 0, "the live slot has the only trial"


def test_new_slots_are_not_wanted_any_more_as_soon_as_a_study_is_paused_or_stopped() -> None:
    for act in ("pause", "stop"):
        made = fleet(40)
        made.scheduler.turn()
        made.clock.sleep(LOOK_SECONDS)
        made.scheduler.fill()
        assert new(made) > 10
        getattr(made.scheduler, act)()
        made.scheduler.fill()
        assert new(made) == 0
        assert wanted(made) == 1, "a live slot stays wanted for a while"


def test_only_declared_classes_are_wanted_and_each_at_least_for_the_trials_in_its_queue() -> None:
    made = search(slots=3, trials=40)
    scheduler = made.scheduler
    scheduler.demand = Demand({"other": ClassSpec()}, made.study, scheduler.cost_model, scheduler.proposals)
    scheduler.turn()
    assert scheduler.wanted_slots.keys() == {"other"}
    # No second is left, so the linear program wants nothing.
    for live, slots in ((3, 3), (2, 2), (0, 0)):
        demand = Demand({"cloud": ClassSpec()}, made.study, scheduler.cost_model, scheduler.proposals)
        assert made.study.count(TrialState.QUEUED, compute_class="cloud") >= 3
        demand.update([ComputeClass(name="cloud", slots=live)], 5.0, 0.0)
        assert demand.wanted == {"cloud": slots}


def test_the_trials_that_are_still_to_be_sent_are_known_before_they_are_drawn() -> None:
    made = search(slots=3, trials=20)
    assert made.scheduler.sendable == 20
    made.scheduler.turn()
    assert made.scheduler.sendable == 20 - made.study.in_flight < 20
    made.scheduler.pause()
    assert made.scheduler.sendable == 0
    assert search(trials=None, seconds=1e6).scheduler.sendable == math.inf


def test_a_worker_that_would_come_after_the_time_limit_is_not_wanted() -> None:
    made = search(seconds=50.0)
    made.scheduler.turn()
    assert wanted(made) == 0


def vanished(attempt: int) -> Lost:
    return Lost(number=0, attempt=attempt, reason="its machine has vanished", vanished=True)


def test_one_vanished_machine_is_replaced() -> None:
    made = search(slots=1, trials=1)
    made.scheduler.turn()
    made.scheduler.tell([vanished(1)])
    made.clock.sleep(LOOK_SECONDS)
    made.scheduler.update_classes()
    made.scheduler.fill()
    assert made.study.vanishing == []
    assert wanted(made) == 1


def test_no_machine_is_started_for_a_trial_whose_last_two_machines_vanished_and_it_fails_with_that_reason() -> None:
    made = search(slots=1, trials=1)
    scheduler, clock = made.scheduler, made.clock
    scheduler.turn()
    scheduler.tell([vanished(1)])
    scheduler.fill()
    scheduler.tell([vanished(2)])
    assert made.study.vanishing == [0]
    scheduler.executor.classes = list  # type: ignore[method-assign]
    for seconds in (HOLD_SECONDS, ALONE_SECONDS - HOLD_SECONDS - 1):
        clock.sleep(seconds)
        scheduler.update_classes()
        scheduler.fill()
        assert len(made.study.trials) == 0
    assert scheduler.wanted_slots == {"cloud": 0}
    clock.sleep(2.0)
    scheduler.update_classes()
    scheduler.fill()
    [trial] = made.study.trials
    assert trial.state is TrialState.FAILED
    assert "no machine is started for it" in str(trial.outcome.error)


def test_a_trial_whose_last_two_machines_vanished_runs_after_all_others() -> None:
    made = search(slots=1, trials=4)
    scheduler = made.scheduler
    scheduler.turn()
    for attempt in (1, 2):
        scheduler.tell([vanished(attempt)])
        scheduler.fill()
        assert [trial.number for trial in made.study.sent] == ([0] if attempt == 1 else [1])


def test_a_trial_that_was_lost_otherwise_since_gets_a_machine() -> None:
    made = search(slots=1, trials=1)
    made.run(lambda each: each.study.count(TrialState.RUNNING) == 1)
    made.scheduler.tell([vanished(1)])
    made.scheduler.fill()
    made.scheduler.tell([Started(number=0, attempt=2, host="h", at=1.0)])
    made.scheduler.tell([Lost(number=0, attempt=2, reason="its worker was silent")])
    made.scheduler.fill()
    made.scheduler.tell([vanished(3)])
    assert made.study.vanishing == []
