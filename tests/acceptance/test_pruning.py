"""A study on workers prunes: its trials are stopped whether their objective listens, sleeps, or is deaf."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk

pytestmark = pytest.mark.timeout(180)

STUDY_FILE = """
import time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", -2, 2), "kind": hp.choice("kind", ["listens", "deaf", "sleeps"])}
STUDY = {"trials": 24, "pruner": "asha", "sampler": "random"}


def objective(params, context):
    for step in range(1, 31):
        time.sleep(0.02)
        loss = params["x"] ** 2 + 1 / step
        context.report(step, loss)
        if params["kind"] == "listens" and context.should_stop():
            break
        if params["kind"] == "sleeps" and step % 9 == 1:
            time.sleep(1.0)
    return loss
"""


def test_trials_are_pruned_and_the_best_one_completes(desk: Desk) -> None:
    desk.write("my_study.py", STUDY_FILE)
    words = ("my_study", "--study", "s", "--workers", "cpu=2", "--seed", "0", "--json")
    command = desk.launch(*words).wait()
    assert command.code == 0, desk.said()
    trials = command.json()["trials"]
    assert trials["complete"] + trials["pruned"] == trials["total"] == 24
    assert 8 < trials["pruned"] < 24
    assert command.json()["pruner"] == "asha"
    for trial in desk.trials():
        if trial["state"] == "PRUNED":
            assert trial["step"] < 30
            assert trial["loss"] is not None
            assert "cancelled" not in (trial["error"] or "")
            number = str(trial["number"])
    assert "pruned by asha: the loss is that of its last report" in desk.told("trial", "s", number).out
    assert desk.logs().count("): PRUNED, ") == trials["pruned"], desk.logs()
    assert "CANCELLED" not in desk.logs()
