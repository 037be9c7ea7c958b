"""Brackets start on a low rung as long as its losses predict those at the top."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from services.cases import cases
from services.rounds import Player

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.fidelity.brackets import PROBE, TrustingHyperband
from shadho_celery.fidelity.ladder import Ladder

LADDER = Ladder.of({"least": 1, "most": 27, "eta": 3})
CHANCE = random.Random(0)
LOSSES = [CHANCE.random() for _ in range(5000)]


def true(origin: int, budget: float) -> float:
    return LOSSES[origin]


def misleading(origin: int, budget: float) -> float:
    """Below the full budget losses have nothing to do with those there."""
    return LOSSES[origin] if budget == 27 else LOSSES[(origin * 7919 + int(budget)) % 5000]


def counts(player: Player) -> Counter[int | None]:
    return Counter(trial.rung for trial in player.trials if trial.origin is None)


def test_where_rungs_agree_brackets_start_on_all_rungs_in_turn() -> None:
    player = Player(TrustingHyperband(LADDER), true).play_on(1, 138, random.Random(1))
    assert counts(player) == {0: 54, 1: 24, 2: 12, 3: 8}


def test_where_rungs_mislead_brackets_start_at_the_full_budget_except_one_in_twelve() -> None:
    player = Player(TrustingHyperband(LADDER), misleading).play_on(4, 600, random.Random(2))
    late = Counter(trial.rung for trial in player.trials[300:] if trial.origin is None)
    assert late[1] + late[2] < 0.1 * sum(late.values())
    assert late[0] / 27 <= 1 + late[3] / 4 / (PROBE - 1)


def test_trust_comes_back_with_agreement() -> None:
    turn = 300

    def loss(origin: int, budget: float) -> float:
        return misleading(origin, budget) if origin < turn else true(origin, budget)

    player = Player(TrustingHyperband(LADDER), loss).play_on(1, 3000, random.Random(4))
    late = Counter(trial.rung for trial in player.trials[2000:] if trial.origin is None)
    assert late[0] > late[3]


def test_a_rung_on_which_every_trial_fails_is_left_out() -> None:
    rounds = TrustingHyperband(LADDER)
    player = Player(rounds, lambda origin, budget: None if budget == 1 else true(origin, budget))
    player.play_on(1, 100, random.Random(5))
    assert counts(player)[0] == 27
    assert Counter(trial.rung for trial in player.finished if trial.state is TrialState.COMPLETE)[3] > 8


@cases(
    "limit, slots, lowest",
    [
        *[(40, 1, 0), (39, 1, 1), (17, 1, 1), (16, 1, 2), (8, 1, 2), (7, 1, 3), (53, 2, 0), (52, 2, 1)],
        *[(859, 64, 0), (858, 64, 1), (269, 64, 1), (268, 64, 2), (71, 64, 2), (70, 64, 3), (40, 0, 0)],
    ],
)
def test_trials_begin_at_the_lowest_budget_whose_round_fits_in_the_limit(limit: int, slots: int, lowest: int) -> None:
    rounds = TrustingHyperband(LADDER, limit)
    assert rounds.present.notice is None
    rounds.offers(slots)
    [first] = rounds.offers()
    assert (first.rung, first.budget) == (lowest, 3.0**lowest)
    assert (rounds.present.notice is None) == (lowest == 0 or slots == 0)
    if rounds.present.notice is not None:
        assert f"starts at budget {3**lowest}: with a limit of {limit} trials" in rounds.present.notice


@pytest.mark.parametrize("limit", [3, 11, 41, 131])
def test_a_limit_always_leaves_trials_at_the_top(limit: int) -> None:
    for slots, spread in itertools.product([1, 8, 64], [0.01, 1.0]):
        case = f"{slots} slots, spread {spread}"
        gauss = functools.partial(random.Random(case).gauss, 0, spread)
        rounds = TrustingHyperband(LADDER, limit)
        rounds.offers(slots)
        # The generator is bound now: the next one must not stand in for it.
        player = Player(rounds, true).play_out(slots, limit, lambda budget, gauss=gauss: budget * (1 + abs(gauss())))
        assert len(player.finished) == limit, case
        assert Counter(trial.rung for trial in player.finished)[3], case


@pytest.mark.parametrize("spent", [{"budget": 2.0}, {"state": TrialState.FAILED}])
def test_a_resumed_study_begins_at_a_budget_whose_round_fits_in_what_is_left(spent: dict[str, Any]) -> None:
    """Trials that failed, and those of another ladder, are taken off the limit."""
    rounds = TrustingHyperband(LADDER, 49)
    for number in range(40):
        facts = {"budget": 1.0, **spent}
        rounds.add(Trial(number=number, subspace="all", params={}, rung=0, **facts))
    rounds.offers(1)
    assert [offer.budget for offer in rounds.offers()] == [9.0]
    assert "49 trials, 40 of which have failed or had other budgets, few" in str(rounds.present.notice)


def test_without_a_limit_trials_begin_at_the_lowest_budget_on_any_number_of_slots() -> None:
    rounds = TrustingHyperband(LADDER)
    rounds.offers(1000)
    assert [offer.rung for offer in rounds.offers()] == [0]
    assert rounds.present.notice is None


def test_of_a_finite_search_the_best_trial_comes_to_the_top() -> None:
    rounds = TrustingHyperband(LADDER)
    player = Player(rounds, lambda origin, budget: None if origin < 4 else true(origin, budget))
    for trial in player.ask_all(5):
        player.finish(trial)
    rounds.end_draws()
    for _ in range(3):
        trial = player.ask()
        assert trial is not None
        assert trial.origin == 4
        player.finish(trial)
    assert player.finished[-1].budget == 27


def test_a_resumed_study_goes_on_with_the_same_brackets() -> None:
    player = Player(TrustingHyperband(LADDER), misleading).play_on(3, 150, random.Random(6))
    again = player.resumed(TrustingHyperband(LADDER))
    for each in (player, again):
        each.play_on(1, 220, random.Random(7))
    assert [(trial.rung, trial.origin) for trial in player.trials] == [
        (trial.rung, trial.origin) for trial in again.trials
    ]
