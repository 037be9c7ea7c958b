"""Scaling: how many workers of each class to start, and which to end, so that a fleet has the slots that it wants.

A fleet whose workers are started on demand: the slots that its studies want, its live workers, and their end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from msgspec.structs import replace

from shadho_celery.core.checks import listed, one_line
from shadho_celery.core.files import ClassSpec
from shadho_celery.core.units import counted, duration
from shadho_celery.fleet import urls
from shadho_celery.fleet.drains import MAX_FAILURES, Drains, Start, StartRecords, Starts
from shadho_celery.fleet.redis import connect, refusals, server_time
from shadho_celery.fleet.registry import ANNOUNCE_SECONDS, Registry, StudyWants, Worker
from shadho_celery.fleet.signing import Signer
from shadho_celery.placement.bound import Held
from shadho_celery.session.control import requester, why_not

#: seconds until the next start after a failed one, the first and the longest; each pause is twice the last
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 3600.0


@dataclass
class _Class:
    """State of one class."""

    spec: ClassSpec
    starts: list[Start] = field(default_factory=list)
    #: number of failed starts since the last worker came, and the earliest time of the next start
    failures: int = 0
    retry_at: float = -math.inf
    #: other classes of workers that have come while this class's were missing
    strangers: set[str] = field(default_factory=set)
    #: True once the user was told that its workers have other slots than the spec
    is_told: bool = False

    @property
    def starting(self) -> int:
        """Number of workers that were started and have not come yet."""
        return sum(start.missing for start in self.starts)

    def record(self, known: list[str]) -> Starts:
        """Return what another scaler needs to go on. `known` are the class's workers that have come."""
        retry_at = self.retry_at if self.failures else None
        return Starts(starts=[*self.starts], known=known, failures=self.failures, retry_at=retry_at)

    def resume(self, record: Starts, now: float) -> None:
        """Go on with the record of an earlier scaler. Starts that it would have given up meanwhile are left out."""
        self.starts = [start for start in record.starts if now - start.at <= self.spec.come_seconds]
        self.failures = record.failures
        if record.retry_at is not None:
            self.retry_at = min(record.retry_at, now + LONGEST_PAUSE)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do now."""

    #: number of workers to start by class, which count as starting from now on
    starts: Mapping[str, int]
    #: names of the workers to end once they run no trial
    ends: Sequence[str]
    #: classes whose last start did not come, so that what is left of it can be cancelled
    overdue: Sequence[str]
    #: lines for the user
    lines: Sequence[str]


class Scaling:
    """Decides about the workers of the classes in a spec, with at most `most` workers at a time, all classes together.

    All workers of these classes count, whoever has started them. A worker is ended only if it is idle, has been there
    for ANNOUNCE_SECONDS, and was last wanted `cooldown` seconds before. After a start that fails, a single worker of
    the class is started after a pause, which doubles. Times are seconds since the epoch. What `starting` returns makes
    another object go on after `resume`.
    """

    def __init__(self, spec: Mapping[str, ClassSpec], most: int, cooldown: float) -> None:
        self._classes = {name: _Class(each) for name, each in spec.items()}
        self._most = most
        self._held, self._kept = Held(cooldown), Held(cooldown)
        #: by name of each worker: its latest announcement, and the time of that
        self._seen: dict[str, tuple[Worker, float]] = {}
        #: time since which each live worker is there: the studies need a moment to see it and to send trials
        self._since: dict[str, float] = {}
        #: workers that were asked to end
        self._ended: set[str] = set()

    @property
    def starting(self) -> Mapping[str, Starts]:
        """The workers that were started and have not come yet, and the pauses after failed starts, by class."""
        known: dict[str, list[str]] = {name: [] for name, each in self._classes.items() if each.starts or each.failures}
        for name, (worker, _) in sorted(self._seen.items()):
            if worker.compute_class in known:
                known[worker.compute_class].append(name)
        return {name: self._classes[name].record(names) for name, names in known.items()}

    def resume(self, starting: Mapping[str, Starts], live: Mapping[str, Worker], now: float) -> list[str]:
        """Count the workers that an earlier scaler has started, and go on with its pauses. Call this first.

        Returns lines for the user.
        """
        for name, record in starting.items():
            self._classes[name].resume(record, now)
        for name, worker in live.items():
            # All others have come since.
            if worker.compute_class not in starting or name in starting[worker.compute_class].known:
                self._seen[name] = worker, now
        lines = []
        for name, each in self._classes.items():
            if each.starts:
                lines.append(f"class {name}: {counted(each.starting, 'worker')} started earlier")
            if each.retry_at > now:
                lines.append(f"class {name}: starts have failed; next try in {duration(each.retry_at - now)}")
        return lines

    def look(
        self,
        now: float,
        wanted: Mapping[str, int],
        live: Mapping[str, Worker],
        *,
        backlog: Mapping[str, int] = MappingProxyType({}),
        has_left: Callable[[str], bool] = lambda name: False,
        may_end: Callable[[str], bool] = lambda name: True,
        calling: Collection[str] = (),
    ) -> Decision:
        """Decide by the wanted slots of each class and the announced workers. For a `backlog`, workers are kept only.

        `has_left` returns whether a worker has withdrawn in order, and `may_end` whether one obeys a request to end.
        `calling` are the classes whose command has not returned: it is not called again meanwhile.
        """
        lines: list[str] = []
        workers = self._present(now, live, has_left, lines)
        overdue = self._await(now, lines)
        held = self._held.see({name: wanted.get(name, 0) for name in self._classes}, now)
        kept = self._kept.see({name: backlog.get(name, 0) for name in self._classes}, now)
        room = self._most - len(workers) - sum(each.starting for each in self._classes.values())
        left, starts, ends = self._most, {}, []
        for name, each in self._classes.items():
            serving = {key: one for key, one in workers.items() if one.compute_class == name and not one.draining}
            serving = {key: one for key, one in serving.items() if key not in self._ended}
            target = min(held[name], min(each.spec.max_workers, left) * each.spec.slots)
            left -= min(left, math.ceil(target / each.spec.slots))
            slots = sum(one.slots for one in serving.values())
            lacking = math.ceil((target - slots) / each.spec.slots) - each.starting
            # After a failure one worker is tried: those that did not come in time may still come.
            most = 1 if each.failures else self._most
            count = min(lacking, room, most, each.spec.max_workers - len(serving) - each.starting)
            if count > 0 and now >= each.retry_at and name not in calling:
                room -= count
                starts[name] = count
                each.starts.append(Start(count=count, missing=count, at=now))
                lines.append(f"class {name}: {counted(held[name], 'slot is', 'slots are')} wanted; starting {count}")
            for key, one in sorted(serving.items(), key=lambda pair: -pair[1].slots):
                is_idle = not one.busy and now - self._since.get(key, now) >= ANNOUNCE_SECONDS
                if is_idle and slots - one.slots >= target + kept[name] and may_end(key):
                    slots -= one.slots
                    ends.append(key)
        # The request to a worker that does not obey it may be lost.
        again = [key for key in sorted(self._ended & live.keys()) if not live[key].draining]
        if ends:
            lines.append(f"ending {counted(len(ends), 'idle worker')}: {listed([one_line(key) for key in ends], 3)}")
        self._ended.update(ends)
        ends += again
        return Decision(starts=starts, ends=ends, overdue=overdue, lines=lines)

    def fail(self, name: str, now: float, reason: str) -> str:
        """Record that the latest start of a class has failed. Return a line about it."""
        each = self._classes[name]
        if each.starts:
            each.starts.pop()
        return self._pause(name, now, reason)

    def _pause(self, name: str, now: float, reason: str) -> str:
        each = self._classes[name]
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2**each.failures)
        each.failures = min(each.failures + 1, MAX_FAILURES)
        each.retry_at = now + pause
        return f"Warning: class {name}: {reason}; next try in {duration(pause)}"

    def _present(
        self, now: float, live: Mapping[str, Worker], has_left: Callable[[str], bool], lines: list[str]
    ) -> dict[str, Worker]:
        """Return the workers of the classes. Those that have become silent count for a while.

        Redis may have lost its data, after which the workers announce themselves again. Adds a line about the first
        worker of a class that has other slots than its spec.
        """
        self._since = {name: self._since.get(name, now) for name in live}
        for name, worker in live.items():
            if name not in self._seen:
                self._welcome(worker.compute_class)
                of = self._classes.get(worker.compute_class)
                # Trials that share GPUs change the number of slots.
                if of is not None and worker.slots != of.spec.slots and not (of.is_told or worker.shares_gpus):
                    of.is_told = True
                    lines.append(
                        f"Warning: class {worker.compute_class}: a worker has {counted(worker.slots, 'slot')}, and the "
                        f"file of --class-spec says {of.spec.slots}; set slots there, or start workers with --slots"
                    )
            self._seen[name] = worker, now
        for name, (_, at) in [*self._seen.items()]:
            if name not in live and (now - at > ANNOUNCE_SECONDS or has_left(name)):
                del self._seen[name]
        self._ended &= self._seen.keys()
        return {name: worker for name, (worker, _) in self._seen.items() if worker.compute_class in self._classes}

    def _welcome(self, compute_class: str) -> None:
        """Count a worker that has come as one of those that were started."""
        for name, each in self._classes.items():
            if name != compute_class and each.starting:
                each.strangers.add(compute_class)
        came = self._classes.get(compute_class)
        if came is not None and came.starts:
            came.failures, came.strangers = 0, set()
            first, *others = came.starts
            came.starts = [replace(first, missing=first.missing - 1), *others] if first.missing > 1 else others

    def _await(self, now: float, lines: list[str]) -> list[str]:
        """Give up the workers that have not come in time, with a line about each class. Return these classes."""
        found = []
        for name, each in self._classes.items():
            late = [start for start in each.starts if now - start.at > each.spec.come_seconds]
            if late:
                found.append(name)
                each.starts = [start for start in each.starts if start not in late]
                missing, count = sum(start.missing for start in late), sum(start.count for start in late)
                others = f"; workers of {listed([one_line(n, 60) for n in sorted(each.strangers)], 3)} came meanwhile"
                reason = f"{missing} of {count} started workers did not come within {duration(each.spec.come_seconds)}"
                lines.append(self._pause(name, now, reason + (others if each.strangers else "")))
                each.strangers = set()
        return found


class ScaledFleet:
    """The fleet that the environment names. Its methods raise ServiceError if Redis does not answer.

    With a signing key, announcements without its signature are ignored.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` shows a line to the user. Each is shown once."""
        client, self._signer = connect(urls.url(urls.REDIS)), Signer.configured()
        self._studies = Registry(client, StudyWants, self._signer)
        self._workers = Registry(client, Worker, self._signer)
        self._drains, self._by = Drains(client, self._signer), requester()
        self._client, self._records = client, StartRecords(client, self._signer)
        #: records of the workers that start, by class, as Redis has them
        self._kept: dict[str, Starts] = {}
        self._live: Mapping[str, Worker] = {}
        #: live workers that were asked to end
        self._ending: set[str] = set()
        self._warn, self._warned = warn, set[str]()

    def time(self) -> float:
        """Return the seconds since the epoch, by the server's clock."""
        with refusals():
            return server_time(self._client)

    def recall(self, names: Collection[str]) -> Mapping[str, Starts]:
        """Return what an earlier scaler of these classes has kept."""
        with refusals():
            found = {name: self._records.latest(name) for name in names}
        self._kept = {name: record for name, record in found.items() if record is not None}
        return {**self._kept}

    def keep(self, starting: Mapping[str, Starts], seconds: Mapping[str, float]) -> None:
        """Record the workers of each class that start, and its pause, in place of what was kept.

        They are kept for so many `seconds` by class.
        """
        with refusals():
            for name in [*self._kept]:
                if name not in starting:
                    self._records.remove(name)
                    del self._kept[name]
            for name, record in starting.items():
                if self._kept.get(name) != record:
                    self._records.put(name, record, seconds[name])
                    self._kept[name] = record

    def look(self) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, Worker]]:
        """Return the slots by class for which the studies want workers started, those for which they want workers kept
        (`StudyWants.backlog`), and the live workers by name.
        """
        wanted, backlog = Counter[str](), Counter[str]()
        with refusals():
            studies, self._live = self._studies.living(), self._workers.living()
            gone = self._ending - self._live.keys()
            self._drains.forget(gone)
        self._ending -= gone
        for study in studies.values():
            wanted.update(study.wanted_slots)
            backlog.update(study.backlog)
        if self._studies.refused or self._workers.refused:
            self.warn("announcements that are malformed or not signed with this command's key are ignored")
        return wanted, backlog, self._live

    def has_left(self, name: str) -> bool:
        """Return whether a worker has withdrawn in order."""
        with refusals():
            return self._workers.has_left(name)

    def may_end(self, name: str) -> bool:
        """Return whether a worker obeys a request to end. If not, warn."""
        reason = why_not(f"worker {one_line(name)}", self._live[name].control, self._signer)
        if reason is not None:
            self.warn(f"{reason}; until then it is not ended")
        return reason is None

    def end(self, names: Sequence[str]) -> None:
        """Ask workers to finish their trials, to take no more, and to end."""
        with refusals():
            for name in names:
                self._drains.end(name, self._by)
        self._ending.update(names)

    def warn(self, text: str) -> None:
        """Show a warning, unless it was shown before."""
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
