"""A store that is older than Redis: restored from a copy, or without its last second. Its study goes on, and ends."""

from __future__ import annotations

import signal
import sqlite3
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from acceptance.commands import Command
from integration import fleets
from integration.fleets import Fleet

from shadho_celery.transport.redis import connect

pytestmark = pytest.mark.timeout(120)

TRIALS = 6


@pytest.fixture
def fleet(redis_url: str, no_orphans: None, tmp_path: Path, unique: Callable[[str], str]) -> Iterator[Fleet]:
    """A fleet with a study of TRIALS that has ended, and no worker any more."""
    with fleets.fleet(tmp_path, redis_url, redis_url, unique("cpu")) as fleet:
        fleet.desk.study()
        worker = fleet.worker()
        fleet.ended_well(fleet.launch("my_study", TRIALS), "my_study", TRIALS, 60)
        worker.send(signal.SIGTERM)
        worker.wait(30)
        yield fleet


def make_older(fleet: Fleet) -> None:
    """Take the store back to when one trial waited, one was queued, one ran, and the last two were not asked yet."""
    with sqlite3.connect(fleet.desk.folder / "shadho.db") as store:
        for number, (state, attempt) in enumerate([("WAITING", 0), ("QUEUED", 1), ("RUNNING", 1)]):
            store.execute(
                "UPDATE trials SET state = ?, attempt = ?, loss = NULL, finished_at = NULL WHERE number = ?",
                (state, attempt, number),
            )
        store.execute(f"DELETE FROM trials WHERE number >= {TRIALS - 2}")
    with connect(fleet.redis) as client:
        # The queued one was lost and tried again since.
        [attempts] = client.scan_iter("shadho:*:attempts")
        client.hset(attempts, "1", "done:3:12345678")


def resume(fleet: Fleet, *words: str) -> Command:
    return fleet.desk.start(sys.executable, "launch.py", "30", "my_study", "--resume", "my_study", "--json", *words)


def test_what_redis_has_as_ended_and_the_store_does_not_know_is_tried_again(fleet: Fleet) -> None:
    make_older(fleet)
    before = Counter(number for number, *_ in fleet.desk.runs())
    fleet.worker()
    found = fleet.ended_well(resume(fleet), "my_study", TRIALS, 60)
    again = Counter(number for number, *_ in fleet.desk.runs()) - before
    assert again == {0: 1, 1: 1, 2: 1, TRIALS - 2: 1, TRIALS - 1: 1}
    assert {trial["lost"] for trial in found} == {0}, "no trial is to blame"
    assert [trial["attempt"] for trial in found] == [2, 2, 2, 1, 2, 2]


@pytest.mark.parametrize("how", ["--seconds", "Ctrl-C", "SIGTERM"])
def test_a_study_ends_when_it_is_told_to_whatever_redis_says(fleet: Fleet, how: str) -> None:
    """No worker runs its attempts, nor can any claim them."""
    make_older(fleet)
    command = resume(fleet, *(["--seconds", "1"] if how == "--seconds" else []))
    command.says("study my_study")
    if how == "SIGTERM":
        command.send(signal.SIGTERM)
    elif how != "--seconds":
        command.interrupt()
    command.wait(30)
    assert command.code == (143 if how == "SIGTERM" else 0), command.err
    waiting = {"WAITING", "QUEUED", "RUNNING"} if how == "SIGTERM" else {"WAITING"}
    assert {trial["state"] for trial in fleet.trials("my_study")[:3]} == waiting
