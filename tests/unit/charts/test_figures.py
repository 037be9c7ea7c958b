"""Charts as JSON: limited, escaped, and without numbers that JSON does not have."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from services.cases import cases
from services.pictured import pictured

from shadho_celery.charts.chart import Axis, Cell, Chart, Mark, Series
from shadho_celery.charts.study import MOST_BYTES, Figure, encoded, figures_of, packed, reduced


def chart(count: int, mark: Mark = Mark.POINTS, name: str = "made", **columns: list[Cell]) -> Chart:
    found: dict[str, list[Cell]] = {"x": [*range(count)], "y": [1.0 / (1 + place) for place in range(count)], **columns}
    series = Series(name="cpu", mark=mark, colour="class cpu", columns=found)
    return Chart(name=name, title=name, axes=(Axis(name="x"), Axis(name="y")), series=[series])


def figure(*charts: Chart) -> Figure:
    return Figure(section="s", charts=[(each.name, each) for each in charts])


@pytest.mark.slow
def test_a_large_study_has_at_most_two_megabytes_and_says_which_marks_are_left_out(tmp_path: Path) -> None:
    data = pictured(f"sqlite:///{tmp_path}/made.db", 20_000, reports=False)
    figures = figures_of(data)
    assert len(encoded(figures, data.classes)) <= MOST_BYTES
    text = encoded(figures, data.classes, 200_000)
    assert len(text) <= 200_000
    small = json.loads(text)
    notes = [chart["note"] for figure in small["figures"] for _, chart in figure["charts"]]
    assert any("This page has about" in note for note in notes)
    empty = [chart["name"] for figure in small["figures"] for _, chart in figure["charts"] if not chart["series"]]
    assert empty == ["contour", "failures"], "a grid has no half, and all failures are of one kind"


def test_what_cannot_be_reduced_to_the_limit_is_left_out_with_a_sentence() -> None:
    long: list[Cell] = ["x" * 200] * 1000
    found = json.loads(encoded([figure(chart(1000, sampler=long))], [], 1000))
    assert found["figures"][0]["charts"][0][1]["empty"] == "This chart is too large for the page."


def test_reduced_points_keep_the_least_and_the_greatest_value() -> None:
    ys: list[Cell] = [math.sin(place) for place in range(1000)]
    ys[500], ys[700] = 99.0, -99.0
    found = reduced(chart(1000, y=ys), 100)
    assert len(found) <= 100
    assert {99.0, -99.0} <= {*found.series[0].columns["y"]}
    assert found.note == "This page has about 100 of the 1,000 marks."


@cases("mark", [Mark.LINE, Mark.STEPS, Mark.SPANS, Mark.POLYLINES])
def test_other_marks_are_reduced_at_equal_distances(mark: Mark) -> None:
    found = reduced(chart(1000, mark), 100)
    assert found.series[0].columns["x"][:2] == [0, 10]
    assert len(found) == 100


def test_points_with_gaps_are_reduced_too() -> None:
    assert len(reduced(chart(1000, y=[None] * 1000), 100)) == 100


def test_texts_are_short_printable_and_have_no_beginning_of_a_tag() -> None:
    hostile = "</script><script>\u202e\ud800" + "l" * 10_000
    text = encoded([figure(chart(1, name=hostile, y=[hostile]))], [hostile])
    assert b"<" not in text
    found = json.loads(text)
    name = found["classes"][0]
    assert name.startswith("</script><script>\\u202e\\ud800lll")
    assert len(name) == 300
    assert found["figures"][0]["charts"][0][0] == name
    assert found["figures"][0]["charts"][0][1]["series"][0]["columns"]["y"] == [name]


def test_numbers_have_the_digits_that_are_drawn() -> None:
    values: list[Cell] = [1 / 3, 1e300, -1e300, math.nan, math.inf, 1_790_000_000.12345, 7, None]
    found = packed(chart(8, y=values))["series"][0]["columns"]["y"]
    assert found == [0.3333333, 1e300, -1e300, None, None, 1_790_000_000.123, 7, None]
