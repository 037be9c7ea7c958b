"""The study of two losses and a constraint that the objective's README shows runs, is resumed, and keeps its losses."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk
from services.documents import text_of

pytestmark = pytest.mark.timeout(180)


def example() -> str:
    text = text_of("losses")
    return next(block for block in text.split("```python\n") if '"ms": "minimize"' in block).split("```")[0]


def test_it_runs_and_is_resumed_and_its_front_is_in_the_report_and_in_json(desk: Desk) -> None:
    desk.write("my_study.py", example())
    words = ("my_study", "--study", "s", "--workers", "cpu=1", "--seed", "0")
    first = desk.launch(*words, "--trials", "20").wait()
    assert first.code == 0, desk.said()
    assert "front of " in first.out
    assert "front: hypervolume " in first.out
    assert "tpe: it learns 2 losses at once" in first.out
    again = desk.told("run", "my_study", "--resume", "s", "--trials", "25", "--workers", "cpu=1", "--json")
    told = again.json()
    assert told["trials"]["complete"] == 25, desk.said()
    losses = [(each["losses"]["accuracy"], each["losses"]["ms"]) for each in told["front"]]
    assert losses == sorted(losses, reverse=True), "the more accurate, the slower"
    assert all(0 < accuracy < 1 for accuracy, _ in losses)
    assert all(each["constraints"]["memory_gb"] <= 0 for each in told["front"])
    volumes = [volume for _, volume in told["hypervolume"]["history"]]
    assert volumes == sorted(volumes)
    assert told["best"] == told["front"][0]
    desk.write("my_study.py", example().replace('"ms": "minimize"', '"ms": "maximize"'))
    other = desk.told("run", "my_study", "--resume", "s", "--trials", "30")
    assert other.code == 2
    assert "started with other objectives: maximize accuracy, minimize ms, not" in other.err.splitlines()[-1]


def test_losses_without_names_in_the_study_are_failures_that_name_the_remedy(desk: Desk) -> None:
    desk.write("my_study.py", example().replace(', "objectives": {"accuracy": "maximize", "ms": "minimize"}', ""))
    command = desk.told("run", "my_study", "--trials", "3", "--workers", "cpu=1")
    assert command.code == 1
    assert "name them, such as STUDY" in command.out


def test_a_loss_to_maximise_on_the_command_line_reaches_the_workers_whose_log_lines_are_shown(desk: Desk) -> None:
    """The study file has no direction. The resumed study keeps it."""
    desk.write(
        "my_study.py",
        "from hyperopt import hp\nSPACE = {'x': hp.uniform('x', 0, 1)}\n"
        "def objective(params, context):\n    context.report(1, params['x'])\n    return {'loss': params['x']}\n",
    )
    words = ("my_study", "--study", "s", "--workers", "cpu=1", "--seed", "0", "--maximize", "--verbose")
    first = desk.launch(*words, "--trials", "4").wait()
    assert first.code == 0, desk.said()
    assert "[cpu] " in first.err
    assert "study s, trial 0 (all): COMPLETE" in first.err
    told = desk.told("run", "my_study", "--resume", "s", "--trials", "6", "--workers", "cpu=1", "--json").json()
    assert told["trials"]["complete"] == 6, desk.said()
    trials = desk.trials()
    assert told["best"]["loss"] == max(trial["params"]["x"] for trial in trials)
    assert all(trial["loss"] == -trial["params"]["x"] for trial in trials), "a store has it as it is minimised"
    assert told["objectives"] == {"loss": "maximize"}
