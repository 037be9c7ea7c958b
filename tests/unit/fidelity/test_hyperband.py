"""Hyperband's brackets begin at different budgets, and the next one begins while the others wait."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest
from hyperopt import hp
from services.rounds import Player

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.asha import Asha
from shadho_celery.fidelity.brackets import Brackets, Hyperband, SuccessiveHalving, TrustingHyperband, sizes_of
from shadho_celery.fidelity.dehb import Dehb
from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.rounds import Rounds
from shadho_celery.space.compile import compile_space


def ladder(least: float, most: float, eta: int = 3) -> Ladder:
    return Ladder.of({"least": least, "most": most, "eta": eta})


def dehb(ladder: Ladder) -> Dehb:
    return Dehb(ladder, compile_space({"x": hp.uniform("x", 0, 1)}), 0)


def test_the_brackets_from_1_to_81_are_those_of_the_paper() -> None:
    assert sizes_of(ladder(1, 81)) == [[81, 27, 9, 3, 1], [34, 11, 3, 1], [15, 5, 1], [8, 2], [5]]


@pytest.mark.parametrize(("least", "most", "eta"), [(1, 243, 3), (1, 1000, 10), (1, 64, 2), (2, 9, 3)])
def test_no_bracket_costs_much_more_than_another(least: float, most: float, eta: int) -> None:
    budgets = ladder(least, most, eta).budgets
    costs = [
        sum(size * budget for size, budget in zip(sizes, budgets[-len(sizes) :], strict=True))
        for sizes in sizes_of(ladder(least, most, eta))
    ]
    assert max(costs) / min(costs) < 2.5


def test_a_cycle_has_the_trials_of_its_brackets() -> None:
    player = Player(Hyperband(ladder(1, 81))).play_on(1, 206, random.Random(0))
    assert Counter(trial.rung for trial in player.finished) == {0: 81, 1: 27 + 34, 2: 9 + 11 + 15, 3: 19, 4: 10}


def test_the_next_bracket_begins_while_all_wait_and_not_before() -> None:
    player = Player(Hyperband(ladder(1, 9)))
    first = player.ask_all(9)
    assert {trial.rung for trial in first} == {0}
    more = player.ask_all(5)
    assert [trial.rung for trial in more] == [1] * 5, "bracket 1 begins a rung higher"
    for trial in first:
        player.finish(trial)
    assert {(trial.rung, trial.origin) for trial in player.ask_all(3)} == {(1, 0), (1, 1), (1, 2)}


def test_what_is_promoted_was_drawn_in_the_same_bracket() -> None:
    player = Player(Hyperband(ladder(1, 9)), lambda origin, budget: -origin)
    first, second = player.ask_all(9), player.ask_all(5)
    for trial in (*second, *first):
        player.finish(trial)
    promoted = player.ask_all(4)
    assert [trial.origin for trial in promoted[:3]] == [8, 7, 6]
    assert promoted[3].origin == second[-1].number


@pytest.mark.parametrize("how", [Hyperband, SuccessiveHalving])
def test_a_resumed_rung_that_lacks_trials_from_which_some_were_promoted_asks_for_none(how: type[Brackets]) -> None:
    """They are lost, or another ladder has sent the promoted ones; what follows is a search as if it were new."""
    rounds = how(ladder(1, 9))
    lower = [Trial(number=number, subspace="all", params={}, budget=1.0, rung=0) for number in range(3)]
    upper = Trial(number=3, subspace="all", params={}, budget=3.0, rung=1, origin=0)
    player = Player(rounds)
    for trial in (*lower, upper):
        rounds.add(trial)
        player.trials.append(trial)
    for trial in (*lower, upper):
        player.finish(trial)
    player.play_on(2, 200, random.Random(0))
    fresh = Player(how(ladder(1, 9))).play_on(2, 200, random.Random(0))
    on, new = (Counter(trial.rung for trial in each.finished) for each in (player, fresh))
    assert all(abs(on[rung] - new[rung]) <= 12 for rung in range(3)), (on, new)


@pytest.mark.parametrize("how", [Hyperband, SuccessiveHalving, Asha, TrustingHyperband, dehb])
def test_what_another_ladder_has_taken_further_is_not_promoted_to_less(how: Callable[[Ladder], Rounds]) -> None:
    """Its checkpoint is past that budget, and there would be nothing to train."""
    rounds = how(Ladder.of({"least": 1, "most": 4, "eta": 2}))
    player = Player(rounds)
    for number, origin in enumerate([None, None, None, None, 0]):
        budget, rung = (1.0, 0) if origin is None else (3.0, 1)
        trial = Trial(number=number, subspace="all", params={}, budget=budget, rung=rung, origin=origin)
        rounds.add(trial)
        player.trials.append(trial)
    for trial in [*player.trials]:
        player.finish(trial)
    player.play_on(1, 30, random.Random(0))
    promoted = {(trial.origin, trial.budget) for trial in player.trials}
    assert (0, 2.0) not in promoted
    assert (1, 2.0) in promoted


def test_a_closed_rung_goes_on_when_the_last_trial_that_it_waits_for_is_cancelled() -> None:
    player = Player(SuccessiveHalving(ladder(1, 9)))
    first, second, third = player.ask_all(3)
    player.rounds.end_draws()
    player.finish(first)
    player.finish(second)
    assert player.ask_all() == []
    player.finish(third, TrialState.CANCELLED)
    assert [trial.origin for trial in player.ask_all()] == [first.number]
