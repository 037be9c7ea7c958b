"""What a worker has: slots with their processes, the trials that run in them, and a voice on the channel."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import redis

from shadho_celery.channel import Claim, WorkerChannel, new_delivery
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.context import Outcome
from shadho_celery.hardware import Machine
from shadho_celery.intake import Intake
from shadho_celery.registry import Registry, is_outage
from shadho_celery.routing import PROTOCOL
from shadho_celery.runner import STOP_SECONDS, Runner
from shadho_celery.seats import Seat, WorkerSeats
from shadho_celery.signing import UNSIGNED, Signer
from shadho_celery.standing import gist
from shadho_celery.strikes import Strikes
from shadho_celery.trial import Assembling, Report, Result, Started, TrialState, Unseated

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds between two renewals of the running trials' leases, and looks for their cancel flags
BEAT_SECONDS = 1.0

#: seconds between two announcements
ANNOUNCE_EVERY = 5.0

#: seconds before an attempt goes back to the queue whose module this worker was not started with
HAND_BACK_SECONDS = 1.0


REFUSED = "the result of trial %s, attempt %s was refused: its lease was lost"


class NotMine(Exception):
    """An attempt that this worker must not run; another one of its class may."""


@dataclass
class _Running:
    """An attempt, or a replica of one, that runs in a slot of this worker."""

    study: str
    number: int
    attempt: int
    delivery: str
    runner: Runner
    #: of a replica, its place in the attempt's gang
    seat: Seat | None = None
    #: why it was stopped, once it was: ``cancel``, ``gone`` or ``yield``
    stopped: str = ""
    #: times it has called for replicas
    calls: int = field(default=0, kw_only=True)

    @property
    def key(self) -> tuple[str, int, int]:
        return self.delivery, self.number, self.attempt


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
        address: str = "127.0.0.1",
        clock: Clock | None = None,
        signer: Signer = UNSIGNED,
    ) -> None:
        """`imports` are the modules whose objectives may run here, and no others.

        `address` is how the fleet's other machines reach this one.
        """
        self.name = f"{compute_class}@{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:4]}"
        self.signer = signer
        self._client = client
        self._channel = WorkerChannel(client, worker=self.name, signer=signer)
        self._seats = WorkerSeats(client, self.name, signer=signer)
        self._registry = Registry(client, "worker")
        self._studies = Registry(client, "study")
        self._machine = machine
        self._class = compute_class
        self._imports = list(imports)
        self._checkpoints = checkpoints
        self._clock = clock or SystemClock()
        self._count = count
        environments = [machine.slot_environment(compute_class, i, count) for i in range(count)]
        self._runners = [Runner(imports, {**each, "SHADHO_HOST": address}) for each in environments]
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(count):
            self._free.put(slot)
        self._running: dict[tuple[str, int, int], _Running] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._announced = threading.Event()
        self._intake: Intake | None = None
        #: studies that let this worker have nothing, and how they say so: ``held`` or ``fenced``
        self._kept_off: dict[str, str] = {}

    def start(self) -> None:
        """Start the slots' processes; from now on leases are renewed."""
        for runner in self._runners:
            runner.start()
        threading.Thread(target=self._beat, name="shadho-beat", daemon=True).start()

    def announce(self, intake: Intake | None = None) -> None:
        """Let the schedulers know of this worker, until it is closed or withdrawn; `intake` brings it messages."""
        self._intake = intake
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
        if self._intake is not None:
            self._intake.heard()
        if payload["module"] not in self._imports:
            self._closing.wait(HAND_BACK_SECONDS)
            raise NotMine(f"this worker was not started with {payload['module']}; it has {', '.join(self._imports)}")
        if any(attempt.get("not_on") == self._machine.host for attempt in payload["attempts"]):
            self._closing.wait(HAND_BACK_SECONDS)
            raise NotMine(f"a copy of a trial that runs on {self._machine.host} is for another machine")
        delivery = new_delivery()
        slot = self._free.get()
        try:
            if payload.get("replica") is not None:
                self._run_replica(slot, payload, delivery)
                return
            result = None
            for attempt in payload["attempts"]:
                result = self._run_in(slot, payload, attempt, delivery, result)
            if result is not None:
                self._step(payload, delivery, result, None)
        finally:
            self._free.put(slot)

    def _run_in(
        self,
        slot: int,
        payload: Mapping[str, Any],
        attempt: Mapping[str, Any],
        delivery: str,
        before: Result | None,
    ) -> Result | None:
        """Send the result of the attempt `before`, claim the next and run it; its result, None where there is none."""
        started = Started(
            number=attempt["number"],
            attempt=attempt["attempt"],
            host=self._machine.host,
            at=self._clock.now(),
            worker=self.name,
        )
        if self._heeded(self._step(payload, delivery, before, started), payload["study"]) is Claim.REFUSED:
            return None
        running = _Running(payload["study"], started.number, started.attempt, delivery, self._runners[slot])
        outcome = self._drive(running, slot, {**attempt, "module": payload["module"]})
        if running.stopped == "gone":
            self._note_refused(running.study, running.number, running.attempt)
            return None
        return self._result(running, outcome)

    def _run_replica(self, slot: int, payload: Mapping[str, Any], delivery: str) -> None:
        """Run a replica of an attempt, where that runs and nobody else has the seat. What it finds out its gang has."""
        told, [attempt] = payload["replica"], payload["attempts"]
        seat = Seat(number=attempt["number"], attempt=attempt["attempt"], call=told["call"], rank=told["rank"])
        claim = self._persist(lambda: self._seats.take(payload["study"], seat, delivery))
        if self._heeded(claim, payload["study"]) is Claim.REFUSED:
            log.info("replica %s of trial %s, attempt %s is not to be run", seat.rank, seat.number, seat.attempt)
            return
        running = _Running(payload["study"], seat.number, seat.attempt, delivery, self._runners[slot], seat)
        place = {name: told[name] for name in ("address", "token", "rank")}
        outcome = self._drive(running, slot, {**attempt, "module": payload["module"], "replica": place})
        ended = not (running.stopped or self._closing.is_set())
        failure = self._unseated(seat, outcome) if ended and outcome.state is TrialState.FAILED else None
        done = ended and failure is None
        told = self._persist(lambda: self._seats.leave(payload["study"], seat, delivery, done=done, failure=failure))
        if failure is not None and told:
            log.warning("replica %s of trial %s failed: %s", seat.rank, seat.number, gist(failure.error))

    def _unseated(self, seat: Seat, outcome: Outcome) -> Unseated:
        return Unseated(
            number=seat.number,
            attempt=seat.attempt,
            call=seat.call,
            rank=seat.rank,
            error=outcome.error or "",
            host=self._machine.host,
            at=self._clock.now(),
            worker=self.name,
        )

    def _heeded(self, claim: Claim, study: str) -> Claim:
        """What became of a claim. Raises NotMine where this worker gets nothing for the time being."""
        if claim is Claim.HELD:
            self._keep_off(study)
            raise NotMine("this worker gets no trials for the time being: it fails those that others finish")
        return claim

    def _step(self, payload: Mapping[str, Any], delivery: str, result: Result | None, started: Started | None) -> Claim:
        """Send a result and claim an attempt; what became of the claim."""
        watched = bool(payload.get("watched"))
        finished, claim = self._persist(
            lambda: self._channel.step(payload["study"], result, started, delivery=delivery, watched=watched)
        )
        if result is not None and not finished:
            log.warning(REFUSED, result.number, result.attempt)
        if started is not None and claim is Claim.REFUSED:
            log.info("trial %s, attempt %s is not to be run: refused at its claim", started.number, started.attempt)
        return claim

    def _note_refused(self, study: str, number: int, attempt: int) -> None:
        """Count and log a late result; it is not even sent, for Redis may have forgotten why it is to be refused."""
        log.warning(REFUSED, number, attempt)
        with suppress(redis.RedisError):
            self._channel.count_refused(study)

    def _drive(self, running: _Running, slot: int, attempt: Mapping[str, Any]) -> Outcome:
        """Run it to its end; meanwhile its lease is renewed, and it can be stopped."""
        trial = {
            **attempt,
            "checkpoint_dir": str(self._checkpoints / running.study / str(attempt.get("origin", running.number))),
            "compute_class": self._class,
            "slot": slot,
        }

        def on_report(record: Mapping[str, Any]) -> None:
            report = Report(number=running.number, attempt=running.attempt, at=self._clock.now(), **record)
            try:
                self._channel.report(running.study, report)
            except redis.RedisError:
                log.warning("a report of trial %s did not get through", running.number)

        def on_gang(record: Mapping[str, Any]) -> None:
            running.calls += 1
            now = self._clock.now()
            call = Assembling(number=running.number, attempt=running.attempt, call=running.calls, at=now, **record)
            self._persist(lambda: self._seats.call(running.study, call))

        with self._lock:
            self._running[running.key] = running
        try:
            return running.runner.run(trial, on_report, on_gang)
        finally:
            with self._lock:
                del self._running[running.key]

    def _result(self, running: _Running, outcome: Outcome) -> Result:
        cancelled = bool(running.stopped)
        if outcome.warning:
            log.warning("trial %s: %s", running.number, outcome.warning)
        if outcome.state is TrialState.FAILED and not cancelled:
            log.warning("trial %s failed: %s", running.number, gist(outcome.error))
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
            worker=self.name,
            out_of_memory=outcome.out_of_memory and not cancelled,
            warning=outcome.warning,
        )

    def _persist(self, call: Callable[[], T]) -> T:
        """`call` until Redis answers: a claim or a result must not be dropped because Redis restarts."""
        wait = 0.1
        while True:
            try:
                return call()
            except redis.RedisError as error:
                if not is_outage(error) or self._closing.wait(wait):
                    raise
                log.warning("Redis does not answer (%s); trying on", error)
                wait = min(5.0, wait * 2)

    # Signs of life

    def _announce(self) -> None:
        with self._lock:
            busy, held = len(self._running), bool(self._kept_off)
        self._registry.announce(
            self.name,
            {
                "protocol": PROTOCOL,
                "key": self.signer.fingerprint,
                "compute_class": self._class,
                "slots": self._count,
                "busy": busy,
                "held": held,
                "imports": self._imports,
                "pid": os.getpid(),
                "machine": self._machine.to_json(),
            },
        )

    def _announce_now(self) -> None:
        """Announce what has changed, where Redis answers; else the next announcement tells."""
        with suppress(redis.RedisError):
            self._announce()

    def _beat(self) -> None:
        """Announce, renew leases, and stop what was cancelled, until the worker closes."""
        announced_at = self._clock.now()
        while not self._closing.wait(BEAT_SECONDS):
            try:
                self._renew()
                self._see_whether_let_on()
                if self._intake is not None and self._free.qsize():
                    self._intake.check(lambda: bool(self._studies.living()))
                if self._announced.is_set() and self._clock.now() - announced_at >= ANNOUNCE_EVERY:
                    self._announce()
                    announced_at = self._clock.now()
            except redis.RedisError as error:
                log.warning("Redis does not answer (%s); leases may run out", error)

    def _renew(self) -> None:
        with self._lock:
            running = list(self._running.values())
        for study in {attempt.study for attempt in running}:
            ours = [attempt for attempt in running if attempt.study == study and attempt.seat is None]
            answers = self._channel.renew(study, [(a.number, a.attempt) for a in ours]) if ours else []
            replicas = [attempt for attempt in running if attempt.study == study and attempt.seat is not None]
            seats = [(replica.seat, replica.delivery) for replica in replicas if replica.seat is not None]
            answers += self._seats.renew(study, seats) if seats else []
            for attempt, answer in zip(ours + replicas, answers, strict=True):
                if answer != "ok" and not attempt.stopped:
                    self._stop(attempt, answer)

    def _keep_off(self, study: str) -> None:
        """Take no more messages until the study's scheduler has judged the failures."""
        with self._lock:
            is_new = study not in self._kept_off
            self._kept_off.setdefault(study, "held")
        if self._intake is not None:
            self._intake.pause()
        if is_new:
            self._announce_now()

    def _see_whether_let_on(self) -> None:
        """Go on where every study that had doubts has been answered; one that has fenced this worker never is."""
        living = self._studies.living() if self._kept_off else {}
        for study, was in list(self._kept_off.items()):
            stands = Strikes(self._client, study).standing(self.name)
            if stands == "held" and study not in living:
                # Its scheduler has gone without an answer; the next one begins without doubts.
                stands = "free"
            if stands == "fenced" and was != "fenced":
                log.error("fenced: this worker failed trials that others finished; mend this machine, then restart it")
            with self._lock:
                if stands == "free":
                    del self._kept_off[study]
                else:
                    self._kept_off[study] = stands
            if stands != was:
                self._announce_now()
            if not self._kept_off and self._intake is not None:
                self._intake.resume()

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
