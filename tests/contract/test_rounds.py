"""For all rounds: every slot has work, nothing is promoted twice, and a resumed study goes on where it was."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hyperopt import hp
from services.cases import cases
from services.rounds import Player

from shadho_celery.core.names import FIDELITIES
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.fidelity.rounds import Rounds
from shadho_celery.scheduler.plan import make_rounds
from shadho_celery.space.compile import compile_space

S = TrialState
SPACE = compile_space(
    hp.choice("model", [{"x": hp.uniform("x", 0, 1)}, {"k": hp.randint("k", 5), "rate": hp.loguniform("rate", -7, 0)}])
)
#: rounds that let a slot wait for the end of a rung
WAITING = {"halving"}

pytestmark = pytest.mark.parametrize("how", FIDELITIES)


def rounds(how: str, most: float = 27) -> Rounds:
    ladder = ladder_of({"fidelity": {"least": 1, "most": most, "eta": 3, "how": how}})
    return make_rounds(ladder, SPACE, seed=0)


def uneven(origin: int, budget: float) -> float | None:
    return None if origin % 11 == 5 else origin * 7919 % 101 / budget


def promotions(trials: list[Trial]) -> Counter[tuple[int | None, int]]:
    return Counter((trial.rung, trial.origin) for trial in trials if trial.origin is not None)


def test_slots_that_become_free_one_by_one_have_work(how: str) -> None:
    player = Player(rounds(how), uneven)
    chance = random.Random(0)
    while len(player.finished) < 300:
        player.ask_all(8 - len(player.running))
        assert len(player.running) == 8 or how in WAITING
        player.finish(chance.choice(player.running))


@cases("seed", range(3))
def test_nothing_is_promoted_twice_nor_before_it_has_a_result_on_the_rung_below(how: str, seed: int) -> None:
    player = Player(rounds(how), uneven)
    chance = random.Random(seed)
    while len(player.finished) < 400:
        for trial in player.ask_all(7 - len(player.running)):
            if trial.origin is not None:
                assert trial.rung
                below = [each for each in player.finished if trial.origin in {each.number, each.origin}]
                assert trial.rung - 1 in {each.rung for each in below if each.state is S.COMPLETE}
        player.finish(chance.choice(player.running))
    assert max(promotions(player.trials).values()) == 1


def test_all_budgets_are_those_of_the_ladder_and_the_top_one_is_reached(how: str) -> None:
    player = Player(rounds(how)).play_on(4, 300, random.Random(1))
    assert {(trial.rung, trial.budget) for trial in player.trials} == {(0, 1.0), (1, 3.0), (2, 9.0), (3, 27.0)}


@cases("slots", [1, 6])
@cases("at", [0, 1, 40, 41, 130, 233])
def test_rounds_told_of_what_was_go_on_as_those_that_were_there(how: str, at: int, slots: int) -> None:
    first = Player(rounds(how), uneven).play_on(slots, at, random.Random(at))
    second = first.resumed(rounds(how))
    for player in (first, second):
        player.play_on(slots, at + 60, random.Random(7))
    assert first.trials == second.trials


@pytest.mark.slow
@cases("seed", range(6))
def test_a_study_stopped_at_any_moment_and_resumed_goes_on_and_promotes_nothing_twice(how: str, seed: int) -> None:
    chance = random.Random(seed)
    player = Player(rounds(how), uneven)
    for _ in range(12):
        slots = chance.choice([6, 20])
        player.play_on(slots, len(player.finished) + chance.randrange(1, 25), chance)
        # Some that ran were cancelled at the stop, the others go on.
        for trial in player.running:
            if chance.random() < 0.3:
                player.finish(trial, S.CANCELLED)
        fresh = player.resumed(rounds(how))
        for each in (player, fresh):
            each.play_on(slots, len(each.finished) + 20, random.Random(seed))
        assert player.trials == fresh.trials
        player = fresh
    assert max(promotions([t for t in player.trials if t.state is not S.CANCELLED]).values()) == 1


def test_a_cancelled_trial_is_made_up_for(how: str) -> None:
    player = Player(rounds(how))
    player.play_on(1, 20, random.Random(2))
    while (promoted := player.ask()) is None or promoted.origin is None:
        for trial in player.running:
            player.finish(trial)
    player.finish(promoted, S.CANCELLED)
    for trial in player.running:
        player.finish(trial)
    again = player.ask_all(30)
    assert (promoted.rung, promoted.origin) in {(trial.rung, trial.origin) for trial in again}


def test_where_all_fail_new_trials_are_drawn_and_none_is_promoted(how: str) -> None:
    player = Player(rounds(how), lambda origin, budget: None).play_on(3, 200, random.Random(3))
    assert not promotions(player.trials)


@cases("loss", [math.inf, -math.inf, 1e300, 0.0])
def test_equal_and_infinite_losses_keep_them_going(how: str, loss: float) -> None:
    player = Player(rounds(how), lambda origin, budget: loss).play_on(3, 200, random.Random(4))
    assert len(player.finished) == 200
    # An infinite loss is that of a failure.
    assert bool(promotions(player.trials)) == (loss < math.inf)


def test_trials_of_other_budgets_or_of_none_are_left_alone(how: str) -> None:
    alone, other = rounds(how), rounds(how)
    facts: list[dict[str, float]] = [{}, {"rung": 0, "budget": 2.0}, {"rung": 7, "budget": 1.0}, {"rung": 1}]
    for number, each in enumerate(facts):
        outcome = Outcome(state=S.COMPLETE, loss=0.0)
        trial = Trial(number=number, subspace="all", params={}, state=S.COMPLETE, outcome=outcome, **each)  # type: ignore[arg-type]
        other.add(trial)
        other.tell(trial)
    assert alone.offers() == other.offers()
    assert alone.present == other.present
