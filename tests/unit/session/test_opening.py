"""A study that is opened again tells what differs from the run before."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hyperopt import hp

from shadho_celery.core.users import USER
from shadho_celery.errors import UsageError
from shadho_celery.objective import study_file
from shadho_celery.session.opening import Opening, Request, changes
from shadho_celery.session.session import Options, Session
from shadho_celery.store.sql import SqlStore

STUDY = """
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
def objective(params): return params["x"]
"""


@pytest.mark.parametrize("stated", [{"fidelity": {"laest": 1, "most": 3}}, {"pruner": {"name": "asha"}}])
def test_a_wrong_key_within_a_setting_is_named_with_the_study_file(stated: dict[str, Any]) -> None:
    [(name, _)] = stated.items()
    with pytest.raises(UsageError, match=rf"^my_study: {name}\.(laest: there is no such key|how: it is missing)"):
        Opening(Request(space=hp.uniform("x", 0, 1), module="my_study", stated=stated))
    with pytest.raises(UsageError, match=rf"^{name}\."):
        Opening(Request(space=hp.uniform("x", 0, 1), module="my_study", given=stated))


@pytest.mark.parametrize(
    ("before", "now", "line"),
    [
        ("auto", "auto", None),
        ("auto", "cma", "sampler cma from now on, auto until now: it learns from the 7 trials so far"),
        (None, "tpe", "sampler tpe from now on, of its own until now: it learns from the 7 trials so far"),
    ],
)
def test_another_sampler_than_before_is_said(before: str | None, now: str, line: str | None) -> None:
    assert changes({"sampler": before}, {"sampler": now}, 7) == [line] * (line is not None)


def test_other_budgets_than_before_are_said_where_there_are_trials() -> None:
    before = {"sampler": "auto", "fidelity": {"least": 1, "most": 27, "how": "hyperband"}}
    now = {"sampler": "auto", "fidelity": {"least": 1, "most": 81}}
    [line] = changes(before, now, 7)
    assert line == "budgets from now on: 1 to 81, eta 3, auto; until now: 1 to 27, eta 3, hyperband"
    assert changes(before, now, 0) == changes(before, before, 7) == []
    assert "from now on: none; until now: 1 to 27, eta 3" in changes(before, {"sampler": "auto"}, 7)[0]


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"fidelity": {"most": 9}}, {"fidelity": {"least": 1.0, "most": 9, "eta": 3, "how": "auto"}}),
        ({"rungs": {"least": 1, "most": 9}}, {"fidelity": {"most": 9, "how": "halving"}}),
        ({}, {"rungs": {"least": 1, "most": 9}}),
    ],
    ids=["defaults", "the same in other words", "not on record"],
)
def test_of_the_same_budgets_and_of_those_that_are_not_on_record_nothing_is_said(
    before: dict[str, Any], now: dict[str, Any]
) -> None:
    assert changes({"sampler": "auto", **before}, {"sampler": "auto", **now}, 7) == []


def test_a_resumed_study_needs_workers_as_wide_as_the_trials_of_its_earlier_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("wide_study.py").write_text(STUDY)
    file, names = study_file.load("wide_study"), {"store": "sqlite:///s.db", "name": "s"}
    with closing(Opening(Request(space=file.space, module=file.module, given={"slots": 4}, **names)).open()):
        pass
    options = Options(study=file.module, resume=True, workers={"cpu": 1}, **names)  # type: ignore[arg-type]
    with (
        pytest.raises(UsageError, match=r"a trial 4 slots of one class.*--workers cpu=4"),
        Session(options, file, print),
    ):
        pass


def test_a_study_that_this_user_may_not_resume_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(USER, "anna")

    def refuse(owner: str | None) -> None:
        raise UsageError(f"it belongs to {owner}")

    names: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/s.db", "name": "s", "space": hp.uniform("x", 0, 1)}
    with closing(Opening(Request(given={"trials": 3}, **names)).open(refuse)) as opened:
        before = opened.study.record
    with pytest.raises(UsageError, match="it belongs to anna"):
        Opening(Request(given={"trials": 9}, resume=True, **names)).open(refuse)
    with closing(SqlStore(names["store"], read_only=True)) as store:
        assert store.find("s") == before
