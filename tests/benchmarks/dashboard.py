"""First view of a study in a browser, beside optuna-dashboard: ``python tests/benchmarks/dashboard.py [TRIALS ...]``.

Both servers read SQLite files with the same trials, each in its own product's tables, and are started anew for each
measurement. A first view is drawn when the page shows the history of losses. Printed are the seconds from the start of
the navigation, the bytes that were sent (compressed), the memory of the server's process afterwards, and for our own
dashboard the seconds from a trial's record to its appearance on the page. A calibration loop stands beside the times.
Needs Chromium, playwright and optuna-dashboard.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from figures import finish, goal
from playwright.sync_api import Page, sync_playwright
from resume import build, calibration

from shadho_celery.store.sql import SqlStore

SIZES = (10_000, 100_000, 1_000_000)
#: most seconds to the first view by number of trials; times as fast as optuna-dashboard; most bytes and MiB
SECONDS = {10_000: 1.0, 100_000: 1.5, 1_000_000: 4.0}
FASTER = {10_000: 3.0, 100_000: 10.0}
MOST_BYTES, MOST_MIB, EVENT_SECONDS = 1_000_000, 600, 1.0
#: number of trials above which optuna-dashboard is left out, because its first view takes minutes
MOST_OF_OPTUNA = 100_000
PORT, OPTUNA_PORT = 8437, 8438
PATIENCE = 120_000


@dataclass
class View:
    """A first view: seconds until it was drawn, bytes sent, and the server's memory in MiB."""

    seconds: float
    sent: int
    memory: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trials", nargs="*", type=int, default=SIZES)
    given = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("this needs Chromium: apt install chromium")
    goals: dict[str, Any] = {}
    figures: dict[str, Any] = {"calibration loop (s)": calibration()}
    print(f"calibration loop: {figures['calibration loop (s)']:.2f} s")
    print(f"{'trials':>10s}{'':>18s}{'first view':>12s}{'sent':>12s}{'memory':>12s}{'event':>10s}")
    with tempfile.TemporaryDirectory() as name, sync_playwright() as playwright:
        folder = Path(name)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for trials in given.trials:
            url = f"sqlite:///{folder}/{trials}.db"
            build(url, "long_study", trials)
            with closing(sqlite3.connect(folder / f"{trials}.db")) as store, store:
                store.execute("UPDATE trials SET change = 1")
                store.execute("UPDATE studies SET change = 1")
            with ours(url, folder) as (process, address):
                page = browser.new_page()
                log_in(page, address)
                view = first_view(page, f"{address.partition('#')[0]}#/study/long", "main .chart canvas", process)
                seconds = event_seconds(page, url)
                page.close()
            print(row(trials, "shadho-celery", view, seconds), flush=True)
            goals[f"first view, {trials} trials (s)"] = goal(view.seconds, at_most=SECONDS.get(trials, 4.0))
            goals[f"sent, {trials} trials (bytes)"] = goal(view.sent, at_most=MOST_BYTES)
            goals[f"memory, {trials} trials (MiB)"] = goal(view.memory, at_most=MOST_MIB)
            goals[f"event, {trials} trials (s)"] = goal(seconds, at_most=EVENT_SECONDS)
            if trials <= MOST_OF_OPTUNA:
                peer = f"sqlite:///{folder}/optuna-{trials}.db"
                copy_to_optuna(url, peer)
                with theirs(peer, folder) as process:
                    page = browser.new_page()
                    address = f"http://127.0.0.1:{OPTUNA_PORT}/dashboard/studies/1"
                    other = first_view(page, address, ".js-plotly-plot .scatterlayer .point", process)
                    page.close()
                print(row(trials, "optuna-dashboard", other, None), flush=True)
                if trials in FASTER:
                    ratio = other.seconds / view.seconds
                    goals[f"times as fast, {trials} trials"] = goal(ratio, at_least=FASTER[trials])
            (folder / f"{trials}.db").unlink()
        browser.close()
    finish(figures, goals, {"trials": [*given.trials]})


def row(trials: int, name: str, view: View, event: float | None) -> str:
    said = "" if event is None else f"{event:8.2f} s"
    memory = f"{view.memory:8.0f} MiB"
    return f"{trials:10,}{name:>18s}{view.seconds:10.2f} s{view.sent / 1e6:9.2f} MB{memory}{said:>10s}"


@contextmanager
def ours(url: str, folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start our dashboard; gives its process and the address that it prints."""
    words = [sys.executable, "-m", "shadho_celery", "dashboard", "--store", url, "--port", str(PORT)]
    with started(words, folder) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://\S+", line):
                yield process, found.group()
                return
        raise SystemExit("the dashboard has printed no address")


@contextmanager
def theirs(url: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start optuna-dashboard; gives its process once it answers."""
    words = [str(Path(sys.executable).parent / "optuna-dashboard"), url, "--port", str(OPTUNA_PORT)]
    with started(words, folder) as process:
        for _ in range(300):
            with suppress(URLError), urlopen(f"http://127.0.0.1:{OPTUNA_PORT}/dashboard", timeout=5):
                yield process
                return
            time.sleep(0.1)
        raise SystemExit("optuna-dashboard does not answer")


@contextmanager
def started(words: list[str], folder: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()


def log_in(page: Page, address: str) -> None:
    """Exchange the code for a cookie on a page that reads no study's trials."""
    page.goto(address)
    page.get_by_role("heading", name="Studies").wait_for()


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
    began = time.perf_counter()
    page.goto(address)
    page.locator(drawn).first.wait_for(timeout=PATIENCE)
    # The frame in which it is drawn has been shown.
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    seconds = time.perf_counter() - began
    page.wait_for_timeout(3000)
    return View(seconds, sent, psutil.Process(process.pid).memory_info().rss / 2**20)


def event_seconds(page: Page, url: str) -> float:
    """Return the seconds from the record of a further trial until the page counts it."""
    shown = page.locator(".fact strong").nth(1)
    before = shown.inner_text()
    with closing(SqlStore(url)) as store:
        [record] = store.records()
        fence = store.lock(record.key, "benchmark", time.time())
        [last] = store.trials(record.key, [max(store.numbers(record.key))])
        store.write(record.key, fence, time.time(), new=[last.evolve(number=last.number + 1)], changed=[], reported=[])
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
