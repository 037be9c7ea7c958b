"""What is started counts while it starts, what is not wanted is ended when it is idle, and no failure is a storm."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import pytest

from shadho_celery.core.files import ClassSpec
from shadho_celery.fleet.registry import ANNOUNCE_SECONDS, Worker
from shadho_celery.session.scaling import FIRST_PAUSE, LONGEST_PAUSE, Decision, Scaling

COOLDOWN = 30.0
PATIENCE = ClassSpec(startup_seconds=120.0).come_seconds
SPEC = {"gpu": ClassSpec(slots=2, startup_seconds=120.0), "cpu": ClassSpec(max_workers=3)}


class Played:
    """A fleet whose clock and workers the test sets."""

    def __init__(self, most: int = 10, spec: Mapping[str, ClassSpec] = SPEC) -> None:
        self.scaling = Scaling(spec, most, COOLDOWN)
        self.now = 0.0
        self.wanted: dict[str, int] = {}
        self.backlog: dict[str, int] = {}
        self.live: dict[str, Worker] = {}
        self.left: set[str] = set()
        self.refusing: set[str] = set()

    def look(self, seconds: float = 2.0) -> Decision:
        self.now += seconds
        return self.scaling.look(
            self.now,
            self.wanted,
            self.live,
            backlog=self.backlog,
            has_left=self.left.__contains__,
            may_end=lambda name: name not in self.refusing,
        )

    def come(
        self, *names: str, compute_class: str = "gpu", slots: int = 2, busy: int = 0, draining: bool = False
    ) -> None:
        for name in names:
            self.live[name] = Worker(compute_class=compute_class, slots=slots, busy=busy, draining=draining)

    def leave(self, *names: str) -> None:
        for name in names:
            del self.live[name]
            self.left.add(name)


def test_from_none_the_workers_with_the_wanted_slots_are_started_once() -> None:
    fleet = Played()
    assert fleet.look().starts == {}
    fleet.wanted = {"gpu": 5}
    assert fleet.look().starts == {"gpu": 3}
    for _ in range(50):
        assert fleet.look().starts == {}
    fleet.come("a", "b")
    fleet.wanted = {"gpu": 8}
    assert fleet.look().starts == {"gpu": 1}, "two serve, and one more starts"


@pytest.mark.parametrize("most", [1, 2, 4])
def test_there_are_never_more_than_the_maximum_live_or_starting(most: int) -> None:
    fleet = Played(most)
    fleet.come("other", compute_class="cpu", slots=1, busy=1)
    fleet.wanted = {"gpu": 100, "cpu": 100}
    started = sum(fleet.look().starts.values())
    assert started == most - 1
    assert not fleet.look(100.0).starts


def test_a_class_has_no_more_workers_than_its_spec_allows_and_others_come_after_it_in_the_file() -> None:
    fleet = Played(4)
    fleet.wanted = {"gpu": 2, "cpu": 100}
    assert fleet.look().starts == {"gpu": 1, "cpu": 3}
    fleet = Played(4)
    fleet.wanted = {"gpu": 100, "cpu": 100}
    assert fleet.look().starts == {"gpu": 4}


def test_it_is_told_once_that_the_workers_of_a_class_have_other_slots_than_its_spec() -> None:
    fleet = Played()
    fleet.come("a", busy=1)
    assert fleet.look().lines == []
    fleet.come("b", "c", slots=3, busy=1)
    assert [line.partition(";")[0] for line in [*fleet.look().lines, *fleet.look().lines]] == [
        "Warning: class gpu: a worker has 3 slots, and the file of --class-spec says 2"
    ]


def test_a_class_that_is_not_in_the_spec_is_neither_started_nor_ended() -> None:
    fleet = Played()
    fleet.come("x", compute_class="theirs")
    fleet.wanted = {"theirs; rm -rf /": 5}
    assert fleet.look() == Decision(starts={}, ends=[], overdue=[], lines=[])
    assert fleet.look(1000.0).ends == []


def test_idle_workers_are_ended_after_the_cooldown_and_busy_ones_are_not() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 4}
    fleet.look()
    fleet.come("a", busy=1)
    fleet.come("b")
    fleet.look()
    fleet.wanted = {}
    assert fleet.look().ends == []
    assert fleet.look(COOLDOWN).ends == ["b"]
    for _ in range(100):
        assert "a" not in fleet.look().ends
    fleet.come("a")
    assert "a" in fleet.look().ends


def test_only_the_surplus_is_ended() -> None:
    fleet = Played()
    fleet.come("a", "b", "c")
    fleet.wanted = {"gpu": 3}
    fleet.look()
    assert len(fleet.look(COOLDOWN).ends) == 1


def test_a_worker_that_was_asked_to_end_does_not_serve_and_is_asked_again_until_it_drains() -> None:
    fleet = Played()
    fleet.come("a")
    assert fleet.look().ends == [], "the studies have not seen it yet"
    assert fleet.look(ANNOUNCE_SECONDS).ends == ["a"]
    assert fleet.look().ends == ["a"]
    fleet.come("a", draining=True)
    fleet.wanted = {"gpu": 2}
    decision = fleet.look()
    assert (decision.ends, decision.starts) == ([], {"gpu": 1})


def test_a_worker_that_refuses_control_is_not_ended_and_still_counts() -> None:
    fleet = Played()
    fleet.come("a")
    fleet.refusing = {"a"}
    fleet.look()
    assert fleet.look(ANNOUNCE_SECONDS).ends == []
    fleet.wanted = {"gpu": 2}
    assert fleet.look().starts == {}


def test_a_worker_that_does_not_come_is_one_line_and_tried_again_after_a_growing_pause() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 2}
    starts, lines = [], []
    for _ in range(3000):
        decision = fleet.look()
        starts += [fleet.now] * len(decision.starts)
        lines += [line for line in decision.lines if line.startswith("Warning")]
        assert len(decision.overdue) == sum(line.startswith("Warning") for line in decision.lines)
    gaps = [after - before - PATIENCE for before, after in pairwise(starts)]
    assert len(lines) in (len(starts), len(starts) - 1)
    for place, gap in enumerate(gaps):
        assert gap == pytest.approx(min(LONGEST_PAUSE, FIRST_PAUSE * 2**place), abs=5.0)
    assert lines[0].startswith("Warning: class gpu: 1 of 1 started workers did not come within 5 min; next try in 15 s")


def test_a_command_that_has_not_returned_is_not_called_again() -> None:
    fleet = Played()
    calling = fleet.scaling.look(1.0, {"gpu": 2}, {}).starts
    assert calling == {"gpu": 1}
    assert fleet.scaling.look(3.0, {"gpu": 4, "cpu": 1}, {}, calling=calling).starts == {"cpu": 1}
    assert fleet.scaling.look(5.0, {"gpu": 4, "cpu": 1}, {}).starts == {"gpu": 1}


def test_after_a_failure_one_worker_is_tried_so_that_late_ones_do_not_add_up() -> None:
    fleet = Played(8)
    fleet.wanted = {"gpu": 16}
    assert fleet.look().starts == {"gpu": 8}
    fleet.look(PATIENCE + 1)
    assert fleet.look(FIRST_PAUSE).starts == {"gpu": 1}
    fleet.come("a")
    assert fleet.look().starts == {"gpu": 7}


def test_a_worker_that_comes_ends_the_pauses() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 2}
    fleet.look()
    for _ in range(4):
        fleet.scaling.fail("gpu", fleet.now, "r")
    fleet.look(1000.0)
    fleet.come("a")
    fleet.look()
    fleet.leave("a")
    assert fleet.look().starts == {"gpu": 1}
    assert fleet.scaling.fail("gpu", fleet.now, "r").endswith("next try in 15 s")


def test_a_command_that_fails_is_tried_again_after_pauses_and_its_workers_do_not_count() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 4}
    tries = 0
    for _ in range(1000):
        if fleet.look().starts:
            tries += 1
            assert fleet.scaling.fail("gpu", fleet.now, "it ended with 1").startswith("Warning: class gpu: it ended")
    assert tries <= 8, "in 33 minutes"


def test_workers_of_another_class_are_named_when_those_that_were_started_do_not_come() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 2}
    fleet.look()
    fleet.come("x", compute_class="cpu\x1b[31m", slots=1)
    fleet.look()
    lines = fleet.look(PATIENCE + 1).lines
    assert [line for line in lines if "workers of cpu\\x1b[31m came meanwhile" in line]


def test_a_worker_that_becomes_silent_counts_for_a_while_and_one_that_leaves_does_not() -> None:
    """Redis may have lost its data."""
    fleet = Played()
    fleet.wanted = {"gpu": 4}
    fleet.come("a", "b")
    fleet.look()
    fleet.live = {}
    fleet.left = {"b"}
    assert fleet.look().starts == {"gpu": 1}
    assert fleet.look(ANNOUNCE_SECONDS).starts == {"gpu": 1}


def test_a_backlog_keeps_idle_workers_but_starts_none_even_if_a_worker_goes() -> None:
    fleet = Played()
    fleet.come("a", "b", "c")
    fleet.backlog = {"gpu": 278}
    for _ in range(30):
        decision = fleet.look()
        assert (decision.starts, decision.ends) == ({}, [])
    fleet.wanted, fleet.backlog = {"gpu": 2}, {"gpu": 1}
    fleet.look()
    assert fleet.look(COOLDOWN).ends == ["a"], "four slots are needed, two of them for the backlog's trial"
    fleet.leave("a", "b", "c")
    fleet.wanted, fleet.backlog = {}, {"gpu": 5}
    assert fleet.look(COOLDOWN + 1).starts == {}
    fleet.backlog = {}
    fleet.come("d")
    assert fleet.look().ends == []
    assert fleet.look(COOLDOWN).ends == ["d"]


def resumed(fleet: Played) -> Decision:
    """The next look, by a scaler that has taken the place of the first one."""
    kept = fleet.scaling.starting
    fleet.scaling = Scaling(SPEC, 10, COOLDOWN)
    fleet.scaling.resume(kept, fleet.live, fleet.now)
    return fleet.look()


def test_a_scaler_that_resumes_starts_no_worker_twice_and_knows_those_that_came_before_and_since() -> None:
    fleet = Played()
    fleet.come("before", busy=1)
    fleet.look()
    fleet.wanted = {"gpu": 8}
    assert fleet.look().starts == {"gpu": 3}
    assert resumed(fleet).starts == {}
    fleet.come("first")
    fleet.look()
    assert [start.missing for start in fleet.scaling.starting["gpu"].starts] == [2]
    assert resumed(fleet).starts == {}
    kept = fleet.scaling.starting
    fleet.come("second", "other")
    fleet.scaling = Scaling(SPEC, 10, COOLDOWN)
    assert fleet.scaling.resume(kept, fleet.live, fleet.now) == ["class gpu: 2 workers started earlier"]
    assert fleet.look().starts == {}
    assert fleet.scaling.starting == {}
    fleet.wanted = {"gpu": 10}
    assert fleet.look().starts == {"gpu": 1}


def test_a_scaler_that_resumes_waits_for_the_rest_of_the_pause_and_then_tries_a_single_worker() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 8}
    fleet.look()
    for _ in range(3):
        fleet.scaling.fail("gpu", fleet.now, "no room")
    assert resumed(fleet).starts == {}
    again = Scaling(SPEC, 10, COOLDOWN)
    assert again.resume(fleet.scaling.starting, {}, fleet.now) == ["class gpu: starts have failed; next try in 58 s"]
    assert fleet.look(4 * FIRST_PAUSE - 6).starts == {}
    assert fleet.look(4).starts == {"gpu": 1}
    fleet.come("a")
    assert fleet.look().starts == {"gpu": 3}, "a worker has come"
    assert resumed(fleet).starts == {}


def test_a_scaler_that_resumes_long_after_counts_no_worker_that_has_not_come() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 4}
    fleet.look()
    fleet.now += PATIENCE + 1
    assert resumed(fleet) == Decision(
        starts={"gpu": 2}, ends=[], overdue=[], lines=["class gpu: 4 slots are wanted; starting 2"]
    )


def test_workers_of_an_earlier_scaler_that_do_not_come_are_given_up_when_it_would_have_done_so() -> None:
    fleet = Played()
    fleet.wanted = {"gpu": 2}
    fleet.look()
    fleet.now += PATIENCE - 10
    assert resumed(fleet).overdue == []
    decision = fleet.look(10)
    assert decision.overdue == ["gpu"]
    assert "1 of 1 started workers did not come" in decision.lines[0]
