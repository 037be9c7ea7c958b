"""All charts of one study, by name and by the places where pages show them."""

from __future__ import annotations

from collections.abc import Mapping

# Importing the modules registers their charts.
from shadho_celery.charts import failures, fronts, losses, machines, params, rungs, timeline  # noqa: F401
from shadho_celery.charts.chart import Chart
from shadho_celery.charts.registry import CHARTS, SECTIONS, Source
from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError

__all__ = ["CHARTS", "ON_PAGES", "chart_by_name"]

#: the charts that pages show, in their order
ON_PAGES = sorted(
    (chart for chart in CHARTS.values() if chart.section), key=lambda each: (SECTIONS.index(each.section), each.place)
)


def chart_by_name(source: Source, name: str, texts: Mapping[str, str]) -> Chart:
    """Return a chart by its name, with arguments as texts. Raises UsageError for an unknown or bad one."""
    if name not in CHARTS:
        raise UsageError(f"there is no chart {short(name)}; charts: {', '.join(sorted(CHARTS))}")
    arguments = CHARTS[name].read(texts)
    try:
        return CHARTS[name].draw(source, **arguments)
    except ValueError as error:
        raise UsageError(f"chart {name}: {error}") from None
