"""Finished trials are counted, found by their number and by their place, and the best of them is known."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import product
from operator import attrgetter
from typing import Any

import pytest
from msgspec.structs import replace

from shadho_celery.core.columns import PACKED, of_trial
from shadho_celery.core.trial import FINISHED, NO_OUTCOME, Outcome, Trial, TrialState
from shadho_celery.errors import StoreError
from shadho_celery.study import table
from shadho_celery.study.table import FinishedTrials, OnClass

S = TrialState


def trial(number: int = 0, state: TrialState = S.WAITING, *, loss: float | None = None, **facts: Any) -> Trial:
    outcome = Outcome(state=state, loss=loss) if state in FINISHED else None
    return Trial(**{"number": number, "subspace": "all", "params": {}, "state": state, "outcome": outcome, **facts})


def test_those_that_finish_are_kept_in_the_order_in_which_their_results_came() -> None:
    ended = FinishedTrials()
    later, sooner = trial(0, S.COMPLETE, loss=0.5, compute_class="gpu"), trial(1, S.FAILED, compute_class="cpu")
    for one in (sooner, later):
        ended.add(one)
    assert [*ended] == [sooner, later]
    assert (len(ended), ended.latest(1)) == (2, [later])
    assert (ended.get(0), ended.get(1), ended.get(2)) == (later, sooner, None)
    assert (ended.count(S.COMPLETE, S.FAILED), ended.count(S.FAILED, compute_class="cpu")) == (2, 1)
    assert ended.count(S.COMPLETE, subspace="all") == 1


def test_trials_of_earlier_runs_come_in_the_order_of_their_numbers_and_are_kept_in_that_of_their_ends() -> None:
    moments = [3.0, 1.0, None, 2.0]
    ended = FinishedTrials(trial(number, S.FAILED, finished_at=at) for number, at in enumerate(moments))
    assert [one.number for one in ended] == [2, 1, 3, 0]


def test_trials_of_earlier_runs_are_counted_and_ranked_like_those_that_are_added_one_by_one() -> None:
    generator = random.Random(0)
    made = [
        trial(
            number,
            generator.choice([S.COMPLETE, S.COMPLETE, S.FAILED, S.CANCELLED]),
            loss=generator.randrange(5) / 10,
            subspace=generator.choice("abc"),
            compute_class=generator.choice(["cpu", "gpu", None]),
            budget=generator.choice([1.0, 9.0, None]),
            origin=generator.choice([0, None, None]),
            lost=generator.randrange(3),
        )
        for number in range(200)
    ]
    made = [replace(one, outcome=NO_OUTCOME) if one.state is S.CANCELLED else one for one in made]
    loaded, added = FinishedTrials(made), FinishedTrials()
    for one in made:
        added.add(one)
    for state, name, compute_class in product(S, ["a", "b", "c", None], ["cpu", "gpu", None]):
        assert loaded.count(state, subspace=name) == added.count(state, subspace=name)
        assert loaded.count(state, compute_class=compute_class) == added.count(state, compute_class=compute_class)
    assert [loaded.best_of(name) for name in "abc"] == [added.best_of(name) for name in "abc"]
    assert loaded.best is added.best is not None
    assert (loaded.lost, loaded.last_number) == (added.lost, 199)
    assert loaded.asked() == Counter(one.subspace for one in made if one.origin is None)
    assert loaded.compute_classes == list(dict.fromkeys(one.compute_class for one in made if one.compute_class))


# Several losses, and constraints


def with_numbers(number: int, losses: Sequence[float], constraint: float | None = None, **facts: Any) -> Trial:
    named = dict(zip("ab", losses, strict=False)) if len(losses) > 1 else {}
    constraints = {} if constraint is None else {"memory_gb": constraint}
    outcome = Outcome(state=S.COMPLETE, loss=losses[0], losses=named, constraints=constraints)
    return trial(number, S.COMPLETE, **{"outcome": outcome, "finished_at": float(number), **facts})


def added(made: Iterable[Trial]) -> FinishedTrials:
    found = FinishedTrials()
    for one in made:
        found.add(one)
    return found


def test_the_best_is_feasible_if_any_is_and_else_the_nearest() -> None:
    made = [with_numbers(0, [1.0], 3.0), with_numbers(1, [5.0], 0.5), with_numbers(2, [2.0], 0.5)]
    assert added(made).best is made[2]
    assert (added(made).without_gain, added(made).best_of("all")) == (3, None)
    made += [with_numbers(3, [9.0], 0.0), with_numbers(4, [9.0]), with_numbers(5, [0.0], 1e-9)]
    for found in (added(made), FinishedTrials(made)):
        assert found.best is made[3]
        assert (found.without_gain, found.best_of("all")) == (2, 9.0)
        assert [one.number for one in found.best_few(4)] == [3, 4, 5, 2]


def test_trials_since_the_last_complete_one_are_counted() -> None:
    states = S.FAILED, S.COMPLETE, S.COMPLETE, S.PRUNED, S.CANCELLED
    made = [trial(number, state, loss=1.0, finished_at=float(number)) for number, state in enumerate(states)]
    for found in (added(made), FinishedTrials(made)):
        assert found.without_complete == 1, "a cancelled trial does not count"
    assert [FinishedTrials(made[:count]).without_complete for count in range(4)] == [0, 1, 0, 0]
    assert added(made[:1]).without_complete == 1


def test_a_front_has_the_feasible_trials_that_nothing_is_better_than_by_their_first_loss() -> None:
    points = [(5.0, 5.0), (1.0, 9.0), (5.0, 4.0), (0.0, 0.0), (1.0, 8.0), (6.0, 9.0), (1.0, 8.0)]
    made = [with_numbers(number, losses, 1.0 if number == 3 else None) for number, losses in enumerate(points)]
    for found in (added(made), FinishedTrials(made)):
        assert [one.number for one in found.front] == [4, 2]
        assert (found.best, found.on_front, found.without_gain) == (made[4], 2, 2)
        assert found.losses("ab")[0].tolist() == [1, 2, 3, 5, 6, 7]
        assert [one.outcome.losses for block, _ in found.recall() for one in block][2] == {"a": 5.0, "b": 4.0}


# With a store


class Stored:
    """A store of finished trials, which counts how often it is read."""

    def __init__(self, trials: Iterable[Trial]) -> None:
        self.trials = {each.number: each for each in trials}
        self.reads = 0

    def __call__(self, numbers: Sequence[int]) -> Iterable[Trial]:
        self.reads += 1
        return [self.trials[number] for number in sorted(numbers) if number in self.trials]


def finished(number: int, state: TrialState = S.COMPLETE, **facts: Any) -> Trial:
    loss = number % 7 / 10 if state is S.COMPLETE else None
    warning = "a metric was dropped" if number == 2 else None
    numbers = {"loss": loss, "seconds": number / 4, "memory": number, "continued": [None, False, True][number % 3]}
    outcome = Outcome(state=state, metrics={"m": number}, warning=warning, **numbers)
    params, subspace = {"x": number / 7}, "ab"[number % 2]
    return Trial(
        number=number,
        subspace=subspace,
        params=params,
        state=state,
        outcome=outcome,
        compute_class="cpu",
        finished_at=float(-number),
        **facts,
    )


def stored() -> tuple[FinishedTrials, Stored]:
    """Trials that are in the store; the last to be asked for was the first to finish."""
    store = Stored([finished(n, S.FAILED if n % 5 == 0 else S.COMPLETE, rung=n % 2, lost=n) for n in range(12)])
    return FinishedTrials(store.trials.values(), store), store


def test_what_the_store_has_is_read_from_it_in_the_order_of_the_results() -> None:
    ended, store = stored()
    in_order = [store.trials[number] for number in reversed(range(12))]
    assert [*ended] == in_order
    assert (ended.latest(2), ended.get(3), ended.get(99)) == (in_order[-2:], store.trials[3], None)
    assert [each.number for each in ended.of_state(S.FAILED)] == [0, 5, 10]
    assert [each.number for each in ended.warned()] == [2]
    assert [each.number for each in ended.best_few(3)] == [7, 1, 8]
    assert ended.best is store.trials[7] or ended.best is store.trials[1]
    assert ended.by_subspace()["a"]["cpu"] == OnClass(complete=4, pruned=0, failed=2, seconds=1.25)
    assert ended.lost == sum(range(12))


def test_a_trial_is_kept_until_the_store_has_it() -> None:
    ended, store = stored()
    late = finished(12)
    ended.add(late)
    assert (ended.get(12), [*ended][-1]) == (late, late)
    store.trials[12] = late
    ended.release()
    reads = store.reads
    assert ended.get(12) is late
    assert store.reads == reads + 1


def test_a_trial_that_the_store_has_lost_is_named() -> None:
    ended, store = stored()
    del store.trials[4]
    with pytest.raises(StoreError, match="trial 4 is not in the store any more"):
        list(ended)


def test_recalled_trials_have_what_is_learned_from_and_their_params_are_read_when_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(table, "BLOCK", 5)
    ended, store = stored()
    reads = store.reads
    blocks = list(ended.recall())
    recalled = [each for block, _ in blocks for each in block]
    assert [each.number for each in recalled] == [*reversed(range(12))]
    for each in recalled:
        of = store.trials[each.number]
        packed = attrgetter(*map(of_trial, PACKED))
        assert packed(each) == packed(of)
    assert store.reads == reads
    assert [following for _, following in blocks] == [{"a": 4, "b": 3}, {"a": 1, "b": 1}, {}]
    assert [dict(each.params) for each in blocks[1][0]] == [{"x": number / 7} for number in (6, 5, 4, 3, 2)]
    assert store.reads == reads + 1
    assert [each.number for block, _ in ended.recall(by_number=True) for each in block] == [*range(12)]


def test_seconds_are_counted_by_subspace_and_class_the_same_after_a_resume() -> None:
    """Cancelled trials, and those without a class or a time, are left out. A trial of two slots has slot seconds."""

    def ended(number: int, state: TrialState, seconds: float | None, name: str | None = "cpu") -> Trial:
        return trial(number, state, compute_class=name).evolve(outcome=Outcome(state=state, seconds=seconds))

    made = [
        ended(0, S.COMPLETE, 2.0),
        ended(1, S.FAILED, 1.0),
        ended(2, S.CANCELLED, 5.0),
        ended(3, S.FAILED, None),
        ended(4, S.FAILED, 1.0, None),
        ended(5, S.PRUNED, 4.0, "gpu").evolve(slots=2),
    ]
    grown = FinishedTrials()
    for one in made:
        grown.add(one)
    assert grown.timed == {("all", "cpu"): (1, 2, 3.0, 3.0), ("all", "gpu"): (0, 1, 4.0, 8.0)}
    assert FinishedTrials(made).timed == grown.timed
    assert FinishedTrials().timed == {}
