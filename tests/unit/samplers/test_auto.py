"""Which sampler `auto` asks follows from the space and the history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.trial import NO_OUTCOME, Outcome, Trial, TrialState
from shadho_celery.samplers.auto import (
    AT_FIRST,
    FIRST,
    MOST_LABELS,
    MOST_TRIALS,
    AutoSampler,
    Decade,
    decade_of,
    keeps_up,
    turn_of_gp,
)
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

NUMBERS = [hp.uniform(f"x{place}", 0, 1) for place in range(2)]


def whole(space: Any) -> Subspace:
    return split(compile_space(space), max_subspaces=1)[0]


def trials(space: Any, number: int, noise: bool = False, seconds: float = 60.0) -> list[Trial]:
    generator = np.random.default_rng(0)
    found = []
    for place, params in enumerate(whole(space).sample(generator, number)):
        loss = float(generator.normal()) if noise else float(params["x0"]) ** 2
        outcome = Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)
        found.append(Trial(number=place, subspace="all", params=params, state=outcome.state, outcome=outcome))
    return found


def test_a_smooth_function_of_few_numbers_is_for_gp() -> None:
    auto, gp = AutoSampler(whole(NUMBERS), (0, 0)), GpSampler(whole(NUMBERS), (0, 0))
    for sampler in (auto, gp):
        sampler.tell(trials(NUMBERS, 30))
    assert auto.ask(2, []) == gp.ask(2, [])
    assert auto.choice.startswith("gp: it predicts ")


def test_several_losses_are_for_tpe() -> None:
    auto, tpe = AutoSampler(whole(NUMBERS), (0, 0)), TpeSampler(whole(NUMBERS), (0, 0))
    told = [
        replace(trial, outcome=Outcome(state=trial.state, loss=x, losses={"a": x, "b": 1 - x}))
        for trial in trials(NUMBERS, 30)
        if (x := float(trial.params["x0"])) >= 0
    ]
    for sampler in (auto, tpe):
        sampler.tell(told)
    assert auto.ask(2, []) == tpe.ask(2, [])
    assert auto.choice == "tpe: it learns 2 losses at once"


def test_where_nothing_can_be_foretold_both_are_asked_by_turns() -> None:
    auto, gp = AutoSampler(whole(NUMBERS), (0, 0)), GpSampler(whole(NUMBERS), (0, 0))
    for sampler in (auto, gp):
        sampler.tell(trials(NUMBERS, 60, noise=True))
    asked = auto.ask(4, [])
    assert auto.choice == "gp and tpe alternating: gp predicts less than 10% of the variance of the losses"
    assert asked[:2] == gp.ask(2, [])
    assert asked[2:] != gp.ask(4, [])[2:]


def chosen(space: Any, number: int, limit: int | None, seconds: float = 60.0, pending: int = 0) -> str:
    auto = AutoSampler(whole(space), (0, 0), limit=limit)
    told = trials(space, number, seconds=seconds)
    auto.tell(told)
    auto.ask(1, [replace(trial, state=TrialState.RUNNING, outcome=NO_OUTCOME) for trial in told[:pending]])
    return auto.choice


def test_many_labels_are_for_tpe() -> None:
    wide = [hp.uniform(f"x{place}", 0, 1) for place in range(MOST_LABELS + 1)]
    auto, tpe = AutoSampler(whole(wide), (0, 0), limit=100), TpeSampler(whole(wide), (0, 0))
    for sampler in (auto, tpe):
        sampler.tell(trials(wide, 20))
    assert auto.ask(2, []) == tpe.ask(2, [])
    assert auto.choice == f"tpe: {MOST_LABELS + 1} hyperparameters are more than {MOST_LABELS}"


@pytest.mark.slow
def test_many_short_trials_are_for_tpe_after_the_first_ones() -> None:
    """A study of up to 500 trials asks gp throughout, a longer one in the beginning and where gp keeps up."""
    assert chosen(NUMBERS, AT_FIRST + 20, limit=MOST_TRIALS).startswith("gp: ")
    for limit in (MOST_TRIALS + 1, None):
        assert chosen(NUMBERS, AT_FIRST, limit=limit, seconds=1.5).startswith("gp: ")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=0.1).startswith("tpe: trials take 0.1 to 1 s")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=10.0).startswith("gp: ")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=10.0, pending=64).startswith("gp: ")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=1.5, pending=16).startswith("gp: ")
        assert chosen(NUMBERS, AT_FIRST + 1, limit=limit, seconds=1.5, pending=64).startswith("tpe: ")


def test_gp_keeps_up_with_more_slots_the_longer_trials_are_and_the_less_a_proposal_takes() -> None:
    def slots(seconds: float | None, labels: int = 6, results: int = 300, functions: int = 1) -> int:
        return sum(keeps_up(seconds, trials, labels, results, functions) for trials in range(1, 2000))

    assert slots(None) == 0
    assert 64 < slots(10.0) < slots(100.0)
    assert slots(10.0) > max(slots(1.0), slots(10.0, labels=30), slots(10.0, functions=3))
    assert slots(10.0, results=50) > slots(10.0) == slots(10.0, results=10_000)


# Short trials


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "every"), [(0.002, 13), (0.3, 3), (60.0, 1)])
def test_the_shorter_trials_are_the_fewer_of_them_are_proposed_by_gp(seconds: float, every: int) -> None:
    assert turn_of_gp(Decade(decade_of([seconds])).allowed_ms, labels=2, results=50) == every
    auto, gp = AutoSampler(whole(NUMBERS), (0, 0), limit=100), GpSampler(whole(NUMBERS), (0, 0))
    gp.is_quick, gp.rare_from = seconds < 1, FIRST
    told = trials(NUMBERS, 60, seconds=seconds)
    by_gp = set()
    for number, trial in enumerate(told):
        if number >= FIRST and auto.ask(1, []) == gp.ask(1, []):
            by_gp.add(number)
        for sampler in (auto, gp):
            sampler.tell([trial])
    assert by_gp == {number for number in range(FIRST, 60) if number % every == 0}


def test_with_short_trials_gp_and_tpe_take_turns_and_the_choice_says_why() -> None:
    said = chosen(NUMBERS, FIRST, limit=MOST_TRIALS, seconds=0.002)
    assert said == "gp and tpe in turn: trials take under 0.1 s, which is too short for gp alone"


@pytest.mark.slow
def test_equal_decades_give_equal_proposals_whatever_the_seconds() -> None:
    def asked(seconds: Sequence[float]) -> list[Any]:
        auto, found = AutoSampler(whole(NUMBERS), (0, 0), limit=1000), []
        for trial, took in zip(trials(NUMBERS, 120), np.resize(seconds, 120), strict=True):
            found.append(auto.ask(1, []))
            auto.tell([replace(trial, outcome=replace(trial.outcome, seconds=float(took)))])
        return found

    assert asked([0.11]) == asked([0.2, 0.9, 0.4]) != asked([2.0])


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "first"), [(0.002, 45), (0.3, 15), (60.0, 20)])
def test_a_sampler_that_knows_the_recorded_decade_goes_on_as_one_that_has_found_it(seconds: float, first: int) -> None:
    """As a resumed study: fits to the earlier trials are made all at once."""
    told = trials(NUMBERS, 60, seconds=seconds)
    lessons = [replace(trial, outcome=replace(trial.outcome, seconds=None)) for trial in trials(NUMBERS, 30)]
    for earlier in ([], lessons):
        one, other = (AutoSampler(whole(NUMBERS), (0, 0), limit=200) for _ in range(2))
        one.tell(earlier)
        for trial in told[:first]:
            one.ask(1, [])
            one.tell([trial])
        other.decade = Decade(one.decade.recorded)
        other.tell(earlier)
        other.tell(told[:first])
        for trial in told[first:]:
            assert one.ask(1, []) == other.ask(1, [])
            for sampler in (one, other):
                sampler.tell([trial])
        assert one.decade.recorded == decade_of([seconds])


def test_a_proposal_with_short_trials_is_quick_also_with_many_labels_and_constraints() -> None:
    """The share of gp falls with what its proposals take; where tpe alone takes all that is allowed, there is none."""
    turns = [turn_of_gp(2.0, labels, 50) for labels in (1, 10, 30)]
    assert turns == sorted(turns)
    assert turns[0] >= 10
    assert turn_of_gp(2.0, 2, 300) > turn_of_gp(2.0, 2, 50)
    assert turn_of_gp(10.0, 2, 50, functions=3) > turn_of_gp(10.0, 2, 50)
    assert turn_of_gp(2.0, 60, 50) == 0
    wide = [hp.uniform(f"x{place}", 0, 1) for place in range(MOST_LABELS)]
    assert chosen(wide, 40, limit=MOST_TRIALS, seconds=0.002).startswith("gp and tpe in turn: ")


def test_the_first_trials_cover_the_space() -> None:
    auto = AutoSampler(whole(NUMBERS), (0, 0))
    asked = np.array([[*params.values()] for params in auto.ask(8, [])])
    for column in asked.T:
        assert len({int(8 * value) for value in column}) >= 7
