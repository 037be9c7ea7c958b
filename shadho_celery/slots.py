"""What a worker has: slots with their processes, the trials that run in them, and a voice on the channel."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import redis

from shadho_celery.channel import WorkerChannel
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.context import Outcome
from shadho_celery.hardware import Machine
from shadho_celery.registry import Registry
from shadho_celery.routing import PROTOCOL
from shadho_celery.runner import STOP_SECONDS, Runner
from shadho_celery.trial import Report, Result, Started, TrialState

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds between two renewals of the running trials' leases, and looks for their cancel flags
BEAT_SECONDS = 1.0

#: seconds between two announcements
ANNOUNCE_EVERY = 5.0

#: seconds before an attempt goes back to the queue whose module this worker was not started with
HAND_BACK_SECONDS = 1.0


class NotMine(Exception):
    """An attempt that this worker must not run; another one of its class may."""


@dataclass
class _Running:
    """An attempt that runs in a slot of this worker."""

    study: str
    number: int
    attempt: int
    runner: Runner
    #: why it was stopped, once it was: ``cancel`` or ``gone``
    stopped: str = ""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.study, self.number, self.attempt


class Slots:
    """The slots of one worker."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        machine: Machine,
        compute_class: str,
        count: int,
        imports: Sequence[str],
        checkpoints: Path,
        clock: Clock | None = None,
    ) -> None:
        """`imports` are the modules whose objectives may run here, and no others."""
        self._channel = WorkerChannel(client)
        self._registry = Registry(client, "worker")
        self._machine = machine
        self._class = compute_class
        self._imports = list(imports)
        self._checkpoints = checkpoints
        self._clock = clock or SystemClock()
        self._count = count
        self._runners = [Runner(imports, machine.slot_environment(compute_class, i, count)) for i in range(count)]
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(count):
            self._free.put(slot)
        self._running: dict[tuple[str, int, int], _Running] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._announced = threading.Event()
        self.name = f"{compute_class}@{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:4]}"

    def start(self) -> None:
        """Start the slots' processes; from now on leases are renewed."""
        for runner in self._runners:
            runner.start()
        threading.Thread(target=self._beat, name="shadho-beat", daemon=True).start()

    def announce(self) -> None:
        """Let the schedulers know of this worker, until it is closed or withdrawn."""
        self._announced.set()
        self._announce()

    def withdraw(self) -> None:
        """Be forgotten by the schedulers: nothing new is sent, what runs goes on."""
        self._announced.clear()
        try:
            self._registry.withdraw(self.name)
        except redis.RedisError:
            log.warning("could not sign off; the schedulers will notice")

    def close(self) -> None:
        """Withdraw, and end the processes. What still runs is lost and will be sent again."""
        self.withdraw()
        self._closing.set()
        for runner in self._runners:
            runner.kill()

    def run(self, payload: Mapping[str, Any]) -> None:
        """Run a message's attempts one after another, those that are this worker's to run.

        Raises NotMine where their module is not known here.
        """
        if payload["module"] not in self._imports:
            self._closing.wait(HAND_BACK_SECONDS)
            raise NotMine(f"this worker was not started with {payload['module']}; it has {', '.join(self._imports)}")
        slot = self._free.get()
        try:
            result = None
            for attempt in payload["attempts"]:
                result = self._run_in(slot, payload, attempt, result)
            if result is not None:
                self._step(payload["study"], result, None)
        finally:
            self._free.put(slot)

    def _run_in(
        self, slot: int, payload: Mapping[str, Any], attempt: Mapping[str, Any], before: Result | None
    ) -> Result | None:
        """Send the result of the attempt `before`, claim the next and run it; its result, None where there is none."""
        started = Started(
            number=attempt["number"], attempt=attempt["attempt"], host=self._machine.host, at=self._clock.now()
        )
        if not self._step(payload["study"], before, started):
            return None
        running = _Running(payload["study"], started.number, started.attempt, self._runners[slot])
        with self._lock:
            self._running[running.key] = running
        try:
            outcome = self._drive(running, slot, {**attempt, "module": payload["module"]})
        finally:
            with self._lock:
                del self._running[running.key]
        return None if running.stopped == "gone" else self._result(running, outcome)

    def _step(self, study: str, result: Result | None, started: Started | None) -> bool:
        """Send a result and claim an attempt; True where it was claimed."""
        finished, claimed = self._persist(lambda: self._channel.step(study, result, started))
        if result is not None and not finished:
            log.warning(
                "the result of trial %s, attempt %s was refused: its lease was lost", result.number, result.attempt
            )
        if started is not None and not claimed:
            log.info("trial %s, attempt %s is not to be run: refused at its claim", started.number, started.attempt)
        return claimed

    def _drive(self, running: _Running, slot: int, attempt: Mapping[str, Any]) -> Outcome:
        trial = {
            **attempt,
            "checkpoint_dir": str(self._checkpoints / running.study / str(running.number)),
            "compute_class": self._class,
            "slot": slot,
        }

        def on_report(record: Mapping[str, Any]) -> None:
            report = Report(number=running.number, attempt=running.attempt, at=self._clock.now(), **record)
            try:
                self._channel.report(running.study, report)
            except redis.RedisError:
                log.warning("a report of trial %s did not get through", running.number)

        return running.runner.run(trial, on_report)

    def _result(self, running: _Running, outcome: Outcome) -> Result:
        cancelled = bool(running.stopped)
        return Result(
            number=running.number,
            attempt=running.attempt,
            state=TrialState.CANCELLED if cancelled else outcome.state,
            loss=None if cancelled else outcome.loss,
            metrics=outcome.metrics,
            error="cancelled" if cancelled else outcome.error,
            host=self._machine.host,
            compute_class=self._class,
            seconds=outcome.seconds,
            memory=outcome.memory,
            at=self._clock.now(),
        )

    def _persist(self, call: Callable[[], T]) -> T:
        """`call` until Redis answers: a claim or a result must not be dropped because Redis restarts."""
        wait = 0.1
        while True:
            try:
                return call()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if self._closing.wait(wait):
                    raise
                log.warning("Redis does not answer (%s); trying on", error)
                wait = min(5.0, wait * 2)

    # Signs of life

    def _announce(self) -> None:
        with self._lock:
            busy = len(self._running)
        self._registry.announce(
            self.name,
            {
                "protocol": PROTOCOL,
                "compute_class": self._class,
                "slots": self._count,
                "busy": busy,
                "imports": self._imports,
                "pid": os.getpid(),
                "machine": self._machine.to_json(),
            },
        )

    def _beat(self) -> None:
        """Announce, renew leases, and stop what was cancelled, until the worker closes."""
        announced_at = self._clock.now()
        while not self._closing.wait(BEAT_SECONDS):
            try:
                self._renew()
                if self._announced.is_set() and self._clock.now() - announced_at >= ANNOUNCE_EVERY:
                    self._announce()
                    announced_at = self._clock.now()
            except redis.RedisError as error:
                log.warning("Redis does not answer (%s); leases may run out", error)

    def _renew(self) -> None:
        with self._lock:
            running = list(self._running.values())
        for study in {attempt.study for attempt in running}:
            ours = [attempt for attempt in running if attempt.study == study]
            answers = self._channel.renew(study, [(a.number, a.attempt) for a in ours])
            for attempt, answer in zip(ours, answers, strict=True):
                if answer != "ok" and not attempt.stopped:
                    self._stop(attempt, answer)

    def _stop(self, running: _Running, why: str) -> None:
        """Ask the trial to stop, and end its process where it does not."""

        def while_it_runs(act: Callable[[], None]) -> bool:
            # Under the lock: once it is off the list its slot's process may run another trial, which is none of ours.
            with self._lock:
                if self._running.get(running.key) is not running:
                    return False
                act()
                return True

        def ask() -> None:
            running.stopped = why
            running.runner.stop_trial()

        # A lease that is gone may just be that of a trial which has ended since we asked for it.
        if not while_it_runs(ask):
            return

        def kill_unless_ended() -> None:
            while_it_runs(running.runner.kill)

        timer = threading.Timer(STOP_SECONDS, kill_unless_ended)
        timer.daemon = True
        timer.start()
