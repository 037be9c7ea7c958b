"""What is said of a study that cannot be steered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp

import shadho_celery
from shadho_celery import Control, load_study
from shadho_celery.core.records import Note
from shadho_celery.core.users import USER
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.store.sql import SqlStore


def test_an_ended_study_is_named_where_no_fleet_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it is asked for by its name or, as by the dashboard, by its key."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(urls.BROKER, raising=False)
    monkeypatch.delenv(urls.REDIS, raising=False)
    store = f"sqlite:///{tmp_path}/shadho.db"
    space = {"rate": hp.uniform("rate", 0, 1)}
    shadho_celery.minimize(lambda values: values["rate"], space, trials=1, seed=0, store=store, study="mine")
    for name in ("mine", load_study(store, "mine").key):
        with pytest.raises(UsageError, match="study mine does not run: it has ended or was interrupted"):
            Control(store=store).pause(name)


def test_a_note_on_a_study_that_does_not_run_is_recorded_and_leaves_its_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name or its key. Its record, lock and fencing number stay, but pages notice a change."""
    monkeypatch.chdir(tmp_path)
    for name in (urls.BROKER, urls.REDIS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(USER, "anna")
    store = f"sqlite:///{tmp_path}/shadho.db"
    study = shadho_celery.minimize(lambda x: x, hp.uniform("x", 0, 1), trials=2, seed=0, store=store, study="mine")
    before, sql = study.change, SqlStore(store)
    record, fence = sql.find("mine"), sql.fence(study.key)
    control = Control(store=store)
    assert control.note("mine", "new data").text == "noted"
    assert control.act(Note("diverges", 1), study.key).is_done
    assert [(each["by"], each["trial"], each["text"]) for each in study.notes()] == [
        ("anna", None, "new data"),
        ("anna", 1, "diverges"),
    ]
    assert [each["text"] for each in study.notes(1)] == ["diverges"]
    assert (study.change, study.state) == (before + 2, "ended")
    assert (sql.find("mine"), sql.fence(study.key)) == (record, fence)
    for text, trial, said in (
        ("x", 2, "has no trial 2"),
        (" \n", None, r"note\.text: .*1 to 2000"),
        ("x" * 2001, 0, "2000"),
    ):
        with pytest.raises(UsageError, match=said):
            control.note("mine", text, trial)
    with study_of(store) as running, pytest.raises(ServiceError, match="runs on"):
        control.note(running.name, "late")
    with pytest.raises(ServiceError, match="there is no study named 'other'"):
        control.note("other", "late")
    assert len(study.notes()) == 2


def study_of(store: str) -> shadho_celery.Study:
    """Return the study of a store, which this process then runs."""
    return shadho_celery.Study(hp.uniform("x", 0, 1), store=store, study="mine", resume=True)


@pytest.mark.parametrize("number", [-1, 2**53, 10**30, "3", None, True, 1.5])
def test_a_number_that_no_trial_has_is_refused_before_it_is_sent(number: Any) -> None:
    with pytest.raises(UsageError, match=r"^trial\.number: "):
        Control(redis="redis://127.0.0.1:1/0").cancel("mine", number)


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ({"rate": 0.5, "decay": math.nan}, "point 1: 'decay': nan cannot be written as JSON"),
        ({"rate": [0.5, math.inf]}, "point 1: 'rate': [0.5, inf] cannot be written as JSON"),
        ({"rate\nline": {1}}, r"point 1: 'rate\nline': {1} cannot be written as JSON"),
        (math.nan, "point 1: nan cannot be written as JSON"),
    ],
)
def test_a_value_of_a_known_point_that_cannot_be_sent_is_named_with_its_label(point: Any, said: str) -> None:
    with pytest.raises(UsageError) as error:
        Control(redis="redis://127.0.0.1:1/0").enqueue("mine", [{"rate": 0.1}, point])
    assert str(error.value) == said


@pytest.mark.parametrize("name", [None, 3, b"mine"])
def test_a_name_that_is_no_text_is_refused(name: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(urls.REDIS, raising=False)
    with pytest.raises(UsageError, match="a study's name is a text, not"):
        Control().stop(name)
