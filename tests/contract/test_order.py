"""Trials have one order, that of `core.columns`: in stores, packed rows, the live study, fronts and rungs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace as record_with
from pathlib import Path
from random import Random

import pytest

from shadho_celery.cli.results import SORTED
from shadho_celery.core.columns import feasible_loss, feasible_losses, merit
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.asha import Rung
from shadho_celery.results.study import StudyResults
from shadho_celery.store.base import StudyRecord, Turn
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.table import FinishedTrials

S = TrialState
SEEDS = range(12)
#: few values, so that there are many ties
LOSSES = (-1.0, 0.0, 0.5, 2.0)
BUDGETS = (1.0, 3.0, 9.0, None)
RECORD = StudyRecord(key="k1", name="s", module="m", seed=0, space={"x": "uniform(0, 1)"}, created_at=1.0)


def made(random: Random, number: int, losses: int, *, constrained: bool, budgets: bool) -> Trial:
    """A finished trial of a study with so many losses."""
    state = random.choices((S.COMPLETE, S.PRUNED, S.FAILED, S.CANCELLED), (6, 2, 1, 1))[0]
    named = {name: random.choice(LOSSES) for name in "ab"[:losses]} if losses > 1 else {}
    loss = next(iter(named.values()), random.choice(LOSSES))
    outcome = Outcome(state=state, error="no" if state is S.FAILED else None)
    if state is S.COMPLETE:
        constraints = {"c": random.choice((-1.0, 0.0, 1.0, 2.0))} if constrained else {}
        outcome = Outcome(state=state, loss=loss, losses=named, constraints=constraints)
    elif state is S.PRUNED:
        outcome = Outcome(state=state, loss=random.choice((loss, None)))
    budget = random.choice(BUDGETS) if budgets else None
    facts = {"budget": budget, "rung": None if budget is None else BUDGETS.index(budget)}
    at = float(random.randrange(1, 10**6))
    return Trial(
        number=number, subspace=random.choice("pq"), params={}, state=state, outcome=outcome, finished_at=at, **facts
    )


@pytest.fixture(params=SEEDS)
def trials(request: pytest.FixtureRequest) -> list[Trial]:
    """The finished trials of a study by number: with one loss or two, constraints or none, budgets or none."""
    random, seed = Random(request.param), request.param
    facts = {"losses": 1 + seed % 2, "constrained": seed // 2 % 2 == 1, "budgets": seed // 4 % 3 == 1}
    return [made(random, number, **facts) for number in range(30)]


@pytest.fixture
def store(trials: list[Trial], tmp_path: Path) -> Iterator[SqlStore]:
    store = SqlStore(f"sqlite:///{tmp_path / 'store.db'}")
    several = len(trials_with_losses(trials)) > 0
    store.create(record_with(RECORD, in_force={"objectives": dict.fromkeys("ab", "minimize")} if several else {}))
    store.write("k1", store.lock("k1", "here 1 1", 2.0), 2.0, Turn(new=trials))
    yield store
    store.close()


def trials_with_losses(trials: Sequence[Trial]) -> list[Trial]:
    return [each for each in trials if each.outcome.losses]


def results(store: SqlStore) -> StudyResults:
    return StudyResults(store, store.find("s"))


def by_merit(trials: Sequence[Trial]) -> list[int]:
    """Numbers of the complete trials, the best first."""
    return [each.number for each in sorted(trials, key=lambda each: (merit(each), each.number)) if is_complete(each)]


def is_complete(trial: Trial) -> bool:
    return trial.state is S.COMPLETE


def budget_of(trial: Trial) -> float:
    return math.inf if trial.budget is None else trial.budget


def dominates(one: Trial, other: Trial) -> bool:
    mine, theirs = [*one.outcome.losses.values()], [*other.outcome.losses.values()]
    return mine != theirs and all(a <= b for a, b in zip(mine, theirs, strict=True))


def test_feasible_comes_before_budget_and_budget_before_loss() -> None:
    def trial(loss: float | None, c: float = 0.0, budget: float | None = None, state: S = S.COMPLETE) -> Trial:
        outcome = Outcome(state=state, loss=loss, constraints={"c": c})
        return Trial(number=0, subspace="p", params={}, state=state, budget=budget, outcome=outcome)

    order = [
        *(trial(0.5), trial(2.0), trial(0.0, state=S.PRUNED), trial(-1.0, budget=9.0), trial(-2.0, budget=3.0)),
        *(trial(-9.0, c=1.0), trial(-9.0, c=2.0), trial(None, state=S.FAILED)),
    ]
    assert [*map(merit, order)] == sorted(map(merit, order))
    assert len({*map(merit, order)}) == len(order)


def test_a_store_sorts_so(trials: list[Trial], store: SqlStore) -> None:
    assert store.best("k1") == by_merit(trials)[0]


def test_packed_rows_sort_so(trials: list[Trial]) -> None:
    kept = FinishedTrials(trials)
    assert [each.number for each in kept.best_few(len(trials))] == by_merit(trials)


def test_a_list_of_trials_sorts_so(trials: list[Trial], store: SqlStore) -> None:
    listed = sorted(results(store).trials, key=SORTED["loss"])
    assert [each.number for each in listed if each.state == S.COMPLETE] == by_merit(trials)
    known = [each.loss is not None for each in listed]
    assert known == sorted(known, reverse=True)


def test_the_best_trial_is_the_same_while_a_study_runs_when_it_is_resumed_and_when_it_is_read(
    trials: list[Trial], store: SqlStore
) -> None:
    running = FinishedTrials()
    for each in sorted(trials, key=lambda each: each.finished_at or 0.0):
        running.add(each)
    resumed = FinishedTrials(store.earlier("k1"), lambda numbers: store.trials("k1", numbers))
    read = results(store)
    assert running.best is not None
    assert running.best.number == (resumed.best and resumed.best.number) == read.best.number
    assert running.without_gain == resumed.without_gain
    assert [each.number for each in running.front] == [each.number for each in resumed.front]
    assert [each.number for each in read.front] == [each.number for each in running.front]
    assert (
        read.best.number == (running.front or [each for each in trials if each.number == by_merit(trials)[0]])[0].number
    )
    for name in "pq":
        feasible = [
            each for each in trials if each.subspace == name and is_complete(each) and not each.outcome.violation
        ]
        best = min(feasible, key=merit, default=None)
        assert running.best_of(name) == resumed.best_of(name) == (best and best.outcome.loss)


def test_the_front_has_the_feasible_trials_that_no_other_one_dominates(trials: list[Trial]) -> None:
    """Losses at different budgets cannot be compared, so only trials with their highest budget are on the front."""
    able = [each for each in trials_with_losses(trials) if not each.outcome.violation]
    top = max(budget_of(each) for each in able) if able else 0.0
    able = [each for each in able if budget_of(each) == top]
    expected = [each.outcome.losses for each in able if not any(dominates(other, each) for other in able)]
    found = [each.outcome.losses for each in FinishedTrials(trials).front]
    assert len(found) == len({*map(str, expected)})
    assert {*map(str, found)} == {*map(str, expected)}


def test_a_rung_promotes_so_and_nothing_but_feasible_complete_trials(trials: list[Trial]) -> None:
    rung = Rung()
    for each in trials:
        rung.tell(each.number, (feasible_loss(each),))
    able = [each for each in trials if is_complete(each) and not each.outcome.violation]
    found = rung.candidates(len(trials))
    assert {*found} == {each.number for each in able}
    alone = {each.number: merit(each.evolve(budget=None)) for each in able}
    assert found == sorted(found, key=lambda number: (alone[number], number))


def test_a_rung_promotes_none_of_several_losses_that_a_trial_which_stays_dominates(trials: list[Trial]) -> None:
    """This holds for each number of promotions, and for trials that are left after some were promoted."""
    rung = Rung()
    for each in trials:
        rung.tell(each.number, feasible_losses(each))
    able = [each for each in trials_with_losses(trials) if is_complete(each) and not each.outcome.violation]
    for count in range(1, len(able) + 1):
        chosen = {*rung.candidates(count)}
        assert len(chosen) == count
        stayed = [each for each in able if each.number not in chosen]
        assert not any(dominates(other, each) for each in able if each.number in chosen for other in stayed)
    if able:
        best, second = rung.candidates(2)
        rung.promote(best, 100)
        assert rung.candidates(2) == [second]


def test_the_examples_have_every_kind() -> None:
    found = [made(Random(seed), seed, 2, constrained=True, budgets=True) for seed in range(200)]
    assert {each.state for each in found} == {S.COMPLETE, S.PRUNED, S.FAILED, S.CANCELLED}
    assert {each.budget for each in found} == {*BUDGETS}
    assert {math.isinf(feasible_loss(each)) for each in found} == {True, False}
    assert len({merit(each) for each in found}) < len(found)
