"""Report: figures of a training, and warnings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping

import pytest

from shadho_celery.training.report import Log, Report, Step


def made(*, refused: Mapping[str, int] | None = None) -> Report:
    log = Log(
        replicas=2,
        places=3,
        steps=[
            Step(step=n, accepted=(0, 1), loss=1.0, seconds=each)
            for n, each in enumerate([0.01] * 50 + [0.05] * 49 + [1.55])
        ],
        joined=Counter({0: 1, 1: 2, 2: 1}),
        accepted=Counter({0: 100, 1: 90, 2: 10}),
        late=Counter({1: 10, 2: 40}),
        cancelled=Counter({2: 50}),
        refused=Counter(refused or {}),
        notes=["replica 2 left at step 50: closed"],
    )
    return Report(
        backups=1,
        log=log,
        loss=0.25,
        predictions=(0.4, 0.1),
    )


def test_a_replica_whose_gradients_hardly_count_is_warned_of() -> None:
    assert made().warnings() == ["replica 2: only 10% of its gradients were used; it is too slow for this training"]


def test_the_backups_that_came_are_named_and_absent_ones_are_warned_of() -> None:
    report = made()
    assert report.as_metrics()["backups_came"] == [2]
    report.log.places = 5
    assert report.warnings()[1].startswith("2 of 3 backups never came")
    del report.log.joined[2]
    assert report.as_metrics()["backups_came"] == []


def test_batches_that_never_counted_are_reported_and_warned_of_if_they_are_many() -> None:
    report = made()
    report.log.dropped_batches = 50
    assert report.as_metrics()["dropped_batches"] == 50
    assert report.warnings()[1].startswith("20% of the batches never counted")
    report.log.dropped_batches = 10
    assert len(report.warnings()) == 1


def test_the_staleness_is_the_mean_over_what_counted() -> None:
    report = made()
    assert report.as_metrics()["staleness"] == 0.0
    report.log.steps[0] = report.log.steps[0]._replace(staleness=7)
    report.log.steps[1] = report.log.steps[1]._replace(staleness=9, accepted=())
    assert report.staleness() == pytest.approx(7 / 99)


def test_the_metrics_are_json_and_hold_the_percentiles() -> None:
    metrics = json.loads(json.dumps(made().as_metrics(), allow_nan=False))
    assert metrics["step_seconds_p50"] == pytest.approx(0.03, abs=0.021)
    assert metrics["step_seconds_p90"] == pytest.approx(0.05)
    assert metrics["dropped_share"] == {"0": 0.0, "1": 0.1, "2": 0.9}
    assert metrics["step_seconds_by_backups"] == {"0": 0.4, "1": 0.1}
    assert len(metrics["notes"]) == 2


def test_a_training_without_a_step_has_a_report() -> None:
    empty = Report(backups=0, log=Log(replicas=2))
    assert empty.percentiles() == {}
    assert empty.as_metrics()["steps"] == 0
    json.dumps(empty.as_metrics(), allow_nan=False)
