"""Conversion of charts to JSON of a limited size, for the scripts of a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from shadho_celery.charts.chart import Cell, Chart, Mark, Series, thin_points, thin_rows
from shadho_celery.charts.study import Figure
from shadho_celery.core.checks import one_line

#: maximum number of bytes of a page's data
MOST_BYTES = 2_000_000
#: maximum number of characters of most texts, and significant digits of a number that is drawn
MOST_CHARACTERS, DIGITS = 300, 7
#: maximum number of characters of a chart's note, which may be longer because its sentences are our own
MOST_OF_NOTE = 1000
#: numbers above this, such as times since the epoch, are rounded to three decimals instead of DIGITS digits
_LARGE = 1e6
#: a chart with fewer marks is not halved again: it is left out
_LEAST_MARKS = 50


def packed(chart: Chart) -> dict[str, Any]:
    """Return a chart as plain values for JSON. Texts are short and without control characters, numbers are rounded."""
    found: dict[str, Any] = _plain(msgspec.to_builtins(chart, str_keys=True))
    return {**found, "note": one_line(chart.note, MOST_OF_NOTE)}


def encoded(figures: Iterable[Figure], classes: Sequence[str], most: int = MOST_BYTES) -> bytes:
    """Return figures as JSON of at most `most` bytes. It has no character <, so it can be put into HTML.

    While it is too large, the chart with the most bytes is reduced to half of its marks. `classes` are the names of the
    compute classes in the order of their colours.
    """
    shown = [*figures]
    charts = {(i, j): chart for i, figure in enumerate(shown) for j, (_, chart) in enumerate(figure.charts)}
    marks = {place: len(chart) for place, chart in charts.items()}
    parts = {place: _json(packed(chart)) for place, chart in charts.items()}
    while True:
        found = _json(
            {
                "classes": _plain(classes),
                "figures": [
                    {
                        "section": figure.section,
                        "choice": figure.choice,
                        "charts": [
                            (_plain(name), msgspec.Raw(parts[i, j])) for j, (name, _) in enumerate(figure.charts)
                        ],
                    }
                    for i, figure in enumerate(shown)
                ],
            }
        )
        if len(found) <= most or not any(marks.values()):
            return found
        place = max((place for place in marks if marks[place]), key=lambda each: len(parts[each]))
        marks[place] = marks[place] // 2 if marks[place] >= _LEAST_MARKS else 0
        parts[place] = _json(packed(reduced(charts[place], marks[place])))


def reduced(chart: Chart, most: int) -> Chart:
    """Return a chart with about `most` of its marks; an empty one if `most` is 0."""
    if not most:
        return replace(chart, series=(), note="", empty="This chart is too large for the page.")
    share = most / len(chart)
    series = [_thinned(each, max(2, math.ceil(len(each) * share))) for each in chart.series]
    note = f"{chart.note} This page has about {most:,} of the {len(chart):,} marks.".strip()
    return replace(chart, series=series, note=note)


def _thinned(series: Series, most: int) -> Series:
    # The series "idle" of a timeline has one entry for each row, so it is never reduced.
    if len(series) <= most or series.colour == "idle":
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
