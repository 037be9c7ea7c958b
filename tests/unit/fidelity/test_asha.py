"""ASHA promotes the best 1 / eta of a rung as it stands, and never waits."""

from __future__ import annotations

import random
from collections import Counter

from services.rounds import Player

from shadho_celery.core.trial import TrialState
from shadho_celery.fidelity.asha import Asha
from shadho_celery.fidelity.ladder import Ladder


def asha(least: float = 1, most: float = 9, eta: int = 3) -> Asha:
    return Asha(Ladder.of({"least": least, "most": most, "eta": eta}))


def test_a_trial_is_promoted_once_it_is_the_best_of_eta() -> None:
    player = Player(asha(), lambda origin, budget: -origin)
    for number in range(3):
        trial = player.ask()
        assert trial is not None
        assert (trial.number, trial.rung) == (number, 0)
        player.finish(trial)
    promoted = player.ask()
    assert promoted is not None
    assert (promoted.rung, promoted.origin) == (1, 2)
    fresh = player.ask()
    assert fresh is not None
    assert fresh.rung == 0, "while it runs nothing else may be promoted"


def test_the_highest_rung_is_served_first() -> None:
    player = Player(asha(), lambda origin, budget: -origin)
    while sum(trial.rung == 1 for trial in player.finished) < 3:
        trial = player.ask()
        assert trial is not None
        player.finish(trial)
    top = player.ask()
    assert top is not None
    assert top.rung == 2


def test_about_one_in_eta_of_a_rung_is_promoted() -> None:
    chance = random.Random(0)
    losses = [chance.random() for _ in range(2000)]
    player = Player(asha(1, 27), lambda origin, budget: losses[origin]).play_on(10, 1500, chance)
    counts = Counter(trial.rung for trial in player.finished)
    for rung in range(3):
        assert 0.25 < counts[rung + 1] / counts[rung] < 0.6
    best = min(player.finished, key=lambda trial: losses[trial.number if trial.origin is None else trial.origin])
    assert best.rung == 3 or any(trial.rung == 3 and trial.origin == best.number for trial in player.finished)


def test_what_falls_out_of_the_best_later_stays_promoted_and_a_late_best_is_promoted() -> None:
    player = Player(asha(1, 3), lambda origin, budget: 100.0 - origin)
    player.play_on(1, 90, random.Random(0))
    assert sum(trial.rung == 1 for trial in player.finished) > 20


def test_a_promotion_that_was_cancelled_is_made_again() -> None:
    player = Player(asha(), lambda origin, budget: -origin)
    while (trial := player.ask()) is not None and not trial.rung:
        player.finish(trial)
    assert trial is not None
    player.finish(trial, TrialState.CANCELLED)
    again = player.ask()
    assert again is not None
    assert (again.rung, again.origin) == (trial.rung, trial.origin)
