"""A low rung is trusted as far as its ranks have agreed with those of the next one."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from typing import Any

import pytest
from msgspec.structs import replace
from services.cases import cases
from services.rounds import Player

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.asha import PILOTS, PROBE, TrustingAsha
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


def test_where_ranks_agree_all_but_a_few_trials_begin_at_the_lowest_budget_and_a_third_is_promoted() -> None:
    player = Player(TrustingAsha(LADDER), true).play_on(4, 600, random.Random(1))
    assert counts(player)[0] == sum(counts(player).values())
    on = Counter(trial.rung for trial in player.finished)
    assert 0.25 < on[1] / on[0] < 0.6


def test_where_they_do_not_trials_begin_at_the_full_budget_but_for_those_that_ask_again() -> None:
    player = Player(TrustingAsha(LADDER), misleading).play_on(4, 600, random.Random(2))
    drawn = counts(player)
    assert drawn[3] > 0.5 * sum(drawn.values())
    assert sum(drawn.values()) // PROBE <= drawn[0] < 0.3 * sum(drawn.values())


def test_the_first_trials_go_through_all_rungs_the_worst_one_too() -> None:
    player = Player(TrustingAsha(LADDER), true).play_on(1, 4 * PILOTS, random.Random(3))
    assert Counter(trial.rung for trial in player.finished) == dict.fromkeys(range(4), PILOTS)


def test_trust_comes_back_with_agreement() -> None:
    turn = 300

    def loss(origin: int, budget: float) -> float:
        return misleading(origin, budget) if origin < turn else true(origin, budget)

    player = Player(TrustingAsha(LADDER), loss).play_on(1, 3000, random.Random(4))
    late = Counter(trial.rung for trial in player.trials[2000:] if trial.origin is None)
    assert late[0] > 0.9 * sum(late.values())


@cases(
    "limit, slots, lowest",
    [
        *[(40, 1, 0), (39, 1, 1), (13, 1, 1), (12, 1, 2), (4, 1, 2), (3, 1, 3), (53, 2, 0), (52, 2, 1)],
        *[(859, 64, 0), (858, 64, 1), (265, 64, 1), (264, 64, 2), (67, 64, 2), (66, 64, 3), (40, 0, 0)],
    ],
)
def test_trials_begin_at_the_lowest_budget_whose_round_fits_in_the_limit(limit: int, slots: int, lowest: int) -> None:
    rounds = TrustingAsha(LADDER, limit)
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
        rounds = TrustingAsha(LADDER, limit)
        rounds.offers(slots)
        # The generator is bound now: the next one must not stand in for it.
        player = Player(rounds, true).play_out(slots, limit, lambda budget, gauss=gauss: budget * (1 + abs(gauss())))
        assert len(player.finished) == limit, case
        assert Counter(trial.rung for trial in player.finished)[3], case


@pytest.mark.parametrize("spent", [{"budget": 2.0}, {"state": TrialState.FAILED}])
def test_a_resumed_study_begins_at_a_budget_whose_round_fits_in_what_is_left(spent: dict[str, Any]) -> None:
    """Trials that failed, and those of another ladder, are taken off the limit."""
    rounds = TrustingAsha(LADDER, 46)
    for number in range(40):
        facts = {"budget": 1.0, **spent}
        rounds.add(Trial(number=number, subspace="all", params={}, rung=0, **facts))
    rounds.offers(1)
    assert [offer.budget for offer in rounds.offers()] == [9.0]
    assert "46 trials, 40 of which have failed or had other budgets, few" in str(rounds.present.notice)


def test_a_pruned_pilot_goes_no_further_and_is_followed_by_no_other() -> None:
    rounds = TrustingAsha(LADDER)
    for number in range(PILOTS):
        trial = Trial(number=number, subspace="all", params={}, budget=1.0, rung=0)
        rounds.add(trial)
        outcome = Outcome(state=TrialState.PRUNED, loss=0.5)
        rounds.tell(replace(trial, state=TrialState.PRUNED, outcome=outcome))
    assert [offer.origin for offer in rounds.offers()] == [None]


def test_without_a_limit_trials_begin_at_the_lowest_budget_on_any_number_of_slots() -> None:
    rounds = TrustingAsha(LADDER)
    rounds.offers(1000)
    assert [offer.rung for offer in rounds.offers()] == [0]
    assert rounds.present.notice is None


def test_of_a_finite_search_whose_pilots_fail_another_trial_comes_to_the_top() -> None:
    rounds = TrustingAsha(LADDER)
    player = Player(rounds, lambda origin, budget: None if origin < PILOTS else true(origin, budget))
    for trial in player.ask_all(PILOTS + 1):
        player.finish(trial)
    rounds.end_draws()
    for _ in range(3):
        assert [offer.origin for offer in rounds.offers()] == [PILOTS, None]
        trial = player.ask()
        assert trial is not None
        player.finish(trial)
    assert player.finished[-1].budget == 27
