"""A late trial is started once more on another machine, and counts once: whichever of the two ends first, or dies."""

from __future__ import annotations

import signal
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import services
from acceptance.commands import Command, until

# The tests that every executor with two machines passes.
from contract.test_copies import *  # noqa: F403
from contract.test_copies import Pair
from integration import fleets
from integration.fleets import Fleet, on_each
from msgspec.structs import replace
from services.told import ToldExecutor

from shadho_celery.fleet.broker import Publisher
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

#: the trial that gets stuck; and how many there are, so many that it is known by then how long they take
STUCK, TRIALS = 12, 16

#: Two workers on one machine that take it for two.
HOSTS = ("127.0.0.3", "127.0.0.4")

#: What the trials do before their sleep.
BODY = """
    open(f"host-{context.trial}-{context.attempt}", "w").write(os.environ["SHADHO_HOST"])
    open(f"copy-{context.trial}-{context.attempt}", "w").write(str(context.is_copy))
    if context.trial == 12 and WHICH: time.sleep(300)
    while context.trial == 12 and os.path.exists("hold") and not context.should_stop(): time.sleep(0.05)
"""


@pytest.fixture
def both(
    redis_server: str, amqp_url: str, no_orphans: None, tmp_path: Path, unique: Callable[[str], str]
) -> Iterator[list[Fleet]]:
    with fleets.on_both(tmp_path, redis_server, amqp_url, unique("cpu"), SHADHO_LEASE_SECONDS="2") as made:
        yield made


#: The contract's objective.
CONTRACT = """
import os, time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", -10, 10)}

def objective(params, context):
    x = params["x"]
    if (x, context.attempt) == (6.5, 2):
        open("failed", "w").close()
        raise ArithmeticError("the second one fails")
    end = time.monotonic() + (60 if x == 9 or (x, context.attempt) == (7.5, 1) else 0.05)
    while time.monotonic() < end and not context.should_stop():
        time.sleep(0.01)
    if x == 6.5:
        while not os.path.exists("failed"):
            time.sleep(0.05)
        time.sleep(1.0)
    return x
"""


@pytest.fixture(scope="module")
def pair(redis_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A fleet with two workers, one of which serves another class on another machine."""
    with (
        services.redis_db(redis_server) as url,
        fleets.fleet(tmp_path_factory.mktemp("pair"), url, url, "cpu", SHADHO_LEASE_SECONDS="2") as fleet,
    ):
        fleet.desk.write("my_study.py", CONTRACT)
        workers = [
            fleet.worker(2, SHADHO_HOST=HOSTS[0]),
            fleet.desk.worker("far", "-c", "1", "-l", "INFO", SHADHO_HOST=HOSTS[1]),
        ]
        until(lambda: all(" ready." in worker.err for worker in workers), 60, fleet.desk.said)
        yield fleet


@pytest.fixture
def rig(pair: Fleet) -> Iterator[Pair]:
    with connect(pair.redis) as client:
        executor = ToldExecutor(client, Publisher(pair.broker), uuid.uuid4().hex[:16], "my_study")
        yield Pair(executor=executor, compute_class=pair.compute_class, elsewhere="far", catches_running=True)
        executor.close()


def begin(fleet: Fleet, when: str) -> dict[str, Command]:
    """A worker of one slot on each machine, so that no copy comes to its trial's own.

    The trial STUCK sleeps for ever where the expression `when` is true.
    """
    fleet.desk.study(seconds=0.3, body=BODY.replace("WHICH", when).strip())
    workers = {host: fleet.worker(1, SHADHO_HOST=host) for host in HOSTS}
    until(lambda: all(" ready." in worker.err for worker in workers.values()), 60, fleet.desk.said)
    return workers


def hosts(fleet: Fleet, number: int = STUCK) -> dict[int, str]:
    """By attempt of a trial, where it runs or has run."""
    paths = {int(path.name.split("-")[2]): path for path in fleet.desk.folder.glob(f"host-{number}-*")}
    return {attempt: path.read_text() for attempt, path in paths.items() if path.read_text() in HOSTS}


def host_of(fleet: Fleet, attempt: int, number: int = STUCK) -> str:
    """Wait until an attempt of a trial runs; return its host."""
    until(lambda: attempt in hosts(fleet, number), 60, fleet.desk.said)
    return hosts(fleet, number)[attempt]


def copys_host(fleet: Fleet) -> str:
    """Wait until a copy of the trial STUCK runs; return its host."""
    until(lambda: max(hosts(fleet), default=0) > 1, 60, fleet.desk.said)
    return hosts(fleet)[max(hosts(fleet))]


def copies(fleet: Fleet) -> dict[tuple[int, int], bool]:
    """By trial and attempt, whether those that have begun took themselves for copies."""
    found = {}
    for path in fleet.desk.folder.glob("copy-*"):
        _, number, attempt = path.name.split("-")
        found[int(number), int(attempt)] = path.read_text() == "True"
    return found


def stuck(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return trials[STUCK]


def test_a_trial_that_is_stuck_is_rescued_by_a_copy_on_another_machine_and_counts_once(both: list[Fleet]) -> None:
    def scenario(fleet: Fleet) -> None:
        begin(fleet, when="context.attempt == 1")
        trials = fleet.ended_well(fleet.launch("my_study", TRIALS), "my_study", TRIALS, 120)
        trial = stuck(trials)
        assert trial["attempt"] >= 2
        assert trial["lost"] == 0
        assert trial["host"] == copys_host(fleet) != host_of(fleet, 1)
        assert copies(fleet) == {(number, attempt): attempt > 1 for number, attempt in copies(fleet)}
        assert {each["attempt"] for each in trials if each["number"] != STUCK} == {1}

    on_each(scenario, *both)


def test_where_the_copys_machine_dies_the_first_attempt_goes_on_and_its_result_counts(both: list[Fleet]) -> None:
    def scenario(fleet: Fleet) -> None:
        (fleet.desk.folder / "hold").touch()
        workers = begin(fleet, when="context.is_copy")
        launch = fleet.launch("my_study", TRIALS)
        workers[copys_host(fleet)].end()
        until(lambda: stuck(fleet.trials("my_study"))["lost"] == 1, 60, fleet.desk.said)
        (fleet.desk.folder / "hold").unlink()
        trial = stuck(fleet.ended_well(launch, "my_study", TRIALS, 120))
        assert trial["host"] == host_of(fleet, 1) != copys_host(fleet)

    on_each(scenario, both[1])


def test_where_only_its_own_machine_is_left_to_take_a_copy_the_study_goes_on_and_ends(both: list[Fleet]) -> None:
    """The last trial of a rung runs long; another machine, which could have taken a copy of it, has just died."""
    late = 8

    def scenario(fleet: Fleet) -> None:
        body = """
    open(f"host-{context.trial}-{context.attempt}", "w").write(os.environ["SHADHO_HOST"])
    if context.trial == 8: time.sleep(8)
"""
        fleet.desk.study(
            seconds=0.1, body=body.strip(), settings={"fidelity": {"least": 1, "most": 9, "eta": 3, "how": "halving"}}
        )
        worker = fleet.worker(1, SHADHO_HOST=HOSTS[0])
        until(lambda: " ready." in worker.err, 60, fleet.desk.said)
        launch = fleet.launch("my_study", 13)
        host_of(fleet, 1, late)
        with connect(fleet.redis) as client:
            registry = Registry(client, Worker)
            [living] = registry.living().values()
            registry.announce("dead", replace(living, busy=0, machine=replace(living.machine, host=HOSTS[1])))
        trials = fleet.ended_well(launch, "my_study", 13, 60)
        assert trials[late]["host"] == HOSTS[0]
        assert trials[late]["attempt"] > 1, "no copy was made"
        assert len(hosts(fleet, late)) == 1, "its machine had it twice"

    on_each(scenario, both[1])


def test_a_scheduler_that_resumes_knows_both_attempts_and_leaves_the_trial_to_the_one_that_lives(
    both: list[Fleet],
) -> None:
    def scenario(fleet: Fleet) -> None:
        (fleet.desk.folder / "hold").touch()
        workers = begin(fleet, when="False")
        launch = fleet.launch("my_study", TRIALS)
        near, far, copy = host_of(fleet, 1), copys_host(fleet), max(hosts(fleet))
        launch.send(signal.SIGKILL)
        launch.wait()
        words = ("my_study", "--trials", str(TRIALS), "--json", "--resume", "my_study")
        again = fleet.desk.start("python", "-m", "shadho_celery.launch", *words)
        again.says("study my_study", 60)
        fleet.desk.await_runs(TRIALS - 1, "ended", 60)
        time.sleep(3)  # long enough for it to be copied once more, were it taken to be alone
        assert stuck(fleet.trials("my_study"))["attempt"] == copy
        workers[near].end()
        until(lambda: stuck(fleet.trials("my_study"))["lost"] == 1, 60, fleet.desk.said)
        (fleet.desk.folder / "hold").unlink()
        trial = stuck(fleet.ended_well(again, "my_study", TRIALS, 120))
        assert (trial["host"], trial["live"]) == (far, None)

    on_each(scenario, both[0])
