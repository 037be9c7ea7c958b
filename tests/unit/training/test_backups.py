"""Renewal simulation and choice of b: they agree with a simulation that processes every event."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest

from shadho_celery.errors import UsageError
from shadho_celery.training.coordinator.backups import (
    MIN_TIMES,
    RING_SIZE,
    TUNE_EVERY,
    Array,
    Law,
    Times,
    Tuner,
    choose,
    simulate,
)


def injected(generator: np.random.Generator, runs: int, n: int) -> Array:
    """Draw 50 ms, one in twenty times multiplied by 4 P, P Pareto with x_m = 1 and alpha = 2."""
    slow = generator.random((runs, n)) < 0.05
    return 0.05 * np.where(slow, 4 * (1 + generator.pareto(2, (runs, n))), 1.0)


def crowded(generator: np.random.Generator, runs: int, n: int) -> Array:
    """A hundred machines: the last gradient is in time in 30 % of the steps, the 98th in 80 %."""
    slow = generator.random((runs, n)) < 0.014
    return generator.lognormal(0.3, 0.1, (runs, n)) * np.where(slow, 2 * (1 + generator.pareto(2, (runs, n))), 1.0)


def constant(generator: np.random.Generator, runs: int, n: int) -> Array:
    return np.ones((runs, n))


def one_slow(generator: np.random.Generator, runs: int, n: int) -> Array:
    """The second replica always takes ten times as long."""
    times = np.ones((runs, n))
    times[:, 1] = 10.0
    return times


LAWS = {"injected": injected, "crowded": crowded, "one slow": one_slow}


def played(law: Law, replicas: int, backups: int, cancel_seconds: float | None, steps: int, seed: int = 0) -> float:
    """Return the seconds per step by discrete events: a heap of gradient ends, a coordinator that counts and drops."""
    generator = np.random.default_rng(seed)
    n = replicas + backups
    step, got, clock = 0, set[int](), 0.0
    serial = 0
    #: (time, serial, replica, step it works on)
    events: list[tuple[float, int, int, int]] = []
    live: dict[int, int] = {}
    idle = set(range(n))
    # A row for each gradient that a replica begins; it begins no more than one a step, and one for each late one.
    drawn = iter(law(generator, 2 * steps * n, n).tolist())

    def begin(replica: int, at: float) -> None:
        nonlocal serial
        serial += 1
        live[replica] = serial
        heapq.heappush(events, (at + next(drawn)[replica], serial, replica, step))

    while step < steps:
        for replica in sorted(idle):
            begin(replica, clock)
        idle.clear()
        clock, number, replica, of_step = heapq.heappop(events)
        if live[replica] != number:
            continue
        if of_step != step:
            # Too late, or cancelled: the current parameters are sent at once.
            begin(replica, clock)
            continue
        got.add(replica)
        if len(got) < replicas:
            continue
        step += 1
        idle, got = got, set()
        if cancel_seconds is not None:
            for late in set(range(n)) - idle:
                ends = next(at for at, serial_, who, _ in events if who == late and live[who] == serial_)
                if ends > clock + cancel_seconds:
                    serial += 1
                    live[late] = serial
                    heapq.heappush(events, (clock + cancel_seconds, serial, late, -1))
    return clock / steps


@pytest.mark.parametrize("cancel_seconds", [None, 0.005], ids=["no cancel", "cancel"])
@pytest.mark.parametrize("backups", [0, 1, 2, 4])
def test_the_renewal_simulation_predicts_the_step_time_of_a_discrete_event_simulation(
    backups: int, cancel_seconds: float | None
) -> None:
    simulated = simulate(
        injected, 8, backups, cancel_seconds=cancel_seconds, generator=np.random.default_rng(1), runs=100, steps=200
    )
    assert simulated.step_seconds == pytest.approx(played(injected, 8, backups, cancel_seconds, 2000), rel=0.12)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("cancel_seconds", [None, 0.005], ids=["no cancel", "cancel"])
def test_the_renewal_simulation_orders_the_numbers_of_backups_as_discrete_events_do(
    law: Law, cancel_seconds: float | None
) -> None:
    predictions = choose(law, replicas=6, max_backups=4, cancel_seconds=cancel_seconds).predictions
    events = [played(law, 6, b, cancel_seconds, 1000) for b in range(5)]
    for b, fewer in enumerate(events):
        for more in range(b + 1, 5):
            # Where events leave no doubt about the order.
            if fewer > 1.1 * events[more]:
                assert predictions[b].step_seconds > predictions[more].step_seconds


def test_the_predicted_gain_is_less_than_that_of_independent_order_statistics() -> None:
    draws = np.sort(injected(np.random.default_rng(0), 20_000, 10), axis=1)
    independent = np.sort(injected(np.random.default_rng(0), 20_000, 8), axis=1)[:, 7].mean() / draws[:, 7].mean()
    none, two = (simulate(injected, 8, b, generator=np.random.default_rng(0), runs=200).step_seconds for b in (0, 2))
    assert 1.7 < none / two < 0.8 * independent


def test_times_that_never_vary_need_no_backup() -> None:
    choice = choose(constant, replicas=4, max_backups=3)
    assert choice.backups == 0
    assert choice.predictions[0].step_seconds == pytest.approx(1.0)


def test_one_slow_replica_is_worth_one_backup_and_no_more() -> None:
    choice = choose(one_slow, replicas=4, max_backups=4)
    assert choice.backups == 1
    assert [round(each.step_seconds, 3) for each in choice.predictions] == [10.0, 1.0, 1.0, 1.0, 1.0]


def test_cancelling_makes_backups_worth_more() -> None:
    plain, cancelled = (
        choose(injected, replicas=8, max_backups=2, cancel_seconds=seconds).predictions[2].step_seconds
        for seconds in (None, 0.005)
    )
    assert cancelled < 0.8 * plain


def test_a_choice_is_the_same_for_the_same_seed() -> None:
    assert choose(injected, replicas=4, max_backups=3, seed=5) == choose(injected, replicas=4, max_backups=3, seed=5)


@pytest.mark.parametrize(("replicas", "max_backups"), [(0, 1), (-3, 1), (4, -1)])
def test_fewer_than_one_replica_or_no_backups_are_refused(replicas: int, max_backups: int) -> None:
    with pytest.raises(UsageError, match="give"):
        choose(constant, replicas=replicas, max_backups=max_backups)


def drawn(times: Times, n: int = 1, runs: int = 20_000) -> Array:
    law = times.law()
    assert law is not None
    return law(np.random.default_rng(0), runs, n)


def test_there_is_no_law_before_a_replica_has_enough_times() -> None:
    times = Times()
    assert times.law() is None
    for _ in range(MIN_TIMES - 1):
        times.record(0, 1.0)
    assert times.law() is None
    times.record(0, 1.0)
    assert times.law() is not None


def test_only_the_last_times_of_each_replica_count() -> None:
    times = Times()
    for second in range(RING_SIZE + 200):
        times.record(3, float(second))
    assert drawn(times).min() >= 200


def test_each_replica_draws_from_its_own_times_and_an_unknown_one_from_the_times_of_all() -> None:
    times = Times()
    for _ in range(20):
        times.record(1, 1.0)
        times.record(7, 5.0)
    draws = drawn(times, 3)
    assert set(draws[:, 0]) == {1.0}
    assert set(draws[:, 1]) == {5.0}
    assert draws[:, 2].mean() == pytest.approx(3.0, rel=0.05)
    times.forget(7)
    assert set(drawn(times, 2).ravel()) == {1.0}


def test_the_mass_of_a_cancelled_time_goes_to_the_longer_ones() -> None:
    times = Times()
    for seconds in (1.0, 2.0, 3.0, 4.0):
        times.record(0, seconds)
    times.record(0, 2.5, finished=False)
    values, counts = np.unique(drawn(times), return_counts=True)
    assert values.tolist() == [1.0, 2.0, 3.0, 4.0]
    assert counts / counts.sum() == pytest.approx([0.2, 0.2, 0.3, 0.3], abs=0.02)


def test_a_replica_that_was_always_cancelled_counts_twice_its_longest_time() -> None:
    times = Times()
    for _ in range(10):
        times.record(0, 1.5, finished=False)
    values, _ = np.unique(drawn(times), return_counts=True)
    # Of equal cancelled times none is longer but the last.
    assert values.tolist() == [3.0]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_times_that_are_negative_or_not_finite_are_ignored(seconds: float) -> None:
    times = Times()
    for _ in range(MIN_TIMES):
        times.record(0, seconds)
    assert times.law() is None


def test_b_chosen_from_censored_times_is_that_chosen_from_all_times() -> None:
    """With cancelling the coordinator never sees the full time of a straggler; the choice stays within one backup."""
    generator, times = np.random.default_rng(0), Times()
    for row in injected(generator, 400, 10):
        end = np.sort(row)[7] + 0.005
        for replica, seconds in enumerate(row):
            times.record(replica, min(seconds, end), finished=seconds <= end)
    law = times.law()
    assert law is not None
    found = choose(law, replicas=8, max_backups=4, cancel_seconds=0.005).backups
    assert abs(found - choose(injected, replicas=8, max_backups=4, cancel_seconds=0.005).backups) <= 1


def test_a_tuner_chooses_when_it_is_due_by_the_times_recorded_last() -> None:
    tuner, generator = Tuner(4, 3, cancel_seconds=0.005), np.random.default_rng(0)
    assert tuner.at(10_000) is None
    for _ in range(RING_SIZE):
        for replica in range(7):
            tuner.times.record(replica, 1.0)
    first = tuner.at(TUNE_EVERY)
    assert first is not None
    assert first.backups == 0
    assert tuner.at(TUNE_EVERY + 1) is None
    for row in injected(generator, RING_SIZE, 7):
        for replica, seconds in enumerate(row):
            tuner.times.record(replica, float(seconds))
    second = tuner.at(2 * TUNE_EVERY)
    assert second is not None
    assert second == tuner.choice
    assert second.backups >= 1
