"""The live workers that can run a study's trials, their compute classes, and the study's share of their slots.

The slots of a class are shared first between the users whose studies want them, by the users' weights in the policy of
the fleet, and then between the studies of a user, by the studies' weights. Studies of unknown users count as those of
one user. A user may have a limit on the slots of all of his studies together. A share may have a fraction, for example
0.8 and 0.2 of a single slot for studies of weights 4 and 1. Studies use whole slots all the time, and take turns at the
remaining slots. A study may round its share up to a whole number of slots (here one) as long as it is not ahead of the
other studies. This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) without a central queue. In each
class a study has a virtual time, which advances by the slot seconds that it uses, divided by its weight. Studies
announce their virtual times. A study that is ahead of another study by more than a leeway waits. A study that wanted no
slots for a while starts again from the lowest virtual time of the other studies, unless its own is higher. So it is not
compensated for that time, and remains ahead if it was ahead.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NamedTuple

import redis

from shadho_celery.core import hardware
from shadho_celery.core.attempts import Sent
from shadho_celery.core.checks import one_line
from shadho_celery.core.code import CodeVersion, FullDigest, Sources
from shadho_celery.core.hardware import ComputeClass, uses_gpus
from shadho_celery.core.payload import Payload
from shadho_celery.core.records import Leaving, MachineRecord, Present
from shadho_celery.fleet.broker import Publisher
from shadho_celery.fleet.policy import Guard, User
from shadho_celery.fleet.registry import (
    ANNOUNCE_SECONDS,
    ANY_CODE,
    MAX_SLOTS,
    MAX_VIRTUAL,
    Progress,
    Registry,
    StudyWants,
    Worker,
    keys_of,
    obeyed_drains,
    place_of,
    sorted_out,
)
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.runner.protocol import MAX_COMPLAINT, MAX_COMPLAINTS

#: a compute class, and the host of one of its machines or None for all of them
_Place = tuple[str, str | None]

#: seconds after which a worker with another version of the code causes a warning; a worker needs a moment to import
#: edited files again
OTHER_CODE_SECONDS = 5.0

#: if a class has had a free slot for this many seconds, a waiting study may use it although the slot is due to other
#: studies
UNUSED_TURN_SECONDS = 15.0

#: slot seconds by which a study may be ahead of another study before it waits. The other study learns only from
#: announcements, which are up to three seconds old, that it may take more slots; meanwhile no slot should be idle
LEEWAY_SECONDS = 3.0

#: a study that is ahead by more slot seconds than this is assumed to wait, and other studies take over its slots; the
#: limit is below LEEWAY_SECONDS because announcements are seconds old
NEARLY_SECONDS = 1.0

#: slot seconds after which the last slot of a user's limit goes to another one of his studies
TURN_SECONDS = 60.0

#: seconds that a message costs a worker; an attempt counts as at least this long
MESSAGE_SECONDS = 0.001

#: a share that differs from a whole number of slots by less than this is rounded
ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class Servers:
    """The servers of a fleet, and the keys that one scheduler uses there."""

    client: redis.Redis
    publisher: Publisher
    #: signer with the key that workers must use
    signer: Signer = UNSIGNED
    #: signs the requests to the scheduler; None to refuse them
    control: Signer | None = None
    #: checks users against the policy; None without a policy
    guard: Guard | None = None


@dataclass(frozen=True, kw_only=True)
class FleetStudy:
    """Data of a study that a fleet needs to run its trials."""

    #: a message without attempts, with the fields that all messages of the study have in common
    template: Payload
    #: version of the code that workers must have
    code: CodeVersion = ANY_CODE
    #: sources that are shipped to the workers that accept code; None to ship nothing
    sources: Sources | None = None
    #: files of a command that are shipped beside them, by digest
    inputs: Mapping[FullDigest, bytes] = field(default_factory=dict)
    #: user who runs it, "" if unknown; his signature is in the template
    owner: str = ""
    #: user who has begun it, "" if unknown; he and the user who runs it may steer it
    begun_by: str = ""
    #: fencing number of the study's lock in its store
    fence: int = 0
    #: the study's weight when slots are shared with other studies
    weight: float = 1.0
    #: True to wait for attempts that an earlier scheduler left running. False if all workers are embedded: the workers
    #: of an earlier scheduler ended with it
    takes_over: bool = True
    #: seconds after which a trial whose gang is not complete gives its slots back and ends LOST
    gang_wait_seconds: float = 60.0


@dataclass
class Workers:
    """The live workers of a fleet, as one study's scheduler sees them through their announcements."""

    servers: Servers
    study: FleetStudy
    #: functions that return what the study announces: its progress, and the slots by class that would shorten it
    progress: Callable[[], Progress | None] = lambda: None
    wanted: Callable[[], Mapping[str, int]] = dict

    def __post_init__(self) -> None:
        #: the study's present weight
        self.weight = self.study.weight
        self._workers = Registry(self.servers.client, Worker, self.servers.signer)
        self._studies = Registry(self.servers.client, StudyWants, self.servers.signer)
        #: number of announcements that the last `look` refused, because they were unsigned or malformed
        self.refused = 0
        #: HOST:PORT of the run's metrics, which is announced; "" for none
        self.metrics = ""
        #: computes how many of the slots shared with other studies this study may use now, by class
        self.turns = Turns()
        #: announcements of all live workers, including those that cannot run this study
        self.announced: Mapping[str, Worker] = {}
        #: sequences of the drains that the announced workers obey, by place; replaced by a new mapping at each change
        self.obeyed: Mapping[str, int] = {}
        #: names of the workers that may run its trials
        self.able: set[str] = set()
        #: name of a present worker -> number of its slots that run trials of other studies; workers without such slots
        #: are left out
        self.others: Mapping[str, int] = {}
        #: names of workers that could run the study's trials but are quarantined
        self.quarantined: set[str] = set()
        #: workers that may run the study's trials, and draining workers that did so before; replaced by a new set at
        #: each change
        self.present: frozenset[str] = frozenset()
        self._draining: set[str] = set()
        #: name of a worker with another version of the code -> a warning, and the time since which it has that version
        self._other_code: dict[str, tuple[str, float]] = {}
        #: problem that a worker has announced (`Worker.complaints`) -> the notice about it
        self._complaints: dict[str, str] = {}
        #: compute classes of the able workers
        self.classes: list[ComputeClass] = []
        #: the latest announcement of this study, which the other studies know; None before the first one
        self._told: StudyWants | None = None
        #: `StudyWants.spent`, and the slot seconds used in all classes until the last `look`
        self._spent, self._used = 0.0, 0.0
        #: classes of which the study may use fewer slots than its share, because of the limit of its user
        self._limited: set[str] = set()
        #: class -> virtual times of other studies that left slots free; such a study is ignored until its time changes
        self._unused: dict[str, Mapping[str, float]] = {}
        #: classes in which all workers are quarantined
        self._closed: set[str] = set()
        #: (class, host or None, slots) -> time since which the class or machine has had that many free slots
        self._free_since: dict[tuple[str, str | None, int], float] = {}
        #: time at which a class or machine last had a live worker
        self._seen_at: dict[_Place, float] = {}
        #: time of the last complete `look`, and time since which no `look` has failed and Redis has lost no data
        self._looked_at = self._known_since = -math.inf

    def look(self, now: float, sent: Iterable[Sent], quarantined: set[str]) -> None:
        """Update the live workers, and announce the slots that this study wants. `sent` are its attempts in flight."""
        study, guard = self.study.template, self.servers.guard
        self.announced = self._workers.living()
        by_class = self._see(now, quarantined)
        in_flight: dict[str, list[Sent]] = defaultdict(list)
        for each in sent:
            in_flight[str(each.attempt.compute_class)].append(each)
        taken = {name: sum([each.attempt.slots for each in found]) for name, found in in_flight.items()}
        fellows = self._studies.living()
        fellows.pop(study.study, None)
        if guard is not None:
            fellows = {key: each for key, each in fellows.items() if not guard.unwelcome(key, each.owner, each.proof)}
        users: Mapping[str, User] = {} if guard is None else guard.users
        self.refused = self._workers.refused + self._studies.refused
        most = {known.name: known.limit + known.silent for known in self.classes}
        limited, self._limited = self._limited, set()
        limit = self._limit(fellows, users)
        left = None if limit is None else limit - sum(taken.values())
        asks, wants, turns = 0, dict[str, float](), dict[str, float]()
        self.classes = []
        for name, workers in by_class.items():
            ours = taken.get(name, 0)
            known = self._entitled(self._class(name, workers, in_flight[name]), fellows, users)
            if left is not None:
                known = self._capped(known, ours, left)
                left -= (known.most or 0) - ours
            if study.one_worker:
                known = self._on_machines(known, workers)
            self.classes.append(known)
            # A study that did not use all the slots that the last `look` allowed does not want more. Before the first
            # `look`, it was allowed none.
            asks += known.slots if (is_asking := ours >= most.get(name, 0)) else ours
            is_wanting = is_asking and name not in limited
            wants[name] = float(known.slots if is_wanting else ours)
            rivals = self._rivals(name, fellows, now)
            weight, *weights = in_all([(self.study.owner, self.weight), *(each[:2] for each in rivals)], users)
            behind = [(each, rival[2]) for each, rival in zip(weights, rivals, strict=True)]
            virtual = self.turns.look(known, behind, in_flight[name], now, is_wanting=is_wanting, weight=weight)
            if is_wanting:
                turns[name] = virtual
            self._note((name, None), known.slots - known.busy, now)
            self._note_machines(known, workers, in_flight[name], now)
        used = self.turns.used(chain.from_iterable(in_flight.values()), now)
        self._spend(used, fellows, is_asking=asks > sum(taken.values()))
        # If the announcement is new (`is_new`), Redis may have lost its data. Then the workers' announcements are
        # missing until each worker announces itself again.
        self._told = StudyWants(
            name=study.name,
            owner=self.study.owner,
            proof=study.proof,
            progress=self.progress(),
            fence=self.study.fence,
            **keys_of(self.servers.signer, self.servers.control),
            weight=self.weight,
            taken=min(max(sum(taken.values()), limit or 0), MAX_SLOTS),
            asks=min(asks, MAX_SLOTS),
            spent=self._spent,
            wants=wants,
            turns=turns,
            wanted_slots=dict(self.wanted()),
            metrics=self.metrics,
        )
        is_new = self._studies.announce(study.study, self._told)
        if is_new or self._is_late(now):
            self._known_since = now
        self._looked_at = now

    def _spend(self, used: float, fellows: Mapping[str, StudyWants], *, is_asking: bool) -> None:
        """Update `_spent`. `used` are the slot seconds in all classes until now.

        A study that is new, or that asked for no more slots, begins with the least of the user's other studies.
        """
        more, self._used = max(0.0, used - self._used) / self.weight, used
        self._spent = min(MAX_VIRTUAL, self._spent + more)
        if self._told is None or not is_asking:
            siblings = [each.spent for each in fellows.values() if each.owner == self.study.owner]
            self._spent = max([self._spent, *([min(siblings)] if siblings else [])])

    def _see(self, now: float, quarantined: set[str]) -> Mapping[str, Mapping[str, Worker]]:
        """Update which of the announced workers may run the study's trials. Return the able ones by class and name."""
        study = self.study.template
        if (obeyed := obeyed_drains(self.announced)) != self.obeyed:
            self.obeyed = obeyed
        ours, differing = sorted_out(self.announced, study.module, self.servers.signer.fingerprint, self.study.code)
        before = self._other_code
        self._other_code = {
            name: (said, before[name][1] if name in before else now) for name, said in differing.items()
        }
        self.quarantined = {name for name, worker in ours.items() if worker.quarantined or name in quarantined}
        self.able = ours.keys() - self.quarantined
        self._draining = {name for name in self.present if name in self.announced and self.announced[name].draining}
        if self.present != (present := self.able | self._draining):
            self.present = frozenset(present)
        running = {name: self.announced[name].studies for name in self.present}
        beside = {name: sum([of[key].slots for key in of if key != study.study]) for name, of in running.items() if of}
        self.others = {name: slots for name, slots in beside.items() if slots}
        by_class: dict[str, dict[str, Worker]] = defaultdict(dict)
        for name in sorted(self.able):
            by_class[ours[name].compute_class][name] = ours[name]
        self._closed = {ours[name].compute_class for name in self.quarantined} - by_class.keys()
        return by_class

    def _entitled(
        self, known: ComputeClass, fellows: Mapping[str, StudyWants], users: Mapping[str, User]
    ) -> ComputeClass:
        """Return a class with the study's share of its slots."""
        others = [Claim(each.owner, each.weight, each.wants.get(known.name, 0.0)) for each in fellows.values()]
        own = Claim(self.study.owner, self.weight, math.inf)
        return replace(known, allowance=entitle(known.slots, own, others, users)) if others else known

    def _capped(self, known: ComputeClass, taken: int, left: int) -> ComputeClass:
        """Return a class of which the study may use at most `left` slots more than it has `taken`, which may be
        negative.
        """
        wanted = max(0, math.ceil(known.share) - taken)
        if left < wanted:
            self._limited.add(known.name)
        return replace(known, most=taken + max(-taken, min(left, wanted)))

    def _limit(self, fellows: Mapping[str, StudyWants], users: Mapping[str, User]) -> int | None:
        """Return how many slots the limit of the user leaves to this study; None without a limit.

        The user's studies divide the limit by what they have announced. So all of them get the same result, except in
        the seconds after a change, in which none takes slots that another one may take by its announcement.
        """
        user, key = users.get(self.study.owner), self.study.template.study
        if user is None or user.slots is None:
            return None
        if self._told is None:
            return 0
        own = {name: each for name, each in fellows.items() if each.owner == self.study.owner}
        part = divide(user.slots, {key: self._told, **own})[key]
        return max(0, min(part, user.slots - sum([each.taken for each in own.values()])))

    def describe(self, name: str) -> Present:
        """Return the record of an announced worker: class, slots, machine and price."""
        worker = self.announced[name]
        machine = MachineRecord.of(worker.machine, worker.versions)
        return Present(worker.compute_class, worker.slots, machine, worker.price)

    def leaving(self, name: str) -> Leaving:
        """Return why a worker is no longer present."""
        if name in self.quarantined:
            return Leaving.QUARANTINED
        if name in self.announced:
            return Leaving.UNFIT
        return Leaving.STOPPED if self._workers.has_left(name) else Leaving.LOST

    def has_vanished(self, host: str, now: float) -> bool:
        """Return whether another machine has vanished: none of its workers announces itself.

        Returns False if an outage of Redis may be the cause, and for this machine.
        """
        if host == hardware.own_host() or self.known_for(now) < ANNOUNCE_SECONDS:
            return False
        return all(worker.machine.host != host for worker in self.announced.values())

    def take_turns(self, now: float, sent: Iterable[Sent]) -> Sequence[ComputeClass]:
        """Update `ComputeClass.turn`, the number of shared slots that the study may use now. Return the classes.

        The number depends on the slot seconds that each study has used. `sent` are this study's attempts in flight.
        """
        turns = self.turns.extras(sent, now)
        if turns or [known for known in self.classes if known.turn is not None]:
            self.classes = [replace(known, turn=turns.get(known.name)) for known in self.classes]
        return self.classes

    def known_for(self, now: float) -> float:
        """Return for how many seconds workers have been able to announce themselves without interruption; 0 if Redis
        fails.
        """
        return 0.0 if self._is_late(now) else now - self._known_since

    def with_other_code(self, seconds: float = OTHER_CODE_SECONDS) -> list[str]:
        """Return warnings about workers that have had another version of the code for at least this many seconds."""
        return [said for said, since in self._other_code.values() if self._looked_at - since >= seconds]

    def complaints(self) -> list[str]:
        """Return a notice for each complaint that able workers have announced, with the first worker that has it.

        Workers of a fleet often have the same complaint. At most MAX_COMPLAINTS notices are returned.
        """
        for name in sorted(self.able & self.announced.keys()):
            for each in self.announced[name].complaints:
                if len(self._complaints) < MAX_COMPLAINTS:
                    self._complaints.setdefault(each, f"worker {place_of(name)}: {one_line(each, MAX_COMPLAINT)}")
        return [*self._complaints.values()]

    def withdraw(self) -> None:
        """Withdraw the study's announcement, because it wants no slots any more."""
        self._studies.withdraw(self.study.template.study)

    def are_gone(self, sent: Sent, now: float, seconds: float) -> bool:
        """Return whether no worker can claim an attempt, because all are quarantined or none was live for `seconds`."""
        name = str(sent.attempt.compute_class)
        seen_at = self._seen_at.get((name, sent.attempt.only_on), -math.inf)
        return name in self._closed or now - max(sent.at, seen_at) > seconds

    def had_free_slot(
        self, compute_class: str, at: float, now: float, seconds: float, *, host: str | None = None, slots: int = 1
    ) -> bool:
        """Return whether a class, or its workers on `host`, has had a free slot for more than `seconds`, counted from
        `at`.

        With `slots` above 1, one worker must have that many free slots. This is known only for a host for which an
        attempt with that many slots is in flight.
        """
        return now - max(at, self._free_since.get((compute_class, host, slots), now)) > seconds

    def _rivals(self, name: str, fellows: Mapping[str, StudyWants], now: float) -> list[tuple[str, float, float]]:
        """Return owner, weight and virtual time of each other study that wants more slots of a class, except studies
        that leave slots free.
        """
        virtual = {study: fellow.turns[name] for study, fellow in fellows.items() if name in fellow.turns}
        if self.had_free_slot(name, -math.inf, now, UNUSED_TURN_SECONDS):
            self._unused[name] = virtual
        unused = self._unused.get(name, {})
        known = [(fellows[study], each) for study, each in virtual.items() if each != unused.get(study)]
        return [(fellow.owner, fellow.weight, each) for fellow, each in known]

    def _note(self, place: _Place, free: int, now: float, slots: int = 1) -> None:
        """Record that a class, or one of its machines, has live workers now, and whether at least `slots` slots are
        free.
        """
        self._seen_at[place] = now
        if free >= slots:
            self._free_since.setdefault((*place, slots), now)
        else:
            self._free_since.pop((*place, slots), None)

    def _note_machines(
        self, known: ComputeClass, workers: Mapping[str, Worker], in_flight: Sequence[Sent], now: float
    ) -> None:
        """Record the free slots of each machine of a class. For attempts that take several slots, record the largest
        number of free slots that one worker of the machine has.
        """
        # Announcements are seconds old, but events have already told which of this study's attempts have started.
        ours: Counter[str] = Counter()
        wide: dict[str | None, set[int]] = defaultdict(set)
        for attempt in (each.attempt for each in in_flight):
            ours[attempt.worker] += attempt.slots if self.study.template.one_worker else 1
            wide[attempt.only_on].add(attempt.slots)
        free: dict[str, list[int]] = {host: [] for host in known.hosts}
        for name, worker in workers.items():
            free[worker.machine.host].append(worker.slots - max(worker.busy, ours[name]))
        for host, each in free.items():
            self._note((known.name, host), sum(each), now)
            for slots in wide[host] - {1}:
                self._note((known.name, host), max(each), now, slots)

    def _is_late(self, now: float) -> bool:
        """Return whether the last `look` is so long ago that announcements of live workers may have expired since."""
        return now - self._looked_at > ANNOUNCE_SECONDS / 2

    def _class(self, name: str, named: Mapping[str, Worker], in_flight: Sequence[Sent]) -> ComputeClass:
        workers = named.values()
        machines = [worker.machine for worker in workers]
        # The slots of a draining or silent worker are no longer announced, but its attempts still take some of them.
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
            allowance=float(hosts.total()),
            silent=sum([each.attempt.slots for each in silent]),
            memory=min([machine.memory for machine in machines]),
            gpu_memory=min([machine.gpu_memory for machine in machines]) if uses_gpus(name) else 0,
            cores=max([machine.cores for machine in machines]),
            hosts=hosts,
            # If a machine's workers use several storages, one worker may not see the files of another.
            storages={host: found.pop() if len(found) == 1 else "" for host, found in storages.items()},
            names=frozenset(named),
            shares_gpus=any(worker.shares_gpus for worker in workers),
            widest=max([worker.slots for worker in workers]) if self.study.template.one_worker else 0,
        )

    def _on_machines(self, known: ComputeClass, named: Mapping[str, Worker]) -> ComputeClass:
        """Return a class with its machines, for studies whose trials take all their slots from one worker."""
        machines = []
        for host in known.hosts:
            here = {name: worker for name, worker in named.items() if worker.machine.host == host}
            by_worker = {name: worker.slots for name, worker in here.items()} if len(here) > 1 else {}
            machines.append(replace(self._class(known.name, here, ()), host=host, by_worker=by_worker))
        return replace(known, machines=tuple(machines))


@dataclass
class _Turn:
    """State of the study in one class, as of the last `look`."""

    #: slot seconds of the attempts that have ended
    ended: float = 0.0
    #: virtual time of the study if it had used no slot seconds
    origin: float = 0.0
    #: the study's weight (`in_all`); 0 before the first `look`
    weight: float = 0.0
    #: True if the study wanted more slots than it had
    is_wanting: bool = False
    #: (weight, virtual time) of each other study that wanted more slots
    others: Sequence[tuple[float, float]] = ()
    #: fractional parts of the studies' shares in slots: first this study's, then those of `others`
    parts: Sequence[float] = (0.0,)
    #: slot seconds by which this study was ahead of the study furthest behind, if it waited and had whole slots of its
    #: own; else None
    lead: float | None = None


class Turns:
    """Virtual times of one study in each class (start-time fair queueing).

    Each study uses the whole slots of its share all the time. The studies use the remaining slots alternately.
    """

    def __init__(self) -> None:
        self._turns: dict[str, _Turn] = defaultdict(_Turn)

    def used(self, sent: Iterable[Sent], now: float) -> float:
        """Return the slot seconds that the study has used in all classes. `sent` are its attempts in flight."""
        return sum([turn.ended for turn in self._turns.values()]) + sum([each.slot_seconds(now) for each in sent])

    def end(self, sent: Sent, now: float, seconds: float | None = None) -> None:
        """Record the slot seconds of an ended attempt. `seconds` is the time that its worker measured."""
        used = sent.slot_seconds(now) if seconds is None else seconds * sent.attempt.slots
        self._turns[str(sent.attempt.compute_class)].ended += max(used, MESSAGE_SECONDS)

    def look(
        self,
        known: ComputeClass,
        others: Sequence[tuple[float, float]],
        sent: Sequence[Sent],
        now: float,
        *,
        is_wanting: bool,
        weight: float,
    ) -> float:
        """Update the state of the class `known`. Return the study's virtual time there.

        `others` has a (weight, virtual time) pair for each other study that wants more slots. `sent` are this study's
        attempts in flight. If its `weight` has changed, its virtual time does not change: slot seconds used so far
        count by the earlier weight.
        """
        turn = self._turns[known.name]
        had_others, turn.others = bool(turn.others), others
        used = sum([each.slot_seconds(now) for each in sent])
        if turn.weight and turn.weight != weight:
            turn.origin += (turn.ended + used) * (1 / turn.weight - 1 / weight)
            if turn.lead is not None:
                turn.lead *= weight / turn.weight
        turn.weight = weight
        if not others:
            turn.lead, turn.is_wanting = None, is_wanting
            return self._virtual(turn, used)
        turn.parts = parts(known.slots, known.share, [each / turn.weight for each, _ in others])
        if not turn.is_wanting:
            turn.origin -= min(0.0, self._lead(turn, used)) / turn.weight
        if not had_others:
            # The other studies start now, so slot seconds that this study used while it was alone do not count.
            turn.origin -= max(0.0, self._lead(turn, used)) / turn.weight
        running = sum(each.attempt.slots for each in sent if each.is_claimed)
        has_own = 0 < math.floor(known.share) >= running
        if turn.lead is not None and has_own:
            # This study waits and uses only whole slots of its own, so its lead must not grow. Otherwise it would be
            # punished for the time that the other studies lose between their trials.
            turn.origin -= max(0.0, self._lead(turn, used) - turn.lead) / turn.weight
        lead = self._lead(turn, used)
        turn.lead = lead if has_own and lead > LEEWAY_SECONDS else None
        turn.is_wanting = is_wanting
        return self._virtual(turn, used)

    def extras(self, sent: Iterable[Sent], now: float) -> dict[str, int]:
        """Return the number of slots that the study may take now beyond the whole slots of its share, by class.

        A class is left out if the study may simply round its share up to the next whole slot there.
        """
        shared = {name: turn for name, turn in self._turns.items() if turn.others}
        used = _slot_seconds(sent if shared else (), now)
        extras = {name: self._extra(turn, used[name]) for name, turn in shared.items()}
        return {name: extra for name, extra in extras.items() if extra is not None}

    def _extra(self, turn: _Turn, used: float) -> int | None:
        if self._lead(turn, used) > LEEWAY_SECONDS:
            return 0
        last = min(self._virtual(turn, used), *(virtual for _, virtual in turn.others))
        beside = [
            part
            for (weight, virtual), part in zip(turn.others, turn.parts[1:], strict=True)
            if weight * (virtual - last) <= NEARLY_SECONDS
        ]
        if len(beside) == len(turn.others):
            return None
        # The slots are divided among the studies that are not ahead. If this is the only such study, it also gets the
        # slots that are free for a moment between trials of the studies ahead.
        left = math.ceil(sum(turn.parts) - ROUNDING) - sum(part > 0 for part in beside)
        return max(left, 0 if beside else 1) or None

    def _virtual(self, turn: _Turn, used: float) -> float:
        """Return the study's virtual time. Its attempts in flight have `used` this many slot seconds."""
        return min(MAX_VIRTUAL, max(0.0, turn.origin + (turn.ended + used) / turn.weight))

    def _lead(self, turn: _Turn, used: float) -> float:
        """Return by how many slot seconds this study is ahead of the other study that is furthest behind.

        The number is negative if this study is behind all others.
        """
        last = min((virtual for _, virtual in turn.others), default=math.inf)
        return turn.weight * (self._virtual(turn, used) - last)


def _slot_seconds(sent: Iterable[Sent], now: float) -> dict[str, float]:
    """Return the slot seconds that attempts in flight have used so far, by class. A class without attempts has 0."""
    used: dict[str, float] = defaultdict(float)
    for each in sent:
        used[str(each.attempt.compute_class)] += each.slot_seconds(now)
    return used


def parts(slots: int, share: float, others: Sequence[float]) -> list[float]:
    """Return the fractional part of each study's share in slots, this study's first.

    `others` are the shares of the other studies that want more slots, as multiples of this study's `share`.
    """
    return [share % 1, *(whole(min(slots, share * other)) % 1 for other in others)]


class Claim(NamedTuple):
    """What a study claims of the slots of a class."""

    #: user who runs the study, "" if unknown
    owner: str
    weight: float
    #: number of slots that it wants
    wanted: float


def entitle(slots: float, own: Claim, others: Sequence[Claim], users: Mapping[str, User]) -> float:
    """Return the number of slots of a class that a study may use, with a fraction.

    Slots are divided first between users, then between the studies of a user. A study may use all that others do not
    want. `users` are those of the policy.
    """
    by_user: dict[str, float] = defaultdict(float)
    for each in others:
        by_user[each.owner] += each.wanted
    by_user.pop(own.owner, None)
    wanted = [(_of(users, name).weight, min(want, _of(users, name).slots or want)) for name, want in by_user.items()]
    part = allow(slots, _of(users, own.owner).weight, wanted)
    return allow(part, own.weight, [(each.weight, each.wanted) for each in others if each.owner == own.owner])


def in_all(studies: Sequence[tuple[str, float]], users: Mapping[str, User]) -> list[float]:
    """Return the weights of studies among all studies that want more slots of a class.

    `studies` has owner and weight of each of them. The studies of a user share his weight by their own weights.
    """
    whole: dict[str, float] = defaultdict(float)
    for owner, weight in studies:
        whole[owner] += weight
    return [_of(users, owner).weight * weight / whole[owner] for owner, weight in studies]


def divide(limit: int, studies: Mapping[str, StudyWants]) -> dict[str, int]:
    """Return how many slots each study of a user gets of the limit of this user: whole numbers, by the weights.

    What is left by rounding goes first to studies that would get none, and they take turns: first those that have used
    least.
    """
    parts = {}
    for key, study in studies.items():
        others = [(each.weight, each.asks) for name, each in studies.items() if name != key]
        parts[key] = min(study.asks, allow(limit, study.weight, others))
    found = {key: math.floor(part) for key, part in parts.items()}
    left = math.floor(whole(sum(parts.values()))) - sum(found.values())
    waiting = [key for key, part in parts.items() if part > found[key]]
    # Only studies that would get no slot take turns: each change divides workers' slots that wide trials need together.
    waiting.sort(key=lambda key: (found[key] > 0, 0 if found[key] else studies[key].spent // TURN_SECONDS, key))
    return found | {key: found[key] + 1 for key in waiting[:left]}


#: stands for a user without an entry in a policy
_ANYBODY = User(key="0" * 64)


def _of(users: Mapping[str, User], name: str) -> User:
    return users.get(name, _ANYBODY)


def allow(slots: float, weight: float, others: Sequence[tuple[float, float]]) -> float:
    """Return the number of slots that a study of `weight` may use. `others` are (weight, wanted slots) pairs.

    Slots are divided by weight. Slots of its part that a study does not want go to the other studies (water filling).
    """
    free, total = float(slots), weight + sum(other for other, _ in others)
    # Begin with the studies that want least relative to their weight: they get all they want, up to their part.
    for other, want in sorted(others, key=lambda pair: pair[1] / pair[0]):
        part = min(want, free * other / total)
        free -= part
        total -= other
    return whole(free)


def whole(slots: float) -> float:
    """Return a number of slots, rounded if it differs from a whole number only by a rounding error."""
    nearest = float(round(slots))
    return nearest if nearest and abs(slots - nearest) < ROUNDING else slots
