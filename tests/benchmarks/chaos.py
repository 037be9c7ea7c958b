"""Kills everything, again and again, and counts: ``python tests/benchmarks/chaos.py --minutes 5``.

A study on a private RabbitMQ and a private Redis, with workers of two classes. While it runs, workers and scheduler are
killed or stopped, both servers are killed and restarted, connections are cut, clocks are set forward and back, and part
of the trials are poison: they raise, exit, crash or return nonsense. Whoever is killed is started again a little later,
as a supervisor would do. At the end all is let be, the study is asked for a few trials more, and what is in its store
is held against what the objective wrote down of its own runs, and against a trigger in the store that notes every
change of a finished trial.

Exit code 0 where no trial was lost and none was counted twice.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

import services  # noqa: E402 -- found by the line above
from services.clocks import ProcessClock  # noqa: E402

EPILOG = """examples:
  python tests/benchmarks/chaos.py --minutes 5
  python tests/benchmarks/chaos.py --minutes 3 --seed 7    # the same havoc, as far as machines repeat themselves
  python tests/benchmarks/chaos.py --minutes 1 --every 2   # something breaks every two seconds
"""

STUDY = """
import math, os, sys, time
from hyperopt import hp

KINDS = ["good"] * 14 + ["raise", "nan", "exit", "os_exit", "crash", "memory"]
SPACE = {"kind": hp.choice("kind", KINDS), "seconds": hp.loguniform("seconds", math.log(0.05), math.log(2.0))}
STUDY = {"classes": ["large", "small"]}


def note(what, context):
    # Not time.time(), which the havoc sets.
    line = f"{what} {context.trial} {context.attempt} {time.clock_gettime(time.CLOCK_REALTIME)}\\n"
    descriptor = os.open("runs.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def objective(params, context):
    note("began", context)
    time.sleep(params["seconds"])
    kind = params["kind"]
    if kind == "raise":
        raise RuntimeError("poison")
    if kind == "exit":
        sys.exit(3)
    if kind == "os_exit":
        os._exit(3)
    if kind == "crash":
        import ctypes
        ctypes.string_at(0)
    if kind == "memory":
        raise MemoryError("poison")
    note("ended", context)
    return math.nan if kind == "nan" else {"loss": params["seconds"], "kind": kind}
"""

#: what happens how often, beside one another
HAVOC = {"kill worker": 6, "kill scheduler": 5, "stop worker": 2, "cut connections": 2, "restart Redis": 2}
HAVOC |= {"freeze Redis": 1, "restart RabbitMQ": 2, "set a clock": 3}

#: seconds by which a clock is set forward or back
STEPS = (-3600.0, -600.0, 600.0, 3600.0)

#: seconds that a study may take to come to its end once it is let be
END_SECONDS = 150.0


@dataclass
class Keeper:
    """A process that is started again a little after it has died."""

    name: str
    command: Callable[[], Sequence[str]]
    folder: Path
    environment: Mapping[str, str]
    process: subprocess.Popen[bytes] | None = None
    due: float = 0.0
    starts: int = 0

    def keep(self, now: float, generator: random.Random) -> None:
        """Start it where it is due."""
        if self.process is not None and self.process.poll() is not None:
            self.process, self.due = None, now + generator.uniform(0.2, 3.0)
        if self.process is None and now >= self.due:
            self.starts += 1
            with (self.folder / f"{self.name}.log").open("ab") as log:
                self.process = subprocess.Popen(
                    self.command(),
                    cwd=self.folder,
                    env=dict(self.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )

    def send(self, sign: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(sign)

    def end(self) -> None:
        if self.process is not None:
            self.send(signal.SIGKILL)
            self.process.wait()
            self.process = None


@dataclass
class Chaos:
    """The fleet, and what is done to it."""

    folder: Path
    redis: services.RedisServer
    rabbit: services.RabbitServer
    generator: random.Random
    lease: float
    console: Console
    began: float = field(default_factory=time.monotonic)
    #: (what, seconds since the epoch) of all that was done
    events: list[tuple[str, float]] = field(default_factory=list)
    #: what is to be undone, and when
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    trials: int = 10**6

    def __post_init__(self) -> None:
        (self.folder / "chaotic.py").write_text(STUDY)
        self.mark = uuid.uuid4().hex
        environment = {**os.environ, "PYTHONPATH": str(ROOT), services.MARK: self.mark, "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"CELERY_BROKER_URL": self.rabbit.url, "SHADHO_REDIS_URL": self.redis.url}
        environment |= {"SHADHO_LEASE_SECONDS": str(self.lease)}
        # One for each worker, and the scheduler's.
        self.clocks = [ProcessClock(self.folder / f"clock-{place}", str(ROOT)) for place in range(4)]
        told = [{**environment, **clock.environment} for clock in self.clocks]
        words = [sys.executable, "-m", "shadho_celery.worker", "--import", "chaotic", "--slots", "1", "--class"]
        self.workers = [
            Keeper(f"worker-{place}", lambda name=name: [*words, name], self.folder, told[place])  # type: ignore[misc]
            for place, name in enumerate(["large", "small", "small"])
        ]
        self.scheduler = Keeper("scheduler", self._launch, self.folder, told[-1])

    def _launch(self) -> list[str]:
        words = [sys.executable, "-m", "shadho_celery.launch", "chaotic", "--trials", str(self.trials)]
        return [*words, *(["--resume", "chaos"] if self.rows("select 1 from studies") else ["--study", "chaos"])]

    def rows(self, query: str) -> list[tuple[float, ...]]:
        """What the store has; nothing where there is none yet."""
        with suppress(sqlite3.OperationalError), closing(self._connect()) as connection:
            return connection.execute(query).fetchall()
        return []

    def _connect(self) -> sqlite3.Connection:
        return sqlite3.connect(f"file:{self.folder / 'shadho.db'}?mode=rw", uri=True, timeout=30)

    def audit(self) -> None:
        """Have the store itself note every change of a trial that had ended."""
        with closing(self._connect()) as connection, connection:
            connection.execute("create table if not exists twice (number integer)")
            connection.execute("create table if not exists ended (number integer, at real)")
            connection.execute(
                "create trigger if not exists audit after update on trials when old.finished_at is not null "
                "begin insert into twice values (old.number); end"
            )
            # The machine's clock: those of workers and scheduler are set.
            connection.execute(
                "create trigger if not exists record after update on trials "
                "when old.finished_at is null and new.finished_at is not null begin "
                "insert into ended values (new.number, (julianday('now') - 2440587.5) * 86400.0); end"
            )

    def turn(self) -> None:
        """Undo what is due, and start again what has died."""
        now = time.monotonic()
        for due in [one for one in self.undo if one[0] <= now]:
            self.undo.remove(due)
            due[1]()
        for keeper in (*self.workers, self.scheduler):
            keeper.keep(now, self.generator)
        time.sleep(0.1)

    def strike(self) -> None:
        """Do something bad."""
        what = self.generator.choices([*HAVOC], weights=[*HAVOC.values()])[0]
        worker = self.generator.choice(self.workers)
        self.events.append((what, time.time()))
        self.console.print(f"{time.monotonic() - self.began:6.1f} s  {what}", highlight=False)
        later = time.monotonic() + self.generator.uniform(1.0, 3.0)
        if what == "kill worker":
            worker.send(signal.SIGKILL)
        elif what == "kill scheduler":
            self.scheduler.send(signal.SIGKILL)
        elif what == "stop worker":
            worker.send(signal.SIGSTOP)
            self.undo.append((time.monotonic() + self.lease + 2.0, lambda: worker.send(signal.SIGCONT)))
        elif what == "set a clock":
            self.generator.choice(self.clocks).set_to(self.generator.choice(STEPS))
        elif what == "cut connections":
            with suppress(services.Unavailable):
                self.rabbit.ctl("close_all_connections", "havoc")
        elif what == "freeze Redis" and self.redis.process is not None:
            self.redis.process.send_signal(signal.SIGSTOP)
            frozen = self.redis.process
            self.undo.append((later + self.lease, lambda: frozen.send_signal(signal.SIGCONT)))
        elif what == "restart Redis" and self.redis.process is not None:
            self.redis.kill()
            self.undo.append((later, lambda: self._start(self.redis)))
        elif what == "restart RabbitMQ" and self.rabbit.process is not None:
            self.rabbit.kill()
            self.undo.append((later, lambda: self._start(self.rabbit)))

    def _start(self, server: services.Server) -> None:
        if server.process is None:
            server.start()

    def run(self, seconds: float, every: float) -> bool:
        """Make havoc for so long, then let the study come to its end; whether it did."""
        while not self.rows("select 1 from trials where finished_at is not null"):
            self.turn()
            if time.monotonic() - self.began > 90:
                return False
        self.audit()
        end = time.monotonic() + seconds
        next_strike = 0.0
        while time.monotonic() < end:
            if time.monotonic() >= next_strike:
                self.strike()
                next_strike = time.monotonic() + self.generator.expovariate(1 / every)
            self.turn()
        self.console.print(f"{time.monotonic() - self.began:6.1f} s  havoc is over", highlight=False)
        for _, act in self.undo:
            act()
        self.undo.clear()
        self.scheduler.end()
        self.trials = len(self.rows("select number from trials")) + 10
        deadline = time.monotonic() + END_SECONDS
        while time.monotonic() < deadline:
            self.turn()
            if self.scheduler.process is not None and self.scheduler.process.poll() == 0:
                return True
        return False

    def close(self) -> int:
        """End everything; processes that are left five seconds later."""
        for keeper in (self.scheduler, *self.workers):
            keeper.send(signal.SIGCONT)
            keeper.end()
        deadline = time.monotonic() + 5
        while (left := services.marked_processes(self.mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(left)


def recoveries(events: Sequence[tuple[str, float]], ends: Sequence[float]) -> dict[str, list[float]]:
    """By kind of event, the seconds from it to the next run of an objective that came to its end."""
    found: dict[str, list[float]] = defaultdict(list)
    for what, at in events:
        after = [end - at for end in ends if end > at]
        found[what].append(min(after) if after else float("inf"))
    return found


def report(chaos: Chaos, left: int) -> bool:
    """Print what came of it; whether nothing was lost and nothing counted twice."""
    rows = chaos.rows("select number, state, json_extract(params, '$.kind'), error, lost from trials")
    counted = [row for row in rows if row[1] in ("COMPLETE", "FAILED", "PRUNED")]
    lines = [line.split() for line in (chaos.folder / "runs.txt").read_text().splitlines()]
    began = [(int(number), float(at)) for word, number, _, at in lines if word == "began"]
    ends = sorted(float(at) for word, _, _, at in lines if word == "ended")
    runs = Counter(number for number, _ in began)
    finished = dict(chaos.rows("select number, at from ended"))
    rerun = sum(number in finished and at > finished[number] for number, at in began)
    good = [row for row in counted if int(row[2]) < 14]
    by_kills = [row for row in good if row[1] == "FAILED" and row[4] >= 3]
    odd = [row for row in good if row[1] != "COMPLETE" and row not in by_kills]
    odd += [row for row in counted if int(row[2]) >= 14 and row[1] != "FAILED"]
    lost = chaos.trials - len(counted)
    twice = len(chaos.rows("select number from twice")) + max(0, len(counted) - chaos.trials)
    seconds = recoveries(chaos.events, ends)
    table = Table("what", "times", "median recovery s", "worst s")
    for what, taken in sorted(seconds.items()):
        table.add_row(what, str(len(taken)), f"{statistics.median(taken):.1f}", f"{max(taken):.1f}")
    chaos.console.print(table)
    states = Counter(str(row[1]) for row in rows)
    per_trial = sum(runs.values()) / max(1, len(runs))
    worst = max((max(taken) for taken in seconds.values()), default=0.0)
    print(f"trials asked {chaos.trials}, finished {len(counted)}: {dict(states)}")
    print(f"good trials FAILED after three lost attempts {len(by_kills)}, ended otherwise than they should {len(odd)}")
    print(f"runs begun after their trial was recorded {rerun}, most runs of a trial {max(runs.values(), default=0)}")
    print(f"starts of workers {sum(w.starts for w in chaos.workers)}, of schedulers {chaos.scheduler.starts}")
    print(f"processes left behind {left}")
    for row in odd[:5]:
        print(f"  trial {row[0]}, kind {row[2]}: {row[1]}, {str(row[3])[-200:]}")
    print(f"lost {lost}  counted_twice {twice}  executions/trial {per_trial:.2f}  worst recovery {worst:.1f} s")
    return lost == 0 and twice == 0


def main() -> int:
    """Make havoc and report."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n\n")[2],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long things break (default 5)")
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two strikes (default 5)")
    parser.add_argument("--lease", type=float, default=5.0, help="seconds of a trial's lease (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the havoc (default 0)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and store, and say where it is")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as opened:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        if not options.keep:
            opened.callback(lambda: subprocess.run(["rm", "-rf", str(folder)], check=False))
        servers = [services.RedisServer(), services.RabbitServer()]
        for server in servers:
            opened.callback(server.stop)
            server.start()
        chaos = Chaos(folder, *servers, random.Random(options.seed), options.lease, Console(highlight=False))
        opened.callback(chaos.close)
        came_to_its_end = chaos.run(60 * options.minutes, options.every)
        left = chaos.close()
        if not came_to_its_end:
            print("the study did not come to its end; the scheduler said last:")
            print("\n".join((folder / "scheduler.log").read_text().splitlines()[-10:]))
        is_right = report(chaos, left)
        if options.keep:
            print(f"logs and store: {folder}")
    return 0 if is_right and came_to_its_end else 1


if __name__ == "__main__":
    sys.exit(main())
