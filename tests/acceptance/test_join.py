"""A fleet of two machines, brought up by `fleet start` and `worker --join`; it survives kill -9 of each process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec.structs
import psutil
import pytest
from acceptance.commands import Command, Desk, desk, until

from shadho_celery.fleet.access import read_access

pytestmark = pytest.mark.timeout(120)

#: addresses of the two machines, of a network for documentation (RFC 5737)
FIRST, SECOND = "198.51.100.1", "198.51.100.2"

WORKER = ["--class", "cpu", "--slots", "2"]

#: shadho-celery, with which a message that has died with Redis is sent again after 2 s, not half a minute
COMMAND = """
from shadho_celery.cli.main import main
from shadho_celery.fleet import dispatch

dispatch.UNCLAIMED_SECONDS = 2.0
main()
"""


@dataclass(frozen=True)
class Machine:
    """A network namespace with one address, whose commands have a folder and a state folder of their own."""

    name: str
    desk: Desk

    def start(self, *words: str) -> Command:
        state = {"XDG_STATE_HOME": str(self.desk.folder / "state"), "SHADHO_LEASE_SECONDS": "3"}
        return self.desk.start("ip", "netns", "exec", self.name, *words, **state)

    def answer(self, *words: str) -> Command:
        return self.start("shadho-celery", *words).wait(30)

    def on_fleet(self, folder: str, *words: str) -> Command:
        """Start a command in a shell that has read the variables of a fleet, as `fleet start` and --join say."""
        script = f'. state/shadho_celery/{folder}/env; exec {sys.executable} -c "$0" "$@"'
        return self.start("sh", "-c", script, COMMAND, *words)


@pytest.fixture
def machines(no_orphans: None, tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines that reach one another. The test is skipped where this user may not make such networks."""
    names = [f"shadho-{os.getpid()}-{side}" for side in "ab"]
    for name in names:
        (tmp_path / name).mkdir()
    with desk(tmp_path / names[0]) as here, desk(tmp_path / names[1]) as there:
        try:
            _connect(*names)
            yield Machine(names[0], here), Machine(names[1], there)
            there.close()
            Machine(names[0], here).answer("fleet", "stop")
        finally:
            for name in names if shutil.which("ip") else ():
                subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _connect(first: str, second: str) -> None:
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the program ip")
    link = ["link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
    lines = [["netns", "add", first], ["netns", "add", second], link]
    for name, address in ((first, FIRST), (second, SECOND)):
        lines.append(["-n", name, "addr", "add", f"{address}/24", "dev", "eth0"])
        lines += [["-n", name, "link", "set", device, "up"] for device in ("lo", "eth0")]
    for words in lines:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"ip {' '.join(words)}: {done.stderr.strip()}")


def test_two_machines_go_on_after_a_kill_of_each_process(machines: tuple[Machine, Machine]) -> None:
    """No trial is lost or counted twice, no command line has the password or the key, and each fault is one line."""
    here, there = machines
    # Two starts at the same moment: one of them starts it, and both print its line.
    both = [here.start("shadho-celery", "fleet", "start", "--host", FIRST) for _ in range(2)]
    started, other = (each.wait(30) for each in both)
    [line] = started.out.splitlines()
    assert (other.out, started.code, other.code) == (started.out, 0, 0)
    fleet = read_access(line)
    state = here.desk.folder / "state" / "shadho_celery" / "fleet"
    worker = there.start(*line.split(), *WORKER)
    worker.says("is ready")
    lines = [*here.desk.processes().values(), *there.desk.processes().values()]
    secrets = (line.split()[-1], fleet.password, fleet.key.strip())
    assert not [words for words in lines if any(secret in words for secret in secrets)]

    name = here.desk.study(seconds=0.4)
    study = here.on_fleet("fleet", "run", name, "--code", "ship", "--trials", "50", "--json")
    here.desk.await_runs(6, "ended")
    [server] = psutil.Process(int((state / "lock").read_text())).children()
    server.kill()
    here.desk.await_runs(len(here.desk.runs("ended")) + 4, "ended")

    assert study.code is None, here.desk.said()
    worker.send(signal.SIGKILL)
    # As after a reboot: nothing could say good-bye.
    os.kill(int((state / "lock").read_text()), signal.SIGKILL)
    again = here.answer("fleet", "start")
    assert (again.out, again.code) == (started.out, 0)
    assert f"the fleet runs on {FIRST}:6390" in again.err
    there.on_fleet(f"joined-{FIRST}:6390", "worker", "--accept-code", *WORKER)
    assert study.wait(60).code == 0, here.desk.said()
    assert study.json()["trials"]["complete"] == 50
    assert here.desk.states() == {"COMPLETE": 50}
    assert {*Counter((trial, attempt) for trial, attempt, *_ in here.desk.runs("ended")).values()} == {1}

    twice = here.answer("fleet", "start")
    assert (twice.out, twice.code) == (started.out, 0)
    assert f"the fleet runs already on {FIRST}:6390" in twice.err
    assert "There is no TLS" in twice.err
    assert "the fleet runs on" in here.answer("fleet", "start", "--port", "7000").err
    wrong = msgspec.structs.replace(fleet, password="0" * 32)
    refused = there.answer("worker", "--join", wrong.text())
    assert refused.code == 2
    assert "invalid username-password pair or user is disabled.); run shadho-celery fleet start on" in refused.err
    assert "the fleet has stopped" in here.answer("fleet", "stop").err
    assert here.answer("fleet", "stop").err == "no fleet of this user runs on this machine\n"
    until(lambda: not here.desk.pids("redis"), 10)
