"""What clients of the dashboard's event stream cost a scheduler.

One study runs in embedded mode, with trials of a few milliseconds. A dashboard follows its store, in turns with ten
clients of the event stream and without any. Compared are the CPU seconds of the scheduler's process per trial, pair by
pair: the machine may be busy.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from urllib.request import Request, urlopen

import psutil
from figures import finish, goal
from resume import calibration

CLIENTS, PAIRS, SECONDS = 10, 6, 10.0
#: seconds before the first measurement, and after each change of the number of clients
WARM_UP, SETTLE = 15.0, 1.0
MOST = 1.05
MODULE = """
import time
from hyperopt import hp

SPACE = {"x": hp.uniform("x", 0, 1), "y": hp.loguniform("y", -5, 0)}

def objective(values):
    time.sleep(0.01)
    return values["x"] + values["y"]
"""


class Client:
    """A client of the event stream, which counts its events."""

    def __init__(self, address: str, cookie: str) -> None:
        self.events = 0
        self._answer = urlopen(Request(f"{address}api/study/long/events", headers={"cookie": cookie}), timeout=60)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        # It ends with an error when it is closed.
        with suppress(OSError, ValueError, AttributeError):
            for line in self._answer:
                self.events += line.startswith(b"data")

    def close(self) -> None:
        with suppress(OSError):
            self._answer.fp.raw._sock.shutdown(2)  # a reading thread waits for it
        self._thread.join()
        self._answer.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "long_study.py").write_text(MODULE)
        with running(folder) as scheduler, serving(folder) as (address, cookie):
            time.sleep(WARM_UP)
            print(f"{'pair':>6s}{'without':>16s}{'ten clients':>16s}{'ratio':>8s}{'events':>8s}{'loop':>8s}")
            ratios, rows = [], []
            for pair in range(PAIRS):
                found = {}
                # The order changes from pair to pair, because a study grows.
                for count in (0, CLIENTS) if pair % 2 else (CLIENTS, 0):
                    found[count] = cpu_per_trial(folder, scheduler, address, cookie, count)
                (without, _), (with_, events) = found[0], found[CLIENTS]
                loop = calibration()
                ratios.append(with_ / without)
                rows.append({"without": without, "with": with_, "events": events, "loop": loop})
                said = f"{1e3 * without:13.3f} ms{1e3 * with_:13.3f} ms{ratios[-1]:8.3f}{events:8d}{loop:6.2f} s"
                print(f"{pair + 1:6d}{said}", flush=True)
    goals = {"CPU per trial with ten clients, times that without": goal(statistics.median(ratios), at_most=MOST)}
    finish({"pairs": rows}, goals, {"clients": CLIENTS, "seconds": SECONDS})


def cpu_per_trial(folder: Path, scheduler: psutil.Process, address: str, cookie: str, count: int) -> tuple[float, int]:
    """Return the scheduler's CPU seconds per trial with `count` clients, and the number of events that they got."""
    clients = [Client(address, cookie) for _ in range(count)]
    try:
        time.sleep(SETTLE)
        trials, cpu = ended(folder), cpu_of(scheduler)
        before = sum(client.events for client in clients)
        time.sleep(SECONDS)
        cpu, trials = cpu_of(scheduler) - cpu, ended(folder) - trials
        return cpu / trials, sum(client.events for client in clients) - before
    finally:
        for client in clients:
            client.close()


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def ended(folder: Path) -> int:
    with closing(sqlite3.connect(f"file:{folder}/shadho.db?mode=ro", uri=True)) as store:
        [(count,)] = store.execute("SELECT count(*) FROM trials WHERE finished_at IS NOT NULL")
    return int(count)


@contextmanager
def running(folder: Path) -> Iterator[psutil.Process]:
    """Run the study; gives the process of its scheduler once trials have ended."""
    words = [sys.executable, "-m", "shadho_celery", "run", "long_study", "--study", "long", "--sampler", "random"]
    with started(folder, [*words, "--trials", "1000000", "--quiet"]) as process:
        for _ in range(600):
            time.sleep(0.1)
            if process.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            with suppress(sqlite3.Error):
                if ended(folder) > 100:
                    break
        yield psutil.Process(process.pid)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str]]:
    """Serve the dashboard; gives its address and the cookie of a browser that has logged in."""
    with started(folder, [sys.executable, "-m", "shadho_celery", "dashboard", "--port", "0"], pipe=True) as process:
        assert process.stdout is not None
        found = next(each for line in process.stdout if (each := re.search(r"(http://\S+/)#(\S+)", line)))
        address, code = found.groups()
        headers = {"content-type": "application/json", "origin": address.rstrip("/")}
        with urlopen(Request(f"{address}login", json.dumps({"code": code}).encode(), headers)) as answer:
            yield address, answer.headers["set-cookie"].partition(";")[0]


@contextmanager
def started(folder: Path, words: list[str], *, pipe: bool = False) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a session of its own, and end it with Ctrl-C."""
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log").open("a"))
        out = subprocess.PIPE if pipe else log
        process = subprocess.Popen(words, cwd=folder, stdout=out, stderr=log, text=True, start_new_session=True)
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
