"""What a worker has: slots with their processes, in which it runs what its messages bring."""

from __future__ import annotations

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import redis

from shadho_celery.channel import Claim, WorkerChannel, new_delivery
from shadho_celery.clock import Clock, SystemClock
from shadho_celery.context import Outcome
from shadho_celery.hardware import Machine
from shadho_celery.intake import Intake
from shadho_celery.presence import Presence
from shadho_celery.registry import is_outage
from shadho_celery.routing import PROTOCOL
from shadho_celery.runner import Runner
from shadho_celery.seats import Seat, WorkerSeats
from shadho_celery.signing import UNSIGNED, Signer
from shadho_celery.standing import gist
from shadho_celery.trial import Result, Started, TrialState
from shadho_celery.underway import Running, Underway
from shadho_celery.witness import Witness

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds between two renewals of the running trials' leases, and looks for their cancel flags
BEAT_SECONDS = 1.0

#: seconds before an attempt goes back to the queue whose module this worker was not started with
HAND_BACK_SECONDS = 1.0

REFUSED = "the result of trial %s, attempt %s was refused: its lease was lost"


class NotMine(Exception):
    """An attempt that this worker must not run; another one of its class may."""


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
        self._channel = WorkerChannel(client, worker=self.name, signer=signer)
        self._seats = WorkerSeats(client, self.name, signer=signer)
        self._host = machine.host
        self._class = compute_class
        self._imports = list(imports)
        self._checkpoints = checkpoints
        environments = [machine.slot_environment(compute_class, i, count) for i in range(count)]
        self._runners = [Runner(imports, {**each, "SHADHO_HOST": address}) for each in environments]
        self._free: SimpleQueue[int] = SimpleQueue()
        for slot in range(count):
            self._free.put(slot)
        self._closing = threading.Event()
        self._underway = Underway(self._channel, self._seats)
        clock = clock or SystemClock()
        facts = {
            "protocol": PROTOCOL,
            "key": signer.fingerprint,
            "compute_class": compute_class,
            "slots": count,
            "imports": self._imports,
            "pid": os.getpid(),
            "machine": machine.to_json(),
        }
        self._presence = Presence(client, self.name, facts, self._underway, clock)
        self._witness = Witness(worker=self.name, host=machine.host, compute_class=compute_class, clock=clock)

    def start(self) -> None:
        """Start the slots' processes; from now on leases are renewed."""
        for runner in self._runners:
            runner.start()
        threading.Thread(target=self._beat, name="shadho-beat", daemon=True).start()

    def announce(self, intake: Intake | None = None) -> None:
        """Let the schedulers know of this worker, until it is closed or withdrawn; `intake` brings it messages."""
        self._presence.announce(intake)

    def withdraw(self) -> None:
        """Be forgotten by the schedulers: nothing new is sent, what runs goes on."""
        self._presence.withdraw()

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
        self._presence.heard()
        if payload["module"] not in self._imports:
            self._closing.wait(HAND_BACK_SECONDS)
            raise NotMine(f"this worker was not started with {payload['module']}; it has {', '.join(self._imports)}")
        ours = [attempt for attempt in payload["attempts"] if not self._declines(payload["study"], attempt)]
        delivery = new_delivery()
        slot = self._free.get()
        try:
            if payload.get("replica") is not None:
                self._run_replica(slot, payload, delivery)
                return
            result = None
            for attempt in ours:
                result = self._run_in(slot, payload, attempt, delivery, result)
            if result is not None:
                self._step(payload, delivery, result, None)
        finally:
            self._free.put(slot)

    def _declines(self, study: str, attempt: Mapping[str, Any]) -> bool:
        """Give an attempt back that is for another machine; whether it is.

        Not to its queue: there it would be the first again, and all that is behind it would wait, however long.
        """
        if attempt.get("not_on") != self._host:
            return False
        log.info("trial %s, attempt %s is for another machine", attempt["number"], attempt["attempt"])
        reason = f"its trial runs on {self._host}, and a copy is for another machine"
        self._persist(lambda: self._channel.decline(study, attempt["number"], attempt["attempt"], reason))
        return True

    def _run_in(
        self,
        slot: int,
        payload: Mapping[str, Any],
        attempt: Mapping[str, Any],
        delivery: str,
        before: Result | None,
    ) -> Result | None:
        """Send the result of the attempt `before`, claim the next and run it; its result, None where there is none."""
        started = self._witness.started(attempt)
        if self._heeded(self._step(payload, delivery, before, started), payload["study"]) is Claim.REFUSED:
            return None
        running = Running(payload["study"], started.number, started.attempt, delivery, self._runners[slot])
        outcome = self._drive(running, slot, {**attempt, "module": payload["module"]})
        if running.stopped == "gone":
            self._note_refused(running.study, running.number, running.attempt)
            return None
        self._log_trouble(running, outcome)
        return self._witness.result(running, outcome)

    def _run_replica(self, slot: int, payload: Mapping[str, Any], delivery: str) -> None:
        """Run a replica of an attempt, where that runs and nobody else has the seat. What it finds out its gang has."""
        told, [attempt] = payload["replica"], payload["attempts"]
        seat = Seat(number=attempt["number"], attempt=attempt["attempt"], call=told["call"], rank=told["rank"])
        claim = self._persist(lambda: self._seats.take(payload["study"], seat, delivery))
        if self._heeded(claim, payload["study"]) is Claim.REFUSED:
            log.info("replica %s of trial %s, attempt %s is not to be run", seat.rank, seat.number, seat.attempt)
            return
        running = Running(payload["study"], seat.number, seat.attempt, delivery, self._runners[slot], seat)
        place = {name: told[name] for name in ("address", "token", "rank", "call")}
        outcome = self._drive(running, slot, {**attempt, "module": payload["module"], "replica": place})
        ended = not (running.stopped or self._closing.is_set())
        # One whose gang needs it no more ends as CANCELLED; one that returns has taken part in nothing.
        missed = ended and outcome.state is not TrialState.CANCELLED
        failure = self._witness.unseated(seat, outcome) if missed else None
        done = ended and failure is None
        told = self._persist(lambda: self._seats.leave(payload["study"], seat, delivery, done=done, failure=failure))
        if failure is not None and told:
            log.warning("replica %s of trial %s failed: %s", seat.rank, seat.number, gist(failure.error))

    def _heeded(self, claim: Claim, study: str) -> Claim:
        """What became of a claim. Raises NotMine where this worker gets nothing for the time being."""
        if claim is Claim.HELD:
            self._presence.keep_off(study)
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

    def _drive(self, running: Running, slot: int, attempt: Mapping[str, Any]) -> Outcome:
        """Run it to its end; meanwhile its lease is renewed, and it can be stopped."""
        trial = {
            **attempt,
            "checkpoint_dir": str(self._checkpoints / running.study / str(attempt.get("origin", running.number))),
            "compute_class": self._class,
            "slot": slot,
        }

        def on_report(record: Mapping[str, Any]) -> None:
            report = self._witness.report(running, record)
            try:
                self._channel.report(running.study, report)
            except redis.RedisError:
                log.warning("a report of trial %s did not get through", running.number)

        def on_gang(record: Mapping[str, Any]) -> None:
            running.calls += not record["assembled"]
            call = self._witness.assembling(running, record)
            self._persist(lambda: self._seats.call(running.study, call))

        with self._underway.holding(running):
            return running.runner.run(trial, on_report, on_gang)

    @staticmethod
    def _log_trouble(running: Running, outcome: Outcome) -> None:
        if outcome.warning:
            log.warning("trial %s: %s", running.number, outcome.warning)
        if outcome.state is TrialState.FAILED and not running.stopped:
            log.warning("trial %s failed: %s", running.number, gist(outcome.error))

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

    def _beat(self) -> None:
        """Renew leases, stop what was cancelled, announce, until the worker closes."""
        while not self._closing.wait(BEAT_SECONDS):
            try:
                self._underway.renew()
                self._presence.beat(has_room=self._free.qsize() > 0)
            except redis.RedisError as error:
                log.warning("Redis does not answer (%s); leases may run out", error)
