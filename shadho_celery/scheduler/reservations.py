"""Free slots of a study, and classes or machines that are reserved until they have the slots for a wide trial."""

from __future__ import annotations

from collections.abc import Sequence

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.placement.base import Fits
from shadho_celery.study.state import StudyState


class Reservations:
    """Free slots of each class for one study, and reservations for wide trials.

    A class with too few free slots for a trial is reserved for it: nothing else is sent there until they are free. If a
    trial takes only slots of one worker, this holds for one machine of the class instead, and the others go on.
    """

    def __init__(self, study: StudyState, *, is_searched: bool = False) -> None:
        """With `is_searched`, the width of a reserved trial was chosen for its class, and may be poor elsewhere."""
        self._study = study
        self._is_searched = is_searched
        #: by class, and machine if it is one: the number of the trial for which it is reserved
        self.reserved: dict[tuple[str, str | None], int] = {}

    @property
    def names(self) -> set[str]:
        """Names of the classes that are reserved, or that have a reserved machine."""
        return {name for name, _ in self.reserved}

    def see(self, classes: Sequence[ComputeClass], fits: Fits = lambda trial, place: True) -> None:
        """Drop the reservations that are out of date.

        The class is gone, it has too few slots for the trial, the trial no longer `fits`, or it no longer waits.
        """
        places = {place.place: place for compute_class in classes for place in compute_class.places}
        for key, number in list(self.reserved.items()):
            trial, place = self._study.find_open(number), places.get(key)
            is_waiting = trial is not None and trial.state is TrialState.WAITING
            if trial is None or place is None or not is_waiting or trial.slots > place.room or not fits(trial, place):
                del self.reserved[key]

    def free(self, compute_class: ComputeClass, ahead: int = 0) -> int:
        """Return the free slots of a class plus `ahead` places in its queue. Below 0 if too many are used."""
        free = compute_class.limit + ahead + compute_class.silent - self._study.taken(compute_class.name)
        if compute_class.host is None:
            return free
        taken = self._study.taken_on(compute_class.name)
        # Otherwise the other machines would use up the study's share, and those that are reserved earlier would wait.
        for (name, host), number in self.reserved.items():
            if (name, host) == compute_class.place:
                break
            trial = self._study.find_open(number)
            if name == compute_class.name and trial is not None:
                free -= max(0, trial.slots - taken[host])
        return min(free, compute_class.slots - taken[compute_class.host])

    def may_take(self, compute_class: ComputeClass, trial: Trial) -> bool:
        """Return True unless the class is reserved for another trial.

        A trial for which another class is reserved may only start at once, and not at all if its width was searched.
        """
        if compute_class.place in self.reserved:
            return self.reserved[compute_class.place] == trial.number
        kept = [name for (name, _), number in self.reserved.items() if number == trial.number]
        if kept and self._is_searched and compute_class.name not in kept:
            return False
        return not kept or self.may_start(trial, compute_class)

    def may_start(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return True if the class has enough free slots. A trial of a single slot may wait in the queue.

        A trial wider than the study's share of the class starts when enough slots are free and the study uses none.
        """
        may_queue = trial.slots == 1 and compute_class.host is None
        if may_queue or trial.slots <= min(self.free(compute_class), self._together(compute_class)):
            return True
        is_alone = self._study.taken(compute_class.name) == 0
        return is_alone and trial.slots <= compute_class.slots - compute_class.busy

    def best(self, trial: Trial, machines: Sequence[ComputeClass], home: str | None) -> ComputeClass:
        """Return the machine of a class that a trial takes: its `home`, or the one where it leaves fewest slots free.

        If it cannot start on any, return the one that has most slots free, to be reserved.
        """
        free = {each.host: min(self.free(each), self._together(each)) for each in machines}
        open_ = [each for each in machines if self.may_take(each, trial)]
        ready = [each for each in open_ if self.may_start(trial, each)]
        if ready:
            return min(ready, key=lambda each: (each.host != home, free[each.host], each.busy))
        return max(open_, key=lambda each: (free[each.host], -each.busy))

    def _together(self, compute_class: ComputeClass) -> int:
        """Return the most free slots of one worker of a machine, or those of the class if it is none."""
        left = {**compute_class.by_worker} or {"": compute_class.slots}
        unclaimed = []
        for attempt in self._study.attempts if compute_class.by_worker else ():
            if attempt.compute_class == compute_class.name and attempt.worker in left:
                left[attempt.worker] -= attempt.slots
            elif (attempt.compute_class, attempt.only_on) == compute_class.place and not attempt.worker:
                unclaimed.append(attempt.slots)
        # Workers without the slots leave an attempt to one that has them.
        for slots in sorted(unclaimed, reverse=True):
            least = min((free for free in left.values() if free >= slots), default=max(left.values()))
            left[next(name for name, free in left.items() if free == least)] -= slots
        return max(left.values())
