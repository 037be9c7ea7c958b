"""Leases on real workers: what falls silent is lost and sent again, what nobody can claim yet just waits."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kombu
import pytest
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet, on_each

from shadho_celery.fleet.broker import queue

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
    environment = {"SHADHO_LEASE_SECONDS": str(LEASE_SECONDS), "SHADHO_IMPORTS": "my_study,short"}
    with fleets.on_both(tmp_path, redis_server, amqp_url, unique("cpu"), **environment) as made:
        for fleet in made:
            fleet.desk.write("my_study.py", STUDY)
            fleet.desk.write("short.py", STUDY)
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
    """Two lease lengths behind another study's trial cost nothing; nor does what was purged from the queue then."""
    on_each(wait_for_two_leases, *both)


def wait_for_two_leases(fleet: Fleet) -> None:
    held = hold(fleet, 0)
    fleet.worker()
    blocker = fleet.launch("my_study", 1)
    await_attempt(fleet, 0, 1)
    # Until then its slot is thought to be free.
    until(fleet.busy, 20, fleet.desk.said)
    command = fleet.launch("short", 3, unclaimed_seconds=LEASE_SECONDS)
    until(lambda: waiting(fleet) > 0, 20, fleet.desk.said)
    time.sleep(2 * LEASE_SECONDS)
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
