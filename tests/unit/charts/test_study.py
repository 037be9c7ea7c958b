"""Columns that are read from a store, and the charts of a study by name."""

from __future__ import annotations

import math
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hyperopt import hp
from services.columns import attempts

import shadho_celery
from shadho_celery.charts.chart import MOST
from shadho_celery.charts.columns import (
    AttemptColumns,
    Depth,
    GrowingTrials,
    TrialColumns,
    names_of,
    read_attempts,
    read_trials,
)
from shadho_celery.charts.losses import failures, on_front
from shadho_celery.charts.study import CHARTS, chart_by_name
from shadho_celery.errors import UsageError
from shadho_celery.program.recorded import load_study
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import given

STORE = "sqlite:///shadho.db"
SPACE = {
    "rate": hp.loguniform("rate", -5, 0),
    "model": hp.choice("model", [{"kind": "tree"}, {"kind": "net", "depth": hp.quniform("depth", 1, 4, 1)}]),
}
NAMES = names_of(Depth.PARAMS)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a store with the study `first`."""
    path = tmp_path_factory.mktemp("recorded") / "shadho.db"
    store = f"sqlite:///{path}"
    shadho_celery.minimize(objective, SPACE, trials=40, seed=0, store=store, study="first", sampler="random")
    return path


@pytest.fixture
def study(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StudyResults:
    """The study in a copy of the store, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(recorded, tmp_path)
    return load_study(STORE, "first")


def objective(values: dict[str, Any], context: Any) -> float:
    context.report(1, values["rate"])
    if values["rate"] > 0.5:
        raise ArithmeticError(f"{values['rate']} is too fast")
    return float(values["rate"])


class Read:
    """A source that has read its study."""

    def __init__(self, study: StudyResults, found: AttemptColumns | None = None) -> None:
        self.study = study
        self._attempts = found

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        return read_trials(self.study)

    def attempts(self) -> AttemptColumns:
        return self._attempts or read_attempts(self.study, 0.0)


def test_columns_have_the_facts_of_the_trials(study: StudyResults) -> None:
    found = read_trials(study)
    assert len(found) == 40
    for place, trial in enumerate(study.trials):
        assert found.number[place] == trial.number
        assert found.state[place] == trial.state
        assert found.subspace[place] == trial.subspace
        assert found.sampler[place] == trial.sampler
        assert (
            found.loss[place] == (math.nan if trial.loss is None else pytest.approx(trial.loss)) or trial.loss is None
        )
        assert found.seconds[place] == trial.seconds or trial.seconds is None
        assert found.finished_at[place] == trial.finished_at
        for label, column in found.labels.items():
            assert column.is_active[place] == (label in trial.params)
            assert not column.is_active[place] or column.values[place] == trial.params[label]
    assert found.labels["rate"].is_log
    assert len(found.labels["model"].options) == 2


def test_failures_are_counted_by_the_kinds_of_the_command_line(study: StudyResults) -> None:
    """Failures of one line of code are one kind, whatever their messages."""
    [common] = study.read_report().failures
    chart = failures(Read(study).trials())
    assert len({name for name, _ in read_trials(study).failure.places()}) == common.trials > 1
    assert (chart.series, chart.empty) == ((), f"Trial {common.first} has the traceback."), "one bar says nothing"
    assert chart.title == (
        f"{common.trials} of 40 trials failed, all of them like trial {common.first}: {common.failure}"
    )


def test_the_ranking_is_that_of_the_best_trial(study: StudyResults) -> None:
    found = read_trials(study)
    merits = [trial.merit for trial in study.trials]
    assert found.number[found.ranking].tolist() == sorted(range(40), key=lambda number: (merits[number], number))
    assert found.ranking[0] == found.best == study.best.number


def test_the_options_of_a_choice_have_the_names_that_tables_show(study: StudyResults) -> None:
    shown = {trial.params["model"]: str(study.shown(trial)["model"]) for trial in study.trials}
    assert read_trials(study).labels["model"].options == [shown[0], shown[1]] == ["tree", "net"]


def test_options_that_are_dicts_or_tuples_have_the_short_form_of_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it makes two of them alike. Words of options, and numbers, are as in tables."""
    monkeypatch.chdir(tmp_path)
    rate = hp.uniform("rate", 0, 1)
    options = [{"type": "svm", "rate": rate}, {"type": "svm", "m": 2.0}, (1, 0.123456789), {"type": "tree", "m": 1}]
    space = {
        "model": hp.choice("model", options),
        "alike": hp.choice("alike", [(0.123456789, 1), (0.1234567891, 1), ["a\nb"]]),
        "width": hp.choice("width", [16, 32.5]),
    }
    shadho_celery.minimize(lambda _: 0.0, space, trials=40, seed=0, sampler="random", store="sqlite:///s.db", study="s")
    study = load_study("sqlite:///s.db", "s")
    labels = read_trials(study).labels
    assert labels["model"].options == ["{rate: ..., type: svm}", "{m: 2, type: svm}", "(1, 0.12346)", "tree"]
    assert labels["alike"].options == ["(0.123456789, 1)", "(0.1234567891, 1)", "(a b)"]
    assert labels["width"].options == ["16", "32.5"]
    first = next(trial for trial in study.trials if trial.params["model"] == 1)
    assert "model: {m: 2, type: svm}" in given(first)


def test_a_loss_to_maximise_has_the_objectives_own_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shadho_celery.minimize(
        lambda values: {"losses": {"accuracy": values["rate"]}},
        SPACE,
        objectives={"accuracy": "maximize"},
        trials=10,
        seed=0,
        store=STORE,
        study="max",
    )
    study = load_study(STORE, "max")
    found = read_trials(study)
    assert found.is_maximized
    assert found.loss.tolist() == [trial.params["rate"] for trial in study.trials]
    assert found.loss[found.ranking[0]] == max(found.loss)


def test_columns_that_grow_are_those_that_are_read_at_once(study: StudyResults) -> None:
    growing = GrowingTrials(study)
    rows = [row for block in study.rows_of_trials(NAMES) for row in block]
    order = np.random.default_rng(0).permutation(len(rows))
    growing.put(([rows[place] for place in order[start : start + 7]] for start in range(0, len(rows), 7)), NAMES)
    growing.put([rows[:5]], NAMES)
    made, whole = growing.columns(), read_trials(study)
    assert made.number.tolist() == whole.number.tolist()
    np.testing.assert_array_equal(made.loss, whole.loss)
    assert [made.subspace[place] for place in range(40)] == [whole.subspace[place] for place in range(40)]
    for label in whole.labels:
        np.testing.assert_array_equal(made.labels[label].values, whole.labels[label].values)


@pytest.mark.parametrize(
    "name", ["loss", "seconds", "rung", "origin", "params", "losses", "state", "subspace", "error"]
)
def test_a_value_of_a_wrong_type_counts_as_missing_and_hides_nothing_else(study: StudyResults, name: str) -> None:
    with closing(sqlite3.connect("shadho.db")) as database:
        for number, value in enumerate(["'text'", "-1", "x'00ff'", "1e999", "''", "9e18"]):
            database.execute(f"UPDATE trials SET {name} = {value} WHERE number = {number}")
        database.commit()
    assert len(read_trials(study)) == 40
    for chart in ("history", "importance", "failures", "parallel", "throughput"):
        json = msgspec.json.encode(chart_by_name(Read(study), chart, {}))
        assert msgspec.json.decode(json)["name"]


def test_every_chart_of_a_study_can_be_asked_for_by_its_name(study: StudyResults) -> None:
    source = Read(study, attempts([{"started_at": 0.0, "ended_at": 1.0}]))
    asked: dict[str, Mapping[str, str]] = {
        "history": {"along": "seconds"},
        "slice": {"label": "rate"},
        "why_here": {"number": "0", "attempt": "1"},
        "learning_curve": {"number": "0"},
    }
    for name in CHARTS:
        chart = chart_by_name(source, name, asked.get(name, {}))
        assert chart.title
        assert len(chart) <= MOST
        assert bool(chart.empty) == (not len(chart))


@pytest.mark.parametrize(
    ("name", "asked", "line"),
    [
        ("nothing", {}, "there is no chart 'nothing'; charts: contour, curves"),
        ("history", {"along": "miles"}, "the history is along trials or seconds, not 'miles'"),
        ("history", {"color": "red"}, "chart history has no argument 'color'"),
        ("slice", {}, "chart slice needs label"),
        ("slice", {"label": "x"}, "the study has no param 'x'"),
        ("learning_curve", {"number": "first"}, "number='first' is not of type int"),
        ("why_here", {"number": "999"}, "has no trial 999"),
        ("learning_curve", {"number": "999"}, "has no trial 999"),
        ("why_here", {"number": "0", "attempt": "9"}, "the store has no attempt 9 of trial 0"),
    ],
)
def test_a_bad_question_is_refused_in_one_line(
    study: StudyResults, name: str, asked: Mapping[str, str], line: str
) -> None:
    with pytest.raises(UsageError) as refused:
        chart_by_name(Read(study), name, asked)
    assert line in str(refused.value)


def test_a_label_that_no_trial_has_yet_has_an_empty_slice(study: StudyResults) -> None:
    assert study.space.keys() >= {"rate", "depth"}
    with closing(sqlite3.connect("shadho.db")) as database, database:
        database.execute("UPDATE trials SET params = '{\"rate\": 0.1}'")
    assert chart_by_name(Read(study), "slice", {"label": "depth"}).empty


def test_a_label_whose_values_were_rounded_to_zero_has_no_logarithmic_axis() -> None:
    store, space = (
        "sqlite:///:memory:",
        {"size": hp.qloguniform("size", -5, 1, 1), "rate": hp.loguniform("rate", -5, 0)},
    )
    study = shadho_celery.minimize(lambda values: float(values["rate"]), space, trials=30, seed=0, store=store)
    labels = read_trials(study).labels
    assert 0.0 in labels["size"].values
    assert not labels["size"].is_log
    assert labels["rate"].is_log


def test_the_front_of_the_columns_is_that_of_the_study() -> None:
    def several(values: dict[str, float]) -> dict[str, Any]:
        first, second = round(values["x"], 1), round(values["y"], 1)
        losses = {"a": first, "b": first * second, "c": second}
        return {"losses": losses, "constraints": {"room": 0.3 - values["y"]}}

    space = {"x": hp.uniform("x", 0, 1), "y": hp.uniform("y", 0, 1)}
    for names in ({"a": "minimize", "b": "maximize"}, {"a": "minimize", "b": "maximize", "c": "maximize"}):

        def objective(values: dict[str, float], names: dict[str, str] = names) -> dict[str, Any]:
            found = several(values)
            return found | {"losses": {name: found["losses"][name] for name in names}}

        options = {"trials": 60, "seed": 0, "store": "sqlite:///:memory:", "objectives": names, "sampler": "random"}
        study = shadho_celery.minimize(objective, space, **options)
        front = [trial.number for trial in study.front]
        assert len(front) > 1
        assert on_front(read_trials(study)) == front


def test_nothing_runs_after_the_last_record_of_a_study_that_was_interrupted(study: StudyResults) -> None:
    records, later = study.records, 1e10
    last = max(moment for moment in records.attempts()["ended_at"] if moment is not None)
    with closing(sqlite3.connect("shadho.db")) as database, database:
        database.execute("UPDATE attempts SET ended_at = NULL, end = NULL WHERE number = 0")
        database.execute("UPDATE sessions SET until = NULL, reason = NULL")
    found = read_attempts(study, later, is_running=False)
    assert last - 60 < found.until[0] <= found.now <= last + 60
    assert read_attempts(study, later).until[0] == later
