"""First view of a study in a browser, beside optuna-dashboard: ``python tests/benchmarks/dashboard.py [TRIALS ...]``.

Both servers read SQLite files with the same trials, each in its own product's tables, and are started anew for each
measurement. A first view is drawn when the page shows the history of losses. Printed are the seconds from the start of
the navigation, the CPU seconds of the server until then, the bytes that were sent (compressed), the memory of the
server's process when all charts are drawn, and for our own dashboard the seconds from a trial's record to its
appearance on the page. Of several starts the fastest counts: the machine may be busy. A calibration loop stands beside
each. Needs Chromium, playwright and optuna-dashboard.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
from figures import calibration, finish, goal, make_parser
from playwright.sync_api import Browser, Page
from playwright.sync_api import TimeoutError as TooLate
from resume import CLASSES, build
from services.browser import chromium
from workers import dashboard, python

from shadho_celery.core.records import Placed, pack
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore

SIZES = (10_000, 100_000, 1_000_000)
#: most seconds to the first view by number of trials; times as fast as optuna-dashboard; most bytes and MiB
SECONDS = {10_000: 1.0, 100_000: 1.5, 1_000_000: 4.0}
FASTER = {10_000: 3.0, 100_000: 10.0}
MOST_BYTES, MOST_MIB, EVENT_SECONDS = 1_000_000, 600, 1.0
#: number of trials above which optuna-dashboard is left out, because its first view takes minutes
MOST_OF_OPTUNA = 100_000
OPTUNA_PORT = 8438
#: milliseconds after which a first view is given up
PATIENCE = 300_000


@dataclass
class View:
    """A first view: seconds until it was drawn, CPU seconds of the server, bytes sent, the server's memory in MiB."""

    seconds: float
    cpu: float
    sent: int
    memory: float
    #: seconds of the calibration loop just before
    loop: float
    #: seconds from the record of a trial until it is on the page
    event: float | None = None


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trials", nargs="*", type=int, default=SIZES)
    parser.add_argument("--starts", type=int, default=3, help="number of cold starts of our dashboard (3)")
    given = parser.parse_args()
    goals: dict[str, Any] = {}
    figures: dict[str, Any] = {}
    print(
        f"{'trials':>10s}{'':>18s}{'first view':>12s}{'CPU':>8s}{'loop':>8s}{'sent':>10s}{'memory':>11s}{'event':>9s}"
    )
    with tempfile.TemporaryDirectory() as name, chromium() as browser:
        folder = Path(name)
        for trials in given.trials:
            url = f"sqlite:///{folder}/{trials}.db"
            build_study(folder / f"{trials}.db", trials)
            views = [our_view(browser, url, trials, folder) for _ in range(given.starts)]
            best = min(views, key=lambda view: view.seconds)
            figures[f"{trials} trials"] = [asdict(view) for view in views]
            goals[f"first view, {trials} trials (s)"] = goal(best.seconds, at_most=SECONDS.get(trials, 4.0))
            goals[f"sent, {trials} trials (bytes)"] = goal(max(v.sent for v in views), at_most=MOST_BYTES)
            goals[f"memory, {trials} trials (MiB)"] = goal(max(v.memory for v in views), at_most=MOST_MIB)
            goals[f"event, {trials} trials (s)"] = goal(min(v.event or 0 for v in views), at_most=EVENT_SECONDS)
            if trials <= MOST_OF_OPTUNA:
                other = their_view(browser, url, trials, folder)
                figures[f"{trials} trials, optuna-dashboard"] = asdict(other)
                if trials in FASTER:
                    goals[f"times as fast, {trials} trials"] = goal(
                        other.seconds / best.seconds, at_least=FASTER[trials]
                    )
            (folder / f"{trials}.db").unlink()
    finish(figures, goals, {"trials": [*given.trials], "starts": given.starts})


def build_study(path: Path, trials: int) -> None:
    """Make a store with a study whose trials have an attempt each, on workers of three classes."""
    build(f"sqlite:///{path}", "long_study", trials)
    expected = pack({name: Placed(3.0, 0.0, 1.0) for name in CLASSES}, CLASSES)
    with closing(sqlite3.connect(path)) as store, store:
        store.execute("UPDATE trials SET change = 1")
        store.execute("UPDATE studies SET change = 1, classes = ?", [json.dumps(CLASSES)])
        store.execute(
            "INSERT INTO attempts (study, number, attempt, compute_class, host, worker, slot, queued_at, started_at, "
            "ended_at, end, copy, placed, change) "
            "SELECT study, number, 1, compute_class, host, compute_class || '@here', number % 4, asked_at, started_at, "
            "finished_at, lower(state), 0, ?, 1 FROM trials",
            [expected],
        )
        store.executemany(
            "INSERT INTO sessions (study, worker, since, compute_class, host, slots, until, reason, others) "
            "SELECT key, ?, 1.7e9, ?, 'here', 4, 1.7e9 + ?, 'study ended', '[]' FROM studies",
            [(f"{name}@here", name, trials) for name in CLASSES],
        )


def our_view(browser: Browser, url: str, trials: int, folder: Path) -> View:
    """Return the first view of our dashboard, started anew."""
    with dashboard(folder, url) as (process, address):
        page = browser.new_context().new_page()
        log_in(page, address)
        view = first_view(page, f"{address.partition('#')[0]}#/study/long", "main .chart canvas", process)
        view.event = event_seconds(page, url)
        # The last chart of the page, after which the memory does not grow.
        page.locator(".multiples > div").last.locator("canvas").first.wait_for(timeout=PATIENCE)
        view.memory = memory_of(process)
        page.context.close()
    show(trials, "shadho-celery", view)
    return view


def their_view(browser: Browser, url: str, trials: int, folder: Path) -> View:
    """Return the first view of optuna-dashboard on the same trials. If it takes longer than PATIENCE, it is that."""
    peer = f"sqlite:///{folder}/optuna-{trials}.db"
    copy_to_optuna(url, peer)
    with theirs(peer, folder) as process:
        page = browser.new_context().new_page()
        address = f"http://127.0.0.1:{OPTUNA_PORT}/dashboard/studies/1"
        view = first_view(page, address, ".js-plotly-plot .scatterlayer .point", process)
        page.context.close()
    show(trials, "optuna-dashboard", view)
    return view


def show(trials: int, name: str, view: View) -> None:
    event = "" if view.event is None else f"{view.event:7.2f} s"
    print(
        f"{trials:10,}{name:>18s}{view.seconds:10.2f} s{view.cpu:6.2f} s{view.loop:6.2f} s{view.sent / 1e6:7.2f} MB"
        f"{view.memory:7.0f} MiB{event:>9s}",
        flush=True,
    )


@contextmanager
def theirs(url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start optuna-dashboard; gives its process once it answers."""
    program = str(Path(sys.executable).parent / "optuna-dashboard")
    with python(folder, {}, program, url, "--port", str(OPTUNA_PORT)) as process:
        for _ in range(300):
            with suppress(URLError), urlopen(f"http://127.0.0.1:{OPTUNA_PORT}/dashboard", timeout=5):
                yield process
                return
            time.sleep(0.1)
        raise SystemExit("optuna-dashboard does not answer")


def log_in(page: Page, address: str) -> None:
    """Exchange the code for a cookie, without a page: the server has read nothing before the first view."""
    base, _, code = address.partition("#")
    headers = {"content-type": "application/json", "origin": base.rstrip("/")}
    with urlopen(Request(f"{base}login", json.dumps({"code": code}).encode(), headers)) as answer:
        name, _, value = answer.headers["set-cookie"].partition(";")[0].partition("=")
    page.context.add_cookies([{"name": name, "value": value, "url": base}])


def first_view(page: Page, address: str, drawn: str, process: subprocess.Popen[str]) -> View:
    sent = 0
    session = page.context.new_cdp_session(page)
    session.send("Network.enable")
    session.send("Network.setCacheDisabled", {"cacheDisabled": True})

    def count(event: dict[str, Any]) -> None:
        nonlocal sent
        sent += int(event["encodedDataLength"])

    session.on("Network.loadingFinished", count)
    page.goto("about:blank")
    loop, cpu = calibration(), cpu_of(process)
    began = time.perf_counter()
    page.goto(address)
    with suppress(TooLate):
        page.locator(drawn).first.wait_for(timeout=PATIENCE)
        # The frame in which it is drawn has been shown.
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    seconds, cpu = time.perf_counter() - began, cpu_of(process) - cpu
    # What is sent for the first view may still be counted.
    page.wait_for_timeout(500)
    return View(seconds, cpu, sent, memory_of(process), loop)


def cpu_of(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of a process."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def memory_of(process: subprocess.Popen[str]) -> float:
    """Return the resident memory of a process in MiB."""
    return psutil.Process(process.pid).memory_info().rss / 2**20


def event_seconds(page: Page, url: str) -> float:
    """Return the seconds from the record of a further trial until the page counts it."""
    shown = page.locator(".fact strong").nth(1)
    before = shown.inner_text()
    with closing(SqlStore(url)) as store:
        [record] = store.records()
        fence = store.lock(record.key, "benchmark", time.time())
        [last] = store.trials(record.key, [max(store.numbers(record.key))])
        store.write(
            record.key, fence, time.time(), Turn(new=[last.evolve(number=last.number + 1)], changed=[], reported=[])
        )
        began = time.perf_counter()
        # Not by `wait_for_function`, whose evaluation the page's Content-Security-Policy refuses.
        while shown.inner_text() == before and time.perf_counter() < began + 30:
            time.sleep(0.01)
        seconds = time.perf_counter() - began
        store.unlock(record.key, fence)
    return seconds


def copy_to_optuna(url: str, peer: str) -> None:
    """Write the trials of our store to the tables that Optuna has made."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    optuna.create_study(storage=peer, study_name="long")
    law = '{"name": "FloatDistribution", "attributes": {"step": null, "low": -1000.0, "high": 1000.0, "log": false}}'
    paths = [each.removeprefix("sqlite:///") for each in (url, peer)]
    with closing(sqlite3.connect(paths[0])) as source, closing(sqlite3.connect(paths[1])) as target:
        found = source.execute("SELECT number, loss, params, started_at, finished_at FROM trials ORDER BY number")
        params = 0
        for number, loss, drawn, start, end in found:
            moments = [time.strftime("%Y-%m-%d %H:%M:%S.000000", time.gmtime(at)) for at in (start, end)]
            state = "FAIL" if loss is None else "COMPLETE"
            target.execute("INSERT INTO trials VALUES (?, ?, 1, ?, ?, ?)", (number + 1, number, state, *moments))
            if loss is not None:
                values = (number + 1, number + 1, 0, loss, "FINITE")
                target.execute("INSERT INTO trial_values VALUES (?, ?, ?, ?, ?)", values)
            for label, value in json.loads(drawn).items():
                params += 1
                row = (params, number + 1, label, float(value), law)
                target.execute("INSERT INTO trial_params VALUES (?, ?, ?, ?, ?)", row)
        target.commit()


if __name__ == "__main__":
    main()
