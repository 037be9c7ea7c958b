"""The figures of a page about one study, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from msgspec import Struct

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.losses import Along
from shadho_celery.charts.params import importances
from shadho_celery.pages.reading import StudyData

#: maximum number of labels whose slices are shown
SLICES = 12


class Figure(Struct, frozen=True, kw_only=True):
    """A place on a page, with one chart, or with several of which the reader chooses one by its name."""

    #: heading above this figure and its neighbours
    section: str
    #: pairs of name and chart
    charts: Sequence[tuple[str, Chart]]
    #: what the reader chooses, such as "param"; "" for one chart
    choice: str = ""


def figures_of(data: StudyData) -> list[Figure]:
    """Return the figures of a study. Charts of what the study does not have, such as budgets, are left out."""
    found = [*_search(data), *_machines(data), *_params(data), *_failures(data)]
    if data.trials().is_complete.any():
        return found
    # The others without marks say the same as the first one.
    return [found[0], *(each for each in found[1:] if not all(chart.empty for _, chart in each.charts))]


def _search(data: StudyData) -> Iterator[Figure]:
    charts, report, trials = data.charts, data.report, data.trials()
    history = [(along.value, charts.history(along.value)) for along in Along]
    yield Figure(section="Search", charts=history, choice="over")
    if len(report.objectives) > 1:
        yield _one("Search", charts.front())
        yield _one("Search", charts.hypervolume())
    if report.rungs:
        yield _one("Search", charts.rungs())
    curves = charts.curves()
    if not curves.empty:
        yield _one("Search", curves)
    if len(trials.sampler.names) > 1:
        yield _one("Search", charts.samplers())


def _machines(data: StudyData) -> Iterator[Figure]:
    charts = data.charts
    for chart in (
        charts.timeline(),
        charts.throughput(),
        charts.one_more_worker(),
        charts.predictions(),
        charts.waiting(),
    ):
        yield _one("Machines", chart)


def _params(data: StudyData) -> Iterator[Figure]:
    charts = data.charts
    yield _one("Params", charts.importance())
    slices = [
        (each.label, charts.slice(each.label)) for each in importances(data.trials(), with_seconds=False)[:SLICES]
    ]
    if slices:
        yield Figure(section="Params", charts=slices, choice="param")
    yield _one("Params", charts.parallel())


def _failures(data: StudyData) -> Iterator[Figure]:
    found = [data.charts.failures(), data.charts.failures_by_label()]
    yield from (_one("Failures", chart) for chart in found if not chart.empty)


def _one(section: str, chart: Chart) -> Figure:
    return Figure(section=section, charts=[(chart.name, chart)])
