"""Copies of a store. One older than Redis is resumed and ends; of two at once, the second scheduler is refused."""

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

from shadho_celery.fleet.redis import connect

pytestmark = pytest.mark.timeout(120)

TRIALS = 6

LAUNCH = (sys.executable, "launch.py", "30", "my_study")


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
        for table in ("trials", "attempts"):
            store.execute(f"DELETE FROM {table} WHERE number >= {TRIALS - 2}")
    with connect(fleet.redis) as client:
        # The queued one was lost and tried again since.
        [done] = client.scan_iter("shadho:*:done")
        client.hset(done.replace(":done", ":attempts"), "1", "done:3:12345678")


def resume(fleet: Fleet, *words: str) -> Command:
    return fleet.desk.start(*LAUNCH, "--resume", "my_study", "--json", *words)


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
    # SIGTERM does not wait for what Redis says of them.
    possible = {"WAITING", "QUEUED", "RUNNING"} if how == "SIGTERM" else {"WAITING"}
    assert {trial["state"] for trial in fleet.trials("my_study")[:3]} <= possible


def test_of_two_schedulers_with_copies_of_one_store_the_second_is_refused(fleet: Fleet) -> None:
    fleet.desk.study(body="while os.path.exists('hold'): time.sleep(0.05)")
    (fleet.desk.folder / "hold").touch()
    fleet.worker()
    first = fleet.desk.start(*LAUNCH, "--resume", "my_study", "--trials", "20", "--json")
    fleet.desk.await_runs(TRIALS + 1)
    with sqlite3.connect(fleet.desk.folder / "shadho.db") as store, sqlite3.connect(fleet.desk.folder / "b.db") as copy:
        store.backup(copy)
        copy.execute("UPDATE studies SET holder = NULL")
    second = fleet.desk.start(*LAUNCH, "--resume", "my_study", "--store", "sqlite:///b.db").wait(30)
    assert second.code == 2, second.err
    assert len(second.messages) <= 2, "one line, after that of the fleet"
    assert f"(process {first.pid})" in second.err.splitlines()[-1]
    (fleet.desk.folder / "hold").unlink()
    fleet.ended_well(first, "my_study", 20, 60)
    third = fleet.desk.start(*LAUNCH, "--resume", "my_study", "--store", "sqlite:///b.db", "--json").wait(60)
    assert third.json()["trials"]["complete"] == 20, "the first has ended"
