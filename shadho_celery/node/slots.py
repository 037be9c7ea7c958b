"""Slots of a worker. Each slot has its own process, in which it runs attempts from the worker's messages."""

from __future__ import annotations

import logging
import math
import os
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import redis
from msgspec import to_builtins
from msgspec.structs import asdict, replace

from shadho_celery.core.checks import as_record
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.failures import headline
from shadho_celery.core.files import study_folder
from shadho_celery.core.hardware import Machine, price, thread_variables
from shadho_celery.core.payload import Payload
from shadho_celery.core.records import own_versions
from shadho_celery.core.system import SystemClock
from shadho_celery.core.threads import NoThread, start_thread
from shadho_celery.core.trial import (
    WELL,
    Attempt,
    Called,
    GangCall,
    Memory,
    Outcome,
    ReplicaFailed,
    ReplicaSeat,
    Report,
    Result,
    TrialState,
    digest_of,
)
from shadho_celery.core.units import duration
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.channel import Claim, Shipping, WorkerChannel
from shadho_celery.fleet.control import LOGS, Requests, of_worker
from shadho_celery.fleet.redis import flush, is_outage, refusals
from shadho_celery.fleet.registry import Worker
from shadho_celery.fleet.seats import Seat, WorkerSeats
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.node.bundle import REFUSED, Bundle, FreeSlots
from shadho_celery.node.code import Codes, ShippedCode, storage_id
from shadho_celery.node.heartbeat import CoreShare, Heartbeat, HeartbeatFile
from shadho_celery.node.leases import GIVEN_BACK, Lease, Leases
from shadho_celery.node.logs import LogServer, TrialLines, tell
from shadho_celery.node.stay import SAFETY
from shadho_celery.objective.call import joined
from shadho_celery.runner.output import log_name
from shadho_celery.runner.protocol import Reported, RunAttempt
from shadho_celery.runner.runner import OtherCode, Runner
from shadho_celery.runner.starting import ForkServers

log = logging.getLogger(__name__)

T = TypeVar("T")

#: seconds between two renewals of the leases, which also return whether a trial should stop; and seconds between two
#: checks whether trials that have reported were pruned
BEAT_SECONDS, LOOK_SECONDS = 1.0, 0.2

#: seconds before a message for a module that this worker was not started with returns to the queue
REQUEUE_SECONDS = 1.0

#: after a trial that is shorter than this many seconds, a worker claims the rest of its message at once
QUICK_SECONDS = 0.02


class NotMine(Exception):
    """This worker must not act on a message, but another worker of its class may."""


class Slots:
    """The slots of one worker, with everything that runs beside them: leases, heartbeat and answers for logs."""

    def __init__(
        self,
        client: redis.Redis,
        *,
        machine: Machine,
        compute_class: str,
        count: int,
        imports: Sequence[str],
        checkpoints: Path,
        address: str,
        signer: Signer = UNSIGNED,
        control: Signer | None = None,
        code_folder: Path | None = None,
        fork_servers: ForkServers | None = None,
        shares_gpus: bool = False,
    ) -> None:
        """`imports` are the only modules whose objectives may run here, except code that studies ship.

        `signer` signs messages and events. `control` signs the drains that this worker obeys, or is None.
        Shipped code is accepted only with a `code_folder`, and stored there. `address` is the one by which the fleet's
        other machines reach this machine. `fork_servers` start the slots' processes, and are closed with this object.
        With `shares_gpus`, trials share GPUs as far as their memory fits, in `count` slots at most.
        Raises UsageError for a name that cannot be announced, and for a heartbeat file that cannot be written.
        """
        self.name = f"{compute_class}@{machine.host}.{os.getpid()}.{uuid.uuid4().hex[:4]}"
        self.signer = signer
        self._channel = WorkerChannel(client, worker=self.name, signer=signer)
        self._seats = WorkerSeats(client, self.name, signer=signer)
        self._host = machine.host
        self._checkpoints = checkpoints
        self._clock = SystemClock()
        self._lines = TrialLines()
        self._logs = LogServer(Requests(client, of_worker(self.name), signer, LOGS), checkpoints, self._clock)
        self._fork_servers = fork_servers or ForkServers()
        self._fork_servers.on_complaints = self._tell
        self._telling = threading.Lock()
        # Each warning about incomplete logs is logged once.
        run = partial(Runner, imports, complain=cache(partial(log.warning, "%s")), start=self._fork_servers.start)
        gpus = machine.gpus_for(compute_class)
        self._free = FreeSlots(count, len(gpus), [gpu.memory for gpu in gpus] if shares_gpus else [])
        slots = self._free.open
        self._core_share = CoreShare(machine, slots)
        #: function: return the variables of the process of a trial that takes these slots of a number of slots
        self._variables = partial(machine.slot_environment, compute_class, slots=slots)
        self._address = {"SHADHO_HOST": address}
        self._runners = [run({**self._variables([slot]), **self._address}) for slot in range(count)]
        #: number of slots whose GPUs and cores the process of each slot has
        self._widths = [1] * count
        #: whether a slot's last trial was quick and succeeded, and the slot's current bundle, by slot
        self._was_quick = [False] * count
        self._bundles: dict[int, Bundle] = {}
        self._closing = threading.Event()
        #: time by the monotonic clock at which trials must have ended
        self.leaves_at = math.inf
        #: study and number of each trial that was declined since the last one ran, because it would not end before that
        self.too_long: set[tuple[str, int]] = set()
        #: time by the monotonic clock at which the last trial has ended
        self.ran_at = -math.inf
        #: calls that decline attempts, pending until the next beat
        self._declined: list[Callable[[], object]] = []
        self._declining = threading.Lock()
        #: other work for the thread that renews leases
        self._soon = deque[Callable[[], None]]()
        self.leases = Leases(self._channel, self._seats)
        self._codes = Codes()
        self._shipped_code = ShippedCode(Shipping(client, signer), code_folder, self._clock) if code_folder else None
        # Raises UsageError if it is not valid, because schedulers would refuse it.
        announced = {
            "protocol": PROTOCOL,
            "pid": os.getpid(),
            "key": signer.fingerprint,
            "compute_class": compute_class,
            "slots": slots,
            "shares_gpus": bool(self._free.gpus),
            "imports": imports,
            "accepts_code": code_folder is not None,
            "machine": to_builtins(machine),
            "price": price(),
            "versions": own_versions(),
            "storage": storage_id(checkpoints),
            "control": None if control is None else control.fingerprint,
        }
        self.worker = as_record(announced, Worker, "this worker's announcement", "see -Q, -c and SHADHO_HOST")
        self.heartbeat = Heartbeat(
            client, self.name, self.worker, self.leases, self._clock, signer=signer, control=control
        )
        #: what the worker has done so far
        self.tally = self.heartbeat.tally
        self._file = HeartbeatFile.configured()

    def check(self) -> None:
        """Try commands of Redis that a worker needs, without an effect. Raises ServiceError if Redis refuses them."""
        with refusals():
            self.heartbeat.check()
            self._channel.are_refused("0", [])

    def start(self) -> None:
        """Start the slots' processes and the thread that renews leases. Raises ServiceError without that thread."""
        self._share_cores()
        try:
            start_thread(threading.Thread(target=self._beat, name="shadho-beat", daemon=True))
        except NoThread as error:
            raise ServiceError(f"this worker cannot renew leases: {error}") from error
        for runner in self._runners[: self._free.open]:
            # If a process cannot be started, `run` will give the error to the trial.
            with suppress(OSError):
                runner.start()

    def do_soon(self, work: Callable[[], None]) -> None:
        """Do `work` in the thread that renews leases, within LOOK_SECONDS. Signal handlers may call this."""
        self._soon.append(work)

    @property
    def left(self) -> float:
        """Seconds within which new trials must end; infinite without a limit."""
        return self.leaves_at - self._clock.now()

    def preempt(self) -> None:
        """Take no more trials, and tell the running ones that this worker ends soon. Give back what has returned."""
        self.heartbeat.drain()
        self.leases.preempt()

    def close(self) -> None:
        """End the processes and withdraw the announcement. The slots' threads give back attempts that still run."""
        self._closing.set()
        self.leases.close()
        self._fork_servers.close()
        # In parallel, because each process takes a few hundredths of a second.
        killers = [threading.Thread(target=runner.close) for runner in self._runners]
        for killer, runner in zip(killers, self._runners, strict=True):
            try:
                start_thread(killer)
            except NoThread:
                runner.close()
        with suppress(redis.RedisError):
            # Otherwise the scheduler would send these attempts again only after half a minute.
            self._flush_declined()
        self.heartbeat.withdraw()
        self._file.remove()
        for killer in killers:
            if killer.ident is not None:
                killer.join()

    def run(self, payload: Payload) -> None:
        """Run a message's attempts one after another, except those that this worker declines.

        Raises NotMine if this worker stops or is drained, was not started with their module, has another version of the
        code, or has an open circuit breaker.
        """
        if self.heartbeat.consumer is not None:
            self.heartbeat.consumer.note_message()
        if self._closing.is_set() or self.leases.preempted.is_set():
            raise NotMine("this worker stops")
        if reason := "this worker is drained" if self.heartbeat.is_drained else self._lacks(payload):
            if self._is_void(payload):
                return
            # The message returns to its queue for another worker. Without the pause, it would circulate fast.
            self._closing.wait(REQUEUE_SECONDS)
            raise NotMine(reason)
        # A replica belongs to an attempt that another worker has claimed.
        ours = [
            each for each in payload.attempts if payload.replica is None and not self._declines(payload.study, each)
        ]
        if not ours and payload.replica is None:
            return
        width = max((each.slots for each in ours), default=1) if payload.one_worker else 1
        if width > self._free.count:
            self._closing.wait(REQUEUE_SECONDS)
            raise NotMine(f"a trial takes {width} slots of one worker, and this one has {self._free.count}")
        consumer = self.heartbeat.consumer
        with nullcontext() if width == 1 or consumer is None else consumer.holding(width - 1):
            self._run_in(width, payload, ours)

    def _run_in(self, width: int, payload: Payload, ours: Sequence[Attempt]) -> None:
        """Run a message's attempts in `width` slots, once these are free."""
        needs = [each.gpu_bytes for each in ours]
        need = None if payload.replica is not None or None in needs else max(map(int, filter(None, needs)), default=0)
        taken = self._free.take(
            width, lambda: not (self._is_unwanted(payload) or self._fits_beside(width, payload)), need=need
        )
        if not taken:
            if self._closing.is_set() or self.leases.preempted.is_set():
                raise NotMine("this worker stops")
            if not self._is_void(payload):
                raise NotMine("another worker of this machine has its slots")
            return
        slot = taken[0]
        self._follow_open()
        try:
            for other in self._free.beside(taken):
                self._runners[other].kill()
            self._widen(taken)
            if payload.replica is not None:
                self._run_replica(slot, payload, payload.replica, uuid.uuid4().hex[:8])
            else:
                self._run_bundle(slot, Bundle(self._channel, payload, ours, self._clock, self._host, slot=slot))
        except redis.RedisError as error:
            if not self._closing.is_set():
                raise
            log.warning(
                "Redis does not answer (%s); the attempts that this worker ran are lost when their leases run out",
                error,
            )
        finally:
            self._bundles.pop(slot, None)
            self._widen(taken[:1])
            self._free.put(taken)
            self._follow_open()

    def _follow_open(self) -> None:
        """Take as many messages as trials may have slots now."""
        if self._free.gpus and self.heartbeat.consumer is not None:
            self.heartbeat.consumer.close_slots(self._free.count - self._free.open)

    def _is_unwanted(self, payload: Payload) -> bool:
        """Return whether a message that waits for slots need not run here: it was taken back, or this worker stops."""
        return self._closing.is_set() or self.leases.preempted.is_set() or self._is_void(payload)

    def _fits_beside(self, width: int, payload: Payload) -> bool:
        """Return whether another worker of this class and machine has the slots for which a message waits here."""
        return width > 1 and any(
            each.slots - each.busy >= width
            and each.machine.host == self._host
            and each.compute_class == self.worker.compute_class
            and (payload.module in each.imports or (payload.is_shipped and each.accepts_code))
            and not (each.draining or each.quarantined)
            for each in self.heartbeat.neighbours
        )

    def _widen(self, taken: Sequence[int]) -> None:
        """Give the process of the first of these slots the GPUs and cores of all of them.

        With GPUs, this needs another process, and the processes of the other slots end, because they may still hold
        memory of their GPUs.
        """
        slot, width = taken[0], len(taken)
        if self._widths[slot] == width:
            return
        self._widths[slot] = width
        threads = self._core_share.threads * width
        if not self._free.cards:
            self._runners[slot].set_threads(threads)
            return
        self._runners[slot].equip({**self._variables(taken), **thread_variables(threads), **self._address})
        for other in taken[1:]:
            self._runners[other].kill()

    def _lacks(self, payload: Payload) -> str:
        """Return why this worker cannot run a message's attempts. Return "" if it can, or if that is not known yet."""
        try:
            study_folder(self._checkpoints, payload.study)
        except UsageError as error:
            return str(error)
        if self._shipped_code is not None and payload.is_shipped:
            return self._persist(partial(self._shipped_code.lacks, payload))
        if payload.module not in self.worker.imports:
            return f"this worker was not started with {payload.module}, only with {', '.join(self.worker.imports)}"
        return self._codes.lacks(payload.module, payload.code)

    def _run_bundle(self, slot: int, bundle: Bundle) -> None:
        """Claim and run the attempts of a message one after another, and send their results."""
        self._bundles[slot] = bundle
        while bundle.unclaimed:
            if self.leases.preempted.is_set():
                self._give_back(slot, bundle)
                return
            if self._was_quick[slot]:
                self._exchange(bundle, len(bundle.unclaimed))
                self._runners[slot].send_ahead([self._order(slot, bundle.payload, each) for each in bundle.waiting()])
            else:
                self._exchange(bundle, 1)
            while (attempt := bundle.next()) is not None:
                try:
                    outcome, stopped = self._drive(slot, bundle.payload, attempt, bundle.delivery)
                except OtherCode as other:
                    # Announce the code first, so that the scheduler knows it before it sends the attempts again.
                    reason = self._note_code(bundle.payload, other.code)
                    log.warning("trial %s and those after it were given back: %s", attempt.number, reason)
                    self._persist(partial(bundle.refuse, f"on {self._host}: {reason}", attempt))
                    return
                if stopped == GIVEN_BACK:
                    self._give_back(slot, bundle, attempt)
                    return
                if not stopped and outcome.out_of_memory is Memory.GPU and self._free.was_shared(slot):
                    log.info("trial %s ran out of GPU memory beside others; it is repeated alone", attempt.number)
                    self._give_back(slot, bundle, attempt, "it ran out of GPU memory beside other trials")
                    return
                is_quick = (outcome.seconds or 0.0) < QUICK_SECONDS
                self._was_quick[slot] = is_quick and outcome.state in WELL and not stopped
                if (result := self._result(bundle.payload, attempt, outcome, stopped)) is not None:
                    bundle.add(result)
                if self.leases.preempted.is_set():
                    self._give_back(slot, bundle)
                    return
        self._exchange(bundle, 0)

    def _give_back(self, slot: int, bundle: Bundle, attempt: Attempt | None = None, reason: str = "") -> None:
        """Send a bundle's results. Give back `attempt`, if any, and those after it, by default as this worker ends."""
        ended = "preempted" if self.leases.preempted.is_set() else "stopped"
        self._runners[slot].recall()
        self._persist(partial(bundle.refuse, reason or f"its worker was {ended}", attempt))

    def _note_code(self, payload: Payload, code: CodeVersion) -> str:
        """Record and announce the version of the code that a new process has found. Return why it cannot be used."""
        reason = code.problem or "its code was edited meanwhile"
        if self._shipped_code is not None and payload.is_shipped:
            self._shipped_code.refuse(payload, reason)
        else:
            self._codes.learn({payload.module: code})
            reason = self._codes.lacks(payload.module, payload.code) or reason
        self._tell()
        return reason

    def _tell(self) -> None:
        """Announce which versions of the code this worker has, which shipped versions it cannot run, and complaints.

        Complaints say why the slots' processes start slowly. The slots that start meanwhile wait for the announcement,
        so it comes before the results of their trials, which may be the last ones of a short study.
        """
        unfit = {} if self._shipped_code is None else self._shipped_code.unfit
        with self._telling:
            complaints = [*self._fork_servers.complaints()]
            self.heartbeat.tell(codes={**self._codes.known}, unfit={**unfit}, complaints=complaints)

    def _exchange(self, bundle: Bundle, count: int) -> None:
        """Send a bundle's results and claim its next `count` attempts. Raises NotMine if the breaker is open."""
        for answer in self._persist(partial(bundle.exchange, count)):
            self._is_refused(answer, bundle.payload.study)

    def _declines(self, study: str, attempt: Attempt) -> bool:
        """Decline an attempt if it is for another machine or worker. Return whether it was declined.

        Its message does not return to the queue, where it would be first again and block all messages behind it.
        """
        is_too_long = False
        if attempt.only_on not in (None, self._host):
            reason = f"it is for {attempt.only_on}, but was delivered to {self._host}"
        elif attempt.not_on == self._host:
            reason = f"its trial runs on {self._host}, and a copy must run on another machine"
        elif self.name in attempt.failed_on:
            reason = f"it has failed on {self.name}, and must run on another worker"
        elif is_too_long := SAFETY * (attempt.expected or 0.0) > self.left:
            reason = f"it is predicted to take {duration(attempt.expected or 0.0)}, and {self.name} ends before that"
            self.too_long.add((study, attempt.number))
        else:
            return False
        number, which = attempt.number, attempt.attempt
        log.info("trial %s, attempt %s does not run here: %s", number, which, reason)
        decline = partial(self._channel.decline, study, number, which, reason, is_too_long=is_too_long)
        if attempt.failed_on or attempt.expected is not None:
            # The scheduler sends a declined attempt again at once. If no other worker is free, it returns here, so it
            # is declined only once a second, in the beat.
            self._declined.append(decline)
        else:
            self._persist(decline)
        return True

    def _result(self, payload: Payload, attempt: Attempt, outcome: Outcome, stopped: str) -> Result | None:
        """Return the result of an attempt, or None if it has lost its lease."""
        number, which = attempt.number, attempt.attempt
        if stopped == "gone":
            log.warning(REFUSED, number, which)
            # The result is not sent, because Redis may have lost the record by which it would refuse the result.
            with suppress(redis.RedisError):
                self._channel.count_refused(payload.study)
            return None
        outcome = outcome.cancelled() if stopped else outcome
        # The result says that the trial was stopped, because the scheduler knows why. Here it is known to be pruned.
        shown = replace(outcome, state=TrialState.PRUNED) if stopped == "prune" else outcome
        self.tally.end(shown)
        self._lines.tell(payload, attempt, shown)
        return Result(
            number=number,
            attempt=which,
            outcome=outcome,
            host=self._host,
            compute_class=self.worker.compute_class,
            at=self._clock.wall(),
            worker=self.name,
            digest=digest_of(attempt.params),
        )

    def _run_replica(self, slot: int, payload: Payload, replica: ReplicaSeat, delivery: str) -> None:
        """Run a replica if its attempt runs and the seat is free. Its vectors go to its gang; it has no result."""
        [attempt] = payload.attempts
        seat = Seat(number=attempt.number, attempt=attempt.attempt, call=replica.call, rank=replica.rank)
        claim = self._persist(lambda: self._seats.take(payload.study, seat, delivery))
        if self._is_refused(claim, payload.study):
            log.info("rank %s of trial %s, attempt %s does not run", seat.rank, seat.number, seat.attempt)
            return
        try:
            token = self._seats.token(payload.study, seat, replica.token)
        except UsageError as unreadable:
            outcome, stopped = Outcome(state=TrialState.FAILED, error=str(unreadable), seconds=0.0), ""
        else:
            payload = replace(payload, replica=replace(replica, token=token))
            try:
                outcome, stopped = self._drive(slot, payload, attempt, delivery, seat)
            except OtherCode as other:
                error = f"another version of {payload.module} is here: {self._note_code(payload, other.code)}"
                outcome, stopped = Outcome(state=TrialState.FAILED, error=error, seconds=0.0), ""
        has_ended = not (stopped or self._closing.is_set())
        # A replica that its gang no longer needs ends as CANCELLED. If its objective returns, it took part in no gang.
        failure = None
        if has_ended and outcome.state is not TrialState.CANCELLED:
            error = outcome.error or "its objective returned without taking part in a gang"
            at = self._clock.wall()
            failure = ReplicaFailed(**asdict(seat), error=error, host=self._host, at=at, worker=self.name)
        done = has_ended and failure is None
        is_taken = self._persist(lambda: self._seats.leave(payload.study, seat, delivery, done=done, failure=failure))
        if failure is not None and is_taken:
            log.warning("rank %s of trial %s failed: %s", seat.rank, seat.number, headline(failure.error))

    def _is_refused(self, claim: Claim, study: str) -> bool:
        """Return whether a claim was refused. Raises NotMine if this worker's circuit breaker is open."""
        if claim is Claim.BREAKER_OPEN:
            self.heartbeat.pause_for(study)
            raise NotMine("this worker pauses: its last trials failed in ways that no other worker has seen")
        return claim is Claim.REFUSED

    def _is_void(self, payload: Payload) -> bool:
        """Return whether claims of all attempts in a message would be refused, so that no worker needs the message."""
        attempts = [(attempt.number, attempt.attempt) for attempt in payload.attempts]
        with suppress(redis.RedisError):
            refused = self._channel.are_refused(payload.study, attempts, replicas=payload.replica is not None)
            return len(refused) == len(attempts)
        return False

    def _drive(
        self, slot: int, payload: Payload, attempt: Attempt, delivery: str, seat: Seat | None = None
    ) -> tuple[Outcome, str]:
        """Run an attempt, or its replica on `seat`, while its lease is renewed.

        Returns the outcome, and the reason why it was stopped (`Lease.stopped`), which is "" if it was not.
        """
        number, which, runner = attempt.number, attempt.attempt, self._runners[slot]
        lease = Lease(
            study=payload.study,
            name=payload.name,
            started_at=self._clock.wall(),
            number=number,
            attempt=which,
            delivery=delivery,
            runner=runner,
            seat=seat,
            slots=self._widths[slot],
        )
        unsent = 0

        def on_report(said: Reported) -> None:
            nonlocal unsent
            report = Report(number=number, attempt=which, step=said.step, loss=said.loss, at=self._clock.wall())
            lease.has_reported = seat is None
            try:
                answer = self._channel.report(payload.study, report)
                unsent += answer == "refused"
                if answer in {"cancel", "prune"} and not lease.stopped:
                    self.leases.stop(lease, answer)
            except redis.RedisError as error:
                unsent += 1
                self._note_redis(error)

        def on_gang(gang: GangCall) -> None:
            lease.calls += not gang.assembled
            call = Called(number=number, attempt=which, call=lease.calls, gang=gang, at=self._clock.wall())
            self._persist(lambda: self._seats.call(payload.study, call))

        self.too_long.clear()
        with self.leases.holding(lease):
            outcome = runner.run(self._order(slot, payload, attempt), on_report, on_gang)
        self.ran_at = self._clock.now()
        if unsent:
            warning = f"{unsent} reports were lost: Redis did not accept them, or the scheduler was away for too long"
            outcome = replace(outcome, warning=joined(outcome.warning, warning))
        if self.leases.preempted.is_set() and not lease.stopped and outcome.state not in WELL:
            # It has returned early, or a service manager has ended all processes of the worker.
            return outcome, GIVEN_BACK
        return outcome, lease.stopped

    def _order(self, slot: int, payload: Payload, attempt: Attempt) -> RunAttempt:
        """Return the order to a slot's process for an attempt of a message."""
        whose = attempt.number if attempt.origin is None else attempt.origin
        rank = 0 if payload.replica is None else payload.replica.rank
        # Paths are built as text, because a worker does this for each trial, and a Path takes ten times as long.
        folder = study_folder(self._checkpoints, payload.study)
        shipped = self._shipped_code if payload.is_shipped else None
        return RunAttempt(
            payload=replace(payload, attempts=[attempt]),
            folder="" if shipped is None else str(shipped.folder(payload)),
            checkpoint_dir=f"{folder}/{whose}",
            log=f"{folder}/{log_name(attempt.number, attempt.attempt, rank)}",
            compute_class=self.worker.compute_class,
            slot=slot,
            encrypted=bool(self.signer.fingerprint),
        )

    def _persist(self, call: Callable[[], T]) -> T:
        """Return the result of `call`. Repeat it until Redis answers: a restart of Redis must lose nothing."""
        wait = 0.1
        while True:
            try:
                return call()
            except redis.RedisError as error:
                if not is_outage(error) or self._closing.wait(wait):
                    raise
                self._note_redis(error)
                wait = min(5.0, wait * 2)

    def _note_redis(self, error: redis.RedisError | None) -> None:
        """Log once that Redis does not answer, and once that it answers again."""
        text = None if error is None else f"Redis does not answer ({error}); trying again, and leases may run out"
        if (line := self.tally.redis.see(text, self._clock.now())) is not None:
            log.warning("%s", line) if error is not None else tell(line)

    def _beat(self) -> None:
        """Renew leases, stop cancelled trials and announce the worker, until it closes."""
        renewed_at = self._clock.now()
        while not self._closing.wait(LOOK_SECONDS):
            is_due = self._clock.now() - renewed_at >= BEAT_SECONDS
            self._work()
            if is_due:
                renewed_at = self._clock.now()
                self._file.touch()
                self._lines.beat()
            try:
                if is_due:
                    self._beat_once()
                    self._note_redis(None)
                self.leases.look()
                if self.leases.preempted.is_set():
                    self.leases.preempt()
            except redis.RedisError as error:
                self._note_redis(error)
            except Exception:
                # Without this thread all leases would run out.
                log.exception("the beat failed and continues; this is a bug")

    def _work(self) -> None:
        """Do the other work of this thread."""
        while self._soon:
            try:
                self._soon.popleft()()
            except Exception:
                log.exception("a part of the beat failed; this is a bug")

    def _share_cores(self) -> None:
        """Give each slot's next trial its share of the cores, divided with the other workers of the host."""
        if self._core_share.follow(self._free.open, self.heartbeat.neighbours):
            for runner, width in zip(self._runners, self._widths, strict=True):
                runner.set_threads(self._core_share.threads * width)

    def _beat_once(self) -> None:
        self.tally.renewals += self.leases.renew()
        self._codes.follow([runner.codes() for runner in self._runners])
        self._tell()
        for slot, bundle in list(self._bundles.items()):
            bundle.relieve(self._runners[slot].recall)
        self._follow_open()
        self.heartbeat.beat(has_free_slot=self._free.is_any, kept=self._free.kept, slots=self._free.open)
        self._share_cores()
        # This is not logged at the start of the worker, when its log is not set up yet.
        self._core_share.tell()
        self._logs.beat()
        self._flush_declined()

    def _flush_declined(self) -> None:
        with self._declining:
            flush(self._declined)
