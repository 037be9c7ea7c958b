"""Which compute classes have enough memory for a trial, and the retry of a trial that ran out of memory.

Classes are ordered separately by GPU memory and by RAM: a trial that has run out of GPU memory needs a class with
larger GPUs, and the RAM of that class does not matter. As a last resort, if no class with larger GPUs is left, a class
without GPUs takes the trial.

If the number of GPUs of a trial is searched, a class counts as one for each width: on more GPUs of the same size, a
trial has more memory (`CostModel.kind`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace as replace_class

from msgspec.structs import replace

from shadho_celery.core.hardware import ComputeClass, shortages
from shadho_celery.core.trial import WELL, Memory, Result, Retry, Trial
from shadho_celery.objective.call import joined
from shadho_celery.placement.model import CostModel

#: a class counts as too small for a trial if the probability that the trial runs out of memory there is above this
TOO_LIKELY = 0.5


class MemoryFit:
    """The compute classes of one study, ordered once by GPU memory and once by RAM."""

    def __init__(self, cost_model: CostModel, expected: Sequence[str]) -> None:
        """`expected` orders classes of equal or unknown memory: it names classes, the strongest first."""
        self._model = cost_model
        self._strength = {name: place for place, name in enumerate(expected)}
        self._live: Sequence[ComputeClass] = ()
        #: the classes seen so far, by name
        self._seen: dict[str, ComputeClass] = {}
        #: by kind of memory: the classes that have it, the smallest first, each with its place in this order
        self._places: Mapping[Memory, Mapping[str, int]] = {memory: {} for memory in Memory}
        #: by name and room of a live class or machine: what `_kinds` returns
        self._known_kinds: dict[tuple[str, int], dict[int, ComputeClass]] = {}
        #: sentences about classes without GPUs that were tried as the last resort, as keys (the values are None)
        self.notices: dict[str, None] = {}

    def see(self, classes: Sequence[ComputeClass]) -> None:
        """Replace the live classes."""
        self._known_kinds.clear()
        self._live = [kind for known in classes for kind in self._kinds(known).values()]
        self._seen |= {known.name: known for known in self._live}
        with_gpus = [name for name, known in self._seen.items() if known.gpu_memory]
        by_gpu = sorted(with_gpus, key=lambda name: self._size(name, Memory.GPU))
        by_ram = sorted(self._seen, key=lambda name: self._size(name, Memory.HOST))
        orders = ((Memory.GPU, by_gpu), (Memory.HOST, by_ram))
        self._places = {memory: {name: place for place, name in enumerate(order)} for memory, order in orders}

    def fits(self, trial: Trial, compute_class: ComputeClass) -> bool:
        """Return whether a trial may run on a class.

        It may not if the class has too few slots. It may not either if the class probably has too little memory, and
        another class has enough slots and more memory.
        """
        return any(self._fits(trial, kind) for kind in self._kinds(compute_class).values())

    def widths(self, trial: Trial, compute_class: ComputeClass) -> list[int]:
        """Return the widths for which the class has enough slots, and probably enough memory."""
        return [width for width, kind in self._kinds(compute_class).items() if self._fits(trial, kind)]

    def _fits(self, trial: Trial, compute_class: ComputeClass) -> bool:
        if not self._is_wide_enough(trial, compute_class):
            return False
        if len(self._live) == 1:
            # It is the only class, so no class has more memory.
            return True
        classes = self._classes_for(trial)
        if trial.outgrown and all(each.name != compute_class.name for each in classes):
            return False
        if self._gives_way(trial, compute_class, Memory.GPU, classes):
            return False
        if not self._gives_way(trial, compute_class, Memory.HOST, classes):
            return True
        # More RAM helps only on a class whose GPU is large enough. If one class has the larger GPU and another one more
        # RAM, the class with the larger GPU takes the trial.
        large = [each for each in classes if not self._gives_way(trial, each, Memory.GPU, classes)]
        return not self._larger(compute_class, Memory.HOST, large)

    def retry(self, result: Result, trial: Trial) -> Retry | None:
        """Return a `Retry` if a trial ran out of memory and a live class may have enough of it, else None."""
        if result.outcome.out_of_memory is None or result.compute_class is None:
            return None
        name = self._model.kind(result.compute_class, trial.slots)
        memory = self._kind(name, result.outcome.out_of_memory)
        self._model.tell_out_of_memory(trial, name, memory)
        told = [*self._shortages(trial), (name, memory)]
        left = [each for each in self._wide_enough(trial) if not self._is_outgrown(each, told)]
        if not left:
            return None
        reason = f"out of {memory.words} on {name}"
        if any(kind is Memory.GPU for _, kind in told) and not any(each.gpu_memory for each in left):
            others = ", ".join(sorted(each.name for each in left))
            reason += f": no live class has a GPU that could hold them, so {others}, without one, is the last resort"
            self.notices[f"trials run {reason}; a worker with a larger GPU would take them"] = None
        return Retry(reason=reason, outgrown=name, memory=memory)

    def warned(self, result: Result, trial: Trial) -> Result:
        """Return the result, with a warning if its trial succeeded on a class without GPUs that was the last resort."""
        seen = self._seen.get(self._model.kind(str(result.compute_class), trial.slots))
        if result.outcome.state not in WELL or not trial.outgrown or seen is None or seen.gpu_memory:
            return result
        lacking = [name for name, memory in self._shortages(trial) if memory is Memory.GPU]
        if not lacking:
            return result
        said = f"ran on {seen.name}, which has no GPU, after it ran out of GPU memory on {', '.join(lacking)}"
        return replace(result, outcome=replace(result.outcome, warning=joined(result.outcome.warning, said)))

    def _classes_for(self, trial: Trial) -> Sequence[ComputeClass]:
        """Return the live classes with enough slots for a trial. Classes with no more memory than an outgrown class are
        left out, unless no class remains.

        If a trial has run out of GPU memory, classes without GPUs are left out, too, unless no other class remains.
        """
        classes = self._wide_enough(trial)
        if not trial.outgrown:
            return classes
        told = self._shortages(trial)
        classes = [each for each in classes if not self._is_outgrown(each, told)] or classes
        if any(memory is Memory.GPU for _, memory in told):
            return [each for each in classes if each.gpu_memory] or classes
        return classes

    def _gives_way(
        self, trial: Trial, compute_class: ComputeClass, memory: Memory, classes: Sequence[ComputeClass]
    ) -> bool:
        """Return whether the class probably has too little of a kind of memory, and one of `classes` has more of it."""
        larger = self._larger(compute_class, memory, classes)
        if not larger:
            return False
        order, has = [*self._places[memory]], compute_class.bytes_of(memory)
        bound = self._model.bounds[trial.subspace, memory]
        if bound.chance(trial.params, compute_class.name, order) > TOO_LIKELY:
            return True
        if not has or all(each.bytes_of(memory) <= has for each in larger):
            return False
        # A trial takes less RAM on a class with GPUs, so only similar classes are compared.
        width = self._model.split(compute_class.name)[1]
        alike = [
            each.name
            for each in self._live
            if bool(each.gpu_memory) == bool(compute_class.gpu_memory) and self._model.split(each.name)[1] == width
        ]
        needed = self._model.memory(trial.subspace, [trial.params], alike, memory, budget=trial.budget)
        return needed is not None and float(needed[0]) > has

    def _wide_enough(self, trial: Trial) -> list[ComputeClass]:
        return [each for each in self._live if self._is_wide_enough(trial, each)]

    def _is_wide_enough(self, trial: Trial, compute_class: ComputeClass) -> bool:
        return bool(self._model.widths) or trial.slots <= compute_class.room

    def _kinds(self, compute_class: ComputeClass) -> dict[int, ComputeClass]:
        """Return a class by width, under the names of its kinds; the class itself if no widths are searched.

        Widths for which it has no room are left out.
        """
        if not self._model.widths:
            return {1: compute_class}
        name, room = key = compute_class.name, compute_class.room
        if key not in self._known_kinds:
            self._known_kinds[key] = {
                width: replace_class(compute_class, name=self._model.kind(name, width))
                for width in self._model.widths
                if width <= room
            }
        return self._known_kinds[key]

    def _larger(
        self, compute_class: ComputeClass, memory: Memory, classes: Sequence[ComputeClass]
    ) -> list[ComputeClass]:
        """Return those of `classes` with more of a kind of memory than `compute_class`; [] for GPU memory if it has no
        GPU.
        """
        places = self._places[memory]
        own = places.get(compute_class.name, math.inf)
        return [each for each in classes if places.get(each.name, -1) > own]

    def _is_outgrown(self, compute_class: ComputeClass, told: Sequence[tuple[str, Memory]]) -> bool:
        """Return whether the class has no more memory than one of the classes on which the trial ran out of memory.

        `told` has the names of those classes and the kinds of memory.
        """
        orders = [(self._places[memory], name) for name, memory in told]
        return any(places.get(compute_class.name, math.inf) <= places.get(name, -1) for places, name in orders)

    def _shortages(self, trial: Trial) -> list[tuple[str, Memory]]:
        """Return the classes that a trial has outgrown, each with the kind of memory that was too small."""
        told = shortages(trial.outgrown, trial.outgrown_memory)
        return [(name, self._kind(name, memory)) for name, memory in told]

    def _kind(self, name: str, memory: Memory) -> Memory:
        """Return the kind of memory that ran out on a class: RAM if the class has no GPU, even if GPU was reported."""
        return memory if name in self._places[Memory.GPU] or name not in self._seen else Memory.HOST

    def _size(self, name: str, memory: Memory) -> tuple[int, int, str, int]:
        known, width = self._model.split(name)
        # Wider trials have more GPU memory, and take more RAM.
        width = width if memory is Memory.GPU else -width
        return self._seen[name].bytes_of(memory), -self._strength.get(known, len(self._strength)), known, width
