"""Measure one scheduler on a large fleet: ``python tests/benchmarks/fleet_scale.py [--workers N] [--minutes M] ...``.

The scheduler, its queues and its channel are the real ones; broker and Redis are one real Redis. The workers are
played, many in one process, and speak the real protocol: they announce themselves, take messages, claim, renew, report
and finish. Their trials take no processor, only time. The study begins with many finished trials in its store.

Measured are the delay from a result to the start of the slot's next trial, and the processor that the scheduler takes.

A short form for a first look: ``--workers 2000 --minutes 1 --preload 20000``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import multiprocessing
import random
import resource
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.synchronize import Event
from typing import Any

import kombu
import numpy as np
from figures import finish, goal, make_parser
from hyperopt import hp
from workers import RUN, lent_redis

from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Attempt, Outcome, Report, Result, Started, Trial, TrialState
from shadho_celery.fleet.broker import PROTOCOL, Publisher, queue, read_message
from shadho_celery.fleet.channel import Claim, WorkerChannel
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.fleet.workers import FleetStudy, Servers
from shadho_celery.node.heartbeat import ANNOUNCE_EVERY, BEAT_SECONDS
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split
from shadho_celery.store.base import Turn
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.open import open_study
from shadho_celery.study.state import Limits

#: compute classes, and the part of the fleet that each has
CLASSES = {"gpu_large": 0.1, "gpu_small": 0.3, "cpu": 0.6}

#: part of its seconds by which a trial is shorter or longer
SPREAD = 0.5

MODULE = "played"

SPACE = hp.choice(
    "model",
    [
        {"rate": hp.loguniform("rate", -9, 0), "width": hp.quniform("width", 16, 512, 16)},
        {"trees": hp.randint("trees", 10, 500), "depth": hp.randint("depth", 20)},
        {"C": hp.loguniform("C", -5, 10), "gamma": hp.loguniform("gamma", -10, 3)},
    ],
)


#: seconds between two heartbeats of a process, each with its part of the workers; and most between two looks for ends
TICK_SECONDS = 0.1
POLL_SECONDS = 0.02


class Recorder:
    """Plays a client of Redis: its commands are kept as bytes, which may be sent again and again."""

    def __init__(self, client: Any) -> None:
        self._pipe = client.pipeline(transaction=False)
        self._pack = client.connection_pool.get_connection().pack_commands

    def pipeline(self, **_: object) -> Recorder:
        return self

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, command: str) -> Any:
        def take(*arguments: Any, **options: Any) -> list[object]:
            getattr(self._pipe, command)(*arguments, **options)
            return []

        return take

    def execute(self) -> list[int]:
        return [0]

    def taken(self) -> bytes:
        """Return the commands since the last call."""
        commands = [command for command, _ in self._pipe.command_stack]
        self._pipe.reset()
        return b"".join(self._pack(commands))


class Silent:
    """A connection to Redis that sends what was recorded, and gets no answers."""

    def __init__(self, client: Any) -> None:
        self._connection = client.connection_pool.get_connection()
        self._connection.send_command("CLIENT", "REPLY", "OFF")

    def send(self, recorded: bytes) -> None:
        self._connection.send_packed_command([recorded], check_health=False)


class PlayedWorkers:
    """Workers of one class, one slot each, in one process."""

    def __init__(self, url: str, compute_class: str, names: Sequence[str], seconds: float) -> None:
        self._client = connect(url)
        self._url = url
        self._names = names
        self._seconds = seconds
        self._random = random.Random(names[0])
        self._announcement = Worker(
            protocol=PROTOCOL,
            compute_class=compute_class,
            slots=1,
            imports=[MODULE],
            machine=Machine(host=names[0], cores=1, memory=2**33),
        )
        self._channels = {name: WorkerChannel(self._client, worker=name) for name in names}
        # What a worker sends again and again is made once: all of them share one machine with the scheduler.
        self._recorder = Recorder(self._client)
        workers = Registry(self._recorder, Worker)
        self._announcing = {name: self._recorded(workers.announce, name, self._announcement) for name in names}
        self._renew = WorkerChannel(self._recorder).renew
        #: by worker, the renewal of its lease
        self._renewing: dict[str, bytes] = {}
        # Redis must know the script: nobody reads that it does not.
        WorkerChannel(self._client).renew(RUN, [])
        self._free = list(names)
        #: by worker, what it runs: study, attempt, delivery, message
        self._running: dict[str, tuple[str, Attempt, str, Any]] = {}
        #: heap of (moment, worker) of the ends of trials
        self._ends: list[tuple[float, str]] = []
        #: by worker, the moment of its last result
        self._ended: dict[str, float] = {}
        #: moments and delays of the trials that followed another one on their slot
        self.delays: list[tuple[float, float]] = []
        #: most seconds by which a heartbeat was late: where the machine cannot play so many workers
        self.late = 0.0
        self.finished = 0

    def _recorded(self, send: Callable[..., object], *arguments: object) -> bytes:
        send(*arguments)
        return self._recorder.taken()

    def play(self, is_over: Event) -> None:
        """Work until the end; heartbeats have a thread of their own, as in a worker."""
        threading.Thread(target=self._beat, args=(is_over,), daemon=True).start()
        with kombu.Connection(self._url) as connection:
            channel = connection.default_channel
            # As many as there are slots: a message is acknowledged once its trial has ended.
            channel.basic_qos(0, len(self._names), False)
            channel.qos.restore_at_shutdown = False
            mine = queue(self._announcement.compute_class)(channel)
            mine.declare()
            with kombu.Consumer(channel, [mine], accept=["json"], on_message=self._take):
                while not is_over.is_set():
                    self._end_due()
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=POLL_SECONDS)

    @property
    def starved(self) -> list[float]:
        """Moments of the results after which no trial has come yet."""
        return list(self._ended.values())

    def _take(self, message: Any) -> None:
        payload = read_message(message.payload[0][0], message.headers)
        # Trials of this length have a message each.
        [attempt] = payload.attempts
        if not self._claim(payload, attempt, message):
            message.ack()

    def _claim(self, payload: Payload, attempt: Attempt, message: Any) -> bool:
        name, delivery = self._free.pop(), uuid.uuid4().hex
        started = Started(number=attempt.number, attempt=attempt.attempt, host=name, at=time.time(), worker=name)
        _, [claim] = self._channels[name].exchange(payload.study, [], [started], delivery)
        if claim is not Claim.TAKEN:
            self._free.append(name)
            return False
        now = time.monotonic()
        if name in self._ended:
            self.delays.append((now, now - self._ended.pop(name)))
        self._running[name] = payload.study, attempt, delivery, message
        key = (attempt.number, attempt.attempt)
        self._renewing[name] = self._recorded(self._renew, payload.study, [key])
        seconds = self._seconds * self._random.uniform(1 - SPREAD, 1 + SPREAD)
        heapq.heappush(self._ends, (now + seconds, name))
        return True

    def _end_due(self) -> None:
        while self._ends and self._ends[0][0] <= time.monotonic():
            _, name = heapq.heappop(self._ends)
            study, attempt, delivery, message = self._running.pop(name)
            del self._renewing[name]
            key = {"number": attempt.number, "attempt": attempt.attempt}
            self._channels[name].report(study, Report(**key, step=1, loss=1.0, at=time.time()))
            outcome = Outcome(
                state=TrialState.COMPLETE, loss=self._random.random(), seconds=self._seconds, memory=10**8
            )
            compute_class = self._announcement.compute_class
            ended = Result(**key, outcome=outcome, host=name, compute_class=compute_class, at=time.time(), worker=name)
            self._channels[name].exchange(study, [ended], [], delivery)
            message.ack()
            self._ended[name] = time.monotonic()
            self.finished += 1
            self._free.insert(0, name)

    def _beat(self, is_over: Event) -> None:
        """Announce and renew as workers do, spread evenly over their seconds."""
        announcing, renewing = round(ANNOUNCE_EVERY / TICK_SECONDS), round(BEAT_SECONDS / TICK_SECONDS)
        redis, began = Silent(self._client), time.monotonic()
        for tick in itertools.count():
            # Not `wait`: a process that is killed in it would keep `set` from returning.
            time.sleep(max(0.0, began + tick * TICK_SECONDS - time.monotonic()))
            if is_over.is_set():
                return
            self.late = max(self.late, time.monotonic() - began - tick * TICK_SECONDS)
            announced = [self._announcing[name] for name in self._names[tick % announcing :: announcing]]
            renewed = [self._renewing.get(name, b"") for name in self._names[tick % renewing :: renewing]]
            redis.send(b"".join([*announced, *renewed]))


def played(url: str, compute_class: str, names: Sequence[str], seconds: float, is_over: Event, told: Any) -> None:
    """Play workers in this process; tell their delays, and how late they were."""
    workers = PlayedWorkers(url, compute_class, names, seconds)
    workers.play(is_over)
    # A slot that still waits for its next trial has waited for at least so long.
    now = time.monotonic()
    workers.delays += [(now, now - ended) for ended in workers.starved]
    told.put((workers.late, workers.delays))


@contextmanager
def fleet(url: str, workers: int, seconds: float, per_process: int) -> Iterator[Any]:
    """Workers in processes of their own; yields what ends them, the queue of what they tell then, and their number."""
    context = multiprocessing.get_context("spawn")
    is_over, told = context.Event(), context.Queue()
    processes = []
    for name, part in CLASSES.items():
        names = [f"{name}-{RUN}@{place}" for place in range(max(1, round(part * workers)))]
        for first in range(0, len(names), per_process):
            some = names[first : first + per_process]
            arguments = (url, f"{name}-{RUN}", some, seconds, is_over, told)
            processes.append(context.Process(target=played, args=arguments, daemon=True))
    for process in processes:
        process.start()
    try:
        yield is_over, told, len(processes)
    finally:
        is_over.set()
        for process in processes:
            process.join(10)
            process.kill()


def preload(store: SqlStore, key: str, trials: int) -> None:
    """Write so many finished trials of the study."""
    generator = np.random.default_rng(0)
    drawn = {subspace.name: subspace.sample(generator, 1000) for subspace in split(compile_space(SPACE))}
    names, classes = list(drawn), [f"{name}-{RUN}" for name in CLASSES]

    def trial(number: int) -> Trial:
        outcome = Outcome(state=TrialState.COMPLETE, loss=float(number % 997), seconds=60.0, memory=10**8)
        return Trial(
            number=number,
            subspace=names[number % len(names)],
            params=drawn[names[number % len(names)]][number % 1000],
            seed=number,
            state=outcome.state,
            attempt=1,
            compute_class=classes[number % len(classes)],
            outcome=outcome,
            host="h",
            asked_at=1.7e9 + number,
            started_at=1.7e9 + number,
            finished_at=1.7e9 + number + 60,
        )

    for first in range(0, trials, 10_000):
        store.write(key, 1, time.time(), Turn(new=[trial(n) for n in range(first, min(first + 10_000, trials))]))
    store.unlock(key, 1)


def measure(url: str, given: argparse.Namespace, folder: str) -> dict[str, float]:
    """Run the study; return its figures."""
    space, name = compile_space(SPACE), f"scale-{uuid.uuid4().hex[:6]}"
    store = SqlStore(f"sqlite:///{folder}/scale.db")
    made = open_study(store, space.describe(), name=name, seed=0)
    preload(store, made.record.key, given.preload)
    began = time.monotonic()
    study = open_study(store, space.describe(), name=name, resume=True)
    executor = QueueExecutor(
        Servers(client=connect(url), publisher=Publisher(url)),
        FleetStudy(template=Payload(study=study.record.key, module=MODULE, attempts=[])),
        study.live,
    )
    # The first trials all begin at once; their ends are spread after a few rounds.
    warm = min(2.5 * given.seconds, 60.0 * given.minutes)
    scheduler = make_scheduler(Plan.of(space, StudySettings(sampler="random"), Limits(trials=10**9)), study, executor)
    print(f"{len(study.trials):,} finished trials taken up in {time.monotonic() - began:.1f} s", flush=True)
    with fleet(url, given.workers, given.seconds, given.per_process) as (is_over, told, processes):
        until = time.monotonic() + 60
        while sum(each.slots for each in executor.classes()) < given.workers and time.monotonic() < until:
            executor.poll(0.5)
        turns: list[float] = []
        turn(scheduler, time.monotonic() + warm, turns)
        least_slots = sum(each.slots for each in scheduler.classes)
        turns, before, at, clock = [], len(study.trials), time.process_time(), time.monotonic()
        least_slots = min(least_slots, turn(scheduler, clock + 60.0 * given.minutes, turns))
        cpu, wall, ended = time.process_time() - at, time.monotonic() - clock, len(study.trials) - before
        is_over.set()
        heard = [told.get(timeout=30) for _ in range(processes)]
    delays = sorted(delay for _, some in heard for moment, delay in some if moment >= clock)
    found = {
        "trials_per_s": ended / wall,
        "lost_attempts": float(study.trials.lost),
        "heartbeats_late_s": max(late for late, _ in heard),
        "least_slots_seen": float(least_slots),
        "cpu_cores": cpu / wall,
        "cpu_ms_per_trial": 1000 * cpu / max(1, ended),
        "turn_s_p99": sorted(turns)[int(0.99 * len(turns))],
        "delay_s_median": delays[len(delays) // 2] if delays else float("inf"),
        "delay_s_p99": delays[int(0.99 * len(delays))] if delays else float("inf"),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(json.dumps({each: round(value, 3) for each, value in found.items()}), flush=True)
    study.close()
    executor.close()
    return found


def turn(scheduler: Any, until: float, turns: list[float]) -> int:
    """Turn the scheduler's loop until a moment; note the seconds of each turn without its wait for events.

    Returns the least number of slots that it knew.
    """
    least = 10**9
    while (now := time.monotonic()) < until:
        scheduler.turn_seconds = min(0.5, until - now)
        events = scheduler.collect()
        began = time.monotonic()
        scheduler.tell(events)
        scheduler.update_classes()
        scheduler.fill()
        turns.append(time.monotonic() - began)
        least = min(least, sum(each.slots for each in scheduler.classes))
    return least


def main() -> None:
    """Measure and print."""
    parser = make_parser(__doc__)
    parser.add_argument("--workers", type=int, default=10_000, help="played workers, one slot each [10000]")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the measurement [10]")
    parser.add_argument("--preload", type=int, default=1_000_000, help="finished trials of the study [1000000]")
    parser.add_argument("--seconds", type=float, default=60.0, help="mean seconds of a trial [60]")
    parser.add_argument("--per-process", type=int, default=1000, help="workers played in one process [1000]")
    parser.add_argument("--redis-url", help="broker and channel [a database lent by tests/services]")
    given = parser.parse_args()
    with lent_redis(given.redis_url) as url, tempfile.TemporaryDirectory() as folder:
        found = measure(url, given, folder)
    goals = {
        "delay_s_p99": goal(found["delay_s_p99"], at_most=1.0),
        "scheduler_cores": goal(found["cpu_cores"], at_most=0.6),
    }
    finish(found, goals, vars(given))


if __name__ == "__main__":
    main()
