"""Real processes: workers on servers that the tests lend, the studies that are launched on them, and dashboards."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import ROOT

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

#: in the name of every queue, so that no worker of another run takes part
RUN = uuid.uuid4().hex[:8]

#: seconds in which the workers must have announced themselves
READY_SECONDS = 60.0


@contextmanager
def lent_redis(url: str | None = None) -> Iterator[str]:
    """`url`; where there is none, an empty database of the tests' Redis, flushed at the end."""
    import services

    if url is not None:
        yield url
        return
    with services.redis_service() as (server, _), services.redis_db(server) as lent:
        yield lent


@contextmanager
def python(
    place: Path, environment: Mapping[str, str], *arguments: str, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """A Python process in `place` that is stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}", **environment},
        stdout=stdout,
        stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def dashboard(place: Path, url: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a dashboard of a store; yield its process and the address that logs in."""
    words = ["-m", "shadho_celery", "dashboard", "--port", "0", "--store", url]
    with python(place, {}, *words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if "http://" in line)
        yield process, line[line.index("http://") :].strip()


def await_workers(redis: str, classes: Collection[str]) -> None:
    """Wait until there is a worker for each of these, which has a class as often as it has workers."""
    registry, wanted = Registry(connect(redis), Worker), Counter(classes)
    deadline = time.monotonic() + READY_SECONDS
    while wanted - Counter(worker.compute_class for worker in registry.living().values()):
        if time.monotonic() > deadline:
            raise SystemExit(f"the workers were not ready within {READY_SECONDS:.0f} s; VERBOSE=1 shows why")
        time.sleep(0.1)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came of a command that ran a study."""

    #: what it printed under --json
    report: Mapping[str, Any]
    #: its trials' rows of the store, in the order of their numbers
    trials: Sequence[Mapping[str, Any]]


class Fleet:
    """Real workers, and the studies launched on them. A context manager: all of it ends with it.

    `slots` are by class; the classes' queues have names of this run's own, see `queue`.
    """

    def __init__(self, slots: Mapping[str, int], broker: str, redis: str, *, each: int = 1, **studies: str) -> None:
        """`studies` are study files by name; in their text every class is to be written as its `queue`.

        A class has `each` workers with so many slots.
        """
        self._workers = [(self.queue(name), number) for name, number in slots.items() for _ in range(each)]
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
            for name, slots in self._workers:
                words = ["-m", "celery", "-A", "shadho_celery", "worker", "-Q", name, "-c", str(slots)]
                words += ["-l", "WARNING", "--without-gossip", "--without-mingle"]
                opened.enter_context(python(self._place, self._environment, *words))
            await_workers(self._redis, [name for name, _ in self._workers])
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def run(self, study: str, *words: str, timeout: float = 600.0) -> Run:
        """Launch `study` with `words`, options of the command, and wait for its end."""
        store = self._place / f"{uuid.uuid4().hex}.db"
        command = ["-m", "shadho_celery.launch", study, *words, "--json", "--store", f"sqlite:///{store}"]
        with python(self._place, self._environment, *command, stdout=subprocess.PIPE) as process:
            out = process.communicate(timeout=timeout)[0]
            if process.returncode:
                raise SystemExit(f"the study ended with {process.returncode}; VERBOSE=1 shows why")
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            rows = [dict(row) for row in connection.execute("select * from trials order by number")]
        trials = [{**row, "metrics": json.loads(row["metrics"])} for row in rows]
        return Run(report=json.loads(out), trials=trials)
