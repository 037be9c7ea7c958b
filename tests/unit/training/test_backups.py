"""Choice of b: response times are recorded, and their simulation agrees with one that processes every event."""

from __future__ import annotations

import heapq
import math

import numpy as np
import pytest
from services.played_gang import PlayedGang
from services.training import DATA, descent, loss, network

from shadho_celery.core.system import ManualClock
from shadho_celery.training.coordinator.backups import (
    MIN_TIMES,
    PROBES,
    RING_SIZE,
    TUNE_EVERY,
    Array,
    Assignments,
    Law,
    Survival,
    Times,
    Tuner,
    best,
    predict,
    simulate,
)
from shadho_celery.training.coordinator.coordinator import Coordinator
from shadho_celery.training.replica.replica import Delay
from shadho_celery.training.report import Report
from shadho_celery.training.strategies import Sync


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


@pytest.mark.slow
@pytest.mark.parametrize("cancel_seconds", [None, 0.005], ids=["no cancel", "cancel"])
@pytest.mark.parametrize("backups", [0, 1, 2, 4])
def test_the_renewal_simulation_predicts_the_step_time_of_a_discrete_event_simulation(
    backups: int, cancel_seconds: float | None
) -> None:
    simulated = simulate(
        injected, 8, backups, cancel_seconds=cancel_seconds, generator=np.random.default_rng(1), runs=100, steps=200
    )
    assert simulated == pytest.approx(played(injected, 8, backups, cancel_seconds, 2000), rel=0.12)


@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)
@pytest.mark.parametrize("cancel_seconds", [None, 0.005], ids=["no cancel", "cancel"])
def test_the_renewal_simulation_orders_the_numbers_of_backups_as_discrete_events_do(
    law: Law, cancel_seconds: float | None
) -> None:
    predictions = predict(law, replicas=6, max_backups=4, cancel_seconds=cancel_seconds)
    events = [played(law, 6, b, cancel_seconds, 1000) for b in range(5)]
    for b, fewer in enumerate(events):
        for more in range(b + 1, 5):
            # Where events leave no doubt about the order.
            if fewer > 1.1 * events[more]:
                assert predictions[b] > predictions[more]


def test_the_predicted_gain_is_less_than_that_of_independent_order_statistics() -> None:
    draws = np.sort(injected(np.random.default_rng(0), 20_000, 10), axis=1)
    independent = np.sort(injected(np.random.default_rng(0), 20_000, 8), axis=1)[:, 7].mean() / draws[:, 7].mean()
    none, two = (simulate(injected, 8, b, generator=np.random.default_rng(0), runs=200) for b in (0, 2))
    assert 1.7 < none / two < 0.8 * independent


def test_times_that_never_vary_need_no_backup_and_one_slow_replica_is_worth_one() -> None:
    assert best(predict(constant, replicas=4, max_backups=3)) == 0
    predictions = predict(one_slow, replicas=4, max_backups=4)
    assert best(predictions) == 1
    assert [round(seconds, 3) for seconds in predictions] == [10.0, 1.0, 1.0, 1.0, 1.0]


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


def test_survival_is_the_product_limit_estimate() -> None:
    """Remission times of leukaemia (Freireich et al., 1963), on which textbooks show the estimate."""
    finished = [6, 6, 6, 7, 10, 13, 16, 22, 23]
    censored = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
    survival = Survival([(float(t), True) for t in finished] + [(float(t), False) for t in censored])
    assert survival.events.tolist() == [6, 7, 10, 13, 16, 22, 23]
    assert survival.survival == pytest.approx([0.857, 0.807, 0.753, 0.690, 0.627, 0.538, 0.448], abs=5e-4)


def test_the_tail_beyond_the_last_finished_time_has_the_rate_of_the_longest_ones() -> None:
    generator = np.random.default_rng(0)
    seconds = 1.0 + generator.exponential(2.0, 5000)
    survival = Survival([(min(s, 4.0), s <= 4.0) for s in seconds])
    draws = survival.draw(np.random.default_rng(1), 50_000)
    assert draws[draws <= 4].size == pytest.approx(50_000 * (1 - math.exp(-1.5)), rel=0.03)
    beyond = draws[draws > 4.0] - 4.0
    # The rate is that of ten times.
    assert 0.8 < beyond.mean() < 5.0
    assert np.quantile(beyond, 0.9) / np.median(beyond) == pytest.approx(math.log(10) / math.log(2), rel=0.05)


def test_a_replica_that_never_finished_draws_longer_times_than_it_was_ever_given() -> None:
    times = Times()
    for _ in range(40):
        times.record(0, 1.0)
        times.record(1, 1.0)
        times.record(2, 1.0, finished=False)
    draws = drawn(times, 3)
    assert set(draws[:, :2].ravel()) == {1.0}
    assert np.median(draws[:, 2]) > 10


def test_the_time_of_a_response_that_still_runs_counts_as_censored() -> None:
    times = Times()
    for _ in range(20):
        times.record(0, 1.0)
    law = times.law({0: 50.0})
    assert law is not None
    assert 0.01 < (law(np.random.default_rng(0), 20_000, 1) > 1.0).mean() < 0.1


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_times_that_are_negative_or_not_finite_are_ignored(seconds: float) -> None:
    times = Times()
    for _ in range(MIN_TIMES):
        times.record(0, seconds)
    assert times.law() is None


def play(seconds: Delay, steps: int) -> tuple[Coordinator, Report]:
    """Train on a virtual clock with b = "auto"; late gradients are cancelled at the N-th arrival."""
    strategy = Sync(replicas=8, backups="auto")
    gang = PlayedGang(strategy, network(), descent, DATA, loss, seconds=seconds, steps=steps, batch=4)
    return gang.coordinator, gang.train()


@pytest.mark.slow
@pytest.mark.parametrize("jitter", [0.02, 0.2])
def test_a_calm_gang_keeps_no_backup_and_its_step_is_predicted(jitter: float) -> None:
    """Its late gradients are cancelled just before their end; that does not make them seem slow."""
    coordinator, report = play(lambda at, step: 0.05 * (1 + jitter * np.random.default_rng([at, step]).random()), 60)
    assert coordinator.backups == 0
    rest = [step.seconds for step in report.log.steps[21:]]
    assert report.predictions[0] == pytest.approx(sum(rest) / len(rest), rel=0.1)


def stragglers(place: int, step: int) -> float:
    return float(injected(np.random.default_rng([place, step]), 1, 1)[0, 0])


@pytest.mark.slow
def test_a_gang_with_stragglers_keeps_its_backups_though_it_cancels_the_late_gradients() -> None:
    coordinator, report = play(stragglers, 60)
    assert coordinator.backups >= 2
    assert report.predictions[0] > 1.5 * report.predictions[2]


@pytest.mark.slow
def test_backups_rest_while_they_are_not_needed_and_return_when_stragglers_appear() -> None:
    coordinator, report = play(lambda place, step: stragglers(place, step) if step > 60 else 0.05, 260)
    assert any("step 20: 0 backups" in note for note in report.log.notes)
    assert coordinator.backups >= 1
    calm, troubled = (report.log.steps[part] for part in (slice(22, 100), slice(230, None)))
    assert {place for step in calm for place in step.accepted} == set(range(8))
    assert {place for step in troubled for place in step.accepted} > set(range(8))


def test_a_tuner_chooses_when_it_is_due_by_the_times_recorded_last() -> None:
    tuner, generator = Tuner(4, 3, cancel_seconds=0.005), np.random.default_rng(0)
    assert tuner.at(10_000) is None
    for _ in range(RING_SIZE):
        for replica in range(7):
            tuner.times.record(replica, 1.0)
    assert tuner.at(TUNE_EVERY) == 0
    assert tuner.at(TUNE_EVERY + 1) is None
    for row in injected(generator, RING_SIZE, 7):
        for replica, seconds in enumerate(row):
            tuner.times.record(replica, float(seconds))
    second = tuner.at(2 * TUNE_EVERY)
    assert second is not None
    assert second == best(tuner.predictions()) >= 1


def test_a_few_late_replicas_may_finish_so_that_their_times_are_known() -> None:
    tuner = Tuner(4, 2)
    assert tuner.probe(0, []) is None
    chosen = [tuner.probe(step, [2, 5]) for step in range(2 * PROBES)]
    assert chosen == [2, 5] * (PROBES // 2) + [None] * PROBES
    assert tuner.probe(RING_SIZE + 1, [2, 5]) == 5


class RecordedTimes(Times):
    """Response times in the order of their recording."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[int, float, bool]] = []

    def record(self, replica: int, seconds: float, *, finished: bool = True) -> None:
        self.all.append((replica, seconds, finished))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def times() -> RecordedTimes:
    return RecordedTimes()


@pytest.fixture
def assignments(times: RecordedTimes, clock: ManualClock) -> Assignments:
    return Assignments(times, clock.now)


def test_places_that_are_busy_when_a_step_ends_record_a_censored_time(
    assignments: Assignments, times: RecordedTimes, clock: ManualClock
) -> None:
    for place in (0, 1):
        assignments.assign(place, step=0)
    assignments.complete(0, step=1, at=0.5)
    assert (assignments.busy, times.all) == ([0, 1], []), "a vector of another step"
    assignments.complete(0, step=0, at=1.0)
    assert assignments.busy == [1]
    clock.advance_to(4.0)
    assert assignments.seconds(1) == 4.0
    assert assignments.cancel(assignments.busy) == [1]
    assert assignments.busy == []
    assert times.all == [(0, 1.0, True), (1, 4.0, False)]


def test_without_cancelling_the_time_of_the_next_step_begins_with_the_late_vector(
    assignments: Assignments, times: RecordedTimes, clock: ManualClock
) -> None:
    assignments.assign(0, step=0)
    assignments.assign(0, step=1)
    clock.advance_to(7.0)
    assignments.complete(0, step=0, at=6.5)
    assert assignments.resume(0, step=1)
    assignments.complete(0, step=1, at=7.5)
    assert times.all == [(0, 6.5, True), (0, 0.5, True)]


def test_a_late_place_that_was_not_sent_the_current_step_cannot_resume(assignments: Assignments) -> None:
    assignments.assign(0, step=0)
    assignments.complete(0, step=0, at=1.0)
    assert not assignments.resume(0, step=1)
    assert assignments.busy == []


def test_a_place_is_idle_from_a_refusal_to_the_next_step(assignments: Assignments) -> None:
    assignments.idle.add(0)
    assert assignments.idle == {0}
    assignments.assign(0, step=1)
    assert assignments.idle == set()


def test_a_cleared_place_is_neither_busy_nor_idle_and_cannot_resume(assignments: Assignments) -> None:
    assignments.assign(0, step=1)
    assignments.idle.add(0)
    assignments.clear(0)
    assert assignments.busy == []
    assert assignments.idle == set()
    assert not assignments.resume(0, step=1)
