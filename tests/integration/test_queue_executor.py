"""The executor on real queues, with a real worker: every executor's contract, and what only a fleet can do wrong."""

from __future__ import annotations

import pickle
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import kombu
import pytest
import services
from acceptance.commands import until

# The tests that every executor passes; those that are defined below again speak of what is different here.
from contract.test_executors import *  # noqa: F403
from contract.test_executors import Rig, all_end, collect, ends, queued
from integration import places
from integration.places import look_every, poll_until
from services.channels import Channel
from services.told import ToldExecutor

from shadho_celery.core.hardware import ComputeClass, Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Lost, Outcome, Report, Result, Started, TrialState, digest_of
from shadho_celery.fleet import broker, dispatch
from shadho_celery.fleet import channel as channel_module
from shadho_celery.fleet.broker import PROTOCOL, TASK, message, queue
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.scheduler.executors import Executor

pytestmark = pytest.mark.timeout(120)

#: The contract's objective; slow enough that trials wait behind one another.
STUDY = """
import time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", -10, 10)}

def objective(params, context):
    with open("runs.log", "a") as log:
        log.write(f"began\\t{context.trial}\\t{context.attempt}\\t{context.compute_class}\\t0\\n")
    if params["x"] < 0:
        raise ArithmeticError("x is negative")
    if params["x"] == 0.75:
        len(b"x" * 200_000_000)
    budget = {} if context.budget is None else {"budget": context.budget}
    end = time.monotonic() + (60 if params["x"] == 9 else params["x"] * 0.05)
    while time.monotonic() < end and not context.should_stop():
        time.sleep(0.005)
    return {"loss": params["x"], "half": params["x"] / 2, **budget}
"""

MARKER = 'open("imported", "w").close()\n'


@dataclass(frozen=True)
class Place(places.Place):
    """A broker and a Redis with one real worker of two slots."""

    compute_class: str

    def channel(self, lease_seconds: float = 30.0) -> Channel:
        return Channel(connect(self.redis), lease_seconds)

    @contextmanager
    def broker_channel(self) -> Iterator[Any]:
        """A channel to the broker, past everything of ours."""
        with kombu.Connection(self.broker) as connection:
            yield connection.default_channel

    def waiting(self, name: str | None = None) -> int:
        """Messages that lie in a class's queue."""
        with self.broker_channel() as channel:
            return int(queue(name or self.compute_class)(channel).queue_declare().message_count)

    @property
    def log(self) -> str:
        """Return the log of the worker."""
        return self.desk.commands[0].err


@pytest.fixture(scope="module")
def place_on(
    redis_server: str, amqp_server: tuple[str, Callable[..., str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Place]]:
    """Make the place of a broker, once for all tests; each has a Redis database of its own."""
    with ExitStack() as stack:
        found: dict[str, Place] = {}

        def make(broker: str) -> Place:
            if broker not in found:
                folder = tmp_path_factory.mktemp(broker)
                made = stack.enter_context(places.placed(broker, redis_server, amqp_server, folder, STUDY))
                made.desk.write("stranger.py", MARKER + STUDY)
                made.worker(f"on-{broker}", slots=2)
                found[broker] = Place(made.desk, made.broker, made.redis, f"on-{broker}")
            return found[broker]

        yield make


@pytest.fixture(params=places.BROKERS)
def place(request: pytest.FixtureRequest, place_on: Callable[[str], Place]) -> Place:
    return place_on(request.param)


@pytest.fixture
def on_redis(place_on: Callable[[str], Place]) -> Place:
    return place_on("redis")


@pytest.fixture
def rig(place: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    # Nothing here lasts long, and no test should.
    monkeypatch.setattr(dispatch, "NO_WORKER_SECONDS", 1.0)
    look_every(0.2, monkeypatch)
    with place.executor(unique("study")) as executor:
        yield Rig(executor=executor, compute_class=place.compute_class, catches_running=True)


def trial(number: int, x: float = 1.0, attempt: int = 1, compute_class: str = "on-redis") -> Attempt:
    return Attempt(number=number, subspace="all", params={"x": x}, attempt=attempt, compute_class=compute_class)


def outcome(loss: float) -> Outcome:
    return Outcome(state=TrialState.COMPLETE, loss=loss)


# The contract, where a fleet takes its time


def test_with_running_the_running_trials_end_cancelled_without_a_loss(rig: Rig) -> None:
    rig.executor.submit([queued(rig, 0, x=9)])
    assert [type(event) for event in poll_until(rig.executor, bool)] == [Started]
    rig.executor.cancel([0], running=True)
    [end] = collect(rig, all_end(1))
    assert isinstance(end, Result)
    assert (end.outcome.state, end.outcome.loss) == (TrialState.CANCELLED, None)


def of(name: str, executor: Executor) -> ComputeClass:
    """A class of that executor, as its workers announce it now."""
    executor.poll(0.0)
    [found] = [compute_class for compute_class in executor.classes() if compute_class.name == name]
    return found


def test_there_is_a_class_with_room_before_and_after_trials_ran(rig: Rig, place: Place) -> None:
    """Announcements are a few seconds old, but workers do announce that they are free again."""

    def check() -> None:
        served = of(place.compute_class, rig.executor)
        assert (served.slots, served.workers) == (2, 1)
        assert 0 < served.share <= 2

    check()
    rig.executor.submit([queued(rig, number) for number in range(4)])
    collect(rig, all_end(4))
    check()

    def idle() -> bool:
        return of(place.compute_class, rig.executor).busy == 0

    until(idle, 15)


# Duplicates and losses


def test_an_attempt_that_is_published_twice_runs_once(rig: Rig, place: Place) -> None:
    for _ in range(3):
        rig.executor.submit([queued(rig, 0), queued(rig, 1)])
    events = collect(rig, all_end(2))
    assert Counter(type(event) for event in events) == {Started: 2, Result: 2}
    until(lambda: place.waiting() == 0, 10, lambda: f"{place.waiting()}")
    assert not list(rig.executor.poll(0.2)), "the copies were refused"


def test_what_nobody_claimed_is_taken_back_and_its_message_refused_even_after_the_studys_end(
    place: Place, unique: Callable[[str], str]
) -> None:
    study, name = unique("study"), unique("late")
    before = len(place.desk.runs())
    with place.executor(study) as executor:
        executor.submit([trial(number, compute_class=name) for number in range(3)])
        executor.cancel(range(3), running=False)
        events = poll_until(executor, lambda events: len(events) >= 3)
        assert all(isinstance(event, Lost) and not event.claimed for event in events)
        executor.poll(0.0)
    assert place.waiting(name) == 3
    worker = place.desk.worker(name, "-c", "1", "-l", "INFO")
    until(lambda: worker.err.count("refused at its claim") == 3, 30, lambda: worker.err)
    worker.end()
    assert len(place.desk.runs()) == before
    with connect(place.redis) as client:
        assert list(client.scan_iter(f"shadho:{study}:*")) == [f"shadho:{study}:attempts"]
        assert client.ttl(f"shadho:{study}:attempts") > 0, "and that ends too"


def test_a_message_that_got_lost_is_sent_again_once_there_was_room_for_it(
    on_redis: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "UNCLAIMED_SECONDS", 0.5)
    with on_redis.executor(unique("study")) as executor:
        monkeypatch.setattr(executor._publisher, "publish", list)  # into the void
        executor.submit([trial(0)])
        monkeypatch.undo()
        monkeypatch.setattr(dispatch, "UNCLAIMED_SECONDS", 0.5)
        [lost] = poll_until(executor, bool)
        assert (lost.number, lost.attempt, lost.claimed) == (0, 1, False)
        executor.submit([trial(0, attempt=2)])
        assert [event.attempt for event in poll_until(executor, lambda events: len(events) == 2)] == [2, 2]


def test_after_its_lease_a_silent_attempt_is_lost_and_its_late_result_refused(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    study, name = unique("study"), unique("silent")
    silent = on_redis.channel(lease_seconds=0.3)
    late = Result(number=0, attempt=1, outcome=outcome(-5.0), at=0.0)
    with on_redis.executor(study) as executor:
        executor.submit([trial(0, compute_class=name)])
        assert silent.claim(study, Started(number=0, attempt=1, host="h", at=0.0))
        events = poll_until(executor, ends)
        assert [type(event) for event in events] == [Started, Lost]
        assert events[1].claimed
        assert not silent.finish(study, late), "between the loss and the next attempt"
        executor.submit([trial(0, x=2.0, attempt=2)])
        [_, result] = poll_until(executor, lambda events: len(events) >= 2)
        assert (result.attempt, result.outcome.loss) == (2, 2.0)
        assert not silent.finish(study, late), "and after it"
        assert not poll_until(executor, lambda _: True)


def test_a_claimed_attempt_of_which_redis_knows_nothing_is_lost(
    on_redis: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a FLUSHALL: a re-run, never a trial that is waited for without end."""
    look_every(0.1, monkeypatch)
    study = unique("study")
    with on_redis.executor(study) as executor:
        executor.submit([trial(0, compute_class=unique("nobody"))])
        assert on_redis.channel().claim(study, Started(number=0, attempt=1, host="h", at=0.0))
        assert poll_until(executor, bool)
        with connect(on_redis.redis) as client:
            client.delete(f"shadho:{study}:leases", f"shadho:{study}:attempts")
        [lost] = poll_until(executor, ends)
        assert not lost.claimed, "the trial is not to blame"


def test_a_result_of_other_params_is_passed_on_to_be_refused_and_its_trial_tried_again(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    """As of a trial of the same number, which a scheduler with a copy of the store has sent."""
    study, name = unique("study"), unique("nobody")
    other = Result(number=0, attempt=1, outcome=outcome(-5.0), at=0.0, digest=digest_of({"x": 2.0}))
    with on_redis.executor(study) as executor:
        executor.submit([trial(0, compute_class=name)])
        assert on_redis.channel().claim(study, Started(number=0, attempt=1, host="h", at=0.0))
        assert on_redis.channel().finish(study, other)
        events = poll_until(executor, lambda events: len(ends(events)) == 2)
        assert [type(event) for event in events] == [Started, Result, Lost]
        assert not events[-1].claimed
        executor.submit([trial(0, attempt=2)])
        [_, mine] = poll_until(executor, lambda events: len(events) >= 2)
        assert mine.digest == digest_of({"x": 1.0})


def test_a_finished_trial_is_not_lost_behind_a_backlog_of_reports(
    on_redis: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every(0.0, monkeypatch)
    monkeypatch.setattr(channel_module, "READ", 4)
    study = unique("study")
    with on_redis.executor(study) as executor:
        executor.submit([trial(0, compute_class=unique("nobody"))])
        worker = on_redis.channel()
        assert worker.claim(study, Started(number=0, attempt=1, host="h", at=0.0))
        for step in range(100):
            worker.report(study, Report(number=0, attempt=1, step=step, loss=0.0, at=0.0))
        assert worker.finish(study, Result(number=0, attempt=1, outcome=outcome(1.0), at=0.0))
        events = poll_until(executor, ends)
    assert [type(event) for event in events] == [Started, *[Report] * 100, Result]


def test_a_result_stops_what_was_sent_again_since(on_redis: Place, unique: Callable[[str], str]) -> None:
    """The trial was thought to be lost, and Redis let another attempt follow; a third one waits in a queue."""
    study, name = unique("study"), unique("nobody")
    first, second = on_redis.channel(), on_redis.channel()
    with on_redis.executor(study) as executor:
        executor.submit([trial(0, compute_class=name)])
        assert first.claim(study, Started(number=0, attempt=1, host="h", at=0.0))
        assert first.finish(study, Result(number=0, attempt=1, outcome=outcome(1.0), at=0.0))
        executor._in_flight.lose(0, 1)
        executor.submit([trial(0, attempt=2, compute_class=name)])
        executor.submit([trial(0, attempt=3, compute_class=name)])
        assert second.claim(study, Started(number=0, attempt=2, host="h", at=0.0))
        assert second.renew(study, [(0, 2)]) == ["ok"]
        assert poll_until(executor, ends)
        executor.poll(0.0)
        assert second.renew(study, [(0, 2)]) == ["gone"]
        assert not second.claim(study, Started(number=0, attempt=3, host="h", at=0.0))


# A scheduler's life and death


def test_events_survive_a_scheduler_that_dies_before_it_has_recorded_them(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    study = unique("study")
    first = ToldExecutor(connect(on_redis.redis), on_redis.publisher(), study, "my_study")
    first.submit([trial(0), trial(1)])
    events = poll_until(first, lambda events: len(events) >= 4)
    # It dies here: no further poll, which would have confirmed the last of them, and no close.
    second = ToldExecutor(connect(on_redis.redis), on_redis.publisher(), study, "my_study")
    again = poll_until(second, bool)
    assert again
    assert again == events[-len(again) :]
    second.poll(0.0)
    third = ToldExecutor(connect(on_redis.redis), on_redis.publisher(), study, "my_study")
    assert not list(third.poll(0.3)), "what was confirmed does not come again"
    for executor in (first, second, third):
        executor.close()


def test_a_scheduler_that_resumes_adopts_what_runs(on_redis: Place, unique: Callable[[str], str]) -> None:
    study = unique("study")
    first = ToldExecutor(connect(on_redis.redis), on_redis.publisher(), study, "my_study")
    first.submit([trial(0, x=8.0)])
    [started] = poll_until(first, bool)
    first._publisher.close()
    with on_redis.executor(study) as second:
        second.submit([trial(0, x=8.0).evolve(state=TrialState.RUNNING, host=started.host, started_at=started.at)])
        [result] = [event for event in poll_until(second, ends) if event != started]
        assert (result.attempt, result.outcome.state, result.outcome.loss) == (1, TrialState.COMPLETE, 8.0)


def test_without_adoption_what_ran_is_lost_at_once(on_redis: Place, unique: Callable[[str], str]) -> None:
    """As in embedded mode, whose workers die with the scheduler."""
    study = unique("study")
    assert on_redis.channel().claim(study, Started(number=0, attempt=1, host="h", at=0.0))
    with on_redis.executor(study, takes_over=False) as executor:
        executor.submit([trial(0).evolve(state=TrialState.RUNNING, host="h", started_at=0.0)])
        began = time.monotonic()
        events = poll_until(executor, ends)
        assert time.monotonic() - began < 5, "and not when the lease ends"
        assert {type(event) for event in events} <= {Started, Lost}
        assert not ends(events)[0].claimed, "the trial is not to blame"


def fake_worker(url: str, name: str, **facts: Any) -> None:
    """Announce a worker of class `name` that is not there."""
    known = {"compute_class": name, "slots": 1, "machine": Machine(memory=2**30)}
    with connect(url) as client:
        worker = Worker(**{"protocol": PROTOCOL, "imports": ["my_study"], **known, **facts})
        Registry(client, Worker).announce(name, worker)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak cannot be set back")
def test_a_trials_peak_memory_comes_back_and_the_ones_after_it_have_their_own(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    with on_redis.executor(unique("study")) as executor:
        executor.submit([trial(0, x=0.75)])
        [hungry] = [event for event in poll_until(executor, ends) if isinstance(event, Result)]
        peak = hungry.outcome.memory or 0
        assert peak >= 200_000_000
        # One more than there are slots: one of them runs where the hungry one ran.
        executor.submit([trial(number, x=0.5) for number in range(1, 4)])
        for result in ends(poll_until(executor, lambda events: len(ends(events)) == 3)):
            assert isinstance(result, Result)
            assert 0 < (result.outcome.memory or 0) <= peak - 100_000_000


def test_a_poll_does_not_wait_for_events_when_a_worker_has_just_come(
    on_redis: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look_every(0.0, monkeypatch)
    name, waits = unique("newcomer"), []
    with on_redis.executor(unique("study")) as executor:
        drain = executor.channel.drain
        monkeypatch.setattr(executor.channel, "drain", lambda wait_ms: waits.append(wait_ms) or drain(wait_ms))
        for comes in (False, False, True, False):
            if comes:
                fake_worker(on_redis.redis, name)
            executor.poll(0.05)
    assert [wait > 0 for wait in waits] == [False, True, False, True]
    with connect(on_redis.redis) as client:
        Registry(client, Worker).withdraw(name)


# The servers fail


def test_the_publisher_connects_again_after_redis_was_restarted(private_redis: services.RedisServer) -> None:
    place = Place(None, private_redis.url, private_redis.url, "none")  # type: ignore[arg-type]  # no worker here
    publisher = place.publisher()
    publisher.publish([("kept", payload("s"))])
    private_redis.restart()
    publisher.publish([("kept", payload("s")) for _ in range(2)])
    assert place.waiting("kept") == 3
    publisher.close()


def test_the_publisher_connects_again_after_rabbitmq_was_restarted(private_rabbitmq: services.RabbitServer) -> None:
    place = Place(None, private_rabbitmq.url, "", "none")  # type: ignore[arg-type]
    publisher = place.publisher()
    publisher.publish([("kept", payload("s"))])
    # Not killed: RabbitMQ confirms a message before its own record of a new queue is on disk.
    private_rabbitmq.restart(signal.SIGTERM)
    publisher.publish([("kept", payload("s")) for _ in range(2)])
    assert place.waiting("kept") == 3, "a queue and its messages survive the broker"
    private_rabbitmq.ctl("close_all_connections", "for a test")
    publisher.publish([("kept", payload("s"))])
    assert place.waiting("kept") == 4
    publisher.close()


def test_while_redis_is_away_nothing_happens_and_nothing_is_forgotten(private_redis: services.RedisServer) -> None:
    """Polls are empty; what was to be taken back meanwhile is taken back afterwards."""
    place = Place(None, private_redis.url, private_redis.url, "none")  # type: ignore[arg-type]
    fake_worker(private_redis.url, "away")
    with connect(private_redis.url) as client:
        executor = ToldExecutor(client, place.publisher(), "study", "my_study")
        executor.submit([trial(0, compute_class="away"), trial(1, compute_class="away")])
        assert place.channel().claim("study", Started(number=0, attempt=1, host="h", at=0.0))
        assert [type(event) for event in poll_until(executor, bool)] == [Started]
        private_redis.kill()
        for _ in range(4):
            assert list(executor.poll(0.4)) == []
            assert [compute_class.name for compute_class in executor.classes()] == ["away"]
            assert executor.workers.announced
        executor.cancel([1], running=False)
        private_redis.start()
        [lost] = poll_until(executor, bool)
        assert (lost.number, lost.claimed) == (1, False)
        executor.close()


def test_what_the_broker_does_not_take_is_sent_when_it_is_back(
    on_redis: Place,
    private_redis: services.RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    unique: Callable[[str], str],
) -> None:
    """The scheduler goes on meanwhile, and can say what is wrong; what was taken back in between is not sent."""
    monkeypatch.setattr(dispatch, "RETRY_SECONDS", 0.2)
    name = unique("waiting")
    place = replace(on_redis, broker=private_redis.url)
    fake_worker(place.redis, name)
    with place.executor(unique("study")) as executor:
        private_redis.kill()
        executor.submit([trial(number, compute_class=name) for number in range(3)])
        assert private_redis.url in str(executor.trouble)
        assert list(executor.poll(0.1)) == []
        executor.cancel([1], running=False)
        assert [event.number for event in poll_until(executor, bool)] == [1]
        private_redis.start()
        poll_until(executor, lambda _: executor.trouble is None)
        assert place.waiting(name) == 2


# Copies


def test_a_copy_that_only_the_machine_of_its_trial_could_take_is_lost_unclaimed_and_nothing_waits_behind_it(
    place: Place, unique: Callable[[str], str]
) -> None:
    """Put back into its queue it would be the first there again, for the one worker that is left."""
    name = place.compute_class
    with place.executor(unique("study")) as executor:
        first = trial(60, x=9, compute_class=name)
        executor.submit([first])
        poll_until(executor, bool)
        executor.submit([first.evolve(attempt=2)])
        [lost] = poll_until(executor, bool)
        assert (lost.number, lost.attempt, lost.claimed) == (60, 2, False)
        executor.submit([first.evolve(attempt=3)])
        executor.submit([trial(number, compute_class=name) for number in (61, 62)])
        events = poll_until(executor, lambda events: len(ends(events)) == 3)
        assert {event.number for event in events if isinstance(event, Started)} == {61, 62}
        assert place.waiting() == 0
        executor.cancel([60], running=True)
        [result] = ends(poll_until(executor, ends))
        assert (result.number, result.attempt, type(result)) == (60, 1, Result)


def test_a_copy_that_nobody_has_claimed_yet_is_run_although_the_first_attempt_has_failed(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    """For Redis the first one has ended the trial; the scheduler knows better, and has it follow."""
    study, name = unique("study"), unique("later")
    fake_worker(on_redis.redis, name)
    with on_redis.executor(study) as executor:
        first = trial(61, x=-1.0)
        executor.submit([first])
        executor.submit([first.evolve(attempt=2, compute_class=name)])
        [failed] = poll_until(executor, ends)[-1:]
        assert (failed.attempt, type(failed)) in {(1, Result), (1, Lost)}
        executor.poll(0.0)
        claimed = Started(number=61, attempt=2, host="h", at=0.0)
        poll_until(executor, lambda _: on_redis.channel().claim(study, claimed))
        result = Result(number=61, attempt=2, outcome=outcome(1.0), at=0.0)
        assert on_redis.channel().finish(study, result)
        assert [type(event) for event in poll_until(executor, ends)] == [Started, Result]
    with connect(on_redis.redis) as client:
        Registry(client, Worker).withdraw(name)


# What travels


def send(place: Place, payload: Payload, **changes: Any) -> None:
    """Publish a trial's message of one's own making."""
    body, headers, properties = message(payload)
    with place.broker_channel() as channel:
        kombu.Producer(channel).publish(
            **{
                "body": body,
                "routing_key": place.compute_class,
                "exchange": "",
                "headers": headers,
                "serializer": "json",
            }
            | properties
            | changes
        )


def payload(study: str, module: str = "my_study") -> Payload:
    return Payload(study=study, module=module, attempts=[trial(0).evolve(seed=1)])


def claims(place: Place, study: str) -> bool:
    with connect(place.redis) as client:
        return bool(client.exists(f"shadho:{study}:attempts"))


def test_messages_are_json(on_redis: Place, unique: Callable[[str], str]) -> None:
    name = unique("read")
    with on_redis.executor(unique("study")) as executor:
        executor.submit([trial(0, compute_class=name)])
        with on_redis.broker_channel() as channel:
            found = queue(name)(channel).get()
        executor.cancel([0], running=False)
        poll_until(executor, bool)
    assert (found.content_type, found.content_encoding) == ("application/json", "utf-8")
    assert found.headers["task"] == TASK
    assert found.headers["shadho_protocol"] == PROTOCOL
    attempt = {"number": 0, "subspace": "all", "params": {"x": 1.0}, "compute_class": name, "attempt": 1}
    assert found.payload[0][0]["attempts"] == [attempt]


def test_messages_that_cannot_be_read_or_obeyed_are_refused_and_the_worker_goes_on(
    place: Place, unique: Callable[[str], str]
) -> None:
    """One that raised an error would end one worker after another, as it goes back to its queue each time."""

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (place.desk.folder / "exploded",)

    body = pickle.dumps(([Bomb()], {}, {}))
    send(place, payload("s"), body=body, content_type="application/x-python-serialize", content_encoding="binary")
    for headers in [
        {"task": []},
        {"task": {}},
        {"task": TASK},
        {"task": TASK, "id": []},
        {"task": TASK, "id": "i", "eta": 5},
    ]:
        send(place, payload("s"), headers=headers)
    study = unique("study")
    _, known, _ = message(payload(study))
    send(place, payload(study), headers={**known, "shadho_protocol": PROTOCOL + 1})
    said = (
        "refused unread: it is not JSON",
        "headers cannot be read",
        f"a message of protocol {PROTOCOL + 1} was refused",
    )
    until(lambda: all(each in place.log for each in said), 20, lambda: place.log)
    with place.executor(unique("study")) as executor:
        executor.submit([trial(0, compute_class=place.compute_class)])
        assert isinstance(poll_until(executor, ends)[-1], Result)
    assert not (place.desk.folder / "exploded").exists()
    assert not claims(place, study)
    assert place.desk.commands[0].code is None
    assert place.waiting() == 0


def test_a_module_that_the_worker_was_not_started_with_is_neither_run_nor_imported(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    """Its message goes back to the queue for a worker that has the module, unless nobody may run it any more."""
    study, over, name = unique("study"), unique("over"), unique("strange")
    with connect(on_redis.redis) as client:
        client.hset(f"shadho:{over}:attempts", "0", "1")
    for _ in range(20):
        send(on_redis, payload(over, "stranger"), routing_key=name)
    worker = on_redis.desk.worker(name, "-c", "1")
    until(lambda: on_redis.waiting(name) == 0, 30, lambda: worker.err)
    assert "this worker was not started with stranger" not in worker.err
    send(on_redis, payload(study, "stranger"), routing_key=name)
    until(lambda: worker.err.count("this worker was not started with stranger") >= 2, 30, lambda: worker.err)
    # Ending gives back what it still has.
    worker.end()
    assert on_redis.waiting(name) <= 1, "those that nobody may run are gone"
    assert "Traceback" not in worker.err, "it is in order that a message is handed back"
    assert not claims(on_redis, study)
    assert not (on_redis.desk.folder / "imported").exists()


def test_short_trials_travel_together_and_end_one_by_one(
    on_redis: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_redis.executor(unique("study")) as executor:
        for first in range(0, 64, 8):  # it learns how short they are
            executor.submit([trial(number, 0.0, 1, on_redis.compute_class) for number in range(first, first + 8)])
            poll_until(executor, lambda events: len(ends(events)) == 8)
        sent: list[object] = []
        real = broker.message
        monkeypatch.setattr(broker, "message", lambda *given: sent.append(given) or real(*given))
        executor.submit([trial(number, 0.0, 1, on_redis.compute_class) for number in range(100, 164)])
        events = poll_until(executor, lambda events: len(ends(events)) == 64)
    print(f"64 trials in {len(sent)} messages")
    assert Counter((type(event), event.number) for event in events) == Counter(
        (kind, number) for kind in (Started, Result) for number in range(100, 164)
    )
    assert 1 <= len(sent) <= 32, "a message carries several"


def test_a_bundle_goes_on_where_one_of_its_trials_is_taken_back_or_fails(
    on_redis: Place, unique: Callable[[str], str]
) -> None:
    study = unique("study")
    attempts = [trial(number, x) for number, x in enumerate([1.0, -1.0, 1.0, 1.0])]
    with on_redis.executor(study) as executor:
        assert on_redis.channel().claim(study, Started(number=2, attempt=1, host="h", at=0.0)), "by another worker"
        send(on_redis, Payload(study=study, module="my_study", attempts=attempts))
        events = poll_until(executor, lambda events: len(ends(events)) == 3)
    states = {event.number: event.outcome.state for event in ends(events) if isinstance(event, Result)}
    complete, failed = TrialState.COMPLETE, TrialState.FAILED
    assert states == {0: complete, 1: failed, 3: complete}


def test_trials_whose_ends_are_recorded_take_a_bit_each(
    on_redis: Place, unique: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The events of a poll are recorded when the next one begins."""
    monkeypatch.setattr(channel_module, "KEPT_ENDED", 0)
    monkeypatch.setattr(channel_module, "ARCHIVED", 1)
    name = unique("study")
    with on_redis.executor(name) as executor, connect(on_redis.redis) as client:
        executor.submit([trial(number) for number in range(4)])
        poll_until(executor, lambda events: len(ends(events)) == 4)
        poll_until(executor, lambda _: client.hlen(f"shadho:{name}:attempts") == 0)
        assert [client.getbit(f"shadho:{name}:done", number) for number in range(5)] == [1, 1, 1, 1, 0]


def test_a_start_that_fails_leaves_what_an_earlier_scheduler_has_running(redis_url: str) -> None:
    with connect(redis_url) as client:
        client.xadd("shadho:s:events", {"e": "x"})
        client.zadd("shadho:s:leases", {"1.1": 1})
        ToldExecutor(client, MagicMock(), "s", "m").close()
        assert client.exists("shadho:s:events", "shadho:s:leases", "shadho:s:holder") == 2
