"""How long a slot idles between two trials: ``python tests/benchmarks/idle.py [--seconds 0 0.05]``.

Two workers of two classes, two slots each, run a study on one local Redis (broker and channel) whose objective notes
its own start and end. The gap is what lies between one trial's end and the next one's start in the same slot: the
result's way to the scheduler's stream, and the next claim's; where nothing waited in the class's queue, a whole turn of
the loop too. The wall clock of one machine measures both ends.

Also what the other benchmarks on real workers share: `lent_redis`, `lent_rabbitmq` and `Fleet`.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import finish, goal, quartiles
from overhead import ROOT, RUN, python

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

#: seconds in which the workers must have announced themselves
READY_SECONDS = 60.0

CLASSES = ("idle-large", "idle-small")

#: a study file whose trials sleep, or do nothing, and tell when
STUDY = """
import time
from hyperopt import hp
SPACE = hp.choice("side", [{{"x": hp.uniform("x", 0, 1)}}, {{"y": hp.uniform("y", 0, 1)}}])
STUDY = {{"sampler": "random"}}
def objective(params, context):
    began = time.time()
    if {seconds}:
        time.sleep({seconds})
    return {{"loss": 0.0, "slot": context.slot, "began": began, "ended": time.time()}}
"""


@contextmanager
def lent_redis(url: str | None = None) -> Iterator[str]:
    """`url`; where there is none, an empty database of the tests' Redis, flushed at the end."""
    if url is not None:
        yield url
        return
    services = _services()
    with services.redis_service() as (server, _), services.redis_db(server) as lent:
        yield lent


@contextmanager
def lent_rabbitmq(url: str | None = None) -> Iterator[str]:
    """`url`; where there is none, a virtual host of the tests' RabbitMQ, removed at the end."""
    if url is not None:
        yield url
        return
    services = _services()
    with services.amqp_service() as (server, started):
        ctl = started.ctl if isinstance(started, services.RabbitServer) else services.system_rabbitmqctl
        with services.amqp_vhost(server, ctl) as lent:
            yield lent


def _services() -> Any:
    """The tests' own way to servers; a benchmark is run from its folder, which does not see theirs."""
    sys.path.append(str(ROOT / "tests"))
    return import_module("services")


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a command that ran a study."""

    #: seconds from its start to its end
    wall: float
    #: what it printed under --json
    report: Mapping[str, Any]
    #: its trials' rows of the store, in the order of their numbers
    trials: Sequence[Mapping[str, Any]]


class Fleet:
    """Real workers, each a process, and the studies launched on them. A context manager: all of it ends with it.

    `slots` are by class; the classes' queues have names of this run's own, see `queue`.
    """

    def __init__(self, slots: Mapping[str, int], broker: str, redis: str, **studies: str) -> None:
        """`studies` are study files by name; in their text every class is to be written as its `queue`."""
        self._slots = dict(slots)
        self._redis = redis
        self._studies = studies
        self._environment = {
            "CELERY_BROKER_URL": broker,
            "SHADHO_REDIS_URL": redis,
            "SHADHO_IMPORTS": ",".join(studies),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._opened = ExitStack()

    @staticmethod
    def queue(compute_class: str) -> str:
        """The name that a class has in this run: no worker of another run takes part."""
        return f"{compute_class}-{RUN}"

    def __enter__(self) -> Fleet:
        with ExitStack() as opened:
            self._place = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            for name, text in self._studies.items():
                (self._place / f"{name}.py").write_text(text)
            for name, slots in self._slots.items():
                words = ["-m", "celery", "-A", "shadho_celery", "worker", "-Q", self.queue(name), "-c", str(slots)]
                words += ["-l", "WARNING", "--without-gossip", "--without-mingle"]
                opened.enter_context(python(self._place, self._environment, *words))
            self._await_workers()
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _await_workers(self) -> None:
        registry = Registry(connect(self._redis), Worker)
        wanted = {self.queue(name) for name in self._slots}
        deadline = time.monotonic() + READY_SECONDS
        while not wanted <= {worker.compute_class for worker in registry.living().values()}:
            if time.monotonic() > deadline:
                raise SystemExit(f"the workers were not ready within {READY_SECONDS:.0f} s; VERBOSE=1 shows why")
            time.sleep(0.1)

    def run(self, study: str, *words: str, timeout: float = 170.0) -> Run:
        """Launch `study` with `words`, options of the command, and wait for its end."""
        store = self._place / f"{uuid.uuid4().hex}.db"
        command = ["-m", "shadho_celery.launch", study, *words, "--json", "--store", f"sqlite:///{store}"]
        began = time.monotonic()
        with python(self._place, self._environment, *command, stdout=subprocess.PIPE) as process:
            out = process.communicate(timeout=timeout)[0]
            wall = time.monotonic() - began
            if process.returncode:
                raise SystemExit(f"the study ended with {process.returncode}; VERBOSE=1 shows why")
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            rows = [dict(row) for row in connection.execute("select * from trials order by number")]
        trials = [{**row, "metrics": json.loads(row["metrics"])} for row in rows]
        return Run(wall=wall, report=json.loads(out), trials=trials)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=600, help="trials of a study [600]")
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=[0.0, 0.05], help="a study for each: what its trials take [0 0.05]"
    )
    parser.add_argument("--slots", type=int, default=2, help="slots of each of the two workers [2]")
    parser.add_argument("--repeats", type=int, default=3, help="studies of each kind, by turns [3]")
    parser.add_argument("--policy", default=None, help="placement policy [launch's default]")
    redis_url = os.environ.get("SHADHO_TEST_REDIS_URL")
    parser.add_argument("--redis-url", default=redis_url, help="broker and channel [a database lent by tests/services]")
    given = parser.parse_args()

    words = ["--trials", str(given.trials)] + (["--policy", given.policy] if given.policy else [])
    studies = {f"sleeps_{place}": STUDY.format(seconds=seconds) for place, seconds in enumerate(given.seconds)}
    measured: dict[float, list[dict[tuple[str, int], list[float]]]] = defaultdict(list)
    with (
        lent_redis(given.redis_url) as redis_url,
        Fleet(dict.fromkeys(CLASSES, given.slots), redis_url, redis_url, **studies) as fleet,
    ):
        for _ in range(given.repeats):
            for name, seconds in zip(studies, given.seconds, strict=True):
                measured[seconds].append(gaps(fleet.run(name, *words).trials))

    figures: dict[str, object] = {}
    goals: dict[str, dict[str, object]] = {}
    for seconds, runs in measured.items():
        label = f"{seconds * 1000:g}_ms" if seconds else "noop"
        by_slot = {slot: [gap for run in runs for gap in run.get(slot, [])] for run in runs for slot in run}
        figures[label] = show(f"trials of {seconds * 1000:g} ms" if seconds else "no-op trials", by_slot)
        worst = max(quartiles(values)[1] for values in by_slot.values())
        goals[f"{label}_idle_ms_median_of_worst_slot"] = goal(worst * 1000, at_most=20)
    settings = {"trials": given.trials, "slots": given.slots, "repeats": given.repeats, "policy": given.policy}
    finish(figures, goals, settings)


def gaps(trials: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], list[float]]:
    """By class and slot, the seconds between one trial's end and the next one's start."""
    runs: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for trial in trials:
        metrics = trial["metrics"]
        runs[trial["compute_class"], metrics["slot"]].append((metrics["began"], metrics["ended"]))
    found = {}
    for slot, spans in runs.items():
        found[slot] = [began - ended for (_, ended), (began, _) in pairwise(sorted(spans))]
    return {slot: values for slot, values in sorted(found.items()) if values}


def show(what: str, by_slot: Mapping[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Print the table of one kind of study; its figures in milliseconds."""
    print(f"\n{what}: milliseconds a slot idles between two of them")
    print(f"{'slot':16s}{'gaps':>8s}{'lower':>9s}{'median':>9s}{'upper':>9s}{'95 %':>9s}")
    rows = {f"{name.removesuffix('-' + RUN)}/{slot}": values for (name, slot), values in by_slot.items()}
    rows["all"] = [gap for values in by_slot.values() for gap in values]
    figures = {}
    for name, values in rows.items():
        low, middle, high = (1000 * value for value in quartiles(values))
        late = 1000 * sorted(values)[int(0.95 * len(values))]
        print(f"{name:16s}{len(values):8d}{low:9.2f}{middle:9.2f}{high:9.2f}{late:9.2f}")
        figures[name] = {"gaps": len(values), "lower": low, "median": middle, "upper": high, "p95": late}
    return figures


if __name__ == "__main__":
    main()
