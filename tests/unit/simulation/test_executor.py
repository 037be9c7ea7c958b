"""Simulated workers come, work and die as they are told to, and everything else follows from that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from services.families import fleet_of

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Report, Result, Started, TrialState
from shadho_celery.node.stay import DECLINE_SECONDS, MAX_TOO_LONG
from shadho_celery.simulation.executor import GIB, LEASE_SECONDS, NO_WORKER_SECONDS, Change, SimulatedExecutor

S = TrialState

#: when the clock starts: other than 0, so that a moment is not taken for a length of time
START = 1000.0


class Rig:
    """An executor of one class, `gpu`, whose trials take the seconds of their x, and everything that it has said."""

    def __init__(
        self, workers: int = 2, *changes: tuple[float, int], fleet: Mapping[str, Any] | None = None, **facts: Any
    ) -> None:
        """`changes` are seconds after the start, and workers; `facts` are those of the class."""
        self.clock = ManualClock(START)
        self.events: list[Event] = []
        #: of each attempt that its worker has ended: its number, seconds, and whether it was told
        self.interrupted: list[tuple[int, float, bool]] = []
        of_changes = [Change(at=START + at, compute_class="gpu", workers=number) for at, number in changes]
        self.executor = SimulatedExecutor(
            fleet_of({"gpu": {"workers": workers, **facts}}, changes=of_changes, **(fleet or {})),
            lambda attempt, compute_class: Outcome(state=S.COMPLETE, loss=0.0, seconds=attempt.params["x"]),
            self.clock,
            interrupted=lambda attempt, *told: self.interrupted.append((attempt.number, *told)),
        )

    def submit(self, *seconds: float, first: int = 0) -> None:
        self.executor.submit([queued(first + place, each) for place, each in enumerate(seconds)])

    def until(self, seconds: float) -> list[Event]:
        """What happens until so many seconds after the start."""
        events: list[Event] = []
        while self.clock.now() < START + seconds:
            events += self.executor.poll(START + seconds - self.clock.now())
        events += self.executor.poll(0.0)
        self.events += events
        return events

    def is_still(self) -> bool:
        return self.executor.is_still

    @property
    def slots(self) -> int:
        return sum(c.slots for c in self.executor.classes())


def queued(number: int, seconds: float, compute_class: str = "gpu", attempt: int = 1) -> Attempt:
    return Attempt(number=number, subspace="all", params={"x": seconds}, attempt=attempt, compute_class=compute_class)


def numbers(events: Sequence[Event], kind: type) -> list[int]:
    return [event.number for event in events if isinstance(event, kind)]


def at(events: Sequence[Event]) -> list[float]:
    """Seconds after the start, of those events that have a moment."""
    return [event.at - START for event in events if not isinstance(event, Lost)]


# Time


def test_the_clock_stops_where_something_happens_and_no_later_than_it_was_asked_to() -> None:
    rig = Rig(1)
    rig.submit(5.0)
    assert [type(event) for event in rig.executor.poll(100.0)] == [Started]
    assert rig.clock.now() == START
    assert list(rig.executor.poll(2.0)) == []
    assert rig.clock.now() == START + 2
    [end] = rig.executor.poll(100.0)
    assert (end.number, rig.clock.now()) == (0, START + 5)
    assert list(rig.executor.poll(7.0)) == []
    assert rig.clock.now() == START + 12


def test_a_poll_without_end_returns_where_nothing_will_ever_happen_and_leaves_the_clock_alone() -> None:
    rig = Rig(1)
    assert list(rig.executor.poll(math.inf)) == []
    assert rig.clock.now() == START


def test_a_poll_returns_as_workers_come_or_go_so_that_they_are_given_trials() -> None:
    rig = Rig(1, (3.0, 1), (4.0, -1))
    rig.submit(50.0)
    rig.executor.poll(math.inf)
    for moment, slots in ((3, 2), (4, 1)):
        assert list(rig.executor.poll(math.inf)) == []
        assert (rig.clock.now(), rig.slots) == (START + moment, slots)
    [end] = rig.executor.poll(math.inf)
    assert (end.number, rig.clock.now()) == (0, START + 50)


def test_ties_happen_first_in_first_out() -> None:
    rig = Rig(4)
    rig.submit(5.0, 5.0, 5.0, 5.0)
    rig.submit(5.0, 5.0, first=4)
    events = rig.until(10)
    assert numbers(events, Result) == [0, 1, 2, 3, 4, 5]
    assert numbers(events, Started) == [0, 1, 2, 3, 4, 5]


# Reports


def reports(events: Sequence[Event]) -> list[tuple[int, int, float]]:
    """Number, step and time of each report, the time in seconds after the start."""
    return [(event.number, event.step, event.at - START) for event in events if isinstance(event, Report)]


def test_a_trial_reports_after_each_of_its_steps_and_its_end_comes_after_the_last_report() -> None:
    rig = Rig(2, fleet={"steps": 4})
    rig.submit(40.0, 10.0)
    events = rig.until(50)
    assert reports(events) == sorted(reports(events), key=lambda each: each[2])
    assert [(step, at) for number, step, at in reports(events) if not number] == [(1, 10), (2, 20), (3, 30), (4, 40)]
    assert [(step, at) for number, step, at in reports(events) if number] == [(1, 2.5), (2, 5), (3, 7.5), (4, 10)]
    assert isinstance(events[-1], Result)


def test_reports_do_not_end_a_poll() -> None:
    rig = Rig(1, fleet={"steps": 4})
    rig.submit(40.0)
    rig.executor.poll(math.inf)
    assert reports(rig.executor.poll(15.0)) == [(0, 1, 10.0)]
    assert rig.clock.now() == START + 15
    assert [type(event) for event in rig.executor.poll(math.inf)] == [Report, Report, Report, Result]


def test_a_trial_that_is_cancelled_reports_nothing_more() -> None:
    rig = Rig(1, fleet={"steps": 4})
    rig.submit(40.0)
    rig.until(15)
    rig.executor.cancel([0], running=True)
    assert not reports(rig.until(60))


# Slots


def test_what_waits_starts_in_its_turn_in_the_slot_that_falls_free() -> None:
    rig = Rig(2)
    rig.submit(5.0, 3.0, 4.0, 1.0)
    events = rig.until(20)
    hosts = {event.number: (event.host, event.at - START) for event in events if isinstance(event, Started)}
    assert hosts == {0: ("gpu.0", 0), 1: ("gpu.1", 0), 2: ("gpu.1", 3), 3: ("gpu.0", 5)}
    assert [event.at - START for event in events if isinstance(event, Result)] == [3, 5, 6, 7]


def test_classes_are_announced_the_strongest_first_with_their_memory_and_not_without_workers() -> None:
    executor = SimulatedExecutor(
        fleet_of({"b": 1, "a": {"workers": 2, "memory_gib": 7}, "none": 0}),
        lambda attempt, _: Outcome(state=S.COMPLETE, seconds=1.0),
        ManualClock(),
        ahead=3,
    )
    classes = executor.classes()
    found = [(c.name, c.slots, c.busy, c.ahead, c.memory) for c in classes]
    assert found == [("b", 1, 0, 3, 0), ("a", 2, 0, 3, 7 * GIB)]
    assert classes[0].cores > classes[1].cores
    executor.submit([queued(0, 1.0, "a")])
    assert [c.busy for c in executor.classes()] == [0, 1]


def test_workers_that_come_take_what_waits() -> None:
    rig = Rig(1, (2.0, 2))
    rig.submit(10.0, 10.0, 10.0, 10.0)
    events = rig.until(30)
    assert [event.at - START for event in events if isinstance(event, Started)] == [0, 2, 2, 10]
    assert rig.slots == 3


def test_the_workers_that_came_last_die_first() -> None:
    rig = Rig(2, (1.0, 1), (2.0, -1))
    rig.submit(10.0, 10.0, 10.0)
    assert numbers(rig.until(100), Lost) == [2]
    assert sorted(numbers(rig.events, Result)) == [0, 1]


def test_no_more_workers_die_than_there_are() -> None:
    rig = Rig(2, (1.0, -9), (2.0, 3))
    rig.until(5)
    assert rig.slots == 3


def test_changes_of_one_moment_happen_in_the_order_in_which_they_are_given() -> None:
    for changes, slots in ((((1.0, 3), (1.0, -4)), 0), (((1.0, -4), (1.0, 3)), 3)):
        rig = Rig(1, *changes)
        rig.until(2)
        assert rig.slots == slots


# Deaths


@pytest.mark.parametrize("lease_seconds", [0.0, LEASE_SECONDS])
def test_a_dead_workers_trial_is_lost_once_its_lease_is_over(lease_seconds: float) -> None:
    rig = Rig(1, (2.0, -1), fleet={"lease_seconds": lease_seconds})
    rig.submit(10.0)
    assert numbers(rig.until(2 + lease_seconds - 0.001), Lost) == []
    [lost] = [event for event in rig.until(2 + lease_seconds) if isinstance(event, Lost)]
    assert (lost.number, lost.attempt, lost.claimed) == (0, 1, True)
    assert "died" in lost.reason
    assert rig.until(500) == [], "it never ends"


def test_a_slot_whose_worker_died_is_free_for_a_new_worker_and_the_old_trial_stays_dead() -> None:
    rig = Rig(1, (2.0, -1), (3.0, 1))
    rig.submit(10.0, 4.0)
    events = rig.until(100)
    assert numbers(events, Result) == [1]
    assert numbers(events, Lost) == [0]
    [_, second] = [event for event in events if isinstance(event, Started)]
    assert (second.host, second.at - START) == ("gpu.0", 3)


def test_a_dead_workers_trial_that_is_cancelled_is_still_lost_and_nothing_else() -> None:
    rig = Rig(1, (2.0, -1))
    rig.submit(10.0)
    rig.until(3)
    rig.executor.cancel([0], running=True)
    assert [type(event) for event in rig.until(100)] == [Lost]


def test_what_waits_for_a_class_that_has_died_out_is_taken_back_unclaimed() -> None:
    rig = Rig(1, (2.0, -1))
    rig.submit(50.0, 1.0, 1.0)
    assert numbers(rig.until(2 + NO_WORKER_SECONDS - 0.001), Lost) == []
    taken_back = rig.until(2 + NO_WORKER_SECONDS)
    assert [(event.number, event.claimed) for event in taken_back if isinstance(event, Lost)] == [
        (1, False),
        (2, False),
    ]


def test_what_waits_is_not_taken_back_where_workers_come_back_in_time() -> None:
    """Not even where they die again, until the class has been without workers for so long."""
    rig = Rig(1, (2.0, -1), (2.0 + NO_WORKER_SECONDS - 2, 1), (2.0 + NO_WORKER_SECONDS - 1, -1))
    rig.submit(50.0, 50.0, 1.0)
    again = 2 + NO_WORKER_SECONDS - 1
    # The first two are lost with their workers; the third waits.
    assert 2 not in numbers(rig.until(again + NO_WORKER_SECONDS - 0.001), Lost)
    assert numbers(rig.until(again + NO_WORKER_SECONDS), Lost) == [2]


@pytest.mark.parametrize("compute_class", ["gpu", "elsewhere"])
def test_what_is_sent_to_a_class_without_workers_comes_back_at_once_unclaimed(compute_class: str) -> None:
    rig = Rig(0, (100.0, 1))
    rig.executor.submit([queued(0, 1.0, compute_class)])
    [lost] = rig.executor.poll(math.inf)
    assert isinstance(lost, Lost)
    assert (lost.number, lost.claimed, rig.clock.now()) == (0, False, START)
    assert compute_class in lost.reason


# Cancelling


def test_a_queued_trial_that_is_cancelled_comes_back_and_the_others_keep_their_turn() -> None:
    rig = Rig(1)
    rig.submit(5.0, 5.0, 5.0, 5.0)
    rig.executor.cancel([2], running=False)
    events = rig.until(100)
    assert [(event.number, event.claimed) for event in events if isinstance(event, Lost)] == [(2, False)]
    assert numbers(events, Result) == [0, 1, 3]
    assert rig.clock.now() == START + 100


def test_without_running_a_running_trial_goes_on() -> None:
    rig = Rig(1)
    rig.submit(5.0)
    rig.executor.cancel([0], running=False)
    [_, end] = rig.until(10)
    assert isinstance(end, Result)
    assert end.outcome.state is S.COMPLETE


def test_a_running_trial_that_is_cancelled_ends_now_with_the_seconds_it_ran_and_frees_its_slot() -> None:
    rig = Rig(1)
    rig.submit(50.0, 1.0)
    rig.until(20)
    rig.executor.cancel([0], running=True)
    events = rig.until(100)
    cancelled, started, end = events
    assert isinstance(cancelled, Result)
    outcome = cancelled.outcome
    assert (cancelled.number, outcome.state, outcome.seconds, outcome.loss) == (0, S.CANCELLED, 20.0, None)
    assert (started.number, type(started)) == (1, Started)
    assert (end.number, type(end)) == (1, Result)
    assert at(events) == [20, 20, 21]


def test_cancelled_twice_it_ends_once() -> None:
    rig = Rig(1)
    rig.submit(50.0)
    rig.until(20)
    rig.executor.cancel([0], running=True)
    rig.executor.cancel([0], running=True)
    assert numbers(rig.until(100), Result) == [0]


# Copies


def copied(rig: Rig, *seconds: float) -> None:
    """Send attempts of trial 0 that take so many seconds."""
    rig.executor.submit([queued(0, each, attempt=1 + place) for place, each in enumerate(seconds)])


def test_the_attempt_that_ends_well_first_ends_the_others_of_which_nothing_is_heard_any_more() -> None:
    rig = Rig(3)
    copied(rig, 50.0, 3.0)
    rig.submit(5.0, 1.0, first=1)
    events = rig.until(100)
    ends = [(event.number, event.attempt, event.at - START) for event in events if isinstance(event, Result)]
    assert ends == [(0, 2, 3.0), (2, 1, 4.0), (1, 1, 5.0)], "the slot of the other attempt is free, too"
    assert numbers(events, Lost) == []


def test_an_attempt_that_ends_badly_leaves_its_trial_to_the_other() -> None:
    rig = Rig(1, (1.0, 1))
    copied(rig, 5.0, 8.0)
    rig.until(2)
    rig.executor.cancel([0], running=True)
    first, second = (event for event in rig.until(100) if isinstance(event, Result))
    assert {first.attempt, second.attempt} == {1, 2}
    assert (first.outcome.state, second.outcome.state) == (S.CANCELLED, S.CANCELLED)


# The end


@pytest.mark.parametrize(
    ("prepare", "still"),
    [
        (lambda rig: None, True),
        (lambda rig: rig.submit(5.0), False),
        (lambda rig: (rig.submit(5.0), rig.until(4.9)), False),
        (lambda rig: (rig.submit(5.0), rig.until(5.0)), True),
        (lambda rig: (rig.submit(5.0), rig.executor.cancel([0], running=True)), False),
        (lambda rig: (rig.submit(5.0), rig.executor.cancel([0], running=True), rig.until(1)), True),
    ],
)
def test_it_is_still_where_nothing_will_happen_unless_it_is_given_trials(
    prepare: Callable[[Rig], Any], still: bool
) -> None:
    rig = Rig(1)
    prepare(rig)
    assert rig.executor.is_still is still


def test_it_is_not_still_before_the_last_change_and_the_last_lease() -> None:
    rig = Rig(1, (2.0, -1))
    assert not rig.is_still()
    rig.submit(1000.0)
    rig.until(2)
    assert not rig.is_still()
    rig.until(2 + LEASE_SECONDS)
    assert rig.is_still(), "the trial of the dead worker will not end any more"
    assert list(rig.executor.poll(math.inf)) == []
    assert rig.clock.now() == START + 2 + LEASE_SECONDS


def test_utilisation_is_the_part_of_the_living_slots_time_in_which_they_ran_something() -> None:
    rig = Rig(2, (10.0, -1), (15.0, 2))
    assert rig.executor.utilisation() == {"gpu": 0.0}
    rig.submit(4.0, 100.0)
    rig.until(20)
    # 4 s, and 10 s until a worker died; of 2 slots for 10 s, 1 for 5 s and 3 for 5 s.
    assert rig.executor.utilisation() == {"gpu": pytest.approx(14 / 40)}
    rig.submit(100.0, first=2)
    rig.until(30)
    assert rig.executor.utilisation() == {"gpu": pytest.approx(24 / 70)}
    assert rig.executor.utilisation() == {"gpu": pytest.approx(24 / 70)}, "asked again it is the same"


def test_once_closed_nothing_happens() -> None:
    rig = Rig(1, (3.0, 1))
    rig.submit(5.0, 5.0)
    rig.until(1)
    rig.executor.close()
    assert rig.until(100) == []
    assert rig.is_still()


# Workers that end


def test_a_worker_takes_trials_after_its_start() -> None:
    rig = Rig(1, startup_seconds=7.0)
    assert rig.slots == 0
    rig.until(7)
    assert rig.slots == 1


def test_a_worker_whose_time_is_over_gives_its_trial_back_and_another_starts_in_its_place() -> None:
    rig = Rig(1, for_seconds=10.0, return_seconds=3.0, startup_seconds=2.0)
    rig.until(2)
    rig.submit(50.0)
    events = rig.until(12)
    [lost] = [event for event in events if isinstance(event, Lost)]
    assert (lost.claimed, lost.vanished, rig.interrupted) == (False, False, [(0, 10.0, True)])
    assert rig.slots == 0
    rig.until(16)
    assert rig.slots == 0
    rig.until(17)
    assert rig.slots == 1


@pytest.mark.parametrize("notice", [True, False])
def test_a_preempted_trial_is_given_back_at_once_or_lost_when_its_machine_has_vanished(notice: bool) -> None:
    rig = Rig(1, preemption_seconds=5.0, notice=notice)
    rig.submit(1e6)
    [lost] = [event for event in rig.until(1000) if isinstance(event, Lost)]
    assert not lost.claimed
    assert lost.vanished is not notice
    assert rig.slots == 0


def test_workers_are_preempted_as_often_as_told_whatever_they_run() -> None:
    def ends(*seconds: float) -> list[float]:
        found: list[float] = []
        rig = Rig(50, preemption_seconds=20.0, return_seconds=0.0)
        slots = rig.slots
        rig.submit(*seconds)
        while rig.clock.now() < START + 400:
            rig.executor.poll(START + 400 - rig.clock.now())
            found.append(rig.clock.now())
            assert rig.slots >= slots - 1
        return found

    idle = ends()
    # 50 workers for 400 seconds, each preempted every 20: the standard deviation is about 32.
    assert 900 < len(idle) < 1100
    assert {*idle} <= {*ends(1e6)}


def test_a_worker_declines_trials_that_would_end_after_it_and_ends_when_it_has_declined_several() -> None:
    rig = Rig(1, for_seconds=100.0)
    rig.executor.submit([queued(0, 75.0).evolve(expected=75.0)])
    events = rig.until(95)
    assert numbers(events, Result) == [0]
    for number in range(1, 1 + MAX_TOO_LONG):
        rig.executor.submit([queued(number, 90.0).evolve(expected=90.0)])
    # The last worker of the class is gone.
    assert rig.slots == 0
    events = rig.until(95 + DECLINE_SECONDS)
    assert numbers(events, Lost) == [1, 2, 3]
    assert not any(event.claimed for event in events if isinstance(event, Lost))


def test_one_trial_that_is_declined_again_does_not_end_a_worker() -> None:
    rig = Rig(1, for_seconds=100.0)
    for attempt in range(1, 2 + MAX_TOO_LONG):
        rig.executor.submit([queued(0, 500.0, attempt=attempt).evolve(expected=500.0)])
        rig.until(attempt * 2)
    assert rig.slots == 1


def test_a_slot_that_is_taken_away_while_its_worker_is_gone_does_not_come_back() -> None:
    rig = Rig(2, (12.0, -1), for_seconds=10.0, return_seconds=5.0)
    rig.until(16)
    assert rig.slots == 1


# Slots of one worker


def test_an_attempt_takes_all_its_slots_on_its_machine_or_is_given_back() -> None:
    rig = Rig(2, slots=2)
    [known] = rig.executor.classes()
    assert (known.room, [(place.host, place.room) for place in known.targets]) == (2, [("gpu.0", 2), ("gpu.1", 2)])
    wide = [queued(n, 5.0).evolve(slots=2, only_on=host) for n, host in enumerate(("gpu.0", "gpu.1", "gpu.0"))]
    rig.executor.submit([wide[0], queued(3, 1.0).evolve(only_on="gpu.1"), *wide[1:]])
    events = rig.until(0.5)
    assert [(event.number, event.host) for event in events if isinstance(event, Started)] == [
        (0, "gpu.0"),
        (3, "gpu.1"),
    ]
    assert numbers(events, Lost) == [1, 2], "one slot of gpu.1 is free, and two are needed"
    assert [place.busy for place in rig.executor.classes()[0].targets] == [2, 1]


def test_a_worker_dies_with_all_its_slots() -> None:
    rig = Rig(2, (1.0, -1), slots=2)
    rig.executor.submit([queued(n, 5.0).evolve(slots=2, only_on=f"gpu.{n}") for n in range(2)])
    events = rig.until(100)
    assert (numbers(events, Lost), numbers(events, Result), rig.slots) == ([1], [0], 2)
