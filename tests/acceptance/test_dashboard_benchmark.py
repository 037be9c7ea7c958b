"""The study of the dashboard's benchmark has the rows that a dashboard reads."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from acceptance.commands import ROOT

from shadho_celery.charts.study import StudyData
from shadho_celery.results.study import StudyResults
from shadho_celery.store.sql import SqlStore

TRIALS = 40


def test_its_trials_have_an_attempt_each_on_a_worker_of_their_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / "tests" / "benchmarks"), *sys.path])
    from dashboard import build_study

    path = tmp_path / "made.db"
    build_study(path, TRIALS)
    with closing(SqlStore(f"sqlite:///{path}", read_only=True)) as store:
        found = StudyData(StudyResults(store, *store.records())).attempts()
    assert sorted(found.number.tolist()) == [*range(TRIALS)]
    assert {*found.classes} == {session.compute_class for session in found.sessions}
    assert np.isfinite(found.ended_at - found.started_at).all()
