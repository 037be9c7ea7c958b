"""Measure one scheduler on a large fleet: ``python tests/benchmarks/fleet_scale.py [--workers N] [--minutes M] ...``.

The scheduler, its queues and its channel are the real ones; broker and Redis are one real Redis. The workers are
played, many in one process, and speak the real protocol: they announce themselves, take messages, claim, renew, report
and finish. Their trials take no processor, only time. The study begins with many finished trials in its store.

1. At real time: the delay from a result to the start of the slot's next trial, and the processor that the scheduler
   takes.
2. With ``--compress F ...``: as many slots with trials that are F times as short, until the delay misses its goal.

A virtual machine gets less processor now and then. A calibration loop runs beside the fleet: parts of ten seconds in
which it takes 1.3 times as long as usual, and the part after each, are left out of the `undisturbed` figures. No goal
is judged by those.

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
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import kombu
import numpy as np
from figures import finish, goal
from hyperopt import hp
from idle import lent_redis

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

#: in the names of the queues: no worker of another run takes part
RUN = uuid.uuid4().hex[:6]

#: compute classes, and the part of the fleet that each has
CLASSES = {"gpu_large": 0.1, "gpu_small": 0.3, "cpu": 0.6}

#: part of its seconds by which a trial is shorter or longer
SPREAD = 0.5

#: seconds of the parts in which the machine's own speed is judged, and the part of its usual speed that is too slow
WINDOW_SECONDS, SLOW = 10.0, 1.3

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
            machine=Machine(host=names[0], cores=1, memory=2**33, gpu_memory=0),
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
        with kombu.Servers(self._url) as connection:
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


def calibrated(is_over: Event, told: Any) -> None:
    """Tell, by moments, the processor's seconds of a loop: they grow where the machine itself gets less of its host."""
    samples = []
    while not is_over.is_set():
        began = time.thread_time()
        sum(range(500_000))
        samples.append((time.monotonic(), time.thread_time() - began))
        time.sleep(1.0)
    told.put(samples)


def undisturbed(delays: Sequence[tuple[float, float]], loops: Sequence[tuple[float, float]]) -> list[float]:
    """Return the delays in parts of WINDOW_SECONDS in which the machine ran at its own speed, and in the part after."""
    usual = sorted(seconds for _, seconds in loops)[len(loops) // 2]
    by_window: dict[int, list[float]] = defaultdict(list)
    for moment, seconds in loops:
        by_window[int(moment / WINDOW_SECONDS)].append(seconds)
    slow = {window for window, some in by_window.items() if sum(some) / len(some) > SLOW * usual}
    slow |= {window + 1 for window in slow}
    return [delay for moment, delay in delays if int(moment / WINDOW_SECONDS) not in slow]


@contextmanager
def fleet(url: str, workers: int, seconds: float, per_process: int) -> Iterator[Any]:
    """Workers in processes of their own; yields what ends them, and the queues with what they tell at the end."""
    context = multiprocessing.get_context("spawn")
    is_over, told, loops = context.Event(), context.Queue(), context.Queue()
    processes = [context.Process(target=calibrated, args=(is_over, loops), daemon=True)]
    for name, part in CLASSES.items():
        names = [f"{name}-{RUN}@{place}" for place in range(max(1, round(part * workers)))]
        for first in range(0, len(names), per_process):
            some = names[first : first + per_process]
            arguments = (url, f"{name}-{RUN}", some, seconds, is_over, told)
            processes.append(context.Process(target=played, args=arguments, daemon=True))
    for process in processes:
        process.start()
    try:
        yield is_over, told, len(processes) - 1, loops
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


def measure(url: str, given: argparse.Namespace, factor: float, opened: ExitStack) -> dict[str, float]:
    """Run one study; return its figures."""
    folder = opened.enter_context(tempfile.TemporaryDirectory())
    space, name = compile_space(SPACE), f"scale-{uuid.uuid4().hex[:6]}"
    store = SqlStore(f"sqlite:///{Path(folder)}/scale.db")
    made = open_study(store, space.describe(), name=name, seed=0)
    preload(store, made.record.key, given.preload)
    began = time.monotonic()
    study = open_study(store, space.describe(), name=name, resume=True)
    executor = QueueExecutor(
        Servers(client=connect(url), publisher=Publisher(url)),
        FleetStudy(key=study.record.key, module=MODULE),
        study.live,
    )
    seconds = given.seconds / factor
    # The first trials all begin at once; their ends are spread after a few rounds.
    warm = min(2.5 * seconds, 60.0 * given.minutes)
    scheduler = make_scheduler(Plan.of(space, StudySettings(sampler="random"), Limits(trials=10**9)), study, executor)
    print(f"{len(study.trials):,} finished trials taken up in {time.monotonic() - began:.1f} s", flush=True)
    with fleet(url, given.workers, seconds, given.per_process) as (is_over, told, processes, loops):
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
        speeds = [each for each in loops.get(timeout=30) if each[0] >= clock]
    measured = [each for _, some in heard for each in some if each[0] >= clock]
    delays = sorted(delay for _, delay in measured)
    calm = sorted(undisturbed(measured, speeds))
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
        "undisturbed_delay_s_p99": calm[int(0.99 * len(calm))] if calm else float("inf"),
        "undisturbed_part": len(calm) / max(1, len(delays)),
        "calibration_ms": 1000 * float(np.median([seconds for _, seconds in speeds])),
        "calibration_ms_p95": 1000 * float(np.quantile([seconds for _, seconds in speeds], 0.95)),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    print(
        f"{factor:g} times real time:", json.dumps({each: round(value, 3) for each, value in found.items()}), flush=True
    )
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
        scheduler.assign()
        scheduler.fill()
        turns.append(time.monotonic() - began)
        least = min(least, sum(each.slots for each in scheduler.classes))
    return least


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=10_000, help="played workers, one slot each [10000]")
    parser.add_argument("--minutes", type=float, default=10.0, help="of each measurement [10]")
    parser.add_argument("--preload", type=int, default=1_000_000, help="finished trials of the study [1000000]")
    parser.add_argument("--seconds", type=float, default=60.0, help="mean seconds of a trial [60]")
    parser.add_argument("--per-process", type=int, default=1000, help="workers played in one process [1000]")
    parser.add_argument("--compress", type=float, nargs="*", default=[], help="factors of a faster time, ascending")
    parser.add_argument("--redis-url", default=None, help="broker and channel [a database lent by tests/services]")
    given = parser.parse_args()
    figures: dict[str, object] = {}
    bears = 0.0
    with lent_redis(given.redis_url) as url:
        for factor in [1.0, *given.compress]:
            with ExitStack() as opened:
                found = measure(url, given, factor, opened)
            figures[f"times_{factor:g}"] = found
            if found["delay_s_p99"] > 1.0:
                break
            bears = factor
    real = figures["times_1"]
    assert isinstance(real, dict)
    goals = {
        "delay_s_p99": goal(real["delay_s_p99"], at_most=1.0),
        "scheduler_cores": goal(real["cpu_cores"], at_most=0.6),
    }
    finish({**figures, "greatest_compression": bears}, goals, vars(given))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
