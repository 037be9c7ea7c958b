"""A trial takes the slots that its study file says; and a scheduler reserves a class until it has them, all or none."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.families import fleet_of
from services.searching import SimulatedSearch

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.settings import SlotsSetting, StudySettings, read_settings
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Memory, Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.placement.memory import MemoryFit
from shadho_celery.placement.model import CostModel
from shadho_celery.placement.widths import Reservations, Widths, make_width, widest
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import Change, Play, SimulatedExecutor
from shadho_celery.space.compile import Space, compile_space
from shadho_celery.space.split import split
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import Limits, StudyState

GANGS = compile_space(
    {"x": hp.uniform("x", 0, 1), "kind": hp.choice("kind", [{"replicas": 3}, {"replicas": 1}]), "two": 2.0}
)


def replicas(params: Mapping[str, Any]) -> int:
    return int(params["kind"]["replicas"])


def width(slots: SlotsSetting, drawn: Mapping[str, Any] | None = None) -> int:
    return make_width(slots, split(GANGS))(drawn or {"x": 0.5, "kind": 0})


def test_a_number_holds_for_all_trials() -> None:
    assert width(4) == 4


def test_a_key_is_looked_up_in_what_the_objective_gets() -> None:
    assert width("two") == 2


def test_a_function_is_given_what_the_objective_gets() -> None:
    assert [width(replicas, {"x": 0.1, "kind": kind}) for kind in (0, 1)] == [3, 1]


@pytest.mark.parametrize(
    "slots",
    [
        0,
        5000,
        10**5000,
        "nothing",
        "kind",
        "x",
        lambda params: None,
        lambda params: params["missing"],
        lambda params: sys.exit(3),
        lambda params: True,
    ],
    ids=[
        "none",
        "too many",
        "too many digits",
        "no such key",
        "no number",
        "no whole number",
        "nothing",
        "raises",
        "exits",
        "truth",
    ],
)
def test_what_gives_no_number_of_slots_is_refused_before_the_study_begins(slots: Any) -> None:
    with pytest.raises(UsageError, match="STUDY\\['slots'\\]"):
        make_width(slots, split(GANGS))


def test_the_widest_trial_is_found_among_all_subspaces() -> None:
    subspaces = split(GANGS)
    assert widest(make_width(replicas, subspaces), subspaces) == 3
    assert widest(make_width(1, subspaces), subspaces) == 1


def lasting(trial: Attempt, compute_class: str) -> Outcome:
    return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=1 + trial.seed % 7)


def search(
    space: Space,
    slots: Mapping[str, int | Mapping[str, Any]],
    width: SlotsSetting,
    trials: int,
    play: Play = lasting,
    turns: int = 10_000,
    ahead: int = 0,
    **facts: Any,
) -> tuple[StudyState, list[dict[str, int]]]:
    """A study on simulated classes, and the slots that its trials held on each after every turn, up to so many turns.

    `facts` are those of the fleet.
    """
    record = StudyRecord(key="k", name="n", module="", seed=1, space={}, created_at=0.0)
    clock = ManualClock()
    study = StudyState(MemoryStore(), record, 1, clock=clock)

    executor = SimulatedExecutor(fleet_of(slots, **facts), play, clock, ahead)
    settings = StudySettings(sampler="random", slots=width, policy="fifo")
    scheduler = make_scheduler(Plan.of(space, settings, Limits(trials=trials)), study, executor)
    held: list[dict[str, int]] = []
    while not scheduler.done and len(held) < turns:
        scheduler.turn()
        taken: dict[str, int] = defaultdict(int)
        for trial in study.sent:
            taken[str(trial.compute_class)] += trial.slots
        held.append(dict(taken))
        assert len(held) < 10_000, "it does not end"
    return study, held


def test_gangs_and_single_trials_share_four_slots_and_all_finish() -> None:
    """With gangs of three slots, a study never uses more slots than there are, and no trial waits for ever."""
    study, held = search(GANGS, {"cpu": 4}, replicas, 40)
    assert {trial.slots for trial in study} == {1, 3}
    assert study.count(TrialState.COMPLETE) == 40
    assert max(taken.get("cpu", 0) for taken in held) == 4


def test_a_gang_is_not_overtaken_for_ever_by_trials_of_one_slot() -> None:
    """All of them are sent in the order they were drawn but for those that the reserved slots are kept from."""
    study, _ = search(GANGS, {"cpu": 4}, replicas, 60)
    begun = sorted(study, key=lambda trial: (trial.started_at or 0.0, trial.number))
    late = [place - trial.number for place, trial in enumerate(begun) if trial.slots == 3]
    assert max(late) <= 4


def test_a_gang_goes_to_the_class_that_has_its_slots() -> None:
    study, _ = search(GANGS, {"small": 2, "large": 3}, replicas, 30)
    assert {trial.compute_class for trial in study if trial.slots == 3} == {"large"}
    assert {trial.compute_class for trial in study if trial.slots == 1} == {"small", "large"}


def test_two_classes_are_not_reserved_for_one_gang() -> None:
    """While one is reserved, the other goes on with trials of one slot: it holds none back for the same gang."""
    study, held = search(GANGS, {"a": 3, "b": 3}, replicas, 60)
    assert study.count(TrialState.COMPLETE) == 60
    assert {trial.compute_class for trial in study if trial.slots == 3} == {"a", "b"}
    # Slots of both classes are kept from trials that wait at the same moment only if two gangs wait.
    idle_in_both = sum(taken.get("a", 0) < 3 and taken.get("b", 0) < 3 for taken in held[:-20])
    assert idle_in_both < len(held) / 3


def test_gangs_that_run_out_of_memory_where_no_larger_class_is_wide_enough_fail_and_the_rest_goes_on() -> None:
    def play(trial: Attempt, compute_class: str) -> Outcome:
        if trial.slots == 3 and trial.params["x"] > 0.5:
            return Outcome(state=TrialState.FAILED, error="MemoryError", out_of_memory=Memory.HOST, seconds=1.0)
        return lasting(trial, compute_class)

    classes = {"large": {"workers": 2, "memory_gib": 32}, "small": {"workers": 4, "memory_gib": 8}}
    study, _ = search(GANGS, classes, replicas, 40, play)
    assert study.counted == len(study) == 40
    assert {t.state is TrialState.FAILED for t in study if t.slots == 3 and t.params["x"] > 0.5} == {True}
    assert study.count(TrialState.FAILED) < sum(trial.slots == 3 for trial in study)


@pytest.mark.parametrize("at", [5, 25])
def test_on_a_class_that_has_become_narrower_than_the_gang_it_is_reserved_for_the_others_go_on(at: int) -> None:
    """All those of one slot end, and the gangs wait for a class that is wide enough."""
    changes = [Change(at=float(at), compute_class="cpu", workers=-2)]
    study, _ = search(GANGS, {"cpu": 4}, replicas, 60, turns=800, changes=changes)
    assert len(study) == 60
    assert {trial.slots for trial in study if trial.state is TrialState.WAITING} == {3}
    assert study.counted + study.count(TrialState.WAITING) == 60
    assert all(trial.state is TrialState.COMPLETE for trial in study if trial.slots == 1)


@pytest.mark.parametrize("slots", [{"a": 5, "b": 4}, {"small": 2, "large": 3}], ids=str)
def test_no_trial_goes_back_and_forth_between_queues_while_a_class_is_reserved(slots: dict[str, int]) -> None:
    study, _ = search(GANGS, slots, replicas, 150, ahead=4)
    assert study.count(TrialState.COMPLETE) == 150
    assert max(trial.attempt for trial in study) <= 2


def test_few_trials_that_are_too_wide_for_the_classes_of_a_resumed_study_are_drawn() -> None:
    """Although such trials have succeeded before, none can be placed now."""
    space = compile_space(hp.choice("m", [{"g": 8, "w": hp.uniform("w", 0, 1)}, {"g": 1, "v": hp.uniform("v", 0, 1)}]))

    def begin(slots: Mapping[str, int], limits: Limits, **more: Any) -> SimulatedSearch:
        settings = StudySettings(sampler="tpe", speculate=False, slots=lambda params: int(params["g"]))
        clock = ManualClock(more.pop("began", 0.0))
        return SimulatedSearch(space, lasting, slots, settings=settings, limits=limits, clock=clock, seed=1, **more)

    first = begin({"wide": 8, "a": 4, "b": 4}, Limits(trials=60)).run()
    wide = first.study.count(TrialState.COMPLETE, subspace="m=8")
    first.close()
    again = begin({"a": 4, "b": 4}, Limits(trials=160), began=1e5, store=first.store, resume=True)
    for _ in range(400):
        again.scheduler.turn()
    assert again.study.count(TrialState.WAITING) < 40
    assert again.study.count(TrialState.COMPLETE, subspace="m=8") == wide > 0
    assert again.study.count(TrialState.COMPLETE) >= 120


# Searched widths


class OnGpus(SimulatedExecutor):
    """Its classes have GPUs of 8 GiB."""

    def classes(self) -> Sequence[ComputeClass]:
        return [
            replace(
                each, gpu_memory=2**33, machines=tuple(replace(machine, gpu_memory=2**33) for machine in each.machines)
            )
            for each in super().classes()
        ]


class AnnouncedLate(OnGpus):
    """The announcements of its machines were made before their trials ended."""

    def classes(self) -> Sequence[ComputeClass]:
        return [
            replace(each, machines=tuple(replace(machine, busy=machine.slots) for machine in each.machines))
            for each in super().classes()
        ]


def chosen(
    seconds: Mapping[int, float],
    trials: int = 60,
    workers: int = 2,
    play: Play | None = None,
    gpus: Any = (1, 2, 4),
    executor_type: type[SimulatedExecutor] = OnGpus,
    steps: int = 0,
) -> StudyState:
    """A study on `workers` of four slots whose trials take these seconds by their number of slots, and report steps."""
    record = StudyRecord(key="k", name="n", module="", seed=1, space={}, created_at=0.0)
    clock = ManualClock()
    study = StudyState(MemoryStore(), record, 1, clock=clock)

    def lasts(trial: Attempt, compute_class: str) -> Outcome:
        return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds[trial.slots])

    executor = executor_type(fleet_of({"gpu": {"workers": workers, "slots": 4}}, steps=steps), play or lasts, clock)
    space = compile_space({"x": hp.uniform("x", 0, 1)})
    settings = StudySettings(sampler="random", gpus=[*gpus])
    scheduler = make_scheduler(Plan.of(space, settings, Limits(trials=trials)), study, executor)
    scheduler.turn_seconds = max(20.0, min(seconds.values(), default=20.0) / 2)
    for _ in range(10_000):
        if scheduler.done:
            return study
        scheduler.turn()
    raise AssertionError("it does not end")


def widths_of(study: StudyState) -> list[int]:
    """The numbers of slots of the trials in the order of their starts."""
    begun = [trial for trial in study.trials if trial.started_at is not None]
    return [trial.slots for trial in sorted(begun, key=lambda trial: (trial.started_at or 0.0, trial.number))]


def test_trials_that_gain_nothing_from_a_second_gpu_get_one() -> None:
    """Slots whose trial has just ended are free though their worker has not announced it yet."""
    study = chosen({1: 100, 2: 100, 4: 100}, workers=1, executor_type=AnnouncedLate)
    assert widths_of(study)[-30:].count(1) >= 28


@pytest.mark.parametrize("second", [0.001, 3600.0])
def test_each_width_is_tried_whatever_the_unit_of_time(second: float) -> None:
    """Also on a single machine, where one trial of the widest ends before another is begun."""
    study = chosen({1: 3 * second, 2: 2 * second, 4: second}, trials=12, workers=1)
    assert {*widths_of(study)} == {1, 2, 4}


def test_trials_that_are_slow_on_few_gpus_get_many() -> None:
    """On fewer than four, they take more slot seconds than on four."""
    assert widths_of(chosen({1: 1000, 2: 400, 4: 100}))[-30:].count(4) >= 28


def test_the_widest_is_tried_first_and_few_trials_at_a_time_on_other_widths() -> None:
    """One of each, and one more in the slot that these leave free on their machine."""
    study = chosen({1: 5000, 2: 2500, 4: 100}, trials=100, workers=8)
    assert widths_of(study)[0] == 4
    early = Counter(trial.slots for trial in study.trials if (trial.started_at or 0.0) < 2500.0)
    assert early[1] + early[2] <= 3
    assert early[4] > 50


@pytest.mark.parametrize("steps", [0, 20])
def test_a_width_is_used_once_reports_show_that_it_costs_least(steps: int) -> None:
    """Trials on four slots end when the first one on one slot is at three quarters of its steps."""
    study = chosen({1: 2000, 2: 2000, 4: 1500}, trials=60, workers=8, steps=steps)
    first = min(trial.started_at or 0.0 for trial in study.trials)
    early = sum(trial.slots == 1 for trial in study.trials if (trial.started_at or 0.0) < first + 2000.0)
    assert early > 20 if steps else early <= 3


def test_a_width_that_runs_out_of_memory_gives_way_to_the_next() -> None:
    def play(trial: Attempt, compute_class: str) -> Outcome:
        if trial.slots < 4:
            return Outcome(state=TrialState.FAILED, error="out", out_of_memory=Memory.GPU, seconds=10.0)
        return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=100.0)

    study = chosen({}, play=play)
    assert study.count(TrialState.COMPLETE) == 60
    assert {trial.slots for trial in study.trials} == {4}
    tried = [trial for trial in study.trials if trial.outgrown]
    assert 1 <= len(tried) < 20
    assert {name for trial in tried for name in str(trial.outgrown).split(",")} <= {"gpu*1", "gpu*2"}


@pytest.mark.slow
def test_a_trial_whose_reserved_class_proves_too_small_for_it_runs_elsewhere() -> None:
    """Its machine is reserved no longer once the memory model knows that."""
    memory = {"small": 2**33, "large": 2**35}

    class OnTwoKinds(SimulatedExecutor):
        def classes(self) -> Sequence[ComputeClass]:
            sized = [replace(each, gpu_memory=memory[each.name]) for each in super().classes()]
            of = {each.name: [replace(one, gpu_memory=memory[each.name]) for one in each.machines] for each in sized}
            return [replace(each, machines=tuple(of[each.name])) for each in sized]

    generator = np.random.default_rng(9)

    def play(trial: Attempt, compute_class: str) -> Outcome:
        if float(trial.params["x"]) * 40 * 2**30 / trial.slots**0.5 > memory[compute_class] * 0.6:
            return Outcome(state=TrialState.FAILED, error="out", out_of_memory=Memory.GPU, seconds=40.0)
        return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=(50 + 400 * generator.random()) / trial.slots**0.9)

    clock = ManualClock()
    record = StudyRecord(key="k", name="n", module="", seed=9, space={}, created_at=0.0)
    study = StudyState(MemoryStore(), record, 1, clock=clock)
    executor = OnTwoKinds(fleet_of({name: {"workers": 2, "slots": 4} for name in ("small", "large")}), play, clock)
    settings = StudySettings(sampler="random", gpus=[1, 2, 4])
    space = compile_space({"x": hp.uniform("x", 0, 1)})
    scheduler = make_scheduler(Plan.of(space, settings, Limits(trials=80)), study, executor)
    scheduler.turn_seconds = 5.0
    for _ in range(3000):
        if not scheduler.done:
            scheduler.turn()
    assert study.counted == 80


def test_a_width_that_no_worker_has_is_not_chosen() -> None:
    assert {*widths_of(chosen({2: 100, 4: 60}, gpus=[2, 4, 8]))} == {2, 4}


def test_a_machine_does_not_wait_for_a_width_that_gains_little() -> None:
    """Four GPUs cost 5 % less than one. To wait until four are free at a time would cost more."""
    study = chosen({1: 100, 2: 50, 4: 24}, trials=200, workers=1)
    took = sum(trial.slots * (trial.outcome.seconds or 0.0) for trial in study.trials)
    ends = max(trial.finished_at or 0.0 for trial in study.trials)
    assert took / (4 * ends) > 0.9


def test_a_wide_trial_costs_more_for_a_free_slot_if_others_would_wait_with_it() -> None:
    """Although none would wait on the other machine, whose slots become free together."""
    record = StudyRecord(key="k", name="n", module="", seed=1, space={}, created_at=0.0)
    study = StudyState(MemoryStore(), record, 1, clock=ManualClock())
    a, b = (ComputeClass(name="gpu", slots=4, hosts={host: 4}, widest=4, host=host) for host in "ab")
    fleet = ComputeClass(name="gpu", slots=8, hosts={"a": 4, "b": 4}, widest=4, machines=(a, b))
    subspaces = split(compile_space({"x": hp.uniform("x", 0, 1)}))
    name, params = subspaces[0].name, {"x": 0.5}
    model = CostModel(subspaces, widths=[4])
    model.see([fleet])
    widths = Widths(study, model, MemoryFit(model, ()), Reservations(study))
    widths.see([fleet])

    def excess() -> float:
        return float(widths.excess([study.add(name, params, seed=0)], b)[0])

    study.send(study.add(name, params, seed=0, slots=4), "gpu", only_on="a")
    outcome = Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=100.0)
    model.tell(
        study.add(name, params, seed=0, slots=4).evolve(compute_class="gpu", state=outcome.state, outcome=outcome)
    )
    assert excess() == 0.0
    for _ in range(3):
        study.send(study.add(name, params, seed=0), "gpu", only_on="b")
    assert excess() > 0.1


@pytest.mark.parametrize("gpus", [[], [0], [1, "two"], [1.5], [True], [-2, 4]], ids=str)
def test_a_list_without_whole_numbers_is_refused(gpus: Any) -> None:
    with pytest.raises(UsageError, match="gpus"):
        read_settings({"gpus": gpus})


def test_a_list_for_slots_or_by_money_is_refused() -> None:
    with pytest.raises(UsageError, match="slots"):
        read_settings({"slots": [1, 2]})
    with pytest.raises(UsageError, match="one number of GPUs"):
        read_settings({"gpus": [1, 2], "place_by": "money", "deadline": "4h", "trials": 10})
