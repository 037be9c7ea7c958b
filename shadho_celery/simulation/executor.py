"""Executor that simulates trials on a manual clock, so that a search of a day takes seconds."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from shadho_celery.core.attempts import Attempts
from shadho_celery.core.clock import ManualClock
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.records import MachineRecord, Present
from shadho_celery.core.trial import WELL, Attempt, Event, Lost, Outcome, Result, Started, TrialState
from shadho_celery.executors.base import take
from shadho_celery.study.recorder import Recorder

#: (attempt with its `host`, name of the compute class) -> outcome; its `seconds` then pass on the clock
Play = Callable[[Attempt, str], Outcome]

#: seconds after which a dead worker's trial is LOST, and after which the queue of a class without workers is taken back
LEASE_SECONDS, NO_WORKER_SECONDS = 30.0, 10.0


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of a class's slots: some are added, or some die with their trials."""

    #: time on the clock in seconds
    at: float
    compute_class: str
    #: number of slots that are added; if negative, number of slots that die, the slots added last first
    slots: int


@dataclass
class _Running:
    """An attempt that runs."""

    attempt: Attempt
    outcome: Outcome
    #: numbers of its slots; the first is the coordinator's
    slots: list[int]
    began: float
    #: False once it has ended, or one of its slots has died
    is_alive: bool = True

    @property
    def host(self) -> str:
        return f"{self.attempt.compute_class}.{self.slots[0]}"


@dataclass
class _Class:
    """The slots, running attempts and queue of one class. Slots are numbered from 0."""

    #: rank of the class, 0 for the strongest
    place: int
    #: number of live slots
    alive: int = 0
    free: list[int] = field(default_factory=list)
    running: dict[int, _Running] = field(default_factory=dict)
    queue: deque[Attempt] = field(default_factory=deque)
    #: memory of its machines, bytes; 0 for no limit
    memory: int = 0
    #: money that one of its slots costs an hour; None if it is not known
    price: float | None = None
    #: slots by machine; each slot is a machine of its own
    hosts: Mapping[str, int] = field(default_factory=dict)
    #: time at which the last of its slots died
    empty_since: float = 0.0
    #: slot seconds of ended attempts, and total slot seconds until `counted_at`
    ran: float = 0.0
    offered: float = 0.0
    counted_at: float = 0.0

    def take(self, attempt: Attempt, name: str) -> list[int]:
        """Take free slots for an attempt, and return their numbers.

        If the attempt is for one machine (`only_on`), take that machine's slot. Return an empty list if that is busy or
        gone.
        """
        if attempt.only_on is None:
            return [heapq.heappop(self.free) for _ in range(attempt.slots)]
        own = [slot for slot in self.free if f"{name}.{slot}" == attempt.only_on]
        self.free = [slot for slot in self.free if slot not in own]
        heapq.heapify(self.free)
        return own

    def run(self, now: float) -> float:
        """Return the slot seconds that all attempts have used until now."""
        return self.ran + sum((now - one.began) * one.attempt.slots for one in self.running.values())

    def offered_until(self, now: float) -> float:
        """Return the slot seconds until now of all slots, busy or free."""
        return self.offered + self.alive * (now - self.counted_at)

    def count_slots(self, now: float) -> None:
        """Add up the slot seconds until now. Call this before the number of slots changes."""
        self.offered, self.counted_at = self.offered_until(now), now


class SimulatedExecutor:
    """Executor whose trials only let time pass on the clock. Their outcomes come from `play`."""

    def __init__(
        self,
        slots: Mapping[str, int],
        play: Play,
        clock: ManualClock,
        ahead: int = 0,
        *,
        changes: Iterable[Change] = (),
        memory: Mapping[str, int] | None = None,
        prices: Mapping[str, float | None] | None = None,
        lease_seconds: float = LEASE_SECONDS,
        storage: str = "",
        recorder: Recorder | None = None,
    ) -> None:
        """Use `slots` by class, the strongest class first. `ahead` trials may wait in each class's queue.

        `changes` refer to classes in `slots`, which may have no slots at first. `memory` is the memory of a class's
        machines in bytes, and `prices` has the money that a slot of a class costs an hour. All machines keep their
        checkpoints on `storage`; if that is "", each machine has its own. `recorder` is told which machines, each a
        worker with one slot, come and go.
        """
        self._play = play
        self._clock = clock
        self._ahead = ahead
        self._lease_seconds = lease_seconds
        self._storage = storage
        self._recorder = recorder
        sizes, prices, now = memory or {}, prices or {}, clock.now()
        self._classes = {
            name: _Class(place, memory=sizes.get(name, 0), price=prices.get(name), counted_at=now)
            for place, name in enumerate(slots)
        }
        #: heap of (time, counter, action, attempt that it ends); the counter puts ties in first-in-first-out order
        self._future: list[tuple[float, int, Callable[[], None], _Running | None]] = []
        self._order = count()
        self._events: list[Event] = []
        self._live: Attempts[Attempt] = Attempts()
        for name, number in slots.items():
            self._resize(name, number)
        #: True if workers have started or died since the last poll
        self._has_changed = False
        for change in changes:
            self._at(change.at, partial(self._resize, change.compute_class, change.slots))

    def classes(self) -> Sequence[ComputeClass]:
        return [
            ComputeClass(
                name=name,
                slots=each.alive,
                busy=each.alive - len(each.free),
                cores=len(self._classes) - each.place,
                ahead=self._ahead,
                memory=each.memory,
                hosts=each.hosts,
                storages=dict.fromkeys(each.hosts, self._storage),
            )
            for name, each in self._classes.items()
            if each.alive
        ]

    def submit(self, attempts: Sequence[Attempt]) -> None:
        touched = {}
        for attempt in attempts:
            self._live.put(attempt.number, attempt.attempt, attempt)
            name = str(attempt.compute_class)
            if attempt.state is TrialState.RUNNING:
                self._lose(attempt, "not simulated any more")
            elif name not in self._classes or not self._classes[name].alive:
                self._lose(attempt, f"no worker serves {name}", claimed=False)
            else:
                self._classes[name].queue.append(attempt)
                touched[name] = True
        for name in touched:
            self._start(name)

    def poll(self, seconds: float) -> Sequence[Event]:
        # A change of the slots ends the wait, because the scheduler must send trials to new slots.
        deadline = self._clock.now() + seconds
        while not (self._events or self._has_changed) and self._is_due(deadline):
            self._clock.advance_to(self._future[0][0])
            while self._is_due(self._clock.now()):
                heapq.heappop(self._future)[2]()
        if not (self._events or self._has_changed) and deadline < math.inf:
            self._clock.advance_to(deadline)
        events, self._events, self._has_changed = self._events, [], False
        return events

    def keep(self) -> None:
        pass

    def cancel(self, numbers: Iterable[int], *, running: bool, pruned: bool = False) -> None:
        unwanted = set(numbers)
        for name, each in self._classes.items():
            for attempt in take(each.queue, unwanted):
                self._lose(attempt, "taken back", claimed=False)
            for one in list(each.running.values()) if running else ():
                if one.attempt.number in unwanted:
                    self._at(self._clock.now(), partial(self._end, name, one, cancelled=True), one)

    @property
    def is_still(self) -> bool:
        """True if nothing more will happen without another `submit`."""
        return not self._is_due(math.inf) and not self._events

    def utilisation(self) -> dict[str, float]:
        """Return the fraction of the slot seconds until now in which trials ran, by class."""
        now = self._clock.now()
        offered = {name: each.offered_until(now) for name, each in self._classes.items()}
        # Rounding errors may make the sum slightly greater than the total.
        return {n: min(1.0, each.run(now) / offered[n]) if offered[n] else 0.0 for n, each in self._classes.items()}

    def close(self) -> None:
        self._future.clear()
        for each in self._classes.values():
            each.queue.clear()
            each.running.clear()

    def _at(self, moment: float, action: Callable[[], None], one: _Running | None = None) -> None:
        """Schedule an action. An action that ends the attempt `one` is skipped if it is not alive any more."""
        heapq.heappush(self._future, (moment, next(self._order), action, one))

    def _is_due(self, moment: float) -> bool:
        """Return whether an action is due at or before `moment`."""
        while self._future and (one := self._future[0][3]) is not None and not one.is_alive:
            heapq.heappop(self._future)
        return bool(self._future) and self._future[0][0] <= moment

    def _start(self, name: str) -> None:
        """Start the attempts in a class's queue for which there are free slots."""
        each = self._classes[name]
        now = self._clock.now()
        # An attempt is sent only if slots are free. If one of these has died meanwhile, the attempt waits, and so do
        # those behind it in the queue.
        while each.queue and each.queue[0].slots <= len(each.free):
            attempt = each.queue.popleft()
            slots = each.take(attempt, name)
            if not slots:
                self._lose(attempt, f"{attempt.only_on} is busy", claimed=False)
                continue
            attempt = attempt.evolve(host=f"{name}.{slots[0]}")
            one = _Running(attempt, self._play(attempt, name), slots, now)
            each.running[slots[0]] = one
            self._at(now + (one.outcome.seconds or 0.0), partial(self._end, name, one), one)
            key = {"number": attempt.number, "attempt": attempt.attempt}
            self._events.append(Started(**key, host=one.host, at=now, worker=one.host, slot=0))

    def _end(self, name: str, one: _Running, cancelled: bool = False) -> None:
        now = self._clock.now()
        number, which = one.attempt.number, one.attempt.attempt
        outcome = one.outcome.cancelled(now - one.began) if cancelled else one.outcome
        self._vacate(name, one)
        is_alone = len(self._live.of(number)) <= 1
        if self._live.finish(number, which, well=outcome.state in WELL) and not is_alone:
            self._drop(number)
        result = Result(number=number, attempt=which, outcome=outcome, host=one.host, compute_class=name, at=now)
        self._events.append(result)
        self._start(name)

    def _vacate(self, name: str, one: _Running) -> None:
        """Free the slots of an attempt, except those that have died meanwhile."""
        one.is_alive = False
        each = self._classes[name]
        del each.running[one.slots[0]]
        for slot in one.slots:
            if slot < each.alive:
                heapq.heappush(each.free, slot)
        each.ran += (self._clock.now() - one.began) * one.attempt.slots

    def _drop(self, number: int) -> None:
        """End the other attempts of an ended trial, without events."""
        for name, each in self._classes.items():
            take(each.queue, [number])
            for one in [one for one in each.running.values() if one.attempt.number == number]:
                self._vacate(name, one)
                self._start(name)

    def _resize(self, name: str, by: int) -> None:
        """Add slots to a class, or let its last slots die. Their trials are LOST when the lease ends."""
        self._has_changed = True
        each, now = self._classes[name], self._clock.now()
        each.count_slots(now)
        before, each.alive = each.alive, max(0, each.alive + by)
        each.hosts = {f"{name}.{slot}": 1 for slot in range(each.alive)}
        each.free = [slot for slot in each.free if slot < each.alive] + list(range(before, each.alive))
        heapq.heapify(each.free)
        self._record_workers(now)
        if by > 0:
            self._start(name)
            return
        for one in [one for one in each.running.values() if max(one.slots) >= each.alive]:
            self._vacate(name, one)
            self._at(now + self._lease_seconds, partial(self._lose, one.attempt, "its worker died"))
        if not each.alive and each.queue:
            each.empty_since = now
            self._at(now + NO_WORKER_SECONDS, partial(self._take_back, name, now))

    def _record_workers(self, now: float) -> None:
        """Record which slots are alive. Each is a machine of its own, with a worker of the same name."""
        if self._recorder is None:
            return
        class_of = {host: name for name, each in self._classes.items() for host in each.hosts}

        def present(host: str) -> Present:
            name = class_of[host]
            of = self._classes[name]
            return Present(name, 1, MachineRecord(host=host, memory=of.memory), of.price)

        self._recorder.see(class_of.keys(), now, present)

    def _take_back(self, name: str, empty_since: float) -> None:
        each = self._classes[name]
        while each.queue and not each.alive and each.empty_since == empty_since:
            self._lose(each.queue.popleft(), f"no worker serves {name}", claimed=False)

    def _lose(self, attempt: Attempt, reason: str, claimed: bool = True) -> None:
        self._live.lose(attempt.number, attempt.attempt)
        self._events.append(Lost(number=attempt.number, attempt=attempt.attempt, reason=reason, claimed=claimed))
