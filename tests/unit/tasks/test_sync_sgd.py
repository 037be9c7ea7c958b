"""A gang learns digits, and one process recomputes what it has learned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shadho_celery.objective.context import LocalContext
from shadho_celery.placement.widths import make_width, widest
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from tasks import sync_sgd

pytestmark = pytest.mark.timeout(180)


@pytest.mark.slow
def test_digits_are_learned_and_the_training_is_recomputed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_sgd, "SETTINGS", replace(sync_sgd.SETTINGS, steps=120, accuracy=0.9))
    reports: list[int] = []
    context = LocalContext(checkpoints=tmp_path, on_report=lambda step, loss: reports.append(step))
    result = sync_sgd.objective({"learning_rate": 0.1, "replicas": 2, "backups": 1}, context)
    assert result["accuracy"] >= 0.9
    assert result["loss"] == result["training_seconds"]
    assert result["replay_difference"] < 1e-6
    assert result["backups_came"] in ([], [2])
    assert reports
    assert reports[-1] == result["steps"] < 120, "the training ends at its goal"


@pytest.mark.slow
def test_a_training_that_does_not_reach_the_accuracy_counts_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_sgd, "SETTINGS", replace(sync_sgd.SETTINGS, steps=10))
    params = {"learning_rate": 1e-4, "replicas": 1, "backups": 0}
    result = sync_sgd.objective(params, LocalContext(checkpoints=tmp_path))
    assert result["steps"] == 10
    assert result["loss"] == pytest.approx(result["training_seconds"] * (1 - result["accuracy"]) / 0.05)


def test_a_trial_takes_a_slot_for_each_replica_and_backup() -> None:
    space = compile_space(sync_sgd.SPACE)
    subspaces = split(space)
    assert len(subspaces) == 1
    assert widest(make_width(sync_sgd.slots, subspaces), subspaces) == 4
