"""The sampler of one's own that the samplers' README shows runs from a study file, and is resumed with it."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk
from services.documents import text_of

pytestmark = pytest.mark.timeout(180)


def example() -> str:
    text = text_of("samplers")
    return text.split("```python\n")[1].split("```")[0]


def test_it_runs_and_is_resumed_and_missed_where_the_study_file_lost_it(desk: Desk) -> None:
    desk.write("my_study.py", example())
    words = ("my_study", "--study", "s", "--workers", "cpu=1")
    first = desk.launch(*words, "--trials", "12", "--seed", "0", "--json").wait()
    assert first.code == 0, desk.said()
    assert first.json()["sampler"] == {"name": None, "choices": {}}
    assert first.json()["best"]["loss"] < 1.0
    again = desk.told("run", "my_study", "--resume", "s", "--trials", "14", "--workers", "cpu=1", "--json")
    assert again.json()["trials"]["complete"] == 14
    desk.write("my_study.py", example().replace('STUDY = {"sampler": Nearer}', "STUDY = {}"))
    lost = desk.told("run", "my_study", "--resume", "s", "--trials", "16")
    assert lost.code == 2
    assert "was begun with a sampler of its own" in lost.err.splitlines()[-1]


def test_params_outside_the_space_end_the_study_in_one_line(desk: Desk) -> None:
    desk.write("my_study.py", example().replace('each["x"] + best.params["x"]) / 2', 'each["x"] + 99)'))
    command = desk.told("run", "my_study", "--trials", "12", "--seed", "0", "--workers", "cpu=1")
    assert command.code == 2
    assert "sampler Nearer proposed" in command.err.splitlines()[-1]
    assert "uniform(-10, 10)" in command.err.splitlines()[-1]
    assert "Traceback" not in command.err
