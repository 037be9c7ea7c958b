"""A trial goes where it has memory and slots; out of memory it goes to a larger class only if that is wide enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Outcome, Result, Retry, Trial, TrialState
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.scheduler.memory_fit import MemoryFit
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SUBSPACES = split(compile_space({"x": hp.uniform("x", 0, 1)}))

SMALL = ComputeClass(name="small", slots=4, memory=8)
MIDDLING = ComputeClass(name="middling", slots=4, memory=16)
LARGE = ComputeClass(name="large", slots=2, memory=32)


@pytest.fixture
def memory_fit() -> MemoryFit:
    found = MemoryFit(CostModel(SUBSPACES), ())
    found.see([LARGE, SMALL])
    return found


def trial(number: int = 0, slots: int = 1, **facts: Any) -> Trial:
    [subspace] = SUBSPACES
    return Trial(number=number, subspace=subspace.name, params={"x": 0.5}, slots=slots, **facts)


def failed(of: Trial, compute_class: ComputeClass | None, *, out_of_memory: bool) -> Result:
    outcome = Outcome(state=TrialState.FAILED, out_of_memory=out_of_memory)
    name = None if compute_class is None else compute_class.name
    return Result(number=of.number, attempt=1, outcome=outcome, compute_class=name, at=0.0)


def out_of_memory(memory_fit: MemoryFit, of: Trial, compute_class: ComputeClass) -> Retry | None:
    """What is made of the news that a trial ran out of memory on a class."""
    return memory_fit.retry(failed(of, compute_class, out_of_memory=True), of)


def test_out_of_memory_loses_the_attempt_where_a_larger_class_has_the_slots(memory_fit: MemoryFit) -> None:
    retry = out_of_memory(memory_fit, trial(slots=2), SMALL)
    assert retry is not None
    assert (retry.outgrown, retry.reason) == ("small", "out of memory on small")
    assert out_of_memory(memory_fit, trial(slots=2), LARGE) is None


def test_out_of_memory_ends_a_gang_that_no_larger_class_has_the_slots_for(memory_fit: MemoryFit) -> None:
    assert out_of_memory(memory_fit, trial(slots=3), SMALL) is None


def test_what_fails_for_another_reason_or_nobody_knows_where_is_not_tried_on_a_larger_class(
    memory_fit: MemoryFit,
) -> None:
    assert memory_fit.retry(failed(trial(), SMALL, out_of_memory=False), trial()) is None
    assert memory_fit.retry(failed(trial(), None, out_of_memory=True), trial()) is None


def test_what_is_likely_to_run_out_waits_for_a_larger_class_only_where_one_has_the_slots(memory_fit: MemoryFit) -> None:
    for number in range(5):
        out_of_memory(memory_fit, trial(number, slots=3), SMALL)
    assert [memory_fit.fits(trial(9, slots), SMALL) for slots in (1, 2, 3, 5)] == [False, False, True, False]
    assert [memory_fit.fits(trial(9, slots), LARGE) for slots in (1, 2, 3)] == [True, True, False]


def test_of_the_classes_wide_enough_the_one_with_most_memory_takes_what_needs_more() -> None:
    model = CostModel(SUBSPACES)
    ended = Outcome(state=TrialState.COMPLETE, seconds=1.0, memory=24)
    model.tell(*(trial(n, state=TrialState.COMPLETE, compute_class="large", outcome=ended) for n in range(30)))
    memory_fit = MemoryFit(model, ())
    memory_fit.see([LARGE, MIDDLING, SMALL])
    gang = trial(99, slots=3)
    assert [memory_fit.fits(gang, each) for each in (SMALL, MIDDLING, LARGE)] == [False, True, False]
    assert [memory_fit.fits(trial(99), each) for each in (SMALL, MIDDLING, LARGE)] == [False, False, True]


def test_what_has_outgrown_a_class_fits_no_smaller_one_while_a_larger_one_has_the_slots(memory_fit: MemoryFit) -> None:
    wide = replace(LARGE, slots=4)
    gang = trial(slots=3, outgrown="middling")
    memory_fit.see([wide, MIDDLING, SMALL])
    assert [memory_fit.fits(gang, each) for each in (SMALL, MIDDLING, wide)] == [False, False, True]
    memory_fit.see([wide, replace(MIDDLING, slots=2), SMALL])
    assert not memory_fit.fits(gang, SMALL), "whether or not that class could still take it"
    memory_fit.see([wide, SMALL])
    assert not memory_fit.fits(gang, SMALL)
    memory_fit.see([LARGE, SMALL])
    assert memory_fit.fits(gang, SMALL), "better to try than to wait for ever"
