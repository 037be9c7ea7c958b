"""Base of the callbacks: reports to the trial, and the file of its checkpoint."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import short
from shadho_celery.core.files import replacing
from shadho_celery.errors import UsageError
from shadho_celery.objective import script
from shadho_celery.objective.context import CURRENT, Context, LocalContext


def _running() -> Context | None:
    """Return the context of the trial that runs here, in this process or as its command; None outside of a trial."""
    if (context := CURRENT.get()) is not None or script.REPORTS not in os.environ:
        return context
    # Ranks that a framework starts itself have the variables of the command, too.
    is_first = not int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0)
    reports: dict[str, Any] = {"on_report": script.report} if is_first else {}
    # A script does not know why it should stop, so it saves, as a preempted trial does.
    return LocalContext(checkpoints=os.environ[script.CHECKPOINT_DIR], preempted=script.should_stop, **reports)


class TrialCallback:
    """A callback that reports the metric named `metric` to a trial, and says when training should stop.

    The trial is that of `context`, or without this the one that runs here, also as the script of a command. Outside of
    a trial, a callback only warns.
    """

    #: name of the checkpoint in the trial's folder
    file = ""

    def __init__(self, metric: str, context: Context | None = None) -> None:
        self.metric, self.context = metric, context or _running()
        if self.context is None:
            warnings.warn("no trial runs here, so this callback does nothing; create it in the objective", stacklevel=2)

    @property
    def path(self) -> Path | None:
        """Path of the checkpoint; None outside of a trial."""
        return self.context.checkpoint_dir / self.file if self.context else None

    @property
    def checkpoint(self) -> Path | None:
        """Checkpoint of an earlier attempt, or of the trial that this one continues; None without one."""
        return self.path if self.path and self.path.exists() else None

    def saves(self, *, every_rank: bool = False) -> bool:
        """Return whether to save a checkpoint now. Only rank 0 of a trial does, unless `every_rank` takes part."""
        if self.context is None or self.context.is_copy:
            return False
        # A pruned trial has little time to return. If it has several slots, only the first one may know about it.
        is_pruned = self.context.slots == 1 and self.context.stop_reason == "stopped"
        return not is_pruned and (every_rank or not getattr(self.context, "rank", 0))

    def save(self, model: bytes) -> None:
        """Replace the checkpoint, completely or not at all, if this process saves one now."""
        if self.path and self.saves():
            with replacing(self.path) as file:
                file.write(model)

    def stops(self, step: int, metrics: Mapping[str, Any]) -> bool:
        """Report the metric at `step`, and return whether to stop. Raises UsageError if there is no such metric."""
        if self.context is None:
            return False
        if self.metric not in metrics:
            raise UsageError(f"no metric {short(self.metric)} was evaluated; there are: {', '.join(metrics) or 'none'}")
        self.context.report(step, float(metrics[self.metric]))
        return self.context.should_stop()
