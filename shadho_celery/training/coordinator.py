"""The coordinator of a gang: gathers, commits, publishes; one thread decides, the bus's threads carry.

The commit rule: a vector counts where its frame came whole and undamaged, is of this life of the coordinator and of the
step under way, is finite, and is the first from its place; N of them make the step. So no part of a gradient is ever
applied, and none twice, whenever a replica dies.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from queue import Empty

import numpy as np

from shadho_celery.training.backups import Tuner
from shadho_celery.training.bus import Listener
from shadho_celery.training.duties import Duties
from shadho_celery.training.frames import BrokenFrame, Kind, control
from shadho_celery.training.mean import Mean
from shadho_celery.training.payload import Layout, Snapshot, Snapshots
from shadho_celery.training.peer import Arrived, Event, Joined, Left, Peer
from shadho_celery.training.run import Run
from shadho_celery.training.strategies import Strategy
from shadho_celery.training.vectors import is_finite
from shadho_celery.training.width import Patience, Width

logger = logging.getLogger(__name__)

#: vectors in a row that are not finite, after which a replica is sent away, and whoever has its rank next at the first
#: one; and steps that nobody's finite vector makes, after which the training has diverged
MOST_NOT_FINITE = 3
#: seconds between two looks at what no event tells of: whether the trial shall stop, whether a grace is over
TICK = 0.1
#: within so many seconds a replica has given a stale gradient up
CANCEL_SECONDS = 0.01


class Coordinator:
    """Runs the central rule over a bus until the steps are done."""

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        layout: Layout,
        listener: Listener,
        *,
        epoch: int,
        backups: int,
        patience: Patience,
        can_come: Callable[[], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.strategy, self.backups = run, strategy, backups
        self._layout, self._listener, self._epoch = layout, listener, epoch
        #: replicas that are here or may still come, where that is known
        self._can_come = can_come
        self._last_reason = ""
        # Whether a replica gives up on what comes too late; if not, it finishes that first.
        self._cancels = strategy.lockstep and getattr(strategy, "cancel", True)
        #: keeps the response times; chooses b from them where it is "auto"
        self.tuner = Tuner(
            strategy.replicas,
            backups,
            cancel_seconds=CANCEL_SECONDS if self._cancels else None,
            seed=run.plan.seed,
        )
        self._peers: dict[int, Peer] = {}
        self._bad: Counter[int] = Counter()
        #: steps in a row that were passed over
        self._barren = 0
        self._duties = Duties(self.tuner.times, now)
        self._snapshots = Snapshots(layout)
        self._current: Snapshot | None = None
        self._mean = Mean(run.centre.scratch(), np.zeros(layout.buffers, dtype=np.float32))
        self._decoded = run.centre.shape.vector()
        self._width = Width(strategy.replicas, patience, now)

    def train(self) -> None:
        """Gather the gang and take all steps. Raises ShadhoError where that cannot be."""
        has_come = self._gather()
        # Also where it was not waited for: until then a trial's time limit stands still.
        self.run.context.gang_assembled()
        if not has_come:
            return
        self.begin()
        while not self.run.over:
            self._handle_next()
            self.commit_if_due()

    def begin(self) -> None:
        """Send the parameters to everybody who is here."""
        self.run.start_clock()
        self._snap()
        for peer in list(self._peers.values()):
            self._publish(peer)

    def commit_if_due(self) -> None:
        """Take the step under way if it is complete, or as complete as it can be. Raises ShadhoError."""
        if self._due():
            self._commit()
        elif self._duties.idle and not self._mean and not self._duties.working:
            self._pass_over()

    # Events

    def _gather(self) -> bool:
        """Wait for N replicas; False where the trial shall stop."""
        while not self.run.over:
            enough, note = self._width.begin(len(self._peers), self._last_reason, self._is_hopeless)
            if note:
                self._note(note)
            if enough:
                return True
            self._handle_next()
        return False

    def _handle_next(self) -> None:
        try:
            event = self._listener.inbox.get(timeout=TICK)
        except Empty:
            return
        self.handle(event)

    def handle(self, event: Event) -> None:
        """One thing that happened on the bus."""
        match event:
            case Joined(peer=peer):
                self._peers[peer.slot] = peer
                # Somebody else may have had the place before.
                self._duties.clear(peer.slot)
                if self.run.step:
                    self._note(f"replica {peer.rank} joined at step {self.run.step}")
                if self._current is not None:
                    self._publish(peer)
            case Left(peer=peer, reason=reason):
                if self._peers.get(peer.slot) is peer:
                    self._forget(peer)
                    self._last_reason = f" (the last one left: {reason})"
                    self._note(f"replica {peer.rank} left at step {self.run.step}: {reason}")
            case Arrived(peer=peer):
                try:
                    self._take(event)
                except BrokenFrame as error:
                    self.run.log.refused["broken payload"] += 1
                    peer.drop(str(error))
                finally:
                    peer.read_on()

    def _take(self, event: Arrived) -> None:
        """The commit rule."""
        peer, header, step = event.peer, event.header, self.run.step
        if self._current is None or header.epoch != self._epoch or self._peers.get(peer.slot) is not peer:
            self.run.log.refused["of another life"] += 1
            return
        if header.step > step:
            raise BrokenFrame(f"a vector of step {header.step} at step {step}")
        self._duties.answer(peer.slot, header.step, event.at)
        if header.step < step and self.strategy.lockstep:
            self._came_late(peer)
            return
        if peer.slot in self._mean.slots:
            self.run.log.refused["twice from one place"] += 1
            return
        loss, buffers, vector = self._layout.read_grad(event.payload, self._decoded)
        if not (math.isfinite(loss) and is_finite(vector) and is_finite(buffers)):
            self._refuse(peer)
            return
        self._bad[peer.rank] = 0
        self._mean.add(peer.slot, vector, buffers, loss)

    def _came_late(self, peer: Peer) -> None:
        """Drop a vector for good, and have its replica go on with the current parameters at once."""
        log = self.run.log
        log.late[peer.slot] += 1
        if self._cancels:
            # It was on its way when the step ended, and was taken for cancelled.
            log.cancelled[peer.slot] -= 1
        if not self._duties.goes_on(peer.slot, self.run.step):
            self._publish(peer)

    def _refuse(self, peer: Peer) -> None:
        """A vector that is not finite: it may be the machine, or the training. Its replica waits for the next step."""
        self.run.log.refused["not finite"] += 1
        self._bad[peer.rank] += 1
        self._duties.wait(peer.slot)
        if self._bad[peer.rank] >= MOST_NOT_FINITE and len(self._peers) > 1:
            # Its rank stays open: the next one to come may be on a machine that is sound.
            self._note(
                f"replica {peer.rank} is in quarantine: its gradients were not finite; another may take its place"
            )
            peer.dismiss("in quarantine: its gradients were not finite", error=True)
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        """It is not, or no more, to be reckoned with."""
        del self._peers[peer.slot]
        self._duties.clear(peer.slot)
        self.tuner.times.forget(peer.slot)

    # Steps

    def _due(self) -> bool:
        alive = len(self._peers)
        if len(self._mean) >= (self._width.wanted if self.strategy.lockstep else 1):
            return True
        self._adapt(alive)
        if not self.strategy.lockstep:
            return False
        if len(self._mean) >= self._width.wanted:
            return True
        # All that were asked may have answered, some of them with what had to be refused.
        return alive >= self._width.wanted and bool(self._mean) and not self._duties.working

    def _adapt(self, alive: int) -> None:
        """Follow the number of replicas that are alive. Raises ShadhoError where too few are."""
        note = self._width.adapt(alive, self._last_reason, self._is_hopeless)
        if note:
            self._note(f"step {self.run.step}: {note}")

    def _is_hopeless(self) -> bool:
        """Whether nobody can come beside those who are here, as far as is known."""
        return self._can_come is not None and self._can_come() <= len(self._peers)

    def _commit(self) -> None:
        """Take the step."""
        run, self._barren = self.run, 0
        if self.strategy.lockstep:
            notice = control(Kind.STEP, epoch=self._epoch, step=run.step + 1)
            for slot in self._duties.working:
                self._peers[slot].notify(notice)
        slots, loss = self._mean.take()
        if self.strategy.lockstep:
            # A step of fewer than N gradients is as much shorter.
            run.centre.scale = len(slots) / self.strategy.replicas
        self.strategy.apply(run.centre, self._mean.vector)
        run.centre.shape.buffers.write(self._mean.buffers)
        run.took(slots, loss)
        if self._cancels:
            self.run.log.cancelled.update(self._duties.cut_off())
        self._go_on(self._peers if self.strategy.lockstep else self._duties.idle.union(slots))

    def _pass_over(self) -> None:
        """A step that nobody's finite vector makes: the next one has other batches. Raises ShadhoError."""
        self._barren += 1
        if self.run.step == 0 or self._barren >= MOST_NOT_FINITE:
            raise self.run.no_gradient()
        self.run.took((), math.nan)
        self._go_on(self._duties.idle)

    def _go_on(self, places: Iterable[int]) -> None:
        """Publish the parameters of the next step to those places, and tell of the last one."""
        run, peers = self.run, [self._peers[place] for place in places if place in self._peers]
        self._snap()
        if run.step < run.plan.steps:
            for peer in peers:
                self._publish(peer)
        if self.strategy.backups == "auto":
            self._tune_backups()
        run.tell()

    def _snap(self) -> None:
        """Set the parameters of this step apart, to be sent."""
        if self._current is not None:
            self._snapshots.release(self._current)
        self._current = self._snapshots.take()
        parameters, buffers = self._layout.split(self._current.vector)
        self.run.centre.read(parameters)
        self.run.centre.shape.buffers.read(buffers)
        self._current.frame = self._snapshots.frame(self._current, self._epoch, self.run.step)

    def _publish(self, peer: Peer) -> None:
        """Send the parameters of this step to a replica."""
        snapshot = self._current
        if snapshot is None or snapshot.frame is None:
            return
        self._snapshots.use(snapshot)
        self._duties.send(peer.slot, self.run.step)
        peer.publish(snapshot.frame, partial(self._snapshots.release, snapshot))

    # Backups

    def _tune_backups(self) -> None:
        """Keep the backups that the recorded times say are worth their places; the others go for good."""
        choice = self.tuner.at(self.run.step)
        if choice is None or choice.backups >= self.backups:
            return
        self._note(f"{choice.backups} of {self.backups} backups are worth their places, by the recorded times")
        self.backups = choice.backups
        self._listener.places = self.strategy.replicas + choice.backups
        for slot in sorted(self._peers)[self._listener.places :]:
            peer = self._peers[slot]
            peer.dismiss("its backup is not needed")
            self._forget(peer)

    def _note(self, text: str) -> None:
        logger.info("gang: %s", text)
        self.run.log.notes.append(text)
