"""A trial goes where it has memory and slots; out of memory it goes to a larger class only if that is wide enough."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery.capacity import Capacity
from shadho_celery.cost_model import CostModel
from shadho_celery.hardware import ComputeClass
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.trial import Event, Lost, Result, Trial, TrialState

SUBSPACES = split(compile_space({"x": hp.uniform("x", 0, 1)}))

SMALL = ComputeClass(name="small", slots=4, memory=8)
MIDDLING = ComputeClass(name="middling", slots=4, memory=16)
LARGE = ComputeClass(name="large", slots=2, memory=32)


@pytest.fixture
def capacity() -> Capacity:
    found = Capacity(CostModel(SUBSPACES), ())
    found.see([LARGE, SMALL])
    return found


def trial(number: int = 0, slots: int = 1, **facts: Any) -> Trial:
    [subspace] = SUBSPACES
    return Trial(number=number, subspace=subspace.name, params={"x": 0.5}, slots=slots, **facts)


def out_of_memory(capacity: Capacity, of: Trial, compute_class: ComputeClass) -> Event:
    """What is made of the news that a trial ran out of memory on a class."""
    return capacity.escalated(
        Result(
            number=of.number,
            attempt=1,
            state=TrialState.FAILED,
            compute_class=compute_class.name,
            out_of_memory=True,
            at=0.0,
        ),
        of,
    )


def test_out_of_memory_loses_the_attempt_where_a_larger_class_has_the_slots(capacity: Capacity) -> None:
    event = out_of_memory(capacity, trial(slots=2), SMALL)
    assert isinstance(event, Lost)
    assert (event.outgrown, event.claimed) == ("small", False)
    assert isinstance(out_of_memory(capacity, trial(slots=2), LARGE), Result)


def test_out_of_memory_ends_a_gang_that_no_larger_class_has_the_slots_for(capacity: Capacity) -> None:
    assert isinstance(out_of_memory(capacity, trial(slots=3), SMALL), Result)


def test_what_is_likely_to_run_out_waits_for_a_larger_class_only_where_one_has_the_slots(capacity: Capacity) -> None:
    for number in range(5):
        out_of_memory(capacity, trial(number, slots=3), SMALL)
    assert [capacity.fits(trial(9, slots), SMALL) for slots in (1, 2, 3, 5)] == [False, False, True, False]
    assert [capacity.fits(trial(9, slots), LARGE) for slots in (1, 2, 3)] == [True, True, False]


def test_of_the_classes_wide_enough_the_one_with_most_memory_takes_what_needs_more() -> None:
    model = CostModel(SUBSPACES)
    model.tell(*(trial(n, state=TrialState.COMPLETE, compute_class="large", seconds=1.0, memory=24) for n in range(30)))
    capacity = Capacity(model, ())
    capacity.see([LARGE, MIDDLING, SMALL])
    gang = trial(99, slots=3)
    assert [capacity.fits(gang, each) for each in (SMALL, MIDDLING, LARGE)] == [False, True, False]
    assert [capacity.fits(trial(99), each) for each in (SMALL, MIDDLING, LARGE)] == [False, False, True]


def test_what_has_outgrown_a_class_fits_no_smaller_one_while_a_larger_one_has_the_slots(capacity: Capacity) -> None:
    wide = replace(LARGE, slots=4)
    gang = trial(slots=3, outgrown="middling")
    capacity.see([wide, MIDDLING, SMALL])
    assert [capacity.fits(gang, each) for each in (SMALL, MIDDLING, wide)] == [False, False, True]
    capacity.see([wide, replace(MIDDLING, slots=2), SMALL])
    assert not capacity.fits(gang, SMALL), "whether or not that class could still take it"
    capacity.see([wide, SMALL])
    assert not capacity.fits(gang, SMALL)
    capacity.see([LARGE, SMALL])
    assert capacity.fits(gang, SMALL), "better to try than to wait for ever"
