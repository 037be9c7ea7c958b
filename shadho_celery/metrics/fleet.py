"""Families of metrics of a whole fleet, and the addresses of the metrics of its runs and workers."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from shadho_celery.core.checks import one_line
from shadho_celery.core.system import Outage
from shadho_celery.errors import ShadhoError
from shadho_celery.fleet.broker import depths
from shadho_celery.fleet.registry import Worker
from shadho_celery.fleet.state import FleetState, read_fleet
from shadho_celery.metrics.server import Collector, Family, Kept, Samples

if TYPE_CHECKING:
    from prometheus_client import Metric

T = TypeVar("T")

#: seconds after which announcements, and numbers of messages, are read again
LOOK_SECONDS, QUEUES_SECONDS = 1.0, 5.0

#: seconds after which a state that could not be read again is no longer shown
MOST_SECONDS = 20.0

#: maximum number of queues whose messages are counted, because each count is a request to the broker. The queues of
#: whole classes come first
MOST_QUEUES = 100


@dataclass(frozen=True)
class View:
    """A fleet at a moment."""

    #: its announcements; None if Redis does not answer
    state: FleetState | None
    #: number of waiting messages by class; None if the broker does not answer
    queues: Mapping[str, int] | None


class Exporter:
    """The metrics of one fleet, whose URLs are in the environment. It is the collector for prometheus_client.

    Any thread may call the methods. They wait a few seconds for servers that hang, and raise no ShadhoError.
    """

    def __init__(self, name: str, say: Callable[[str], None]) -> None:
        """`name` is a label of all samples. `say` is called with a line when a server stops or resumes to answer."""
        self._name, self._say = name, say
        look = partial(self._asked, Outage("Redis"), partial(read_fleet, has_broker=False))
        self._state = Kept(look, LOOK_SECONDS, MOST_SECONDS)
        self._queues = Kept(partial(self._asked, Outage("the broker"), self._depths), QUEUES_SECONDS, MOST_SECONDS)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current samples."""
        state = self._state.get()
        view = View(state, None if state is None else self._queues.get())
        yield from Collector(FAMILIES, view, {"fleet": self._name}).collect()

    def targets(self) -> list[dict[str, Any]] | None:
        """Return the addresses of the metrics of all runs and workers, in the format of Prometheus's http_sd_configs.

        Return None if Redis does not answer. Prometheus then uses the previous addresses.
        """
        if (state := self._state.get()) is None:
            return None
        found = {
            "worker": {each.metrics for each in state.workers.values()},
            "run": {each.metrics for each in state.studies.values()},
        }
        return [
            {"targets": sorted(places - {""}), "labels": {"fleet": self._name, "role": role}}
            for role, places in found.items()
        ]

    def _depths(self) -> Mapping[str, int]:
        """Return the number of messages that wait in the queues of each class. Raises ServiceError."""
        state = self._state.get()
        queues = [(name, of) for of, names in state.depths.items() for name in names] if state is not None else []
        asked = dict(sorted(queues, key=lambda each: (each[0] != each[1], each))[:MOST_QUEUES])
        found = Counter[str]()
        for name, count in depths(asked).items():
            if count is not None:
                found[asked[name]] += count
        return found

    def _asked(self, server: Outage, ask: Callable[[], T]) -> T | None:
        """Return the result of `ask`, or None if the server does not answer, or the file of the key cannot be read."""
        try:
            found, trouble = ask(), None
        except ShadhoError as error:
            found, trouble = None, f"Warning: {one_line(error, 300)}"
        if (line := server.see(trouble, time.monotonic())) is not None:
            self._say(line)
        return found


def _sum(read: Callable[[Worker], Samples]) -> Callable[[FleetState], Samples]:
    """Return a function that adds up samples of all workers."""

    def samples(state: FleetState) -> Samples:
        found: Counter[tuple[str, ...]] = Counter()
        for worker in state.workers.values():
            found.update(read(worker))
        return found

    return samples


def _of_gpus(name: str) -> Callable[[FleetState], Samples]:
    """Return a function that reads a fact of each GPU (`GpuUsage`)."""
    return lambda state: {
        (worker.machine.host, gpu): fact
        for worker in state.workers.values()
        for gpu, each in worker.usage.gpus.items()
        if (fact := getattr(each, name)) is not None
    }


def _of_machines(name: str) -> Callable[[FleetState], Samples]:
    """Return a function that reads a fact of each machine (`Usage`). All workers of a machine announce the same."""
    return lambda state: {
        (worker.machine.host,): fact
        for worker in state.workers.values()
        if (fact := getattr(worker.usage, name)) is not None
    }


def _money(worker: Worker) -> Samples:
    price, busy = worker.price or 0.0, min(worker.busy, worker.slots)
    found = {"busy": price * busy, "idle": price * (worker.slots - busy)}
    return {(worker.compute_class, use): money for use, money in found.items() if worker.price is not None}


def _trials(state: FleetState) -> Samples:
    found: Counter[tuple[str, ...]] = Counter()
    for key, study in state.studies.items():
        for name in ("running", "waiting", "ended") if study.progress is not None else ():
            found[study.owner, study.name or key, name] += getattr(study.progress, name)
    return found


def _family(name: str, labels: str, help_text: str, read: Callable[[FleetState], Samples]) -> Family[View]:
    """Return a family that is read from announcements. It has no samples while Redis does not answer."""
    of = labels.split()
    return Family(name, help_text, labels=of, read=lambda view: {} if view.state is None else read(view.state))


FAMILIES: Sequence[Family[View]] = [
    Family(
        "shadho_fleet_up",
        "1 if the server, redis or broker, answers. The broker is asked only if Redis answers.",
        labels=("server",),
        read=lambda view: {("redis",): float(view.state is not None), ("broker",): float(view.queues is not None)},
    ),
    Family(
        "shadho_fleet_queue_messages",
        f"Number of messages that wait in the queues of a compute class; at most {MOST_QUEUES} queues are counted.",
        labels=("class",),
        read=lambda view: {(name,): count for name, count in (view.queues or {}).items()},
    ),
    _family(
        "shadho_fleet_workers",
        "class state",
        "Number of live workers by compute class and state: serving, draining, drained or quarantined.",
        _sum(lambda worker: {(worker.compute_class, worker.state): 1}),
    ),
    _family(
        "shadho_fleet_slots",
        "class",
        "Number of slots of the live workers by compute class.",
        _sum(lambda worker: {(worker.compute_class,): worker.slots}),
    ),
    _family(
        "shadho_fleet_busy_slots",
        "class",
        "Number of these slots that run trials.",
        _sum(lambda worker: {(worker.compute_class,): worker.busy}),
    ),
    _family(
        "shadho_fleet_money_per_hour",
        "class use",
        "Money that the slots of the live workers cost an hour, by compute class and use: busy or idle.",
        _sum(_money),
    ),
    _family(
        "shadho_fleet_study_slots",
        "owner study class",
        "Number of slots that run trials of a study, by owner, study and compute class.",
        lambda state: {(each.owner, each.study, each.compute_class): each.slots for each in state.uses()},
    ),
    _family(
        "shadho_fleet_trials",
        "owner study state",
        "Number of trials of the running studies by owner, study and state: running, waiting or ended.",
        _trials,
    ),
    _family(
        "shadho_fleet_wanted_slots",
        "class",
        "Number of slots that all studies together want of a compute class.",
        lambda state: {(name,): count for name, count in state.wanted().items()},
    ),
    _family(
        "shadho_fleet_refused_announcements",
        "",
        "Number of announcements that are malformed or not signed with the exporter's key.",
        lambda state: {(): state.refused},
    ),
    _family("shadho_fleet_machine_load", "host", "Processes that run or wait to run.", _of_machines("load")),
    _family("shadho_fleet_machine_memory", "host", "Part of the RAM that is in use.", _of_machines("memory")),
    _family("shadho_fleet_gpu_busy", "host gpu", "Part of a second in which a GPU was busy.", _of_gpus("busy")),
    _family("shadho_fleet_gpu_memory", "host gpu", "Part of a GPU's memory that is in use.", _of_gpus("memory")),
]
