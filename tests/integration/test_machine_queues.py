"""An attempt for one machine runs there, and elsewhere if nobody there takes it: two real workers, on both brokers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kombu
import pytest
from acceptance.commands import until
from integration.places import BROKERS, Place, look_every, placed, poll_until

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Attempt, Lost, Result, Started, TrialState
from shadho_celery.fleet import broker, dispatch
from shadho_celery.fleet.broker import depths, machine_queue, queue
from shadho_celery.fleet.channel import MAX_STRIKES, Quarantine
from shadho_celery.fleet.redis import connect
from shadho_celery.scheduler.executors import Executor
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study

pytestmark = pytest.mark.timeout(120)

STUDY = """
import os, time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", -10, 10)}

def objective(params, context):
    end = time.monotonic() + params["x"]
    while time.monotonic() < end and not context.should_stop():
        time.sleep(0.005)
    (context.checkpoint_dir / "state").write_text(str(context.trial))
    return 0.5
"""

#: has a worker on any broker behave as it does on RabbitMQ 4: each of its queues has a prefetch limit of its own
AS_ON_RABBITMQ_4 = """
from kombu.transport.pyamqp import Transport

Transport.qos_semantics_matches_spec = lambda self, connection: True
"""


@pytest.fixture(scope="module", params=BROKERS)
def place(
    request: pytest.FixtureRequest,
    redis_server: str,
    amqp_server: tuple[str, Callable[..., str]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Place]:
    """A broker with two workers of one class, on the machines a and b, which share a disk."""
    with placed(request.param, redis_server, amqp_server, tmp_path_factory.mktemp(request.param), STUDY) as made:
        for host in ("a", "b"):
            made.worker("cpu", host=host)
        yield made


@pytest.fixture
def own_place(
    request: pytest.FixtureRequest, redis_server: str, amqp_server: tuple[str, Callable[..., str]], tmp_path: Path
) -> Iterator[Place]:
    """A broker without a worker, for one test."""
    with placed(getattr(request, "param", "rabbitmq"), redis_server, amqp_server, tmp_path, STUDY) as made:
        yield made


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here lasts long, and no test should."""
    monkeypatch.setattr(dispatch, "MACHINE_SECONDS", 1.0)
    look_every(0.2, monkeypatch)


def trial(number: int, x: float = 0.0, attempt: int = 1, compute_class: str = "cpu", **facts: Any) -> Attempt:
    known = {"subspace": "all", "params": {"x": x}, "attempt": attempt, "compute_class": compute_class}
    return Attempt(number=number, **known, **facts)


def ends(events: list[Any]) -> list[Any]:
    return [event for event in events if isinstance(event, (Result, Lost))]


def class_of(executor: Executor) -> ComputeClass:
    [found] = [each for each in executor.classes() if each.name == "cpu"]
    return found


def test_attempts_for_a_machine_run_on_it_whoever_else_is_free(place: Place, unique: Callable[[str], str]) -> None:
    with place.executor(unique("study")) as executor:
        sent = [trial(number, only_on="ab"[number % 3 == 0]) for number in range(9)]
        executor.submit(sent)
        events = poll_until(executor, lambda events: len(ends(events)) == 9)
    assert {event.number: event.host for event in events if isinstance(event, Result)} == {
        attempt.number: attempt.only_on for attempt in sent
    }
    assert not [event for event in events if isinstance(event, Lost)]


def test_an_attempt_for_a_machine_without_workers_comes_back_and_runs_elsewhere(
    place: Place, unique: Callable[[str], str]
) -> None:
    """Its study sends it again by itself, for any machine, and it has lost nothing."""
    study = open_study(SqlStore("sqlite://"), {}, name=unique("study"))
    with place.executor(study.record.key) as executor:
        sent = study.send(study.add("all", {"x": 0.0}, seed=0), "cpu", only_on="gone")
        executor.submit([sent])
        [event] = poll_until(executor, bool)
        assert isinstance(event, Lost)
        assert not event.claimed
        study.tell(event)
        again = study.next_waiting()
        assert again is not None
        second = study.send(again, "cpu")
        assert (second.attempt, second.only_on) == (2, None)
        executor.submit([second])
        [end] = ends(poll_until(executor, ends))
    assert isinstance(end, Result)
    assert end.host in {"a", "b"}
    ended = study.tell(end).trial
    assert ended is not None
    assert (ended.state, ended.lost, ended.attempt) == (TrialState.COMPLETE, 0, 2)


def test_a_promoted_trial_tells_whether_a_checkpoint_was_there(place: Place, unique: Callable[[str], str]) -> None:
    with place.executor(unique("study")) as executor:
        found = {}
        for number, origin, host in [(0, None, "a"), (1, 0, "b"), (2, 7, "b"), (3, 7, "a")]:
            executor.submit([trial(number, only_on=host, origin=origin)])
            [end] = ends(poll_until(executor, ends))
            found[number] = end.outcome.continued
    assert found == {0: None, 1: True, 2: False, 3: True}


def test_a_worker_whose_breaker_closes_again_serves_both_queues(place: Place, unique: Callable[[str], str]) -> None:
    study, name = unique("study"), place.live()["cpu", "a"]
    with place.executor(study) as executor, connect(place.redis) as client:

        def serving() -> bool:
            executor.poll(0.0)
            return "a" in class_of(executor).hosts

        client.hset(f"shadho:{study}:breakers", name, MAX_STRIKES)
        executor.submit([trial(0, only_on="a")])
        [event] = poll_until(executor, bool)
        assert isinstance(event, Lost), "its worker takes nothing"
        assert not serving()
        Quarantine(client, study).reset()
        until(serving, 10)
        executor.submit([trial(1, only_on="a"), trial(2, only_on="a")])
        events = poll_until(executor, lambda events: len(ends(events)) == 2, 30)
    assert {event.host for event in events if isinstance(event, Result)} == {"a"}


def test_the_status_counts_what_waits_in_the_queues_of_machines(place: Place, unique: Callable[[str], str]) -> None:
    with place.executor(unique("study")) as executor:
        executor.submit([trial(0, x=60.0, only_on="a")])
        poll_until(executor, bool)
        executor.submit([trial(number, only_on="a") for number in (1, 2)])
        told = place.desk.start("shadho-celery", "status", "--json").wait()
        assert told.json()["classes"]["cpu"]["queue"] == 2
        executor.cancel([0], running=True)
        poll_until(executor, lambda events: len(ends(events)) == 3)


def test_an_attempt_whose_machine_dies_before_it_takes_it_runs_on_another_machine(
    own_place: Place, unique: Callable[[str], str]
) -> None:
    dying = own_place.worker("cpu", host="a")
    own_place.worker("cpu", host="b")
    with own_place.executor(unique("study")) as executor:
        executor.submit([trial(0, x=60.0, only_on="a")])
        poll_until(executor, bool)
        executor.submit([trial(1, only_on="a")])
        executor.poll(0.5)
        dying.send(signal.SIGTERM)
        [event] = poll_until(executor, lambda events: [event for event in events if event.number == 1])
        assert isinstance(event, Lost)
        executor.submit([trial(1, attempt=2)])
        events = poll_until(executor, lambda events: [each for each in ends(events) if each.number == 1])
        assert {each.host for each in events if isinstance(each, Started)} == {"b"}
        executor.cancel([0], running=True)
        poll_until(executor, ends)


def test_with_a_prefetch_limit_for_each_queue_no_message_waits_behind_a_long_trial(
    own_place: Place, unique: Callable[[str], str]
) -> None:
    own_place.desk.write("celeryconfig.py", AS_ON_RABBITMQ_4)
    for host in ("a", "b"):
        own_place.worker("cpu", host=host)
    with own_place.executor(unique("study")) as executor:
        executor.submit([trial(0, x=60.0, only_on="a")])
        poll_until(executor, bool)
        executor.submit([trial(number) for number in range(1, 7)])
        events = poll_until(executor, lambda events: len(ends(events)) == 6, 25.0)
        executor.cancel([0], running=True)
        poll_until(executor, ends)
    assert {event.host for event in events if isinstance(event, Result)} == {"b"}


@pytest.mark.parametrize("own_place", BROKERS, indirect=True)
def test_the_queue_of_a_machine_that_is_gone_is_removed_with_its_messages(
    own_place: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker, "MACHINE_QUEUE_SECONDS", 1)
    monkeypatch.setenv("CELERY_BROKER_URL", own_place.broker)
    name, other = machine_queue("cpu", unique("host")), unique("cpu")
    with own_place.executor(unique("study")) as executor:
        executor.submit([trial(0, only_on=name.partition(",")[2]), trial(1, compute_class=other)])
        assert depths([name, other]) == {name: 1, other: 1}
    nothing = 0 if own_place.broker.startswith("redis") else None

    def is_gone() -> bool:
        # Looking at a queue counts as a use of it.
        time.sleep(2.0)
        return depths([name]) == {name: nothing}

    until(is_gone, 20)
    assert depths([other]) == {other: 1}, "that of a class stays"
    with kombu.Connection(own_place.broker) as connection:
        queue(other)(connection.default_channel).delete()
