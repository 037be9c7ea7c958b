"""All charts of a study, by name and in the order of a page, and the data from which they are made (`StudyData`)."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property

from msgspec import Struct

# Importing the modules registers their charts.
from shadho_celery.charts import losses, machines, params, timeline  # noqa: F401
from shadho_celery.charts.chart import Chart
from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns, read_attempts, read_trials
from shadho_celery.charts.registry import CHARTS, SECTIONS, Source
from shadho_celery.core.checks import short
from shadho_celery.core.hardware import DEFAULT_CLASSES
from shadho_celery.errors import UsageError
from shadho_celery.results.report import StudyReport
from shadho_celery.results.study import StudyResults

#: the charts that pages show, in their order
ON_PAGES = sorted(
    (chart for chart in CHARTS.values() if chart.section), key=lambda each: (SECTIONS.index(each.section), each.place)
)


def chart_by_name(source: Source, name: str, texts: Mapping[str, str]) -> Chart:
    """Return the chart called `name`, with arguments as texts. Raises UsageError if one of them is unknown or bad."""
    if name not in CHARTS:
        raise UsageError(f"there is no chart {short(name)}; charts: {', '.join(sorted(CHARTS))}")
    arguments = CHARTS[name].read(texts)
    try:
        return CHARTS[name].draw(source, **arguments)
    except ValueError as error:
        raise UsageError(f"chart {name}: {error}") from None


class StudyData:
    """The data of a study for charts and reports. Each part is read once, when it is first used."""

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
    """Return the names of compute classes in the order of their colours.

    If a default class occurs, all default classes come first, so that they have the same colours in all studies.
    """
    return [*(DEFAULT_CLASSES if classes & {*DEFAULT_CLASSES} else ()), *sorted(classes - {*DEFAULT_CLASSES})]


class Figure(Struct, frozen=True, kw_only=True):
    """A place on a page with one chart, or with several charts among which the reader chooses."""

    #: heading above this figure and its neighbours
    section: str
    #: pairs of name and chart
    charts: Sequence[tuple[str, Chart]]
    #: word for what the reader chooses, such as "param"; "" for one chart
    choice: str = ""


def figures_of(data: StudyData) -> list[Figure]:
    """Return the figures of a study. Charts that do not apply to it, such as rungs without budgets, are left out."""
    trials, found = data.trials(), []
    for each in ON_PAGES:
        charts = [(value, each.draw(data, value)) for value in each.choices(trials)]
        if not each.choice:
            chart = each.draw(data)
            charts = [(chart.name, chart)]
        if any(each.is_shown(trials, chart) for _, chart in charts):
            found.append(Figure(section=each.section, charts=charts, choice=each.choice))
    if trials.is_complete.any():
        return found
    # If no trial has completed, further empty charts would only repeat the sentence of the first one.
    return [found[0], *(each for each in found[1:] if not all(chart.empty for _, chart in each.charts))]
