"""Records of a run's attempts, workers and machines, which are kept here until they are written to the store.

Three sums are also computed here. The backlog of a class is the sum of the predicted seconds of its queued attempts; it
is recorded with each placement. The money that attempts have cost is compared with the limit of the study. From the
preemptions and the hours of workers, the cost model computes the rates of preemption. No other decision depends on
these records.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from msgspec.structs import replace

from shadho_celery.core.records import AttemptRecord, End, Leaving, MachineRecord, Placed, Present, SessionRecord, pack
from shadho_celery.core.trial import FINISHED, Attempt, Lost, Result, Started, TrialState
from shadho_celery.core.units import cost_of

#: by state of the result that ended a trial: how its attempt ended
_ENDS = {state: End(state.lower()) for state in FINISHED}

#: number of a trial, and number of an attempt of this trial
_Key = tuple[int, int]

#: seconds for which the record of a queued attempt is not written
QUEUED_SECONDS = 1.0

#: minimum seconds between two records of changed numbers of slots
RESIZE_SECONDS = 60.0

#: the number of slots that run trials of other studies is averaged over at least this number of seconds, and over at
#: least this fraction of the session so far. So the number of averages grows with the logarithm of the session's length
OTHERS_SECONDS, OTHERS_PART = 2.0, 1 / 64


class Recorder:
    """Records of attempts, sessions and machines that have changed since the last `clear`."""

    def __init__(self, classes: Sequence[str] = ()) -> None:
        """`classes` are the class names in the study's record."""
        #: user of this run, who owns its attempts; None if it is not recorded
        self.owner: str | None = None
        #: names of the classes in the order of `AttemptRecord.placed`; the position of a class never changes
        self._classes = [*classes]
        self._written_classes = len(self._classes)
        #: records of attempts with facts that are not in the store yet
        self._attempts: dict[_Key, AttemptRecord] = {}
        #: the records that `attempted` returned last; and True once `attempted` returns all records
        self._due: dict[_Key, AttemptRecord] = {}
        self._is_closed = False
        #: by queued attempt: its class and its predicted seconds; and the sum of these seconds by class
        self._queued: dict[_Key, tuple[str, float]] = {}
        self._backlogs: defaultdict[str, float] = defaultdict(float)
        #: by name of a present worker: its session; and by host: the machines seen so far
        self._sessions: dict[str, SessionRecord] = {}
        self._machines: dict[str, MachineRecord] = {}
        #: by worker, also of workers that have left: price of a slot an hour
        self._prices: dict[str, float | None] = {}
        #: by class: price of a slot an hour for workers that announce no price
        self.class_prices: Mapping[str, float | None] = {}
        #: by claimed attempt with a price: the price of its slots an hour, the time of its claim, and its slot
        self._priced: dict[_Key, tuple[float, float, object]] = {}
        #: by slot: the time of its claim, and the time at which the last attempt of this claim ended. A slot may claim
        #: several attempts at once
        self._freed: dict[object, tuple[float, float]] = {}
        #: by class: money that ended attempts have cost, those of earlier runs included
        self.spent: defaultdict[str, float] = defaultdict(float)
        #: new machines, and sessions that have begun, changed or ended
        self.seen: list[SessionRecord | MachineRecord] = []
        #: by present worker with slots of other studies: start of the current mean; slot seconds from then to the last
        #: `follow`; time of the last `follow`; and the number of these slots at that time
        self._others: dict[str, tuple[float, float, float, int]] = {}
        #: time of the last `follow` that compared numbers of slots with those of the sessions
        self._followed_at = -math.inf
        #: by class: number of workers that were preempted or have vanished, and hours of all workers that have left
        self._left: defaultdict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))

    # Records that must be written

    def attempted(self, now: float) -> Sequence[AttemptRecord]:
        """Return one record for each changed attempt, with the new facts.

        An attempt that was queued in the last QUEUED_SECONDS is left out. Most attempts are claimed within this time,
        and are then written only once.
        """
        self._due = {key: each for key, each in self._attempts.items() if self._is_due(each, now)}
        return [*self._due.values()]

    def _is_due(self, record: AttemptRecord, now: float) -> bool:
        if self._is_closed or record.started_at is not None or record.end is not None or record.queued_at is None:
            return True
        return abs(now - record.queued_at) >= QUEUED_SECONDS

    @property
    def is_urgent(self) -> bool:
        """True if these records must be written now, even if no trial has changed."""
        return bool(self.seen) or (self._is_closed and bool(self._attempts))

    @property
    def classes(self) -> Sequence[str] | None:
        """Names of all classes in the order of `AttemptRecord.placed`; None if there is no new class."""
        return self._classes if len(self._classes) > self._written_classes else None

    def clear(self) -> None:
        """Drop the records that `attempted` returned last. Call this once they are written."""
        for key in self._due:
            del self._attempts[key]
        self.seen = []
        self._written_classes = len(self._classes)

    # Attempts

    def queue(self, attempt: Attempt, at: float, *, is_copy: bool) -> None:
        """Record an attempt that will be sent."""
        record = self._record(attempt)
        record.compute_class, record.queued_at, record.copy = attempt.compute_class, at, is_copy
        record.owner = self.owner

    def note_placement(self, attempt: Attempt, found: Mapping[str, Placed]) -> None:
        """Record the facts by which an attempt was placed, and add its seconds to the backlog of its class."""
        if not self._classes or not found.keys() <= {*self._classes}:
            self._classes = [*dict.fromkeys([*self._classes, *found])]
        self._record(attempt).placed = pack(found, self._classes)
        name = str(attempt.compute_class)
        if name in found and (seconds := found[name].seconds) is not None:
            self._queued[attempt.number, attempt.attempt] = name, seconds
            self._backlogs[name] += seconds

    def backlog(self, compute_class: str) -> float:
        """Return the sum of the predicted seconds of the attempts in a class's queue. Unknown seconds count as 0."""
        return max(0.0, self._backlogs[compute_class])

    def start(self, attempt: Attempt, event: Started) -> None:
        """Record that a worker has claimed an attempt."""
        self._unqueue(attempt)
        record = self._record(attempt)
        record.started_at, record.host = event.at, event.host
        record.worker, record.slot = event.worker or None, event.slot
        if (price := self._prices.get(event.worker)) is not None:
            record.price = price * attempt.slots
            self.charge(record)

    def charge(self, record: AttemptRecord) -> None:
        """Count the money that a claimed attempt costs from its claim on.

        The attempt may have been sent by an earlier run.
        """
        if record.price is not None and record.started_at is not None and record.end is None:
            key = record.number, record.attempt
            slot = key if record.slot is None else (record.worker, record.slot)
            self._priced[key] = record.price, record.started_at, slot

    def end(self, attempt: Attempt, event: Lost | Result, now: float, *, is_pruned: bool) -> None:
        """Record that an event has ended an attempt. The event may be the result of another attempt of the trial.

        `is_pruned` is True if the trial was stopped because of its reports.
        """
        self._unqueue(attempt)
        record = self._record(attempt)
        record.end, record.ended_at = _end_of(attempt, event, is_pruned=is_pruned), now
        record.started_at = attempt.started_at
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
        """Return the money that attempts have cost until `now`, running attempts and earlier runs included."""
        running = {slot: (price, self._begun(claimed, slot)) for price, claimed, slot in self._priced.values()}
        return sum(self.spent.values()) + sum(cost_of(price, began, now) for price, began in running.values())

    def _begun(self, claimed: float, slot: object) -> float:
        """Return when an attempt really began. A slot may claim several attempts at once, and runs them one after the
        other.
        """
        last, freed = self._freed.get(slot, (claimed, claimed))
        return freed if last == claimed else claimed

    def _unqueue(self, attempt: Attempt) -> None:
        if (waited := self._queued.pop((attempt.number, attempt.attempt), None)) is not None:
            name, seconds = waited
            self._backlogs[name] -= seconds
            if not self._queued:
                # Without queued attempts the sums are reset, so that rounding errors do not accumulate.
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
        """Return by class the mean price of a slot of its present workers; None if none of them has a price.

        A worker without a price counts as free of charge.
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
        """Add ended sessions to the numbers of preemptions and hours."""
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

        `names` are the workers that can run trials. `present` returns the facts of such a worker. `leaving` returns why
        a worker is no longer in `names`.
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
                    self.seen.append(machine)
                of, slots = facts.compute_class, facts.slots
                self._prices[name] = price = self.class_prices.get(of) if facts.price is None else facts.price
                session = SessionRecord(
                    worker=name, since=at, compute_class=of, host=machine.host, slots=slots, price=price
                )
                self._begin(session)

    def follow(self, at: float, present: Callable[[str], Present], others: Mapping[str, int]) -> None:
        """Record changed numbers of slots of workers: their sessions end, and new sessions begin.

        If trials share a GPU, the number of slots changes often, so it is compared only once in RESIZE_SECONDS.
        `others` has by worker the number of slots that run trials of other studies, of which averages are recorded.
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
        """Record the mean number of slots of other studies if it has changed for long enough, or if the session
        `is_over`.
        """
        session = self._sessions[name]
        since, used, before, running = self._others.get(name, (at, 0.0, at, 0))
        used += running * max(0.0, at - before)
        known = session.others[-1][1] if session.others else 0.0
        mean = round(used / (at - since), 2) if at > since else known
        if mean != known and (is_over or at - since >= max(OTHERS_SECONDS, OTHERS_PART * (since - session.since))):
            self._sessions[name] = session = replace(session, others=(*session.others, (since, mean)))
            self.seen.append(session)
            known = mean
        self._others[name] = (at, 0.0, at, slots) if mean == known else (since, used, at, slots)

    def close(self, at: float) -> None:
        """Record the end of all sessions, because the run ends. From now on, `attempted` returns all records."""
        self._is_closed = True
        for name in [*self._sessions]:
            self._leave(name, at, Leaving.ENDED)

    def _begin(self, session: SessionRecord) -> None:
        self._sessions[session.worker] = session
        self.seen.append(session)

    def _leave(self, name: str, at: float, reason: Leaving) -> None:
        if name in self._others:
            self._share(name, at, 0, is_over=True)
        session = self._sessions.pop(name)
        self._others.pop(name, None)
        # If the clock was set back, the session ends at its start.
        self.seen.append(left := replace(session, until=max(at, session.since), reason=reason))
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
