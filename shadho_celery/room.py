"""The room that a study has in each class: free slots, and slots that are gathered for a trial that takes several."""

from __future__ import annotations

import math
from collections.abc import Sequence

from shadho_celery.hardware import ComputeClass
from shadho_celery.study import Study
from shadho_celery.trial import Trial, TrialState


class Room:
    """Says whether a class has the slots that a trial takes, all or none.

    A class that has too few of them gathers them: nothing else is sent there until they are free.
    """

    def __init__(self, study: Study) -> None:
        self._study = study
        #: class -> number of the trial that it gathers slots for
        self._gathering: dict[str, int] = {}

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """These live now; one that has gone or is too narrow, or whose trial waits no more, gathers no slots."""
        slots = {compute_class.name: compute_class.slots for compute_class in classes}
        for name, number in list(self._gathering.items()):
            trial = self._study.trial(number)
            if trial.state is not TrialState.WAITING or trial.slots > slots.get(name, 0):
                del self._gathering[name]

    def free(self, compute_class: ComputeClass, ahead: int = 0) -> int:
        """Slots of a class that the study may fill, with `ahead` places in the queue; below 0 where it has too many."""
        taken = self._study.taken(compute_class.name)
        return math.ceil(compute_class.share) + ahead + compute_class.stranded - taken

    def gathers(self, compute_class: ComputeClass) -> bool:
        """Whether the class keeps its slots for one trial."""
        return compute_class.name in self._gathering

    def is_left_to(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Whether a trial that waits may go to a class: not while the class, or another one, gathers slots for it."""
        if compute_class.name in self._gathering:
            return self._gathering[compute_class.name] == trial.number
        return trial.number not in self._gathering.values() or self.may_start(trial, compute_class)

    def may_start(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Whether the class has all the slots that the trial takes; a trial of one slot may wait in the queue.

        One that is wider than the study's part beside other studies goes when the slots are free and none is ours.
        """
        if trial.slots == 1 or trial.slots <= self.free(compute_class):
            return True
        is_alone = self._study.taken(compute_class.name) == 0
        return is_alone and trial.slots <= compute_class.slots - compute_class.busy

    def gather(self, trial: Trial, compute_class: ComputeClass) -> None:
        """Send nothing else to the class until the trial may start."""
        self._gathering[compute_class.name] = trial.number

    def stop_gathering(self, compute_class: ComputeClass) -> None:
        """The trial is sent to the class."""
        self._gathering.pop(compute_class.name, None)
