"""RabbitMQ with an alarm takes no messages: a run says so at once, also while it has nothing to send, and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import services
from acceptance.commands import Desk, desk, until

from shadho_celery.core.payload import Payload
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import Publisher

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

SAID = r"trials cannot be sent: the broker at amqp://\S+ takes no messages"

#: a study whose trials run until there is a file
STUDY = """
import time
from pathlib import Path

from hyperopt import hp

SPACE = {"rate": hp.uniform("rate", 0, 1)}

def objective(values):
    Path("began").touch()
    while not Path("go").exists():
        time.sleep(0.1)
    return values["rate"]
"""


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[services.RabbitServer]:
    server = services.start_any("a private RabbitMQ is needed", services.RabbitServer)
    assert isinstance(server, services.RabbitServer)
    yield server
    server.stop()


@contextmanager
def alarm(rabbitmq: services.RabbitServer) -> Iterator[None]:
    rabbitmq.ctl("set_vm_memory_high_watermark", "0.0000001")
    try:
        yield
    finally:
        rabbitmq.ctl("set_vm_memory_high_watermark", "0.6")


@pytest.fixture
def table(tmp_path: Path, rabbitmq: services.RabbitServer, redis_url: str) -> Iterator[Desk]:
    with desk(tmp_path) as made:
        made.write("my_study.py", STUDY)
        made.environment |= {"SHADHO_REDIS_URL": redis_url, "CELERY_BROKER_URL": rabbitmq.url}
        made.environment |= {"SHADHO_IMPORTS": "my_study"}
        yield made


def test_a_run_warns_of_an_alarm_while_it_sends_nothing_and_of_one_that_was_there_before_it(
    table: Desk, rabbitmq: services.RabbitServer
) -> None:
    worker = table.worker("cpu", "-c", "1", "-l", "INFO")
    worker.says(" ready.")
    launched = table.launch("my_study", "--trials", "1")
    until((table.folder / "began").exists, 60, table.said)
    with alarm(rabbitmq):
        launched.says("trials cannot be sent", 10)
    launched.says("the broker answers again")
    table.write("go", "")
    assert launched.wait(60).code == 0, table.said()
    with alarm(rabbitmq):
        launched = table.launch("my_study", "--trials", "3")
        launched.says("trials cannot be sent", 20)
    assert launched.wait(60).code == 0, table.said()


def test_a_publisher_knows_of_an_alarm_and_of_its_end_whenever_it_looks(
    rabbitmq: services.RabbitServer, unique: Callable[[str], str]
) -> None:
    message = unique("cpu"), Payload(study="k", module="m", attempts=[])
    with alarm(rabbitmq):
        publisher = Publisher(rabbitmq.url)
        until(lambda: publisher.look() or publisher.refusal, 10)
        for _ in range(2):
            with pytest.raises(ServiceError, match=SAID):
                publisher.publish([message])
    until(lambda: publisher.look() or not publisher.refusal, 10)
    publisher.publish([message])
    with alarm(rabbitmq):
        until(lambda: publisher.look() or publisher.refusal, 10)
        rabbitmq.ctl("close_all_connections", "a test")
        until(lambda: publisher.look() or not publisher.refusal, 10)
    publisher.publish([message])
    # The next looks find the lost connection, and the alarm on a new one, even while nothing is sent.
    rabbitmq.ctl("close_all_connections", "a test")
    with alarm(rabbitmq):
        until(lambda: publisher.look() or publisher.refusal, 20)
    until(lambda: publisher.look() or not publisher.refusal, 10)
    publisher.close()
