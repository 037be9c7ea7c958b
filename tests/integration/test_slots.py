"""A worker's slots with a real Redis, without a broker: messages are given to them by hand."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import until
from hyperopt import hp
from msgspec.structs import replace

from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Event, GangEvent, Lost, Report, Result, Started
from shadho_celery.errors import ServiceError
from shadho_celery.fleet import channel
from shadho_celery.fleet.channel import Quarantine, SchedulerChannel
from shadho_celery.fleet.policy import NO_POLICY, Guard
from shadho_celery.fleet.registry import Registry, Worker, place_of
from shadho_celery.node import heartbeat
from shadho_celery.node import slots as node_slots
from shadho_celery.node.slots import NotMine, Slots
from shadho_celery.objective.sources import read
from shadho_celery.space.compile import compile_space

STUDY = """
from hyperopt import hp
from msgspec.structs import replace

def objective(params, context):
    several = context.study == "several"
    for step in range(20):
        context.report(step, {"a": float("nan"), "b": 0.5, "c": step} if several else 0.5)
    return {"losses": {"a": 1.0, "b": 0.5, "c": 2}} if several else 0.25

SPACE = hp.uniform("x", 0, 1)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the study, from which a worker's processes import it."""
    (tmp_path / "my_study.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def made(
    client: Any, checkpoints: Path, compute_class: str = "cpu", *, guard: Guard | None = None, **machine: Any
) -> Slots:
    return Slots(
        client,
        machine=Machine(host="h", **machine),
        compute_class=compute_class,
        count=1,
        imports=["my_study"],
        checkpoints=checkpoints,
        address="127.0.0.1",
        guard=guard,
    )


@pytest.fixture
def slots(client: Any, folder: Path) -> Iterator[Slots]:
    slots = made(client, folder)
    slots.start()
    yield slots
    slots.close()


def attempt(number: int = 0, which: int = 1, **facts: Any) -> Attempt:
    return Attempt(number=number, attempt=which, params={"x": 0.5}, subspace="", **facts)


def message(*attempts: Attempt, code: str = "") -> Payload:
    return Payload(study="k1", module="my_study", code=code, attempts=[*attempts])


def heard(client: Any) -> list[Event | GangEvent]:
    """Return the events so far."""
    return list(SchedulerChannel(client, "k1").drain(0))


def losses(client: Any) -> dict[int, float | None]:
    """Return the losses of the results so far, by trial."""
    return {event.number: event.outcome.loss for event in heard(client) if isinstance(event, Result)}


def test_a_worker_without_a_thread_for_its_leases_is_refused(
    slots: Slots, refuse_threads: Callable[[str], None]
) -> None:
    """All its leases would run out."""
    refuse_threads("_beat")
    with pytest.raises(ServiceError, match=r"this worker cannot renew leases: .*ulimit -u"):
        slots.start()


def test_a_worker_ends_and_does_what_it_was_asked_though_the_system_refuses_threads(
    slots: Slots, refuse_threads: Callable[[str], None]
) -> None:
    done: list[int] = []
    slots.beat.do_soon(lambda: done.append(1 // 0))
    slots.beat.do_soon(lambda: done.append(2))
    until(lambda: done == [2], 10)
    refuse_threads("close")
    slots.close()
    assert not slots._devices.runners[0].codes()


@pytest.mark.slow
def test_a_trial_says_how_many_of_its_reports_redis_refused(
    slots: Slots, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is away; its stream takes no more than 8 events but results."""
    monkeypatch.setattr(channel, "MAX_WAITING", 8)
    slots.run(message(attempt()))
    events = heard(client)
    assert sum(isinstance(event, Report) for event in events) == 7
    result = events[-1]
    assert isinstance(result, Result)
    assert result.outcome.loss == 0.25, result.outcome.error
    assert "13 reports were lost" in str(result.outcome.warning)


def test_the_losses_of_a_report_reach_the_scheduler_by_name(slots: Slots, client: Any) -> None:
    """They are minimised, and those that are not finite are left out."""
    ways = {"a": "minimize", "b": "maximize", "c": "minimize"}
    slots.run(replace(message(attempt()), name="several", objectives=ways))
    reports = [event for event in heard(client) if isinstance(event, Report)]
    assert [event.losses for event in reports] == [{"b": -0.5, "c": step} for step in range(20)]
    assert all(math.isnan(event.loss) for event in reports)


def test_a_trial_that_a_worker_has_failed_is_declined_there_once_another_may_have_become_free(
    slots: Slots, client: Any
) -> None:
    slots.run(message(attempt(which=2, failed_on=("other", slots.name))))
    [event] = SchedulerChannel(client, "k1").drain(10_000)
    reason = f"it has failed on {slots.name}, and must run on another worker"
    assert event == Lost(number=0, attempt=2, reason=reason, claimed=False)


def test_a_worker_declines_before_it_ends_what_would_not_end_in_time(
    slots: Slots, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beat, which declines such attempts, does not come any more."""
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 1000.0)
    slots.leaves_at = 0.0
    slots.run(message(attempt(expected=60.0)))
    slots.close()
    [event] = heard(client)
    assert isinstance(event, Lost)
    assert (event.number, event.claimed, "ends before that" in event.reason) == (0, False, True)


@pytest.mark.slow
def test_a_worker_that_knows_no_policy_declines_all_trials_and_announces_why(client: Any, folder: Path) -> None:
    """Its file of admins may be another one, or Redis may have lost the policy."""
    with closing(made(client, folder, guard=Guard(client, {"0" * 64}))) as slots:
        slots.start()
        slots.run(message(attempt()))
        [event] = heard(client)
        assert isinstance(event, Lost)
        assert (event.claimed, event.reason) == (False, f"on h: {NO_POLICY}")
        until(lambda: slots.heartbeat.worker.complaints == [NO_POLICY], 10)


def test_an_attempt_for_another_machine_is_declined_at_once(slots: Slots, client: Any) -> None:
    slots.run(message(attempt(0, only_on="elsewhere"), attempt(1, only_on="h")))
    first, second = [event for event in heard(client) if isinstance(event, (Lost, Result))]
    assert first == Lost(number=0, attempt=1, reason="it is for elsewhere, but was delivered to h", claimed=False)
    assert isinstance(second, Result)
    assert second.number == 1


@pytest.mark.slow
def test_a_half_open_circuit_breaker_grants_one_attempt_of_a_message_which_runs_before_the_others(
    slots: Slots, client: Any
) -> None:
    slots.run(message(attempt(0)))
    assert slots._quick, "from now on the slot claims all attempts of a message at once"
    Quarantine(client, "k1").half_open(slots.name)
    slots.run(message(attempt(1), attempt(2), attempt(3)))
    assert losses(client) == dict.fromkeys(range(4), 0.25)


@pytest.mark.slow
def test_a_worker_without_a_disk_for_checkpoints_runs_and_announces_no_storage(client: Any, folder: Path) -> None:
    (folder / "file").touch()
    both = [made(client, folder / "file" / "checkpoints"), made(client, folder / "checkpoints")]
    for each in both:
        assert place_of(each.name) == "cpu@h", "its place is its class and the host that it announces"
        each.heartbeat.announce()
    storages = [Registry(client, Worker).living()[each.name].storage for each in both]
    both[0].start()
    both[0].run(message(attempt()))
    for each in both:
        each.close()
    assert [bool(storage) for storage in storages] == [False, True]
    assert losses(client) == {0: 0.25}


@pytest.mark.slow
def test_trials_share_the_cores_with_another_worker_of_the_host_as_long_as_it_lives(
    client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = STUDY.replace("else 0.25", "else int(__import__('os').environ['OMP_NUM_THREADS'])")
    (folder / "my_study.py").write_text(counting)
    for name in ("heartbeat.BEAT_SECONDS", "heartbeat.ANNOUNCE_EVERY"):
        monkeypatch.setattr(f"shadho_celery.node.{name}", 0.1)
    numbers = count()

    def threads(slots: Slots) -> float | None:
        number = next(numbers)
        slots.run(message(attempt(number)))
        return losses(client)[number]

    first, second = (made(client, folder, name, cores=4, processors="f", pool="p") for name in ("cpu", "other"))
    first.start()
    first.heartbeat.announce()
    assert threads(first) == 4
    second.check()
    second.start()
    assert threads(second) == 2, "from its first trial on"
    second.heartbeat.announce()
    until(lambda: threads(first) == 2, 20)
    second.close()
    until(lambda: threads(first) == 4, 20)
    first.close()


# Code


def version(folder: Path) -> CodeVersion:
    """Return the version of the study that is in the folder now."""
    return read("my_study", str(folder / "my_study.py")).with_space(compile_space(hp.uniform("x", 0, 1)).describe())


def runs(slots: Slots, payload: Payload) -> bool:
    """Run a message, or return False if the worker has declined it."""
    with suppress(NotMine):
        slots.run(payload)
        return True
    return False


@pytest.mark.slow
def test_attempts_for_another_version_are_given_back_at_no_cost_and_the_worker_says_which_it_has(
    slots: Slots, client: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next messages do not even reach its slots; once the file is as they want it, they do."""
    monkeypatch.setattr(node_slots, "REQUEUE_SECONDS", 0.01)
    old = version(folder)
    (folder / "my_study.py").write_text(STUDY.replace("0.25", "0.75"))
    slots.heartbeat.announce()
    slots.run(message(attempt(0), attempt(1), code=old.digest))
    events, announced = heard(client), Registry(client, Worker).living()[slots.name]
    lost = [event for event in events if isinstance(event, Lost)]
    assert [(each.number, each.claimed) for each in lost] == [(0, False), (1, False)], events
    assert old.digest in lost[0].reason
    assert [type(event) for event in events if not isinstance(event, Lost)] == [Started]
    assert announced.codes["my_study"] == version(folder)
    again = message(attempt(2), code=old.digest)
    with pytest.raises(NotMine, match=old.digest):
        slots.run(again)
    (folder / "my_study.py").write_text(STUDY)
    # The next process may have imported the other one already. The message then goes back to its queue.
    until(partial(runs, slots, again), 30)
    assert losses(client) == {2: 0.25}


# The end of a worker


def test_what_runs_when_a_worker_closes_is_given_back_at_no_cost_with_the_rest_of_its_message(
    slots: Slots, client: Any, folder: Path
) -> None:
    """No FAILED result of the process that was killed counts; what comes later is for another worker."""
    (folder / "my_study.py").write_text(STUDY.replace("    return {", "    __import__('time').sleep(60)\n    return {"))
    running = threading.Thread(target=slots.run, args=[message(attempt(0), attempt(1))])
    running.start()
    until(lambda: len(slots.leases) == 1, 30)
    slots.close()
    running.join(30)
    reason = "its worker was stopped"
    # The second one was not claimed.
    given_back = [Lost(number=n, attempt=1, reason=reason, claimed=False, given_back=n == 0) for n in (0, 1)]
    assert [event for event in heard(client) if isinstance(event, (Lost, Result))] == given_back
    with pytest.raises(NotMine, match="this worker stops"):
        slots.run(message(attempt(2)))
