"""Which class has the memory for which trial, as far as it is known, and where to go from one that had not."""

from __future__ import annotations

from collections.abc import Sequence

from shadho_celery.cost_model import CostModel
from shadho_celery.hardware import ComputeClass
from shadho_celery.trial import Event, Lost, Result, Trial

#: the chance of running out of memory with which a trial is sent to a larger class at once
TOO_LIKELY = 0.5


class Capacity:
    """The classes of one study in the order of their memory."""

    def __init__(self, cost_model: CostModel, expected: Sequence[str]) -> None:
        """`expected` orders classes of equal or unknown memory, the strongest first."""
        self._model = cost_model
        self._strength = {name: place for place, name in enumerate(expected)}
        self._live: Sequence[ComputeClass] = ()
        #: the classes seen so far, and their names by memory, the smallest first
        self._seen: dict[str, ComputeClass] = {}
        self._order: list[str] = []

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """These live now."""
        self._live = classes
        self._seen |= {known.name: known for known in classes}
        self._order = sorted(self._seen, key=self._size)

    def fits(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """False where the class has too few slots, or will have too little memory and a larger class lives."""
        if trial.slots > compute_class.slots:
            return False
        larger = self._larger(compute_class.name)
        if not larger:
            return True
        if trial.outgrown and not {compute_class.name, *larger}.isdisjoint(trial.outgrown.split(",")):
            return False
        if self._model.outgrows(trial.subspace, trial.params, compute_class.name, self._order) > TOO_LIKELY:
            return False
        if compute_class.memory >= max(known.memory for known in self._live):
            return True
        alike = [known.name for known in self._live if bool(known.gpu_memory) == bool(compute_class.gpu_memory)]
        needed = self._model.memory(trial.subspace, [trial.params], alike, budget=trial.budget)
        return needed is None or not compute_class.memory or float(needed[0]) <= compute_class.memory

    def escalated(self, event: Event, trial: Trial) -> Event:
        """The event, or the loss of its attempt where the trial ran out of memory and a larger class lives."""
        if not isinstance(event, Result) or not event.out_of_memory or event.compute_class is None:
            return event
        self._model.tell_out_of_memory(trial, event.compute_class)
        if not self._larger(event.compute_class):
            return event
        return Lost(
            number=event.number,
            attempt=event.attempt,
            reason=f"out of memory on {event.compute_class}",
            claimed=False,
            outgrown=event.compute_class,
        )

    def _larger(self, compute_class: str) -> list[str]:
        """Live classes with more memory than this one, which may be gone."""
        if compute_class not in self._seen:
            return []
        live = {known.name for known in self._live}
        return [name for name in self._order[self._order.index(compute_class) + 1 :] if name in live]

    def _size(self, name: str) -> tuple[int, int, str]:
        return self._seen[name].memory, -self._strength.get(name, len(self._strength)), name
