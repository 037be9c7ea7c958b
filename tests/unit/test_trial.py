"""A trial changes only as the states' table allows."""

from __future__ import annotations

import dataclasses
import json
from itertools import product

import pytest

from shadho_celery.trial import COUNTED, FINISHED, LAWFUL, Trial, TrialState

S = TrialState

#: what may follow each state beside the four that end a trial
NEXT = {
    S.WAITING: {S.QUEUED},
    S.QUEUED: {S.RUNNING, S.LOST},
    S.RUNNING: {S.LOST},
    S.LOST: {S.WAITING},
    S.COMPLETE: set(),
    S.PRUNED: set(),
    S.FAILED: set(),
    S.CANCELLED: set(),
}

ENDS = {S.COMPLETE, S.PRUNED, S.FAILED, S.CANCELLED}


@pytest.mark.parametrize(("before", "after"), list(product(S, S)), ids=str)
def test_a_transition_is_made_exactly_where_it_is_lawful(before: TrialState, after: TrialState) -> None:
    trial = Trial(number=1, subspace="all", params={}, state=before)
    allowed = NEXT[before] | (set() if before in ENDS else ENDS) | {before}
    if after in allowed:
        assert trial.evolve(state=after).state is after
    else:
        with pytest.raises(ValueError, match=f"trial 1 cannot go from {before} to {after}"):
            trial.evolve(state=after)


def test_a_state_is_finished_where_nothing_can_follow() -> None:
    assert set(FINISHED) == ENDS == {state for state in S if not LAWFUL[state]}
    assert {state for state in S if state.is_finished} == ENDS


def test_cancelled_trials_do_not_count_against_the_limit() -> None:
    assert set(COUNTED) == ENDS - {S.CANCELLED} == {state for state in S if state.counts}


def test_a_state_prints_as_its_bare_name_on_every_python() -> None:
    assert str(S.WAITING) == f"{S.WAITING}" == "WAITING"
    assert f"{S.LOST:>6}" == "  LOST"
    assert json.dumps(S.COMPLETE) == '"COMPLETE"'


def test_evolving_leaves_the_original_as_it_was() -> None:
    trial = Trial(number=0, subspace="all", params={"x": 1})
    assert trial.evolve(state=S.QUEUED, attempt=1).attempt == 1
    assert (trial.state, trial.attempt) == (S.WAITING, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        trial.attempt = 5  # type: ignore[misc]


def test_a_field_that_does_not_exist_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="colour"):
        Trial(number=0, subspace="all", params={}).evolve(colour="red")
