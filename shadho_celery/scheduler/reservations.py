"""Free slots of each class, and reservations: slots kept free for a trial that takes several, all or none."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.study.study import Study


class Reservations:
    """Slots of each class that one study may fill.

    A class with too few free slots for a trial is reserved for it: nothing else is sent there until they are free.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        #: class -> number of the trial that it is reserved for
        self._reserved: dict[str, int] = {}

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Drop the reservations of classes that are gone or too narrow, and those of trials that wait no more."""
        slots = {compute_class.name: compute_class.slots for compute_class in classes}
        for name, number in list(self._reserved.items()):
            trial = self._study.trial(number)
            if trial.state is not TrialState.WAITING or trial.slots > slots.get(name, 0):
                del self._reserved[name]

    def free(self, compute_class: ComputeClass, ahead: int = 0) -> int:
        """Return the slots of a class that the study may fill, with `ahead` places in the queue; below 0: too many."""
        taken = self._study.taken(compute_class.name)
        return math.ceil(compute_class.share) + ahead + compute_class.silent - taken

    def is_reserved(self, compute_class: ComputeClass) -> bool:
        """Return whether the class keeps its slots for one trial."""
        return compute_class.name in self._reserved

    def may_take(self, compute_class: ComputeClass, trial: Trial) -> bool:
        """Return whether a class may take a waiting trial: not while it, or another class for it, is reserved."""
        if compute_class.name in self._reserved:
            return self._reserved[compute_class.name] == trial.number
        return trial.number not in self._reserved.values() or self.may_start(trial, compute_class)

    def may_start(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return whether the class has all the slots that the trial takes; one of a single slot may wait in the queue.

        One that is wider than the study's part beside other studies goes when the slots are free and none is ours.
        """
        if trial.slots == 1 or trial.slots <= self.free(compute_class):
            return True
        is_alone = self._study.taken(compute_class.name) == 0
        return is_alone and trial.slots <= compute_class.slots - compute_class.busy

    def reserve(self, compute_class: ComputeClass, trial: Trial) -> None:
        """Send nothing else to the class until the trial may start."""
        self._reserved[compute_class.name] = trial.number

    def release(self, compute_class: ComputeClass) -> None:
        """End the class's reservation: its trial is sent."""
        self._reserved.pop(compute_class.name, None)
