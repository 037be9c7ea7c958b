"""New trials are those that seed and limits name; what fits nobody who asks is kept, and not too much of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.brackets import SuccessiveHalving
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Rounds
from shadho_celery.placement.policies import FifoPolicy
from shadho_celery.placement.shares import UniformShares
from shadho_celery.placement.widths import Width
from shadho_celery.samplers import find_sampler
from shadho_celery.scheduler.proposals import TOO_WIDE, WAITING_PER_SUBSPACE, Proposals, make_samplers, trial_seed
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split
from shadho_celery.store.base import StudyRecord
from shadho_celery.store.memory import MemoryStore
from shadho_celery.study.state import Limits, StudyState

CPU, GPU = (ComputeClass(name=name, slots=1) for name in ("cpu", "gpu"))
SUBSPACES = split(compile_space(hp.choice("model", [{"a": hp.uniform("a", 0, 1)}, {"b": hp.uniform("b", 0, 1)}])))


@pytest.fixture
def study() -> StudyState:
    record = StudyRecord(key="k", name="n", module="", seed=5, space={}, created_at=0.0)
    return StudyState(MemoryStore(), record, 1, clock=ManualClock())


def proposals_of(
    study: StudyState,
    rounds: Rounds | None = None,
    subspaces: Sequence[Subspace] = SUBSPACES,
    width: Width = lambda params: 2 if "a" in params else 1,
) -> Proposals:
    made = Proposals(
        study,
        subspaces,
        policy=FifoPolicy(),
        shares=UniformShares({subspace.name: subspace.probability for subspace in subspaces}),
        rounds=rounds or Rounds(),
        samplers=make_samplers(find_sampler("random"), subspaces, (study.record.seed,)),
        sampler="random",
        limits=Limits(trials=100),
        width=width,
    )
    made.begin()
    return made


def fits(trial: Trial, compute_class: ComputeClass) -> bool:
    return True


def test_proposals_made_anew_go_on_where_the_last_ones_ended(study: StudyState) -> None:
    first = proposals_of(study)
    for _ in range(3):
        first.ask(CPU, fits, math.inf)
    second = proposals_of(study)
    for _ in range(3):
        second.ask(CPU, fits, math.inf)
    whole = StudyState(MemoryStore(), study.record, 1, clock=ManualClock())
    proposals = proposals_of(whole)
    for _ in range(6):
        proposals.ask(GPU, fits, math.inf)
    assert list(whole) == list(study)


def test_a_trial_takes_the_slots_that_its_params_say(study: StudyState) -> None:
    proposals = proposals_of(study)
    asked = [proposals.ask(CPU, fits, math.inf) for _ in range(10)]
    assert {(trial.slots, "a" in trial.params) for trial in asked if trial} == {(2, True), (1, False)}


def test_trials_that_fit_no_class_wait_up_to_a_few_of_each_subspace(study: StudyState) -> None:
    proposals = proposals_of(study)
    assert proposals.ask(CPU, lambda trial, compute_class: False, math.inf) is None
    assert study.count(TrialState.WAITING) == WAITING_PER_SUBSPACE * len(SUBSPACES)
    assert proposals.ask(CPU, fits, math.inf) is None, "those that wait come first"
    assert len(list(iter(study.next_waiting, None))) == WAITING_PER_SUBSPACE * len(SUBSPACES)


def narrow(trial: Trial, compute_class: ComputeClass) -> bool:
    return trial.slots == 1


def mixed_widths(study: StudyState, width: Width) -> Proposals:
    """The proposals in a space with one subspace, for a class of one slot."""
    subspaces = split(compile_space({"x": hp.uniform("x", 0, 1)}))
    proposals = proposals_of(study, subspaces=subspaces, width=width)
    proposals.see([CPU])
    return proposals


def test_what_is_too_wide_for_every_class_keeps_no_slot_from_narrower_trials(study: StudyState) -> None:
    proposals = mixed_widths(study, lambda params: 1 if params["x"] < 0.3 else 2)
    for _ in range(30):
        trial = proposals.ask(CPU, narrow, math.inf)
        assert trial is not None
        study.send(trial, "cpu")
    assert study.count(TrialState.WAITING) == len(study) - 30 > 30


def test_what_is_too_wide_does_not_take_the_places_of_what_waits_for_memory(study: StudyState) -> None:
    proposals = mixed_widths(study, lambda params: 1 if params["x"] < 0.3 else 2)
    for _ in range(5):
        assert proposals.ask(CPU, lambda trial, compute_class: False, math.inf) is None
    assert sum(trial.slots == 1 for trial in study) == WAITING_PER_SUBSPACE


def test_where_every_trial_is_too_wide_only_a_few_are_made(study: StudyState) -> None:
    proposals = mixed_widths(study, lambda params: 2)
    for _ in range(100):
        assert proposals.ask(CPU, narrow, math.inf) is None
    assert len(study) == WAITING_PER_SUBSPACE


def test_where_a_sampler_proposes_nothing_narrow_enough_it_is_not_asked_for_ever(study: StudyState) -> None:
    proposals = mixed_widths(study, lambda params: 1 if params["x"] < 0.3 else 2)
    [sampler] = proposals.samplers.values()
    sampler.ask = lambda n, pending: n * [{"x": 0.9}]  # type: ignore[method-assign]
    for _ in range(100):
        assert proposals.ask(CPU, narrow, math.inf) is None
    assert len(study) == TOO_WIDE


def test_no_trial_is_made_that_could_not_be_sent_any_more(study: StudyState) -> None:
    proposals = proposals_of(study)
    assert proposals.ask(CPU, lambda trial, compute_class: False, 3) is None
    assert len(study) == 3


def test_a_trial_on_a_higher_rung_is_the_one_it_carries_on(study: StudyState) -> None:
    proposals = proposals_of(study, SuccessiveHalving(Ladder.of({"least": 1, "most": 3})))
    lowest = [proposals.ask(CPU, fits, math.inf) for _ in range(3)]
    assert proposals.ask(CPU, fits, math.inf) is None, "a rung is complete before the next one begins"
    for place, trial in enumerate(lowest):
        assert trial is not None
        outcome = Outcome(state=TrialState.COMPLETE, loss=float(place))
        proposals.tell([trial.evolve(state=TrialState.COMPLETE, outcome=outcome)])
    carried_on = proposals.ask(CPU, fits, math.inf)
    best = study.trial(0)
    assert carried_on is not None
    assert (carried_on.origin, carried_on.rung, carried_on.budget) == (0, 1, 3.0)
    assert (carried_on.params, carried_on.seed, carried_on.slots) == (best.params, best.seed, best.slots)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize(("subspace", "index"), [(0, 0), (3, 10**6)])
def test_the_seed_of_a_trial_is_numpys_own_for_study_subspace_and_index(seed: int, subspace: int, index: int) -> None:
    """Studies of earlier versions are resumed with the same seeds."""
    assert trial_seed(seed, subspace, index) == np.random.SeedSequence((seed, subspace, index)).generate_state(1)[0]
