"""The code is checked: what is recorded was computed by the study file that the scheduler has read, or not at all."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis
import services
from acceptance.commands import Command, Desk, signing_key, until
from acceptance.commands import desk as make_desk

pytestmark = pytest.mark.timeout(180)

#: A study whose trials say which option they ran, and which text of the file they ran in.
STUDY = """
import time
from hyperopt import hp
from layers import LAYERS

OPTIONS = ["adam", "sgd"]
TEXT = "first"
SPACE = {"opt": hp.choice("opt", OPTIONS), "x": hp.uniform("x", 0, 1)}

def objective(params):
    time.sleep(SECONDS)
    return {"loss": params["x"], "ran": params["opt"], "text": TEXT, "layers": LAYERS}
"""

FIRST, SECOND = ["adam", "sgd"], ["sgd", "adam"]


def write(
    folder: Path, *, options: list[str] = FIRST, text: str = "first", layers: int = 1, seconds: float = 0.0
) -> None:
    """Write the study and the module that it imports."""
    study = STUDY.replace(json.dumps(FIRST), json.dumps(options)).replace('"first"', json.dumps(text))
    (folder / "my_study.py").write_text(study.replace("SECONDS", str(seconds)))
    (folder / "layers.py").write_text(f"LAYERS = {layers}\n")


def ran(desk: Desk) -> list[tuple[str, dict[str, Any], str]]:
    """Return for each COMPLETE trial the index of the option that was recorded, its metrics, and its code."""
    done = [trial for trial in desk.trials() if trial["state"] == "COMPLETE"]
    return [(trial["params"]["opt"], json.loads(trial["metrics"]), trial["code"]) for trial in done]


@pytest.fixture(scope="module")
def vhost(amqp_server: tuple[str, Callable[..., str]]) -> Iterator[str]:
    with services.amqp_vhost(*amqp_server) as url:
        yield url


@pytest.fixture
def desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk that is cleared before the Redis of its workers is: they would announce themselves once more."""
    with make_desk(tmp_path) as made:
        yield made


@pytest.fixture
def on_fleet(desk: Desk, redis_url: str, vhost: str) -> Desk:
    """The desk on RabbitMQ and Redis."""
    desk.environment |= {"CELERY_BROKER_URL": vhost, "SHADHO_REDIS_URL": redis_url, "SHADHO_IMPORTS": "my_study"}
    return desk


def await_workers(url: str, count: int) -> None:
    with redis.Redis.from_url(url, decode_responses=True) as client:
        until(lambda: len([*client.scan_iter("shadho:worker:*")]) == count, 60)


def launch(desk: Desk, *words: str) -> Command:
    return desk.launch("my_study", "--seed", "0", "--json", *words)


def test_a_study_edited_under_a_live_worker_records_what_the_new_file_says(
    on_fleet: Desk, redis_url: str, unique: Callable[[str], str]
) -> None:
    """A choice is turned round and the imported module is edited without a restart of the worker."""
    write(on_fleet.folder)
    on_fleet.worker(unique("cpu"), "-c", "2")
    await_workers(redis_url, 1)
    assert launch(on_fleet, "--trials", "4", "--study", "one").wait().code == 0, on_fleet.said()
    write(on_fleet.folder, options=SECOND, layers=2)
    assert launch(on_fleet, "--trials", "4", "--study", "two").wait().code == 0, on_fleet.said()
    found = ran(on_fleet)
    assert [metrics["ran"] for _, metrics, _ in found] == [
        (FIRST if place < 4 else SECOND)[option] for place, (option, _, _) in enumerate(found)
    ]
    assert [metrics["layers"] for _, metrics, _ in found] == [1] * 4 + [2] * 4
    assert len({code for *_, code in found}) == 2, "each trial records the code that it ran under"


def worker_in(folder: Path, desk: Desk, name: str, slots: int) -> Command:
    """Start a worker in another folder than the desk's."""
    words = ["celery", "-A", "shadho_celery", "worker", "-Q", name, "-c", str(slots)]
    desk.commands.append(command := Command(words, folder, desk.environment))
    return command


def test_a_worker_with_an_old_copy_gets_no_trials_and_the_scheduler_names_it(
    on_fleet: Desk, redis_url: str, unique: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It shares its class with one that has the right files, and works once its own are right."""
    name, stale = unique("cpu"), tmp_path_factory.mktemp("stale")
    write(stale, options=SECOND)
    write(on_fleet.folder, seconds=0.05)
    worker_in(stale, on_fleet, name, 2)
    await_workers(redis_url, 1)
    command = launch(on_fleet, "--trials", "20")
    command.says(f"{stale}/my_study.py differs")
    assert f"on {socket.gethostname()} gets no trials" in command.err
    assert not ran(on_fleet)
    on_fleet.worker(name, "-c", "1")
    until(lambda: ran(on_fleet), 60, on_fleet.said)
    write(stale, seconds=0.05)
    assert command.wait(120).code == 0, on_fleet.said()
    found = ran(on_fleet)
    assert len(found) == 20
    assert all(metrics["ran"] == FIRST[option] for option, metrics, _ in found)
    assert len({code for *_, code in found}) == 1


def test_a_worker_that_cannot_import_a_study_says_so_at_start_and_so_does_the_scheduler(
    on_fleet: Desk, redis_url: str, unique: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """It takes trials once it can; a worker without any study says what it waits for."""
    folder = tmp_path_factory.mktemp("lacking")
    write(folder)
    (folder / "layers.py").unlink()
    on_fleet.environment["SHADHO_IMPORTS"] = "my_study,my_studdy"
    worker = worker_in(folder, on_fleet, unique("cpu"), 1)
    idle = on_fleet.worker(unique("cpu"), "-c", "1", SHADHO_IMPORTS="")
    write(on_fleet.folder)
    command = launch(on_fleet, "--trials", "2")
    worker.says("there is no module my_studdy")
    worker.says("No module named 'layers'")
    idle.says("start it with --import my_study")
    command.says("gets no trials: my_study cannot be imported: No module named 'layers'")
    write(folder)
    assert command.wait(120).code == 0, on_fleet.said()
    assert len(ran(on_fleet)) == 2


def test_a_study_edited_during_its_run_says_so_waits_and_goes_on_with_resume(desk: Desk) -> None:
    """Embedded. A slot's new process reads the edited file, and runs nothing under it."""
    write(desk.folder, seconds=0.1)
    words = ("--workers", "cpu=1", "--study", "one")
    command = launch(desk, "--trials", "1000", *words)
    command.says("study one (seed")
    until(lambda: len(ran(desk)) >= 2, 60, desk.said)
    write(desk.folder, text="second")
    command.says("my_study.py was edited; this run continues with its earlier code")
    for pid in desk.pids("shadho_celery.runner.fork_server"):
        # One may have ended with another.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.says("no worker has its earlier version, and this run waits for one")
    before = ran(desk)
    assert {metrics["text"] for _, metrics, _ in before} == {"first"}
    command.interrupt()
    command.wait()
    count = str(len(desk.trials()) + 5)
    resumed = desk.launch("my_study", "--resume", "one", "--trials", count, "--json", "--workers", "cpu=1")
    assert resumed.wait().code == 0, desk.said()
    assert re.search(rf"trials of other code: \d+ of version {before[0][2]};", resumed.err), resumed.err
    found = ran(desk)
    assert found[: len(before)] == before
    assert {metrics["text"] for _, metrics, _ in found[len(before) :]} == {"second"}
    assert all(metrics["ran"] == FIRST[option] for option, metrics, _ in found)
    assert len({(metrics["text"], code) for _, metrics, code in found}) == 2, "each records the code that it ran under"


def test_workers_without_the_files_run_code_that_is_shipped_to_them(
    on_fleet: Desk, redis_url: str, unique: Callable[[str], str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Only those that accept it do, one with an old copy too; each version has a folder of its own."""
    on_fleet.environment |= {**signing_key(on_fleet), "SHADHO_IMPORTS": "", "SHADHO_ACCEPT_CODE": "1"}
    empty, stale = tmp_path_factory.mktemp("empty"), tmp_path_factory.mktemp("stale")
    write(stale, options=SECOND)
    write(on_fleet.folder)
    worker_in(empty, on_fleet, unique("cpu"), 1)
    on_fleet.environment["SHADHO_IMPORTS"] = "my_study"
    worker_in(stale, on_fleet, unique("gpu"), 1)
    await_workers(redis_url, 2)
    first = launch(on_fleet, "--trials", "10", "--code", "ship", "--study", "one").wait()
    assert first.code == 0, on_fleet.said()
    write(on_fleet.folder, layers=2)
    assert launch(on_fleet, "--trials", "10", "--code", "ship", "--study", "two").wait().code == 0, on_fleet.said()
    found = ran(on_fleet)
    assert all(metrics["ran"] == FIRST[option] for option, metrics, _ in found)
    assert [metrics["layers"] for _, metrics, _ in found] == [1] * 10 + [2] * 10
    assert len({trial["compute_class"] for trial in on_fleet.trials()}) == 2
    assert [*empty.glob("*.py")] == []
    assert len([*empty.glob(".shadho/code/*/*/my_study.py")]) == 2


def test_code_is_shipped_to_signed_fleets_only(desk: Desk, redis_url: str) -> None:
    write(desk.folder)
    fleet = {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    for urls, about in (({}, "is for a fleet"), (fleet, "on a signed fleet only")):
        answer = desk.told("run", "my_study", "--code", "ship", **urls)
        assert answer.code == 2
        assert about in answer.err
