"""Which trials there are to be: the best of each rung are promoted, and none before its rung is complete."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from services.cases import cases
from services.rounds import Player, shape

from shadho_celery.core.trial import Outcome, Trial, TrialState, whole
from shadho_celery.errors import UsageError
from shadho_celery.fidelity.brackets import SuccessiveHalving
from shadho_celery.fidelity.ladder import LARGEST, Ladder, ladder_of
from shadho_celery.fidelity.rounds import Round, Rounds, Wanted
from shadho_celery.scheduler import plan

S = TrialState


def make_rounds(rungs: Any) -> Any:
    halving = {**rungs, "how": "halving"} if isinstance(rungs, dict) else rungs
    return plan.make_rounds(ladder_of({"fidelity": halving}))


def halving(least: float, most: float, eta: int = 3, backups: int = 0) -> SuccessiveHalving:
    return SuccessiveHalving(
        Ladder.of({"least": least, "most": most, "eta": eta, "backups": backups, "how": "halving"})
    )


def test_without_rounds_every_trial_is_a_new_one_with_all_of_the_fidelity() -> None:
    rounds = Rounds()
    assert [[*rounds.offers()] for _ in range(3)] == [[Wanted(left=math.inf)]] * 3
    assert rounds.present == Round(size=None, left=math.inf)


def test_a_bracket_is_a_ladder_of_budgets_and_the_best_of_each_rung_are_promoted() -> None:
    player = Player(halving(1, 9, 3))
    lowest = player.ask_all()
    assert shape(lowest) == [(0, 1.0, None)] * 9
    for trial in reversed(lowest):
        assert player.ask() is None, "none is promoted before its rung is complete"
        player.finish(trial)
    middle = player.ask_all()
    assert shape(middle) == [(1, 3.0, 0), (1, 3.0, 1), (1, 3.0, 2)]
    for trial in middle:
        player.finish(trial)
    [top] = player.ask_all()
    assert shape([top]) == [(2, 9.0, 0)]
    player.finish(top)
    assert shape(player.ask_all()) == [(0, 1.0, None)] * 9, "the next bracket begins"


@pytest.mark.parametrize(
    ("least", "most", "eta", "budgets"),
    [
        (1, 243, 3, [1, 3, 9, 27, 81, 243]),  # log(243) / log(3) is 4.999...
        (1, 1000, 10, [1, 10, 100, 1000]),
        (0.1, 0.3, 3, [0.1, 0.3]),
        (1, 8, 2, [1, 2, 4, 8]),
    ],
)
def test_the_budgets_are_the_largest_one_divided_by_powers_of_eta(
    least: float, most: float, eta: int, budgets: list[float]
) -> None:
    player = Player(halving(least, most, eta)).play(sum(eta**k for k in range(len(budgets))))
    assert sorted({trial.budget for trial in player.trials if trial.budget}) == pytest.approx(budgets)
    counts = [sum(trial.rung == rung for trial in player.trials) for rung in range(len(budgets))]
    assert counts == [eta ** (len(budgets) - 1 - rung) for rung in range(len(budgets))]


def test_objectives_get_budgets_that_are_whole_numbers_as_ints() -> None:
    def budgets(least: float, most: float) -> list[float | None]:
        player = Player(halving(least, most, 3)).play(13)
        return [whole(budget) for budget in dict.fromkeys(trial.budget for trial in player.trials[:13])]

    assert list(map(repr, budgets(1, 9))) == ["1", "3", "9"]
    assert list(map(repr, budgets(0.5, 4.5))) == ["0.5", "1.5", "4.5"]
    found = [whole(budget) for budget in (3.0, 3, 0.25, 1e300, None)]
    assert list(map(repr, found)) == ["3", "3", "0.25", "1e+300", "None"], "stores take no int of 300 digits"


def test_which_trials_are_promoted_does_not_depend_on_the_order_of_their_ends() -> None:
    def promoted(seed: int) -> set[tuple[int | None, int | None]]:
        rounds = halving(1, 27, 3)
        player = Player(rounds, lambda origin, budget: (origin * 7919 % 31) // 4)  # with ties
        player.play(80, random.Random(seed))
        return {(trial.rung, trial.origin) for trial in player.trials[:80] if trial.rung}

    assert len({frozenset(promoted(seed)) for seed in range(10)}) == 1


def test_a_failed_trial_counts_as_the_worst_and_is_never_promoted() -> None:
    player = Player(halving(1, 9, 3), lambda origin, budget: None if origin < 7 else float(origin))
    for trial in player.ask_all():
        player.finish(trial)
    assert [trial.origin for trial in player.ask_all()] == [7, 8]


def test_a_rung_on_which_all_fail_ends_its_bracket() -> None:
    player = Player(halving(1, 9, 3), lambda origin, budget: None)
    for trial in player.ask_all():
        player.finish(trial)
    assert shape(player.ask_all()) == [(0, 1.0, None)] * 9


def test_a_trial_taken_off_a_higher_rung_is_asked_for_again() -> None:
    player = Player(halving(1, 9, 3))
    for trial in player.ask_all():
        player.finish(trial)
    middle = player.ask_all()
    player.finish(middle[1], S.CANCELLED)
    assert shape(player.ask_all()) == [(1, 3.0, 1)]


@pytest.mark.parametrize("ended", [0, 3])
def test_a_trial_taken_off_the_lowest_rung_is_drawn_anew_and_tells_nothing(ended: int) -> None:
    player = Player(halving(1, 9, 3))
    for place, trial in enumerate(player.ask_all()):
        player.finish(trial, None if place < ended else S.CANCELLED)
    [drawn] = player.rounds.offers()
    assert drawn == Wanted(budget=1.0, rung=0, drawn=9 + 9 - ended, left=9 - ended), (
        "those that were cancelled were drawn too"
    )
    again = player.ask_all()
    assert shape(again) == [(0, 1.0, None)] * (9 - ended)
    for trial in reversed(again):
        player.finish(trial)
    assert [trial.origin for trial in player.ask_all()] == [*range(ended), *range(9, 12 - ended)]


def test_a_search_stopped_on_the_lowest_rung_and_resumed_promotes_those_that_were_compared_with_all() -> None:
    first = Player(halving(1, 27, 3))
    for place, trial in enumerate(first.ask_all()):
        first.finish(trial, None if place < 3 else S.CANCELLED)
    second = first.resumed(halving(1, 27, 3))
    second.loss = lambda origin, budget: -origin
    second.finished.clear()
    assert second.rounds.offers() == first.rounds.offers() == [Wanted(budget=1.0, rung=0, drawn=27 + 24, left=24)]
    second.play(40 - 3)
    assert [sum(t.rung == rung for t in second.trials[27:]) for rung in range(4)] == [24, 9, 3, 1]
    assert {trial.origin for trial in second.trials if trial.rung == 1} == set(range(42, 51)), "the best of all"


def test_new_trials_are_numbered_so_that_each_round_has_its_own_set() -> None:
    player = Player(halving(1, 9, 3))
    assert player.rounds.offers() == [Wanted(budget=1.0, rung=0, drawn=9, left=9)]
    player.play(13)
    assert player.rounds.offers() == [Wanted(budget=1.0, rung=0, drawn=18, left=9)]


def test_size_and_left_are_those_of_the_rung_that_is_open() -> None:
    rounds = halving(1, 9, 3)
    player = Player(rounds)
    assert rounds.present == Round(size=9, left=9)
    lowest = player.ask_all()
    assert rounds.present == Round(size=9, left=0)
    for trial in lowest:
        player.finish(trial)
    assert rounds.present == Round(size=3, left=3)


# Backups: the first n of n + b


def test_with_backups_a_rung_is_over_after_the_first_results_and_the_late_ones_are_not_promoted() -> None:
    player = Player(halving(1, 9, 3, backups=2))
    lowest = player.ask_all()
    assert len(lowest) == 11
    # The two best are late.
    for trial in lowest[2:]:
        player.finish(trial)
    middle = player.ask_all()
    assert [trial.origin for trial in middle] == [2, 3, 4, 5, 6]
    for trial in lowest[:2]:
        player.finish(trial)
    assert player.ask_all() == []
    for trial in middle[:3]:
        player.finish(trial)
    assert [trial.origin for trial in player.ask_all()] == [2, 3, 4]


def test_with_backups_no_more_are_drawn_once_there_are_results_enough() -> None:
    """As where there are fewer slots than trials in a round."""
    player = Player(halving(1, 3, 3, backups=5))
    for _ in range(3):
        trial = player.ask()
        assert trial is not None
        player.finish(trial)
    assert [trial.origin for trial in player.ask_all()] == [0, 1, 2]


@cases("at", range(1, 60, 5))
def test_a_resumed_round_whose_backups_were_not_drawn_takes_no_draws_of_the_next_one(at: int) -> None:
    """On one slot the results are there before the backups: the next new trial is of the next round."""
    first = Player(halving(1, 9, 3, backups=2)).play_on(1, at, random.Random(0))
    resumed = first.resumed(halving(1, 9, 3, backups=2)).rounds
    assert (resumed.offers(), resumed.present) == (first.rounds.offers(), first.rounds.present)


# Carried on


@cases("backups", [0, 2])
@cases("at", range(0, 40, 9))
def test_rounds_told_of_what_was_go_on_as_those_that_were_there(at: int, backups: int) -> None:
    def loss(origin: int, budget: float) -> float | None:
        return None if origin % 11 == 5 else origin * 7919 % 101 / budget

    first = Player(halving(1, 9, 3, backups), loss)
    choice = random.Random(at)
    while len(first.finished) < at:
        first.ask_all()
        first.finish(choice.choice([trial for trial in first.trials if not trial.state.is_finished]))
    second = first.resumed(halving(1, 9, 3, backups))
    for _ in range(40):
        assert shape(first.ask_all()) == shape(second.ask_all())
        left = [trial for trial in first.trials if not trial.state.is_finished]
        trial = choice.choice(left)
        first.finish(trial)
        second.finish(trial)


def test_trials_of_another_ladder_or_of_none_are_left_alone() -> None:
    rounds = halving(1, 9, 3)
    others: list[dict[str, Any]] = [{}, {"rung": 0, "budget": 2.0}, {"rung": 7, "budget": 1.0}]
    for number, facts in enumerate(others):
        outcome = Outcome(state=S.COMPLETE, loss=0.0)
        trial = Trial(number=number, subspace="all", params={}, state=S.COMPLETE, outcome=outcome, **facts)
        rounds.add(trial)
        rounds.tell(trial)
    assert rounds.present.left == 9


# What makes no ladder

FORM = "give a dict such as {'least': 1, 'most': 81, 'eta': 3, 'how': 'asha'}"


def nested(levels: int) -> dict[str, Any]:
    """A dict in a dict in a dict."""
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"all": found}
    return found


@cases(
    "settings, said",
    [
        ({"least": 1}, ["fidelity.most: it is missing", FORM]),
        ({"least": 1, "most": 9, "eta": 1}, ["fidelity.eta: 1", "at least 2", FORM]),
        ({"least": 1, "most": 9, "eta": 2.5}, ["fidelity.eta: 2.5 is not a whole number", FORM]),
        ({"least": 0, "most": 9}, ["fidelity.least: 0", "above 0", FORM]),
        (
            {"least": 1, "most": math.inf},
            ["fidelity.most: inf", "a budget is a number above 0 that fits a float", FORM],
        ),
        ({"least": 9, "most": 1}, ["'most' is 1 and 'least' is 9", "let 'most' be 3 times 'least' or more"]),
        (
            {"least": 1, "most": 2, "eta": 3},
            ["one rung only with eta 3; lower 'eta', or let 'most' be 3 times"],
        ),
        ({"least": 1, "most": 9, "backups": -1}, ["fidelity.backups: -1", "at least 0", FORM]),
        ({"least": 1, "most": 9, "eat": 3}, ["fidelity.eat: there is no such key", "least, most, eta, backups", FORM]),
        ({"least": 1, "max": 9}, ["max: there is no such key", "here it is most"]),
        (
            {"grace_period": 1, "max_t": 9, "reduction_factor": 3},
            ["fidelity.grace_period: there is no such key; here it is least"],
        ),
        ({"least": 1e-9, "most": 1}, ["fidelity", f"over {LARGEST} trials a round", "raise 'least'"]),
        ({"least": 1, "most": 10**308}, ["raise 'least'"]),
        ({"least": 2**60, "most": 2**60 * 9 + 1}, ["most: no float holds 10376293541461622785", "write "]),
        ({"least": 1, "most": 10**400}, ["fidelity.most: 10000000000", FORM]),
        ({"least": 1, "most": math.nan}, ["fidelity.most: nan", FORM]),
        ({"least": 1, "most": 9, "eta": 10**400}, ["fidelity.eta: 1000", f"at most {LARGEST}", FORM]),
        ({"least": 1, "most": 9, "backups": LARGEST}, ["raise 'least'"]),
        (3, ["3 is not a dict of settings", FORM]),
        (False, ["False is not a dict of settings", FORM]),
        ({"least": 1, "\ud800": 3}, ["fidelity.\\ud800: there is no such key; known are least", FORM]),
        ({np.str_("least"): 1}, ["fidelity.most: it is missing", FORM]),
        (nested(3000), ["fidelity.all: there is no such key", FORM]),
    ],
)
def test_settings_that_make_no_ladder_are_refused_in_one_line_that_names_key_cause_and_remedy(
    settings: Any, said: list[str]
) -> None:
    with pytest.raises(UsageError) as caught:
        make_rounds(settings)
    message = str(caught.value)
    assert all(part in message for part in said), message
    assert "\n" not in message
    assert len(message) < 300


def test_budgets_may_be_numpys_floats() -> None:
    """A numpy float64 is a Python float."""
    rounds = make_rounds({"least": np.float64(1.0), "most": np.float64(9.0)})
    assert rounds.present.size == 9


def test_the_settings_make_the_rounds() -> None:
    assert type(make_rounds(None)) is Rounds
    assert make_rounds({"least": 1, "most": 27}).present.size == 27
    assert make_rounds({"least": 1, "most": 16, "eta": 2, "backups": 3}).present.size == 19
