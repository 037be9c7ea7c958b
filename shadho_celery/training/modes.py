"""The other strategies on the same bus: asynchronous SGD, delayed averaging, elastic averaging in the background."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Literal

import numpy as np

from shadho_celery.errors import UsageError
from shadho_celery.training.strategies import Centre, Vector, Worker, check_width


@dataclass(frozen=True, kw_only=True)
class Async:
    """Asynchronous SGD: each gradient is applied at once, however stale it is. For comparison.

    A step is one gradient, so as many examples take N times as many steps as with `Sync`.
    """

    #: N
    replicas: int
    backups: Literal[0] = 0
    lockstep: bool = False

    def __post_init__(self) -> None:
        check_width(self.replicas, self.backups)
        _check_no_backups("Async", self.backups)

    def apply(self, centre: Centre, mean: Vector) -> None:
        centre.descend(mean)

    def train(self, worker: Worker) -> None:
        step = -1
        while True:
            worker.wait(after=step)
            step = worker.load()
            gradient = worker.gradient(step)
            if gradient is not None:
                worker.send(step, gradient.vector, gradient.loss)


@dataclass(frozen=True, kw_only=True)
class Average:
    """Local steps with delayed averaging (DaSGD, Zhou et al., arXiv 2006.00441).

    A replica sends what `tau` local steps have made of its parameters and goes on; `delay` local steps later it takes
    the average in: x = average + (x_now - x_sent). With `delay` 0 this is local SGD. Each replica has an optimizer of
    its own; a step is one averaging, and a replica that is too late for one starts again from the newest.
    """

    #: N
    replicas: int
    #: local steps from one sending to the next
    tau: int = 4
    #: local steps from the sending to the average's merging, 0 to `tau`
    delay: int = 0
    #: b
    backups: int | Literal["auto"] = 0
    lockstep: bool = True

    def __post_init__(self) -> None:
        check_width(self.replicas, self.backups)
        if self.tau < 1:
            raise UsageError(
                f"tau is {self.tau}: there is at least one local step between two averages; give 1 or more"
            )
        if not 0 <= self.delay <= self.tau:
            raise UsageError(
                f"delay is {self.delay}: the average of one round comes before the next; give 0 to {self.tau}"
            )

    def apply(self, centre: Centre, mean: Vector) -> None:
        # What travels is how far each has come from the step's parameters: small numbers, which a codec can quantise.
        parameters = np.empty_like(mean)
        centre.read(parameters)
        centre.write(parameters + mean)

    def train(self, worker: Worker) -> None:
        base, sent, now = (np.empty(worker.size, dtype=np.float32) for _ in range(3))
        step = self._fresh(worker, -1, base)
        done, loss = 0, math.nan
        while True:
            while done < self.tau and worker.newest() <= step:
                loss = worker.descend(step * self.tau + done)
                done += 1
            if done < self.tau:
                step, done = self._fresh(worker, step, base), 0
                continue
            worker.read(sent)
            worker.send(step, sent - base, loss)
            # The first ones of the next round, on the old parameters.
            for place in range(self.delay):
                loss = worker.descend((step + 1) * self.tau + place)
            worker.wait(after=step)
            step = worker.received(base)
            worker.read(now)
            worker.write(base + (now - sent))
            done = self.delay

    @staticmethod
    def _fresh(worker: Worker, after: int, base: Vector) -> int:
        """Start from the newest parameters beyond step `after`."""
        worker.wait(after=after)
        step = worker.load()
        worker.read(base)
        return step


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Elastic averaging in the background (ShadowSync's S-EASGD, Zheng et al., arXiv 2003.03477).

    While a replica trains, a thread of its own sends and waits. Between two local steps, where newer parameters x~ of
    the coordinator have come, replica and coordinator are drawn together (EASGD, Zhang et al., arXiv 1412.6651):
    e = alpha (x - x~), x <- x - e, x~ <- x~ + e. A step is one such exchange; training never waits for one.
    """

    #: N
    replicas: int
    #: how far they are drawn together, between 0 and 1; about 0.9 / N is stable
    alpha: float = 0.1
    #: local steps between two exchanges, at the least
    every: int = 4
    backups: Literal[0] = 0
    lockstep: bool = False

    def __post_init__(self) -> None:
        check_width(self.replicas, self.backups)
        _check_no_backups("Elastic", self.backups)
        if not 0 < self.alpha < 1:
            raise UsageError(
                f"alpha is {self.alpha}: 0 never exchanges anything and 1 forgets all; give one in between"
            )
        if self.every < 1:
            raise UsageError(
                f"every is {self.every}: there is at least one local step between exchanges; give 1 or more"
            )

    def apply(self, centre: Centre, mean: Vector) -> None:
        parameters = np.empty_like(mean)
        centre.read(parameters)
        centre.write(parameters + mean)

    def train(self, worker: Worker) -> None:
        worker.wait(after=-1)
        step = worker.load()
        local = np.empty(worker.size, dtype=np.float32)
        # About where the others are, for one that comes late.
        draw = step * self.every // self.replicas
        with _Shadow(worker, step) as shadow:
            while True:
                for _ in range(self.every):
                    loss = worker.descend(draw)
                    draw += 1
                if shadow.arrived():
                    worker.read(local)
                    difference = self.alpha * (local - shadow.centre)
                    worker.write(local - difference)
                    shadow.exchange(difference, loss)


def _check_no_backups(name: str, backups: int) -> None:
    if backups:
        raise UsageError(f"{name} has no backups: no step waits for anybody; give more replicas instead")


class _Shadow:
    """The thread that sends and waits; while it does, `centre` is its own."""

    def __init__(self, worker: Worker, step: int) -> None:
        #: the coordinator's parameters as they came last
        self.centre = np.empty(worker.size, dtype=np.float32)
        self._worker, self._step = worker, step
        worker.read(self.centre)
        self._outbox: SimpleQueue[tuple[Vector, float] | None] = SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="shadow", daemon=True)

    def __enter__(self) -> _Shadow:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The worker's methods end too when it is over, so this is short.
        self._outbox.put(None)
        self._thread.join()

    def arrived(self) -> bool:
        """True where `centre` is newer than at the last exchange. Raises what ended the thread."""
        if self._error is not None:
            raise self._error
        return self._idle.is_set()

    def exchange(self, difference: Vector, loss: float) -> None:
        """Send the elastic difference, and have the coordinator's newest parameters fetched."""
        self._idle.clear()
        self._outbox.put((difference, loss))

    def _run(self) -> None:
        try:
            while (item := self._outbox.get()) is not None:
                self._worker.send(self._step, *item)
                self._worker.wait(after=self._step)
                self._step = self._worker.received(self.centre)
                self._idle.set()
        except BaseException as error:
            self._error = error
