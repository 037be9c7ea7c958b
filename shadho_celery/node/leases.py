"""Leases of a worker's running attempts. A lease is renewed while its attempt runs. An attempt that loses its lease is
stopped.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from shadho_celery.core.threads import NoThread, start_thread
from shadho_celery.fleet.channel import WorkerChannel
from shadho_celery.fleet.registry import MAX_TOLD, RunningTrial, Share
from shadho_celery.fleet.seats import Seat, WorkerSeats
from shadho_celery.runner.runner import INTERRUPT_SECONDS, STOP_SECONDS, Runner

#: value of `stopped` for an attempt that is given back because its worker ends
GIVEN_BACK = "given back"


@dataclass(kw_only=True, eq=False)
class Lease:
    """The right to run an attempt, or a replica of its gang, in a slot of this worker."""

    study: str
    number: int
    attempt: int
    delivery: str
    runner: Runner
    #: the study's name
    name: str = ""
    #: number of the trial whose folder it uses
    folder: int | None = None
    #: start of the run, in seconds since the epoch
    started_at: float = 0.0
    #: number of slots of this worker that the attempt takes
    slots: int = 1
    #: the replica's seat in the attempt's gang; None for the attempt itself
    seat: Seat | None = None
    #: reason why the attempt was stopped: ``cancel``, ``prune``, ``gone``, ``yield`` or GIVEN_BACK; "" if it was not
    stopped: str = ""
    #: number of times the attempt has called for replicas
    calls: int = 0
    #: True once the attempt has sent a report, after which it may be pruned at any time
    has_reported: bool = False


class Leases:
    """The leases of one worker. Any thread may call the methods."""

    def __init__(self, channel: WorkerChannel, seats: WorkerSeats) -> None:
        self._channel = channel
        self._seats = seats
        self._live: list[Lease] = []
        self._lock = threading.Lock()
        self._is_closed = False
        #: set once the worker is preempted
        self.preempted = threading.Event()

    def __len__(self) -> int:
        with self._lock:
            return len(self._live)

    def studies(self) -> dict[str, Share]:
        """Return for each study, by its key, its running trials and the number of their slots."""
        by_study: dict[str, list[Lease]] = defaultdict(list)
        with self._lock:
            for lease in self._live:
                by_study[lease.study].append(lease)
        return {
            study: Share(
                name=held[0].name,
                slots=sum(each.slots for each in held),
                trials=[
                    RunningTrial(
                        number=each.number,
                        started_at=each.started_at,
                        rank=None if each.seat is None else each.seat.rank,
                    )
                    for each in held[:MAX_TOLD]
                ],
            )
            for study, held in by_study.items()
        }

    def in_use(self, study: str) -> set[int]:
        """Return the numbers of the trials of a study whose folders are in use."""
        with self._lock:
            return {lease.folder for lease in self._live if lease.study == study and lease.folder is not None}

    @contextmanager
    def holding(self, lease: Lease) -> Iterator[None]:
        """Keep a lease for the duration of a `with` block: `renew` renews it."""
        with self._lock:
            self._live.append(lease)
            lease.stopped = GIVEN_BACK if self._is_closed else ""
        try:
            yield
        finally:
            with self._lock:
                self._live.remove(lease)

    def close(self) -> None:
        """Mark all attempts that are not stopped yet, and those that start later, as given back."""
        with self._lock:
            self._is_closed = True
            for lease in self._live:
                lease.stopped = lease.stopped or GIVEN_BACK

    def preempt(self) -> None:
        """Tell the running trials that the worker ends soon. Repeat the call, because further trials may just be
        starting.
        """
        with self._lock:
            self.preempted.set()
            live = list(self._live)
        for lease in live:
            self._while_live(lease, lease.runner.preempt)

    def renew(self) -> int:
        """Renew all leases and seats, and return their number. Stop the attempts and replicas for which the answer asks
        it.

        Raises redis-py's errors.
        """
        with self._lock:
            live = list(self._live)
        for study in {lease.study for lease in live}:
            attempts = [lease for lease in live if lease.study == study and lease.seat is None]
            answers = self._channel.renew(study, [(a.number, a.attempt) for a in attempts]) if attempts else []
            replicas = [lease for lease in live if lease.study == study and lease.seat is not None]
            seats = [(replica.seat, replica.delivery) for replica in replicas if replica.seat is not None]
            answers += self._seats.renew(study, seats) if seats else []
            for lease, answer in zip(attempts + replicas, answers, strict=True):
                if answer != "ok" and not lease.stopped:
                    self.stop(lease, answer)
        return len(live)

    def look(self) -> None:
        """Stop the attempts that were pruned since their last report. Raises redis-py's errors."""
        with self._lock:
            reporting = [each for each in self._live if each.has_reported and not each.stopped]
        for study in {lease.study for lease in reporting}:
            ours = [lease for lease in reporting if lease.study == study]
            for lease, answer in zip(ours, self._channel.told(study, [a.number for a in ours]), strict=True):
                if answer != "ok":
                    self.stop(lease, answer)

    def stop(self, lease: Lease, why: str) -> None:
        """Ask the trial to stop. If it does not, interrupt it, and then kill its process."""

        def ask() -> None:
            lease.stopped = why
            lease.runner.stop_trial()

        # If the trial has ended since the request to Redis, there is nothing to stop.
        if self._while_live(lease, ask):
            for seconds, act in (
                (INTERRUPT_SECONDS, partial(lease.runner.stop_trial, "interrupt")),
                (STOP_SECONDS, lease.runner.kill),
            ):
                timer = threading.Timer(seconds, self._while_live, (lease, act))
                timer.daemon = True
                try:
                    start_thread(timer)
                except NoThread:
                    # The trial gets no time to stop by itself, but its slot must become free.
                    self._while_live(lease, act)

    def _while_live(self, lease: Lease, act: Callable[[], None]) -> bool:
        # `act` is called under the lock: once the lease has ended, the slot's process may run another trial.
        with self._lock:
            if lease not in self._live:
                return False
            act()
            return True
