"""The dashboard as a process, in a real browser."""

from __future__ import annotations

import re
import shutil
import signal
import socket
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from acceptance.commands import Command, Desk, until
from hyperopt import hp
from msgspec.structs import replace
from services.browser import SCHEMES, WIDTHS, Opened

from shadho_celery import minimize
from shadho_celery.core.checks import printable
from shadho_celery.core.hardware import Machine
from shadho_celery.dashboard.cache import FRESH_SECONDS
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, RunningTrial, Share, StudyWants, Worker
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore

pytestmark = pytest.mark.timeout(240)

STUDY = """
from hyperopt import hp
from msgspec.structs import replace

SPACE = {"rate": hp.uniform("rate", 0, 1), "<b>kind</b>": hp.choice("<b>kind</b>", ["tree", "</script><b>net</b>"])}

def objective(values, context):
    context.report(1, values["rate"])
    if values["rate"] > 0.8:
        raise ArithmeticError("<img src=x onerror='window.hit = 1'>")
    return values["rate"]
"""
#: Labels of which one turns the text around and controls a terminal, and one is long.
BACKWARDS = ["<script>\u202evil\u2066\nline2\r\x1b[31m", "l" * 10_000]
#: A study whose trial prints, and waits for a file before it prints again.
TALKATIVE = """
import time
from pathlib import Path
from hyperopt import hp
from msgspec.structs import replace

SPACE = {"rate": hp.uniform("rate", 0, 1)}
STUDY = {"classes": ["cpu"]}

def objective(values, context):
    print("<img src=x onerror='window.hit = 1'>", flush=True)
    while not Path("go").exists():
        time.sleep(0.05)
    print("it ends")
    return values["rate"]
"""
#: widths and schemes in which pages are looked at: of two by two, those that differ in both
LOOKS = [*zip(WIDTHS, SCHEMES, strict=True)]
#: pages by name: their place, and a text that they have once they are drawn
PAGES = {
    "studies": ("/", "Studies of this store"),
    "study": ("/study/shown", "best loss"),
    "trials": ("/study/shown/trials", "30 trials"),
    "trial": ("/study/shown/trial/3", "shadho-celery again shown 3"),
    "placement": ("/study/shown/placement", "trials completed in"),
    "fleet": ("/fleet", "Used in the last week"),
    "compare": ("/compare/shown", "The best loss is"),
    "unknown": ("/nowhere", "There is no such page"),
}


def started(desk: Desk, *words: str) -> tuple[Command, str]:
    """Start a dashboard, by default on a free port; return the command and its address."""
    port = () if "--port" in words else ("--port", "0")
    command = desk.start(sys.executable, "-m", "shadho_celery", "dashboard", *port, *words)
    command.says("dashboard: http")
    [address] = re.findall(r"dashboard: (http://\S+)", command.out)
    return command, address


def store_of(desk: Desk) -> SqlStore:
    return SqlStore(f"sqlite:///{desk.folder}/shadho.db")


def objective(values: dict[str, float]) -> float:
    if values[BACKWARDS[0]] > 0.5:
        raise ArithmeticError(BACKWARDS[0])
    return values[BACKWARDS[0]]


@pytest.fixture(scope="module")
def recorded(shared_desk: Desk) -> Desk:
    """A desk with a store of two studies, which tests do not change."""
    shared_desk.write("my_study.py", STUDY)
    shared_desk.launch("my_study", "--trials", "30", "--study", "shown", "--seed", "0").wait()
    space = {label: hp.uniform(label, 0, 1) for label in BACKWARDS}
    store = f"sqlite:///{shared_desk.folder}/shadho.db"
    minimize(objective, space, trials=10, seed=0, sampler="random", store=store, study="backwards")
    return shared_desk


@pytest.fixture
def own(recorded: Desk, desk: Desk) -> Desk:
    """A desk with a copy of the store, to be changed."""
    shutil.copy(recorded.folder / "shadho.db", desk.folder)
    return desk


class Dashboard:
    """A dashboard that several tests look at. Each address that it prints admits one browser."""

    def __init__(self, desk: Desk, browser: Any) -> None:
        self._browser = browser
        self.command, address = started(desk)
        self.base = address.partition("#")[0]
        self.used: list[str] = []

    @contextmanager
    def opened(self, place: str = "/", width: int = 1400, scheme: str = "light") -> Iterator[Opened]:
        """Open a page in a new window, once its browser is logged in."""
        until(lambda: self._newest() not in self.used, 10, lambda: self.command.out)
        self.used.append(self._newest())
        with Opened(self._browser, self.used[-1], width, scheme) as opened:
            opened.page.get_by_text("Studies of this store").wait_for()
            self.go(opened, place)
            yield opened

    def _newest(self) -> str:
        return str(re.findall(r"http://\S+", self.command.out)[-1])

    def go(self, opened: Opened, place: str) -> None:
        opened.page.goto(f"{self.base}#{place}")


@pytest.fixture(scope="module")
def dashboard(recorded: Desk, browser: Any) -> Dashboard:
    return Dashboard(recorded, browser)


@pytest.mark.parametrize(("width", "scheme"), LOOKS)
def test_every_page_is_drawn_in_light_and_dark_wide_and_narrow(
    dashboard: Dashboard, shots: Path, width: int, scheme: str
) -> None:
    """No page logs an error, asks another host, scrolls sideways, runs what a trial wrote, or fails axe-core."""
    with dashboard.opened(width=width, scheme=scheme) as opened:
        for name, (place, text) in PAGES.items():
            dashboard.go(opened, place)
            opened.page.get_by_text(text).first.wait_for()
            opened.page.wait_for_timeout(500)
            opened.page.screenshot(path=shots / f"{name}-{width}-{scheme}.png", full_page=True)
            assert not opened.scrolls_sideways(), f"{name} at {width} pixels"
            assert not opened.problems(), name
        assert opened.logged == []
        assert all(url.startswith(dashboard.base) for url in opened.requested)
        assert opened.page.evaluate("window.hit") is None


def test_characters_that_turn_a_text_around_are_escapes_on_every_page(recorded: Desk, dashboard: Dashboard) -> None:
    failed = next(
        each["number"] for each in recorded.trials() if (each["name"], each["state"]) == ("backwards", "FAILED")
    )
    pages = {
        "/study/backwards": ".params",
        "/study/backwards/trials": "td",
        f"/study/backwards/trial/{failed}": "pre",
        "/study/backwards/placement": "h1",
    }
    with dashboard.opened() as opened:
        for place, where in pages.items():
            dashboard.go(opened, place)
            opened.page.locator(where).first.wait_for()
            opened.page.wait_for_timeout(500)
            text = opened.page.evaluate("document.title + document.documentElement.textContent")
            assert printable(text) == text, place
            if where != "h1":
                assert r"<script>\u202evil\u2066" in text
                # A label as a column's name is one line.
                assert re.search(r"line2(\\r| )\\x1b\[31m", text)
        dashboard.go(opened, "/study/backwards")
        opened.page.get_by_role("heading", name="The loss over lll").wait_for()
        assert opened.logged == []


@pytest.mark.sample
def test_a_page_follows_the_study_and_a_mark_opens_its_trial(own: Desk, browser: Any) -> None:
    """What changes before the stream of events is open is not missed either."""

    def change_first(route: Any) -> None:
        add_trial(store, 30)
        time.sleep(2 * FRESH_SECONDS)  # until then the dashboard may not have looked
        route.continue_()

    _, address = started(own)
    with closing(store_of(own)) as store, Opened(browser, address) as opened:
        opened.page.route("**/events", change_first, times=1)
        opened.page.get_by_role("link", name="shown").click()
        ended = opened.page.locator(".fact strong").nth(1)
        until(lambda: ended.inner_text() == "31", 30, ended.inner_text)
        add_trial(store, 31)
        until(lambda: ended.inner_text() == "32", 30, ended.inner_text)

        def is_opened() -> bool:
            """Choose a mark by keys. The chart may be drawn again meanwhile."""
            if opened.page.get_by_role("heading", name=re.compile("Trial \\d+")).count():
                return True
            opened.page.locator("main section.chart .plot").first.focus()
            opened.page.keyboard.press("ArrowRight")
            opened.page.keyboard.press("Enter")
            return False

        until(is_opened, 60, lambda: opened.page.locator("h1").inner_text())
        for number, attempts in ((30, 0), (29, 1)):
            opened.page.goto(f"{address.partition('#')[0]}#/study/shown/trial/{number}")
            opened.page.get_by_role("heading", name=f"Trial {number}").wait_for()
            opened.page.get_by_role("table", name="Values that the objective got").wait_for()
            assert opened.page.get_by_role("table", name="Attempts").count() == attempts


def test_a_range_that_is_dragged_on_an_axis_filters_the_table_and_a_name_moves_its_axis(dashboard: Dashboard) -> None:
    with dashboard.opened("/study/shown") as opened:
        page = opened.page
        plot = page.locator("section.chart", has_text="The params of").locator(".plot")
        page.get_by_role("heading", name="The loss over rate").wait_for()
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        # The last axis is that of the losses, whose trials are those of `rate`.
        x, y = box["x"] + box["width"] - 72, box["y"] + box["height"] - 20
        page.mouse.move(x, y)
        page.mouse.down()
        page.mouse.move(x, y - 60, steps=4)
        page.mouse.up()
        link = page.get_by_role("link", name="Show the chosen trials in the table")
        link.wait_for()
        assert "within=loss%3A" in link.get_attribute("href")
        page.mouse.click(x, box["y"] + 33)
        page.get_by_text("Drag on an axis to choose trials").wait_for()
        assert opened.logged == []


def test_the_table_is_filtered_while_one_types(dashboard: Dashboard) -> None:
    with dashboard.opened("/study/shown/trials") as opened:
        opened.page.get_by_text("30 trials").first.wait_for()
        field = opened.page.get_by_label("Search")
        field.press_sequentially("no such host")
        opened.page.get_by_text("No trial fits.").wait_for()
        assert field.evaluate("(field) => field === document.activeElement")
        assert "search=no+such+host" in opened.page.url
        assert opened.page.get_by_label("Class").locator("option").all_text_contents() == ["all", "cpu"]
        field.press("Enter")
        assert "search=no+such+host" in opened.page.url
        assert opened.logged == []


def test_marked_trials_are_compared_and_downloaded_and_a_range_filters(dashboard: Dashboard) -> None:
    with dashboard.opened("/study/shown/trials") as opened:
        page = opened.page
        for number in (3, 5):
            page.get_by_role("checkbox", name=f"Mark trial {number}", exact=True).check()
        with page.expect_download() as download:
            page.get_by_role("link", name="CSV of 2 marked trials").click()
        assert len(Path(download.value.path()).read_text().splitlines()) == 3
        page.get_by_role("link", name="Compare marked trials").click()
        page.get_by_text("2 trials", exact=True).wait_for()
        page.get_by_role("link", name="Show all trials").click()
        page.get_by_text("30 trials", exact=True).wait_for()
        page.get_by_label("Range of").select_option(label="rate")
        page.get_by_label("to", exact=True).fill("0.5")
        page.get_by_role("button", name="Filter").click()
        page.get_by_role("button", name="rate -inf to 0.5").wait_for()
        page.get_by_label("Order").select_option(label="rate, greatest first")
        rates = page.locator('td[data-label="rate"]')
        until(lambda: "sort=-" in page.url and rates.count() > 0, 30, lambda: page.url)
        shown = [float(text) for text in rates.all_inner_texts()]
        assert shown == sorted(shown, reverse=True)
        assert max(shown) <= 0.5
        page.get_by_text("Columns: 2 of 2 params").click()
        page.get_by_role("checkbox", name="rate", exact=True).uncheck()
        page.get_by_text("Columns: 1 of 2 params").wait_for()
        assert not opened.problems()
        assert opened.logged == []


def test_an_open_list_lists_each_study_that_begins_and_names_before_it_the_command_that_starts_one(
    desk: Desk, browser: Any, shots: Path
) -> None:
    desk.write("my_study.py", STUDY)
    command, address = started(desk)
    assert f"there was no store {desk.folder / 'shadho.db'}; it was created" in command.out
    with Opened(browser, address, 400) as opened:
        text = opened.page.get_by_text("There is none yet").inner_text()
        assert text.endswith("shadho-celery run tasks.svm --trials 40")
        assert not opened.scrolls_sideways()
        assert not opened.problems()
        opened.page.screenshot(path=shots / "none-400-light.png", full_page=True)
        desk.launch("my_study", "--trials", "10", "--study", "early", "--seed", "0").wait()
        opened.page.get_by_role("checkbox", name="Compare early").check()
        desk.launch("my_study", "--trials", "10", "--study", "late", "--seed", "0").wait()
        row = opened.page.get_by_role("row").filter(has_text="late")
        until(lambda: "10 of 10" in row.inner_text(), 30, row.inner_text)
        assert opened.page.get_by_role("checkbox", name="Compare early").is_checked()
        assert opened.page.evaluate("document.activeElement.ariaLabel") == "Compare early"


def test_what_keeps_a_dashboard_from_its_store_port_or_file_is_one_line(desk: Desk) -> None:
    """A wrong store creates nothing."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            "--store sqlite:///none.db": "there is no store",
            "--store sqlite:///no/such/folder/shadho.db": "no/such/folder/shadho.db",
            "--store sqlite:///.": "there is no store",
            "--store sqlite://": "a store in memory ends",
            "--store here": "is not a database URL",
            "": "no/such/folder/shadho.db cannot be opened: No such file or directory",
            f"--port {port}": f"--port: {port} cannot be used",
            "--token-file no/folder/token": "--token-file: no/folder/token cannot be written",
        }
        for typed, line in cases.items():
            where = {} if typed else {"SHADHO_STORE": "sqlite:///no/such/folder/shadho.db"}
            free = [] if "--port" in typed else ["--port", "0"]
            told = desk.told("dashboard", *free, *typed.split(), **where)
            assert (told.code, told.err.count("\n")) == (2, 1), told.err
            assert line in told.err
            assert typed.startswith(("--port", "--token")) or not [*desk.folder.iterdir()]


def test_a_chart_that_fails_says_so_and_stops_no_other(dashboard: Dashboard) -> None:
    with dashboard.opened() as opened:
        refused = {"status": 500, "json": {"error": "<b>no</b> reason"}}
        for chart in ("history", "importance"):
            opened.page.route(f"**/chart/{chart}*", lambda route: route.fulfill(**refused))
        opened.page.get_by_role("link", name="shown").click()
        opened.page.get_by_text("The chart history cannot be shown: <b>no</b> reason").wait_for()
        opened.page.get_by_text("The params of").wait_for()
        opened.page.get_by_text("The chart importance cannot be shown").wait_for()
        opened.page.get_by_text("Reported losses of").wait_for()


def test_a_page_that_is_cut_off_says_so_and_recovers(own: Desk, browser: Any) -> None:
    """The computer sleeps for an hour, so that its stream is dead without an error; then the dashboard is restarted."""
    command, address = started(own)
    port = re.findall(r":(\d+)/", address)[0]
    # The store stays open: a last connection that a stopped process closes would keep others out.
    with closing(store_of(own)) as store, Opened(browser, address) as opened:
        page, line = opened.page, opened.page.locator("#connection")
        page.clock.install()
        page.get_by_role("link", name="shown").click()
        ended = page.locator(".fact strong").nth(1)
        until(lambda: ended.inner_text() == "30", 30, ended.inner_text)
        command.send(signal.SIGSTOP)
        page.clock.fast_forward("01:00:00")
        until(lambda: "What is shown may be old" in line.inner_text(), 30, line.inner_text)
        add_trial(store, 30)
        command.send(signal.SIGCONT)
        until(lambda: ended.inner_text() == "31" and not line.inner_text(), 60, line.inner_text)
        command.interrupt()
        assert command.wait(20).code == 0, own.said()
        until(lambda: "The dashboard does not answer" in line.inner_text(), 30, line.inner_text)
        _, address = started(own, "--port", port)
        add_trial(store, 31)
        until(lambda: "open the URL that was printed" in line.inner_text(), 60, line.inner_text)
        other = opened.context.new_page()
        other.goto(address)
        other.get_by_text("Studies of this store").wait_for()
        other.close()
        until(lambda: ended.inner_text() == "32" and not line.inner_text(), 60, line.inner_text)


OPTION = """async ([least, most]) => {
  const { optionOf } = await import("/pages/draw.js");
  const axes = ["linear", "log"].map((scale) => ({ name: scale, scale, unit: "", categories: [] }));
  const columns = { x: [1, 2], y: [least, most] };
  const series = [{ name: "s", mark: "points", colour: "c", form: "filled", columns }];
  const theme = { colourOf: () => "black", symbolOf: () => "circle" };
  const { min, max } = optionOf({ axes, series }, theme, 800).yAxis;
  return [min, max];
}"""


def test_a_logarithmic_axis_has_finite_ends_whatever_the_losses(dashboard: Dashboard) -> None:
    with dashboard.opened() as opened:
        for least, most in [(1e-300, 1e300), (0.1, 1.7e308), (5e-324, 1.0), (1.0, 1e4), (0.5, 7e4)]:
            low, high = opened.page.evaluate(OPTION, [least, most])
            assert 0 < low <= max(least, 1e-306), (least, most)
            assert min(most, 1e306) <= high < float("inf"), (least, most)


AXES = """async () => {
  const { optionOf } = await import("/pages/draw.js");
  const theme = { colourOf: () => "black", symbolOf: () => "circle" };
  const of = (axes, mark, columns) =>
    optionOf({ axes, series: [{ name: "s", mark, colour: "c", form: "filled", columns }] }, theme, 800);
  const axis = (name, more) => ({ name, unit: "", scale: "linear", categories: [], ...more });
  const kinds = axis("kind", { scale: "category", categories: ["a", "b"] });
  const counts = of([axis("trials"), kinds], "bars", { x: [1, 2], y: [0, 1] }).xAxis;
  const shares = of([axis("share", { most: 1 }), kinds], "bars", { x: [0.5, 1], y: [0, 1] }).xAxis;
  const lines = of([axis("depth"), kinds, axis("rate", { scale: "log" }), axis("none")], "polylines", {
    "axis 0": [3, null, 5], "axis 1": [0, 1, null], "axis 2": [0.1, null, 10], "axis 3": [null, null, null],
  });
  return {
    counts: counts.minInterval, shares: [shares.minInterval ?? 0, shares.max({ max: 1 }), shares.max({ max: 0.2 })],
    data: lines.series[0].data, ends: lines.parallelAxis.map((each) => each.min ?? each.data),
    feet: [0, 2, 3].map((dim) => lines.parallelAxis[dim].axisLabel.formatter(lines.parallelAxis[dim].min)),
  };
}"""


def test_axes_of_counts_have_whole_numbers_and_inactive_labels_have_a_place(dashboard: Dashboard) -> None:
    with dashboard.opened() as opened:
        found = opened.page.evaluate(AXES)
    assert found["counts"] == 1
    assert found["shares"] == [0, 1, None]
    depth, kinds, rate, none = found["ends"]
    assert depth < 3
    assert kinds == ["inactive", "a", "b"]
    assert 0 < rate < 0.1
    assert found["data"] == [[3, 1, 0.1, none], [depth, 2, rate, none], [5, 0, 10, none]]
    assert found["feet"] == ["inactive"] * 3


TEXTS = """async () => {
  const { Timeline } = await import("/pages/timeline.js");
  const found = [];
  const draw = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const width = this.measureText(text).width;
    const left = x - { left: 0, center: width / 2, right: width }[this.textAlign];
    found.push([text, left, left + width, y]);
    draw.call(this, text, x, y);
  };
  const names = ["a-worker-with-a-long-name-1", "a-worker-with-a-long-name-2"];
  const parts = { class: ["cpu", "cpu"], machine: ["vm", "vm"], worker: names, slot: ["0", "0"] };
  const spans = { y: [0, 1], start: [0, 1], end: [5, 9], number: [0, 1], attempt: [1, 1] };
  const host = document.createElement("div");
  host.style.width = "360px";
  document.getElementById("main").append(host);
  const bars = { mark: "spans", form: "filled" };
  const series = [
    { ...bars, name: "cpu", colour: "class cpu", columns: spans },
    { ...bars, name: "idle", colour: "idle", columns: { y: [0, 1], idle: [0.5, 0.5], ...parts } },
  ];
  const axes = [
    { name: "time", scale: "time", unit: "", categories: [] },
    { name: "slot", scale: "category", unit: "", categories: names },
  ];
  new Timeline(host, { name: "timeline", axes, series }, {}).paint({ font: "sans-serif", colourOf: () => "black" });
  return found;
}"""


def test_names_in_a_narrow_timeline_do_not_lie_upon_one_another(dashboard: Dashboard) -> None:
    with dashboard.opened(width=400) as opened:
        texts = opened.page.evaluate(TEXTS)
    lines: dict[float, list[list[Any]]] = {}
    for each in texts:
        lines.setdefault(each[3], []).append(each)
    assert any(text == "vm" for text, *_ in texts)
    for line in lines.values():
        line.sort(key=lambda each: each[1])
        assert all(one[2] <= other[1] for one, other in pairwise(line)), line


def test_a_page_that_does_not_exist_leads_to_those_that_do(dashboard: Dashboard) -> None:
    with dashboard.opened() as opened:
        for place in ("/nowhere", "/study/a/b/c", "/study/%E0%A4%A"):
            dashboard.go(opened, place)
            opened.page.get_by_role("heading", name="There is no such page").wait_for()
            opened.page.locator("main").get_by_role("link", name="studies").click()
            opened.page.get_by_text("Studies of this store").wait_for()
        assert opened.logged == []
        dashboard.go(opened, "/study/none")
        opened.page.get_by_role("heading", name="There is no such study").wait_for()
        opened.page.get_by_text("there is no study named 'none'").wait_for()


def test_two_dashboards_do_not_log_one_another_out(recorded: Desk, dashboard: Dashboard) -> None:
    _, second = started(recorded)
    with dashboard.opened() as opened:
        for address in (second, dashboard.base, second.partition("#")[0]):
            # A page that is left before it has its cookie would ask for the token again.
            opened.page.goto("about:blank")
            opened.page.goto(address)
            opened.page.get_by_text("Studies of this store").wait_for()
        assert len({cookie["name"] for cookie in opened.context.cookies()}) == 2


def add_trial(store: SqlStore, number: int) -> None:
    """Record a further trial, as a scheduler does."""
    record = store.find("shown")
    fence = store.lock(record.key, "test", time.time())
    [last] = store.trials(record.key, [9])
    store.write(record.key, fence, time.time(), Turn(new=[last.evolve(number=number)], changed=[], reported=[]))
    store.unlock(record.key, fence)


def test_a_run_has_a_dashboard_beside_it_that_steers_it_and_ends_with_it(desk: Desk, browser: Any, shots: Path) -> None:
    """Limits are set and points enqueued in dialogs by the keyboard, with the messages of the commands."""
    desk.write("my_study.py", "import time\n" + STUDY.replace("    if values", "    time.sleep(0.2)\n    if values"))
    points = desk.write("points.jsonl", '{"rate": 0.125}\n{"rate": 0.25}\n')
    words = ["my_study", "--trials", "100000", "--study", "shown", "--seed", "0", "--dashboard", "--quiet"]
    run = desk.launch(*words, "--workers", "cpu=2")
    until(lambda: "dashboard: http" in run.err + run.out, 60, desk.said)
    [address] = re.findall(r"dashboard: (http://\S+)", run.err + run.out)
    with Opened(browser, address, 400) as opened:
        opened.page.get_by_role("link", name="shown").click()
        opened.page.on("dialog", lambda dialog: dialog.accept())
        for width, scheme in LOOKS:
            opened.page.set_viewport_size({"width": width, "height": 900})
            opened.page.emulate_media(color_scheme=scheme)
            for name in ("set limits", "enqueue", "add a note"):
                look_at_dialog(opened, name, shots / f"{name.replace(' ', '-')}-{width}-{scheme}.png")
        set_limits(opened.page)
        enqueue(opened.page, points)
        # Chromium itself notes the one request that was refused as malformed.
        assert [line for line in opened.logged if "400 (Bad Request)" not in line] == []
        opened.page.get_by_role("link", name="fleet").click()
        for text in ("In use now", "RAM"):
            opened.page.get_by_text(text).first.wait_for()
        opened.page.screenshot(path=shots / "fleet-working.png", full_page=True)
        assert not opened.problems()
        opened.page.go_back()
        opened.page.get_by_role("button", name="pause", exact=True).click()
        opened.page.locator("nav .state", has_text="paused").wait_for()
        opened.page.get_by_role("button", name="unpause").click()
        opened.page.locator("nav .state", has_text="running").wait_for()
        assert opened.page.get_by_role("button", name="pause", exact=True).is_visible()
        for place in ("trials", "placement", "trial/0"):
            opened.page.goto(f"{address.partition('#')[0]}#/study/shown/{place}")
            opened.page.locator("nav .state", has_text="running").wait_for()
            assert desk.told("pause", "shown").code == 0
            opened.page.locator("nav .state", has_text="paused").wait_for()
            opened.page.get_by_role("button", name="unpause").wait_for()
            assert desk.told("unpause", "shown").code == 0
            opened.page.locator("nav .state", has_text="running").wait_for()
        add_note(opened.page, desk)
        opened.page.get_by_role("button", name="stop").click()
        until(lambda: "stop" in opened.page.locator("#said").inner_text(), 30, opened.page.locator("#said").inner_text)
        assert run.wait(60).code == 0, desk.said()
    assert not desk.pids("--with-parent")
    assert {0.125, 0.25} <= {trial["params"]["rate"] for trial in desk.trials()}
    shown = desk.told("show", "shown", "--json").json()
    assert (shown["settings"]["trials"], shown["settings"]["weight"]) == (50_000, 2.5)
    done = [(each["action"], each["answer"]["is_done"]) for each in shown["actions"]]
    assert done[:3] == [("set", True), ("enqueue", False), ("enqueue", True)]
    assert done[-1] == ("stop", True)


def look_at_dialog(opened: Opened, name: str, shot: Path) -> None:
    """Open a dialog by the keyboard, look at it, and close it."""
    opener = opened.page.get_by_role("button", name=name)
    opener.focus()
    opened.page.keyboard.press("Enter")
    opened.page.get_by_role("dialog").wait_for()
    assert not opened.problems(), name
    assert not opened.scrolls_sideways(), name
    opened.page.screenshot(path=shot)
    opened.page.keyboard.press("Escape")
    opened.page.get_by_role("dialog").wait_for(state="detached")
    assert opener.evaluate("(button) => button === document.activeElement")


def add_note(page: Any, desk: Desk) -> None:
    """A note on a trial is text on its page, and on that of the study without a reload."""
    page.locator(".facts").get_by_role("button", name="add a note").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("note", exact=True).fill("<b>late</b> \u202egnol")
    dialog.get_by_role("button", name="add a note").click()
    shown = page.get_by_role("table", name="Notes")
    shown.get_by_text("<b>late</b> \\u202egnol").wait_for()
    page.get_by_role("link", name="study", exact=True).click()
    shown.get_by_role("link", name="0", exact=True).wait_for()
    actions = page.locator("nav.study button").all_inner_texts()
    assert (actions[-1], len(actions) > 1) == ("add a note", True), "beside the other actions"
    assert desk.told("note", "shown", "from a command").code == 0
    shown.get_by_text("from a command").wait_for()


def set_limits(page: Any) -> None:
    page.get_by_role("button", name="set limits").click()
    dialog, said = page.get_by_role("dialog"), page.locator("#said")
    trials = dialog.get_by_label("trials", exact=True)
    assert trials.input_value() == "100000"
    trials.fill("many")
    trials.press("Enter")
    dialog.get_by_text("trials: 'many' is not a whole number").wait_for()
    trials.fill("50000")
    dialog.get_by_label("weight").fill("2.5")
    trials.press("Enter")
    dialog.wait_for(state="detached")
    until(lambda: "set trials 50000, weight 2.5" in said.inner_text(), 30, said.inner_text)
    page.get_by_text("of 50,000 trials", exact=True).wait_for()


def enqueue(page: Any, points: Path) -> None:
    page.get_by_role("button", name="enqueue").click()
    dialog, said = page.get_by_role("dialog"), page.locator("#said")
    field, send = dialog.get_by_label("points"), dialog.get_by_role("button", name="enqueue")
    field.fill('{"rate": 0.5}\n{"speed": 1}')
    send.click()
    dialog.get_by_text("point 1: there is no label 'speed'").wait_for()
    dialog.get_by_label("or a file").set_input_files(points)
    until(lambda: field.input_value() == points.read_text(), 30, field.input_value)
    send.click()
    dialog.wait_for(state="detached")
    until(lambda: "enqueued trials " in said.inner_text(), 30, said.inner_text)


def test_the_slots_of_a_large_fleet_show_what_runs_in_them_as_text(
    desk: Desk, browser: Any, redis_url: str, shots: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shadho_celery.fleet.registry.ANNOUNCE_SECONDS", 600.0)
    client, hostile = connect(redis_url), "<img src=x onerror='window.hit = 1'>\u202e"
    trials = [RunningTrial(number=7, started_at=time.time() - 5 * 3600, slots=2, expected=36000.0)]
    trials += [RunningTrial(number=8, started_at=time.time() - 5 * 3600)]
    held = {"k": Share(name=hostile, slots=3, trials=trials)}
    Registry(client, StudyWants).announce("k", StudyWants(name=hostile, owner="anna@lab", wanted_slots={"cpu": 77}))
    registry = Registry(client, Worker)
    worker = Worker(protocol=PROTOCOL, compute_class="cpu", slots=8)
    for number in range(120):
        registry.announce(f"cpu@h{number:03}.1.a", replace(worker, machine=Machine(host=f"h{number:03}")))
    registry.announce(f"cpu@{hostile}.1.a", replace(worker, busy=3, studies=held, draining=True))
    _, address = started(desk, "--redis", redis_url, "--broker", redis_url)
    with Opened(browser, address, 400, "dark") as opened:
        page = opened.page
        page.get_by_text("Studies of this store").wait_for()
        page.goto(f"{address.partition('#')[0]}#/fleet")
        page.get_by_text("1 of 3").wait_for()
        assert page.locator("td[data-label=wanted]").all_inner_texts() == ["77"]
        page.get_by_label("Search").fill("ANNA")
        page.get_by_text("1 worker", exact=True).wait_for()
        assert page.locator("ul.slots li").all_inner_texts() == [
            "trial 7 of <img src=x onerror='window.hit = 1'>\\u202e\nanna@lab, 2 slots\n5 h of 10 h",
            "trial 8 of <img src=x onerror='window.hit = 1'>\\u202e\nanna@lab\n5 h",
            *[""] * 5,
        ]
        assert page.locator("main .state", has_text="draining").is_visible()
        for width, scheme in LOOKS:
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.wait_for_timeout(500)
            page.screenshot(path=shots / f"fleet-cells-{width}-{scheme}.png", full_page=True)
            assert not opened.problems()
            assert not opened.scrolls_sideways()
        page.get_by_label("Search").fill("")
        page.get_by_role("button", name="Next").click()
        page.get_by_text("2 of 3").wait_for()
        assert page.url.endswith("#/fleet?page=1")
        assert page.evaluate("window.hit") is None
        assert opened.logged == []


def test_the_log_of_a_running_trial_is_followed_as_text(
    desk: Desk, browser: Any, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """From a worker whose folder is another one, as on another machine."""
    there = Desk(tmp_path_factory.mktemp("there"), desk.temporary)
    urls = {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    for folder in (desk, there):
        folder.write("my_study.py", TALKATIVE)
    desk.commands.append(there.worker("cpu", "-c", "1", **urls, SHADHO_IMPORTS="my_study", SHADHO_HOST="127.0.0.2"))
    desk.launch("my_study", "--trials", "1", "--study", "shown", **urls)
    until(lambda: [*there.folder.glob(".shadho/checkpoints/*/logs/0.1.log")], 60, desk.said)
    _, address = started(desk, "--redis", redis_url)
    with Opened(browser, address) as opened:
        opened.page.get_by_text("Studies of this store").wait_for()
        opened.page.goto(f"{address.partition('#')[0]}#/study/shown/trial/0")
        log = opened.page.get_by_role("region", name="Log of trial 0")
        opened.page.get_by_text("<img src=x onerror='window.hit = 1'>").wait_for()
        assert "it ends" not in log.inner_text()
        spent = opened.page.locator(".fact", has_text="time so far").locator("strong")
        first = spent.inner_text()
        until(lambda: spent.inner_text() not in {first, "–"}, 30, spent.inner_text)
        assert not opened.problems()
        there.write("go", "")
        until(lambda: "it ends" in log.inner_text(), 30, log.inner_text)
        assert [line.partition(" ")[2] for line in log.inner_text().splitlines()] == [
            "<img src=x onerror='window.hit = 1'>",
            "it ends",
        ]
        assert opened.page.evaluate("window.hit") is None
        assert opened.logged == []


def test_a_browser_is_opened_without_the_code_in_its_words(own: Desk, browser: Any) -> None:
    words = own.folder / "words"
    opener = own.folder / "opener"
    opener.write_text(f'#!/bin/sh\necho "$@" > {words}\n')
    opener.chmod(0o700)
    own.environment["BROWSER"] = f"{opener} %s"
    command, address = started(own, "--open")
    until(lambda: words.exists() and words.read_text().endswith("\n"), 30, own.said)
    uri = words.read_text().strip()
    assert uri.startswith("file://")
    assert address.partition("#")[2] not in uri
    path = Path(uri.removeprefix("file://"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with Opened(browser, uri) as opened:
        opened.page.get_by_text("Studies of this store").wait_for()
    command.interrupt()
    command.wait()
    assert not path.exists()


def test_a_used_address_is_refused_in_words_where_nobody_is_logged_in(dashboard: Dashboard, browser: Any) -> None:
    with dashboard.opened() as opened:
        opened.page.locator(".skip").focus()
        opened.page.keyboard.press("Enter")
        assert opened.page.evaluate("document.activeElement.id") == "main"
        assert opened.page.evaluate("location.hash") == "#/"
        # The browser that is logged in needs no code.
        opened.page.goto("about:blank")
        opened.page.goto(dashboard.used[-1])
        opened.page.get_by_text("Studies of this store").wait_for()
        assert opened.page.get_by_text("this address was used before").count() == 0
    with Opened(browser, dashboard.used[-1]) as opened:
        opened.page.get_by_text("this address was used before").wait_for()


def test_320_idle_connections_do_not_keep_its_owner_from_the_dashboard(recorded: Desk, dashboard: Dashboard) -> None:
    where = urlsplit(dashboard.base)
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((where.hostname, where.port), 60)) for _ in range(320)]
        for each in idle[:20]:
            each.sendall(b"POST /login HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n")
        for number in range(12):
            for each in idle:
                with suppress(OSError):
                    each.sendall(b"GET / HTTP/1.1"[number : number + 1])
            time.sleep(0.5)
        until(lambda: is_served(dashboard.base), 30, recorded.said)


def is_served(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=60) as answer:
            return b"<html" in answer.read()
    except urllib.error.HTTPError:
        return False
