"""Kills everything, again and again, and counts: ``python tests/benchmarks/chaos.py --minutes 5``.

A signed study on a private RabbitMQ, Redis and PostgreSQL, with workers of two classes. While it runs, workers and
scheduler are killed or stopped, the servers are killed and restarted, connections are cut, the wall clocks of processes
are stepped, a stranger writes forged messages, events and announcements, and the store is replaced by an older copy.
Servers stand still: they are stopped, have an alarm, keep a table locked, deny a user's commands, answer with errors
that pass; and rows are deleted.
Part of the trials are poison: they raise, exit, crash or return nonsense. Whoever is killed is started again a little
later, as a supervisor would do. At the end all is let be, and the study is asked for a few trials more. The contents
of its store are compared with the objective's own record of its runs, with the losses that the params demand, and with
a trigger in the store that records every change of a finished trial.

With ``--rungs`` trials have budgets, by ``how: asha``: nothing may be promoted twice, and nothing without a result on
the rung below.

Exit code 0 where no trial was lost, none was counted twice, no loss is wrong, and the study did not hang.

Examples:
  python tests/benchmarks/chaos.py --minutes 3 --seed 7    # the same havoc, as far as machines repeat themselves
  python tests/benchmarks/chaos.py --minutes 1 --every 2   # something breaks every two seconds
  python tests/benchmarks/chaos.py --minutes 5 --rungs     # trials are promoted meanwhile
"""

from __future__ import annotations

import json
import mmap
import os
import random
import secrets
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import figures
import kombu
import redis
import services
import sqlalchemy as sa
from rich.console import Console

STUDY = """
import math, os, sys, time
from hyperopt import hp

KINDS = ["good"] * 14 + ["raise", "nan", "exit", "os_exit", "crash", "memory"]
SPACE = {"kind": hp.choice("kind", KINDS), "seconds": hp.loguniform("seconds", math.log(0.05), math.log(2.0))}
STUDY = {"classes": ["large", "small"], "sampler": "random", "fidelity": FIDELITY}


def note(what, context):
    # Not time.time(): that clock is stepped.
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
HAVOC |= {"freeze Redis": 1, "restart RabbitMQ": 2, "restart PostgreSQL": 2}
HAVOC |= {"step clock": 3, "forge": 3, "older store": 2}
HAVOC |= {"freeze RabbitMQ": 1, "alarm of RabbitMQ": 1, "freeze PostgreSQL": 1, "lock a table": 1}
HAVOC |= {"deny Redis": 2, "PostgreSQL's passing errors": 2, "delete rows": 1}

#: codes of PostgreSQL's errors that pass
PASSING = ("40001", "40P01", "53100", "53300", "55P03", "57014", "25006")

#: seconds by which a wall clock is stepped
STEPS = (-3600.0, -600.0, 600.0, 3600.0)

#: Python's sitecustomize of all processes: their wall clock is off by the number in a file that a strike may change
CLOCK = """
import mmap, os, struct, time

def stepped():
    with open(os.environ["CHAOS_CLOCK"], "rb") as file:
        offset, real = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ), time.time
    return lambda: real() + struct.unpack("d", offset)[0]

if "CHAOS_CLOCK" in os.environ:
    time.time = stepped()
"""

#: The store's own record: changes of finished trials, and the moments at which trials were finished.
AUDIT = """
create schema if not exists audit;
create table if not exists audit.twice (number integer);
create table if not exists audit.recorded (number integer, at float);
create or replace function audit.note() returns trigger language plpgsql as $$ begin
  if old.finished_at is not null then insert into audit.twice values (old.number); end if;
  if old.finished_at is null and new.finished_at is not null then
    insert into audit.recorded values (old.number, extract(epoch from clock_timestamp()));
  end if;
  return new; end $$;
create or replace trigger audit after update on trials for each row execute function audit.note();
"""

#: seconds between two copies of the store
COPY_SECONDS = 20.0

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

    def __post_init__(self) -> None:
        self._clock = self.folder / f"{self.name}.clock"
        self._clock.write_bytes(bytes(8))

    def step_clock(self, seconds: float) -> None:
        """Set the wall clock of its processes to be off by so many seconds."""
        with self._clock.open("r+b") as file, mmap.mmap(file.fileno(), 8) as offset:
            offset[:] = struct.pack("d", seconds)

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
                    env={**self.environment, "CHAOS_CLOCK": str(self._clock)},
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
    postgres: services.PostgresServer
    generator: random.Random
    lease: float
    console: Console
    began: float = field(default_factory=time.monotonic)
    #: (what, seconds since the epoch) of all that was done
    events: list[tuple[str, float]] = field(default_factory=list)
    #: what is to be undone, and when
    undo: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    trials: int = 10**6
    #: True if trials have budgets
    has_rungs: bool = False
    #: moment of the last copy of the store
    copied_at: float = -float("inf")

    def __post_init__(self) -> None:
        fidelity = {"least": 1, "most": 9, "eta": 3, "how": "asha"} if self.has_rungs else None
        (self.folder / "chaotic.py").write_text(f"FIDELITY = {fidelity}\n{STUDY}")
        (self.folder / "sitecustomize.py").write_text(CLOCK)
        key = self.folder / "shadho.key"
        key.touch(mode=0o600)
        key.write_text(secrets.token_hex(32))
        # A server that stands still must not keep its end from being undone.
        limits = {"connect_timeout": 2, "options": "-c lock_timeout=2000"}
        self.store = sa.create_engine(self.postgres.url, poolclass=sa.NullPool, connect_args=limits)
        self.mark = uuid.uuid4().hex
        path = os.pathsep.join([str(figures.ROOT), str(self.folder)])
        environment = {**os.environ, "PYTHONPATH": path, services.MARK: self.mark, "CUDA_VISIBLE_DEVICES": ""}
        environment |= {"SHADHO_SIGNING_KEY_FILE": str(key)}
        environment |= {"CELERY_BROKER_URL": self.rabbit.url, "SHADHO_REDIS_URL": self.redis.url}
        environment |= {"SHADHO_LEASE_SECONDS": str(self.lease)}
        words = [sys.executable, "-m", "shadho_celery.worker", "--import", "chaotic", "--slots", "1", "--class"]
        self.workers = [
            Keeper(f"worker-{place}", lambda name=name: [*words, name], self.folder, environment)  # type: ignore[misc]
            for place, name in enumerate(["large", "small", "small"])
        ]
        self.scheduler = Keeper("scheduler", self._launch, self.folder, environment)

    def _launch(self) -> list[str]:
        words = [sys.executable, "-m", "shadho_celery.launch", "chaotic", "--trials", str(self.trials)]
        words += ["--store", self.postgres.url]
        return [*words, *(["--resume", "chaos"] if self.rows("select 1 from studies") else ["--study", "chaos"])]

    def rows(self, query: str) -> list[sa.Row[Any]]:
        """Return rows of the store, none while it is away or has no such table."""
        with suppress(sa.exc.DBAPIError), self.store.connect() as connection:
            return list(connection.execute(sa.text(query)).all())
        return []

    def _tables(self) -> list[str]:
        found = self.rows("select tablename from pg_tables where schemaname = 'public'")
        # The table that the others refer to comes first.
        return sorted((row[0] for row in found), key=lambda name: name != "studies")

    def copy_store(self) -> None:
        """Copy the store, for `restore_store`."""
        with suppress(sa.exc.DBAPIError), self.store.begin() as connection:
            connection.execute(sa.text("drop schema if exists backup cascade; create schema backup"))
            for name in self._tables():
                connection.execute(sa.text(f"create table backup.{name} as table public.{name}"))
            self.copied_at = time.monotonic()

    def restore_store(self) -> None:
        """Replace the store by its copy, as an operator does with a backup: no scheduler runs meanwhile."""
        self.scheduler.end()
        with suppress(sa.exc.DBAPIError), self.store.begin() as connection:
            connection.execute(sa.text(f"truncate {', '.join(self._tables())} cascade"))
            for name in self._tables():
                connection.execute(sa.text(f"insert into public.{name} select * from backup.{name}"))
            unfinished = "number not in (select number from trials where finished_at is not null)"
            connection.execute(sa.text(f"delete from audit.recorded where {unfinished}"))

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
        elif what == "restart PostgreSQL" and self.postgres.process is not None:
            # Its backends, which have sessions of their own, would keep its memory if they were still frozen.
            signal_all(processes(self.postgres.process.pid), signal.SIGCONT)
            self.postgres.kill(signal.SIGINT)
            self.undo.append((later, lambda: self._start(self.postgres)))
        elif what == "step clock":
            self.generator.choice([*self.workers, self.scheduler]).step_clock(self.generator.choice(STEPS))
        elif what == "forge":
            # kombu raises an error of its own where no connection can be had.
            broken = kombu.Connection(self.rabbit.url).connection_errors
            with suppress(redis.RedisError, OSError, kombu.exceptions.OperationalError, *broken):
                forge(self.redis.url, self.rabbit.url)
        elif what == "older store":
            self.restore_store()
        else:
            self.stand_still(what, later)

    def stand_still(self, what: str, later: float) -> None:
        """Have a server stand still or refuse what it is asked, until about `later`."""
        if what in {"freeze RabbitMQ", "freeze PostgreSQL"}:
            server = self.rabbit if what == "freeze RabbitMQ" else self.postgres
            if server.process is not None:
                frozen = processes(server.process.pid)
                signal_all(frozen, signal.SIGSTOP)
                self.undo.append((later + 10.0, lambda: signal_all(frozen, signal.SIGCONT)))
        elif what == "alarm of RabbitMQ":
            self._alarm("0.00001")
            self.undo.append((later + 6.0, lambda: self._alarm("0.6")))
        elif what == "lock a table":
            with suppress(sa.exc.DBAPIError):
                session = self.store.connect()
                session.execute(sa.text(f"lock table {self.generator.choice(['trials', 'studies'])}"))
                self.undo.append((later + 6.0, lambda: self._unlock(session)))
        elif what == "deny Redis":
            self._deny("-@all", "+@connection")
            self.undo.append((later + self.lease, lambda: self._deny("+@all")))
        elif what == "PostgreSQL's passing errors":
            code = self.generator.choice(PASSING)
            body = f"begin raise exception 'havoc' using errcode = '{code}'; end"
            self._do(
                f"create or replace function deny() returns trigger language plpgsql as $$ {body} $$",
                "create or replace trigger deny before insert or update on trials for each row execute function deny()",
            )
            self.undo.append((later + 2.0, self._let_write))
        elif what == "delete rows":
            numbers = "select number from trials where finished_at is null order by random() limit 3"
            self._do(f"delete from trials where number in ({numbers})")

    def _unlock(self, session: sa.Connection) -> None:
        """End the transaction that holds a lock. PostgreSQL may have been restarted meanwhile, which ended it too."""
        with suppress(sa.exc.DBAPIError):
            session.close()

    def _do(self, *statements: str) -> bool:
        """Execute statements on the store in one transaction; return whether it did."""
        with suppress(sa.exc.DBAPIError), self.store.begin() as connection:
            for statement in statements:
                connection.execute(sa.text(statement))
            return True
        return False

    def _let_write(self) -> None:
        if not self._do("drop trigger if exists deny on trials"):
            self.undo.append((time.monotonic() + 1.0, self._let_write))

    def _deny(self, *rules: str) -> None:
        """Set what Redis lets its user do, as an operator who may do everything."""
        try:
            with redis.Redis.from_url(self.redis.url.replace("//", "//owner:any@"), socket_timeout=2) as client:
                client.execute_command("ACL", "SETUSER", "default", *rules)
        except redis.RedisError:
            # It is away, and comes back without rules.
            return

    def _alarm(self, watermark: str) -> None:
        with suppress(services.Unavailable):
            self.rabbit.ctl("set_vm_memory_high_watermark", watermark)

    def _start(self, server: services.Server) -> None:
        if server.process is None:
            server.start()
            if server is self.redis:
                self._make_owner()

    def _make_owner(self) -> None:
        with suppress(redis.RedisError), redis.Redis.from_url(self.redis.url) as client:
            client.execute_command("ACL", "SETUSER", "owner", "on", "nopass", "~*", "&*", "+@all")

    def run(self, seconds: float, every: float) -> bool:
        """Make havoc for so long, then let the study come to its end; whether it did."""
        while not self.rows("select 1 from trials where finished_at is not null"):
            self.turn()
            if time.monotonic() - self.began > 90:
                return False
        with self.store.begin() as connection:
            connection.execute(sa.text(AUDIT))
        self._make_owner()
        self.copy_store()
        end = time.monotonic() + seconds
        next_strike = 0.0
        while time.monotonic() < end:
            if time.monotonic() >= next_strike:
                self.strike()
                next_strike = time.monotonic() + self.generator.expovariate(1 / every)
            if time.monotonic() > self.copied_at + COPY_SECONDS:
                self.copy_store()
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


def processes(root: int) -> list[int]:
    """Return a process and those below it: a server's backends have sessions of their own."""
    found = [root]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def signal_all(pids: Sequence[int], sign: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)


def forge(redis_url: str, amqp_url: str) -> None:
    """Write into Redis and RabbitMQ what a stranger without the fleet's key might."""
    result = {"kind": "result", "number": 3, "attempt": 1, "at": 1.0, "outcome": {"state": "COMPLETE", "loss": -1e9}}
    events = [b"\xff\xfe\x00", b"{}", b"[" * 5000, json.dumps(result), "0" * 64 + json.dumps(result)]
    huge = {"study": "s", "attempts": [{"number": 2**60, "attempt": 2**53}]}
    with redis.Redis.from_url(redis_url) as client:
        for key in client.scan_iter("shadho:*:events"):
            for event in events:
                client.xadd(key, {"e": event}, nomkstream=True)
                client.xadd(key, {b"\xfe": b"\xff"}, nomkstream=True)
        for key in client.scan_iter("shadho:*:leases"):
            client.zadd(key, {"nonsense": 1.0, "9007199254740993.9007199254740993": 2.0, b"\xff.\xfe": 1e15})
        for kind, index in (("study", "studies"), ("worker", "workers")):
            client.sadd(f"shadho:{index}", "x", "y", b"\xff")
            client.set(f"shadho:{kind}:x", "notjson", ex=30)
            client.set(
                f"shadho:{kind}:y", json.dumps({"protocol": "7", "compute_class": "large", "slots": 10**9}), ex=30
            )
            client.set(b"shadho:" + kind.encode() + b":\xff", b"\xff\xfe", ex=30)
    # RabbitMQ with an alarm reads nothing, not even the end of a connection.
    limits = {"read_timeout": 3, "write_timeout": 3}
    with suppress(OSError), kombu.Connection(amqp_url, connect_timeout=3, transport_options=limits) as connection:
        producer = kombu.Producer(connection.default_channel, serializer="json")
        for body in ("{", json.dumps([[huge], {}, {}])):
            headers = {"task": "shadho.trial", "id": "forged", "shadho_protocol": 7}
            producer.publish(body, exchange="", routing_key="large", headers=headers, content_type="application/json")


def recoveries(events: Sequence[tuple[str, float]], ends: Sequence[float]) -> dict[str, list[float]]:
    """By kind of event, the seconds from it to the next run of an objective that came to its end."""
    found: dict[str, list[float]] = defaultdict(list)
    for what, at in events:
        after = [end - at for end in ends if end > at]
        found[what].append(min(after) if after else float("inf"))
    return found


def promotions(chaos: Chaos) -> tuple[Counter[tuple[int, int]], int]:
    """Return how often each trial was promoted to each rung, and promotions without a result on the rung below."""
    rows = chaos.rows("select number, state, rung, origin from trials where rung is not null")
    results = {(row.number if row.origin is None else row.origin, row.rung) for row in rows if row.state == "COMPLETE"}
    found = Counter((row.origin, row.rung) for row in rows if row.origin is not None and row.state != "CANCELLED")
    return found, sum((origin, rung - 1) not in results for origin, rung in found)


def report(chaos: Chaos, left: int, hung: int) -> bool:
    """Print the figures; return True if nothing was lost, counted twice or wrong, and the study did not hang."""
    kind, asked = "cast(params ->> 'kind' as integer)", "cast(params ->> 'seconds' as float)"
    rows = chaos.rows(f"select number, state, {kind} as kind, {asked} as seconds, error, lost, loss from trials")
    counted = [row for row in rows if row.state in {"COMPLETE", "FAILED", "PRUNED"}]
    lines = [line.split() for line in (chaos.folder / "runs.txt").read_text().splitlines()]
    began = [(int(number), float(at)) for word, number, _, at in lines if word == "began"]
    ends = sorted(float(at) for word, _, _, at in lines if word == "ended")
    runs = Counter(number for number, _ in began)
    recorded = {row.number: row.at for row in chaos.rows("select number, max(at) as at from audit.recorded group by 1")}
    rerun = sum(number in recorded and at > recorded[number] for number, at in began)
    good = [row for row in counted if row.kind < 14]
    by_kills = [row for row in good if row.state == "FAILED" and row.lost >= 3]
    odd = [row for row in good if row.state != "COMPLETE" and row not in by_kills]
    odd += [row for row in counted if row.kind >= 14 and row.state != "FAILED"]
    wrong = sum(row.state == "COMPLETE" and row.loss != row.seconds for row in counted)
    promoted, without = promotions(chaos)
    if chaos.has_rungs:
        print(
            f"promoted {promoted.total()}, twice {promoted.total() - len(promoted)}, without a result below {without}"
        )
    wrong += without + promoted.total() - len(promoted)
    lost = chaos.trials - len(counted)
    twice = len(chaos.rows("select number from audit.twice")) + max(0, len(counted) - chaos.trials)
    seconds = recoveries(chaos.events, ends)
    figures.show(
        {
            what: {"times": len(taken), "median s": f"{statistics.median(taken):.1f}", "worst s": f"{max(taken):.1f}"}
            for what, taken in sorted(seconds.items())
        },
        "recovery from",
    )
    states = Counter(row.state for row in rows)
    per_trial = sum(runs.values()) / max(1, len(runs))
    worst = max((max(taken) for taken in seconds.values()), default=0.0)
    print(f"trials asked {chaos.trials}, finished {len(counted)}: {dict(states)}")
    print(f"good trials FAILED after three lost attempts {len(by_kills)}, ended otherwise than they should {len(odd)}")
    print(f"runs begun after their trial was recorded {rerun}, most runs of a trial {max(runs.values(), default=0)}")
    print(f"starts of workers {sum(w.starts for w in chaos.workers)}, of schedulers {chaos.scheduler.starts}")
    print(f"processes left behind {left}")
    for row in odd[:5]:
        print(f"  trial {row.number}, kind {row.kind}: {row.state}, {str(row.error)[-200:]}")
    print(f"executions/trial {per_trial:.2f}  worst recovery {worst:.1f} s")
    print(f"lost {lost}  counted twice {twice}  wrong losses {wrong}  hung {hung}")
    return not (lost or twice or wrong or hung)


def main() -> int:
    """Make havoc and report."""
    parser = figures.make_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long things break (default 5)")
    parser.add_argument("--every", type=float, default=5.0, help="mean seconds between two strikes (default 5)")
    parser.add_argument("--lease", type=float, default=5.0, help="seconds of a trial's lease (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="of the havoc (default 0)")
    parser.add_argument("--rungs", action="store_true", help="trials have budgets, and are promoted")
    parser.add_argument("--keep", action="store_true", help="keep the folder with logs and store, and say where it is")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as opened:
        folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        if not options.keep:
            opened.callback(lambda: subprocess.run(["rm", "-rf", str(folder)], check=False))
        servers = [services.RedisServer(), services.RabbitServer(), services.PostgresServer()]
        for server in servers:
            opened.callback(server.stop)
            server.start()
        chance, console = random.Random(options.seed), Console(highlight=False)
        chaos = Chaos(folder, *servers, chance, options.lease, console, has_rungs=options.rungs)
        opened.callback(chaos.close)
        hung = int(not chaos.run(60 * options.minutes, options.every))
        left = chaos.close()
        if hung:
            print("the study did not come to its end; the scheduler said last:")
            print("\n".join((folder / "scheduler.log").read_text().splitlines()[-10:]))
        is_right = report(chaos, left, hung)
        if options.keep:
            print(f"logs and store: {folder}")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
