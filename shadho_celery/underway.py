"""What runs in the slots of a worker: its leases are renewed, and it is stopped where it is to stop."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from shadho_celery.channel import WorkerChannel
from shadho_celery.runner import STOP_SECONDS, Runner
from shadho_celery.seats import Seat, WorkerSeats


@dataclass
class Running:
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


class Underway:
    """What runs in one worker. Its methods may be called from any thread."""

    def __init__(self, channel: WorkerChannel, seats: WorkerSeats) -> None:
        self._channel = channel
        self._seats = seats
        self._running: dict[tuple[str, int, int], Running] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._running)

    @contextmanager
    def holding(self, running: Running) -> Iterator[None]:
        """Count it among what runs, for as long as this lasts."""
        with self._lock:
            self._running[running.key] = running
        try:
            yield
        finally:
            with self._lock:
                del self._running[running.key]

    def renew(self) -> None:
        """Renew all leases and seats, and stop what has lost its own or is not wanted. Raises redis-py's errors."""
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
                    self.stop(attempt, answer)

    def stop(self, running: Running, why: str) -> None:
        """Ask the trial to stop, and end its process where it does not."""

        def ask() -> None:
            running.stopped = why
            running.runner.stop_trial()

        # A lease that is gone may just be that of a trial which has ended since we asked for it.
        if not self._while_it_runs(running, ask):
            return
        timer = threading.Timer(STOP_SECONDS, self._while_it_runs, (running, running.runner.kill))
        timer.daemon = True
        timer.start()

    def _while_it_runs(self, running: Running, act: Callable[[], None]) -> bool:
        # Under the lock: once it is off the list its slot's process may run another trial, which is none of ours.
        with self._lock:
            if self._running.get(running.key) is not running:
                return False
            act()
            return True
