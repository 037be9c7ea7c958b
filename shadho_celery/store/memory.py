"""A store in memory, for searches that end with their process."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import msgspec

from shadho_celery.core.records import AttemptRecord, MachineRecord, SessionRecord
from shadho_celery.core.trial import Report, Trial
from shadho_celery.errors import LockLost
from shadho_celery.store.base import Turn

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(AttemptRecord).decode


class MemoryStore:
    """Store that keeps one study in memory. It is several hundred times as fast as a database."""

    safe_url = "memory"

    def __init__(self, fence: int = 1) -> None:
        """A write with a fencing number other than `fence` raises LockLost."""
        self._fence = fence
        self._trials: dict[int, Trial] = {}
        self._reports: list[Report] = []
        #: live attempts; ended attempts as bytes, which take a quarter of the memory of records
        self._live: dict[tuple[int, int], AttemptRecord] = {}
        self._ended: list[bytes] = []
        self._sessions: dict[tuple[str, float], SessionRecord] = {}
        self._machines: dict[str, MachineRecord] = {}
        self._classes: Sequence[str] = ()

    def write(self, key: str, fence: int, now: float, turn: Turn) -> Collection[int]:
        if fence != self._fence:
            raise LockLost
        self._trials |= {trial.number: trial for trial in (*turn.new, *turn.changed)}
        self._reports += turn.reported
        self._classes = self._classes if turn.classes is None else turn.classes
        for each in turn.seen:
            if isinstance(each, MachineRecord):
                self._machines[each.host] = each
            else:
                self._sessions[each.worker, each.since] = each
        for record in turn.attempted:
            attempt_key = record.number, record.attempt
            known = self._live.pop(attempt_key, None)
            whole = record if known is None else known.merged(record)
            if whole.end is None:
                self._live[attempt_key] = whole
            else:
                self._ended.append(_encode(whole))
        return ()

    def unlock(self, key: str, fence: int) -> None:
        pass

    def numbers(self, key: str = "") -> Collection[int]:
        return self._trials.keys()

    def trials(self, key: str = "", numbers: Collection[int] | None = None) -> list[Trial]:
        """Return all trials, or the trials with these numbers, sorted by number."""
        wanted = self._trials.keys() if numbers is None else self._trials.keys() & set(numbers)
        return [self._trials[number] for number in sorted(wanted)]

    def reports(self, key: str, numbers: Collection[int] | None = None) -> list[Report]:
        """Return the reports of all trials, or of the trials with these numbers, in the order in which they were
        written.
        """
        return [each for each in self._reports if numbers is None or each.number in numbers]

    def attempts(self, key: str = "", numbers: Collection[int] | None = None) -> Iterator[AttemptRecord]:
        """Yield the attempts of all trials, or of the trials with these numbers, sorted by trial and attempt."""
        found: dict[tuple[int, int], AttemptRecord] = {}
        for record in (*map(_decode, self._ended), *self._live.values()):
            if numbers is None or record.number in numbers:
                attempt_key = record.number, record.attempt
                # An attempt may have two records if its result arrived after it was given up as lost.
                found[attempt_key] = found[attempt_key].merged(record) if attempt_key in found else record
        return (found[attempt_key] for attempt_key in sorted(found))

    def class_order(self, key: str = "") -> Sequence[str]:
        """Return the names of the compute classes in the order of `AttemptRecord.placed`."""
        return self._classes

    def sessions(self, key: str = "") -> list[SessionRecord]:
        """Return the sessions of the workers, sorted by start."""
        return sorted(self._sessions.values(), key=lambda each: (each.since, each.worker))

    def machines(self, key: str = "") -> list[MachineRecord]:
        """Return the machines of the workers, sorted by name."""
        return sorted(self._machines.values(), key=lambda each: each.host)
