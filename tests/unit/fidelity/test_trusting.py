"""A low rung is trusted as far as its ranks have agreed with those of the next one."""

from __future__ import annotations

import random
from collections import Counter

from services.rounds import Player

from shadho_celery.fidelity.ladder import Ladder
from shadho_celery.fidelity.trusting import PILOTS, PROBE, TrustingAsha, _agreement

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


def test_agreement_is_kendalls_rank_correlation_and_never_below_0() -> None:
    assert _agreement([(1.0, 1.0), (2.0, 3.0), (3.0, 9.0)]) == 1.0
    assert _agreement([(1.0, 3.0), (2.0, 2.0), (3.0, 1.0)]) == 0.0
    assert _agreement([(1.0, 1.0), (2.0, 3.0), (3.0, 2.0)]) == 1 / 3
    assert _agreement([(1.0, 1.0), (float("inf"), 2.0)]) is None
    assert _agreement([]) is None
