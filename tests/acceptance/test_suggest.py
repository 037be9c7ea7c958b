"""Objectives that ask for their labels, on workers: by value, as a study file, and with n_jobs."""

from __future__ import annotations

import json
import sys

import pytest
from acceptance.commands import Desk

pytestmark = pytest.mark.timeout(120)

OBJECTIVE = """
import os


def objective(trial):
    loss = trial.suggest_float("x", -1, 1) ** 2
    if trial.suggest_categorical("kind", ["deep", "flat"]) == "deep":
        for layer in range(trial.suggest_int("layers", 1, 3)):
            loss += trial.suggest_float(f"rate {layer}", 0, 1)
    trial.set_user_attr("process", os.getpid())
    return loss
"""

BY_VALUE = f"""
import json, os
import shadho_celery
{OBJECTIVE}
if __name__ == "__main__":
    study = shadho_celery.minimize(lambda trial: objective(trial), trials=24, workers=2, progress=False)
    print(json.dumps([trial.values | {{"own": trial.metrics["process"] == os.getpid()}} for trial in study.trials]))
    assert {{trial.subspace for trial in study.trials}} == {{"kind=deep", "kind=flat"}}
"""

N_JOBS = f"""
import json, os
import shadho_celery.optuna as optuna
{OBJECTIVE}
if __name__ == "__main__":
    study = optuna.create_study(storage="sqlite:///o.db", study_name="one", pruner=optuna.pruners.NopPruner())
    study.enqueue_trial({{"x": 0.5}})
    seen = []
    study.optimize(objective, n_trials=24, n_jobs=2, callbacks=[lambda study, trial: seen.append(trial.number)])
    assert sorted(seen) == [*range(24)] and study.trials[0].params["x"] == 0.5
    assert study.best_trial.distributions.keys() >= {{"x", "kind"}}, "the labels of the workers' trials are known"
    found = [trial.params | {{"own": trial.user_attrs["process"] == os.getpid()}} for trial in study.trials]
    print(json.dumps(found[1:]))
"""

FILE = f"""
import shadho_celery
{OBJECTIVE}
SPACE = None
"""


def check(found: list[dict[str, object]]) -> None:
    assert len(found) >= 23
    for values in found:
        layers = int(str(values.get("layers", 0)))
        labels = {"x", "kind", *({"layers"} if values["kind"] == "deep" else ()), *(f"rate {n}" for n in range(layers))}
        assert values.keys() == {*labels, "own"}
        assert not values["own"]


@pytest.mark.parametrize("program", [BY_VALUE, N_JOBS], ids=["by value", "n_jobs"])
def test_a_function_asks_for_its_labels_on_workers(desk: Desk, program: str) -> None:
    desk.write("own.py", program)
    run = desk.start(sys.executable, "own.py").wait(90)
    assert run.code == 0, desk.said()
    check(json.loads(run.out.splitlines()[-1]))


def test_a_study_file_without_a_space_is_run_and_resumed(desk: Desk) -> None:
    desk.write("asks.py", FILE)
    for trials in ("12", "24"):
        more = ["--resume"] if trials == "24" else []
        run = desk.start("shadho-celery", "run", "asks", "--workers", "cpu=2", "--trials", trials, *more).wait(60)
        assert run.code == 0, desk.said()
        assert "best: {x: " in run.out
        assert "labels:" not in run.out
    dry = desk.start("shadho-celery", "run", "asks", "--dry-run", "3").wait(60)
    assert (dry.code, "asks has no SPACE, so its values are not known before a trial" in dry.err) == (2, True)
    again = desk.start("shadho-celery", "again", "asks", "3").wait(60)
    assert again.code == 0, desk.said()
    before, now = again.out.split("loss ")[1].split(" on record")[0].split(", ")
    assert before == now
    shown = json.loads(desk.start("shadho-celery", "show", "asks", "--json").wait(60).out)
    assert sorted(shown["subspaces"]) == ["kind=deep", "kind=flat"]
    assert sum(each["complete"] for each in shown["subspaces"].values()) == 24
