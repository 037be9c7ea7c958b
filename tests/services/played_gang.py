"""A gang on a virtual clock: the product's coordinator, strategies, replicas, batches and tuner; gradients are real.

Only three things are played: time, which passes between events alone; the connections, which take no time; and the
seconds of a gradient, which a function of (place, draw) gives. Each replica runs its strategy's own local rule in a
greenlet, so that one thread plays hundreds of replicas.
"""

from __future__ import annotations

import copy
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np
from greenlet import getcurrent, greenlet
from torch import Tensor, nn
from torch.optim import Optimizer

from shadho_celery.core.system import ManualClock
from shadho_celery.objective.context import LocalContext
from shadho_celery.training.coordinator.centre import ModelCentre
from shadho_celery.training.coordinator.coordinator import CANCEL_SECONDS, Coordinator, QuorumPolicy
from shadho_celery.training.coordinator.listener import Arrived, Event, Joined
from shadho_celery.training.coordinator.run import Run
from shadho_celery.training.plan import Plan
from shadho_celery.training.replica.batches import Batches, Computer, Data, Loss, Weight
from shadho_celery.training.replica.replica import ConnectedReplica, Delay, Workload
from shadho_celery.training.replica.update import Update
from shadho_celery.training.report import Log, Report
from shadho_celery.training.strategies import Strategy, Sync
from shadho_celery.training.wire.frames import Frame
from shadho_celery.training.wire.handshake import TrainingOver
from shadho_celery.training.wire.vectors import Layout, Quantize, Shape, Vector

EPOCH = 1


class World:
    """A clock, what will happen on it, and the events that have happened; the coordinator's inbox."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._number = itertools.count()
        self._events: deque[Event] = deque()

    def at(self, moment: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._due, (moment, next(self._number), act))

    def put(self, event: Event) -> None:
        self._events.append(event)

    def get(self, *, timeout: float) -> Event:
        until = self.clock.now() + timeout
        while not self._events:
            if not self._due or self._due[0][0] > until:
                self.clock.advance_to(until)
                raise Empty
            moment, _, act = heapq.heappop(self._due)
            self.clock.advance_to(moment)
            act()
        return self._events.popleft()


class PlayedReplica:
    """Both ends of one connection, and the replica behind it. It has the methods of `Peer` and of `Client`."""

    epoch = EPOCH

    def __init__(self, world: World, place: int, seed: int) -> None:
        self.world, self.place, self.rank = world, place, place
        self.newest, self.step = -1, -1
        self._frame: Frame | None = None
        self._ended = False
        self._run: Any = None
        #: number of the current pause; a later wake-up of an earlier pause does nothing
        self._pause = 0
        self._waits = self._pauses = False
        self._generator = np.random.default_rng([seed, place, 99])

    def start(self, replica: ConnectedReplica, strategy: Strategy) -> None:
        def run() -> None:
            with suppress(TrainingOver):
                strategy.train(replica)

        self._run = greenlet(run)
        self._run.switch()

    # What the coordinator calls

    def notify(self, frame: Frame) -> None:
        self._announce(frame.header.step)

    def publish(self, frame: Frame) -> None:
        self._frame, self.step = frame, frame.header.step
        self._announce(frame.header.step)

    def release_payload(self) -> None:
        pass

    def dismiss(self, reason: str, *, error: bool = False) -> None:
        self._ended, self._frame = True, None

    def drop(self, reason: str) -> None:
        raise AssertionError(reason)

    def end(self) -> None:
        self.dismiss("")
        if not self._run.dead:
            self._run.throw(TrainingOver)

    def _announce(self, step: int) -> None:
        self.newest = max(self.newest, step)
        now = self.world.clock.now()
        if self._waits:
            self.world.at(now, self._resume)
        elif self._pauses:
            # It notices between two micro-batches.
            self.world.at(now + CANCEL_SECONDS * float(self._generator.random()), self._wake(self._pause))

    def _resume(self) -> None:
        if self._waits and not self._run.dead:
            self._run.switch()

    def _wake(self, pause: int) -> Callable[[], None]:
        def wake() -> None:
            if self._pauses and self._pause == pause and not self._run.dead:
                self._run.switch()

        return wake

    # What the replica calls

    def raise_if_ended(self) -> None:
        if self._ended:
            raise TrainingOver("played")

    def wait(self, after: int) -> int:
        self._waits = True
        while self.step <= after:
            getcurrent().parent.switch()
            self.raise_if_ended()
        self._waits = False
        return self.step

    def pause(self, seconds: float, abandon: Callable[[], bool]) -> bool:
        self._pause += 1
        until = self.world.clock.now() + seconds
        self._pauses = True
        self.world.at(until, self._wake(self._pause))
        while self.world.clock.now() < until:
            getcurrent().parent.switch()
            if abandon():
                break
        self._pauses = False
        return self.world.clock.now() < until

    def read_params(self, reader: Callable[[Vector], None]) -> int:
        assert self._frame is not None
        reader(np.frombuffer(self._frame.parts[0], dtype=np.float32))
        return self.step

    def send(self, frame: Frame) -> None:
        payload = memoryview(bytearray(b"".join(frame.parts)))
        peer: Any = self
        self.world.put(Arrived(peer=peer, header=frame.header, payload=payload, at=self.world.clock.now()))


class Played(ConnectedReplica):
    """A replica that computes a gradient only once it knows that the gradient is not abandoned."""

    #: factor on the seconds of a gradient, by its examples
    slowness: Callable[[Tensor], float] | None = None

    def _backward(
        self, step: int, place: int, draw: int, abandon: Callable[[], bool] | None, loss_scale: float = 1.0
    ) -> tuple[float, float] | None:
        def abandoned() -> bool:
            self._client.raise_if_ended()
            return abandon is not None and abandon()

        assert self._workload.delay is not None
        factor = 1.0 if self.slowness is None else self.slowness(self._batches.indices(step, place))
        if self._client.pause(factor * self._workload.delay(self.place, draw), abandoned):
            return None
        return self._computer.backward(step, place, loss_scale=loss_scale)


class PlayedGang:
    """One training of a gang on a virtual clock."""

    def __init__(
        self,
        strategy: Strategy,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer],
        data: Data,
        loss: Loss,
        *,
        seconds: Delay,
        steps: int,
        batch: int = 1,
        seed: int = 0,
        codec: Quantize | None = None,
        weight: Weight | None = None,
        slowness: Callable[[Tensor], float] | None = None,
        returns: bool = True,
        on_step: Callable[[PlayedGang, int], None] | None = None,
        stop: Callable[[PlayedGang], bool] = lambda gang: False,
    ) -> None:
        self.world, self.model, self.strategy = World(), model, strategy
        backups = strategy.backups if strategy.backups != "auto" else -(-strategy.replicas // 3)
        places, now = strategy.replicas + backups, self.world.clock.now
        plan = Plan(
            model,
            optimizer(model),
            data,
            loss,
            steps=steps,
            batch=batch,
            seed=seed,
            checkpoint_every=0,
            report_every=steps,
            on_step=None if on_step is None else lambda step, loss: on_step(self, step),
        )
        centre = ModelCentre(plan, strategy.replicas)
        layout = Layout(centre.shape, codec, places)
        batches = Batches(data, batch=batch, seed=seed, places=places)
        examples = batches.size if returns and isinstance(strategy, Sync) else 0
        context = LocalContext(checkpoints=Path(), stopped=lambda: stop(self))
        log = Log(replicas=strategy.replicas, places=places)
        self.run = Run(plan, centre, context, log, digest="", examples=examples, now=now)
        self.coordinator = Coordinator(
            self.run, strategy, layout, self.world, epoch=EPOCH, backups=backups, policy=QuorumPolicy(), now=now
        )
        self.replicas = [PlayedReplica(self.world, place, seed) for place in range(places)]
        for replica in self.replicas:
            own = copy.deepcopy(model)
            shape = Shape(own)
            workload = Workload(
                computer=Computer(own, loss, batches, weight),
                update=Update(optimizer(own)),
                strategy=strategy,
                codec=codec,
                digest="",
                delay=seconds,
            )
            client: Any = replica
            connected = Played(
                workload,
                shape,
                layout=Layout(shape, workload.codec, places),
                client=client,
                place=replica.place,
                now=now,
            )
            connected.slowness = slowness
            replica.start(connected, strategy)
            self.world.put(Joined(peer=replica))

    @property
    def now(self) -> float:
        """Virtual seconds since the start."""
        return self.world.clock.now()

    def train(self) -> Report:
        """Take all steps."""
        try:
            for mean in self.coordinator.steps():
                self.strategy.apply(self.run.centre, mean)
            self.run.finish()
        finally:
            for replica in self.replicas:
                replica.end()
        return Report(
            backups=self.coordinator.backups,
            log=self.run.log,
            predictions=self.coordinator.predictions(),
        )
