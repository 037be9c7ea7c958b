"""A worker that is taken away gives its trials back, and they go on elsewhere from their checkpoints."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from acceptance.commands import Command, Desk, until
from acceptance.commands import desk as make_desk
from acceptance.test_fleet import Fleet

pytestmark = pytest.mark.timeout(180)

#: a trial of so many steps of a tenth of a second, with a checkpoint when it is preempted
STEPS = 40
STUDY = """
import time
from hyperopt import hp

SPACE = hp.uniform("x", 0, 1)
STUDY = {{"sampler": "random", "cores": 1}}

def note(*words):
    with open({log!r}, "a") as log:
        log.write(" ".join(map(str, words)) + "\\n")

def objective(x, context):
    file = context.checkpoint_dir / "step"
    first = int(file.read_text()) if file.exists() else 0
    note("began", context.trial, context.attempt, first)
    for step in range(first, {steps}):
        time.sleep(0.1)
        context.report(step + 1, x)
        if context.should_stop():
            note("told", context.trial, context.attempt, step + 1, context.stop_reason)
            file.write_text(str(step + 1))
            return None
    note("ended", context.trial, context.attempt, {steps})
    return x
"""


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    with make_desk(tmp_path) as made:
        made.write("my_study.py", STUDY.format(log=str(tmp_path / "log"), steps=STEPS))
        yield made


@pytest.fixture
def fleet(desk: Desk, redis_url: str, unique: Callable[[str], str]) -> Fleet:
    made = Fleet(redis_url, redis_url, *(unique(name) for name in ("gpu_large", "gpu_small", "cpu")))
    desk.environment |= made.environment
    return made


def worker(desk: Desk, fleet: Fleet, *options: str, host: str = "") -> Command:
    words = ["python", "-m", "shadho_celery.worker", "--class", fleet.cpu, "--import", "my_study", *options]
    return desk.start(*words, SHADHO_CORES="2", SHADHO_HOST=host)


def notes(desk: Desk, what: str) -> list[list[str]]:
    path = desk.folder / "log"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [rest for word, *rest in lines if word == what]


def await_notes(desk: Desk, what: str, count: int) -> None:
    until(lambda: len(notes(desk, what)) >= count, 60, desk.said)


def test_a_preempted_workers_trials_go_on_elsewhere_from_their_step(desk: Desk, fleet: Fleet) -> None:
    """They are told the reason, no attempt counts as lost, and each trial ends once. An idle worker ends."""
    taken = worker(desk, fleet, "--slots", "2", "--preempt-signal", "usr1")
    study = desk.launch("my_study", "--trials", "3")
    await_notes(desk, "began", 2)
    taken.send(signal.SIGUSR1)
    assert taken.wait().code == 0
    assert "preempted by SIGUSR1; running trials: 2, which have" in taken.err
    told = notes(desk, "told")
    assert [(attempt, reason) for _, attempt, _, reason in told] == [("1", "preempted")] * 2
    idle = worker(desk, fleet, "--slots", "3", "--idle-exit", "10s")
    assert study.wait(90).code == 0, desk.said()
    resumed = {trial: step for trial, attempt, step in notes(desk, "began") if attempt != "1" and step != "0"}
    assert resumed == {trial: step for trial, _, step, _ in told}
    assert sorted(trial for trial, *_ in notes(desk, "ended")) == ["0", "1", "2"]
    assert {(trial["state"], trial["lost"]) for trial in desk.trials()} == {("COMPLETE", 0)}
    assert idle.wait().code == 0
    assert "there was no trial for 10 s" in idle.err


#: writes a checkpoint in place, which takes a while, and has a handler of its own in its second trial
IN_PLACE = (
    STUDY.replace(
        "file.write_text(str(step + 1))",
        """with file.open("w") as written:
                for word in (str(step + 1), "whole"):
                    print(word, file=written, flush=True)
                    time.sleep(0.5)""",
    )
    .replace("int(file.read_text())", "read(file)")
    .replace(
        "def objective(x, context):\n",
        """def read(file):
    step, whole = file.read_text().split()
    return int(step)

def objective(x, context):
    if context.trial == 1:
        signal.signal(signal.SIGTERM, lambda number, frame: note("handled", context.trial))
""",
    )
    .replace("import time", "import signal, time")
)


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_batch_system_that_signals_all_processes_ends_no_trial_before_its_checkpoint(
    desk: Desk, fleet: Fleet, start: str
) -> None:
    """As SLURM does with a job step. The trials' processes leave it to the worker, except a handler of a trial."""
    desk.write("my_study.py", IN_PLACE.format(log=str(desk.folder / "log"), steps=STEPS))
    desk.environment["SHADHO_START"] = start
    taken = worker(desk, fleet, "--slots", "2", "--grace", "20s")
    study = desk.launch("my_study", "--trials", "3")
    await_notes(desk, "began", 2)
    # The trials' processes come first, so that they are signalled before the worker can tell them anything.
    tree = [*reversed(psutil.Process(taken.pid).children(recursive=True)), taken.process]
    assert len(tree) > 4
    for process in tree:
        process.send_signal(signal.SIGTERM)
    assert taken.wait().code == 0
    told = notes(desk, "told")
    assert sorted((trial, attempt, reason) for trial, attempt, _, reason in told) == [
        (trial, "1", "preempted") for trial in "01"
    ]
    assert notes(desk, "handled") == [["1"]]
    worker(desk, fleet, "--slots", "3")
    assert study.wait(90).code == 0, desk.said()
    resumed = {trial: step for trial, attempt, step in notes(desk, "began") if attempt != "1"}
    assert {trial: step for trial, _, step, _ in told}.items() <= resumed.items()
    assert sorted(trial for trial, *_ in notes(desk, "ended")) == ["0", "1", "2"]
    assert {(trial["state"], trial["lost"]) for trial in desk.trials()} == {("COMPLETE", 0)}


def test_without_a_grace_the_running_trials_finish_even_if_all_processes_are_signalled(
    desk: Desk, fleet: Fleet
) -> None:
    stopped = worker(desk, fleet, "--slots", "2")
    study = desk.launch("my_study", "--trials", "2")
    await_notes(desk, "began", 2)
    for process in [*reversed(psutil.Process(stopped.pid).children(recursive=True)), stopped.process]:
        process.send_signal(signal.SIGTERM)
    assert stopped.wait().code == 0
    assert study.wait(90).code == 0, desk.said()
    assert [attempt for _, attempt, _ in notes(desk, "began")] == ["1", "1"]
    assert {(trial["state"], trial["lost"]) for trial in desk.trials()} == {("COMPLETE", 0)}


def test_a_worker_for_some_time_takes_only_what_ends_in_time_and_leaves(desk: Desk, fleet: Fleet) -> None:
    """It logs that it does not take a trial that is predicted to last longer. It interrupts none."""
    desk.write("my_study.py", STUDY.format(log=str(desk.folder / "log"), steps=150))
    # How long a trial takes is known from the first one, whose worker finishes it and leaves.
    first = worker(desk, fleet, "--slots", "1")
    study = desk.launch("my_study", "--trials", "3")
    await_notes(desk, "began", 1)
    first.send(signal.SIGTERM)
    assert first.wait().code == 0
    limited = worker(desk, fleet, "--slots", "1", "--for", "14s", "--grace", "1s")
    assert limited.wait().code == 0
    assert "does not run here: it is predicted to take 1" in limited.err
    assert len(notes(desk, "began")) == 1
    worker(desk, fleet, "--slots", "2", "--for", "1h")
    assert study.wait(90).code == 0, desk.said()
    assert notes(desk, "told") == []
    assert {(trial["state"], trial["lost"]) for trial in desk.trials()} == {("COMPLETE", 0)}
    assert len(notes(desk, "ended")) == 3


def test_a_worker_whose_time_is_over_gives_back_the_trial_that_does_not_return_within_the_grace(
    desk: Desk, fleet: Fleet
) -> None:
    """How long it takes was not known. It starts again elsewhere, and does not count as lost."""
    desk.write("my_study.py", (desk.folder / "my_study.py").read_text().replace("context.should_stop()", "False"))
    limited = worker(desk, fleet, "--slots", "1", "--for", "3.5s", "--grace", "0.5s")
    study = desk.launch("my_study", "--trials", "1")
    assert limited.wait().code == 0
    assert "of --for are over" in limited.err
    worker(desk, fleet, "--slots", "1")
    assert study.wait(90).code == 0, desk.said()
    assert len(notes(desk, "ended")) == 1
    assert [(trial["state"], trial["lost"]) for trial in desk.trials()] == [("COMPLETE", 0)]


def test_a_machine_that_vanishes_is_free(desk: Desk, fleet: Fleet) -> None:
    """Its worker says nothing; the trial waits until the lease is over, and does not count that as lost."""
    gone = worker(desk, fleet, "--slots", "1", host="spot-1")
    study = desk.launch("my_study", "--trials", "1")
    await_notes(desk, "began", 1)
    gone.send(signal.SIGKILL)
    worker(desk, fleet, "--slots", "1", host="spot-2")
    assert study.wait(120).code == 0, desk.said()
    assert [(trial["state"], trial["lost"], trial["vanished"]) for trial in desk.trials()] == [("COMPLETE", 0, 1)]


def test_a_stay_that_makes_no_sense_is_refused(desk: Desk, fleet: Fleet) -> None:
    command = worker(desk, fleet, "--for", "1m", "--grace", "2m").wait()
    assert command.code == 2
    assert "must be longer than" in command.err
