"""The bound of throughput: what a fleet can complete, and what one more slot adds."""

from __future__ import annotations

import math
from typing import Any

import pytest

from shadho_celery.placement.bound import Cheapest, cheapest, throughput_bound


def test_each_class_gets_the_kind_for_which_it_is_comparatively_fast() -> None:
    seconds = {"network": {"gpu": 1.0, "cpu": 100.0}, "tree": {"gpu": 1.0, "cpu": 1.0}}
    bound = throughput_bound(seconds, {"gpu": 1.0, "cpu": 1.0})
    assert bound.rate == pytest.approx(2.0)


def test_what_a_slot_adds_is_what_the_bound_gains_by_it() -> None:
    seconds = {"a": {"fast": 1.0, "slow": 3.0}, "b": {"fast": 2.0, "slow": 4.0}}
    mix = {"a": 0.7, "b": 0.3}
    bound = throughput_bound(seconds, {"fast": 2.0, "slow": 5.0}, mix)
    for name in ("fast", "slow"):
        more = throughput_bound(seconds, {"fast": 2.0, "slow": 5.0, name: {"fast": 2.01, "slow": 5.01}[name]}, mix)
        assert (more.rate - bound.rate) / 0.01 == pytest.approx(bound.per_slot[name], rel=1e-6)


def test_the_slots_together_are_worth_the_whole_bound() -> None:
    seconds = {"a": {"x": 1.0, "y": 7.0}, "b": {"x": 5.0, "y": 2.0}, "c": {"x": 3.0, "y": 3.0}}
    slots = {"x": 3.0, "y": 4.0}
    bound = throughput_bound(seconds, slots)
    assert sum(slots[name] * bound.per_slot[name] for name in slots) == pytest.approx(bound.rate)


@pytest.mark.parametrize(("seconds", "slots"), [({}, {"x": 1.0}), ({"a": {"x": 1.0}}, {"x": 0.0}), ({"a": {}}, {})])
def test_without_trials_or_slots_there_is_no_bound(
    seconds: dict[str, dict[str, float]], slots: dict[str, float]
) -> None:
    with pytest.raises(ValueError, match="a bound needs"):
        throughput_bound(seconds, slots)


SECONDS = {"net": {"gpu": 60.0, "cpu": 600.0}, "tree": {"gpu": 60.0, "cpu": 90.0}}
TRIALS = {"net": 300.0, "tree": 200.0}
SLOTS, PRICES = {"gpu": 4.0, "cpu": 10.0}, {"gpu": 2.5, "cpu": 0.1}


def at(time: float, **changes: Any) -> Cheapest | None:
    given = {"seconds": SECONDS, "trials": TRIALS, "slots": SLOTS, "prices": PRICES, **changes}
    return cheapest(**given, times=dict.fromkeys(SLOTS, time))


def test_with_time_enough_each_kind_runs_where_a_trial_costs_least() -> None:
    found = at(1e6)
    assert found is not None
    least = 300 * min(60 * 2.5, 600 * 0.1) / 3600 + 200 * min(60 * 2.5, 90 * 0.1) / 3600
    assert (found.money, found.an_hour) == (pytest.approx(least), pytest.approx(0.0, abs=1e-9))


def test_a_shorter_time_costs_more_by_at_least_what_the_duals_say_and_a_longer_one_saves_at_most_that() -> None:
    hours = [4.0, 5.0, 6.0]
    found = [each for hour in hours if (each := at(3600 * hour)) is not None]
    less, now, more = found
    assert less.money - now.money >= now.an_hour - 1e-9
    assert now.an_hour + 1e-9 >= now.money - more.money


def test_a_time_in_which_no_placement_completes_the_trials_has_no_cheapest_one() -> None:
    rate = throughput_bound(SECONDS, SLOTS, TRIALS).rate
    assert at(0.999 * 500 / rate) is None
    found = at(1.001 * 500 / rate)
    assert found is not None
    assert found.slots == pytest.approx(SLOTS, rel=0.01)


def test_a_trial_of_several_slots_takes_as_many_slot_seconds_as_trials_of_one() -> None:
    wide, narrow = at(1e5, widths={"net": 2, "tree": 3}), at(1e5, trials={"net": 600.0, "tree": 600.0})
    assert wide is not None
    assert narrow is not None
    assert (wide.money, wide.slots) == (pytest.approx(narrow.money), pytest.approx(narrow.slots))
    assert max(wide.seconds.values()) <= 600.0, "the seconds of a trial, not its slot seconds"


def test_a_kind_that_must_not_run_on_a_class_runs_on_the_others() -> None:
    only = {"net": {"gpu": 60.0, "cpu": math.inf}, "tree": {"gpu": math.inf, "cpu": 90.0}}
    found = at(1e5, seconds=only)
    assert found is not None
    assert found.seconds == pytest.approx({"gpu": 60.0, "cpu": 90.0})
    assert at(1e5, seconds=only | {"net": {"gpu": math.inf, "cpu": math.inf}}) is None
