"""All that pages show of a study, read once."""

from __future__ import annotations

import time
from collections.abc import Set as AbstractSet
from functools import cached_property

from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns
from shadho_celery.charts.growing import read_attempts, read_trials
from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.results.report import StudyReport
from shadho_celery.results.study import StudyResults


class StudyData:
    """A study at the time when this was created. Each part is read when it is first used."""

    def __init__(self, study: StudyResults) -> None:
        self.study = study
        #: time of reading in seconds since the epoch
        self.now = time.time()

    def trials(self, depth: Depth = Depth.PARAMS) -> TrialColumns:
        """Return the trials as columns."""
        return self._trials

    def attempts(self) -> AttemptColumns:
        """Return the attempts and the workers as columns."""
        return self._attempts

    @cached_property
    def report(self) -> StudyReport:
        """The results as the command line shows them."""
        return self.study.read_report()

    @cached_property
    def classes(self) -> list[str]:
        """Names of the compute classes in the order of their colours."""
        return in_order_of_colours({*self.trials().compute_class.names, *self.attempts().classes})

    @cached_property
    def _trials(self) -> TrialColumns:
        return read_trials(self.study)

    @cached_property
    def _attempts(self) -> AttemptColumns:
        return read_attempts(self.study, self.now, is_running=self.study.running_on is not None)


def in_order_of_colours(classes: AbstractSet[str]) -> list[str]:
    """Return names of compute classes in the order of their colours.

    The default classes keep their places if any of them occurs, so that they have the same colours in all studies.
    """
    return [*(DEFAULT_CLASSES if classes & {*DEFAULT_CLASSES} else ()), *sorted(classes - {*DEFAULT_CLASSES})]
