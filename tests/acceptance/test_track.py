"""Trackers beside real runs: each trial is shown once after a kill, and a tracker that hangs delays nothing."""

from __future__ import annotations

import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import Desk, until
from services.extras import needed
from services.tracked import read_mlflow, read_tensorboard, read_wandb

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

#: number of trials of a study, and of further runs that may be needed until slow tools show all of them
TRIALS, RUNS = 8, 5

#: a study of a nested space whose trials report, and of which some fail or are pruned
BODY = """
for step in (1, 2, 3):
    context.report(step, params["x"] + 1 / step)
if context.trial % 8 == 5:
    raise ValueError("no luck")
"""


def shown(folder: Path) -> Mapping[str, list[tuple[int, Mapping[str, Any]]]]:
    return {
        "mlflow": read_mlflow(f"sqlite:///{folder / 'mlflow.db'}", "tracked"),
        "wandb": read_wandb(folder / "wandb"),
        "tensorboard": read_tensorboard(folder / "runs/tracked"),
    }


def test_each_trial_is_in_each_tracker_once_after_a_kill_and_a_resume(desk: Desk) -> None:
    for name in ("mlflow", "wandb", "tensorboard"):
        needed(name)
    desk.study(seconds=0.5, body=BODY.strip().replace("\n", "\n    "))
    offline = {"WANDB_MODE": "offline"}
    track = ["--track", "mlflow:sqlite:///mlflow.db,wandb,tensorboard"]
    options = ["--workers", "cpu=2", "--trials", str(TRIALS)]
    command = desk.launch("my_study", "--study", "tracked", *options, *track, **offline)
    folders = desk.folder / "runs/tracked"
    until(lambda: len([*folders.glob("[0-9]*")]) >= 3 or command.code is not None, 90.0, desk.said)
    assert command.code is None, desk.said()
    command.process.kill()
    command.process.wait()
    for _ in range(RUNS):
        # The trackers are those of the run before.
        command = desk.launch("my_study", "--resume", "tracked", *options, **offline).wait(120.0)
        assert command.code == 0, desk.said()
        if "lack" not in command.err:
            break
    assert "Warning: mlflow" not in command.err
    trials = {trial["number"]: trial for trial in desk.trials()}
    assert len(trials) == TRIALS
    for found in shown(desk.folder).values():
        assert sorted(number for number, _ in found) == sorted(trials), desk.said()
        states = {trials[number]["state"]: set() for number, _ in found}
        for number, each in found:
            states[trials[number]["state"]].add(str(each["state"]))
            if trials[number]["state"] == "COMPLETE":
                assert each["metrics"]["loss"] == pytest.approx(trials[number]["loss"], rel=1e-5)
                assert each["steps"][-3:] == [1, 2, 3]
        assert {*states} == {"COMPLETE", "FAILED"}
        assert not states["COMPLETE"] & states["FAILED"]


def test_a_tracker_that_hangs_delays_no_trial_and_the_run_says_what_it_lacks(desk: Desk) -> None:
    """The server accepts connections and never answers."""
    needed("mlflow")
    desk.study()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = ["--workers", "cpu=1", "--trials", "3", "--track", f"mlflow:{uri}"]
        command = desk.launch("my_study", "--study", "hung", *options)
        until(lambda: "Ctrl-C ends the wait" in command.err or command.code is not None, 120.0, desk.said)
        command.process.send_signal(signal.SIGINT)
        command.wait(60.0)
    assert command.code == 0, desk.said()
    assert desk.states() == {"COMPLETE": 3}
    assert "mlflow still lacks trials; Ctrl-C ends the wait" in command.err
    assert "mlflow may lack trials; a run with --resume hung adds them" in command.err
    # `none` ends it for good. Without a tracker, nothing is told of one.
    command = desk.launch("my_study", "--resume", "hung", "--track", "none").wait()
    assert (command.code, "mlflow" in command.err) == (0, False)


def test_a_program_tracks_its_study(desk: Desk) -> None:
    needed("tensorboard")
    script = desk.write(
        "script.py",
        "from shadho_celery import hp, minimize\n"
        "space = {'x': hp.uniform('x', 0, 1)}\n"
        "given = {'store': 'sqlite:///shadho.db', 'study': 'mine', 'resume': 'if-exists'}\n"
        "for trials in (3, 5):\n"
        "    minimize(lambda params: params['x'], space, trials=trials, track='tensorboard:shown', **given)\n",
    )
    told = desk.ran(script)
    assert (told.code, told.err) == (0, "")
    found = read_tensorboard(desk.folder / "shown/mine")
    assert sorted(number for number, _ in found) == [*range(5)]
