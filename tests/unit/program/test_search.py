"""What a study on workers cannot have is refused before anything starts."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.cases import cases

from shadho_celery import minimize
from shadho_celery.errors import UsageError

STUDY = """
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
def objective(params): return params["x"]
"""
SPACE = {"x": hp.uniform("x", 0, 1)}
LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def in_a_folder_with_a_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("CELERY_BROKER_URL", "SHADHO_REDIS_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "refused_study.py").write_text(STUDY)


@cases(
    "given, about",
    [
        ({"workers": {"cpu": 0}}, "workers: cpu is 0; give a whole number from 1"),
        ({"workers": {"a,b": 1}}, "workers: 'a,b' is no name of a compute class"),
        ({"workers": {"cpu": True}}, "workers: cpu is True; give a whole number"),
        ({"workers": "4"}, "give a number, or slots by class"),
        ({"workers": 0}, "is 0; give a whole number from 1"),
        ({"n_jobs": -1}, "is -1; give a whole number from 1"),
        ({"n_jobs": 1, "workers": 1}, "n_jobs is another name of workers"),
        ({"workers": {"cpu": 1}, "redis": "redis://nowhere"}, "workers are for this machine alone"),
        ({"workers": {"cpu": 1}, "fidelity": {"least": 1, "most": 3}}, "fidelity cannot be passed"),
        ({"workers": {"cpu": 1}, "sampler": lambda *_: None}, "a sampler of your own cannot be passed"),
        ({"space": SPACE}, "has its own SPACE"),
        ({"workers": {"cpu": 1}, "enqueue": [{"y": 1}]}, "point 0: there is no label 'y'; known are x"),
        ({"trials": 0}, "trials: 0 is not allowed"),
        ({"store": None}, "store: None is not allowed"),
        ({"study": 3}, "study: 3 is not allowed"),
        ({"sampler": "oracle"}, "no sampler 'oracle'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(given: dict[str, Any], about: str) -> None:
    with pytest.raises(UsageError, match=about):
        minimize("refused_study", **{"trials": 1, "store": "sqlite:///s.db", **given})
    assert not Path("s.db").exists()
    assert not Path(".shadho").exists()


def test_a_missing_study_file_is_refused() -> None:
    with pytest.raises(UsageError, match="no module missing here"):
        minimize("missing", trials=1)


@cases(
    "function, given, about",
    [
        (lambda: 0.0, {}, "the objective takes no argument"),
        (lambda values: LOCK, {}, "its global LOCK is a _thread.lock"),
        (lambda values: 0.0, {"trials": 0}, "trials: 0 is not allowed"),
        (lambda values: 0.0, {"workers": None, "redis": "redis://nowhere"}, "only signed"),
        (lambda values: 0.0, {"workers": 0}, "is 0; give a whole number from 1"),
        (lambda values: 0.0, {"sampler": "oracle"}, "no sampler 'oracle'"),
        (lambda values: 0.0, {"fidelity": {"least": 3, "most": 1}}, "most"),
    ],
)
def test_a_function_by_value_is_refused_before_anything_starts(
    function: Any, given: dict[str, Any], about: str
) -> None:
    with pytest.raises(UsageError, match=about):
        minimize(function, SPACE, **{"workers": 1, "trials": 1, **given})
    assert not Path(".shadho").exists()


def test_workers_are_for_the_main_thread() -> None:
    said: list[str] = []

    def run() -> None:
        with pytest.raises(UsageError) as refused:
            minimize("refused_study", trials=1, workers={"cpu": 1})
        said.append(str(refused.value))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert "main thread" in said[0]


def test_what_an_objective_changes_in_a_constant_is_neither_in_later_trials_nor_in_the_best_values() -> None:
    seen = []

    def objective(params: Any) -> float:
        seen.append(params["w"].tolist())
        params["w"] *= 10
        return float(params["x"])

    found = minimize(objective, {**SPACE, "w": np.ones(2)}, trials=3)
    assert seen == [[1, 1]] * 3
    assert found.best.values["w"].tolist() == [1, 1]
