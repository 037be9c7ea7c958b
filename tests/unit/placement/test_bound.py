"""The bound of throughput: what a fleet can complete, and what one more slot adds."""

from __future__ import annotations

import pytest

from shadho_celery.placement.bound import throughput_bound


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
