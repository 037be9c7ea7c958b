"""Workers of a study: the live ones, their compute classes, and the study's share of the slots."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from shadho_celery.core.attempts import Sent
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import ComputeClass, uses_gpus
from shadho_celery.fleet.shares import Turns, allow
from shadho_celery.transport.redis import Redis
from shadho_celery.transport.registry import (
    ANNOUNCE_SECONDS,
    ANY_CODE,
    Progress,
    Registry,
    StudyWants,
    Worker,
    sorted_out,
)
from shadho_celery.transport.signing import UNSIGNED, Signer

#: a class and one of its machines; None for all machines
_Place = tuple[str, str | None]

#: seconds after which a warning names a worker with another code: a worker that reads edited files again needs a moment
OTHER_CODE_SECONDS = 5.0

#: seconds with a free slot in its class after which a study no longer waits for studies that do not use their turns,
#: because their attempts do not start
UNUSED_TURN_SECONDS = 15.0


class Workers:
    """The live workers, as they announce themselves to one study."""

    def __init__(
        self,
        client: Redis,
        study: str,
        module: str,
        weight: float,
        signer: Signer = UNSIGNED,
        *,
        code: CodeVersion = ANY_CODE,
        name: str = "",
        progress: Callable[[], Progress | None] = lambda: None,
    ) -> None:
        """`module` is the module with which workers must have been started, and `code` its required version. `weight`
        is the study's part of the slots.

        `signer` has the key with which they must sign. The study's `name` and `progress` are announced for people.
        """
        self._workers = Registry(client, Worker, signer)
        #: number of announcements that the last look refused: unsigned or malformed
        self.refused = 0
        self._studies = Registry(client, StudyWants, signer)
        self._study = study
        self._module = module
        self._code = code
        self._weight = weight
        self._name, self._progress = name, progress
        #: turns with the other studies
        self.turns = Turns(weight)
        self._fingerprint = signer.fingerprint
        #: announcements of all live workers, including those that cannot run this study
        self.announced: Mapping[str, Worker] = {}
        #: names of the workers that may run its trials
        self.able: set[str] = set()
        #: names of workers that could run its trials but are quarantined
        self.quarantined: set[str] = set()
        #: warnings about workers with another code, by name, and the time since which they have it
        self._other_code: dict[str, tuple[str, float]] = {}
        self.classes: list[ComputeClass] = []
        #: virtual times of other studies at which they did not use their turns, by class
        self._unused: dict[str, Mapping[str, float]] = {}
        #: classes in which all workers are quarantined
        self._closed: set[str] = set()
        #: time since which a place has had a free slot, and time at which this was last seen
        self._free_since: dict[_Place, float] = {}
        self._seen_at: dict[_Place, float] = {}
        #: time of the last complete look, and time since which no look failed and Redis lost no data
        self._looked_at = self._known_since = -math.inf

    def look(self, now: float, sent: Iterable[Sent], quarantined: set[str]) -> None:
        """Update the live workers, and announce the slots that this study wants, with `sent` in flight."""
        self.announced = self._workers.living()
        ours, differing = sorted_out(self.announced, self._module, self._fingerprint, self._code)
        before = self._other_code
        self._other_code = {
            name: (said, before[name][1] if name in before else now) for name, said in differing.items()
        }
        self.quarantined = {name for name, worker in ours.items() if worker.quarantined or name in quarantined}
        self.able = ours.keys() - self.quarantined
        by_class: dict[str, dict[str, Worker]] = defaultdict(dict)
        for name in sorted(self.able):
            by_class[ours[name].compute_class][name] = ours[name]
        in_flight: dict[str, list[Sent]] = defaultdict(list)
        for each in sent:
            in_flight[str(each.attempt.compute_class)].append(each)
        self._closed = {ours[name].compute_class for name in self.quarantined} - by_class.keys()
        fellows = self._studies.living()
        fellows.pop(self._study, None)
        self.refused = self._workers.refused + self._studies.refused
        most = {known.name: known.limit + known.silent for known in self.classes}
        self.classes, wants, turns = [], {}, {}
        for name, workers in by_class.items():
            others = [(fellow.weight, fellow.wants.get(name, 0)) for fellow in fellows.values()]
            known = self._class(name, workers, in_flight[name], others)
            self.classes.append(known)
            taken = sum([each.attempt.slots for each in in_flight[name]])
            # Slots that it left free since the last look are not wanted. Before the first look it had none.
            is_wanting = taken >= most.get(name, 0)
            wants[name] = float(known.slots if is_wanting else taken)
            rivals = self._rivals(name, fellows, now)
            virtual = self.turns.look(known, rivals, in_flight[name], now, is_wanting=is_wanting)
            if is_wanting:
                turns[name] = virtual
            self._note((name, None), known.slots - known.busy, now)
            for host, busy in _busy_by_host(workers, in_flight[name]).items():
                self._note((name, host), known.hosts[host] - busy, now)
        # Redis loses this announcement only together with those of the workers, which take a moment to return.
        announced = StudyWants(
            name=self._name, progress=self._progress(), weight=self._weight, wants=wants, turns=turns
        )
        is_new = self._studies.announce(self._study, announced)
        if is_new or self._is_late(now):
            self._known_since = now
        self._looked_at = now

    def take_turns(self, now: float, sent: Iterable[Sent]) -> Sequence[ComputeClass]:
        """Return the classes with the current turns. Between two looks these change with what `sent` has used."""
        turns = self.turns.extras(sent, now)
        if turns or [known for known in self.classes if known.turn is not None]:
            self.classes = [replace(known, turn=turns.get(known.name)) for known in self.classes]
        return self.classes

    def known_for(self, now: float) -> float:
        """Return the seconds for which every live worker could announce itself; 0 while Redis cannot be used."""
        return 0.0 if self._is_late(now) else now - self._known_since

    def with_other_code(self, seconds: float = OTHER_CODE_SECONDS) -> list[str]:
        """Return a warning about each worker that has had another code for this many seconds, as of the last look."""
        return [said for said, since in self._other_code.values() if self._looked_at - since >= seconds]

    def withdraw(self) -> None:
        """Withdraw the study's announcement, because it wants no slots any more."""
        self._studies.withdraw(self._study)

    def are_gone(self, sent: Sent, now: float, seconds: float) -> bool:
        """Return whether no worker can claim an attempt: all are quarantined, or none was live for this long."""
        name = str(sent.attempt.compute_class)
        seen_at = self._seen_at.get((name, sent.attempt.only_on), -math.inf)
        return name in self._closed or now - max(sent.at, seen_at) > seconds

    def had_free_slot(
        self, compute_class: str, at: float, now: float, seconds: float, *, host: str | None = None
    ) -> bool:
        """Return whether a class, or its workers on `host`, had a free slot for this many seconds since a time."""
        return now - max(at, self._free_since.get((compute_class, host), now)) > seconds

    def _rivals(self, name: str, fellows: Mapping[str, StudyWants], now: float) -> list[tuple[float, float]]:
        """Return weight and virtual time of the other studies that want more slots of a class and use their turns."""
        virtual = {study: fellow.turns[name] for study, fellow in fellows.items() if name in fellow.turns}
        if self.had_free_slot(name, -math.inf, now, UNUSED_TURN_SECONDS):
            self._unused[name] = virtual
        unused = self._unused.get(name, {})
        return [(fellows[study].weight, each) for study, each in virtual.items() if each != unused.get(study)]

    def _note(self, place: _Place, free: int, now: float) -> None:
        """Record that a place has workers now, with this many free slots."""
        self._seen_at[place] = now
        if free > 0:
            self._free_since.setdefault(place, now)
        else:
            self._free_since.pop(place, None)

    def _is_late(self, now: float) -> bool:
        """Return whether looks have failed for so long that announcements of live workers may have expired."""
        return now - self._looked_at > ANNOUNCE_SECONDS / 2

    def _class(
        self, name: str, named: Mapping[str, Worker], in_flight: Sequence[Sent], others: Sequence[tuple[float, float]]
    ) -> ComputeClass:
        workers = named.values()
        machines = [worker.machine for worker in workers]
        # Attempts of a draining or silent worker take slots that are not announced any more.
        live = {worker for worker, announced in self.announced.items() if not announced.draining} | {""}
        silent = [each for each in in_flight if each.is_claimed and each.attempt.worker not in live]
        hosts: Counter[str] = Counter()
        storages: dict[str, set[str]] = defaultdict(set)
        for worker in workers:
            hosts[worker.machine.host] += worker.slots
            storages[worker.machine.host].add(worker.storage)
        return ComputeClass(
            name=name,
            slots=hosts.total(),
            busy=sum([worker.busy for worker in workers]),
            workers=len(workers),
            allowance=allow(hosts.total(), self._weight, others) if others else float(hosts.total()),
            silent=sum([each.attempt.slots for each in silent]),
            memory=min([machine.memory for machine in machines]),
            gpu_memory=min([machine.gpu_memory for machine in machines]) if uses_gpus(name) else 0,
            cores=max([machine.cores for machine in machines]),
            hosts=hosts,
            # With several storages on a machine, one worker may not see the files of another.
            storages={host: found.pop() if len(found) == 1 else "" for host, found in storages.items()},
            names=frozenset(named),
        )


def _busy_by_host(workers: Mapping[str, Worker], in_flight: Iterable[Sent]) -> dict[str, int]:
    """Return the busy slots of a class's workers by machine, with these attempts in flight."""
    busy, ours = Counter[str](), Counter[str]()
    for worker in workers.values():
        busy[worker.machine.host] += worker.busy
    for each in in_flight:
        # Announcements are seconds old. For our own attempts, events say earlier that they have started.
        if (claimed_by := workers.get(each.attempt.worker)) is not None:
            ours[claimed_by.machine.host] += 1
    return {host: max(count, ours[host]) for host, count in busy.items()}
