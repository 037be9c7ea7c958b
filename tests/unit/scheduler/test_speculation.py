"""A trial is copied where it has taken far longer than expected and another machine idles; never without need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.placement.copies import (
    AGAIN_SECONDS,
    LATE_FACTOR,
    LOOK_SECONDS,
    MIN_TIMED,
    Idle,
    Speculation,
    most_copies,
)
from shadho_celery.placement.model import CostModel
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SUBSPACES = split(compile_space({"x": hp.uniform("x", 0, 1)}))
[SUBSPACE] = SUBSPACES


def made(number: int, **facts: Any) -> Trial:
    return Trial(number=number, subspace=SUBSPACE.name, params={"x": 0.5}, **facts)


def model(seconds: float = 10.0, trials: int = 50, **others: float) -> CostModel:
    """A cost model that has seen so many trials of `seconds` on ``cpu``, and of each other class named."""
    found = CostModel(SUBSPACES)
    for name, each in {"cpu": seconds, **others}.items():
        ended = Outcome(state=TrialState.COMPLETE, seconds=each)
        found.tell(*(made(n, state=TrialState.COMPLETE, compute_class=name, outcome=ended) for n in range(trials)))
    return found


def running(
    number: int, since: float = 0.0, host: str = "a", compute_class: str = "cpu", **facts: Any
) -> tuple[Trial, float]:
    where = {"state": TrialState.RUNNING, "attempt": 1, "compute_class": compute_class, "host": host}
    return made(number, **where | facts), since


def idle(compute_class: str = "cpu", slots: int = 1, **facts: Any) -> Idle:
    return Idle(compute_class=compute_class, **{"slots": slots, "hosts": {"b": slots}, **facts})


def copied(
    now: float,
    trials: Sequence[tuple[Trial, float]],
    places: Sequence[Idle],
    most: int = 9,
    costs: CostModel | None = None,
) -> list[tuple[int, str]]:
    found = Speculation(costs or model()).ask(trials, lambda: places, most, now)
    return [(trial.number, compute_class) for trial, compute_class in found]


LATE = 10 * LATE_FACTOR * 1.2


def test_a_trial_is_late_once_it_has_run_several_times_as_long_as_expected() -> None:
    assert copied(0.8 * LATE - 0.1, [running(0)], [idle()]) == []
    assert copied(LATE, [running(0)], [idle()]) == [(0, "cpu")]


def test_until_then_nothing_needs_to_be_asked_and_at_that_moment_it_is_due() -> None:
    speculation = Speculation(model())
    assert speculation.ask([running(0), running(1, since=5.0)], lambda: [idle()], 9, now=0.0) == []
    assert speculation.due == pytest.approx(10 * LATE_FACTOR, rel=0.1)
    assert [t.number for t, _ in speculation.ask([running(0)], lambda: [idle()], 9, now=speculation.due)] == [0]
    assert speculation.due == math.inf


def test_short_trials_are_given_a_second_in_any_case() -> None:
    costs = model(seconds=0.01)
    assert copied(0.9, [running(0)], [idle()], costs=costs) == []
    assert copied(1.1, [running(0)], [idle()], costs=costs) == [(0, "cpu")]


def test_of_a_class_that_little_is_known_of_no_trial_is_late() -> None:
    assert copied(1e6, [running(0)], [idle()], costs=model(trials=MIN_TIMED - 1)) == []
    assert copied(1e6, [running(0)], [idle()], costs=model(trials=MIN_TIMED)) == [(0, "cpu")]


def test_a_trials_budget_is_part_of_what_is_expected_of_it() -> None:
    assert copied(LATE, [running(0, budget=9.0)], [idle()]) == []
    assert copied(9 * LATE, [running(0, budget=9.0)], [idle()]) == [(0, "cpu")]


def test_no_trial_goes_to_the_machine_that_it_runs_on() -> None:
    assert copied(LATE, [running(0, host="b")], [idle()]) == []
    assert copied(LATE, [running(0, host="b")], [idle(hosts={"b": 1, "a": 0})]) == []
    assert copied(LATE, [running(0, host="b")], [idle(hosts={"b": 1, "a": 1})]) == [(0, "cpu")]


def test_no_trial_goes_where_it_is_expected_to_take_longer_than_it_has_run_and_it_is_known_when_that_is_over() -> None:
    speculation = Speculation(model(slow=100.0))
    assert speculation.ask([running(0)], lambda: [idle("slow")], 9, now=LATE) == []
    assert speculation.due == pytest.approx(100, rel=0.1)
    assert speculation.ask([running(0)], lambda: [idle("slow")], 9, now=speculation.due) != []


def test_the_class_that_is_the_fastest_for_it_is_taken_and_one_that_it_does_not_fit_is_not() -> None:
    costs = model(fast=2.0, faster=1.0)
    places = [idle("cpu"), idle("fast"), idle("faster", fits=lambda trial: False)]
    assert copied(LATE, [running(0)], places, costs=costs) == [(0, "fast")]


def test_no_more_are_copied_than_may_be_and_than_there_are_slots_the_latest_first() -> None:
    trials = [running(number, since=float(-number)) for number in range(6)]
    assert copied(LATE, trials, [idle(slots=4)], most=2) == [(5, "cpu"), (4, "cpu")]
    assert len(copied(LATE, trials, [idle(slots=4)])) == 4
    assert copied(LATE, trials, [idle(slots=4)], most=0) == []
    assert copied(LATE, trials, []) == []


def test_between_two_looks_it_is_only_noted_when_the_next_one_is() -> None:
    speculation = Speculation(model())
    speculation.ask([], lambda: [idle()], 9, now=LATE)
    assert speculation.ask([running(0)], lambda: [idle()], 9, now=LATE + LOOK_SECONDS / 2) == []
    assert speculation.due == LATE + LOOK_SECONDS


def test_a_trial_whose_copies_come_to_nothing_is_copied_again_after_pauses_that_grow() -> None:
    speculation = Speculation(model())
    moments = []
    now = LATE
    while now < LATE + 10 * AGAIN_SECONDS:
        if speculation.ask([running(0)], lambda: [idle()], 9, now):
            moments.append(now)
        assert speculation.due > now, "no wait for it is in vain"
        now = min(speculation.due, now + LOOK_SECONDS)
    pauses = [later - earlier for earlier, later in pairwise(moments)]
    assert pauses == pytest.approx([AGAIN_SECONDS, 2 * AGAIN_SECONDS, 4 * AGAIN_SECONDS], abs=LOOK_SECONDS)


def test_the_pause_of_one_trial_is_not_that_of_another() -> None:
    speculation = Speculation(model())
    assert [t.number for t, _ in speculation.ask([running(0)], lambda: [idle()], 9, LATE)] == [0]
    found = speculation.ask([running(0), running(1)], lambda: [idle(slots=2)], 9, LATE + LOOK_SECONDS)
    assert [t.number for t, _ in found] == [1]


def test_a_tenth_of_a_round_may_be_copied_at_a_time_and_one_trial_in_any_case() -> None:
    assert [most_copies(size) for size in (0, 1, 9, 19, 20, 81)] == [1, 1, 1, 1, 2, 8]
