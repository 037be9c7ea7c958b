"""`--warm-start`: a new study learns from another, keeps what it learned, and says what did not fit."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk
from hyperopt import hp

from shadho_celery import minimize

pytestmark = pytest.mark.timeout(180)

STUDY = """
from hyperopt import hp

SPACE = {{"x": hp.uniform("x", -5, {most}), "y": hp.uniform("y", -5, 5)}}


def objective(params):
    return (params["x"] - 1) ** 2 + (params["y"] + 2) ** 2
"""
SINGLE = ("my_study", "--workers", "cpu=1", "--seed", "0", "--sampler", "random")


def found(desk: Desk, name: str) -> list[dict[str, float]]:
    return [trial["params"] for trial in desk.trials() if trial["name"] == name]


def test_a_study_learns_from_another_and_is_resumed_without_it(desk: Desk) -> None:
    store = f"sqlite:///{desk.folder}/shadho.db"
    old = {name: hp.uniform(name, -5, 5) for name in "xy"}
    minimize(lambda params: params["x"], old, trials=20, seed=0, sampler="random", store=store, study="old")
    desk.write("my_study.py", STUDY.format(most=0.5))
    words = ("--warm-start", "old", "--study")
    one = desk.launch(*SINGLE, *words, "one", "--trials", "6", "--json").wait()
    assert one.code == 0, desk.said()
    outside = sum(each["x"] > 0.5 for each in found(desk, "old"))
    said = f"warm start: learned from {20 - outside} of 20 trials of study old"
    said += f"; left out {outside} outside x (uniform(-5, 0.5))"
    assert said in one.err.splitlines()
    assert (one.json()["trials"]["complete"], one.json()["warm_start"]) == (6, 20 - outside)
    assert desk.told("run", *SINGLE, *words, "two", "--trials", "3").code == 0
    assert desk.told("rm", "old", "--yes").code == 0
    assert desk.told("run", "my_study", "--resume", "two", "--trials", "6", "--workers", "cpu=1").code == 0
    # Which trials a random search has does not depend on timing, but on the number of those that taught it.
    assert found(desk, "one") == found(desk, "two")
    space = {"x": hp.uniform("x", -5, 0.5), "y": hp.uniform("y", -5, 5)}
    cold = minimize(lambda params: params["x"], space, trials=6, seed=0, sampler="random")
    assert [dict(trial.params) for trial in cold.trials] != found(desk, "one")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--warm-start", "none"), "Error: there is no study named 'none' in sqlite:///shadho.db"),
        (("--warm-start", "none.csv"), "Error: the warm start none.csv cannot be read: No such file or directory"),
        (("--warm-start", "empty.csv"), "Error: the warm start empty.csv needs the column loss, and columns"),
        (
            ("--warm-start", "far.csv"),
            "Error: none of 1 trial of far.csv fits this study: left out 1 outside x",
        ),
        (("--warm-start", "old", "--resume"), "Error: a study gets its warm start when it begins"),
    ],
)
def test_what_cannot_teach_is_one_line(desk: Desk, words: tuple[str, ...], said: str) -> None:
    desk.write("my_study.py", STUDY.format(most=5))
    desk.write("empty.csv", "")
    desk.write("far.csv", "x,y,loss\n99,1,1\n")
    run = desk.told("run", *SINGLE, *words)
    assert run.code == 2, run.err
    assert run.err.splitlines()[-1].startswith(said)
    assert "Traceback" not in run.err
