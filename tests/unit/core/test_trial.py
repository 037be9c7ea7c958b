"""A trial changes only as the states' table allows."""

from __future__ import annotations

import json
from itertools import product

import pytest
from services.cases import cases

from shadho_celery.core.trial import FINISHED, LAWFUL, Attempt, Memory, Outcome, Trial, TrialState, digest_of

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


@cases("before, after", list(product(S, S)))
def test_a_transition_is_made_exactly_where_it_is_lawful(before: TrialState, after: TrialState) -> None:
    trial = Trial(number=1, subspace="all", params={}, state=before)
    allowed = NEXT[before] | (set() if before in ENDS else ENDS) | {before}
    if after in allowed:
        assert trial.evolve(state=after).state is after
    else:
        with pytest.raises(ValueError, match=f"trial 1 cannot go from {before} to {after}"):
            trial.evolve(state=after)


def test_params_have_one_digest_whatever_they_travelled_through() -> None:
    params = {"b": [1, 2.0, "\ud800"], "a": 10**30, "c": float("nan")}
    digest = digest_of(params)
    assert digest_of(json.loads(json.dumps(params))) == digest_of(dict(reversed(params.items()))) == digest
    assert len(digest) == 16
    assert len({digest, digest_of({}), digest_of({**params, "a": 1})}) == 3


def test_a_state_is_finished_where_nothing_can_follow() -> None:
    assert set(FINISHED) == ENDS == {state for state in S if not LAWFUL[state]}
    assert {state for state in S if state.is_finished} == ENDS


def test_a_state_prints_as_its_bare_name_on_every_python() -> None:
    assert str(S.WAITING) == f"{S.WAITING}" == "WAITING"
    assert f"{S.LOST:>6}" == "  LOST"
    assert json.dumps(S.COMPLETE) == '"COMPLETE"'


def test_evolving_leaves_the_original_as_it_was() -> None:
    trial = Trial(number=0, subspace="all", params={"x": 1})
    assert trial.evolve(state=S.QUEUED, attempt=1).attempt == 1
    assert (trial.state, trial.attempt) == (S.WAITING, 0)
    with pytest.raises(AttributeError):
        trial.attempt = 5  # type: ignore[misc]


def test_a_field_that_does_not_exist_cannot_be_changed() -> None:
    with pytest.raises(TypeError, match="colour"):
        Trial(number=0, subspace="all", params={}).evolve(colour="red")


# Outcomes and attempts


def test_a_trial_that_has_not_ended_has_an_outcome_without_facts() -> None:
    trial = Trial(number=0, subspace="all", params={})
    assert (trial.outcome.loss, trial.outcome.metrics, trial.outcome.error, trial.outcome.seconds) == (
        None,
        {},
        None,
        None,
    )
    assert not trial.outcome.is_an_end


def test_what_an_attempt_that_was_stopped_gave_does_not_count() -> None:
    ended = Outcome(state=S.COMPLETE, loss=0.5, seconds=9.0, memory=7)
    assert ended.cancelled() == Outcome(state=S.CANCELLED, error="cancelled", seconds=9.0, memory=7)
    assert ended.cancelled(2.0).seconds == 2.0
    failed = Outcome(state=S.FAILED, error="out of memory", out_of_memory=Memory.HOST)
    assert failed.cancelled(0.0) == Outcome(state=S.CANCELLED, error="cancelled", seconds=0.0)


def test_an_attempt_evaluates_what_its_trial_is() -> None:
    trial = Trial(
        number=3, subspace="a", params={"x": 1}, seed=7, budget=2.0, slots=4, origin=1, attempt=2, lost=1, rung=1
    )
    attempt = trial.attempted(compute_class="cpu", state=S.QUEUED)
    assert attempt == Attempt(
        number=3, attempt=2, subspace="a", params={"x": 1}, seed=7, budget=2.0, slots=4, origin=1, compute_class="cpu"
    )
    assert trial.attempted(attempt=5).attempt == 5
    assert attempt.evolve(worker="w", state=S.RUNNING).worker == "w"
    assert (attempt.worker, attempt.state) == ("", S.QUEUED)
