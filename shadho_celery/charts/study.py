"""All charts of a study: by name, in the order of a page, and as JSON of a limited size for the scripts of a page.

`StudyData` has the data from which charts are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace

# Importing the modules registers their charts.
from shadho_celery.charts import losses, machines, params, timeline  # noqa: F401
from shadho_celery.charts.chart import Cell, Chart, Mark, Series, thin_points, thin_rows
from shadho_celery.charts.columns import AttemptColumns, Depth, TrialColumns, read_attempts, read_trials
from shadho_celery.charts.registry import CHARTS, SECTIONS, Source
from shadho_celery.core.checks import one_line, short
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
    return CHARTS[name].draw(source, **CHARTS[name].read(texts))


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
    """Part of a page with one chart, or with several charts from which the reader chooses one."""

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
    return found


#: maximum number of bytes of a page's data
MOST_BYTES = 2_000_000
#: maximum number of characters of most texts, and significant digits of a number that is drawn
MOST_CHARACTERS, DIGITS = 300, 7
#: maximum number of characters of a chart's notes. They may be longer than other texts, because no stranger has written
#: them
MOST_OF_NOTE = 1000
#: numbers above this, such as times since the epoch, are rounded to three decimals instead of DIGITS digits
_LARGE = 1e6
#: a chart with fewer marks than this is not halved again, but replaced by a sentence
_LEAST_MARKS = 50


def packed(chart: Chart) -> dict[str, Any]:
    """Return a chart as plain values for JSON. Texts are cut, control characters escaped, and numbers rounded."""
    found: dict[str, Any] = _plain(msgspec.to_builtins(chart, str_keys=True))
    return {**found, **{name: one_line(getattr(chart, name), MOST_OF_NOTE) for name in ("note", "how")}}


def encoded(figures: Sequence[Figure], classes: Sequence[str], most: int = MOST_BYTES) -> bytes:
    """Return figures as JSON of at most `most` bytes. It has no character <, so it can be put into HTML.

    While the JSON is too large, the chart with the most bytes is reduced to half of its marks. `classes` are the names
    of the compute classes in the order of their colours.
    """
    shown: list[dict[str, Any]] = [
        {
            "section": figure.section,
            "choice": figure.choice,
            "charts": [[_plain(name), msgspec.Raw(_json(packed(chart)))] for name, chart in figure.charts],
        }
        for figure in figures
    ]
    charts = [chart for figure in figures for _, chart in figure.charts]
    parts = [part for figure in shown for part in figure["charts"]]
    marks = [*map(len, charts)]
    while len(found := _json({"classes": _plain(classes), "figures": shown})) > most and any(marks):
        place = max(np.flatnonzero(marks).tolist(), key=lambda each: len(parts[each][1]))
        marks[place] = marks[place] // 2 if marks[place] >= _LEAST_MARKS else 0
        parts[place][1] = msgspec.Raw(_json(packed(reduced(charts[place], marks[place]))))
    return found


def reduced(chart: Chart, most: int) -> Chart:
    """Return a chart with about `most` of its marks; an empty one if `most` is 0."""
    if not most:
        return replace(chart, series=(), note="", empty="This chart is too large for the page.")
    share = most / len(chart)
    series = [_thinned(each, max(2, math.ceil(len(each) * share))) for each in chart.series]
    note = f"{chart.note} This page has about {most:,} of the {len(chart):,} marks.".strip()
    return replace(chart, series=series, note=note)


def _thinned(series: Series, most: int) -> Series:
    # The series "idle" of a timeline has one entry for each row, and a grid has no gaps, so they are never reduced.
    if len(series) <= most or series.colour == "idle" or series.mark is Mark.CELLS:
        return series
    x, y = series.columns.get("x"), series.columns.get("y")
    if series.mark is Mark.POINTS and x and y and all(isinstance(value, (int, float)) for value in y):
        kept, _ = thin_points(np.array(x, float), np.array(y, float), most)
    else:
        kept, _ = thin_rows(len(series), most)
    columns = {name: [column[place] for place in kept.tolist()] for name, column in series.columns.items()}
    return replace(series, columns=columns)


def _plain(value: Any) -> Any:
    if isinstance(value, str):
        return one_line(value, MOST_CHARACTERS)
    if isinstance(value, float):
        return _rounded(value)
    if isinstance(value, dict):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value


def _rounded(value: float) -> Cell:
    if not math.isfinite(value):
        return None
    return round(value, 3) if _LARGE < abs(value) < 1e12 else float(f"{value:.{DIGITS}g}")


def _json(value: Any) -> bytes:
    return msgspec.json.encode(value).replace(b"<", b"\\u003c")
