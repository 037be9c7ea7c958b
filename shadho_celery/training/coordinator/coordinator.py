"""Coordinator of a gang: collects the replicas' vectors (gradients, or what the strategy sends), commits steps and
publishes parameters, all in one thread.

Commit rule: a vector counts if its frame is complete and undamaged and has the coordinator's current epoch. It must
also be for the current step (in lockstep), be finite, and be the first from its place. In lockstep, N such vectors make
the step, and a later vector is dropped (`_drop_late`). No gradient is applied in part or twice, even if a replica dies
at any moment.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Literal

import numpy as np

from shadho_celery.errors import ShadhoError
from shadho_celery.training.coordinator.backups import Assignments, Tuner
from shadho_celery.training.coordinator.centre import Mean
from shadho_celery.training.coordinator.listener import Arrived, Event, Joined, Left, Peer, Rejected
from shadho_celery.training.coordinator.run import Run
from shadho_celery.training.strategies import Strategy, Sync
from shadho_celery.training.wire.frames import BrokenFrame, Frame, Header, Kind, control_frame
from shadho_celery.training.wire.vectors import Layout, Vector, is_finite

logger = logging.getLogger(__name__)

#: a replica is quarantined after this many vectors in a row that are not finite; the count continues for the next
#: replica of the same rank
QUARANTINE_AFTER = 3
#: maximum seconds for which the loop waits for an event before it checks whether the trial must stop or a grace period
#: ends
TICK = 0.1
#: seconds that a replica is assumed to need to abandon a stale gradient
CANCEL_SECONDS = 0.01


@dataclass(frozen=True, kw_only=True)
class QuorumPolicy:
    """Behaviour of a gang while it has fewer than N replicas."""

    #: seconds to wait for the first N replicas
    start_seconds: float = 60.0
    #: seconds for which a step waits for replacements of lost replicas
    grace_seconds: float = 10.0
    #: what happens after grace_seconds: continue with fewer replicas and a lower learning rate, wait longer, or end
    #: with an error
    on_few: Literal["shrink", "wait", "fail"] = "shrink"


class Quorum:
    """Decides how many gradients make a step, by the number of live replicas and the policy."""

    def __init__(self, replicas: int, policy: QuorumPolicy, now: Callable[[], float]) -> None:
        #: number of gradients that make a step at the moment
        self.size = replicas
        self._replicas, self._policy, self._now = replicas, policy, now
        self._short_since: float | None = None
        self._until = now() + policy.start_seconds

    def start(self, present: int, reason: str, hopeless: Callable[[], bool]) -> tuple[bool, str | None]:
        """Decide whether the first step may begin with `present` replicas. Return the decision, and a note for the user
        or None.

        `reason` says why the last replica left or was refused, or is "". `hopeless` returns True if no more replicas
        can come. Raises ShadhoError if too few replicas came in time.
        """
        if present >= self._replicas:
            return True, None
        late = self._now() > self._until and self._policy.on_few != "wait"
        if not (late or hopeless()):
            return False, None
        missing = f"{present} of {self._replicas} replicas came{reason}"
        if self._policy.on_few == "fail" or not present:
            raise ShadhoError(
                f"{missing} within {self._policy.start_seconds:g} s; check that they were started, or ask for fewer"
            )
        return True, self._resize(present, missing)

    def follow(self, alive: int, reason: str, hopeless: Callable[[], bool]) -> str | None:
        """Adapt the quorum to the number of live replicas. Return a note for the user if the quorum changes, else None.

        Raises ShadhoError if too few replicas are alive for too long and the gang may not shrink, or if none is alive.
        """
        if alive >= self.size:
            self._short_since = None
            return self._resize(min(alive, self._replicas), "replicas are back")
        if self._short_since is None:
            self._short_since = self._now()
        waits = self._policy.on_few == "wait" and not hopeless()
        if waits or self._now() - self._short_since < self._policy.grace_seconds:
            return None
        left = f"{alive} of {self._replicas} replicas are left{reason}"
        if self._policy.on_few != "shrink":
            raise ShadhoError(f"{left}; find out why the others ended, or let the gang shrink (on_few='shrink')")
        if not alive:
            raise ShadhoError(f"{left}; see the log")
        return self._resize(alive, left)

    def _resize(self, size: int, reason: str) -> str | None:
        if size == self.size:
            return None
        self.size, self._short_since = size, None
        return f"{reason}: a step now takes {size} gradients"


class Coordinator:
    """Event loop that collects vectors, yields their mean for each step, and publishes the new parameters."""

    def __init__(
        self,
        run: Run,
        strategy: Strategy,
        layout: Layout,
        inbox: SimpleQueue[Event],
        *,
        epoch: int,
        backups: int,
        policy: QuorumPolicy,
        can_come: Callable[[], int] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.run, self.strategy, self.backups = run, strategy, backups
        self._layout, self._inbox, self._epoch = layout, inbox, epoch
        #: returns the maximum number of replicas, present or still to come; None if it is not known
        self._can_come = can_come
        self._last_reason = ""
        # True if replicas abandon a late gradient instead of finishing it
        self._cancels = strategy.lockstep and getattr(strategy, "cancel", True)
        #: keeps the response times, and chooses b from them if b is "auto"
        self.tuner = Tuner(
            strategy.replicas,
            backups,
            cancel_seconds=CANCEL_SECONDS if self._cancels else None,
            seed=run.seed,
        )
        self._peers: dict[int, Peer] = {}
        #: place that finishes a late gradient, so that its time is known (probe)
        self._probe: int | None = None
        #: staleness of the last vector
        self._staleness = 0
        #: rank -> number of its vectors in a row that were not finite
        self._not_finite: Counter[int] = Counter()
        self._assignments = Assignments(self.tuner.times, now)
        #: memory of earlier parameters, which is reused: to allocate 100 MB anew would take longer than the copy
        self._free: deque[Vector] = deque()
        #: frame with the current parameters
        self._current: Frame | None = None
        self._mean = Mean(run.centre.scratch, np.zeros(layout.buffers, dtype=np.float32), run.log.places)
        #: replicas whose vectors are part of the mean, and are still in the memory of their connections
        self._held: list[Peer] = []
        self._quorum = Quorum(strategy.replicas, policy, now)

    def steps(self) -> Iterator[Vector]:
        """Wait for the replicas, then yield the mean of each step's vectors. The caller applies it before it continues.

        Raises ShadhoError if too few replicas come or are left.
        """
        has_come = self._gather()
        # Make this call even if the trial must stop, because its time limit is paused until the call.
        self.run.context.gang_assembled()
        if not has_come:
            return
        self.begin()
        while not self.run.is_over:
            self._handle_next()
            yield from self.due_steps()

    def begin(self) -> None:
        """Send the first parameters to all replicas that are present."""
        self.run.start_clock()
        self._take_snapshot()
        for peer in self._active():
            self._publish(peer)

    def due_steps(self) -> Iterator[Vector]:
        """Commit the current step if it has enough vectors, or if no more can arrive. Yield their mean.

        Raises ShadhoError.
        """
        if self._is_due():
            yield from self._commit()
        elif self._assignments.idle and not self._mean and not self._assignments.busy:
            # All replicas have answered this step, but no vector was finite. Skip the step: the next one has other
            # batches.
            self.run.skip_step()
            self._start_next_step([*self._assignments.idle])

    def predictions(self) -> Sequence[float]:
        """Return the seconds per step predicted for each b, or () if too few times are known or it is not `Sync`."""
        return self.tuner.predictions() if isinstance(self.strategy, Sync) else ()

    # Events

    def _gather(self) -> bool:
        """Wait for the first N replicas. Return False if the trial must stop."""
        while not self.run.is_over:
            enough, note = self._quorum.start(len(self._peers), self._last_reason, self._is_hopeless)
            if note:
                self._note(note)
            if enough:
                return True
            self._handle_next()
        return False

    def _handle_next(self) -> None:
        try:
            event = self._inbox.get(timeout=TICK)
        except Empty:
            return
        self.handle(event)

    def handle(self, event: Event) -> None:
        """Handle one event of a connection."""
        match event:
            case Joined(peer=peer):
                self._peers[peer.place] = peer
                self.run.log.joined[peer.rank] += 1
                # Another replica may have had this place.
                self._clear(peer.place)
                if self.run.step:
                    self._note(f"replica {peer.rank} joined at step {self.run.step}")
                if peer in self._active():
                    self._publish(peer)
            case Rejected(reason=reason):
                self._last_reason = f" (the last one was refused: {reason})"
            case Left(peer=peer, reason=reason, is_error=True):
                raise ShadhoError(f"replica {peer.rank} ended at step {self.run.step}: {reason}")
            case Left(peer=peer, reason=reason):
                if self._peers.get(peer.place) is peer:
                    self._forget(peer)
                    self._last_reason = f" (the last one left: {reason})"
                    self._note(f"replica {peer.rank} left at step {self.run.step}: {reason}")
            case Arrived(peer=peer):
                counts = False
                try:
                    counts = self._accept(event)
                except BrokenFrame as error:
                    self.run.log.refused["broken payload"] += 1
                    peer.drop(str(error))
                if counts:
                    self._held.append(peer)
                else:
                    peer.release_payload()

    def _accept(self, event: Arrived) -> bool:
        """Apply the commit rule to a vector that has arrived. Return whether it counts; its memory must then be kept.

        Raises BrokenFrame if its payload is not valid.
        """
        peer, header, step = event.peer, event.header, self.run.step
        if self._current is None or header.epoch != self._epoch or self._peers.get(peer.place) is not peer:
            self.run.log.refused["from an earlier epoch or connection"] += 1
            return False
        if header.step > step:
            raise BrokenFrame(f"the vector is for step {header.step}, but the current step is {step}")
        self._assignments.complete(peer.place, header.step, event.at)
        if header.step < step and self.strategy.lockstep:
            self._drop_late(peer)
            return False
        if peer.place in self._mean.places:
            self.run.log.refused["second vector for a step"] += 1
            return False
        loss, weight, buffers, vector = self._layout.read_grad(event.payload)
        if not (math.isfinite(loss) and is_finite(vector) and is_finite(buffers)):
            self._refuse(peer, loss)
            return False
        self._not_finite[peer.rank] = 0
        self._staleness = step - header.step
        self._mean.add(peer.place, vector, buffers, loss, weight)
        return True

    def _drop_late(self, peer: Peer) -> None:
        """Drop a late vector. Its replica gets the current parameters at once, unless they were already sent."""
        log = self.run.log
        log.late[peer.place] += 1
        if peer.place == self._probe:
            self._probe = None
        elif self._cancels:
            # When the step ended, this vector was counted as cancelled, but it had already been sent.
            log.cancelled[peer.place] -= 1
        if peer in self._active() and not self._assignments.resume(peer.place, self.run.step):
            self._publish(peer)

    def _refuse(self, peer: Peer, loss: float) -> None:
        """Refuse a vector that is not finite. Quarantine its replica after several such vectors in a row (overflows
        excepted).
        """
        self._assignments.idle.add(peer.place)
        if self.run.refuse(loss):
            return
        # One such vector may be caused by the training, but several in a row are probably caused by the machine.
        self._not_finite[peer.rank] += 1
        if self._not_finite[peer.rank] >= QUARANTINE_AFTER and len(self._peers) > 1:
            # The rank itself is not excluded: its next replica may run on a machine that works.
            self._note(
                f"replica {peer.rank} is in quarantine: its gradients were not finite; another may take its place"
            )
            peer.dismiss("in quarantine: its gradients were not finite", error=True)
            self._forget(peer)

    def _forget(self, peer: Peer) -> None:
        """Remove a replica that has left or was dismissed. A backup replica without work takes over."""
        active = self._active()
        del self._peers[peer.place]
        self._clear(peer.place)
        self.tuner.times.forget(peer.place)
        for other in self._active():
            if other not in active and other.place != self._probe:
                self._publish(other)

    def _clear(self, place: int) -> None:
        self._assignments.clear(place)
        if place == self._probe:
            self._probe = None

    def _active(self) -> list[Peer]:
        """Return the replicas that compute: the first N + b that are present. Further replicas have no work."""
        return [self._peers[place] for place in sorted(self._peers)[: self.strategy.replicas + self.backups]]

    # Steps

    def _is_due(self) -> bool:
        """Return True if the current step can be committed. Raises ShadhoError if too few replicas are left."""
        alive = len(self._peers)
        if len(self._mean) >= (self._quorum.size if self.strategy.lockstep else 1):
            return True
        note = self._quorum.follow(alive, self._last_reason, self._is_hopeless)
        if note:
            self._note(f"step {self.run.step}: {note}")
        if not self.strategy.lockstep:
            return False
        if len(self._mean) >= self._quorum.size:
            return True
        # All replicas have answered, but some of the vectors were refused.
        return alive >= self._quorum.size and bool(self._mean) and not self._assignments.busy

    def _is_hopeless(self) -> bool:
        """Return True if it is known that no more replicas can come."""
        return self._can_come is not None and self._can_come() <= len(self._peers)

    def _commit(self) -> Iterator[Vector]:
        """Yield the mean of the current step's vectors, which the caller applies, and then start the next step."""
        run = self.run
        if self.strategy.backups == "auto" and self._cancels and self._probe is None:
            self._probe = self.tuner.probe(run.step, self._assignments.busy)
        late = [place for place in self._assignments.busy if place != self._probe]
        if self.strategy.lockstep:
            notice = control_frame(Kind.STEP, epoch=self._epoch, step=run.step + 1)
            for place in late:
                self._peers[place].notify(notice)
        places, loss = self._mean.take()
        for peer in self._held:
            peer.release_payload()
        self._held.clear()
        if self.strategy.lockstep:
            # If there are fewer than N gradients, reduce the learning rate in proportion.
            run.centre.scale = len(places) / self.strategy.replicas
        yield self._mean.vector
        run.centre.shape.buffers.write(self._mean.buffers)
        run.record_step(places, loss, self._staleness)
        if self._cancels:
            self.run.log.cancelled.update(self._assignments.cancel(late))
        self._start_next_step(None if self.strategy.lockstep else self._assignments.idle.union(places))

    def _start_next_step(self, places: Collection[int] | None) -> None:
        """Publish the new parameters to `places`, or to all if it is None. Then report and save the last step as
        needed.
        """
        self._take_snapshot()
        if self.run.step < self.run.plan.steps:
            for peer in self._active():
                if peer.place != self._probe and (places is None or peer.place in places):
                    self._publish(peer)
        if self.strategy.backups == "auto":
            self._tune_backups()
        self.run.after_step()

    def _take_snapshot(self) -> None:
        """Copy the current parameters to a frame, so that it can be sent while the model changes."""
        self._current = None
        vector = self._free.popleft() if self._free else np.zeros(self._layout.params_size, dtype=np.float32)
        parameters, buffers = self._layout.split(vector)
        self.run.centre.read(parameters)
        self.run.centre.shape.buffers.read(buffers)
        self._layout.set_orders(vector, self.run.centre.loss_scale.value, self.run.draws.numbers)
        frame = Frame(Header(kind=Kind.PARAMS, epoch=self._epoch, step=self.run.step), vector.data)
        # The memory can be reused once no thread sends the frame any more.
        weakref.finalize(frame, self._free.append, vector)
        self._current = frame

    def _publish(self, peer: Peer) -> None:
        """Send the current parameters to a replica, unless the first step has not begun."""
        if self._current is not None:
            self._assignments.assign(peer.place, self.run.step)
            peer.publish(self._current)

    # Backups

    def _tune_backups(self) -> None:
        """Set b to the number that the tuner chooses. The backup replicas beyond b have no work until b is raised."""
        probe = self._probe
        chosen = self.tuner.at(self.run.step, None if probe is None else {probe: self._assignments.seconds(probe)})
        if chosen is not None and chosen != self.backups:
            self._note(f"step {self.run.step}: {chosen} backups, by the response times recorded so far")
            self.backups = chosen

    def _note(self, text: str) -> None:
        """Log a message for the user, and add it to the report's notes."""
        logger.info("gang: %s", text)
        self.run.log.notes.append(text)
