"""The reaper ends as its child does, and after either end nothing that the child started is alive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import services

from shadho_celery.node.stay import SIGNALS
from shadho_celery.runner.process_tree import FOR_WORKER, descendants

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only the child's group is ended")

#: the module below it: what `main` does is its argument
MODULE = """
import ctypes, multiprocessing, os, resource, signal, subprocess, sys, time

def main(arguments):
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    print(os.getpid(), flush=True)
    globals()[arguments[0]]()

def nothing():
    pass

def raising():
    raise ValueError("seen")

def leaving():
    sys.exit(7)

def segfaulting():
    ctypes.string_at(0)

def killing_itself():
    os.kill(os.getpid(), signal.SIGKILL)

def staying():
    time.sleep(60)

def deaf():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    ctypes.PyDLL(None).sleep(60)

def having_family():
    "Children in its group, in another session, and orphans of both kinds; each deaf to what can be ignored."
    for depth in range(4):
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if depth % 2:
                os.setsid()
            if depth < 2 or os.fork() == 0:
                time.sleep(60)
            os._exit(0)
    subprocess.Popen(["sh", "-c", "setsid setsid sleep 60 & sleep 60"])
    time.sleep(0.3)
    print("all there", flush=True)

def signalled():
    "Each signal that is meant for the worker; then children that are told to end by one of them."
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        os.killpg(0, number)
    program = subprocess.Popen(["sleep", "60"])
    program.terminate()
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join()
    print(program.wait(), child.exitcode, flush=True)
    signal.signal(signal.SIGUSR1, lambda number, frame: print("its own handler", flush=True))
    os.kill(os.getpid(), signal.SIGUSR1)

def family_and_death():
    having_family()
    os._exit(3)

def family_and_life():
    having_family()
    time.sleep(60)
"""

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, no_orphans: None) -> Iterator[Start]:
    """Starts a reaper over one of the deeds; its standard input is the lifeline."""
    (tmp_path / "module_below.py").write_text(MODULE)
    started: list[subprocess.Popen[str]] = []

    def start(deed: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "shadho_celery.runner.reaper", "0", "module_below", deed],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])},
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("deed", "code"),
    [
        ("nothing", 0),
        ("raising", 1),
        ("leaving", 7),
        ("segfaulting", -signal.SIGSEGV),
        ("killing_itself", -signal.SIGKILL),
    ],
)
def test_it_ends_as_its_child_does(start: Start, deed: str, code: int) -> None:
    assert start(deed).wait(20) == code


@pytest.mark.parametrize("deed", ["staying", "deaf"])
def test_at_the_lifelines_end_the_child_is_killed_whatever_it_does(start: Start, deed: str) -> None:
    process = start(deed)
    child = int(said(process))
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)
    assert not Path(f"/proc/{child}").exists()


def test_the_worker_alone_ends_a_trial(start: Start) -> None:
    """Signals for the worker end neither child nor reaper, but processes that the child has started."""
    process = start("signalled")
    said(process)
    for number in FOR_WORKER:
        process.send_signal(number)
    assert said(process) == f"{-signal.SIGTERM} {-signal.SIGTERM}"
    assert said(process) == "its own handler"
    assert process.wait(20) == 0


def test_a_preemption_by_signal_is_for_the_worker() -> None:
    """Except SIGXCPU, by which the system ends a process that has used its CPU seconds."""
    assert {*SIGNALS.values()} - {signal.SIGXCPU} <= {*FOR_WORKER}


def test_the_child_has_a_group_of_its_own_no_way_to_the_lifeline_and_ends_with_its_reaper(start: Start) -> None:
    process = start("staying")
    child = int(said(process))
    assert os.getpgid(child) == child != process.pid
    descriptors = [path.readlink() for path in Path(f"/proc/{child}/fd").iterdir() if path.name not in "12"]
    assert not [target for target in descriptors if str(target).startswith("pipe:")]
    process.kill()
    services.wait_until(lambda: not Path(f"/proc/{child}").exists(), seconds=5)


def test_all_descendants_of_a_child_that_died_are_killed(start: Start) -> None:
    process = start("family_and_death")
    assert process.wait(20) == 3
    # `no_orphans` looks for the others.


def test_all_descendants_are_killed_at_the_lifelines_end(start: Start) -> None:
    process = start("family_and_life")
    said(process)
    assert said(process) == "all there"
    assert len(descendants(process.pid)) >= 8
    assert process.stdin is not None
    process.stdin.close()
    process.wait(20)
