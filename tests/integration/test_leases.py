"""Leases on real workers: what falls silent is lost and sent again, what nobody can claim yet just waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
import services
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet, on_each
from services.channels import Channel
from services.told import ToldExecutor

from shadho_celery.core.trial import Attempt, Lost, Outcome, Result, Started, TrialState
from shadho_celery.fleet.broker import Publisher, queue
from shadho_celery.fleet.redis import connect

pytestmark = pytest.mark.timeout(120)

#: Trials keep checkpoints, and do not end while there is a file of their study's and number's name; their loss tells
#: which attempt it was.
STUDY = """
import os, time
from pathlib import Path
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1)}

def note(*words):
    with open("runs.log", "a") as log:
        log.write("\\t".join(map(str, words)) + "\\n")

def objective(params, context):
    checkpoint = Path(context.checkpoint_dir) / "attempts"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    before = checkpoint.read_text() if checkpoint.exists() else ""
    checkpoint.write_text(before + str(context.attempt))
    note("began", context.trial, context.attempt, context.compute_class, os.getpid())
    while Path(f"hold-{__name__}-{context.trial}").exists():
        time.sleep(0.05)
    note("ended", context.trial, context.attempt, context.compute_class, os.getpid())
    return {"loss": context.attempt, "before": before}
"""

LEASE_SECONDS = 2


@pytest.fixture
def both(
    redis_server: str, amqp_url: str, no_orphans: None, tmp_path: Path, unique: Callable[[str], str]
) -> Iterator[list[Fleet]]:
    """A fleet on Redis alone, and one on RabbitMQ."""
    made: list[Fleet] = []
    with ExitStack() as stack, ExitStack() as first:
        for broker in ("redis", "rabbitmq"):
            redis_url = stack.enter_context(services.redis_db(redis_server))
            url = redis_url if broker == "redis" else amqp_url
            environment = {"SHADHO_LEASE_SECONDS": str(LEASE_SECONDS), "SHADHO_IMPORTS": "my_study,short"}
            fleet = fleets.fleet(tmp_path / broker, url, redis_url, unique("cpu"), **environment)
            made.append(stack.enter_context(fleet))
            made[-1].desk.write("my_study.py", STUDY)
            made[-1].desk.write("short.py", STUDY)
            # All that runs ends before the first of the fleets is cleared.
            first.callback(made[-1].desk.close)
        yield made


def hold(fleet: Fleet, number: int, study: str = "my_study") -> Path:
    """Keep a trial running for as long as the file is there."""
    path = fleet.desk.folder / f"hold-{study}-{number}"
    path.touch()
    return path


def await_attempt(fleet: Fleet, number: int, attempt: int, what: str = "began") -> None:
    def seen() -> bool:
        return (number, attempt) in [run[:2] for run in fleet.desk.runs(what)]

    until(seen, 30, lambda: f"{fleet.desk.runs()} {fleet.desk.said()}")


def test_a_killed_workers_trial_is_sent_again_with_its_checkpoint_and_fails_when_three_were_lost(
    both: list[Fleet],
) -> None:
    """The other trial is not touched: it ends under its first attempt."""
    on_each(kill_three_workers, *both)


def kill_three_workers(fleet: Fleet) -> None:
    hold(fleet, 0)
    command = fleet.launch("my_study", 2)
    for attempt in (1, 2, 3):
        worker = fleet.worker()
        await_attempt(fleet, 0, attempt)
        worker.send(signal.SIGKILL)
    fleet.worker()
    assert command.wait(30).code == 0, fleet.desk.said()
    assert sorted(run[:2] for run in fleet.desk.runs()) == [(0, 1), (0, 2), (0, 3), (1, 1)]
    lost, other = fleet.trials("my_study")
    assert (lost["state"], lost["lost"], lost["attempt"]) == ("FAILED", 3, 3)
    assert lost["error"] == "3 attempts were lost; the last one: its worker was silent until the lease ran out"
    assert (other["state"], other["lost"], other["attempt"]) == ("COMPLETE", 0, 1)
    [checkpoint] = fleet.desk.folder.glob(".shadho/checkpoints/*/0/attempts")
    assert checkpoint.read_text() == "123", "each attempt found what the one before had left"
    assert command.json()["trials"]["failed"] == 1


def test_the_late_result_of_a_worker_that_stood_still_is_refused_counted_and_logged(both: list[Fleet]) -> None:
    """Its trial is counted once, by the attempt that came after it."""
    on_each(stand_still, *both)


def stand_still(fleet: Fleet) -> None:
    held, other = hold(fleet, 0), hold(fleet, 1)
    late = fleet.worker()
    command = fleet.launch("my_study", 2)
    await_attempt(fleet, 0, 1)
    late.send(signal.SIGSTOP)
    try:
        fleet.worker(slots=2)
        await_attempt(fleet, 0, 2)
        await_attempt(fleet, 1, 1)
        held.unlink()
        # The slots' processes go on while their worker stands still.
        await_attempt(fleet, 0, 1, "ended")
        await_attempt(fleet, 0, 2, "ended")
    finally:
        late.send(signal.SIGCONT)
    until(lambda: "the result of trial 0, attempt 1 was refused" in late.err, 20, lambda: late.err)
    assert fleet.refused() == 1
    other.unlink()
    first, second = fleet.ended_well(command, "my_study", 2, 30)
    assert (first["attempt"], first["lost"], first["loss"]) == (2, 1, 2.0)
    assert (second["attempt"], second["lost"]) == (1, 0)
    assert [metrics["before"] for metrics in fleet.metrics("my_study")] == ["1", ""]


def test_what_waits_behind_a_long_trial_is_not_lost_and_what_the_broker_loses_meanwhile_is_sent_again_free(
    both: list[Fleet],
) -> None:
    """Four lease lengths behind another study's trial cost nothing; nor does what was purged from the queue then."""
    on_each(wait_for_four_leases, *both)


def wait_for_four_leases(fleet: Fleet) -> None:
    held = hold(fleet, 0)
    fleet.worker()
    blocker = fleet.launch("my_study", 1)
    await_attempt(fleet, 0, 1)
    # Until then its slot is thought to be free.
    until(fleet.busy, 20, fleet.desk.said)
    command = fleet.launch("short", 3, unclaimed_seconds=LEASE_SECONDS)
    until(lambda: waiting(fleet) > 0, 20, fleet.desk.said)
    time.sleep(4 * LEASE_SECONDS)
    states = {(trial["state"], trial["attempt"], trial["lost"]) for trial in fleet.trials("short")}
    assert states == {("QUEUED", 1, 0)}, "it has not been given up, and not been sent again"
    purge(fleet)
    held.unlink()
    fleet.ended_well(blocker, "my_study", 1, 20)
    first, *others = fleet.ended_well(command, "short", 3, 30)
    assert (first["attempt"], first["lost"]) == (2, 0)
    assert {(trial["attempt"], trial["lost"]) for trial in others} == {(1, 0)}
    assert len(fleet.desk.runs()) == 4, "each was run once"


def purge(fleet: Fleet) -> None:
    with kombu.Connection(fleet.broker) as connection:
        assert queue(fleet.compute_class)(connection.default_channel).purge() > 0


def waiting(fleet: Fleet) -> int:
    """Messages that lie in the queue."""
    with kombu.Connection(fleet.broker) as connection:
        return int(queue(fleet.compute_class)(connection.default_channel).queue_declare().message_count)


def cut_off(*_: object) -> Any:
    raise redis.ConnectionError("cut off")


@pytest.mark.parametrize("was_away", [True, False], ids=["Redis was away", "the scheduler was slow"])
def test_a_lease_that_ran_out_is_renewed_where_redis_was_away_and_only_there(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, was_away: bool
) -> None:
    """Redis was away for both: the trial is not lost before its worker has had the time to say that it lives."""
    monkeypatch.setenv("SHADHO_LEASE_SECONDS", str(LEASE_SECONDS))
    attempt = Attempt(number=0, attempt=1, subspace="all", params={}, compute_class="nobody")
    with connect(redis_url) as client:
        executor = ToldExecutor(client, Publisher(redis_url), "study", "my_study")
        executor.submit([attempt])
        worker = Channel(client)
        assert worker.claim("study", Started(number=0, attempt=1, host="h", at=0.0))
        assert [type(event) for event in executor.poll(1.0)] == [Started]
        time.sleep(2 * LEASE_SECONDS)
        if was_away:
            with monkeypatch.context() as patch:
                patch.setattr(executor.channel, "confirm", cut_off)
                assert list(executor.poll(0.1)) == []
        assert [type(event) for event in executor.poll(1.0)] == ([] if was_away else [Lost])
        outcome = Outcome(state=TrialState.COMPLETE, loss=1.0)
        is_taken = worker.finish("study", Result(number=0, attempt=1, outcome=outcome, at=0.0))
        assert is_taken == was_away
        assert [type(event) for event in executor.poll(1.0)] == ([Result] if was_away else [])
        executor.close()
