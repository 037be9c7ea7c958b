"""Leases are extended once an outage of Redis, and an attempt that brings no event any more is missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.fleet.dispatch import LOOK_SECONDS, MACHINE_BUSY_SECONDS, MAX_UNLEASED, READ_PER_SECOND, LeaseMonitor


class Services:
    """The channel, the workers and the breaker, as a lease monitor asks them."""

    def __init__(self, clock: ManualClock) -> None:
        self.extended = 0
        #: state of every attempt
        self.state = "leased"
        self.quarantined: set[str] = set()
        self.ended: list[tuple[int, int]] = []
        self.able = self.announced = {"w"}
        #: seconds that Redis takes to answer
        self.answers_after = 0.0
        self._clock = clock

    def look(self, *_: object) -> None:
        self._clock.sleep(self.answers_after)

    def are_gone(self, *_: object) -> bool:
        return False

    def had_free_slot(self, *_: object, host: str | None, slots: int) -> bool:
        return False

    def repair(self) -> None:
        pass

    def extend_leases(self) -> None:
        self.extended += 1

    def ended_leases(self) -> list[tuple[int, int]]:
        return self.ended

    def has_vanished(self, host: str, now: float) -> bool:
        return host == "vanished"

    def states(self, attempts: Sequence[tuple[int, int]]) -> list[str]:
        return [self.state for _ in attempts]


class Rig:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.services = services = Services(self.clock)
        self.in_flight = Attempts[Sent]()
        self.monitor = LeaseMonitor(services, services, self.in_flight, services, self.clock)  # type: ignore[arg-type]

    def look(self) -> list[tuple[int, int]]:
        """Take a look, and return what is missing after it."""
        self.clock.sleep(LOOK_SECONDS)
        self.monitor.look(self.clock.now())
        return self.monitor.missing()

    def lost(self) -> list[bool]:
        """Take a look, and return for each loss since the last one whether it is claimed."""
        self.look()
        losses, self.monitor.lost_events = self.monitor.lost_events, []
        return [lost.claimed for lost in losses]

    def send(self, state: TrialState, **facts: Any) -> None:
        attempt = Attempt(number=0, attempt=1, subspace="all", params={}, state=state, **facts)
        self.in_flight.put(0, 1, Sent(attempt, self.clock.now()))


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.mark.parametrize("host", ["vanished", "live", None])
def test_a_lost_attempt_is_that_of_a_vanished_machine_or_of_a_worker(rig: Rig, host: str | None) -> None:
    rig.send(TrialState.RUNNING, host=host)
    # Of the second one nothing is known.
    rig.services.ended = [(0, 1), (5, 1)]
    rig.look()
    assert [lost.vanished for lost in rig.monitor.lost_events] == [host == "vanished", False]
    assert all(lost.claimed for lost in rig.monitor.lost_events)


def test_leases_are_extended_once_after_an_outage(rig: Rig) -> None:
    rig.monitor.was_silent = True
    for _ in range(3):
        rig.look()
    assert rig.services.extended == 1


def test_leases_are_extended_after_redis_stood_still(rig: Rig) -> None:
    rig.services.answers_after = 60.0
    rig.look()
    rig.services.answers_after = 0.1
    rig.look()
    assert rig.services.extended == 1


def test_leases_are_not_extended_after_a_slow_turn(rig: Rig) -> None:
    for _ in range(3):
        rig.clock.sleep(600.0)
        rig.look()
    assert rig.services.extended == 0


@pytest.mark.parametrize("state", [TrialState.QUEUED, TrialState.RUNNING])
def test_an_attempt_that_nobody_runs_or_can_claim_is_missing_at_once(rig: Rig, state: TrialState) -> None:
    rig.send(state)
    assert rig.look() == []
    rig.services.state = "void"
    assert rig.look() == [(0, 1)]


def test_an_attempt_without_any_trace_is_lost_after_a_while_if_it_was_claimed(rig: Rig) -> None:
    """Its worker may renew the lease again; one that nobody has claimed waits for a worker."""
    rig.services.state = "free"
    rig.send(TrialState.QUEUED)
    assert not any(rig.lost() for _ in range(2 * MAX_UNLEASED))
    rig.send(TrialState.RUNNING)
    assert [rig.lost() for _ in range(MAX_UNLEASED)] == [[]] * (MAX_UNLEASED - 1) + [[False]]


def test_looks_whose_events_were_not_all_read_count_for_nothing(rig: Rig) -> None:
    rig.services.state = "free"
    rig.send(TrialState.RUNNING)
    for _ in range(2 * MAX_UNLEASED):
        rig.clock.sleep(LOOK_SECONDS)
        rig.monitor.look(rig.clock.now())
    assert rig.monitor.missing() == rig.monitor.lost_events == []


@pytest.mark.parametrize(("only_on", "seconds"), [("a", MACHINE_BUSY_SECONDS), (None, None)])
def test_an_attempt_for_one_machine_waits_there_for_a_slot_only_so_long(
    rig: Rig, only_on: str | None, seconds: float | None
) -> None:
    rig.send(TrialState.QUEUED, compute_class="cpu", only_on=only_on)
    for moment in (MACHINE_BUSY_SECONDS, MACHINE_BUSY_SECONDS + LOOK_SECONDS, 10 * MACHINE_BUSY_SECONDS):
        rig.clock.advance_to(moment)
        assert rig.monitor.look(moment) == ([(0, 1)] if seconds and moment > seconds else [])


@pytest.mark.parametrize(("workers", "seconds"), [(10, LOOK_SECONDS), (3 * READ_PER_SECOND, 3.0)])
def test_a_large_fleet_is_looked_at_less_often(workers: int, seconds: float) -> None:
    """Reading ten thousand announcements and leases every second would take a third of a processor."""
    channel = MagicMock(**{"ended_leases.return_value": [], "states.return_value": []})
    fleet = MagicMock(announced=range(workers))
    monitor = LeaseMonitor(channel, fleet, Attempts[Sent](), MagicMock(), ManualClock())
    for moment in (0.0, seconds - 0.01, seconds):
        monitor.look(moment)
    assert [call.args[0] for call in fleet.look.call_args_list] == [0.0, seconds]
    channel.extend_leases.assert_not_called()
