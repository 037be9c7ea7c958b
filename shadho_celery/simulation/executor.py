"""Executor that simulates workers and trials on a manual clock, so that a search of a day takes seconds."""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field
from functools import partial
from itertools import count
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct, field

from shadho_celery.core.attempts import Attempts, Sent
from shadho_celery.core.checks import misfit_at
from shadho_celery.core.files import ClassFacts
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.records import Leaving, MachineRecord, Present
from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import WELL, Attempt, Event, Lost, Outcome, Report, Result, Started, TrialState
from shadho_celery.node.stay import DECLINE_SECONDS, MAX_TOO_LONG, SAFETY
from shadho_celery.scheduler.executors import take
from shadho_celery.study.recorder import Recorder

#: (attempt with its `host`, name of the compute class) -> outcome, whose `seconds` the attempt takes on the clock
Play = Callable[[Attempt, str], Outcome]

#: called with an attempt that ends because its worker ends, the seconds for which it ran, and True if the worker had
#: notice
Interrupted = Callable[[Attempt, float, bool], None]

GIB = 2**30

#: number that is mixed into the seed for the times of preemptions
_PREEMPTIONS = 0x50

#: seconds after which a dead worker's trial is LOST; seconds after which the trials in the queue of a class without
#: workers are taken back
LEASE_SECONDS, NO_WORKER_SECONDS = 30.0, 10.0


#: maximum values of numbers in a cluster file, because of memory, time and the precision of floats
LARGEST, MOST_WORKERS = 1e15, 10**6

#: maximum number of reports of a trial, because each of them takes time to simulate
MOST_STEPS = 1000

_Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
#: least seconds until workers end, because with shorter times the simulated time would hardly advance
_LongSeconds = Annotated[float, Meta(ge=1, le=LARGEST)]


class SimulatedClass(ClassFacts, frozen=True, kw_only=True):
    """A compute class of a simulated fleet, and when its workers end."""

    #: number of workers at the start; each is a machine of its own
    workers: Annotated[int, Meta(ge=0, le=MOST_WORKERS)]
    #: mean seconds from the time at which a worker is ready until it is preempted, with an exponential distribution.
    #: None for no preemption
    preemption_seconds: _LongSeconds | None = None
    #: True if a preempted worker has notice and gives its trials back, as with ``worker --grace``; False if its machine
    #: vanishes
    notice: bool = True
    #: seconds from the time at which a worker is ready until it ends by itself, as with ``worker --for``; None for no
    #: such limit
    for_seconds: _LongSeconds | None = None
    #: seconds from the end of a worker until another one is started in its place; None if no other one is started
    return_seconds: _Amount | None = None

    def __post_init__(self) -> None:
        leaves = self.preemption_seconds is not None or self.for_seconds is not None
        if self.return_seconds is not None and not leaves:
            raise misfit_at("return_seconds", "its workers stay; give preemption_seconds or for_seconds, too")
        if not self.notice and self.preemption_seconds is None:
            raise misfit_at("notice", "its workers are not preempted; give preemption_seconds, too")


class Change(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A change of a class's workers: workers are added, or workers die with their trials."""

    #: simulated time of the change, in seconds
    at: _Amount
    compute_class: str = field(name="class")
    #: number of workers that are added; if negative, number of workers that die, beginning with those that were added
    #: last
    workers: Annotated[int, Meta(ge=-MOST_WORKERS, le=MOST_WORKERS)]


class Fleet(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A simulated fleet: the content of CLUSTER in a cluster file."""

    #: the strongest class first
    classes: Mapping[str, SimulatedClass]
    changes: Annotated[Sequence[Change], Meta(description='write [{"at": 60, "class": "gpu", "workers": -1}]')] = ()
    #: seed of all random draws; the command's --seed replaces it
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    #: seconds after which a dead worker's trial is known to be lost
    lease_seconds: _Amount = LEASE_SECONDS
    #: on which machines trials find the checkpoints of earlier trials and attempts: on none, on the same machine, or on
    #: all
    checkpoints: Literal["none", "machine", "shared"] = "none"
    #: seconds to read the checkpoint of another machine
    handover_seconds: _Amount = 0.0
    #: seconds of work between two checkpoints. A trial whose worker has ended continues from its last checkpoint. None
    #: if it begins again
    checkpoint_seconds: _Amount | None = None
    #: number of equal steps of a trial, such as epochs, after each of which it reports; 0 for no reports
    steps: Annotated[int, Meta(ge=0, le=MOST_STEPS)] = 0

    def __post_init__(self) -> None:
        if self.checkpoint_seconds is not None and self.checkpoints != "shared":
            words = "a trial goes on elsewhere only from a shared checkpoint; give checkpoints shared"
            raise misfit_at("checkpoint_seconds", words)


@dataclass
class _Running:
    """A running attempt."""

    attempt: Attempt
    outcome: Outcome
    #: numbers of its slots; the first one identifies it in `_Class.running`
    slots: list[int]
    began: float
    #: False once it has ended, also because one of its slots has died
    is_alive: bool = True

    @property
    def host(self) -> str:
        """Name of its machine, which was set when it started."""
        return str(self.attempt.host)


@dataclass
class _Class:
    """The slots, running attempts and queue of one class. Slots are numbered from 0."""

    name: str
    #: rank of the class, 0 for the strongest
    place: int
    facts: SimulatedClass
    #: number of slots, including those of workers that are not ready yet
    size: int = 0
    #: numbers of the live slots; and by slot: the number of its latest worker
    live: set[int] = dataclass_field(default_factory=set)
    workers: dict[int, int] = dataclass_field(default_factory=dict)
    #: by slot: the time at which its worker ends by itself; and by slot: the trials that its worker has declined in a
    #: row
    leaves_at: dict[int, float] = dataclass_field(default_factory=dict)
    too_long: dict[int, set[int]] = dataclass_field(default_factory=dict)
    free: list[int] = dataclass_field(default_factory=list)
    running: dict[int, _Running] = dataclass_field(default_factory=dict)
    queue: deque[Attempt] = dataclass_field(default_factory=deque)
    #: number of live slots by machine
    hosts: Mapping[str, int] = dataclass_field(default_factory=dict)
    #: time at which the last of its slots died
    empty_since: float = 0.0
    #: slot seconds of ended attempts; slot seconds of all slots until `counted_at`
    ran: float = 0.0
    offered: float = 0.0
    counted_at: float = 0.0

    @property
    def alive(self) -> int:
        """Number of live slots."""
        return len(self.live)

    @property
    def memory(self) -> int:
        """Memory of its machines, bytes; 0 for no limit."""
        return int(self.facts.memory_gib * GIB)

    def host_of(self, slot: int) -> str:
        """Return the name of the machine that has a slot."""
        return f"{self.name}.{slot // self.facts.slots}"

    def beside(self, slot: int) -> set[int]:
        """Return the slots of the worker that has a slot."""
        first = slot - slot % self.facts.slots
        return {*range(first, min(first + self.facts.slots, self.size))}

    def take(self, attempt: Attempt) -> list[int]:
        """Take free slots for an attempt, and return their numbers.

        If the attempt may only run on one machine (`only_on`), its slots are taken. If this machine is gone or has too
        few free slots, an empty list is returned.
        """
        if attempt.only_on is None:
            return [heapq.heappop(self.free) for _ in range(attempt.slots)]
        own = sorted(slot for slot in self.free if self.host_of(slot) == attempt.only_on)[: attempt.slots]
        if len(own) < attempt.slots:
            return []
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
        """Add the slot seconds up to now to `offered`. Call this before the number of slots changes."""
        self.offered, self.counted_at = self.offered_until(now), now


class SimulatedExecutor:
    """Executor whose trials only take time on the clock. Their outcomes come from `play`."""

    def __init__(
        self,
        fleet: Fleet,
        play: Play,
        clock: ManualClock,
        ahead: int = 0,
        *,
        recorder: Recorder | None = None,
        interrupted: Interrupted = lambda attempt, seconds, told: None,
    ) -> None:
        """Run trials on `fleet`. Up to `ahead` trials may wait in each class's queue.

        With shared checkpoints, all machines have one storage, otherwise each has its own. If any class has workers
        with several slots, all slots of a trial are on one worker. The times of preemptions do not depend on the
        trials. `recorder` records each machine as one worker that has the machine's name. `interrupted` is called for
        each attempt that ends because its worker ends.
        """
        self._fleet = fleet
        self._play = play
        self._clock = clock
        self._ahead = ahead
        self._recorder = recorder
        self._interrupted = interrupted
        #: by class and slot: random generator of the times until preemptions
        self._draws: dict[tuple[str, int], np.random.Generator] = {}
        self._worker = count()
        self._on_one = any(facts.slots > 1 for facts in fleet.classes.values())
        self._classes = {
            name: _Class(name, place, facts, counted_at=clock.now())
            for place, (name, facts) in enumerate(fleet.classes.items())
        }
        #: heap of (time, counter, action, attempt that the action concerns or None). Because of the counter, actions at
        #: the same time are done in the order in which they were scheduled
        self._future: list[tuple[float, int, Callable[[], None], _Running | None]] = []
        self._order = count()
        self._events: list[Event] = []
        #: reports since the last poll. They do not end a `poll`, because no slot becomes free by a report
        self._reports: list[Event] = []
        self._live: Attempts[Attempt] = Attempts()
        for name, facts in fleet.classes.items():
            self._resize(name, facts.workers)
        #: True if workers have started or died since the last poll
        self._has_changed = False
        for change in fleet.changes:
            self._at(change.at, partial(self._resize, change.compute_class, change.workers))

    def classes(self) -> Sequence[ComputeClass]:
        storage = "shared" if self._fleet.checkpoints == "shared" else ""
        classes = [
            ComputeClass(
                name=name,
                slots=each.alive,
                busy=each.alive - len(each.free),
                cores=len(self._classes) - each.place,
                ahead=self._ahead,
                memory=each.memory,
                hosts=each.hosts,
                storages=dict.fromkeys(each.hosts, storage),
            )
            for name, each in self._classes.items()
            if each.alive
        ]
        return [self._on_machines(known) for known in classes] if self._on_one else classes

    def _on_machines(self, known: ComputeClass) -> ComputeClass:
        """Return a class with its machines, for trials whose slots are all on one worker."""
        of = self._classes[known.name]
        free = Counter(map(of.host_of, of.free))
        machines = [
            replace(known, slots=n, busy=n - free[host], ahead=0, hosts={host: n}, widest=n, host=host)
            for host, n in known.hosts.items()
        ]
        return replace(known, widest=max(known.hosts.values()), machines=tuple(machines))

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
        # A change of the slots also ends the call, because the scheduler has to send trials to new slots.
        deadline = self._clock.now() + seconds
        while not (self._events or self._has_changed) and self._is_due(deadline):
            self._clock.advance_to(self._future[0][0])
            while self._is_due(self._clock.now()):
                heapq.heappop(self._future)[2]()
        if not (self._events or self._has_changed) and deadline < math.inf:
            self._clock.advance_to(deadline)
        events, self._events, self._reports, self._has_changed = [*self._reports, *self._events], [], [], False
        return events

    def renew_lock(self) -> None:
        pass

    def note_end(self, event: Event, ended: Sequence[Sent], *, is_over: bool) -> None:
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
        """True if no more events will come without another `submit`."""
        return not self._is_due(math.inf) and not self._events

    def utilisation(self) -> dict[str, float]:
        """Return by class the fraction of the slot seconds until now in which trials ran."""
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
        """Schedule an action. If it concerns the attempt `one`, it is skipped once this attempt has ended."""
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
        # Attempts were sent when enough slots were free. If slots have died since, the first attempt waits, and the
        # attempts behind it, too. If slots must be on one worker, an attempt is instead returned to the scheduler,
        # which sends it again.
        while each.queue and (self._on_one or each.queue[0].slots <= len(each.free)):
            attempt = each.queue.popleft()
            slots = each.take(attempt)
            if not slots:
                self._lose(attempt, f"{attempt.only_on} is busy", claimed=False)
                continue
            if self._declines(name, attempt, slots):
                continue
            attempt = attempt.evolve(host=each.host_of(slots[0]))
            one = _Running(attempt, self._play(attempt, name), slots, now)
            each.running[slots[0]] = one
            self._at(now + (one.outcome.seconds or 0.0), partial(self._end, name, one), one)
            self._report_after(one, 1)
            key = {"number": attempt.number, "attempt": attempt.attempt}
            slot = slots[0] % each.facts.slots
            self._events.append(Started(**key, host=one.host, at=now, worker=one.host, slot=slot))

    def _report_after(self, one: _Running, step: int) -> None:
        """Schedule the report after a step of an attempt.

        The report after the last step is made when the attempt ends.
        """
        if step < self._fleet.steps:
            moment = one.began + step / self._fleet.steps * (one.outcome.seconds or 0.0)
            self._at(moment, partial(self._report, one, step), one)

    def _report(self, one: _Running, step: int) -> None:
        number, which, loss = one.attempt.number, one.attempt.attempt, one.outcome.loss
        at = self._clock.now()
        self._reports.append(Report(number=number, attempt=which, step=step, loss=0.0 if loss is None else loss, at=at))
        self._report_after(one, step + 1)

    def _end(self, name: str, one: _Running, cancelled: bool = False) -> None:
        now = self._clock.now()
        number, which = one.attempt.number, one.attempt.attempt
        outcome = one.outcome.cancelled(now - one.began) if cancelled else one.outcome
        if self._fleet.steps and outcome.state in WELL:
            self._report(one, self._fleet.steps)
        self._vacate(name, one)
        is_alone = len(self._live.of(number)) <= 1
        if self._live.finish(number, which, well=outcome.state in WELL) and not is_alone:
            self._drop(number)
        result = Result(number=number, attempt=which, outcome=outcome, host=one.host, compute_class=name, at=now)
        self._events.append(result)
        self._start(name)

    def _vacate(self, name: str, one: _Running) -> None:
        """Free the slots of an attempt, except slots that have died."""
        one.is_alive = False
        each = self._classes[name]
        del each.running[one.slots[0]]
        for slot in one.slots:
            if slot in each.live:
                heapq.heappush(each.free, slot)
        each.ran += (self._clock.now() - one.began) * one.attempt.slots

    def _drop(self, number: int) -> None:
        """End the other attempts of an ended trial, without events."""
        for name, each in self._classes.items():
            take(each.queue, [number])
            for one in [one for one in each.running.values() if one.attempt.number == number]:
                self._vacate(name, one)
                self._start(name)

    def _declines(self, name: str, attempt: Attempt, slots: Sequence[int]) -> bool:
        """Decline an attempt that is predicted to end after one of its workers ends. Return whether it was declined.

        Real workers with limited time do the same. A worker that has declined MAX_TOO_LONG trials in a row ends.
        """
        each, now = self._classes[name], self._clock.now()
        needed = SAFETY * (attempt.expected or 0.0)
        late = [slot for slot in slots if needed > each.leaves_at.get(slot, math.inf) - now]
        for slot in slots if not late else ():
            each.too_long.pop(slot, None)
        if not late:
            return False
        for slot in slots:
            heapq.heappush(each.free, slot)
        lose = partial(self._lose, attempt, "its worker ends before that", claimed=False, is_too_long=True)
        self._at(now + DECLINE_SECONDS, lose)
        for slot in (slot for slot in late if slot in each.workers):
            declined = each.too_long.setdefault(slot, set())
            declined.add(attempt.number)
            if len(declined) >= MAX_TOO_LONG:
                self._end_worker(name, slot, each.workers[slot], Leaving.STOPPED)
        return True

    def _resize(self, name: str, workers: int) -> None:
        """Start this number of workers of a class; if it is negative, let the last workers die.

        The trials of dead workers become LOST when the lease ends.
        """
        each = self._classes[name]
        before, each.size = each.size, max(0, each.size + workers * each.facts.slots)
        if workers > 0:
            self._start_workers(name, range(before, each.size))
            return
        for slot in range(each.size, before):
            each.workers.pop(slot, None)
        self._remove(name, {slot for slot in each.live if slot >= each.size}, Leaving.LOST)

    def _start_workers(self, name: str, slots: Iterable[int]) -> None:
        """Start a worker in each of these slots. It takes trials after its start-up."""
        each = self._classes[name]
        started = {slot: next(self._worker) for slot in slots}
        each.workers.update(started)
        if each.facts.startup_seconds > 0:
            self._at(self._clock.now() + each.facts.startup_seconds, partial(self._arrive, name, started))
        else:
            self._arrive(name, started)

    def _arrive(self, name: str, started: Mapping[int, int]) -> None:
        """Add the slots of workers that are now ready. `started` has the worker by slot. Workers that have died are
        left out.
        """
        each, now = self._classes[name], self._clock.now()
        slots = [slot for slot, worker in started.items() if each.workers.get(slot) == worker]
        self._has_changed = True
        each.count_slots(now)
        each.live.update(slots)
        each.hosts = Counter(map(each.host_of, sorted(each.live)))
        each.free += slots
        heapq.heapify(each.free)
        self._record_workers(now)
        stay = each.facts
        for slot in slots if stay.preemption_seconds or stay.for_seconds else ():
            ends = [(now + stay.for_seconds, Leaving.STOPPED)] if stay.for_seconds else []
            if stay.for_seconds:
                each.leaves_at[slot] = now + stay.for_seconds
            if slot % stay.slots:
                continue
            if stay.preemption_seconds:
                ends.append((now + stay.preemption_seconds * self._draw(name, slot), Leaving.PREEMPTED))
            moment, reason = min(ends)
            self._at(moment, partial(self._end_worker, name, slot, started[slot], reason))
        self._start(name)

    def _draw(self, name: str, slot: int) -> float:
        """Return the next exponential draw of a slot, with a mean of 1."""
        key = name, slot
        if key not in self._draws:
            place = self._classes[name].place
            self._draws[key] = np.random.default_rng([self._fleet.seed, _PREEMPTIONS, place, slot])
        return float(self._draws[key].exponential())

    def _end_worker(self, name: str, slot: int, worker: int, leaving: Leaving) -> None:
        """End a worker, unless it has already ended. If the class has `return_seconds`, schedule the start of another
        worker in its place.
        """
        each = self._classes[name]
        if each.workers.get(slot) != worker:
            return
        slots = each.beside(slot)
        for own in slots:
            each.leaves_at.pop(own, None)
            each.too_long.pop(own, None)
            each.workers.pop(own, None)
        has_vanished = leaving is Leaving.PREEMPTED and not each.facts.notice
        self._remove(name, slots, Leaving.LOST if has_vanished else leaving, has_vanished=has_vanished)
        if each.facts.return_seconds is not None:
            moment = self._clock.now() + each.facts.return_seconds
            self._at(moment, partial(self._replace, name, slot))

    def _replace(self, name: str, slot: int) -> None:
        if slot < self._classes[name].size:
            self._start_workers(name, self._classes[name].beside(slot))

    def _remove(self, name: str, slots: set[int], leaving: Leaving, *, has_vanished: bool = False) -> None:
        """Remove live slots of a class. Their trials are given back if the workers had notice, else LOST when the lease
        ends.

        `has_vanished` is True if their machines are gone, too.
        """
        each, now = self._classes[name], self._clock.now()
        self._has_changed = True
        each.count_slots(now)
        each.live -= slots
        each.hosts = Counter(map(each.host_of, sorted(each.live)))
        each.free = [slot for slot in each.free if slot in each.live]
        heapq.heapify(each.free)
        self._record_workers(now, leaving)
        is_told = leaving is not Leaving.LOST
        reason = (
            "its worker has ended" if is_told else "its machine has vanished" if has_vanished else "its worker died"
        )
        for one in [one for one in each.running.values() if not slots.isdisjoint(one.slots)]:
            self._vacate(name, one)
            self._interrupted(one.attempt, now - one.began, is_told)
            facts = {"claimed": not (is_told or has_vanished), "vanished": has_vanished, "given_back": is_told}
            lose = partial(self._lose, one.attempt, reason, **facts)
            if is_told:
                lose()
            else:
                self._at(now + self._fleet.lease_seconds, lose)
        self._start(name)
        if not each.alive and each.queue:
            each.empty_since = now
            self._at(now + NO_WORKER_SECONDS, partial(self._take_back, name, now))

    def _record_workers(self, now: float, leaving: Leaving = Leaving.LOST) -> None:
        """Record the live machines. Each has one worker with the same name.

        `leaving` is the reason why other workers have ended.
        """
        if self._recorder is None:
            return
        class_of = {host: name for name, each in self._classes.items() for host in each.hosts}

        def present(host: str) -> Present:
            name = class_of[host]
            of = self._classes[name]
            return Present(name, of.hosts[host], MachineRecord(host=host, memory=of.memory), of.facts.price)

        self._recorder.see(class_of.keys(), now, present, lambda host: leaving)

    def _take_back(self, name: str, empty_since: float) -> None:
        each = self._classes[name]
        while each.queue and not each.alive and each.empty_since == empty_since:
            self._lose(each.queue.popleft(), f"no worker serves {name}", claimed=False)

    def _lose(self, attempt: Attempt, reason: str, **facts: bool) -> None:
        """Report an attempt as lost. `facts` are fields of `Lost`."""
        self._live.lose(attempt.number, attempt.attempt)
        self._events.append(Lost(number=attempt.number, attempt=attempt.attempt, reason=reason, **facts))
