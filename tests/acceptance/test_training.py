"""Synchronous SGD as part of a search: real brokers, real workers, two of which are killed in the middle of it."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from acceptance.commands import until
from integration import fleets
from integration.fleets import Fleet

pytestmark = pytest.mark.timeout(240)

#: how far the recomputed parameters may be from the trained ones: their sums are taken in another order
TOLERANCE = 1e-4


@pytest.fixture
def fleet(
    no_orphans: None, amqp_url: str, redis_url: str, tmp_path: Path, unique: Callable[[str], str]
) -> Iterator[Fleet]:
    """A RabbitMQ and a Redis; who falls silent is given up after five seconds."""
    environment = {"SHADHO_IMPORTS": "tasks.sync_sgd", "SHADHO_LEASE_SECONDS": "5"}
    with fleets.fleet(tmp_path / "fleet", amqp_url, redis_url, unique("cpu"), **environment) as made:
        yield made


def steps(fleet: Fleet) -> int:
    """The furthest step that any trial has reported."""
    path = fleet.desk.folder / "shadho.db"
    if not path.exists():
        return 0
    with (
        contextlib.suppress(sqlite3.OperationalError),  # its tables are not there yet
        contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection,
    ):
        return int(connection.execute("select coalesce(max(step), 0) from reports").fetchone()[0])
    return 0


def test_two_of_five_workers_die_in_the_middle_of_training(fleet: Fleet) -> None:
    """The study finishes, and one process recomputes what each gang has trained."""
    workers = fleet.workers(5)
    command = fleet.launch("tasks.sync_sgd", 2, name="digits")
    until(lambda: steps(fleet) > 0, 90, fleet.desk.said)
    for worker in workers[:2]:
        worker.process.send_signal(signal.SIGKILL)
    found = fleet.ended_well(command, "digits", 2, 120)
    assert max(trial["slots"] for trial in found) > 1, "a gang of more than one"
    for trial in found:
        assert json.loads(trial["metrics"])["replay_difference"] < TOLERANCE
