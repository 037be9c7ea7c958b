"""How many slots of each class would shorten the rest of a study."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shadho_celery.placement.bound import Held, Room, at_most, wanted_slots

ONE = {"a": {"x": 10.0}}
MIX = {"a": 1.0}


@pytest.mark.parametrize(
    ("left", "startup", "slots"),
    [
        (0, 0.0, 0),
        (1, 0.0, 1),
        (3, 60.0, 3),
        (20, 0.0, 10),
        (1000, 0.0, 10),
        (math.inf, 60.0, 10),
    ],
)
def test_there_are_no_more_slots_than_trials_and_than_are_needed(left: float, startup: float, slots: int) -> None:
    assert wanted_slots(ONE, MIX, {"x": Room(0, 10, startup)}, left=left) == {"x": slots}


def test_a_class_on_which_one_trial_takes_longer_than_the_rest_elsewhere_is_not_wanted() -> None:
    seconds = {"a": {"gpu": 1.0, "cpu": 30.0}}
    rooms = {"gpu": Room(0, 1), "cpu": Room(0, 10)}
    assert wanted_slots(seconds, MIX, rooms, left=20) == {"gpu": 1, "cpu": 0}
    several = wanted_slots(seconds, MIX, rooms, left=200)
    assert several["gpu"] == 1
    assert several["cpu"] > 5


def test_a_worker_that_would_start_too_late_is_not_wanted() -> None:
    rooms = {"here": Room(2, 2), "cloud": Room(0, 4, 600.0)}
    seconds = {"a": {"here": 10.0, "cloud": 5.0}}
    assert wanted_slots(seconds, MIX, rooms, left=10) == {"here": 2, "cloud": 0}
    assert wanted_slots(seconds, MIX, rooms, left=10_000) == {"here": 2, "cloud": 4}
    assert wanted_slots(seconds, MIX, rooms, left=10_000, seconds_left=300.0) == {"here": 2, "cloud": 0}


def test_live_slots_are_wanted_before_new_ones() -> None:
    rooms = {"x": Room(3, 10), "y": Room(0, 10)}
    assert wanted_slots({"a": {"x": 10.0, "y": 10.0}}, MIX, rooms, left=3) == {"x": 3, "y": 0}


def test_each_kind_gets_the_class_that_suits_it() -> None:
    seconds = {"network": {"gpu": 10.0, "cpu": 1000.0}, "tree": {"gpu": 10.0, "cpu": 10.0}}
    rooms = {"gpu": Room(0, 100), "cpu": Room(0, 100)}
    found = wanted_slots(seconds, {"network": 0.5, "tree": 0.5}, rooms, left=8)
    assert found["gpu"] >= 4
    assert sum(found.values()) == 8


def test_a_wide_trial_wants_all_of_its_slots() -> None:
    assert wanted_slots(ONE, MIX, {"x": Room(0, 64)}, left=3, width=4.0) == {"x": 12}


@pytest.mark.parametrize(("left", "seconds_left"), [(0, math.inf), (10, 0.0), (10, -5.0), (-1, math.inf)])
def test_at_the_end_nothing_is_wanted(left: float, seconds_left: float) -> None:
    assert wanted_slots(ONE, MIX, {"x": Room(2, 10)}, left=left, seconds_left=seconds_left) == {"x": 0}


def test_without_classes_or_trials_nothing_is_wanted() -> None:
    assert wanted_slots(ONE, MIX, {}, left=10) == {}
    assert wanted_slots({}, {}, {"x": Room(0, 2)}, left=10) == {"x": 0}
    assert wanted_slots(ONE, {"a": 0.0}, {"x": Room(0, 2)}, left=10) == {"x": 0}


@pytest.mark.parametrize("seed", range(5))
def test_the_wanted_slots_are_within_their_bounds(seed: int) -> None:
    draw = np.random.default_rng(seed)
    classes = [f"c{place}" for place in range(draw.integers(1, 4))]
    kinds = [f"k{place}" for place in range(draw.integers(1, 6))]
    seconds = {kind: {name: float(10 ** draw.uniform(-2, 4)) for name in classes} for kind in kinds}
    rooms = {}
    for name in classes:
        live = int(draw.integers(0, 5))
        rooms[name] = Room(live, live + int(draw.integers(0, 20)), float(draw.uniform(0, 600)))
    left = int(draw.integers(0, 200))
    mix = {kind: float(draw.uniform(0.1, 1)) for kind in kinds}
    found = wanted_slots(seconds, mix, rooms, left=left)
    assert all(0 <= found[name] <= rooms[name].most for name in found)
    # Each class may round up once.
    assert sum(found.values()) <= left + len(classes)


def test_numbers_rise_at_once_and_fall_after_a_time() -> None:
    held = Held(30.0)
    told = [(0, 2), (3, 5), (6, 1), (20, 1), (32, 1), (34, 3), (36, 0), (63, 0), (65, 0)]
    assert [held.see({"x": value}, float(now))["x"] for now, value in told] == [2, 5, 5, 5, 5, 3, 3, 3, 0]


def test_a_name_that_is_gone_falls_too() -> None:
    held = Held(30.0)
    held.see({"x": 2}, 0.0)
    assert held.see({}, 10.0) == {"x": 2}
    assert held.see({}, 31.0) == {"x": 0}
    assert held.see({}, 32.0) == {}


@pytest.mark.parametrize(
    ("most", "found"),
    [
        (math.inf, {"a": 1, "b": 16, "c": 3}),
        (20.0, {"a": 1, "b": 16, "c": 3}),
        (10.0, {"a": 1, "b": 8, "c": 1}),
        (2.9, {"a": 0, "b": 2, "c": 0}),
        (0.0, {"a": 0, "b": 0, "c": 0}),
        (-1.0, {"a": 0, "b": 0, "c": 0}),
    ],
)
def test_numbers_are_reduced_in_proportion_to_a_sum(most: float, found: dict[str, int]) -> None:
    assert at_most({"a": 1, "b": 16, "c": 3}, most) == found


def test_of_equal_numbers_the_first_ones_are_kept() -> None:
    assert at_most({"a": 2, "b": 2, "c": 2}, 2.0) == {"a": 1, "b": 1, "c": 0}
