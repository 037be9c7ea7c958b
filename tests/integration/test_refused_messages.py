"""Messages of ended and removed studies, which lie in queues, are refused by the workers that get them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from integration.fleets import fleet
from integration.test_redis_queues import JUNK, payload

from shadho_celery.errors import ServiceError
from shadho_celery.fleet.broker import Publisher
from shadho_celery.fleet.channel import SchedulerChannel
from shadho_celery.fleet.executor import remove


def test_a_removed_study_needs_no_broker_and_one_that_runs_elsewhere_stays(
    client: Any, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHADHO_REDIS_URL", redis_url)
    monkeypatch.setenv("CELERY_BROKER_URL", "amqp://127.0.0.1:1")
    remove("k1", 3)
    assert client.exists("shadho:k1:done")
    client.set("shadho:k2:holder", "elsewhere/1:1:")
    with pytest.raises(ServiceError, match="from another copy of the store"):
        remove("k2", 3)
    assert not client.exists("shadho:k2:done")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_many_messages_of_an_ended_study_are_refused_one_by_one_before_the_next_study_runs(
    client: Any, redis_url: str, tmp_path: Path
) -> None:
    """And items that are no messages, too."""
    old = SchedulerChannel(client, "old")
    old.cancel([(number, 1) for number in range(500)], running=False)
    old.erase()
    publisher = Publisher(redis_url)
    publisher.publish([("cpu", payload(number, "old")) for number in range(500)])
    publisher.close()
    client.rpush("cpu", *JUNK)
    with fleet(tmp_path, redis_url, redis_url, "cpu") as ours:
        ours.desk.write("my_study.py", "from hyperopt import hp\nSPACE = hp.uniform('x', 0, 1)\nobjective = float\n")
        [worker] = ours.workers(1, slots=2)
        ours.ended_well(ours.launch("my_study", 8), "my_study", 8, 90)
        assert worker.err.count("not a message") == len(JUNK)
        assert client.llen("cpu") == 0
        assert worker.err.count("refused at its claim") == 500
