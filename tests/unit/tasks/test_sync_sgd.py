"""A gang learns digits, and one process recomputes what it has learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shadho_celery.objective.context import LocalContext
from shadho_celery.scheduler.widths import make_width, widest
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from tasks import sync_sgd

pytestmark = pytest.mark.timeout(180)


def test_digits_are_learned_and_the_training_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_sgd, "SETTINGS", replace(sync_sgd.SETTINGS, steps=120))
    reports: list[int] = []
    context = LocalContext(checkpoints=tmp_path, on_report=lambda step, loss: reports.append(step))
    result = sync_sgd.objective({"learning_rate": 0.1, "replicas": 2, "backups": 1}, context)
    assert result["accuracy"] > 0.85
    assert result["steps"] == 120
    assert result["replay_difference"] < 1e-6
    assert reports
    assert reports[-1] == 120


def test_a_trial_takes_as_many_slots_as_it_has_replicas() -> None:
    space = compile_space(sync_sgd.SPACE)
    subspaces = split(space)
    assert len(subspaces) == 1
    assert widest(make_width(str(sync_sgd.STUDY["slots"]), subspaces), subspaces) == 3
