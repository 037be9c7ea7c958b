"""New trials are those that seed and limits name; what fits nobody who asks is kept, and not too much of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hyperopt import hp

from shadho_celery.assignment import FifoPolicy
from shadho_celery.clock import ManualClock
from shadho_celery.hardware import ComputeClass
from shadho_celery.limits import Limits
from shadho_celery.memory_store import MemoryStore
from shadho_celery.rounds import Endless, Rounds, SuccessiveHalving
from shadho_celery.samplers import make_sampler
from shadho_celery.shares import UniformShares
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split
from shadho_celery.store import StudyRecord
from shadho_celery.study import Study
from shadho_celery.supply import TOO_WIDE, WAITING_PER_SUBSPACE, Supply
from shadho_celery.trial import Trial, TrialState
from shadho_celery.widths import Width

SUBSPACES = split(compile_space(hp.choice("model", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])))


@pytest.fixture
def study() -> Study:
    record = StudyRecord(key="k", name="n", module="", seed=5, space={}, created_at=0.0)
    return Study(MemoryStore(), record, 1, clock=ManualClock())


def supply_of(
    study: Study,
    rounds: Rounds | None = None,
    subspaces: Sequence[Subspace] = SUBSPACES,
    width: Width = lambda params: 2 if "a" in params else 1,
) -> Supply:
    return Supply(
        study,
        subspaces,
        policy=FifoPolicy(),
        shares=UniformShares({subspace.name: subspace.probability for subspace in subspaces}),
        rounds=rounds or Endless(),
        make_sampler=lambda subspace, entropy: make_sampler("random", subspace, entropy),
        limits=Limits(trials=100),
        width=width,
    )


def fits(trial: Trial) -> bool:
    return True


def test_a_supply_made_anew_goes_on_where_the_last_one_ended(study: Study) -> None:
    first = supply_of(study)
    for _ in range(3):
        first.ask("cpu", fits, math.inf)
    second = supply_of(study)
    for _ in range(3):
        second.ask("cpu", fits, math.inf)
    whole = Study(MemoryStore(), study.record, 1, clock=ManualClock())
    supply = supply_of(whole)
    for _ in range(6):
        supply.ask("gpu", fits, math.inf)
    assert list(whole) == list(study)


def test_a_trial_takes_the_slots_that_its_params_say(study: Study) -> None:
    supply = supply_of(study)
    asked = [supply.ask("cpu", fits, math.inf) for _ in range(10)]
    assert {(trial.slots, "a" in trial.params) for trial in asked if trial} == {(2, True), (1, False)}


def test_what_fits_nobody_is_held_back_up_to_a_few_of_each_subspace(study: Study) -> None:
    supply = supply_of(study)
    assert supply.ask("cpu", lambda trial: False, math.inf) is None
    assert study.count(TrialState.WAITING) == WAITING_PER_SUBSPACE * len(SUBSPACES)
    assert supply.ask("cpu", fits, math.inf) is None, "those that wait come first"
    assert len(list(iter(study.next_waiting, None))) == WAITING_PER_SUBSPACE * len(SUBSPACES)


def narrow(trial: Trial) -> bool:
    return trial.slots == 1


def mixed_widths(study: Study, width: Width) -> Supply:
    """The supply of a space with one subspace, for a class of one slot."""
    subspaces = split(compile_space({"x": hp.uniform("x", 0, 1)}))
    supply = supply_of(study, subspaces=subspaces, width=width)
    supply.see([ComputeClass(name="cpu", slots=1)])
    return supply


def test_what_is_too_wide_for_every_class_keeps_no_slot_from_narrower_trials(study: Study) -> None:
    supply = mixed_widths(study, lambda params: 1 if params["x"] < 0.3 else 2)
    for _ in range(30):
        trial = supply.ask("cpu", narrow, math.inf)
        assert trial is not None
        study.queue(trial, "cpu")
    assert study.count(TrialState.WAITING) == len(study) - 30 > 30


def test_what_is_too_wide_does_not_take_the_places_of_what_waits_for_memory(study: Study) -> None:
    supply = mixed_widths(study, lambda params: 1 if params["x"] < 0.3 else 2)
    for _ in range(5):
        assert supply.ask("cpu", lambda trial: False, math.inf) is None
    assert sum(trial.slots == 1 for trial in study) == WAITING_PER_SUBSPACE


def test_where_every_trial_is_too_wide_only_a_few_are_made(study: Study) -> None:
    supply = mixed_widths(study, lambda params: 2)
    for _ in range(100):
        assert supply.ask("cpu", narrow, math.inf) is None
    assert len(study) == WAITING_PER_SUBSPACE


def test_where_a_sampler_proposes_nothing_narrow_enough_it_is_not_asked_for_ever(study: Study) -> None:
    supply = mixed_widths(study, lambda params: 1 if params["x"] < 0.3 else 2)
    [sampler] = supply.samplers.values()
    sampler.ask = lambda index: {"x": 0.9}  # type: ignore[method-assign]
    for _ in range(100):
        assert supply.ask("cpu", narrow, math.inf) is None
    assert len(study) == TOO_WIDE


def test_no_trial_is_made_that_could_not_be_sent_any_more(study: Study) -> None:
    supply = supply_of(study)
    assert supply.ask("cpu", lambda trial: False, 3) is None
    assert len(study) == 3


def test_a_trial_on_a_higher_rung_is_the_one_it_carries_on(study: Study) -> None:
    supply = supply_of(study, SuccessiveHalving(least=1, most=3))
    lowest = [supply.ask("cpu", fits, math.inf) for _ in range(3)]
    assert supply.ask("cpu", fits, math.inf) is None, "a rung is complete before the next one begins"
    for place, trial in enumerate(lowest):
        assert trial is not None
        supply.tell(trial.evolve(state=TrialState.COMPLETE, loss=float(place)))
    carried_on = supply.ask("cpu", fits, math.inf)
    best = study.trial(0)
    assert carried_on is not None
    assert (carried_on.origin, carried_on.rung, carried_on.budget) == (0, 1, 3.0)
    assert (carried_on.params, carried_on.seed, carried_on.slots) == (best.params, best.seed, best.slots)
