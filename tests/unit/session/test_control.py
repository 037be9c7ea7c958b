"""What is said of a study that cannot be steered."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp

import shadho_celery
from shadho_celery import Control, load_study
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls


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
