"""The function after each trial that the objective's README shows."""

from __future__ import annotations

import re

import pytest
from acceptance.commands import Desk
from services.documents import text_of

pytestmark = pytest.mark.timeout(120)

BLOCKS = re.findall(r"^```python\n(.*?)^```", text_of("objective"), re.MULTILINE | re.DOTALL)
[EXAMPLE] = [block for block in BLOCKS if "on_trial" in block]


def test_the_example_is_called_after_each_trial_and_ends_the_study(desk: Desk) -> None:
    desk.write("my_study.py", EXAMPLE)
    run = desk.launch("my_study", "--trials", "100", "--seed", "0", "--workers", "cpu=1").wait(60)
    assert run.code == 0, desk.said()
    said = re.findall(r"^trial (\d+): COMPLETE, loss", run.out, re.MULTILINE)
    assert sorted(map(int, said)) == sorted(trial["number"] for trial in desk.trials() if trial["state"] == "COMPLETE")
    assert 10 <= len(said) < 100
    assert "ended: on_trial called study.stop(); --resume my_study-" in run.err


PRINTS = """
from hyperopt import hp
from hyperopt.pyll import scope

@scope.define
def aloud(value):
    print("drawn")
    return value

SPACE = {"x": scope.aloud(hp.uniform("x", 0, 1))}

def objective(params):
    return params["x"]

def on_trial(study, trial):
    print("told")
    raise ValueError("mine")
"""


def test_json_stays_whole_whatever_it_and_functions_of_the_space_print_and_what_it_raises_is_one_warning(
    desk: Desk,
) -> None:
    desk.write("printing.py", PRINTS)
    run = desk.launch("printing", "--trials", "3", "--workers", "cpu=1", "--json").wait(60)
    assert run.code == 0, desk.said()
    assert run.json()["trials"]["complete"] == 3
    assert run.err.count("drawn") >= 3
    assert run.err.count("told") == 3
    [line] = [line for line in run.err.splitlines() if "on_trial failed" in line]
    assert "on_trial failed after trial 0: ValueError: mine (" in line
    assert "the study continues" in line


def test_one_that_cannot_be_called_is_refused(desk: Desk) -> None:
    desk.write("my_study.py", EXAMPLE.replace("def on_trial(study, trial)", "def on_trial(trial)"))
    run = desk.told("run", "my_study", "--workers", "cpu=1")
    assert run.code == 2, run.err
    assert run.err.splitlines()[-1].startswith("Error: on_trial of my_study cannot be called with two arguments")
    assert "Traceback" not in run.err
    assert not (desk.folder / "shadho.db").exists()
