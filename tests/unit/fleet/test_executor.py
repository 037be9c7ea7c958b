"""What a queue executor learns from the events that come back; the queues themselves are integration's business."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
import redis
from msgspec import structs
from services.clocks import MachineTime
from services.told import ToldExecutor

from shadho_celery.core.system import Clock, ManualClock, SystemClock
from shadho_celery.core.trial import Attempt, Event, Lost, Outcome, Result, Started, TrialState
from shadho_celery.errors import LockLost
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.channel import HOLD_SECONDS
from shadho_celery.fleet.redis import _script
from shadho_celery.fleet.registry import StudyWants, Worker
from shadho_celery.fleet.signing import UNSIGNED
from shadho_celery.runner.protocol import MAX_COMPLAINTS


class Rig:
    """An executor beside a Redis in which two workers of class cpu are announced, and events come in as told."""

    def __init__(
        self, *, takes_over: bool = True, protocols: tuple[int, int] = (PROTOCOL, PROTOCOL), clock: Clock | None = None
    ) -> None:
        self._events: list[Event] = []
        self._entries = 0
        self.client = client = MagicMock()
        client.smembers.side_effect = lambda key: {"good", "bad"} if key == "shadho:workers" else set()
        workers = [Worker(protocol=each, compute_class="cpu", slots=5, imports=["m"]) for each in protocols]
        client.mget.side_effect = lambda names: [json.dumps(msgspec.to_builtins(each)) for each in workers]
        client.xread.side_effect = self._read
        client.evalsha.side_effect = self._run
        self.publisher, self.clock = MagicMock(), clock or ManualClock()
        #: the scheduler that holds the study, if it is not this one
        self.other_holder = ""
        self.executor = ToldExecutor(client, self.publisher, "s", "m", clock=self.clock, takes_over=takes_over)
        self.executor.poll(0.0)

    def _run(self, digest: str, keys: int, *arguments: str) -> list[str] | str:
        """Answer a script: every attempt that is asked after runs, and who asks for the lock has it."""
        if digest == _script("confirm")[1]:
            return self.other_holder or arguments[keys]
        return ["leased" for _ in arguments[keys:]] if digest == _script("attempt_states")[1] else []

    def _read(self, streams: dict[str, str], count: int, block: int | None) -> list[Any]:
        events, self._events = self._events, []
        entries = []
        for event in events:
            self._entries += 1
            entries.append((f"1-{self._entries}", {"e": UNSIGNED.seal("s", event)}))
        return [[next(iter(streams)), entries]] if entries else []

    def hear(self, *events: Event) -> Sequence[Event]:
        self._events += events
        return self.executor.poll(1.0)

    def run(self, number: int, worker: str, outcome: Outcome) -> Result:
        """Send a trial, have the worker claim it and end it so; return the result as the study gets it."""
        self.executor.submit([queued(number)])
        started = Started(number=number, attempt=1, host="h", at=0.0, worker=worker)
        _, result = self.hear(started, Result(number=number, attempt=1, outcome=outcome, at=0.0, worker=worker))
        assert isinstance(result, Result)
        return result

    @property
    def ahead(self) -> int:
        """Trials that are to wait in the queue of the class: the more, the shorter trials take."""
        [cpu] = self.executor.classes()
        return cpu.ahead


def queued(number: int) -> Attempt:
    return Attempt(number=number, attempt=1, subspace="all", params={}, compute_class="cpu")


def done(seconds: float) -> Outcome:
    return Outcome(state=TrialState.COMPLETE, loss=0.0, seconds=seconds)


def failed(seconds: float) -> Outcome:
    return Outcome(state=TrialState.FAILED, error="OSError: no space left on device", seconds=seconds)


def test_a_silent_workers_slots_count_with_the_width_of_its_trials(rig: Rig) -> None:
    gang = Attempt(number=0, attempt=1, subspace="all", params={}, compute_class="cpu", slots=3)
    rig.executor.submit([gang])
    rig.hear(Started(number=0, attempt=1, host="h", at=0.0, worker="gone"))
    rig.clock.sleep(2.0)
    rig.hear()
    [cpu] = rig.executor.classes()
    assert (cpu.slots, cpu.silent) == (10, 3)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_worker_of_another_protocol_beside_able_ones_is_warned_of_in_one_line() -> None:
    [warning] = Rig(protocols=(PROTOCOL, PROTOCOL - 1)).executor.notices()
    assert f"protocol {PROTOCOL - 1}" in warning
    assert "install the same version" in warning
    assert "\n" not in warning
    assert not [each for each in Rig().executor.notices() if "protocol" in each]


def test_a_complaint_of_workers_is_told_in_one_printable_line_with_the_first_worker_that_has_it(rig: Rig) -> None:
    """A stranger may have written it, and other workers have the same one. It stays the same while they come and go."""
    workers = rig.executor.workers
    told = workers.announced["good"]
    for name, complaint in {"good": "slow \u202e", "bad": "slow \u202e"}.items():
        workers.announced = {**workers.announced, name: structs.replace(told, complaints=[complaint])}
    assert rig.executor.notices() == ["worker bad: slow \\u202e"]
    workers.announced = {"good": workers.announced["good"]}
    assert rig.executor.notices() == ["worker bad: slow \\u202e"]
    many = [str(number) for number in range(MAX_COMPLAINTS)]
    workers.announced = {"good": structs.replace(told, complaints=many)}
    assert len(rig.executor.notices()) == MAX_COMPLAINTS


def test_a_complaint_since_the_last_look_is_told_at_the_end_of_a_study(rig: Rig) -> None:
    complaining = Worker(protocol=PROTOCOL, compute_class="cpu", slots=5, imports=["m"], complaints=["slow"])
    rig.client.mget.side_effect = lambda names: [json.dumps(msgspec.to_builtins(complaining)) for _ in names]
    assert rig.executor.notices() == []
    rig.executor.look()
    assert rig.executor.notices() == ["worker bad: slow"]
    rig.client.smembers.side_effect = redis.ConnectionError("gone")
    rig.executor.look()
    assert rig.executor.notices() == ["worker bad: slow"]


def test_short_trials_are_sent_ahead_once_they_are_known_to_be_short(rig: Rig) -> None:
    assert rig.ahead == 0
    for number in range(30):
        rig.run(number, "good", done(0.02))
    assert rig.ahead > 90


def test_a_failure_that_is_tried_elsewhere_tells_nothing_of_how_long_trials_take(rig: Rig) -> None:
    for number in range(10):
        rig.run(number, "good", done(1.0))
    before = rig.ahead
    for number in range(10, 40):
        assert rig.run(number, "bad", failed(0.001)).retry is not None
    assert rig.ahead == before


def test_a_failure_that_is_believed_does(rig: Rig) -> None:
    for number, worker in enumerate(["good", "bad"]):
        rig.run(number, worker, failed(0.001))
    before = rig.ahead
    for number in range(10, 40):
        assert rig.run(number, "bad", failed(0.001)).retry is None
    assert rig.ahead > before


def test_where_all_workers_are_on_one_machine_a_failure_is_believed_at_once() -> None:
    rig = Rig(takes_over=False)
    assert rig.run(0, "bad", failed(0.001)).retry is None


def test_a_result_of_what_is_not_in_flight_is_passed_on_and_teaches_nothing(rig: Rig) -> None:
    late = Result(number=9, attempt=1, outcome=failed(0.001), at=0.0, worker="bad")
    for _ in range(30):
        assert list(rig.hear(late)) == [late]
    assert rig.ahead == 0


def test_a_study_announces_its_slot_seconds_where_it_wants_more_slots(rig: Rig) -> None:
    """Those of trials that ended, were lost, or run; over its weight, which is 1."""

    def turns() -> dict[str, float]:
        rig.clock.sleep(2.0)
        rig.hear()
        pipe = rig.client.pipeline.return_value.__enter__.return_value
        return msgspec.json.decode(pipe.set.call_args.args[1], type=StudyWants).turns

    rig.executor.classes()
    assert turns() == {}, "it leaves ten slots free"
    for number, seconds in enumerate((3.0, 0.0)):
        rig.run(number, "good", done(seconds))
    rig.executor.submit([queued(number) for number in range(2, 13)])
    started = [Started(number=number, attempt=1, host="h", at=0.0, worker="good") for number in (2, 3)]
    rig.hear(*started)
    rig.clock.sleep(5.0)
    rig.hear(Lost(number=3, attempt=1, reason="silence"))
    assert turns() == {"cpu": pytest.approx(3.0 + 0.001 + 5.0 + 7.0)}


@pytest.mark.parametrize("step", [-3600.0, 3600.0])
def test_a_lost_worker_is_seen_although_the_schedulers_clock_is_set(machine_time: MachineTime, step: float) -> None:
    rig = Rig(clock=SystemClock())
    assert len(rig.executor.workers.announced) == 2
    machine_time.set_by(step)
    rig.client.smembers.side_effect = lambda key: set()
    rig.executor.poll(0.0)
    assert len(rig.executor.workers.announced) == 2, "the last look was in this second"
    machine_time.sleep(1.5)
    rig.executor.poll(0.0)
    assert not rig.executor.workers.announced


def test_a_loss_that_an_outage_keeps_back_is_returned_once_and_its_lease_stays_until_then(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.executor.submit([queued(0)])
    leases = [(0, 1)]
    monkeypatch.setattr(rig.executor.channel, "ended_leases", lambda: [*leases])
    monkeypatch.setattr(rig.executor.channel, "forget", lambda ended: [leases.remove(each) for each in ended])
    rig.client.xread.side_effect = redis.ConnectionError("away")
    for _ in range(2):
        rig.clock.sleep(10)
        assert rig.executor.poll(0.0) == []
    rig.client.xread.side_effect = rig._read
    rig.clock.sleep(10)
    [lost] = rig.executor.poll(0.0)
    assert isinstance(lost, Lost)
    assert leases, "the loss is not recorded yet"
    assert rig.executor.poll(0.0) == []
    assert not leases


def test_a_scheduler_publishes_nothing_once_another_one_has_the_study(rig: Rig) -> None:
    rig.other_holder = "elsewhere 1 1:1:"
    rig.clock.sleep(HOLD_SECONDS)
    with pytest.raises(LockLost):
        rig.executor.submit([queued(0)])
    with pytest.raises(LockLost):
        rig.executor.poll(0.0)
    with pytest.raises(LockLost):
        rig.executor.close()
    rig.publisher.publish.assert_not_called()
    rig.publisher.close.assert_called_once()
