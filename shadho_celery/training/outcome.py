"""What is told of a training when it has ended."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from shadho_celery.training.backups import Prediction, choose
from shadho_celery.training.coordinator import CANCEL_SECONDS, Coordinator
from shadho_celery.training.report import Report
from shadho_celery.training.run import Run
from shadho_celery.training.strategies import Strategy, Sync

logger = logging.getLogger(__name__)

#: the report's chart of step time against b goes so far at least
CHART_TO = 4


def report_of(
    run: Run,
    strategy: Strategy,
    coordinator: Coordinator | None = None,
    *,
    moved: tuple[int, int] = (0, 0),
    turned_away: Mapping[str, int] | None = None,
) -> Report:
    """Return the report, and log what it warns of; `moved` are the bytes that came and went."""
    run.log.refused.update(turned_away or {})
    report = Report(
        replicas=strategy.replicas,
        backups=coordinator.backups if coordinator else 0,
        log=run.log,
        loss=run.loss,
        bytes_in=moved[0],
        bytes_out=moved[1],
        predictions=_predictions(strategy, coordinator),
    )
    for text in report.warnings():
        logger.warning("%s", text)
    return report


def _predictions(strategy: Strategy, coordinator: Coordinator | None) -> Sequence[Prediction]:
    """Step time by b, as b was chosen by or, where it was given, as the recorded times say now."""
    if coordinator is None or not isinstance(strategy, Sync):
        return ()
    tuner = coordinator.tuner
    if tuner.choice is not None:
        return tuner.choice.predictions
    law = tuner.times.law()
    if law is None:
        return ()
    cancel = CANCEL_SECONDS if strategy.cancel else None
    most = max(CHART_TO, coordinator.backups)
    return choose(law, replicas=strategy.replicas, most=most, cancel_seconds=cancel).predictions
