"""Fit of trials to the memory of classes, and the retry after an out-of-memory."""

from __future__ import annotations

from collections.abc import Sequence

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Result, Retry, Trial
from shadho_celery.predictors.cost_model import CostModel

#: probability of an out-of-memory above which a trial goes to a larger class at once
TOO_LIKELY = 0.5


class MemoryFit:
    """Classes of one study in the order of their memory."""

    def __init__(self, cost_model: CostModel, expected: Sequence[str]) -> None:
        """Order classes of equal or unknown memory by `expected`, the strongest first."""
        self._model = cost_model
        self._strength = {name: place for place, name in enumerate(expected)}
        self._live: Sequence[ComputeClass] = ()
        #: the classes seen so far, and their names by memory, the smallest first
        self._seen: dict[str, ComputeClass] = {}
        self._order: list[str] = []

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Replace the live classes."""
        self._live = classes
        self._seen |= {known.name: known for known in classes}
        self._order = sorted(self._seen, key=self._size)

    def fits(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return False if the class has too few slots, or likely too little memory and a larger one is wide enough."""
        if trial.slots > compute_class.slots:
            return False
        if not self._larger(compute_class.name, trial.slots):
            return True
        if trial.outgrown and not set(self._upwards(compute_class.name)).isdisjoint(trial.outgrown.split(",")):
            return False
        if self._model.outgrows(trial.subspace, trial.params, compute_class.name, self._order) > TOO_LIKELY:
            return False
        if compute_class.memory >= max(known.memory for known in self._live if known.slots >= trial.slots):
            return True
        alike = [known.name for known in self._live if bool(known.gpu_memory) == bool(compute_class.gpu_memory)]
        needed = self._model.memory(trial.subspace, [trial.params], alike, budget=trial.budget)
        return needed is None or not compute_class.memory or float(needed[0]) <= compute_class.memory

    def retry(self, result: Result, trial: Trial) -> Retry | None:
        """Return the reason to try a trial on a larger class, if it ran out of memory and there is one."""
        if not result.outcome.out_of_memory or result.compute_class is None:
            return None
        self._model.tell_out_of_memory(trial, result.compute_class)
        if not self._larger(result.compute_class, trial.slots):
            return None
        return Retry(reason=f"out of memory on {result.compute_class}", outgrown=result.compute_class)

    def _larger(self, compute_class: str, slots: int) -> list[str]:
        """Return the live classes of so many slots with more memory than this one, which may be gone."""
        wide_enough = {known.name for known in self._live if known.slots >= slots}
        return [name for name in self._upwards(compute_class)[1:] if name in wide_enough]

    def _upwards(self, compute_class: str) -> list[str]:
        """Return the class and all with more memory, live or not; none if it was never seen."""
        return self._order[self._order.index(compute_class) :] if compute_class in self._seen else []

    def _size(self, name: str) -> tuple[int, int, str]:
        return self._seen[name].memory, -self._strength.get(name, len(self._strength)), name
