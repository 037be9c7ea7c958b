"""Slots of a worker. Each slot has a process of its own, in which it runs attempts from the worker's messages."""

from __future__ import annotations

import logging
import math
import os
import threading
import uuid
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from functools import cache, partial
from pathlib import Path

import redis
from msgspec import to_builtins
from msgspec.structs import asdict, replace

from shadho_celery.core.checks import one_line
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.failures import headline
from shadho_celery.core.files import study_folder
from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import NoThread, SystemClock
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
from shadho_celery.fleet.channel import Claim, Shipping, WorkerChannel
from shadho_celery.fleet.control import TO_WORKERS, Asked, Requests, WorkerDeed, of_worker
from shadho_celery.fleet.policy import Guard
from shadho_celery.fleet.redis import refusals
from shadho_celery.fleet.registry import Registry, StudyWants, keys_of
from shadho_celery.fleet.seats import Seat, WorkerSeats
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.node.code import CodeGate, ShippedCode, storage_id
from shadho_celery.node.devices import Devices
from shadho_celery.node.heartbeat import Beat, Heartbeat, Meter, announced
from shadho_celery.node.leases import GIVEN_BACK, REFUSED, Bundle, Claims, Lease, Leases
from shadho_celery.node.logs import AnswerServer, TrialLines
from shadho_celery.node.stay import SAFETY
from shadho_celery.objective.call import joined
from shadho_celery.runner.output import log_name
from shadho_celery.runner.protocol import MAX_COMPLAINT, MAX_COMPLAINTS, Reported, RunAttempt
from shadho_celery.runner.runner import OtherCode, Runner
from shadho_celery.runner.starting import ForkServers

log = logging.getLogger(__name__)

#: seconds before a message that this worker cannot act on returns to its queue
REQUEUE_SECONDS = 1.0

#: after a trial shorter than this many seconds, a worker claims all remaining attempts of the message at once
QUICK_SECONDS = 0.02


class NotMine(Exception):
    """Raised if this worker cannot act on a message, but another worker of its class may be able to."""


class Slots:
    """The slots of one worker, its leases, its heartbeat, and its answers to requests."""

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
        guard: Guard | None = None,
        code_folder: Path | None = None,
        fork_servers: ForkServers | None = None,
        shares_gpus: bool = False,
    ) -> None:
        """`imports` are the modules whose objectives may run here; shipped code may run in addition.

        `signer` signs messages and events. `control` signs the drains that this worker obeys; None to refuse them.
        With a `guard`, only trials of users of the policy run, and only admins drain this worker or delete folders.
        Shipped code is accepted only with a `code_folder`, in which it is stored. `fork_servers` start the slots'
        processes, and are closed by `close`. Raises UsageError for a name or a heartbeat file that cannot be used.
        """
        self.name = f"{compute_class}@{machine.host}.{os.getpid()}.{uuid.uuid4().hex[:4]}"
        self._guard = guard
        self.signer, self._host, self._checkpoints = signer, machine.host, checkpoints
        self._clock, self._closing, self._telling = SystemClock(), threading.Event(), threading.Lock()
        self._fork_servers = fork_servers or ForkServers()
        self._fork_servers.on_complaints = self._tell
        channel = WorkerChannel(client, worker=self.name, signer=signer)
        self._seats = WorkerSeats(client, worker=self.name, signer=signer)
        self.leases = Leases(channel, self._seats)
        self._complain = complain_once = cache(partial(log.warning, "%s"))
        make_runner = partial(Runner, imports, complain=complain_once, start=self._fork_servers.start)
        self._devices = Devices(machine, compute_class, count, make_runner, address=address, shares_gpus=shares_gpus)
        shipped = ShippedCode(Shipping(client, signer), code_folder, self._clock) if code_folder else None
        self._gate = CodeGate(imports, checkpoints, shipped)
        self.worker = announced(
            machine=to_builtins(machine),
            compute_class=compute_class,
            slots=self._devices.slots,
            shares_gpus=bool(self._devices.free.gpus),
            imports=imports,
            accepts_code=code_folder is not None,
            storage=storage_id(checkpoints),
            **keys_of(signer, control),
        )
        self.heartbeat = Heartbeat(
            client,
            self.name,
            self.worker,
            self.leases,
            self._clock,
            signer=signer,
            control=control,
            guard=guard,
            measure=Meter(machine.gpus_for(compute_class)).look,
        )
        self._claims = Claims(channel, self.heartbeat.tally.redis, self._clock, self._closing)
        self._lines = TrialLines()
        # The workers of an embedded fleet have no signing key, but a key for control requests.
        requests = Requests(client, of_worker(self.name), control or signer, TO_WORKERS)
        in_use = None if control is None else self.leases.in_use
        may_sweep = None if guard is None else partial(_refusal, guard, Registry(client, StudyWants, signer))
        self._answers = AnswerServer(requests, checkpoints, in_use, self._clock, may_sweep)
        self.beat = Beat(self._look, self._beat_once, self._claims.note, self._closing)
        #: slots whose last trial was quick and succeeded; and the current bundle of each slot
        self._quick: set[int] = set()
        self._bundles: dict[int, Bundle] = {}
        #: monotonic times: by which trials must have ended, and at which the last trial has ended
        self.leaves_at, self.ran_at = math.inf, -math.inf
        #: study and number of each trial that was declined since a trial last ran, because it would not end before
        #: `leaves_at`
        self.too_long: set[tuple[str, int]] = set()

    def check(self) -> None:
        """Try the Redis commands that a worker needs, without changing anything. Raises ServiceError if Redis refuses
        them.
        """
        with refusals():
            self.heartbeat.check()
            self._claims.channel.are_refused("0", [])
            if self._guard is not None:
                self._guard.check()

    def start(self) -> None:
        """Start the slots' processes and the thread that renews leases. Raises ServiceError if that thread cannot
        start.
        """
        self._devices.share_cores(self.heartbeat.neighbours)
        try:
            self.beat.start()
        except NoThread as error:
            raise ServiceError(f"this worker cannot renew leases: {error}") from error
        self._devices.start()

    @property
    def left(self) -> float:
        """Seconds within which new trials must end; infinite without a limit."""
        return self.leaves_at - self._clock.now()

    @property
    def _is_ending(self) -> bool:
        return self._closing.is_set() or self.leases.preempted.is_set()

    def preempt(self) -> None:
        """Take no more trials, and tell the running ones that this worker ends soon. Trials that then end early are
        given back.
        """
        self.heartbeat.drain()
        self.leases.preempt()

    def close(self) -> None:
        """End the processes and withdraw the announcement. The slots' threads give back attempts that still run."""
        self._closing.set()
        self.leases.close()
        self._fork_servers.close()
        killers = self._devices.close()
        with suppress(redis.RedisError):
            # Decline the attempts of pending calls now, or the scheduler sends them again only after half a minute.
            self._claims.flush()
        self.heartbeat.withdraw()
        self.beat.file.remove()
        for killer in killers:
            killer.join()

    def run(self, payload: Payload) -> None:
        """Run a message's attempts one after another, except those that this worker declines.

        Raises NotMine if this worker stops or is drained, was not started with their module, has another version of the
        code, or has an open circuit breaker.
        """
        if self.heartbeat.consumer is not None:
            self.heartbeat.consumer.note_message()
        if self._is_ending:
            raise NotMine("this worker stops")
        if self._guard is not None and (reason := self._guard.unwelcome(payload.study, payload.owner, payload.proof)):
            self._complain(f"trials of study {one_line(payload.name, 80)} are declined: {reason}")
            self._closing.wait(REQUEUE_SECONDS)
            # The attempt of a replica has been claimed by another worker.
            attempts = [] if payload.replica is not None else payload.attempts
            bundle = Bundle(self._claims.channel, payload, attempts, self._clock, self._host)
            self._claims.persist(partial(bundle.refuse, f"on {self._host}: {reason}"))
            return
        lacks = partial(self._gate.lacks, payload)
        if reason := "this worker is drained" if self.heartbeat.is_drained else self._claims.persist(lacks):
            if self._claims.is_void(payload):
                return
            # The message returns to its queue for another worker. Wait first, or it would circulate without a pause.
            self._closing.wait(REQUEUE_SECONDS)
            raise NotMine(reason)
        # The message of a replica is not declined here: its attempt has been claimed by another worker.
        ours = [
            each for each in payload.attempts if payload.replica is None and not self._declines(payload.study, each)
        ]
        if not ours and payload.replica is None:
            return
        width = max((each.slots for each in ours), default=1) if payload.one_worker else 1
        if width > self._devices.free.count:
            self._closing.wait(REQUEUE_SECONDS)
            raise NotMine(f"a trial takes {width} slots of one worker, and this one has {self._devices.free.count}")
        consumer = self.heartbeat.consumer
        with nullcontext() if width == 1 or consumer is None else consumer.holding(width - 1):
            self._run_in(width, payload, ours)

    def _run_in(self, width: int, payload: Payload, ours: Sequence[Attempt]) -> None:
        """Wait until `width` slots are free, and run a message's attempts there."""
        needs = [each.gpu_bytes for each in ours]
        need = None if payload.replica is not None or None in needs else max(map(int, filter(None, needs)), default=0)

        def is_wanted() -> bool:
            return not (self._is_ending or self._claims.is_void(payload) or self._fits_beside(width, payload))

        taken = self._devices.free.take(width, is_wanted, need=need)
        if not taken:
            if self._is_ending:
                raise NotMine("this worker stops")
            if not self._claims.is_void(payload):
                raise NotMine("another worker of this machine has its slots")
            return
        slot = taken[0]
        self._follow_open()
        try:
            with self._devices.given(taken):
                try:
                    if payload.replica is not None:
                        self._run_replica(slot, payload, payload.replica)
                    else:
                        bundle = Bundle(self._claims.channel, payload, ours, self._clock, self._host, slot=slot)
                        self._run_bundle(slot, bundle)
                finally:
                    self._bundles.pop(slot, None)
        except redis.RedisError as error:
            if not self._closing.is_set():
                raise
            log.warning(
                "Redis does not answer (%s); the attempts that this worker ran are lost when their leases run out",
                error,
            )
        finally:
            self._follow_open()

    def _follow_open(self) -> None:
        """Take only as many messages as there are slots that trials may use now. Shared GPUs may have too little memory
        for all slots.
        """
        free = self._devices.free
        if free.gpus and self.heartbeat.consumer is not None:
            self.heartbeat.consumer.close_slots(free.count - free.open)

    def _fits_beside(self, width: int, payload: Payload) -> bool:
        """Return whether another worker of this class and machine has enough free slots for this message."""
        return width > 1 and any(
            each.slots - each.busy >= width
            and each.machine.host == self._host
            and each.compute_class == self.worker.compute_class
            and (payload.module in each.imports or (payload.is_shipped and each.accepts_code))
            and not (each.draining or each.quarantined)
            for each in self.heartbeat.neighbours
        )

    def _run_bundle(self, slot: int, bundle: Bundle) -> None:
        """Claim and run the attempts of a message one after another, and send the results."""
        self._bundles[slot], runner = bundle, self._devices.runners[slot]
        while bundle.unclaimed and not self.leases.preempted.is_set():
            if slot in self._quick:
                self._exchange(bundle, len(bundle.unclaimed))
                runner.send_ahead([self._order(slot, bundle.payload, each) for each in bundle.waiting()])
            else:
                self._exchange(bundle, 1)
            while not self.leases.preempted.is_set() and (attempt := bundle.next()) is not None:
                try:
                    outcome, stopped = self._drive(slot, bundle.payload, attempt, bundle.delivery)
                except OtherCode as other:
                    # Announce the code first, so that the scheduler knows it before it sends the attempts again.
                    reason = self._note_code(bundle.payload, other.code)
                    log.warning("trial %s and those after it were given back: %s", attempt.number, reason)
                    self._claims.persist(partial(bundle.refuse, f"on {self._host}: {reason}", attempt))
                    return
                if stopped == GIVEN_BACK:
                    self._give_back(runner, bundle, attempt)
                    return
                if not stopped and outcome.out_of_memory is Memory.GPU and self._devices.free.was_shared(slot):
                    log.info("trial %s ran out of GPU memory beside others; it is repeated alone", attempt.number)
                    self._give_back(runner, bundle, attempt, "it ran out of GPU memory beside other trials")
                    return
                self._quick.discard(slot)
                if (outcome.seconds or 0.0) < QUICK_SECONDS and outcome.state in WELL and not stopped:
                    self._quick.add(slot)
                if (result := self._result(bundle.payload, attempt, outcome, stopped)) is not None:
                    bundle.add(result)
        if self.leases.preempted.is_set():
            self._give_back(runner, bundle)
        else:
            self._exchange(bundle, 0)

    def _give_back(self, runner: Runner, bundle: Bundle, attempt: Attempt | None = None, reason: str = "") -> None:
        """Send a bundle's results. Give back `attempt`, if any, and all attempts after it.

        `reason` is recorded; by default it says that this worker has stopped or was preempted.
        """
        ended = "preempted" if self.leases.preempted.is_set() else "stopped"
        runner.recall()
        self._claims.persist(partial(bundle.refuse, reason or f"its worker was {ended}", attempt))

    def _note_code(self, payload: Payload, code: CodeVersion) -> str:
        """Record and announce the version of the code that a new process has found. Return why it cannot be used."""
        reason = self._gate.refuse(payload, code)
        self._tell()
        return reason

    def _tell(self) -> None:
        """Announce the versions of the code that this worker has, the shipped versions that it cannot run, its keys,
        the number of slots that trials may use now, and complaints.

        Complaints say why trials are declined or the slots' processes start slowly. A slot that is starting waits for
        this announcement, so the scheduler knows the complaint before the slot's result, which may be the last one of a
        short study.
        """
        with self._telling:
            complaints, slots = [*self._fork_servers.complaints()], self._devices.free.open
            if self._guard is not None and (trouble := self._guard.trouble):
                complaints = [one_line(trouble, MAX_COMPLAINT), *complaints][:MAX_COMPLAINTS]
            keys = keys_of(self.signer, self.heartbeat.control)
            self.heartbeat.tell(**self._gate.facts, **keys, complaints=complaints, slots=slots)

    def _exchange(self, bundle: Bundle, count: int) -> None:
        """Send a bundle's results and claim its next `count` attempts.

        Raises NotMine if the circuit breaker is open and no claimed attempt waits. A breaker that is half open grants
        one claim, whose attempt runs first.
        """
        answers = self._claims.persist(partial(bundle.exchange, count))
        if Claim.BREAKER_OPEN in answers and not bundle.waiting():
            self._is_refused(Claim.BREAKER_OPEN, bundle.payload.study)

    def _declines(self, study: str, attempt: Attempt) -> bool:
        """Decline an attempt that must not run here or would not end in time. Return whether it was declined."""
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
        self._claims.decline(study, attempt, reason, is_too_long=is_too_long)
        return True

    def _result(self, payload: Payload, attempt: Attempt, outcome: Outcome, stopped: str) -> Result | None:
        """Return the result of an attempt, or None if it has lost its lease."""
        number, which = attempt.number, attempt.attempt
        if stopped == "gone":
            log.warning(REFUSED, number, which)
            # Do not send the result: Redis may have lost its record of the attempt, and would then accept the result.
            with suppress(redis.RedisError):
                self._claims.channel.count_refused(payload.study)
            return None
        outcome = outcome.cancelled() if stopped else outcome
        # The result only says CANCELLED, because the scheduler knows the reason. The worker's log shows PRUNED.
        shown = replace(outcome, state=TrialState.PRUNED) if stopped == "prune" else outcome
        self.heartbeat.tally.end(shown)
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

    def _run_replica(self, slot: int, payload: Payload, replica: ReplicaSeat) -> None:
        """Run a replica if its attempt runs and the seat is free. Only the coordinator of its gang returns a result."""
        [attempt] = payload.attempts
        delivery = uuid.uuid4().hex[:8]
        seat = Seat(number=attempt.number, attempt=attempt.attempt, call=replica.call, rank=replica.rank)
        claim = self._claims.persist(lambda: self._seats.take(payload.study, seat, delivery))
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
        # A replica that its gang no longer needs ends as CANCELLED. If its objective returns instead, the replica has
        # failed, because it has not taken part in a gang.
        failure = None
        if has_ended and outcome.state is not TrialState.CANCELLED:
            error = outcome.error or "its objective returned without taking part in a gang"
            at = self._clock.wall()
            failure = ReplicaFailed(**asdict(seat), error=error, host=self._host, at=at, worker=self.name)
        done = has_ended and failure is None
        is_taken = self._claims.persist(
            lambda: self._seats.leave(payload.study, seat, delivery, done=done, failure=failure)
        )
        if failure is not None and is_taken:
            log.warning("rank %s of trial %s failed: %s", seat.rank, seat.number, headline(failure.error))

    def _is_refused(self, claim: Claim, study: str) -> bool:
        """Return whether a claim was refused. Raises NotMine if this worker's circuit breaker is open."""
        if claim is Claim.BREAKER_OPEN:
            self.heartbeat.pause_for(study)
            raise NotMine("this worker pauses: its last trials failed in ways that no other worker has seen")
        return claim is Claim.REFUSED

    def _drive(
        self, slot: int, payload: Payload, attempt: Attempt, delivery: str, seat: Seat | None = None
    ) -> tuple[Outcome, str]:
        """Run an attempt, or a replica of it on `seat`, while its lease is renewed.

        Returns the outcome, and the reason why it was stopped (`Lease.stopped`), or "" if it was not.
        """
        number, which, runner = attempt.number, attempt.attempt, self._devices.runners[slot]
        lease = Lease(
            study=payload.study,
            name=payload.name,
            folder=attempt.number if attempt.origin is None else attempt.origin,
            started_at=self._clock.wall(),
            number=number,
            attempt=which,
            delivery=delivery,
            runner=runner,
            seat=seat,
            slots=self._devices.widths[slot],
            expected=attempt.expected,
        )
        unsent = 0

        def on_report(said: Reported) -> None:
            nonlocal unsent
            at, losses = self._clock.wall(), said.losses
            report = Report(number=number, attempt=which, step=said.step, loss=said.loss, losses=losses, at=at)
            lease.has_reported = seat is None
            try:
                answer = self._claims.channel.report(payload.study, report)
                unsent += answer == "refused"
                if answer in {"cancel", "prune"} and not lease.stopped:
                    self.leases.stop(lease, answer)
            except redis.RedisError as error:
                unsent += 1
                self._claims.note(error)

        def on_gang(gang: GangCall) -> None:
            lease.calls += not gang.assembled
            call = Called(number=number, attempt=which, call=lease.calls, gang=gang, at=self._clock.wall())
            self._claims.persist(lambda: self._seats.call(payload.study, call))

        self.too_long.clear()
        with self.leases.holding(lease):
            outcome = runner.run(self._order(slot, payload, attempt), on_report, on_gang)
        self.ran_at = self._clock.now()
        if unsent:
            warning = f"{unsent} reports were lost: Redis did not accept them, or the scheduler was away for too long"
            outcome = replace(outcome, warning=joined(outcome.warning, warning))
        if self.leases.preempted.is_set() and not lease.stopped and outcome.state not in WELL:
            # The trial has returned early because of the preemption, or a service manager has killed all of the
            # worker's processes.
            return outcome, GIVEN_BACK
        return outcome, lease.stopped

    def _order(self, slot: int, payload: Payload, attempt: Attempt) -> RunAttempt:
        """Return the order that tells a slot's process to run an attempt of a message."""
        whose = attempt.number if attempt.origin is None else attempt.origin
        rank = 0 if payload.replica is None else payload.replica.rank
        # Build the paths as text: a worker does this for each trial, and `Path` takes ten times as long.
        folder = study_folder(self._checkpoints, payload.study)
        return RunAttempt(
            payload=replace(payload, attempts=[attempt]),
            folder=self._gate.folder(payload),
            checkpoint_dir=f"{folder}/{whose}",
            log=f"{folder}/{log_name(attempt.number, attempt.attempt, rank)}",
            compute_class=self.worker.compute_class,
            slot=slot,
            encrypted=bool(self.signer.fingerprint),
        )

    def _look(self) -> None:
        """Stop the trials that were pruned. If this worker is preempted, tell this to trials that have just started."""
        self.leases.look()
        if self.leases.preempted.is_set():
            self.leases.preempt()

    def _beat_once(self) -> None:
        """Renew leases and announce the worker. Raises redis-py's errors."""
        self._lines.beat()
        self.heartbeat.tally.renewals += self.leases.renew()
        self._gate.follow([runner.codes() for runner in self._devices.runners])
        self._tell()
        for slot, bundle in list(self._bundles.items()):
            bundle.relieve(self._devices.runners[slot].recall)
        self._follow_open()
        free = self._devices.free
        self.heartbeat.beat(has_free_slot=free.is_any, kept=free.kept)
        self._devices.share_cores(self.heartbeat.neighbours)
        # Log the threads only now: when the worker starts, its log is not set up yet.
        self._devices.tell()
        self._answers.beat()
        self._claims.flush()


def _refusal(guard: Guard, studies: Registry[StudyWants], request: Asked[WorkerDeed]) -> str | None:
    """Return the reason to refuse a request to delete folders, or None.

    Admins may delete all folders, and the scheduler of a running study those of this study.
    """
    if (reason := guard.refusal(request)) is None:
        return None
    living = studies.living()
    for key in getattr(request.deed, "studies", {}):
        if (study := living.get(key)) is None or guard.refusal(request, study.owner) is not None:
            return reason
        if guard.unwelcome(key, study.owner, study.proof) is not None:
            return reason
    return None
