"""State of a whole fleet at a moment, as its announcements and queues show it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shadho_celery.core.checks import one_line
from shadho_celery.fleet import urls
from shadho_celery.fleet.broker import depths, machine_queue
from shadho_celery.fleet.drains import Drain, Drains
from shadho_celery.fleet.redis import connect, refusals
from shadho_celery.fleet.registry import Keys, Registry, StudyWants, Worker, obeyed_drains, place_of, wanted_slots
from shadho_celery.fleet.signing import Signer


class Use(NamedTuple):
    """Slots of one class in which trials of a study run."""

    #: user who runs the study; "" if it is not known
    owner: str
    study: str
    compute_class: str
    slots: int = 0
    #: money that these slots cost an hour, as far as workers announce prices
    money: float = 0.0


@dataclass(frozen=True, kw_only=True)
class FleetState:
    """Announcements of a fleet's workers and schedulers, and the depths of its queues."""

    #: live workers by name, and below it running studies by key
    workers: Mapping[str, Worker]
    studies: Mapping[str, StudyWants]
    #: number of announcements that are malformed or not signed with this machine's key
    refused: int
    #: by place (CLASS@HOST, see `place_of`), or by name for one worker: the record of a drain; None if Redis has
    #: lost the record
    drained: Mapping[str, Drain | None]
    #: number of waiting messages, by compute class and by name of the queue; None if the queue does not exist
    depths: Mapping[str, Mapping[str, int | None]]
    #: seconds since the latest announcement, by the name of a worker or the key of a study
    ages: Mapping[str, float]

    def wanted(self, *studies: StudyWants) -> Mapping[str, int]:
        """Return the number of slots of each class that these studies want in total; without arguments, all studies."""
        return wanted_slots(studies or self.studies.values(), self.workers.values())

    def uses(self) -> list[Use]:
        """Return which owner's studies use which slots now, sorted."""
        found: dict[tuple[str, str, str], Use] = {}
        for worker in self.workers.values():
            for key, share in worker.studies.items():
                owner = self.studies[key].owner if key in self.studies else ""
                of = owner, share.name or key, worker.compute_class
                before = found.get(of, Use(*of))
                money = before.money + share.slots * (worker.price or 0.0)
                found[of] = before._replace(slots=before.slots + share.slots, money=money)
        return sorted(found.values())

    @property
    def keys(self) -> Sequence[tuple[str, Keys]]:
        """The name of each worker and study, of which several may have the same, with its keys."""
        studies = ((f"study {study.name or key}", study) for key, study in self.studies.items())
        return sorted((*self.workers.items(), *studies), key=lambda each: each[0])

    def waiting(self, name: str) -> int | None:
        """Return the number of messages in the queues of a compute class, or None if no queue of it exists."""
        known = [depth for depth in self.depths[name].values() if depth is not None]
        return sum(known) if known else None


def read_fleet(control: Signer | None = None, *, has_broker: bool = True) -> FleetState:
    """Return the state of the fleet whose URLs are in the environment. Raises ServiceError.

    `control` is the signer of drains, if it differs from the signer of announcements. If `has_broker` is False, the
    depths of queues are None.
    """
    client, signer = connect(urls.url(urls.REDIS)), Signer.configured()
    drains = Drains(client, signer if control is None else control)
    registry, wanting = Registry(client, Worker, signer), Registry(client, StudyWants, signer)
    with refusals():
        workers, studies = registry.living(), wanting.living()
        ages = {**registry.ages(workers), **wanting.ages(studies)}
        obeyed = obeyed_drains(workers)
        drained: dict[str, Drain | None] = {
            place: drain for place, drain in drains.all(obeyed).items() if place in workers or not drain.alone
        }
        for place in sorted({place_of(name) for name, worker in workers.items() if worker.drained} & obeyed.keys()):
            # Without `& obeyed`, a worker that `scale` ends would be included, although only this worker is drained.
            if (latest := drains.latest(place)) is None or latest.sequence < obeyed[place]:
                drained.setdefault(place, None)
    classes = {worker.compute_class for worker in workers.values()}
    classes |= {name for study in studies.values() for name in {**study.wants, **study.wanted_slots}}
    queues = {name: {name} for name in sorted(classes)}
    for worker in workers.values():
        queues[worker.compute_class].add(machine_queue(worker.compute_class, worker.machine.host))
    every = {name for names in queues.values() for name in names}
    waiting = depths(every) if has_broker else dict.fromkeys(every)
    return FleetState(
        workers=workers,
        studies=studies,
        refused=registry.refused + wanting.refused,
        drained=drained,
        depths={name: {each: waiting[each] for each in names} for name, names in queues.items()},
        ages=ages,
    )


def who_knows(processes: Sequence[tuple[str, Keys]]) -> dict[str, dict[str, list[str]]]:
    """Return by fingerprint of a signing key: the processes that sign with it, and those that do not know it."""
    found = dict.fromkeys(each for _, keys in processes for each in (keys.key, *keys.keys) if each)
    return {
        one_line(key, 8): {
            "signs_for": [one_line(name) for name, each in processes if each.key == key],
            "unknown_to": [one_line(name) for name, each in processes if not each.knows(key)],
        }
        for key in found
    }
