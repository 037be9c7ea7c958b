"""How slots are shared out between studies, and what is known of the machines of a class."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import MagicMock

import msgspec
import pytest
from msgspec import structs

from shadho_celery.core import hardware
from shadho_celery.core.attempts import Sent
from shadho_celery.core.hardware import ComputeClass, Gpu, Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, TrialState
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.registry import ANNOUNCE_SECONDS, Progress, Share, StudyWants, Worker
from shadho_celery.fleet.workers import FleetStudy, Servers, Workers, allow


@pytest.mark.parametrize(
    ("slots", "weight", "others", "allowance"),
    [
        (8, 1.0, [], 8),
        (8, 1.0, [(1.0, 8)], 4),
        (8, 3.0, [(1.0, 8)], 6),
        (8, 1.0, [(1.0, 2)], 6),
        (8, 1.0, [(1.0, 0)], 8),
        (9, 1.0, [(1.0, 1), (1.0, 9)], 4),
        (9, 1.0, [(1.0, 9), (1.0, 1)], 4),
        (0, 1.0, [(1.0, 5)], 0),
    ],
)
def test_slots_go_by_weight_and_what_a_study_does_not_want_goes_to_those_that_do(
    slots: int, weight: float, others: list[tuple[float, float]], allowance: float
) -> None:
    assert allow(slots, weight, others) == pytest.approx(allowance)


def test_studies_that_want_all_get_all_together() -> None:
    weights = [0.5, 1.0, 2.0, 7.0]
    parts = [allow(10, mine, [(w, 10) for w in weights[:i] + weights[i + 1 :]]) for i, mine in enumerate(weights)]
    assert sum(parts) == pytest.approx(10)


# Machines


class Fleet:
    """Workers of class cpu, as they are announced to a study."""

    def __init__(self, *, one_worker: bool = False) -> None:
        self.announced: dict[str, Worker] = {}
        client = MagicMock()
        client.smembers.side_effect = lambda key: {*self.announced} if key == "shadho:workers" else set()
        client.mget.side_effect = lambda names: [
            json.dumps(msgspec.to_builtins(self.announced[name])) for name in sorted(self.announced)
        ]
        connection = Servers(client=client, publisher=MagicMock())
        template = Payload(study="s", module="m", attempts=[], one_worker=one_worker)
        self.workers = Workers(connection, FleetStudy(template=template))

    def announce(self, name: str, host: str, **facts: Any) -> None:
        known = {"protocol": PROTOCOL, "compute_class": "cpu", "slots": 1, "imports": ["m"], **facts}
        self.announced[name] = Worker(machine=Machine(host=host), **known)

    def look(self, now: float, *sent: Sent) -> ComputeClass:
        self.workers.look(now, sent, set())
        [found] = self.workers.classes
        return found


def for_machine(host: str, at: float = 0.0) -> Sent:
    facts = {"attempt": 1, "subspace": "all", "params": {}, "compute_class": "cpu"}
    return Sent(Attempt(number=0, only_on=host, **facts), at)


def running(number: int, worker: str, slots: int = 1) -> Sent:
    facts = {"attempt": 1, "subspace": "all", "params": {}, "compute_class": "cpu", "state": TrialState.RUNNING}
    return Sent(Attempt(number=number, worker=worker, slots=slots, **facts), 0.0)


def with_gpu(gpu_memory: int, memory: int) -> Machine:
    return Machine(cards=(Gpu(name="g", memory=gpu_memory),), memory=memory)


@pytest.mark.parametrize(
    ("name", "machines", "memory", "gpu_memory"),
    [
        ("gpu", [with_gpu(24, memory=64), with_gpu(16, memory=512)], 64, 16),
        ("gpu", [Machine(memory=64), Machine(memory=32)], 32, 0),
        ("cpu", [with_gpu(24, memory=64), Machine(memory=128)], 64, 0),
    ],
    ids=["of the smallest GPU", "of the smallest machine", "a cpu class on a machine with GPUs"],
)
def test_a_classs_memory_is_what_a_trial_may_use_on_the_smallest_of_its_machines(
    name: str, machines: list[Machine], memory: int, gpu_memory: int
) -> None:
    fleet = Fleet()
    for place, machine in enumerate(machines):
        fleet.announce(str(place), "h", compute_class=name)
        fleet.announced[str(place)] = structs.replace(fleet.announced[str(place)], machine=machine)
    found = fleet.look(0.0)
    assert (found.memory, found.gpu_memory) == (memory, gpu_memory)


def test_machines_of_equal_ids_share_a_storage_and_one_of_several_has_none_that_is_known() -> None:
    fleet = Fleet()
    for name, (host, storage) in enumerate([("a", "1"), ("a", "1"), ("b", "1"), ("c", "2"), ("c", "3"), ("d", "")]):
        fleet.announce(str(name), host, storage=storage)
    fleet.announce("e1", "e", storage="1")
    fleet.announce("e2", "e")
    assert fleet.look(0.0).storages == {"a": "1", "b": "1", "c": "", "d": "", "e": ""}


def test_a_machine_has_a_free_slot_by_itself_whatever_its_class_has() -> None:
    fleet = Fleet()
    fleet.announce("a1", "a", busy=1)
    fleet.announce("b1", "b")
    for now in (0.0, 10.0):
        fleet.look(now)
    had_free_slot = fleet.workers.had_free_slot
    assert had_free_slot("cpu", 0.0, 10.0, 9.0)
    assert [had_free_slot("cpu", 0.0, 10.0, 9.0, host=host) for host in "ab"] == [False, True]
    assert not had_free_slot("cpu", 2.0, 10.0, 9.0, host="b"), "it counts from the moment of the sending"


def test_of_our_own_attempts_we_know_that_they_take_a_slot_before_it_is_announced() -> None:
    fleet = Fleet()
    for name, host in [("a1", "a"), ("a2", "a"), ("b1", "b")]:
        fleet.announce(name, host)
    # A gang has but one slot on its coordinator's machine; a worker that is gone takes none.
    sent = running(1, "a1"), running(2, "b1", slots=3), running(3, "a0")
    for now in (0.0, 10.0):
        fleet.look(now, *sent)
    assert [fleet.workers.had_free_slot("cpu", 0.0, 10.0, 9.0, host=host) for host in "ab"] == [True, False]


def test_several_slots_are_free_on_a_machine_once_one_of_its_workers_has_them() -> None:
    """Otherwise an attempt that waits for them would be sent again and again until it has no attempts left."""
    fleet = Fleet(one_worker=True)
    wide = Sent(Attempt(number=9, only_on="a", slots=3, attempt=1, subspace="all", params={}, compute_class="cpu"), 0.0)
    for busy, is_free in ((2, False), (1, True)):
        fleet.announce("a1", "a", slots=4, busy=2)
        fleet.announce("a2", "a", slots=4, busy=busy)
        for now in (0.0, 10.0):
            found = fleet.look(now, wide, running(1, "a1", slots=2))
        assert fleet.workers.had_free_slot("cpu", 0.0, 10.0, 9.0, host="a")
        assert fleet.workers.had_free_slot("cpu", 0.0, 10.0, 9.0, host="a", slots=3) is is_free
        assert found.machines[0].by_worker == {"a1": 4, "a2": 4}


def test_an_attempt_for_a_machine_is_without_workers_once_that_machine_is() -> None:
    fleet = Fleet()
    for host in "ab":
        fleet.announce(f"{host}1", host)
    fleet.look(0.0)
    del fleet.announced["a1"]
    fleet.look(6.0)
    gone = {host: fleet.workers.are_gone(for_machine(host), 6.0, 5.0) for host in "abc"}
    assert gone == {"a": True, "b": False, "c": True}
    assert not fleet.workers.are_gone(for_machine("a", at=2.0), 6.0, 5.0)
    fleet.announce("b1", "b", quarantined=True)
    fleet.announce("c1", "c")
    fleet.look(12.0)
    assert fleet.workers.are_gone(for_machine("b"), 12.0, 5.0), "it takes nothing"


def test_a_study_announces_its_name_and_how_far_it_is_each_time() -> None:
    client = MagicMock(**{"smembers.return_value": set()})
    told = [Progress(ended=1, limit=5, running=2), Progress(ended=2, limit=5)]
    wanted = {"cloud": 4}
    study = FleetStudy(template=Payload(study="k", name="svm", module="m", attempts=[]), weight=2.0)
    connection = Servers(client=client, publisher=MagicMock())
    workers = Workers(connection, study, progress=iter(told).__next__, wanted=lambda: wanted)
    for now in (0.0, 1.0):
        workers.look(now, (), set())
    sent = client.pipeline.return_value.__enter__.return_value.set.call_args_list
    announced = [msgspec.json.decode(call.args[1], type=StudyWants) for call in sent]
    assert announced == [StudyWants(name="svm", weight=2.0, progress=each, wanted_slots=wanted) for each in told]


def test_a_worker_that_drains_gets_nothing_and_what_it_runs_takes_no_slot_of_the_others() -> None:
    fleet = Fleet()
    fleet.announce("a1", "a", draining=True)
    fleet.announce("b1", "b")
    found = fleet.look(0.0, running(1, "a1"), running(2, "b1"))
    assert (found.names, found.slots, found.silent) == ({"b1"}, 1, 1)


def test_slots_of_all_other_studies_are_known_of_each_worker_of_the_study() -> None:
    fleet = Fleet()
    three = {"s": Share(slots=1), "other": Share(slots=2), "third": Share(slots=1)}
    fleet.announce("a1", "a", slots=4, busy=4, studies=three)
    fleet.announce("b1", "b", busy=1, studies={"s": Share(slots=1)})
    fleet.announce("c1", "c", busy=1, studies={"other": Share(slots=1)}, draining=True)
    fleet.announce("x1", "x", busy=1, studies={"other": Share(slots=1)}, imports=["of another study"])
    fleet.look(0.0)
    assert fleet.workers.others == {"a1": 3}
    fleet.announce("c1", "c", busy=1, studies={"other": Share(slots=1)})
    fleet.look(1.0)
    assert fleet.workers.others == {"a1": 3, "c1": 1}


def test_a_machine_has_vanished_once_none_of_its_workers_is_live() -> None:
    """This machine, on which the scheduler runs, never has; nor has any while workers may still return to Redis."""
    fleet = Fleet()
    fleet.announce("a", "one")
    fleet.look(0.0)
    assert not fleet.workers.has_vanished("two", ANNOUNCE_SECONDS - 1.0)
    for now in range(0, 31, 5):
        fleet.look(float(now))
    assert not fleet.workers.has_vanished("one", 30.0)
    assert not fleet.workers.has_vanished(hardware.own_host(), 30.0)
    assert fleet.workers.has_vanished("two", 30.0)
    assert not fleet.workers.has_vanished("two", 100.0)
