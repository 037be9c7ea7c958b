"""A worker's slots with a real Redis, without a broker: messages are given to them by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt, Lost, Report, Result, TrialState
from shadho_celery.node.slots import Slots
from shadho_celery.transport import channel
from shadho_celery.transport.channel import SchedulerChannel
from shadho_celery.transport.redis import connect

STUDY = """
from hyperopt import hp

def objective(params, context):
    for step in range(20):
        context.report(step, 0.5)
    return 0.25

SPACE = hp.uniform("x", 0, 1)
"""


@pytest.fixture
def slots(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    (tmp_path / "my_study.py").write_text(STUDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with connect(redis_url) as client:
        slots = Slots(
            client,
            machine=Machine(host="h"),
            compute_class="cpu",
            count=1,
            imports=["my_study"],
            checkpoints=tmp_path,
            address="127.0.0.1",
        )
        slots.start()
        yield slots
        slots.close()


def test_a_trial_says_how_many_of_its_reports_redis_refused(
    slots: Slots, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler is away; its stream takes no more than 8 events but results."""
    monkeypatch.setattr(channel, "MAX_WAITING", 8)
    attempt = Attempt(number=0, attempt=1, params={"x": 0.5}, subspace="", seed=0, state=TrialState.QUEUED)
    slots.run(Payload(study="k1", module="my_study", attempts=[attempt]))
    with connect(redis_url) as client:
        events = SchedulerChannel(client, "k1").drain(0)
    assert sum(isinstance(event, Report) for event in events) == 7
    result = events[-1]
    assert isinstance(result, Result)
    assert result.outcome.loss == 0.25, result.outcome.error
    assert "13 reports were lost" in str(result.outcome.warning)


def test_a_trial_that_a_worker_has_failed_is_declined_there_once_another_may_have_become_free(
    slots: Slots, redis_url: str
) -> None:
    attempt = Attempt(number=0, attempt=2, params={"x": 0.5}, subspace="", failed_on=("other", slots.name))
    slots.run(Payload(study="k1", module="my_study", attempts=[attempt]))
    with connect(redis_url) as client:
        [event] = SchedulerChannel(client, "k1").drain(10_000)
    reason = f"it has failed on {slots.name}, and is for another worker"
    assert event == Lost(number=0, attempt=2, reason=reason, claimed=False)
