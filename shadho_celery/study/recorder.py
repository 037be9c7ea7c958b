"""What a run of a study records about its attempts, workers and machines, until the store has it.

Three sums are kept here. The predicted seconds of the queued attempts are the backlogs of the classes, which are part
of the record of the next placement. The money that the attempts have cost is compared with the limit of the study. The
preemptions and the hours of the workers are charged to trials without checkpoints. No other decision depends on these
records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from shadho_celery.core.records import AttemptRecord, End, Leaving, MachineRecord, Placed, Present, SessionRecord, pack
from shadho_celery.core.trial import Attempt, Lost, Result, Started, TrialState
from shadho_celery.core.units import cost_of

#: how an attempt ended whose result has ended its trial
_ENDS = {
    state: End(state.lower())
    for state in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED, TrialState.CANCELLED)
}

#: number of a trial, and of an attempt within it
_Key = tuple[int, int]

#: seconds for which the record of a queued attempt is held back
QUEUED_SECONDS = 1.0

#: minimum seconds between two records of changed numbers of slots
RESIZE_SECONDS = 60.0

#: minimum seconds of a mean number of slots that ran trials of other studies, and its minimum part of the session so
#: far. The number of these means grows with the logarithm of the session's length
OTHERS_SECONDS, OTHERS_PART = 2.0, 1 / 64


class Recorder:
    """Records of attempts, sessions and machines that have changed since the last `clear`."""

    def __init__(self, classes: Sequence[str] = ()) -> None:
        """`classes` are those of the study's record."""
        #: names of the classes in the order of `AttemptRecord.placed`; the place of a class never changes
        self._classes = [*classes]
        self._written_classes = len(self._classes)
        #: facts that have become known of attempts
        self._attempts: dict[_Key, AttemptRecord] = {}
        #: those of them that `attempted` has returned, and True once no attempt is held back
        self._due: dict[_Key, AttemptRecord] = {}
        self._is_closed = False
        #: by queued attempt: its class and its predicted seconds; and their sum by class
        self._queued: dict[_Key, tuple[str, float]] = {}
        self._backlogs: defaultdict[str, float] = defaultdict(float)
        #: present workers by name, with their sessions; and the machines seen so far by host
        self._sessions: dict[str, SessionRecord] = {}
        self._machines: dict[str, MachineRecord] = {}
        #: price of each slot by worker, also of workers that have left
        self._prices: dict[str, float | None] = {}
        #: price of each slot of a class whose workers announce none
        self.class_prices: Mapping[str, float | None] = {}
        #: by claimed attempt with a price: the price, the time of its claim, and its slot
        self._priced: dict[_Key, tuple[float, float, object]] = {}
        #: by slot: the time of its last claim of which a priced attempt has ended, and the last such end
        self._freed: dict[object, tuple[float, float]] = {}
        #: money that ended attempts have cost, also those of earlier runs, by class
        self.spent: defaultdict[str, float] = defaultdict(float)
        self._seen: list[SessionRecord | MachineRecord] = []
        #: by present worker with slots of other studies: begin of the mean, slot seconds since then until the last
        #: `follow`, its time, and the slots at this time
        self._others: dict[str, tuple[float, float, float, int]] = {}
        #: time of the last `follow` that compared the numbers of slots
        self._followed_at = -math.inf
        #: by class: number of workers that were preempted or have vanished, and hours of all workers that have left
        self._left: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    # What is to be written

    def attempted(self, now: float) -> Sequence[AttemptRecord]:
        """Return one record for each attempt that has changed, with the facts that have become known.

        An attempt that was queued in the last QUEUED_SECONDS is held back: most are claimed in that time, and are then
        written only once.
        """
        self._due = {key: each for key, each in self._attempts.items() if self._is_due(each, now)}
        return [*self._due.values()]

    def _is_due(self, record: AttemptRecord, now: float) -> bool:
        if self._is_closed or record.started_at is not None or record.end is not None or record.queued_at is None:
            return True
        return abs(now - record.queued_at) >= QUEUED_SECONDS

    @property
    def is_urgent(self) -> bool:
        """True if there is something to write at once, although no trial has changed."""
        return bool(self._seen) or (self._is_closed and bool(self._attempts))

    @property
    def seen(self) -> Sequence[SessionRecord | MachineRecord]:
        """Machines that are new, and sessions that have begun or ended."""
        return self._seen

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of all classes in the order of `AttemptRecord.placed`, or None if none is new."""
        return self._classes if len(self._classes) > self._written_classes else None

    def clear(self) -> None:
        """Forget what was written: the records that were last returned."""
        for key in self._due:
            del self._attempts[key]
        self._seen = []
        self._written_classes = len(self._classes)

    # Attempts

    def queue(self, attempt: Attempt, at: float, *, is_copy: bool) -> None:
        """Record an attempt that will be sent."""
        record = self._record(attempt)
        record.compute_class, record.queued_at, record.copy = attempt.compute_class, at, is_copy

    def place(self, attempt: Attempt, found: Mapping[str, Placed]) -> None:
        """Record what was known of the live classes when an attempt was placed, and add it to its class's backlog."""
        if not self._classes or not found.keys() <= {*self._classes}:
            self._classes = [*dict.fromkeys([*self._classes, *found])]
        self._record(attempt).placed = pack(found, self._classes)
        name = str(attempt.compute_class)
        if name in found and (seconds := found[name].seconds) is not None:
            self._queued[attempt.number, attempt.attempt] = name, seconds
            self._backlogs[name] += seconds

    def backlog(self, compute_class: str) -> float:
        """Return the predicted seconds of the attempts that wait in a class's queue. Unknown seconds count as 0."""
        return max(0.0, self._backlogs[compute_class])

    def start(self, attempt: Attempt, event: Started) -> None:
        """Record that a worker has claimed an attempt."""
        self._unqueue(attempt)
        record = self._record(attempt)
        record.started_at, record.host, record.worker, record.slot = (
            event.at,
            event.host,
            event.worker or None,
            event.slot,
        )
        if (price := self._prices.get(event.worker)) is not None:
            record.price = price * attempt.slots
            self.charge(record)

    def charge(self, record: AttemptRecord) -> None:
        """Count what a claimed attempt costs from its claim on. It may be one of an earlier run, which still runs."""
        if record.price is not None and record.started_at is not None and record.end is None:
            key = record.number, record.attempt
            slot = key if record.slot is None else (record.worker, record.slot)
            self._priced[key] = record.price, record.started_at, slot

    def end(self, attempt: Attempt, event: Lost | Result, now: float, *, is_pruned: bool) -> None:
        """Record that an attempt was ended by an event, which may be that of another attempt of its trial.

        `is_pruned`: the trial was stopped because of its reports.
        """
        self._unqueue(attempt)
        record = self._record(attempt)
        record.end, record.ended_at, record.started_at = (
            _end_of(attempt, event, is_pruned=is_pruned),
            now,
            attempt.started_at,
        )
        seen: Attempt | Result = attempt
        if isinstance(event, Result) and event.attempt == attempt.attempt:
            seen, record.ended_at = event, event.at
            if record.started_at is None and event.outcome.seconds is not None:
                record.started_at = event.at - event.outcome.seconds
        record.compute_class = seen.compute_class or attempt.compute_class
        record.host, record.worker = seen.host or attempt.host, seen.worker or attempt.worker or None
        if (priced := self._priced.pop((attempt.number, attempt.attempt), None)) is not None:
            price, claimed, slot = priced
            record.started_at = began = self._begun(claimed, slot)
            self._freed[slot] = claimed, max(began, record.ended_at)
            self.spent[str(record.compute_class)] += cost_of(price, began, record.ended_at)

    def spending(self, now: float) -> float:
        """Return the money that the attempts so far have cost, also those of earlier runs and those that run `now`."""
        running = {slot: (price, self._begun(claimed, slot)) for price, claimed, slot in self._priced.values()}
        return sum(self.spent.values()) + sum(cost_of(price, began, now) for price, began in running.values())

    def _begun(self, claimed: float, slot: object) -> float:
        """Return when an attempt began, of which the slot may have claimed several at once to run them in turn."""
        last, freed = self._freed.get(slot, (claimed, claimed))
        return freed if last == claimed else claimed

    def _unqueue(self, attempt: Attempt) -> None:
        if (waited := self._queued.pop((attempt.number, attempt.attempt), None)) is not None:
            name, seconds = waited
            self._backlogs[name] -= seconds
            if not self._queued:
                # Rounding errors do not add up.
                self._backlogs.clear()

    def _record(self, attempt: Attempt) -> AttemptRecord:
        key = attempt.number, attempt.attempt
        if (found := self._attempts.get(key)) is None:
            found = self._attempts[key] = AttemptRecord(number=attempt.number, attempt=attempt.attempt)
        return found

    # Workers

    @property
    def sessions(self) -> Collection[SessionRecord]:
        """The sessions of the present workers."""
        return self._sessions.values()

    def prices(self) -> dict[str, float | None]:
        """Return the mean price of a slot of each class's present workers; None for a class without a price.

        A worker without a price costs nothing, as its attempts do.
        """
        slots: defaultdict[str, int] = defaultdict(int)
        prices: dict[str, float | None] = {}
        for each in self._sessions.values():
            slots[each.compute_class] += each.slots
            known = prices.setdefault(each.compute_class, None)
            if each.price is not None:
                prices[each.compute_class] = (known or 0.0) + each.price * each.slots
        return {name: each if each is None else each / max(1, slots[name]) for name, each in prices.items()}

    def preemptions(self, now: float) -> dict[str, tuple[int, float]]:
        """Return for each class how many workers were preempted or have vanished, and the hours of all its workers."""
        found = dict(self._left)
        for each in self._sessions.values():
            preempted, hours = found.get(each.compute_class, (0, 0.0))
            found[each.compute_class] = preempted, hours + max(0.0, now - each.since) / 3600
        return found

    def recall(self, sessions: Iterable[SessionRecord]) -> None:
        """Count the sessions of earlier runs."""
        for each in sessions:
            if each.until is not None:
                preempted, hours = self._left[each.compute_class]
                preempted += each.reason in {Leaving.PREEMPTED, Leaving.LOST}
                self._left[each.compute_class] = preempted, hours + (each.until - each.since) / 3600

    def see(
        self,
        names: Collection[str],
        at: float,
        present: Callable[[str], Present],
        leaving: Callable[[str], Leaving] = lambda name: Leaving.LOST,
    ) -> None:
        """Record which workers can run trials now. Call this again at every change.

        `present` returns the facts of a worker in `names`, and `leaving` why a worker is no longer among them.
        """
        if names == self._sessions.keys():
            return
        for name in [name for name in self._sessions if name not in names]:
            self._leave(name, at, leaving(name))
        for name in names:
            if name not in self._sessions:
                facts = present(name)
                known = self._machines.get(facts.machine.host)
                machine = facts.machine.beside(known)
                if known != machine:
                    self._machines[machine.host] = machine
                    self._seen.append(machine)
                where: dict[str, Any] = {
                    "compute_class": facts.compute_class,
                    "host": machine.host,
                    "slots": facts.slots,
                }
                price = self.class_prices.get(facts.compute_class) if facts.price is None else facts.price
                self._prices[name] = price
                self._begin(SessionRecord(worker=name, since=at, price=price, **where))

    def follow(self, at: float, present: Callable[[str], Present], others: Mapping[str, int]) -> None:
        """Record which workers have another number of slots now: their sessions end, and others begin.

        Trials that share a GPU change the number often, so this compares the numbers once in RESIZE_SECONDS. `others`
        has by worker the slots that run trials of other studies, of which means are recorded.
        """
        for name in others.keys() | self._others.keys():
            if name in self._sessions:
                self._share(name, at, others.get(name, 0))
        if abs(at - self._followed_at) < RESIZE_SECONDS:
            return
        self._followed_at = at
        for name, session in [*self._sessions.items()]:
            if (slots := present(name).slots) != session.slots and at > session.since:
                self._leave(name, at, Leaving.RESIZED)
                self._begin(replace(session, since=at, slots=slots, others=()))

    def _share(self, name: str, at: float, slots: int, *, is_over: bool = False) -> None:
        """Record the mean number of slots of other studies if it has changed for long enough, or `is_over`."""
        session = self._sessions[name]
        since, used, before, running = self._others.get(name, (at, 0.0, at, 0))
        used += running * max(0.0, at - before)
        known = session.others[-1][1] if session.others else 0.0
        mean = round(used / (at - since), 2) if at > since else known
        if mean != known and (is_over or at - since >= max(OTHERS_SECONDS, OTHERS_PART * (since - session.since))):
            self._sessions[name] = session = replace(session, others=(*session.others, (since, mean)))
            self._seen.append(session)
            known = mean
        self._others[name] = (at, 0.0, at, slots) if mean == known else (since, used, at, slots)

    def close(self, at: float) -> None:
        """Record the end of all sessions, because the run ends, and hold no attempt back any more."""
        self._is_closed = True
        for name in [*self._sessions]:
            self._leave(name, at, Leaving.ENDED)

    def _begin(self, session: SessionRecord) -> None:
        self._sessions[session.worker] = session
        self._seen.append(session)

    def _leave(self, name: str, at: float, reason: Leaving) -> None:
        if name in self._others:
            self._share(name, at, 0, is_over=True)
        session = self._sessions.pop(name)
        self._others.pop(name, None)
        # A clock may have been set back meanwhile.
        self._seen.append(left := replace(session, until=max(at, session.since), reason=reason))
        self.recall([left])


def _end_of(attempt: Attempt, event: Lost | Result, *, is_pruned: bool) -> End:
    """Return how an attempt has ended by an event."""
    if event.attempt != attempt.attempt:
        return End.SUPERSEDED
    if isinstance(event, Result):
        if event.retry is not None:
            return End.RETRIED if event.retry.outgrown is None else End.OUTGROWN
        if event.outcome.state is TrialState.CANCELLED and is_pruned:
            return End.PRUNED
        return _ENDS[event.outcome.state]
    if event.claimed:
        return End.PRUNED if is_pruned else End.LOST
    return End.RETURNED if attempt.state is TrialState.RUNNING else End.UNCLAIMED
