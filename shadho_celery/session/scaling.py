"""Scaling: decides how many workers of each class to start and which to end, so that a fleet has the wanted slots.

`Scaling` makes the decisions. `ScaledFleet` is the fleet: it reads the wanted slots and the live workers from Redis,
and asks workers to end.
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
from shadho_celery.core.users import own_user
from shadho_celery.fleet import urls
from shadho_celery.fleet.drains import MAX_FAILURES, Drains, Start, StartRecords, Starts
from shadho_celery.fleet.policy import need_right
from shadho_celery.fleet.redis import connect, refusals, server_time
from shadho_celery.fleet.registry import ANNOUNCE_SECONDS, Registry, StudyWants, Worker
from shadho_celery.fleet.signing import Signer
from shadho_celery.placement.bound import Held
from shadho_celery.session.control import why_not

#: seconds between a failed start and the next start: the first pause, and the longest; each pause is twice the previous
#: one
FIRST_PAUSE, LONGEST_PAUSE = 15.0, 3600.0


@dataclass
class _Class:
    """State of one class of the spec."""

    spec: ClassSpec
    starts: list[Start] = field(default_factory=list)
    #: number of failed starts since a started worker last came (announced itself); earliest time of the next start
    failures: int = 0
    retry_at: float = -math.inf
    #: other classes of which workers have come while workers of this class were missing
    strangers: set[str] = field(default_factory=set)
    #: True once the user was told that a worker has another number of slots than the spec
    is_told: bool = False

    @property
    def starting(self) -> int:
        """Number of workers that were started and have not come yet."""
        return sum(start.missing for start in self.starts)

    def record(self, known: list[str]) -> Starts:
        """Return the record from which another scaler can continue. `known` are the class's workers that have come."""
        retry_at = self.retry_at if self.failures else None
        return Starts(starts=[*self.starts], known=known, failures=self.failures, retry_at=retry_at)

    def resume(self, record: Starts, now: float) -> None:
        """Continue with the record of an earlier scaler. Starts that are overdue by now are left out."""
        self.starts = [start for start in record.starts if now - start.at <= self.spec.come_seconds]
        self.failures = record.failures
        if record.retry_at is not None:
            self.retry_at = min(record.retry_at, now + LONGEST_PAUSE)


@dataclass(frozen=True, kw_only=True)
class Decision:
    """Decision about the workers to start and to end now."""

    #: number of workers to start, by class; from now on they count as starting
    starts: Mapping[str, int]
    #: names of the workers to end once they run no trial
    ends: Sequence[str]
    #: classes whose started workers have not come in time, so that the rest of the start can be cancelled
    overdue: Sequence[str]
    #: lines for the user
    lines: Sequence[str]


class Scaling:
    """Decides about the workers of the classes in a spec. All classes together have at most `most` workers at a time.

    All workers of these classes count, no matter who has started them. A worker is ended only if it is idle, has been
    live for ANNOUNCE_SECONDS, and has not been wanted for `cooldown` seconds. After a failed start, a single worker of
    the class is started after a pause, which doubles each time. Times are seconds since the epoch. Another object can
    continue with `resume` from the value of `starting`.
    """

    def __init__(self, spec: Mapping[str, ClassSpec], most: int, cooldown: float) -> None:
        self._classes = {name: _Class(each) for name, each in spec.items()}
        self._most = most
        self._held, self._kept = Held(cooldown), Held(cooldown)
        #: name of a worker -> its latest announcement, and the time at which it was last seen
        self._seen: dict[str, tuple[Worker, float]] = {}
        #: name of a live worker -> time since which it has been live; studies need a moment to see it and to send
        #: trials
        self._since: dict[str, float] = {}
        #: workers that were asked to end
        self._ended: set[str] = set()

    @property
    def starting(self) -> Mapping[str, Starts]:
        """Records of started workers that have not come yet, and of pauses after failed starts, by class."""
        known: dict[str, list[str]] = {name: [] for name, each in self._classes.items() if each.starts or each.failures}
        for name, (worker, _) in sorted(self._seen.items()):
            if worker.compute_class in known:
                known[worker.compute_class].append(name)
        return {name: self._classes[name].record(names) for name, names in known.items()}

    def resume(self, starting: Mapping[str, Starts], live: Mapping[str, Worker], now: float) -> list[str]:
        """Continue with the starts and pauses of an earlier scaler (`starting`). Call this before `look`.

        Returns lines for the user.
        """
        for name, record in starting.items():
            self._classes[name].resume(record, now)
        for name, worker in live.items():
            # `look` counts all other workers as newly arrived.
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
        """Decide which workers to start and to end, by the `wanted` slots of each class and the `live` workers.

        For the slots in `backlog`, workers are kept but not started.

        `has_left` returns whether a worker has withdrawn its announcement, and `may_end` whether it obeys a request to
        end.
        `calling` are the classes whose start command still runs, so that it is not called again.
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
            # After a failure, start only one worker, because the workers that did not come in time may still come.
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
        # Repeat requests that workers have not obeyed, because Redis may have lost them.
        again = [key for key in sorted(self._ended & live.keys()) if not live[key].draining]
        if ends:
            lines.append(f"ending {counted(len(ends), 'idle worker')}: {listed([one_line(key) for key in ends], 3)}")
        self._ended.update(ends)
        ends += again
        return Decision(starts=starts, ends=ends, overdue=overdue, lines=lines)

    def fail(self, name: str, now: float, reason: str) -> str:
        """Record that the latest start of a class has failed. Return a line for the user."""
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
        """Return the workers of the known classes.

        A worker that no longer announces itself is still returned for ANNOUNCE_SECONDS after it was last seen, because
        Redis may only have lost its data. A worker that has withdrawn its announcement is not. Add a line to `lines`
        for the first worker of a class whose slots differ from the spec.
        """
        self._since = {name: self._since.get(name, now) for name in live}
        for name, worker in live.items():
            if name not in self._seen:
                self._welcome(worker.compute_class)
                of = self._classes.get(worker.compute_class)
                # If trials share GPUs, the number of slots varies.
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
        """Count a new worker as one of the workers that were started."""
        for name, each in self._classes.items():
            if name != compute_class and each.starting:
                each.strangers.add(compute_class)
        came = self._classes.get(compute_class)
        if came is not None and came.starts:
            came.failures, came.strangers = 0, set()
            first, *others = came.starts
            came.starts = [replace(first, missing=first.missing - 1), *others] if first.missing > 1 else others

    def _await(self, now: float, lines: list[str]) -> list[str]:
        """Give up the started workers that have not come in time. Add a line for each class. Return these classes."""
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
    """The fleet that the environment names. The methods raise ServiceError if Redis does not answer.

    If there is a signing key, announcements that are not signed with it are ignored.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` shows a line to the user. Each line is shown once."""
        client, self._signer = connect(urls.url(urls.REDIS)), Signer.configured()
        need_right(client)
        self._studies = Registry(client, StudyWants, self._signer)
        self._workers = Registry(client, Worker, self._signer)
        self._drains, self._by = Drains(client, self._signer), own_user()
        self._client, self._records = client, StartRecords(client, self._signer)
        #: class -> record of its starting workers, as stored in Redis
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
        """Return the records that an earlier scaler of these classes has stored with `keep`."""
        with refusals():
            found = {name: self._records.latest(name) for name in names}
        self._kept = {name: record for name, record in found.items() if record is not None}
        return {**self._kept}

    def keep(self, starting: Mapping[str, Starts], seconds: Mapping[str, float]) -> None:
        """Store the record of each class's starting workers and pause in Redis. It replaces earlier records.

        A record expires after the `seconds` of its class.
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
        """Return the slots by class for which workers should be started, the slots by class for which workers should be
        kept (`StudyWants.backlog`), and the live workers by name.
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
        """Return whether a worker has withdrawn its announcement."""
        with refusals():
            return self._workers.has_left(name)

    def may_end(self, name: str) -> bool:
        """Return whether a worker would obey a request to end. If not, show a warning."""
        reason = why_not(f"worker {one_line(name)}", self._live[name], self._signer)
        if reason is not None:
            self.warn(f"{reason}; until then it is not ended")
        return reason is None

    def end(self, names: Sequence[str]) -> None:
        """Ask workers to finish their trials, to take no more, and to end."""
        with refusals():
            for name in names:
                self._drains.put(name, self._by, alone=True, ends=True)
        self._ending.update(names)

    def warn(self, text: str) -> None:
        """Show a warning, unless it was shown before."""
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
