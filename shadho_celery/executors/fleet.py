"""Who serves a study: the live workers, the classes they make up, and what each class has room for."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shadho_celery.executors.in_flight import Sent
from shadho_celery.executors.sharing import allow
from shadho_celery.hardware import ComputeClass, uses_gpus
from shadho_celery.registry import Redis, Registry, able

Facts = Mapping[str, Any]


class Fleet:
    """The workers as they announce themselves, in the eyes of one study."""

    def __init__(self, client: Redis, study: str, module: str, weight: float, fingerprint: str = "") -> None:
        """`module` is the one its workers must have been started with, `weight` its part of the slots.

        `fingerprint` is that of the key they must sign with.
        """
        self._workers = Registry(client, "worker")
        self._studies = Registry(client, "study")
        self._study = study
        self._module = module
        self._weight = weight
        self._fingerprint = fingerprint
        #: what every live worker announces, also those that cannot run this study
        self.announced: Mapping[str, Facts] = {}
        #: names of the workers that may run its trials
        self.able: set[str] = set()
        #: names of those that could and are kept off
        self.kept_off: set[str] = set()
        self.classes: list[ComputeClass] = []
        #: classes all of whose workers are kept off
        self._shut: set[str] = set()
        #: by class, the moment since which it has had a free slot, and at which it was last seen
        self._free_since: dict[str, float] = {}
        self._seen_at: dict[str, float] = {}

    def look(self, now: float, sent: Iterable[Sent], fenced: set[str]) -> None:
        """See who lives, and let the other studies know what this one wants, with `sent` in flight."""
        self.announced = self._workers.living()
        ours = able(self.announced, self._module, self._fingerprint)
        self.kept_off = {name for name, facts in ours.items() if facts.get("held") or name in fenced}
        self.able = ours.keys() - self.kept_off
        by_class: dict[str, list[Facts]] = defaultdict(list)
        for name in sorted(self.able):
            by_class[ours[name]["compute_class"]].append(ours[name])
        in_flight: dict[str, list[Sent]] = defaultdict(list)
        for each in sent:
            in_flight[each.compute_class].append(each)
        is_sending = bool(in_flight)
        self._shut = {ours[name]["compute_class"] for name in self.kept_off} - by_class.keys()
        fellows = self._studies.living()
        fellows.pop(self._study, None)
        self.classes, wants = [], {}
        for name, workers in by_class.items():
            others = [(fellow["weight"], fellow["wants"].get(name, 0)) for fellow in fellows.values()]
            known = self._class(name, workers, in_flight[name], others)
            self.classes.append(known)
            taken = sum(each.slots for each in in_flight[name])
            has_room = is_sending and taken < math.ceil(known.share)
            wants[name] = taken + 1 if has_room else known.slots
            self._seen_at[name] = now
            if known.busy < known.slots:
                self._free_since.setdefault(name, now)
            else:
                self._free_since.pop(name, None)
        self._studies.announce(self._study, {"weight": self._weight, "wants": wants})

    def withdraw(self) -> None:
        """Want nothing any more."""
        self._studies.withdraw(self._study)

    def is_deserted(self, one: Sent, now: float, seconds: float) -> bool:
        """Whether an attempt's class has no worker: all of them kept off, or none seen for so many seconds."""
        return (
            one.compute_class in self._shut
            or now - max(one.at, self._seen_at.get(one.compute_class, -math.inf)) > seconds
        )

    def has_waited(self, compute_class: str, at: float, now: float, seconds: float) -> bool:
        """Whether a class has had a free slot for so many seconds since the moment `at`."""
        return now - max(at, self._free_since.get(compute_class, now)) > seconds

    def _class(
        self, name: str, workers: Sequence[Facts], in_flight: Sequence[Sent], others: Sequence[tuple[float, float]]
    ) -> ComputeClass:
        slots = sum(facts["slots"] for facts in workers)
        machines = [facts["machine"] for facts in workers]
        live = {"", *self.announced}
        hosts: Counter[str] = Counter()
        for facts in workers:
            hosts[facts["machine"].get("host", "")] += facts["slots"]
        return ComputeClass(
            name=name,
            slots=slots,
            busy=sum(facts["busy"] for facts in workers),
            workers=len(workers),
            allowance=allow(slots, self._weight, others),
            stranded=sum(each.claimed and each.worker not in live for each in in_flight),
            memory=min(_memory(name, machine) for machine in machines),
            gpu_memory=min(machine["gpu_memory"] for machine in machines) if uses_gpus(name) else 0,
            cores=max(machine["cores"] for machine in machines),
            hosts=hosts,
        )


def _memory(compute_class: str, machine: Facts) -> int:
    """Bytes that a trial of the class may use on an announced machine: of its smallest GPU, else of its RAM."""
    of_gpu = machine["gpu_memory"] if uses_gpus(compute_class) else 0
    return int(of_gpu or machine["memory"])
