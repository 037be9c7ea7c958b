"""The report and a notebook's charts in a real browser."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services import wait_until
from services.browser import SCHEMES, WIDTHS, Opened
from services.cases import cases
from services.columns import trials
from services.pictured import pictured

from shadho_celery.charts.params import contour
from shadho_celery.charts.report import STATIC, Picture, StudyPictures, report_html

pytestmark = pytest.mark.timeout(240)

#: a label that is script, one that turns the text around, one that is long, and names that scripts might trip over
HOSTILE = "</script><script>window.hit = 1</script><img src=x onerror='window.hit = 1'>"
BACKWARDS = "\u202etupni \u05e9\u05dc\u05d5\u05dd"
LONG = "l" * 10_000
#: figures that are drawn, or say in a sentence why not
DRAWN = "figure:has(canvas), figure:has(.empty)"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    path = folder / "report.html"
    path.write_text(report_html(pictured(f"sqlite:///{folder}/made.db", settings={"trials": 200})))
    return path


@cases("width, scheme", zip(WIDTHS, SCHEMES, strict=True))
def test_the_report_opens_without_a_network(browser: Any, report: Path, shots: Path, width: int, scheme: str) -> None:
    """Each chart is drawn, nothing is requested or logged, no page scrolls sideways, and axe-core has no complaint."""
    with Opened(browser, report.as_uri(), width, scheme) as opened:
        opened.page.screenshot(path=shots / f"{width}-{scheme}.png", full_page=True)
        assert (opened.logged, opened.requested) == ([], [])
        assert not opened.scrolls_sideways()
        assert opened.page.locator(DRAWN).count() == opened.page.locator("figure").count() > 10
        # A short table, because axe-core takes long for each cell.
        opened.page.get_by_text("Table of 3 marks").first.click()
        opened.page.locator("table caption").first.wait_for()
        assert not opened.scrolls_sideways()
        assert opened.problems() == []
        assert opened.logged == []


def test_arrow_keys_move_between_marks_and_enter_opens_a_trial(browser: Any, report: Path) -> None:
    with Opened(browser, report.as_uri()) as opened:
        page = opened.page
        page.evaluate("addEventListener('trial', (event) => (window.opened = event.detail.number))")
        history = page.locator("figure").first
        history.locator(".plot").focus()
        page.keyboard.press("ArrowRight")
        first = history.locator("[aria-live]").inner_text()
        assert first.count("trial 0") == 1
        page.keyboard.press("Enter")
        assert page.evaluate("window.opened") == 0
        page.keyboard.press("End")
        assert history.locator("[aria-live]").inner_text() != first
        timeline = page.locator("figure.wide").first
        timeline.locator(".plot").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "+", "Enter"):
            page.keyboard.press(key)
        said = timeline.locator("[aria-live]").inner_text()
        assert said.startswith("cpu, cpu-1, cpu-1.1, slot 1: ")
        assert f"trial {page.evaluate('window.opened')}" in said
        assert opened.logged == []


def test_the_mouse_shows_moves_and_opens_attempts(browser: Any, report: Path) -> None:
    with Opened(browser, report.as_uri()) as opened:
        page = opened.page
        page.evaluate("addEventListener('trial', (event) => (window.opened = event.detail.number))")
        plot = page.locator("figure.wide .plot").first
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        # In the first row, beside its name and below that of its class.
        x, y = box["x"] + 0.3 * box["width"], box["y"] + 38
        page.mouse.move(x, y)
        tip = plot.locator(".tip").inner_text()
        assert "trial" in tip
        page.mouse.click(x, y)
        number = page.evaluate("window.opened")
        assert f"trial {number}" in " ".join(tip.split())
        # The plot has the focus now, so that the wheel zooms.
        before = plot.locator("canvas").evaluate("canvas => canvas.toDataURL()")
        page.mouse.wheel(0, -300)
        wait_until(lambda: plot.locator("canvas").evaluate("canvas => canvas.toDataURL()") != before)
        page.keyboard.press("Home")
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x - 200, y, steps=3)
        page.mouse.up()
        assert opened.logged == []


def test_colours_follow_the_system_while_the_report_is_open(browser: Any, report: Path) -> None:
    with Opened(browser, report.as_uri()) as opened:
        read = "document.querySelector('figure canvas').toDataURL()"
        before = opened.page.evaluate(read)
        opened.page.emulate_media(color_scheme="dark")
        # The page's policy forbids what `wait_for_function` does.
        wait_until(lambda: opened.page.evaluate(read) != before)
        opened.page.set_viewport_size({"width": 400, "height": 900})
        wait_until(lambda: opened.page.evaluate("document.querySelector('figure canvas').clientWidth") < 400)
        assert not opened.scrolls_sideways()
        assert opened.logged == []


def test_a_server_may_send_the_modules_as_they_are(browser: Any, report: Path, tmp_path: Path) -> None:
    data = report.read_text().partition('id="data">')[2].partition("</script>")[0]
    shutil.copytree(STATIC, tmp_path / "static")
    (tmp_path / "index.html").write_text(
        '<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="static/style.css"><main id="figures"></main>'
        f'<script type="application/json" id="data">{data}</script>'
        '<script src="static/vendor/echarts/echarts.min.js"></script>'
        '<script type="module" src="static/page.js"></script>'
    )
    handler = functools.partial(Quiet, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            with Opened(browser, f"http://127.0.0.1:{server.server_port}/") as opened:
                figures = opened.page.locator("figure").count()
                assert opened.page.locator(DRAWN).count() == figures > 10
                assert opened.logged == []
        finally:
            server.shutdown()


class Quiet(SimpleHTTPRequestHandler):
    """Serves files without a word."""

    def log_message(self, *_: object) -> None:
        pass


def test_a_long_table_shows_more_rows_when_asked(browser: Any, report: Path) -> None:
    with Opened(browser, report.as_uri(), 400) as opened:
        figure = opened.page.locator("figure").first
        figure.locator("summary").click()
        figure.locator("tbody tr").nth(99).wait_for()
        assert figure.locator("tbody tr").count() == 100
        figure.get_by_role("button", name="Show 100 more").click()
        assert figure.locator("tbody tr").count() == 200
        assert not opened.scrolls_sideways()


def test_a_part_of_a_bar_is_said_by_its_own_height(browser: Any, report: Path) -> None:
    """The parts of the classes add up to the trials an hour of an interval."""
    data = json.loads(report.read_text().partition('id="data">')[2].partition("</script>")[0])
    charts = {chart["name"]: chart for figure in data["figures"] for _, chart in figure["charts"]}
    columns = [series["columns"] for series in charts["throughput"]["series"] if series["mark"] == "bars"]
    with Opened(browser, report.as_uri()) as opened:
        figure = opened.page.locator("figure", has_text="that this fleet could have completed")
        figure.locator("summary").first.click()
        figure.locator("tbody tr").first.wait_for()
        count = len(columns[0]["y"])
        said = [row.locator("td").last.inner_text() for row in figure.locator("tbody tr").all()[count : 2 * count]]
    own = [y - base for y, base in zip(columns[1]["y"], columns[1]["base"], strict=True)][: len(said)]
    assert said
    assert [float(text.replace(",", "")) for text in said] == [pytest.approx(each, rel=5e-3, abs=1e-6) for each in own]


def test_the_reader_chooses_time_and_range_and_zooms_by_dragging(browser: Any, report: Path) -> None:
    """The axis of the losses is fitted to the better half at first; a range that was dragged over can be left again."""
    with Opened(browser, report.as_uri()) as opened:
        figure, range_ = opened.page.locator("figure").first, opened.page.get_by_role("combobox", name="range").first
        assert range_.input_value() == "better half"
        range_.select_option("all")
        figure.get_by_role("combobox", name="over").select_option("seconds")
        assert figure.get_by_role("combobox", name="range").input_value() == "all"
        figure.locator("canvas").scroll_into_view_if_needed()
        box, whole = figure.locator("canvas").bounding_box(), figure.get_by_role("button", name="Whole range")
        read = "document.querySelector('figure canvas').toDataURL()"
        before = opened.page.evaluate(read)
        opened.page.mouse.move(box["x"] + 100, box["y"] + 100)
        opened.page.mouse.down()
        opened.page.mouse.move(box["x"] + 200, box["y"] + 200, steps=3)
        opened.page.mouse.up()
        whole.wait_for()
        assert opened.page.evaluate(read) != before
        whole.click()
        whole.wait_for(state="hidden")
        assert opened.logged == []


@cases("loss", [1e300, -1e300, 1.7e308])
def test_what_a_trial_wrote_is_text(browser: Any, tmp_path: Path, loss: float) -> None:
    """Labels with markup, scripts and directions, and losses at the end of what a number can be."""
    space = {
        HOSTILE: hp.uniform(HOSTILE, 0, 1),
        BACKWARDS: hp.loguniform(BACKWARDS, -4, 0),
        LONG: hp.choice(LONG, ["<b>bold</b>", HOSTILE]),
        "__proto__": hp.uniform("__proto__", 0, 1),
        "number": hp.uniform("number", 0, 1),
    }
    path = tmp_path / "report.html"
    path.write_text(report_html(pictured(f"sqlite:///{tmp_path}/{loss}.db", 60, space, loss=loss, reports=False)))
    with Opened(browser, path.as_uri(), 400) as opened:
        assert (opened.logged, opened.requested) == ([], [])
        assert opened.page.evaluate("window.hit") is None
        assert opened.page.locator("img, main script, main b").count() == 0
        assert not opened.scrolls_sideways()
        assert "<script>" in opened.page.locator("main").inner_text()
        assert opened.page.evaluate("Object.prototype.toString.call(Object.getPrototypeOf({}))") == "[object Object]"


def test_a_contour_of_params_of_any_name_is_drawn(browser: Any, tmp_path: Path) -> None:
    points = np.random.default_rng(0).uniform(size=(40, 2)).tolist()
    chart = contour(trials([{"loss": x * y, "params": {HOSTILE: x, BACKWARDS: y}} for x, y in points]))
    path = tmp_path / "notebook.html"
    html = Picture(chart, ["cpu"])._repr_html_()
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><title>notebook</title>{html}")
    assert len(html) < 500_000
    with Opened(browser, path.as_uri()) as opened:
        frame = opened.page.frame_locator("iframe")
        frame.locator(".plot").focus()
        for key in ("Home", "End"):
            opened.page.keyboard.press(key)
            assert "onerror" in frame.locator("[aria-live]").inner_text()
        assert HOSTILE in frame.locator("h3").inner_text()
        assert frame.locator("img, main script").count() == 0
        assert frame.locator("canvas").evaluate("() => window.hit") is None
        assert opened.logged == []


def test_a_notebook_shows_a_chart_in_a_frame_without_access(browser: Any, tmp_path: Path) -> None:
    data = pictured(f"sqlite:///{tmp_path}/made.db", 60)
    charts = StudyPictures(data.study)
    path = tmp_path / "notebook.html"
    html = charts.history("seconds")._repr_html_()
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><title>notebook</title>{html}")
    with Opened(browser, path.as_uri()) as opened:
        frame = opened.page.frame_locator("iframe")
        frame.locator("canvas").wait_for()
        assert frame.locator("h3").inner_text().startswith("The best loss is")
        assert opened.page.locator("iframe").get_attribute("sandbox") == "allow-scripts"
        assert opened.logged == []


def test_the_data_of_a_report_are_json_that_others_can_read(report: Path) -> None:
    text = report.read_text()
    data = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert data["classes"] == ["gpu_large", "gpu_small", "cpu"]
    assert {figure["section"] for figure in data["figures"]} == {"Search", "Machines", "Params", "Failures"}
