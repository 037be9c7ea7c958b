"""A fleet as people run it: workers started by hand, a broker, a Redis, and schedulers that come and go."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import services
from acceptance.commands import ROOT, Answer, Command, Desk, until
from acceptance.commands import desk as make_desk
from services.clocks import ProcessClock

from shadho_celery.core import hardware

pytestmark = pytest.mark.timeout(180)


@dataclass(frozen=True)
class Fleet:
    """Where broker and Redis of a test are, and classes that are this test's alone."""

    broker: str
    redis: str
    large: str
    small: str
    cpu: str

    @property
    def environment(self) -> dict[str, str]:
        return {"CELERY_BROKER_URL": self.broker, "SHADHO_REDIS_URL": self.redis}

    @property
    def classes(self) -> list[str]:
        return [self.large, self.small, self.cpu]

    def workers(self) -> list[dict[str, object]]:
        """Return the announcements of the live workers."""
        with redis.Redis.from_url(self.redis, decode_responses=True) as client:
            keys = [key for key in client.scan_iter("shadho:worker:*") if not key.endswith(":left")]
            return [json.loads(client.get(key) or "null") for key in keys]

    def await_workers(self, count: int) -> None:
        until(lambda: len(self.workers()) == count, 30, lambda: f"{self.workers()}")


@pytest.fixture(scope="module")
def vhost(amqp_server: tuple[str, Callable[..., str]]) -> Iterator[str]:
    with services.amqp_vhost(*amqp_server) as url:
        yield url


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk that is cleared before the Redis of its workers is: they would announce themselves once more."""
    with make_desk(tmp_path) as made:
        yield made


@pytest.fixture
def make_fleet(desk: Desk, redis_url: str, unique: Callable[[str], str]) -> Callable[[str], Fleet]:
    def make(broker: str) -> Fleet:
        fleet = Fleet(broker, redis_url, *(unique(name) for name in ("gpu_large", "gpu_small", "cpu")))
        desk.environment |= fleet.environment
        return fleet

    return make


@pytest.fixture
def on_redis(make_fleet: Callable[[str], Fleet], redis_url: str) -> Fleet:
    """A fleet on Redis alone: broker and channel in one database."""
    return make_fleet(redis_url)


@pytest.fixture
def on_rabbitmq(make_fleet: Callable[[str], Fleet], vhost: str) -> Fleet:
    return make_fleet(vhost)


@pytest.mark.parametrize("broker", ["rabbitmq", pytest.param("redis", marks=pytest.mark.sample)])
def test_a_study_finishes_on_three_workers_started_by_hand(
    desk: Desk, broker: str, request: pytest.FixtureRequest
) -> None:
    """On RabbitMQ + Redis, and on Redis alone: every class works, each trial is run once, no argv has a password."""
    fleet: Fleet = request.getfixturevalue(f"on_{broker}")
    desk.study(seconds=0.1, settings={"classes": fleet.classes})
    workers = [desk.worker(name, "-c", "1", SHADHO_IMPORTS="my_study") for name in fleet.classes]
    fleet.await_workers(3)
    command = desk.launch("my_study", "--trials", "18", "--seed", "0", "--json").wait()
    assert command.code == 0, desk.said()
    report = command.json()
    assert report["trials"] == {"total": 18, "complete": 18, "failed": 0, "pruned": 0, "cancelled": 0}
    assert set(report["classes"]) == set(fleet.classes)
    assert all(counts["complete"] and counts["slots"] == 1 for counts in report["classes"].values())
    assert sorted((number, name) for number, _, name, _ in desk.runs("ended")) == [
        (trial["number"], trial["compute_class"]) for trial in desk.trials()
    ]
    assert "Warning" not in command.err
    assert all("guest:guest" not in line for line in desk.processes().values())
    for worker in workers:
        assert worker.code is None, "the workers wait for the next study"
        worker.send(signal.SIGTERM)
    for worker in workers:
        assert worker.wait(20).code == 0, desk.said()
    assert not fleet.workers(), "a worker that ends signs off"
    desk.nothing_left()


def test_every_way_to_start_a_worker(desk: Desk, on_redis: Fleet) -> None:
    """Without -A beside a copy of celeryconfig.py; with -I; and as a module, with its own options.

    Celery's own variable for another project's settings changes nothing.
    """
    desk.study(seconds=0.1)
    shutil.copy(ROOT / "celeryconfig.py", desk.folder)
    fleet = on_redis
    desk.start("celery", "worker", "-Q", fleet.large, "-c", "1", SHADHO_IMPORTS="my_study")
    desk.write("theirs.py", "broker_read_url = 'amqp://127.0.0.1:1'\ntask_always_eager = True\n")
    desk.worker(fleet.small, "-c", "1", "-I", "my_study", CELERY_CONFIG_MODULE="theirs")
    words = ("--class", fleet.cpu, "--slots", "2", "--import", "my_study")
    desk.start(sys.executable, "-m", "shadho_celery.worker", *words)
    fleet.await_workers(3)
    command = desk.launch("my_study", "--trials", "16", "--json").wait()
    assert command.code == 0, desk.said()
    classes = command.json()["classes"]
    assert {name: counts["slots"] for name, counts in classes.items()} == {fleet.large: 1, fleet.small: 1, fleet.cpu: 2}
    assert all(counts["complete"] for counts in classes.values())


def test_a_worker_of_two_queues_is_refused_and_so_is_one_without_redis(desk: Desk, on_redis: Fleet) -> None:
    two = desk.worker("one,two")
    cut_off = desk.worker("one", SHADHO_REDIS_URL=f"redis://:secret@127.0.0.1:{services.free_port()}/0")
    assert two.wait(20).code == 2
    assert last_line(two) == "shadho_celery: one worker serves one class; start one for each: -Q one, -Q two"
    assert cut_off.wait(30).code == 2
    assert "SHADHO_REDIS_URL" in last_line(cut_off)
    assert ":***@" in last_line(cut_off)
    for command in (two, cut_off):
        assert "Traceback" not in command.err
        assert "secret" not in command.out + command.err


def last_line(command: Command) -> str:
    return command.err.strip().splitlines()[-1]


def test_by_default_a_worker_has_a_slot_for_as_many_cores_as_a_trial_uses(desk: Desk, on_redis: Fleet) -> None:
    cores = hardware.detect().cores
    desk.study("modest")
    desk.study("greedy", settings={"cores": cores})
    desk.worker("modest", SHADHO_IMPORTS="modest")
    desk.worker("greedy", SHADHO_IMPORTS="modest,greedy")
    on_redis.await_workers(2)
    assert {worker["compute_class"]: worker["slots"] for worker in on_redis.workers()} == {"modest": cores, "greedy": 1}


def test_what_no_worker_can_run_is_warned_of_and_waits_for_one_that_can(desk: Desk, on_redis: Fleet) -> None:
    """A worker without the study's module never runs it; the warning's own command starts one that does."""
    fleet = on_redis
    desk.study(settings={"classes": [fleet.large, fleet.small]})
    desk.study("other")
    desk.worker(fleet.small, "-c", "1", SHADHO_IMPORTS="other")
    fleet.await_workers(1)
    began = time.monotonic()
    command = desk.launch("my_study", "--trials", "6", "--json")
    command.says(f"no worker serves the queue {fleet.large}", 40)
    command.says("no live worker has my_study", 5)
    print(f"the warnings came {time.monotonic() - began:.1f} s after the command")
    assert not desk.runs()
    [line] = [line for line in command.err.splitlines() if f"the queue {fleet.large}" in line]
    typed = line.partition("start one: ")[2]
    assert typed.startswith("SHADHO_IMPORTS=my_study celery -A shadho_celery worker -Q ")
    desk.start("sh", "-c", f"exec env {typed} -c 1")
    assert command.wait(60).code == 0, desk.said()
    assert {name for _, _, name, _ in desk.runs()} == {fleet.large}
    assert command.json()["classes"][fleet.large]["complete"] == 6


@contextlib.contextmanager
def silent_port() -> Iterator[int]:
    """A port that takes connections and says nothing, as a machine behind a bad firewall may."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        yield int(listener.getsockname()[1])


def test_a_server_that_is_down_is_told_in_one_line_with_its_password_masked(desk: Desk, redis_url: str) -> None:
    """Whether it refuses or says nothing; no study is left in the store."""
    desk.study()
    port = services.free_port()
    with silent_port() as silent:
        cases = [
            ("the broker", f"amqp://me:secret@127.0.0.1:{port}//", redis_url),
            ("the broker", f"redis://:secret@127.0.0.1:{silent}", redis_url),
            ("Redis", redis_url, f"redis://:secret@127.0.0.1:{silent}"),
        ]
        started = [
            (what, desk.launch("my_study", CELERY_BROKER_URL=broker, SHADHO_REDIS_URL=url))
            for what, broker, url in cases
        ]
        for what, command in started:
            check_refusal(what, command.wait(30))
    for what, broker, url in [
        ("the broker", f"redis://:secret@127.0.0.1:{port}/0", redis_url),
        ("Redis", redis_url, f"redis://:secret@127.0.0.1:{port}/0"),
    ]:
        check_refusal(what, desk.told("run", "my_study", CELERY_BROKER_URL=broker, SHADHO_REDIS_URL=url))
    assert not [*desk.folder.glob("*.db")]


def check_refusal(what: str, command: Answer) -> None:
    assert command.code == 2, command.err
    [line] = command.messages
    assert line.startswith(f"Error: {what} at ")
    assert ":***@127.0.0.1" in line
    assert "secret" not in command.out + command.err


def test_passwords_come_from_a_file_or_with_a_warning_from_an_option_and_are_shown_nowhere(
    desk: Desk, private_redis: services.RedisServer
) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "s3same")
    url = f"redis://:s3same@127.0.0.1:{private_redis.port}/0"
    file = desk.write("fleet.urls", f"# ours\nCELERY_BROKER_URL={url}\n\nSHADHO_REDIS_URL={url}\n")
    file.chmod(0o600)
    desk.study(seconds=0.3)
    words = ("--class", "cpu", "--slots", "1", "--import", "my_study", "--url-file", "fleet.urls")
    worker = desk.start(sys.executable, "-m", "shadho_celery.worker", *words)
    by_file = desk.launch("my_study", "--trials", "6", "--url-file", "fleet.urls", "--study", "by-file")
    desk.await_runs(2)
    shown = [line for line in desk.processes().values() if "s3same" in line]
    assert len(desk.processes()) >= 3
    assert not shown
    assert by_file.wait().code == 0, desk.said()
    assert "Warning" not in by_file.err
    by_option = desk.launch("my_study", "--trials", "2", "--broker", url, "--redis", url).wait()
    assert by_option.code == 0, desk.said()
    for option, variable in (("--broker", "CELERY_BROKER_URL"), ("--redis", "SHADHO_REDIS_URL")):
        assert f"Warning: {option} shows its password" in by_option.err
        assert variable in by_option.err
    for command in (worker, by_file, by_option):
        assert "s3same" not in command.out + command.err
    assert b"s3same" not in (desk.folder / "shadho.db").read_bytes()


def test_two_studies_share_a_fleet_by_weight_and_neither_starves(desk: Desk, on_rabbitmq: Fleet) -> None:
    fleet = on_rabbitmq
    for name in ("heavy", "light"):
        desk.study(name, seconds=0.3)
    desk.worker(fleet.cpu, "-c", "4", SHADHO_IMPORTS="heavy,light")
    fleet.await_workers(1)
    words = ("--trials", "60", "--json", "--weight")
    heavy = desk.launch("heavy", *words, "3")
    light = desk.launch("light", *words, "1", "--store", "sqlite:///light.db")
    assert heavy.wait(90).code == 0, desk.said()
    assert light.wait(90).code == 0, desk.said()
    assert heavy.json()["trials"]["complete"] == light.json()["trials"]["complete"] == 60
    ours, theirs = desk.trials(), desk.trials("light.db")
    # Both have been there for a while, and want all they can get.
    began = max(min(trial["started_at"] for trial in trials) for trials in (ours, theirs)) + 2.0
    ended = min(max(trial["finished_at"] for trial in trials) for trials in (ours, theirs)) - 1.0
    more, less = (sum(began <= trial["finished_at"] <= ended for trial in trials) for trials in (ours, theirs))
    print(f"while both ran, {more} trials of the study with weight 3 and {less} of the one with weight 1")
    assert more > less >= 1
    # With one gone, the other has all slots.
    alone = [trial for trial in theirs if trial["started_at"] > ended + 3.0]
    # A few trials left over say nothing: they may be the last ones of a study at its end.
    assert len(alone) < 8 or max(at_once(alone)) >= 3, "what one study does not use goes to the other"


def at_once(trials: list[dict[str, Any]]) -> Iterator[int]:
    """Trials that run at the moments when one starts."""
    for moment in (trial["started_at"] for trial in trials):
        yield sum(trial["started_at"] <= moment < trial["finished_at"] for trial in trials)


def test_clocks_that_are_set_neither_end_a_study_nor_keep_it_from_its_end(desk: Desk, on_redis: Fleet) -> None:
    """In a study of twenty seconds, the workers' clocks are set back ten minutes, the scheduler's an hour; one dies."""
    fleet = on_redis
    ours, theirs = (ProcessClock(desk.folder / f"{whose}-clock", str(ROOT)) for whose in ("our", "their"))
    desk.environment["SHADHO_LEASE_SECONDS"] = "2"
    desk.study(seconds=1.0)
    first, _ = (desk.worker(fleet.cpu, "-c", "1", SHADHO_IMPORTS="my_study", **theirs.environment) for _ in range(2))
    fleet.await_workers(2)
    began = time.monotonic()
    command = desk.launch("my_study", "--seconds", "20", "--json", **ours.environment)
    desk.await_runs(4)
    ours.set_to(-3600.0)
    theirs.set_to(-600.0)
    desk.await_runs(len(desk.runs()) + 3)
    first.send(signal.SIGKILL)
    assert command.wait(60).code == 0, desk.said()
    assert 20.0 <= time.monotonic() - began < 60.0
    trials = desk.trials()
    assert {trial["state"] for trial in trials} <= {"COMPLETE", "WAITING"}
    assert all(1.0 <= trial["seconds"] < 30.0 for trial in trials if trial["state"] == "COMPLETE")
    assert sum(trial["lost"] for trial in trials) == 1, "the killed worker's trial was run again"


def test_a_worker_that_is_told_to_end_finishes_its_trials_and_told_again_gives_them_back(
    desk: Desk, on_rabbitmq: Fleet
) -> None:
    """Trials that are given back run again at once, free of cost; a third Ctrl-C changes nothing. SIGHUP restarts."""
    fleet = on_rabbitmq
    is_long = "context.trial > 0 and context.attempt == 1"
    desk.study(seconds=1.0, body=f"import subprocess; {is_long} and subprocess.call(['sleep', '61'])")
    worker = desk.worker(fleet.cpu, "-c", "1", SHADHO_IMPORTS="my_study")
    command = desk.launch("my_study", "--trials", "3", "--json")
    desk.await_runs(1)
    worker.send(signal.SIGTERM)
    assert worker.wait(30).code == 0, desk.said()
    assert len(desk.runs("ended")) == 1, "what ran was finished, nothing else was begun"
    assert not desk.pids("shadho_celery.runner")
    words = ("--class", fleet.cpu, "--import", "my_study", "--slots")
    second = desk.start(sys.executable, "-m", "shadho_celery.worker", *words, "2")
    until(lambda: len(desk.pids("sleep", "61")) == 2, 30, desk.said)
    for says in ("stopping after the running trials", "running trials to give back: 2", ""):
        second.interrupt()
        second.says(says)
    assert second.wait(30).code == 130, desk.said()
    assert not desk.pids("sleep", "61")
    third = desk.start(sys.executable, "-m", "shadho_celery.worker", *words, "1")
    desk.await_runs(4)
    third.send(signal.SIGHUP)
    assert command.wait(60).code == 0, desk.said()
    assert Counter(run[:2] for run in desk.runs()) == Counter([(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)])
    assert all(trial["lost"] == 0 for trial in desk.trials())
    for each in (worker, second, third):
        assert " is ready. Class " in each.err, "at any log level"
        assert not each.out or each is third, "Celery's banner"
        assert "Traceback" not in each.err
    assert third.err.count("1 slot, ") == 2, "before and after, with the same options"
    assert third.code is None, "in the same process"


def test_with_a_killed_worker_all_that_it_started_ends(desk: Desk, on_redis: Fleet) -> None:
    """Its slots' processes and what their trials have started, even if no thread can run and SIGTERM is ignored."""
    fleet = on_redis
    body = """
    import re, signal, subprocess
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sh", "-c", "setsid sleep 61 & exec setsid sleep 61"])
    re.match("(a+)+$", "a" * 40 + "b")  # holds Python's lock
    """
    desk.study(seconds=60, body=body.strip())
    worker = desk.worker(fleet.cpu, "-c", "2", SHADHO_IMPORTS="my_study")
    command = desk.launch("my_study", "--trials", "2")
    until(lambda: len(desk.pids("sleep 61")) >= 4, 60, desk.said)
    worker.send(signal.SIGKILL)
    until(lambda: set(desk.processes()) == {command.pid}, 20, lambda: f"{desk.processes()}")
    command.interrupt()
    command.says("Ctrl-C again stops at once", 10)
    command.interrupt()
    assert command.wait(20).code == 130, desk.said()


def test_an_installed_wheel_works_in_any_folder(
    desk: Desk, on_redis: Fleet, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """``celery -A shadho_celery worker`` finds its settings inside the package; there is no checkout, and no tasks."""
    fleet = on_redis
    place = tmp_path_factory.mktemp("wheel")
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("hatchling") else []
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", *isolation, "-w", place, ROOT], check=True, capture_output=True)
    [wheel] = place.glob("*.whl")
    installed = [*pip, "install", "--no-deps", "--no-index", "--target", place / "site", wheel]
    subprocess.run(installed, check=True, capture_output=True)
    parts = {path.name for path in (place / "site").iterdir() if path.suffix != ".dist-info"}
    assert parts == {"shadho_celery", "hydra_plugins", "bin"}, "the package, its entry in Hydra, and its command"
    assert (place / "site" / "hydra_plugins" / "shadho_sweeper.py").exists()
    desk.environment["PYTHONPATH"] = str(place / "site")
    desk.study(seconds=0.1)
    where = desk.start(sys.executable, "-c", "import shadho_celery; print(shadho_celery.__file__)").wait()
    assert Path(where.out.strip()).is_relative_to(place)
    desk.worker(fleet.cpu, "-c", "1", "-I", "my_study")
    fleet.await_workers(1)
    command = desk.launch("my_study", "--trials", "4", "--json").wait()
    assert command.code == 0, desk.said()
    assert command.json()["classes"] == {fleet.cpu: {"complete": 4, "pruned": 0, "failed": 0, "slots": 1}}
