"""A machine with GPUs of several kinds gets a worker for each, with its own environment; --join refuses bad lines."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery import worker
from shadho_celery.cli.group import commands
from shadho_celery.core.addresses import close_socket
from shadho_celery.core.hardware import Gpu, Machine
from shadho_celery.fleet.access import Access
from shadho_celery.worker import Workers, workers_of

GIB = 2**30
CARDS = (
    Gpu(id="0", name="A100", memory=80 * GIB),
    Gpu(id="1", name="T4", memory=15 * GIB),
    Gpu(id="2", name="A100", memory=80 * GIB),
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHADHO_METRICS_PORT", "SHADHO_HEARTBEAT_FILE"):
        monkeypatch.delenv(name, raising=False)


def test_each_kind_has_its_class_by_memory_and_its_own_gpus() -> None:
    assert workers_of(Machine(cards=CARDS)) == [
        ("gpu_large", {"CUDA_VISIBLE_DEVICES": "0,2"}),
        ("gpu_small", {"CUDA_VISIBLE_DEVICES": "1"}),
    ]
    assert len(workers_of(Machine(cards=CARDS[::2]))) == 1
    assert workers_of(Machine()) == []


def test_kinds_of_one_class_are_still_two_workers() -> None:
    cards = (CARDS[0], Gpu(id="1", name="V100", memory=32 * GIB))
    assert [name for name, _ in workers_of(Machine(cards=cards))] == ["gpu_large", "gpu_large"]


def test_workers_divide_limited_cores_and_have_their_own_ports_and_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHADHO_METRICS_PORT", "9000")
    monkeypatch.setenv("SHADHO_HEARTBEAT_FILE", "/tmp/alive")
    (_, first), (_, second) = workers_of(Machine(cards=CARDS, cores=6, is_limited=True))
    assert first == {"CUDA_VISIBLE_DEVICES": "0,2", "SHADHO_CORES": "4"}
    assert second == {
        "CUDA_VISIBLE_DEVICES": "1",
        "SHADHO_CORES": "2",
        "SHADHO_METRICS_PORT": "9001",
        "SHADHO_HEARTBEAT_FILE": "/tmp/alive.1",
    }


SCRIPT = """
import os, sys, time
if "CODE" in os.environ:
    sys.exit(int(os.environ["CODE"]))
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "expected"), [("0", 128 + 9), ("3", 3)])
def test_a_worker_that_fails_ends_the_others_and_one_that_ends_well_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str, expected: int
) -> None:
    """The processes stand for workers. The second one is killed after some time, if it was not ended before."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(worker, "COMMAND", [sys.executable, str(script)])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    workers, sleep, naps = Workers([]), time.sleep, iter(range(10))

    def nap(seconds: float) -> None:
        sleep(seconds)
        if code == "0" and next(naps, None) is None:
            workers.pass_on(9)

    monkeypatch.setattr("time.sleep", nap)
    assert workers.serve([("b", {}), ("a", {"CODE": code})]) == expected


@pytest.fixture
def nobody() -> Iterator[int]:
    """A port on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.fixture
def somebody() -> Iterator[int]:
    """A port on which a server other than Redis answers each client."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    with server.accept()[0] as connection:
                        connection.recv(1000)
                        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        close_socket(server)
        thread.join()


@pytest.mark.parametrize(("place", "cause"), [("nobody", "Connection refused"), ("somebody", "Protocol error")])
def test_a_fleet_that_cannot_be_joined_is_one_line_and_nothing_is_saved(
    place: str, cause: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing answers, or the address is taken; a wrong password is in acceptance/test_join.py."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    text = Access("127.0.0.1", request.getfixturevalue(place), "0" * 32, "k" * 64).text()
    result = CliRunner().invoke(commands, ["worker", "--join", "-"], input=f"shadho-celery worker --join {text}\n")
    assert result.exit_code == 2
    [said] = result.stderr.splitlines()
    assert re.search(rf"cannot be used \(.*{cause}", said, re.IGNORECASE)
    assert "run shadho-celery fleet start on the fleet's machine" in said
    assert "0" * 32 not in said
    assert not [*tmp_path.iterdir()]


def test_a_file_may_have_the_line_if_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "line"
    path.write_text("shadho-celery worker --join shadho1.aaaa")
    path.chmod(0o600)
    assert "the fleet speaks protocol 1" in CliRunner().invoke(commands, ["worker", "--join", str(path)]).stderr
    path.chmod(0o644)
    assert "other users can read --join: " in CliRunner().invoke(commands, ["worker", "--join", str(path)]).stderr


@cases("given", ["shadho0", "", "~nobody/line", "/", "a" * 5000, "\udcff\x1b[1m"])
def test_what_is_neither_a_line_nor_a_file_is_refused_in_one_line(given: str) -> None:
    result = CliRunner().invoke(commands, ["worker", "--join", given])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--join: " in result.stderr


def test_join_names_all_servers_by_itself() -> None:
    result = CliRunner().invoke(commands, ["worker", "--join", "shadho1.aaaa", "--redis", "redis://host"])
    assert (result.exit_code, "leave out the options that name others" in result.stderr) == (2, True)
