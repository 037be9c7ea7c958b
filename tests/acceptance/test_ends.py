"""The end of an embedded study: the prompt is back at once, the servers end by themselves, and nothing is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter

import pytest
from acceptance.commands import Command, Desk, until

pytestmark = pytest.mark.timeout(180)

SUPERVISOR = "shadho_celery.embedded.supervisor"

#: the command line, but the process is killed at the first call of the function that its first argument names
KILLED = """
import os, signal, sys
from importlib import import_module
place, _, name = sys.argv.pop(1).partition(":")
*path, last = name.split(".")
holder = import_module(place)
for each in path:
    holder = getattr(holder, each)
setattr(holder, last, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
from shadho_celery.cli.main import main
main()
"""

#: functions of the scheduler at the end of a run, in the order of their calls: the first, one amid, and the last
SCHEDULER = [
    "shadho_celery.cli.run:_show_result",
    "shadho_celery.embedded.embedded:Embedded.close",
    "shadho_celery.store.sql:SqlStore.close",
]

#: A module that Python imports at its start. In a supervisor, it kills processes at the Nth call of a function.
CUSTOM = """
import os, signal, sys
from pathlib import Path

name, calls, whom = os.environ.get("TEST_KILL_AT", ":0:").split(":")
left = int(calls)

def look(frame, event, _):
    global left
    code = frame.f_code
    if event == "call" and code.co_name == name and "embedded" in code.co_filename:
        left -= 1
        if left == 0:
            me = os.getpid()
            children = Path(f"/proc/{me}/task/{me}/children").read_text().split()
            for pid in [me] if whom == "itself" else map(int, children):
                os.kill(pid, signal.SIGKILL)

if name and "shadho_celery.embedded.supervisor" in sys.orig_argv:
    sys.setprofile(look)
"""

#: function, number of its call, and the processes that are killed there: the supervisor, or Redis and the workers
STEPS = ["stop:1:itself", "_end:1:children", "_end:2:itself"]


def counted_once(desk: Desk, trials: int) -> None:
    """Each of the trials has ended, was recorded, and was run once."""
    assert desk.states() == {"COMPLETE": trials}, desk.said()
    assert Counter(number for number, *_ in desk.runs("ended")) == Counter(range(trials))


def resumed(desk: Desk, trials: int, **environment: str) -> Command:
    which = "--resume" if desk.runs() else "--study"
    words = ["my_study", which, "mine", "--trials", str(trials), "--workers", "cpu=2", "--json"]
    return desk.launch(*words, **environment)


def test_the_prompt_does_not_wait_for_the_servers_and_the_next_run_does(desk: Desk) -> None:
    """The supervisor is stopped, so that the servers cannot end before it goes on."""
    desk.study(seconds=0.3)
    command = resumed(desk, 4)
    desk.await_runs(1)
    [supervisor] = desk.pids(SUPERVISOR)
    os.kill(supervisor, signal.SIGSTOP)
    try:
        assert command.wait().code == 0, desk.said()
        assert command.json()["trials"]["complete"] == 4
        assert desk.pids(SUPERVISOR) == [supervisor]
        again = resumed(desk, 6)
        again.says("reading my_study")
        # These seconds are not scaled: the command takes over in the end.
        with pytest.raises(subprocess.TimeoutExpired):
            again.process.wait(8)
        assert len(desk.runs()) == 4, "another Redis would write to the same file"
    finally:
        os.kill(supervisor, signal.SIGCONT)
    assert again.wait().code == 0, desk.said()
    counted_once(desk, 6)
    desk.nothing_left()


def test_each_command_works_directly_after_a_run(desk: Desk) -> None:
    desk.study(body="print('a line', context.trial)")
    assert resumed(desk, 2).wait().code == 0, desk.said()
    assert resumed(desk, 4).wait().code == 0, desk.said()
    counted_once(desk, 4)
    status = desk.told("status")
    assert (status.code, status.err) == (0, "")
    assert "no study runs in this folder" in status.out
    assert desk.told("rm", "mine", "--yes").code == 0
    assert not [*desk.folder.glob(".shadho/*/*-*"), *desk.folder.glob(".shadho/embedded/*")]
    desk.nothing_left()


def test_all_that_the_last_trials_print_is_in_their_logs_and_files_that_a_study_leaves_open_are_written(
    desk: Desk,
) -> None:
    """Also a file of an object that refers to itself, which only a garbage collection would end."""
    lines = """
import atexit

class Log:
    def __init__(self):
        self.file = open(f"told-{os.getpid()}", "w")
        self.write = self.written

    def written(self, text):
        self.file.write(text)

LOG = Log()
atexit.register(LOG.write, "the end")

def on_trial(study, trial):
    LOG.write(f"trial {trial.number}\\n")
"""
    desk.study(seconds=0.0, body="print('x' * 50_000, context.trial, 'is all', flush=True)")
    path = desk.folder / "my_study.py"
    path.write_text(path.read_text() + lines)
    command = desk.launch("my_study", "--trials", "2", "--workers", "cpu=1").wait()
    assert command.code == 0, desk.said()
    assert (desk.folder / f"told-{command.pid}").read_text() == "trial 0\ntrial 1\nthe end"
    desk.nothing_left()
    logs = sorted(desk.folder.glob(".shadho/checkpoints/*/logs/*.log"))
    assert [log.read_text()[-9:] for log in logs] == [f"{number} is all\n" for number in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_scheduler_that_is_killed_at_a_step_of_the_end_has_recorded_all(desk: Desk) -> None:
    desk.study()
    for trials, place in enumerate(SCHEDULER, start=1):
        which = "--resume" if desk.runs() else "--study"
        words = ["run", "my_study", which, "mine", "--trials", str(2 * trials), "--workers", "cpu=2"]
        command = desk.start(sys.executable, "-c", KILLED, place, *words).wait()
        assert command.code == -signal.SIGKILL, f"{place} is not called at the end: {desk.said()}"
        counted_once(desk, 2 * trials)
    # Directly after the last one, whose processes still end.
    trials = 2 * len(SCHEDULER) + 2
    assert resumed(desk, trials).wait().json()["trials"]["complete"] == trials, desk.said()
    counted_once(desk, trials)
    desk.nothing_left()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_servers_that_are_killed_at_a_step_of_their_end_leave_nothing_and_lose_nothing(desk: Desk) -> None:
    desk.study()
    desk.write("sitecustomize.py", CUSTOM)
    path = os.pathsep.join([str(desk.folder), desk.environment["PYTHONPATH"]])
    for trials, step in enumerate(STEPS, start=1):
        command = resumed(desk, 2 * trials, TEST_KILL_AT=step, PYTHONPATH=path).wait()
        assert command.code == 0, desk.said()
        assert command.json()["trials"]["complete"] == 2 * trials
        counted_once(desk, 2 * trials)
        until(lambda: not desk.processes(), 20, lambda: f"{desk.processes()}")
    trials = 2 * len(STEPS) + 2
    assert resumed(desk, trials).wait().json()["trials"]["complete"] == trials, desk.said()
    counted_once(desk, trials)
    desk.nothing_left()
    log = (desk.states_folder() / "redis.log").read_text()
    lives, well_ended = log.count("Server initialized"), log.count("bye bye")
    assert (lives, well_ended) == (len(STEPS) + 1, 1), "only the last one has ended by itself"
