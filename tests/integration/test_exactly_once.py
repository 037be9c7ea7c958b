"""Whatever the broker delivers twice, or takes back too early, runs once."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import amqp
import kombu
import pytest
import services
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet, on_each

from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Event, GangEvent, Result, Started
from shadho_celery.fleet.broker import Publisher, queue
from shadho_celery.fleet.channel import SchedulerChannel
from shadho_celery.fleet.redis import connect

pytestmark = pytest.mark.timeout(120)

#: Kombu looks for messages to deliver again every second; by default it does so every hundred.
IMPATIENT_REDIS = """
broker_transport_options = {
    "visibility_timeout": 3,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "socket_timeout": 30,
    "socket_keepalive": True,
}
"""

LONGER_SECONDS = 9

#: what a worker says of a message that does not run
REFUSED = "refused at its claim"


def limits(consumer_timeout: int, channel_tick_interval: int) -> str:
    """Erlang that sets how long a message may stay unacknowledged, and how often that is looked at, in ms."""
    set_env = "application:set_env(rabbit"
    return (
        f"{set_env}, consumer_timeout, {consumer_timeout}), {set_env}, channel_tick_interval, {channel_tick_interval})."
    )


@pytest.fixture
def impatient_rabbitmq(private_rabbitmq: services.RabbitServer) -> Iterator[str]:
    """URL of a broker that closes a consumer's channel when a message was not acknowledged for 3 s."""
    private_rabbitmq.ctl("eval", limits(3000, 1000))
    yield private_rabbitmq.url
    private_rabbitmq.ctl("eval", limits(1_209_600_000, 60_000))


def consumer_is_thrown_out(url: str, seconds: float) -> bool:
    """Return True when a consumer that does not acknowledge its message loses its channel."""
    with kombu.Connection(url) as connection:
        channel = connection.default_channel
        control = kombu.Queue("control", durable=True)(channel)
        control.declare()
        kombu.Producer(channel).publish({}, routing_key="control")
        control.consume(callback=lambda message: None)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                connection.drain_events(timeout=1)
            except TimeoutError:
                continue
            except amqp.PreconditionFailed as error:
                return "delivery acknowledgement" in str(error)
    return False


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_trials_longer_than_the_brokers_limits_run_once_and_all_slots_stay_in_use(
    no_orphans: None,
    redis_server: str,
    impatient_rabbitmq: str,
    tmp_path: Path,
    unique: Callable[[str], str],
) -> None:
    """Visibility timeout and consumer timeout of 3 s, trials of 9 s."""
    environment = {"SHADHO_IMPORTS": "my_study,after"}
    with fleets.on_both(tmp_path, redis_server, impatient_rabbitmq, unique("cpu"), **environment) as both:
        for fleet in both:
            fleet.desk.study(seconds=LONGER_SECONDS)
            fleet.desk.study("after", body="while open('runs.log').read().count('began') < 3 + 4: time.sleep(0.05)")
        both[0].desk.write("celeryconfig.py", IMPATIENT_REDIS)
        workers = [fleet.workers(2, slots=2) for fleet in both]
        # A slot is left free: what is delivered again finds somebody to take it.
        commands = [fleet.launch("my_study", 3, name="long") for fleet in both]
        assert consumer_is_thrown_out(impatient_rabbitmq, 30), "the control: the limit is there"
        for fleet, command, mine in zip(both, commands, workers, strict=True):
            found = fleet.ended_well(command, "long", 3, 60)
            assert Counter(number for number, *_ in fleet.desk.runs()) == Counter(range(3)), fleet.desk.said()
            assert {(trial["attempt"], trial["lost"]) for trial in found} == {(1, 0)}
            assert sum(worker.err.count(REFUSED) for worker in mine) > 0, "there were duplicates"
        # None of these trials ends before all four have begun: it takes both slots of both workers at once.
        again = [fleet.launch("after", 4) for fleet in both]
        for fleet, command in zip(both, again, strict=True):
            fleet.ended_well(command, "after", 4, 60)
            assert len({pid for *_, pid in fleet.desk.runs()[3:]}) == 4, "both slots of both workers"


def message(study: str) -> Payload:
    attempt = Attempt(number=0, attempt=1, subspace="all", params={"side": 0, "x": 0.5})
    return Payload(study=study, module="my_study", attempts=[attempt])


def test_a_duplicate_ends_at_once_without_running_the_objective(
    no_orphans: None, redis_server: str, amqp_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> None:
    """While the first runs, and after it has ended; all of them are acknowledged."""
    study = unique("study")
    with fleets.on_both(tmp_path, redis_server, amqp_url, unique("cpu")) as both:
        on_each(lambda fleet: send_it_four_times(fleet, study), *both)


def send_it_four_times(fleet: Fleet, study: str) -> None:
    fleet.desk.study(body="while not os.path.exists('go'): time.sleep(0.05)")
    [worker] = fleet.workers(1, slots=2)
    sent = [(fleet.compute_class, message(study))]
    publisher = Publisher(fleet.broker)
    publisher.publish(sent)
    fleet.desk.await_runs(1)
    publisher.publish(sent * 2)
    until(lambda: worker.err.count(REFUSED) == 2, 20, fleet.desk.said)
    assert not fleet.desk.runs("ended"), "the first still runs"
    (fleet.desk.folder / "go").touch()
    with connect(fleet.redis) as client:
        channel, events = SchedulerChannel(client, study), list[Event | GangEvent]()

        def both() -> bool:
            events.extend(channel.drain(100))
            return len(events) == 2

        until(both, 20)
        publisher.publish(sent)
        until(lambda: worker.err.count(REFUSED) == 3, 20, fleet.desk.said)
        assert [type(event) for event in events] == [Started, Result]
        assert channel.drain(0) == []
    publisher.close()
    assert len(fleet.desk.runs()) == 1
    worker.send(signal.SIGTERM)
    assert worker.wait(20).code == 0, fleet.desk.said()
    with kombu.Connection(fleet.broker) as connection:
        left = queue(fleet.compute_class)(connection.default_channel).queue_declare().message_count
    assert left == 0, "what was not acknowledged would be back in the queue"
