"""The figures of a page about one study, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from shadho_celery.charts.chart import Chart
from shadho_celery.charts.study import ON_PAGES
from shadho_celery.pages.reading import StudyData


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
    # The others without marks say the same as the first one.
    return [found[0], *(each for each in found[1:] if not all(chart.empty for _, chart in each.charts))]
